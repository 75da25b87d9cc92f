-- queue_push: adds an item at the end of a queue. Pushed once however often it is sent (I8).
--
-- KEYS 1-4 of store.lua, 5 of store_write.lua, 6 the key's wake-up stream, 7 the queue (list)
-- ARGV 1-2 of store.lua, 3-4 of store_write.lua, 5 key, 6 item
-- I4 I8
if not seen then
  redis.call('RPUSH', KEYS[7], ARGV[6])
  finish()
  fire(ARGV[5], KEYS[6])
  redis.call('PEXPIRE', KEYS[7], TTL)
end
