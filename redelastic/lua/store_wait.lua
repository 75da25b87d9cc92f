-- wait, get, check: are all keys there? If not, registers the caller with the last one that is missing: keys are mostly
-- set in order, so the last key is likely to be set last.
--
-- KEYS 1-4 of store.lua, 5 wake stream of the run, then a wake-up stream and a queue for each key
-- ARGV 1-2 of store.lua, 3 what is asked for: 'get' a value, 'wait' a value or a queue with items, as in TCPStore,
--      'check' the same, without registering, then the keys
-- Reply {0} all there | {index of the missing key, from 1} | the reply of `register` in store_block.lua, with that index
local ASKED = ARGV[3]

for i = #ARGV - 3, 1, -1 do
  local key, stream, queue = ARGV[3 + i], KEYS[4 + 2 * i], KEYS[5 + 2 * i]
  local there = redis.call('HEXISTS', DATA, key) == 1
    or ASKED ~= 'get' and redis.call('EXISTS', queue) == 1
  if not there then
    return ASKED == 'check' and { i } or register(i, key, stream, KEYS[5])
  end
end
return { 0 }
