-- barrier: counts the callers that have arrived; the last one sets the key that the others wait for, and wakes them all.
-- Counted once however often it is sent (I8). Torch's own barrier uses the same two keys, so callers of both may meet in one.
--
-- KEYS 1-4 of store.lua, 5 of store_write.lua, 6 wake stream of the run, 7-8 wake-up streams of the two keys
-- ARGV 1-2 of store.lua, 3-4 of store_write.lua, 5 key that counts, 6 key that the last one sets, 7 how many callers
-- Reply {0} all have come | the reply of `register` in store_block.lua, with index 1
-- I4 I8
local count, last = ARGV[5], ARGV[6]
if not seen then
  local come = redis.call('HINCRBY', DATA, count, 1)
  if come == 1 then -- the key is new: a caller may be blocked on it
    fire(count, KEYS[7])
  end
  if come == tonumber(ARGV[7]) then
    redis.call('HSET', DATA, last, 1)
    fire(last, KEYS[8], '1')
  end
  finish()
else
  redis.call('PEXPIRE', DEDUP, REPEATABLE) -- a blocked caller asks again and again
end
return redis.call('HEXISTS', DATA, last) == 1 and { 0 } or register(1, last, KEYS[8], KEYS[6])
