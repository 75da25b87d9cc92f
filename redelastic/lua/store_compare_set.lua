-- compare_set: writes `desired` if the key's value is `expected`; a key that is not there matches an empty one.
--
-- KEYS 1-5 of store.lua, 6 the key's wake-up stream
-- ARGV 1-2 of store.lua, 3 sender, 4 request, 5 key, 6 expected, 7 desired
-- Reply the value afterwards; `expected` where there is none
-- I4 I8
local sender, request, key, expected, desired = unpack(ARGV, 3, 7)
local seen, written = done(sender, request)
if not seen then
  fence()
  written = (redis.call('HGET', DATA, key) or '') == expected and 'yes' or 'no'
  if written == 'yes' then
    redis.call('HSET', DATA, key, desired)
    fire(key, KEYS[6])
  end
  remember(sender, request, written)
  touch()
end
if written == 'yes' then
  return desired
end
return redis.call('HGET', DATA, key) or expected
