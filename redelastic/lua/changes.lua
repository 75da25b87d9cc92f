-- changes: the part of every verb that changes who holds the round: the round breaks, the run is closed, a node is taken out, a
-- failure is charged to nobody. It wakes the blocked nodes by the stream `wake`, and records the event of each change.

local function add_wake_up(event, ...)
  return append(WAKE, 'MAXLEN', 64, 'event', event, 'epoch', run.epoch or 0, ...)
end

local function wake(event, ...)
  add_wake_up(event, 'waiting', redis.call('ZCARD', CANDIDATES), 'lost', run.member_lost and 1 or 0, ...)
end

-- Wakes the other members of a draining member's round: their workers save too.
local function wake_drain(node, timeout, reason)
  add_wake_up('drain', 'node', node, 'reason', reason, 'timeout', timeout)
end

-- Asks the workers of all members to save, since a node waits to be let in or somebody asks; the wake-up's id, which this
-- returns, orders it among the drains.
local function ask_to_save(node, reason, timeout)
  record('save', node, 'reason', reason, 'timeout_ms', timeout)
  return add_wake_up('save', 'node', node, 'reason', reason, 'timeout', timeout)
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
  end
end

-- Takes back that this round brought no progress, since a member has left, or was lost before its workers had reported a step.
local function excuse(event)
  if run.judged == run.epoch and (event ~= 'lost' or run.stepped ~= run.epoch) and not run.closed then
    set('judged', nil)
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
    set('member_lost', event)
  end
  if not run.broken or first_gone or first_lost then
    local cause = as_json({ event, node, ... })
    set('broken', run.broken or cause)
    wake('broken', 'cause', cause)
  end
  if first_lost and not failed then
    refund()
    excuse(event)
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
  for _, stream in ipairs({ WAKE, EVENTS }) do
    redis.call('XREVRANGE', stream, 0, 0) -- if it is of another type, this fails before anything is written
  end
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
