-- run: the start of every verb of a run: its keys, the server's clock, and the functions that the verbs share.
--
-- KEYS 1 run (hash)          protocol, incarnation (the node that created the run), created_at, epoch, size, master and settings of the
--                            run; closed, broken, deadline, beat_at, restoring
--      2 ranks (zset)        node -> rank when the last round was completed: unchanged until the next one is
--      3 members (set)       nodes of `ranks` that still hold the round: they have not rejoined, left or lost their lease
--      4 candidates (zset)   nodes blocked in a join; former members by rank (below zero), then the others by arrival
--      5 leases (zset)       node -> expiry, in ms on the server's clock, of every member and candidate
--      6 endpoints (hash)    node -> "host port" on which it would serve the round's bootstrap store
--      7 labels (hash)       node -> topology label, if it has one
--      8 wake (stream)       what blocked nodes wait for; each entry is a change that matters to them: broken, complete,
--                            closed, stopped, deadline, drain, readmit, roll_call, answered
--      9 events (stream)     what happened, for people and tools; no verb reads it
--      10 failures (hash)    host name -> how many rounds in a row its workers failed first; 0 is not kept
--      11 status (string)    of the calling node: JSON for people and tools, or "left" once it has gone for good
local RUN, RANKS, MEMBERS, CANDIDATES, LEASES, ENDPOINTS, LABELS, WAKE, EVENTS, FAILURES, STATUS = unpack(KEYS, 1, 11)
local FORMER = -2147483648 -- a former member's place among the candidates is FORMER + rank

local PROTOCOL = 2 -- what a run's keys and these scripts' arguments mean; that of redelastic 0.1.0 was 1

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local TEXTS = 10 -- this many fields are text, the others numbers
local FIELDS = { 'closed', 'stop', 'broken', 'member_lost', 'blamed', 'blamed_node', 'mark', 'roll_called_by', 'roll_again',
  'incarnation', 'protocol', 'created_at', 'epoch', 'size', 'min', 'max', 'last_call', 'replacement', 'lease', 'interval', 'ttl', 'deadline', 'beat_at', 'charged',
  'restarts', 'idle', 'progress', 'failed_at', 'restoring', 'roll_called_at', 'roll_timeout', 'roll_until', 'roll_last_chance',
  'roll_answered', 'written', 'flush_at' }
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

-- A list of texts and whole numbers, as JSON.
local function as_json(list)
  for i, value in ipairs(list) do
    list[i] = type(value) == 'number' and string.format('%.0f', value) or value
  end
  return cjson.encode(list)
end

-- The names and values in a JSON text from Redis, from the `first` on; none if redelastic did not write it.
local function from_json(text, first)
  local known, list = pcall(cjson.decode, text)
  local pairs = {}
  for i = first or 1, known and type(list) == 'table' and #list or 0 do
    pairs[#pairs + 1] = type(list[i]) == 'string' and list[i] or ''
  end
  return #pairs % 2 == 0 and pairs or {}
end

-- Keeps some 10,000 events, of 6 MiB at most, which take up to 8: whenever 3 MiB have been `written`, it drops all before
-- `mark`, where these 3 MiB begin.
local function add(...)
  local size, limit, count = 0, 'MAXLEN', 10000
  for _, field in ipairs({ ... }) do
    size = size + #tostring(field)
  end
  local full = run.ttl and (run.written or 0) + size > 3145728
  if full then
    limit, count = 'MINID', string.match(run.mark or '', '^%d+%-%d+$') or '0-0'
  end
  local id = redis.call('XADD', EVENTS, limit, '~', count, '*', ...)
  redis.call('PEXPIRE', EVENTS, run.ttl or 86400000)
  if full then
    set('mark', id)
    set('written', size)
  elseif run.ttl then -- else there is no run yet, and this must not make one
    set('written', (run.written or 0) + size)
  end
end

-- What many nodes do at the same time is one event: from the 17th in a row on, each within a second of the one before,
-- nodes are collected, and recorded together once 64 have come, a second has passed, or another event is recorded that
-- they may have led to. A field `many <event>` holds the row: when the last came, epoch, size, count, the nodes not yet
-- recorded, and the first one's fields.
-- MERGED is a string, since a table would be built anew for every verb.
local MERGED = '|joined|regrouped|started|lost|left|drain|saved|failed|hung|log|refused|barred|unreached|'

local function is_merged(event)
  return string.find(MERGED, '|' .. event .. '|', 1, true)
end

local function row_of(event)
  local row = redis.call('HGET', RUN, 'many ' .. event)
  local last, epoch, size, count, nodes, fields = string.match(row or '', '^(%d+) (%d+) (%d+) (%d+) ([^\n]*)\n(.*)$')
  return tonumber(last), tonumber(epoch), size, tonumber(count), nodes, fields
end

local function keep_row(event, last, epoch, size, count, nodes, fields)
  local numbers = string.format('%.0f %.0f %.0f %.0f ', last, epoch, size, count)
  redis.call('HSET', RUN, 'many ' .. event, numbers .. nodes .. '\n' .. fields)
end

local function flush_merged_events()
  set('flush_at', nil)
  for event in string.gmatch(MERGED, '[^|]+') do
    local last, epoch, size, count, nodes, fields = row_of(event)
    if last and nodes ~= '' then
      add('event', event, 'epoch', epoch, 'size', size, 'node', string.match(nodes, '^%S*'), 'nodes', nodes,
        unpack(from_json(fields)))
      keep_row(event, last, epoch, size, count, '', '')
    end
  end
end

-- Records an event of a node, with the fields of its kind (names and values in turn). Returns whether it is recorded by
-- itself, after anything collected before it. An event that broke a round always is, and the log of the worker that failed
-- first: people look for its lines.
local function record(event, node, ...)
  local this, size, fields = run.epoch or 0, run.size or 0, { ... }
  local stands_out = fields[1] == 'breaks' or event == 'log' and node == run.blamed_node
  if is_merged(event) and run.ttl and not stands_out then
    local last, epoch, _, count, nodes, first_fields = row_of(event)
    local is_new = not last or epoch ~= this or now - last > 1000 or now < last
    local encoded = fields[1] and as_json(fields) or '[]'
    if last and nodes ~= '' and (is_new or event == 'left' and encoded ~= first_fields) then
      flush_merged_events()
      nodes = ''
    end
    count = is_new and 0 or count
    if count >= 16 then
      local first = nodes == ''
      keep_row(event, now, this, size, count + 1, first and node or nodes .. ' ' .. node, first and encoded or first_fields)
      if (count - 15) % 64 == 0 then
        flush_merged_events()
      elseif not run.flush_at then
        set('flush_at', now + 1000)
      end
      return false
    end
    keep_row(event, now, this, size, count + 1, '', '')
  end
  if run.flush_at then
    flush_merged_events()
  end
  add('event', event, 'epoch', this, 'size', size, 'node', node, unpack(fields))
  return true
end

local function add_wake_up(event, ...)
  redis.call('XADD', WAKE, 'MAXLEN', '~', 64, '*', 'event', event, 'epoch', run.epoch or 0, ...)
  redis.call('PEXPIRE', WAKE, run.ttl) -- it may be new: on a server that had forgotten the run
end

local function wake(event, ...)
  add_wake_up(event, 'waiting', redis.call('ZCARD', CANDIDATES), 'lost', run.member_lost and 1 or 0, ...)
end

-- Wakes the other members of a draining member's round: their workers save too.
local function wake_drain(node, timeout, reason)
  add_wake_up('drain', 'node', node, 'reason', reason, 'timeout', timeout)
end

local function unblame()
  if redis.call('HINCRBY', FAILURES, run.blamed, -1) <= 0 then
    redis.call('HDEL', FAILURES, run.blamed)
  end
end

-- Takes back what charge.lua counted for this round, since it has lost a member. Not in a closed run: what it was stopped
-- for stays on record.
local function refund()
  if run.charged == run.epoch and not run.closed then
    unblame()
    set('charged', nil)
    set('restarts', run.restarts - 1)
    set('idle', math.max(0, run.idle - 1))
  end
end

-- Breaks the round because of an event of a node: it has `joined`, has `regrouped`, or is gone. The members are woken once
-- per round; again when the first member is gone, since its keys in the round's store will not be set; and again when the
-- first is lost, since its peers' workers fail because of that, unless its own had `failed` before.
local function break_round(failed, event, node, ...)
  local lost = event ~= 'joined' and event ~= 'regrouped'
  local first_gone = event ~= 'joined' and redis.call('SCARD', MEMBERS) == run.size - 1
  local first_lost = lost and not run.member_lost
  if first_lost then
    set('member_lost', 1)
  end
  if not run.broken or first_gone or first_lost then
    local cause = as_json({ event, node, ... })
    set('broken', run.broken or cause)
    wake('broken', 'cause', cause)
  end
  if first_lost and not failed then
    refund()
  end
end

-- Records an event that the members have to regroup for.
local function record_break(failed, event, node, ...)
  if run.broken then
    record(event, node, ...)
  else
    record(event, node, 'breaks', 1, ...)
  end
  break_round(failed, event, node, ...)
end

-- Closes the run for good (I5), because of what became of a node. With `stop` the nodes end their workers too; else the
-- workers may finish. The first cause stays on record.
local function close(stop, node, ...)
  local event = stop and 'stopped' or 'closed'
  local cause = run.closed or as_json({ event, node, ... })
  set('closed', cause)
  set('stop', stop and 1 or nil)
  set('deadline', nil)
  record(event, node, ...)
  wake(event, 'cause', cause)
end

-- Takes a node out of the run, whatever its role. Returns whether it held the round, and whether it had failed in it.
local function remove(node)
  local failed = tonumber(redis.call('HGET', RUN, 'failed ' .. node) or -1) == run.epoch
  redis.call('HDEL', ENDPOINTS, node)
  redis.call('HDEL', LABELS, node)
  redis.call('HDEL', RUN, 'draining ' .. node, 'failed ' .. node)
  redis.call('ZREM', CANDIDATES, node)
  local was_member = redis.call('SREM', MEMBERS, node) == 1
  redis.call('ZREM', LEASES, node) -- last: if a corrupt key ends the script, the node can still be reaped
  return was_member, failed
end
