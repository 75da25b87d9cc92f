-- delete_key: removes a key. It has one effect and one reply however often it is sent (I8).
--
-- KEYS 1-4 of store.lua, 5 of store_write.lua
-- ARGV 1-2 of store.lua, 3-4 of store_write.lua, 5 key
-- Reply '1' if there was such a key, else '0'
-- I4 I8
if not seen then
  reply = tostring(redis.call('HDEL', DATA, ARGV[5]))
  finish(reply)
end
return reply
