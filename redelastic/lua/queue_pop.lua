-- queue_pop: takes the item at the front of a queue. Taken once however often it is sent (I8).
--
-- KEYS 1-5 of store.lua, 6 the queue (list)
-- ARGV 1-2 of store.lua, 3 sender, 4 request
-- Reply the item, or nothing: the queue is empty
-- I4 I8
local sender, request = ARGV[3], ARGV[4]
local seen, reply = done(sender, request)
if not seen then
  fence()
  reply = redis.call('LPOP', KEYS[6])
  remember(sender, request, reply)
  redis.call('PEXPIRE', KEYS[6], TTL)
  touch()
end
return reply
