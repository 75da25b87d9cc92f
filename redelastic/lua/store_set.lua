-- set, multi_set: writes pairs. Written once however often it is sent: a late copy undoes no later write (I8).
--
-- KEYS 1-5 of store.lua, then the wake-up stream of each pair's key
-- ARGV 1-2 of store.lua, 3-4 of store_write.lua, then key, value, key, value, …
-- I4 I8
if not seen then
  for i = 1, #KEYS - 5 do
    local key = ARGV[3 + 2 * i]
    redis.call('HSET', DATA, key, ARGV[4 + 2 * i])
    fire(key, KEYS[5 + i])
  end
  finish()
end
