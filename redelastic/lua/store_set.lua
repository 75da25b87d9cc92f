-- set, multi_set: writes pairs. Written once however often it is sent: a late copy undoes no later write (I8).
--
-- KEYS 1-4 of store.lua, 5 of store_write.lua, then the wake-up stream of each pair's key
-- ARGV 1-2 of store.lua, 3-4 of store_write.lua, then key, value, key, value, …
-- I4 I8
local PAIRS = #KEYS - 5
local AT_ONCE = 1000 -- pairs: Lua's stack holds some 8,000 words
if not seen then
  for first = 5, #ARGV, 2 * AT_ONCE do
    redis.call('HSET', DATA, unpack(ARGV, first, math.min(first + 2 * AT_ONCE - 1, #ARGV)))
  end
  if PAIRS == 1 or redis.call('EXISTS', WAITS) == 1 then -- asking for each key takes most of the time
    for i = PAIRS, 1, -1 do -- if a key is given twice, the last value counts
      fire(ARGV[3 + 2 * i], KEYS[5 + i], ARGV[4 + 2 * i])
    end
  end
  finish()
end
