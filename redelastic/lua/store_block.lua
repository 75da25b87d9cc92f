-- block: what a verb that may have to wait begins with, after store.lua.

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

-- Returns a reply to a caller that need not wait. If it `reads` the stream from its beginning in the same round trip, an
-- entry there ends that at once; whoever else it wakes asks again. Where Redis refuses writes, that is the reply: the
-- caller then asks again, and does not read.
local function ended(reply, stream, reads)
  if reads then
    local added = redis.call('EXISTS', stream) == 0 and redis.pcall('XADD', stream, '*', 'over', 1)
    if type(added) == 'table' then
      return added
    end
    redis.pcall('PEXPIRE', stream, 60000)
  end
  return reply
end

-- Registers the caller with `key`, which is missing; `stream` is its wake-up stream, `wake` the run's; `reads` as above.
-- Returns the reply: 1 the stream that it reads from its beginning has no entry yet. All other replies are longer, so a
--                      caller that sleeps until more bytes have come is not woken by this one (requests.py)
--                    {index, id to read the key's stream from, id to read the run's wake from}
--                    {-1, why} the round is over
local function register(index, key, stream, wake, reads)
  if broken() then
    return ended({ -1, redis.call('HGET', RUN, 'broken') or 'the run went on' }, stream, reads)
  end
  redis.call('HSET', WAITS, key, 1)
  redis.call('PEXPIRE', WAITS, math.max(TTL, 60000)) -- longer than a blocking read
  if reads and redis.call('EXISTS', stream) == 0 then
    return 1
  end
  return { index, last_id(stream), EPOCH ~= '' and last_id(wake) or '0-0' }
end
