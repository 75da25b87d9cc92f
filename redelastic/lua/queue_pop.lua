-- queue_pop: takes the item at the front of a queue, once however often it is sent (I8); if there is none, the caller may queue up.
--
-- KEYS 1-4 of store.lua, 5 of store_write.lua, 6 the queue (list), 7 reply (string): a long item, until its sender has it,
--      8 poppers (zset) name -> arrival of each blocked caller, 9 wake-up stream of this one, 10 wake stream of the run
-- ARGV 1-2 of store.lua, 3-4 of store_write.lua, 5 name of the caller, 6 its arrival, '' if it comes only now, 7 for how long
--      it will be blocked (ms); 0: it does not wait any longer
-- Reply {1, item} | {0} the queue is empty | {-1, why, as JSON, or ''} the round is over
--       {2, id to read the caller's stream from, id to read the run's wake from, arrival}
-- I4 I8
local QUEUE, LONG_REPLY, POPPERS, STREAM, WAKE = unpack(KEYS, 6, 10)
local name, arrival, block = ARGV[5], ARGV[6], tonumber(ARGV[7])
if not seen then
  reply = redis.call('LPOP', QUEUE)
  if reply and #reply > 4096 then -- apart from what the next requests read
    redis.call('SET', LONG_REPLY, reply, 'PX', REPEATABLE)
    finish()
  else
    redis.call('DEL', LONG_REPLY)
    finish(reply)
  end
  redis.call('PEXPIRE', QUEUE, TTL)
end
reply = reply or redis.call('GET', LONG_REPLY)
if arrival ~= '' and (reply or block == 0) then
  redis.call('ZREM', POPPERS, name)
  redis.call('ZREM', WAITS, name)
end
if reply then
  return { 1, reply }
elseif block == 0 then
  return { 0 }
elseif broken() then
  return { -1, redis.call('HGET', RUN, 'broken') or '' }
end
local now = await(name, block + 1000)
arrival = arrival ~= '' and arrival or string.format('%.0f', now)
redis.call('ZADD', POPPERS, arrival, name)
redis.call('PEXPIRE', POPPERS, 60000)
return { 2, last_id(STREAM), EPOCH ~= '' and last_id(WAKE) or '0-0', arrival }
