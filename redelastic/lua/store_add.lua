-- add: increments the decimal number in a key, from 0 if there is none. Counted once however often it is sent (I8).
--
-- KEYS 1-4 of store.lua, 5 of store_write.lua, 6 the key's wake-up stream
-- ARGV 1-2 of store.lua, 3-4 of store_write.lua, 5 key, 6 amount
-- Reply the new number, as text: it may need all 64 bits
-- I4 I8
if not seen then
  local key = ARGV[5]
  local sum = redis.call('HINCRBY', DATA, key, ARGV[6]) -- a double in Lua, exact below 2^53
  reply = math.abs(sum) < 2 ^ 53 and string.format('%.0f', sum) or redis.call('HGET', DATA, key)
  finish(reply)
  fire(key, KEYS[6], reply)
end
return reply
