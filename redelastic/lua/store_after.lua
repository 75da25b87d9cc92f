-- after: ends the transaction that store_before.lua began. Written once however often it is sent (I8).
--
-- KEYS 1-5 of store.lua, then the wake-up stream of each key
-- ARGV 1-2 of store.lua, 3-4 of store_write.lua, then the keys that were written
-- I4 I8
if not seen then
  redis.call('HEXISTS', DATA, ARGV[5]) -- fails, as the HSET did, if the key holds another program's value
  for i = 5, #ARGV do
    fire(ARGV[i], KEYS[1 + i])
  end
  finish()
end
