-- set, multi_set: writes pairs. Sent again, it writes the same (I8).
--
-- KEYS 1-5 of store.lua, then the wake-up stream of each pair's key
-- ARGV 1-2 of store.lua, then key, value, key, value, …
-- I4 I8
fence()
for i = 1, #KEYS - 5 do
  local key = ARGV[1 + 2 * i]
  redis.call('HSET', DATA, key, ARGV[2 + 2 * i])
  fire(key, KEYS[5 + i])
end
touch()
