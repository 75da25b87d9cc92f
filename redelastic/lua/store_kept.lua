-- kept: ends a transaction that store_before.lua began, before store_write.lua refuses it: puts back what the HSET
-- overwrote.
local kept = ARGV[3] .. '!'
if redis.call('HDEL', ONCE, kept) == 1 then
  for i = 5, #ARGV do
    local value = redis.call('HGET', ONCE, kept .. i)
    if value then
      redis.call('HSET', DATA, ARGV[i], value)
      redis.call('HDEL', ONCE, kept .. i)
    else
      redis.call('HDEL', DATA, ARGV[i])
    end
  end
end
