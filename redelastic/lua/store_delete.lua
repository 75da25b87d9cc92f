-- delete_key: removes a key. True once, however often it is sent (I8).
--
-- KEYS 1-5 of store.lua
-- ARGV 1-2 of store.lua, 3 client, 4 request, 5 key
-- Reply '1' if there was such a key, else '0'
-- I4 I8
local client, request, key = ARGV[3], ARGV[4], ARGV[5]
local reply = done(client, request)
if not reply then
  fence()
  reply = tostring(redis.call('HDEL', DATA, key))
  remember(client, request, reply)
  touch()
end
return reply
