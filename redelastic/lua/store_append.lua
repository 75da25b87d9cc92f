-- append: adds bytes at the end of a key's value. Added once however often it is sent (I8).
--
-- KEYS 1-4 of store.lua, 5 of store_write.lua, 6 the key's wake-up stream
-- ARGV 1-2 of store.lua, 3-4 of store_write.lua, 5 key, 6 bytes
-- I4 I8
local LONGEST = 2 ^ 24 -- bytes: the value is copied whole, and Redis serves nobody meanwhile
if not seen then
  local key = ARGV[5]
  local value = (redis.call('HGET', DATA, key) or '') .. ARGV[6]
  if #value > LONGEST then
    error('TOO_LONG ' .. #value)
  end
  redis.call('HSET', DATA, key, value)
  finish()
  fire(key, KEYS[6], value)
end
