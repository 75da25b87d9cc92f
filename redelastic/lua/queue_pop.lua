-- queue_pop: takes the item at the front of a queue. Taken once however often it is sent (I8).
--
-- KEYS 1-5 of store.lua, 6 the queue (list)
-- ARGV 1-2 of store.lua, 3 client, 4 request
-- Reply the item, or nothing: the queue is empty
-- I4 I8
local client, request = ARGV[3], ARGV[4]
local reply = done(client, request)
if not reply then
  fence()
  reply = redis.call('LPOP', KEYS[6])
  if reply then
    remember(client, request, reply)
    touch(KEYS[6])
  end
end
return reply
