-- write: the start of every verb that writes to a store, after store.lua: it finds out whether this request has already had
-- its effect and, if not, whether it may have it.
--
-- KEYS 5 dedup (string): "request" or "request reply", the last effect of the sender, for a request sent again (I8)
-- ARGV 3 request: each sender numbers its requests from 1, in order, 4 how long a copy of it may still come (ms)
local DEDUP = KEYS[5]
local REQUEST, REPEATABLE = ARGV[3], ARGV[4]

local number, kind, text = string.match(redis.call('GET', DEDUP) or '', '^(%d+)(.?)(.*)$')
local ahead = REQUEST - (number or 0) -- no number: redelastic did not write it
local seen, reply = ahead == 0, nil
if ahead < 0 then -- its sender already has the answer
  error('a late copy of request ' .. REQUEST .. ', after request ' .. number)
elseif seen then
  reply = kind == ' ' and text or nil
elseif superseded() then -- I4: a node that was cut off while its run went on writes nothing
  error('FENCED round ' .. EPOCH .. ' is over: the run is at epoch ' .. redis.call('HGET', RUN, 'epoch'))
end

-- Records that the request has had its effect, and its reply, which may be nil. The store's time to live is renewed once a
-- hundredth of it is gone: doing so at each write would cost as much as the write, in replicas too. That of a round that all
-- members have left is not: join.lua has shortened it.
local function finish(reply)
  redis.call('SET', DEDUP, reply and REQUEST .. ' ' .. reply or REQUEST, 'PX', REPEATABLE)
  local left = redis.call('PTTL', DATA)
  if left < 0.99 * TTL and (left < 0 or EPOCH == '' or redis.call('SCARD', MEMBERS) > 0) then
    redis.call('PEXPIRE', DATA, TTL)
  end
end

-- Wakes all callers blocked on `key`, and sends its present value along, if that is small; `stream` is the key's wake-up
-- stream. Without a value, the woken callers read it.
local function fire(key, stream, value)
  if redis.call('ZREM', WAITS, key) == 1 then
    if value and #value <= 4096 then
      redis.call('XADD', stream, 'MAXLEN', 1, '*', 'value', value)
    else
      redis.call('XADD', stream, 'MAXLEN', 1, '*', 'set', 1)
    end
    redis.call('PEXPIRE', stream, 60000)
  end
end
