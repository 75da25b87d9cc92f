-- store: what every verb of a store begins with.
--
-- KEYS 1 data (hash)     key -> value
--      2 waits (hash)    key -> 1 while somebody may be blocked on it
--      3 once (hash)     client -> "request reply": the last effect of each client, for a request sent again (I8)
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

-- The reply to this very request, if its effect is already there.
local function done(client, request)
  local last = redis.call('HGET', ONCE, client)
  local at = last and string.find(last, ' ', 1, true)
  return at and string.sub(last, 1, at - 1) == request and string.sub(last, at + 1)
end

local function remember(client, request, reply)
  redis.call('HSET', ONCE, client, request .. ' ' .. reply)
end
