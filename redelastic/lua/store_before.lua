-- before: a set or multi_set of large values is a transaction of this script, a plain HSET, so that values bypass Lua, and
-- store_after.lua. If the HSET must have no effect, for any of store_write.lua's reasons, this keeps what it will overwrite.
--
-- KEYS 1-5 of store.lua
-- ARGV 1-2 of store.lua, 3-4 of store_write.lua, then the keys that will be written
local SENDER, REQUEST = ARGV[3], ARGV[4]
local last = string.match(redis.call('HGET', ONCE, SENDER) or '', '^%d+') or 0
local readable, over = pcall(superseded)
if REQUEST - last <= 0 or over or not readable then
  redis.call('HSET', ONCE, SENDER .. '!', 'kept')
  for i = 5, #ARGV do
    local value = redis.call('HGET', DATA, ARGV[i])
    if value then
      redis.call('HSET', ONCE, SENDER .. '!' .. i, value)
    end
  end
end
