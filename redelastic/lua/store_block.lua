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

-- Registers the caller with `key`, which is missing; `stream` is its wake-up stream, `wake` the run's.
-- Returns the reply: {index, id to read the key's stream from, id to read the run's wake from} | {-1, why, as JSON, or ''} the round is over
local function register(index, key, stream, wake)
  if broken() then
    return { -1, redis.call('HGET', RUN, 'broken') or '' }
  end
  redis.call('HSET', WAITS, key, 1)
  redis.call('PEXPIRE', WAITS, math.max(TTL, 60000)) -- longer than a blocking read
  return { index, last_id(stream), EPOCH ~= '' and last_id(wake) or '0-0' }
end
