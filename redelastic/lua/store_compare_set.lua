-- compare_set: writes `desired` if the key's value is `expected`; a key that is not there matches an empty one.
--
-- KEYS 1-5 of store.lua, 6 the key's wake-up stream
-- ARGV 1-2 of store.lua, 3 sender, 4 request, 5 key, 6 expected, 7 desired
-- Reply the value afterwards; `expected` where there is none
-- I4 I8
local sender, request, key, expected, desired = unpack(ARGV, 3, 7)
local seen, reply = done(sender, request)
if not seen then
  fence()
  local value = redis.call('HGET', DATA, key)
  if (value or '') == expected then
    redis.call('HSET', DATA, key, desired)
    fire(key, KEYS[6])
    value = desired
  end
  reply = value or expected
  remember(sender, request, reply)
  touch()
end
return reply
