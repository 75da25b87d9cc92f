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
run.closed, run.broken, run.member_lost = unpack(redis.call('HMGET', RUN, 'closed', 'broken', 'member_lost'))

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
  redis.call('XADD', WAKE, 'MAXLEN', '~', 64, '*', 'event', event, 'epoch', run.epoch or 0, 'reason', reason,
    'waiting', waiting, 'lost', run.member_lost and 1 or 0)
end

-- The members have to regroup, because of a node that `waits`, `regroups` or is `lost`. They are told once per round;
-- once more when the first of them is gone, since then nobody can wait for its keys in the round's store; and once more
-- when the first is lost, since then the failures of its peers' workers are not their own.
local function break_round(reason, because)
  local first_gone = because ~= 'waits' and redis.call('SCARD', MEMBERS) == run.size - 1
  local first_lost = because == 'lost' and not run.member_lost
  if first_lost then
    set('member_lost', 1)
  end
  if not run.broken or first_gone or first_lost then
    set('broken', run.broken or reason)
    wake('broken', reason)
  end
end

-- Takes a node out of the run, whatever it was in it.
local function remove(node)
  redis.call('HDEL', ENDPOINTS, node)
  redis.call('HDEL', LABELS, node)
  redis.call('ZREM', CANDIDATES, node)
  local was_member = redis.call('SREM', MEMBERS, node) == 1
  redis.call('ZREM', LEASES, node) -- last: should a corrupt key end the script, the node is still to be reaped
  return was_member
end
