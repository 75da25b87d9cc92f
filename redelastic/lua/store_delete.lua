-- delete_key: removes a key. True once, however often it is sent (I8).
--
-- KEYS 1-5 of store.lua
-- ARGV 1-2 of store.lua, 3 sender, 4 request, 5 key
-- Reply '1' if there was such a key, else '0'
-- I4 I8
local sender, request, key = ARGV[3], ARGV[4], ARGV[5]
local seen, reply = done(sender, request)
if not seen then
  fence()
  reply = tostring(redis.call('HDEL', DATA, key))
  remember(sender, request, reply)
  touch()
end
return reply
