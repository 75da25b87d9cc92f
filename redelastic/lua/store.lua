-- store: what every verb of a store begins with.
--
-- KEYS 1 data (hash)     key -> value
--      2 waits (hash)    key -> 1 while somebody may be blocked on it
--      3 once (hash)     sender -> "request reply": the last effect of each sender, for a request sent again (I8)
--      4 run (hash), 5 members (set) of the run whose round the store belongs to; unused where it belongs to none
-- ARGV 1 epoch of that round, '' where there is none, 2 ttl (ms)
local DATA, WAITS, ONCE, RUN, MEMBERS = unpack(KEYS, 1, 5)
local EPOCH, TTL = ARGV[1], ARGV[2]

-- A round is over for its store once a later one is complete, or one of its members cannot answer any more.
local function superseded()
  local epoch = EPOCH ~= '' and redis.call('HGET', RUN, 'epoch')
  return epoch and epoch ~= EPOCH
end

local function broken()
  return superseded() or EPOCH ~= '' and redis.call('SCARD', MEMBERS) < tonumber(redis.call('HGET', RUN, 'size') or 0)
end

-- I4: a node that was cut off while its run went on writes nothing.
local function fence()
  if superseded() then
    error('FENCED round ' .. EPOCH .. ' is over: the run is at epoch ' .. redis.call('HGET', RUN, 'epoch'))
  end
end

-- Wakes whoever is blocked on `key`; `stream` is the key's wake-up stream.
local function fire(key, stream)
  if redis.call('HDEL', WAITS, key) == 1 then
    redis.call('XADD', stream, 'MAXLEN', 1, '*', 'set', 1)
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
  local last = redis.call('HGET', ONCE, sender) or '0'
  local at = string.find(last, ' ', 1, true) or #last + 1
  local number = tonumber(string.sub(last, 1, at - 1)) or 0
  if number > tonumber(request) then
    error('a late copy of request ' .. request .. ', after request ' .. number)
  end
  return number == tonumber(request), at <= #last and string.sub(last, at + 1)
end

-- `reply` may be nil: nothing.
local function remember(sender, request, reply)
  redis.call('HSET', ONCE, sender, request .. (reply and ' ' .. reply or ''))
end
