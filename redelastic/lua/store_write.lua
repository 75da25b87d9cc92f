-- write: the start of every verb that writes to a store, after store.lua: it finds out whether this request has already had
-- its effect and, if not, whether it may have it.
--
-- ARGV 3 sender, 4 request: each sender numbers its requests from 1, in order
local SENDER, REQUEST = ARGV[3], ARGV[4]

local last = redis.call('HGET', DEDUP, SENDER) or ''
local number, long = string.match(last, '^(%d+)(@?)')
local ahead = REQUEST - (number or 0) -- no number: redelastic did not write it
local seen, reply = ahead == 0, nil
if ahead < 0 then -- its sender already has the answer
  error('a late copy of request ' .. REQUEST .. ', after request ' .. number)
elseif seen then
  reply = long == '@' and redis.call('HGET', DEDUP, SENDER .. '@') or string.match(last, ' (.*)$')
elseif superseded() then -- I4: a node that was cut off while its run went on writes nothing
  error('FENCED round ' .. EPOCH .. ' is over: the run is at epoch ' .. redis.call('HGET', RUN, 'epoch'))
elseif long == '@' then
  redis.call('HDEL', DEDUP, SENDER .. '@')
end

-- Records that the request has had its effect, and its reply, which may be nil. The keys' time to live is renewed once a
-- hundredth of it is gone: doing so at each write would cost as much as the write, in replicas too. If one of them is
-- new, so is the other, or `data` has just been recreated.
local function finish(reply)
  local long = reply and #reply > 256
  redis.call('HSET', DEDUP, SENDER, REQUEST .. (long and '@' or reply and ' ' .. reply or ''))
  if long then
    redis.call('HSET', DEDUP, SENDER .. '@', reply)
  end
  if redis.call('PTTL', DATA) < 0.99 * TTL then
    redis.call('PEXPIRE', DATA, TTL)
    redis.call('PEXPIRE', DEDUP, TTL)
  end
end

-- Wakes all callers blocked on `key`, and sends its present value along, if that is small; `stream` is the key's wake-up
-- stream. Without a value, the woken callers read it.
local function fire(key, stream, value)
  if redis.call('HDEL', WAITS, key) == 1 then
    if value and #value <= 4096 then
      redis.call('XADD', stream, 'MAXLEN', 1, '*', 'value', value)
    else
      redis.call('XADD', stream, 'MAXLEN', 1, '*', 'set', 1)
    end
    redis.call('PEXPIRE', stream, 60000)
  end
end
