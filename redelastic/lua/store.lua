-- store: the start of every verb of a store. Parts that only some verbs need are in other files: definitions take time too.
--
-- KEYS 1 data (hash)     key -> value
--      2 waits (hash)    key -> 1 while a caller may be blocked on it
--      3 dedup (hash)    sender -> "request reply": the last effect of each sender, for a request sent again (I8); of a long
--                        reply only "request@", and the reply in a field of its own, which not every request reads
--      4 run (hash), 5 members (set) of the run whose round the store belongs to; unused if it belongs to none
-- ARGV 1 epoch of that round, '' if there is none, 2 ttl (ms)
local DATA, WAITS, DEDUP, RUN, MEMBERS = unpack(KEYS, 1, 5)
local EPOCH, TTL = ARGV[1], ARGV[2]

-- A round is over for its store once a later one is complete, or one of its members can no longer answer. In a round
-- that is being put back after a loss of data, some members may not have reported yet (restore.lua).
local function superseded()
  local epoch = EPOCH ~= '' and redis.call('HGET', RUN, 'epoch')
  return epoch and tonumber(epoch) > tonumber(EPOCH)
end
