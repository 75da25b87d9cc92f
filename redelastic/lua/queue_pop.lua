-- queue_pop: takes the item at the front of a queue. Taken once however often it is sent (I8).
--
-- KEYS 1-5 of store.lua, 6 the queue (list)
-- ARGV 1-2 of store.lua, 3-4 of store_write.lua
-- Reply the item, or nothing: the queue is empty
-- I4 I8
if not seen then
  reply = redis.call('LPOP', KEYS[6])
  finish(reply)
  redis.call('PEXPIRE', KEYS[6], TTL)
end
return reply
