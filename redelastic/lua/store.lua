-- store: the start of every verb of a store. Parts that only some verbs need are in other files: definitions take time too.
--
-- KEYS 1 data (hash)     key -> value
--      2 waits (zset)    key -> until when a caller may be blocked on it, in ms on the server's clock
--      3 run (hash), 4 members (set) of the run whose round the store belongs to; unused if it belongs to none
-- ARGV 1 epoch of that round, '' if there is none, 2 ttl (ms)
local DATA, WAITS, RUN, MEMBERS = unpack(KEYS, 1, 4)
local EPOCH, TTL = ARGV[1], ARGV[2]

-- A round is over for its store once a later one is complete, or one of its members can no longer answer. In a round
-- that is being put back after a loss of data, some members may not have reported yet (restore.lua).
local function superseded()
  local epoch = EPOCH ~= '' and redis.call('HGET', RUN, 'epoch')
  return epoch and tonumber(epoch) > tonumber(EPOCH)
end
