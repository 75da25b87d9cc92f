-- wait, get, check: are all keys there? If not, registers the caller with the last one that is missing: keys are mostly
-- set in order, so that one is likely to be the last to come.
--
-- KEYS 1-5 of store.lua, 6 wake stream of the run, then a wake-up stream and a queue for each key
-- ARGV 1-2 of store.lua, 3 what is asked for: 'get' a value, 'pop' a queue with items, 'wait' either, as in TCPStore,
--      'check' either, and no registration, then the keys
-- Reply {0} all there | {index of the missing key, from 1, id to read its stream from, id to read the run's wake from}
--       {-1, why} the round is over
local ASKED = ARGV[3]

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

for i = #ARGV - 3, 1, -1 do
  local key, stream, queue = ARGV[3 + i], KEYS[5 + 2 * i], KEYS[6 + 2 * i]
  local there = ASKED ~= 'pop' and redis.call('HEXISTS', DATA, key) == 1
    or ASKED ~= 'get' and redis.call('EXISTS', queue) == 1
  if not there then
    if ASKED == 'check' then
      return { i }
    elseif broken() then
      return { -1, redis.call('HGET', RUN, 'broken') or 'the run went on' }
    end
    redis.call('HSET', WAITS, key, 1)
    redis.call('PEXPIRE', WAITS, TTL)
    return { i, last_id(stream), EPOCH ~= '' and last_id(KEYS[6]) or '0-0' }
  end
end
return { 0 }
