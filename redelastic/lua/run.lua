-- run: what every verb of a run begins with: its keys, the server's clock, and the five transitions they share.
--
-- KEYS 1 run (hash)          epoch, size, master and settings of the run; closed, broken, deadline, beat_at
--      2 ranks (zset)        node -> rank, as the last round was completed: never changed until the next one is
--      3 members (set)       those of `ranks` that still hold the round: they have not rejoined, left or lost their lease
--      4 candidates (zset)   nodes blocked in a join; former members by rank (below zero), then the others by arrival
--      5 leases (zset)       node -> expiry, in ms of the server's clock, of every member and candidate
--      6 endpoints (hash)    node -> "host port" on which it would serve the round's bootstrap store
--      7 labels (hash)       node -> topology label, where it has one
--      8 wake (stream)       what blocked nodes wait for; each entry is a change that matters to them: broken, complete,
--                            closed, deadline
--      9 status (string)     of the calling node: JSON for people and tools, or "left" once it has gone for good
local RUN, RANKS, MEMBERS, CANDIDATES, LEASES, ENDPOINTS, LABELS, WAKE, STATUS = unpack(KEYS, 1, 9)
local FORMER = -2147483648 -- a former member's place among the candidates is FORMER + rank

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local NUMBERS = { 'epoch', 'size', 'min', 'max', 'last_call', 'replacement', 'lease', 'interval', 'ttl', 'deadline', 'beat_at' }
local run = {}
for i, text in ipairs(redis.call('HMGET', RUN, unpack(NUMBERS))) do
  local number = text and tonumber(text)
  if text and not (number and number >= 0 and number < 2 ^ 53 and number % 1 == 0) then -- nor nan, which is not >= 0
    error('CORRUPT ' .. RUN .. ': field ' .. NUMBERS[i] .. ' is not a number')
  end
  run[NUMBERS[i]] = number
end
run.closed, run.broken = unpack(redis.call('HMGET', RUN, 'closed', 'broken'))

local function set(field, value)
  run[field] = value
  if value then
    redis.call('HSET', RUN, field, value)
  else
    redis.call('HDEL', RUN, field)
  end
end

-- Every key of the run gets its time to live anew, so that nothing outlives the run's last live node by more than that.
local function touch()
  for i = 1, 8 do
    redis.call('PEXPIRE', KEYS[i], run.ttl)
  end
end

local function wake(event, reason)
  local waiting = redis.call('ZCARD', CANDIDATES)
  redis.call('XADD', WAKE, 'MAXLEN', '~', 64, '*', 'event', event, 'epoch', run.epoch or 0, 'reason', reason, 'waiting', waiting)
end

-- The members have to regroup. They are told once per round, and once more when the first of them is gone: from then
-- on nobody can wait for that member's keys in the round's store.
local function break_round(reason, member_gone)
  local first_gone = member_gone and redis.call('SCARD', MEMBERS) == run.size - 1
  if not run.broken or first_gone then
    set('broken', run.broken or reason)
    wake('broken', reason)
  end
end

-- Takes a node out of the run, whatever it was in it.
local function remove(node)
  redis.call('ZREM', LEASES, node)
  redis.call('HDEL', ENDPOINTS, node)
  redis.call('HDEL', LABELS, node)
  redis.call('ZREM', CANDIDATES, node)
  return redis.call('SREM', MEMBERS, node) == 1
end
