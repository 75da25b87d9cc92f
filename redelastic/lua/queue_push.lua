-- queue_push: adds an item at the end of a queue. Pushed once however often it is sent (I8).
--
-- KEYS 1-4 of store.lua, 5 of store_write.lua, 6 the key's wake-up stream, 7 the queue (list), 8 poppers of queue_pop.lua
-- ARGV 1-2 of store.lua, 3-4 of store_write.lua, 5 key, 6 item
-- Reply the caller of queue_pop to wake, or nothing: the sender does so, since its stream is no key of this script
-- I4 I8
if not seen then
  redis.call('RPUSH', KEYS[7], ARGV[6])
  finish()
  fire(ARGV[5], KEYS[6])
  redis.call('PEXPIRE', KEYS[7], TTL)
end
-- The client that has waited longest, among the clients that are still there.
local POPPERS = KEYS[8]
local first = redis.call('ZRANGE', POPPERS, 0, 0)[1]
local clock = first and redis.call('TIME')
while first do
  local blocked_until = tonumber(redis.call('ZSCORE', WAITS, first) or 0)
  redis.call('ZREM', POPPERS, first)
  redis.call('ZREM', WAITS, first)
  if blocked_until >= clock[1] * 1000 + clock[2] / 1000 then
    return first
  end
  first = redis.call('ZRANGE', POPPERS, 0, 0)[1]
end
