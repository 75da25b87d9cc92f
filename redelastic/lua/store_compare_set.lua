-- compare_set: writes `desired` if the key's value is `expected`; a missing key matches an empty `expected`.
--
-- KEYS 1-4 of store.lua, 5 of store_write.lua, 6 the key's wake-up stream
-- ARGV 1-2 of store.lua, 3-4 of store_write.lua, 5 key, 6 expected, 7 desired
-- Reply the value afterwards; `expected` if there is none
-- I4 I8
local key, expected, desired = ARGV[5], ARGV[6], ARGV[7]
local written = reply
if not seen then
  written = (redis.call('HGET', DATA, key) or '') == expected and 'yes' or 'no'
  if written == 'yes' then
    redis.call('HSET', DATA, key, desired)
    fire(key, KEYS[6], desired)
  end
  finish(written)
end
if written == 'yes' then
  return desired
end
return redis.call('HGET', DATA, key) or expected
