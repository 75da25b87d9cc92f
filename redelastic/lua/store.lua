-- store: what every verb of a store begins with.
--
-- KEYS 1 data (hash)     key -> value
--      2 waits (hash)    key -> 1 while somebody may be blocked on it
--      3 once (hash)     sender -> "request reply": the last effect of each sender, for a request sent again (I8); of a long
--                        reply only "request@", and the reply in a field of its own, which not every request reads
--      4 run (hash), 5 members (set) of the run whose round the store belongs to; unused where it belongs to none
-- ARGV 1 epoch of that round, '' where there is none, 2 ttl (ms)
local DATA, WAITS, ONCE, RUN, MEMBERS = unpack(KEYS, 1, 5)
local EPOCH, TTL = ARGV[1], ARGV[2]

-- A round is over for its store once a later one is complete, or one of its members cannot answer any more. Of a round
-- that is being put back after a loss of data, not all members have said yet that they are there (restore.lua).
local function superseded()
  local epoch = EPOCH ~= '' and redis.call('HGET', RUN, 'epoch')
  return epoch and tonumber(epoch) > tonumber(EPOCH)
end

local function broken()
  if superseded() then
    return true
  end
  local run = EPOCH ~= '' and redis.call('HMGET', RUN, 'epoch', 'size', 'restoring')
  return run and run[1] == EPOCH and not run[3] and redis.call('SCARD', MEMBERS) < tonumber(run[2])
end

-- I4: a node that was cut off while its run went on writes nothing.
local function fence()
  if superseded() then
    error('FENCED round ' .. EPOCH .. ' is over: the run is at epoch ' .. redis.call('HGET', RUN, 'epoch'))
  end
end

-- Wakes whoever is blocked on `key`, and tells a small value at once; `stream` is the key's wake-up stream.
local function fire(key, stream)
  if redis.call('HDEL', WAITS, key) == 1 then
    local value = redis.call('HGET', DATA, key)
    if value and #value <= 4096 then
      redis.call('XADD', stream, 'MAXLEN', 1, '*', 'value', value)
    else
      redis.call('XADD', stream, 'MAXLEN', 1, '*', 'set', 1)
    end
    redis.call('PEXPIRE', stream, 60000)
  end
end

local function touch(...)
  for _, key in ipairs({ DATA, ONCE, ... }) do
    redis.call('PEXPIRE', key, TTL)
  end
end

-- Whether the effect of this very request is already there, and the reply to it. Senders number their requests: a late
-- copy of one before the last, which somebody has long had an answer to, is refused.
local function done(sender, request)
  local number, kind, reply = string.match(redis.call('HGET', ONCE, sender) or '', '^(%d+)([ @]?)(.*)$')
  number = tonumber(number) or 0
  if number > tonumber(request) then
    error('a late copy of request ' .. request .. ', after request ' .. number)
  elseif number < tonumber(request) then
    if kind == '@' then
      redis.call('HDEL', ONCE, sender .. '@')
    end
    return false
  end
  return true, kind == '@' and redis.call('HGET', ONCE, sender .. '@') or kind == ' ' and reply
end

-- `reply` may be nil: nothing.
local function remember(sender, request, reply)
  local long = reply and #reply > 256
  redis.call('HSET', ONCE, sender, request .. (long and '@' or reply and ' ' .. reply or ''))
  if long then
    redis.call('HSET', ONCE, sender .. '@', reply)
  end
end
