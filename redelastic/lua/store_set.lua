-- set, multi_set: writes pairs. Written once however often it is sent: a late copy undoes no later write (I8).
--
-- KEYS 1-5 of store.lua, then the wake-up stream of each pair's key
-- ARGV 1-2 of store.lua, 3 sender, 4 request, then key, value, key, value, …
-- I4 I8
local sender, request = ARGV[3], ARGV[4]
if not done(sender, request) then
  fence()
  for i = 1, #KEYS - 5 do
    local key = ARGV[3 + 2 * i]
    redis.call('HSET', DATA, key, ARGV[4 + 2 * i])
    fire(key, KEYS[5 + i])
  end
  remember(sender, request)
  touch()
end
