-- save: asks the workers of all members to save. Each member writes to the round's store, under its rank, when its workers have.
-- Sent again, it asks again; the workers save once for requests within some seconds.
--
-- KEYS 1-11 of run.lua
-- ARGV 1 reason: the asker, and why, 2 timeout: how long they have (ms)
-- Reply {epoch, size, id of the wake-up that asks}, or {} if nobody holds a round, or the workers have to end anyway
if redis.call('SCARD', MEMBERS) == 0 or run.stop then
  return {}
end
return { run.epoch, run.size, ask_to_save('', ARGV[1], tonumber(ARGV[2])) }
