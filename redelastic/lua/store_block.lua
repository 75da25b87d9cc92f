-- block: the start of every verb that may have to wait, after store.lua.

local function broken()
  if superseded() then
    return true
  end
  local run = EPOCH ~= '' and redis.call('HMGET', RUN, 'epoch', 'size', 'restoring')
  return run and run[1] == EPOCH and not run[3] and redis.call('SCARD', MEMBERS) < tonumber(run[2])
end

local function last_id(stream)
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)
  return last[1] and last[1][1] or '0-0'
end

-- Records that a caller may be blocked for so many ms, and forgets some callers that no longer are.
local function await(key, ms)
  local clock = redis.call('TIME')
  local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
  local past = redis.call('ZRANGEBYSCORE', WAITS, '-inf', now, 'LIMIT', 0, 16)
  if past[1] then
    redis.call('ZREM', WAITS, unpack(past))
  end
  redis.call('ZADD', WAITS, now + ms, key)
  redis.call('PEXPIRE', WAITS, 60000)
  return now
end

-- Registers the caller with `key`, which is missing; `stream` is its wake-up stream, `wake` the run's.
-- Returns the reply: {index, id to read the key's stream from, id to read the run's wake from} | {-1, why, as JSON, or ''} the round is over
local function register(index, key, stream, wake)
  if broken() then
    return { -1, redis.call('HGET', RUN, 'broken') or '' }
  end
  await(key, 60000) -- longer than a blocking read
  return { index, last_id(stream), EPOCH ~= '' and last_id(wake) or '0-0' }
end
