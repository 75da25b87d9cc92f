-- queue_push: adds an item at the end of a queue. Pushed once however often it is sent (I8).
--
-- KEYS 1-5 of store.lua, 6 the key's wake-up stream, 7 the queue (list)
-- ARGV 1-2 of store.lua, 3 sender, 4 request, 5 key, 6 item
-- I4 I8
local sender, request, key = ARGV[3], ARGV[4], ARGV[5]
if not done(sender, request) then
  fence()
  redis.call('RPUSH', KEYS[7], ARGV[6])
  remember(sender, request, '')
  fire(key, KEYS[6])
  redis.call('PEXPIRE', KEYS[7], TTL)
  touch()
end
