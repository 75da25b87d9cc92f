-- run: the start of every verb of a run: its keys, the server's clock, and the run's record.
--
-- KEYS 1 run (hash)          protocol, incarnation (the node that created the run), created_at, epoch, size, master and settings of the
--                            run; closed, broken, deadline, beat_at, outage_at, restoring; admit_from, admit_by, save (admission.lua)
--      2 ranks (zset)        node -> rank when the last round was completed: unchanged until the next one is
--      3 members (set)       nodes of `ranks` that still hold the round: they have not rejoined, left or lost their lease
--      4 candidates (zset)   nodes blocked in a join; former members by rank (below zero), then the others by arrival
--      5 leases (zset)       node -> expiry, in ms on the server's clock, of every member and candidate
--      6 endpoints (hash)    node -> "host port" on which it would serve the round's bootstrap store
--      7 labels (hash)       node -> topology label, if it has one
--      8 wake (stream)       what blocked nodes wait for; each entry is a change that matters to them: broken, complete,
--                            closed, stopped, deadline, drain, save, readmit, roll_call, answered
--      9 events (stream)     what happened, for people and tools; no verb reads it
--      10 failures (hash)    host name -> how many rounds in a row its workers failed first; 0 is not kept
--      11 status (string)    of the calling node: JSON for people and tools, or "left" once it has gone for good
local RUN, RANKS, MEMBERS, CANDIDATES, LEASES, ENDPOINTS, LABELS, WAKE, EVENTS, FAILURES, STATUS = unpack(KEYS, 1, 11)
local FORMER = -2147483648 -- a former member's place among the candidates is FORMER + rank

local PROTOCOL = 2 -- what a run's keys and these scripts' arguments mean; redelastic 0.1.0 had 1

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local TEXTS = 11 -- this many fields are text, the others numbers
local FIELDS = { 'closed', 'stop', 'broken', 'member_lost', 'blamed', 'blamed_node', 'mark', 'roll_called_by', 'roll_again',
  'incarnation', 'save', 'protocol', 'created_at', 'epoch', 'size', 'min', 'max', 'last_call', 'replacement', 'lease', 'interval', 'ttl', 'deadline', 'admit_from', 'admit_by', 'beat_at', 'charged',
  'restarts', 'idle', 'progress', 'judged', 'stepped', 'failed_at', 'restoring', 'roll_called_at', 'roll_timeout', 'roll_until', 'roll_last_chance',
  'roll_answered', 'outage_at', 'written', 'flush_at' }
local run = {}
local values = redis.call('HMGET', RUN, unpack(FIELDS))
for i = 1, #FIELDS do
  local value = values[i]
  if value then
    if i > TEXTS then
      value = tonumber(value)
      if not (value and value >= 0 and value < 2 ^ 53 and value % 1 == 0) then -- rejects nan too, which is not >= 0
        error('CORRUPT ' .. RUN .. ': field ' .. FIELDS[i] .. ' is not a number')
      end
    end
    run[FIELDS[i]] = value
  end
end

if run.ttl and run.protocol ~= PROTOCOL then
  error('PROTOCOL ' .. (run.protocol or 1) .. ' ' .. PROTOCOL)
end

local function set(field, value)
  run[field] = value
  if value then
    redis.call('HSET', RUN, field, value)
  else
    redis.call('HDEL', RUN, field)
  end
end

-- Renews the time to live of every key of the run, so that nothing outlives the run's last live node by more than that.
local function touch()
  for i = 1, 10 do
    redis.call('PEXPIRE', KEYS[i], run.ttl)
  end
end

local function is_aging()
  return redis.call('PTTL', RUN) < run.ttl / 2
end
