-- queue_pop: takes the item at the front of a queue. Taken once however often it is sent (I8).
--
-- KEYS 1-4 of store.lua, 5 of store_write.lua, 6 the queue (list), 7 reply (string): a long item, until its sender has it
-- ARGV 1-2 of store.lua, 3-4 of store_write.lua
-- Reply the item, or nothing: the queue is empty
-- I4 I8
local QUEUE, LONG_REPLY = KEYS[6], KEYS[7]
if not seen then
  reply = redis.call('LPOP', QUEUE)
  if reply and #reply > 4096 then -- apart from what the next requests read
    redis.call('SET', LONG_REPLY, reply, 'PX', REPEATABLE)
    finish()
  else
    redis.call('DEL', LONG_REPLY)
    finish(reply)
  end
  redis.call('PEXPIRE', QUEUE, TTL)
end
return reply or redis.call('GET', LONG_REPLY)
