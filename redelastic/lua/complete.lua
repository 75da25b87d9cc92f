-- complete: the part of every verb that may end a rendezvous (I1, I2, I3, I4, I6), and the reaping before it (I7, I9).

local function lose(node, ...)
  local was_member, failed = remove(node)
  if was_member then
    record_break(failed, 'lost', node, ...)
  else
    record('lost', node, ...)
  end
end

-- Removes members and candidates whose lease has run out. If no node at all was heard for longer than a heartbeat
-- interval allows, or the clock went back, it was the server that was away: no node is judged, every lease starts anew.
-- `steady`: the calling node has not lost Redis lately.
local function reap(steady)
  local silence = run.beat_at and now - run.beat_at or 0
  set('beat_at', now) -- first: a server without memory refuses this, and so the whole script, before any node is judged
  local was_away = run.interval and (silence > 1.5 * run.interval or silence < 0)
  if was_away then
    set('outage_at', now)
    local nodes = redis.call('ZRANGE', LEASES, 0, -1)
    lease_until(now + run.lease, nodes)
    end_roll_call()
    if nodes[1] then
      record('outage', '', silence < 0 and 'back_ms' or 'away_ms', math.abs(silence))
    end
    if silence < 0 then
      set('deadline', nil) -- these were set by another clock
      set('admit_from', nil)
      set('admit_by', nil)
      set('roll_answered', nil)
    end
    if run.restoring then
      set('restoring', now + run.lease)
    end
  else
    judge_roll_call(steady)
    local expired = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'WITHSCORES')
    for i = 1, #expired, 2 do
      local expiry = tonumber(expired[i + 1])
      if expiry == run.roll_until then
        lose(expired[i], 'cause', 'roll_call', 'silent_ms', now - run.roll_called_at, 'asked_by', run.roll_called_by)
      else
        lose(expired[i], 'cause', 'lease', 'silent_ms', now - expiry + (run.lease or 0))
      end
    end
  end
  if run.restoring and now >= run.restoring then
    local missing = run.size - redis.call('ZCARD', RANKS)
    set('restoring', nil)
    if not run.closed then
      record_break(false, 'missing', '', 'missing', missing)
    end
  end
  if run.deadline and redis.call('ZCARD', CANDIDATES) < run.min then
    set('deadline', nil) -- the next node to come begins a new last call
  end
  if run.flush_at and now >= run.flush_at then
    flush_merged_events()
  end
end

-- Former members keep their rank if it is below n; holes are filled by label, then by place among the candidates.
local function assign(chosen)
  local n, node_at, unplaced, labelled = #chosen / 2, {}, {}, redis.call('EXISTS', LABELS) == 1
  for i = 1, n do
    local node, rank = chosen[2 * i - 1], chosen[2 * i] - FORMER
    if rank < n then
      node_at[rank] = node
    else
      unplaced[#unplaced + 1] = { node = node, place = i, label = labelled and redis.call('HGET', LABELS, node) or '' }
    end
  end
  table.sort(unplaced, function(a, b)
    if a.label ~= b.label then return a.label < b.label end
    return a.place < b.place
  end)
  local next_unplaced = 1
  for rank = 0, n - 1 do
    if not node_at[rank] then
      node_at[rank] = unplaced[next_unplaced].node
      next_unplaced = next_unplaced + 1
    end
  end
  return node_at, n
end

-- Wakes the members for nodes that were asked to drain before the round: from now on there are workers to save. One save
-- serves all drains, so a few wake-ups are enough.
local function wake_drains(nodes)
  local woken = 0
  for first = 1, #nodes, 1000 do
    local fields = {}
    for i = first, math.min(first + 999, #nodes) do
      fields[i - first + 1] = 'draining ' .. nodes[i]
    end
    for i, draining in ipairs(redis.call('HMGET', RUN, unpack(fields))) do
      if draining and woken < 16 then
        woken = woken + 1
        wake_drain(nodes[first + i - 1], string.match(draining, '^(%S*) (.*)$'))
      end
    end
  end
end

local function end_admission()
  for _, field in ipairs({ 'admit_from', 'admit_by', 'save' }) do
    if run[field] then
      set(field, nil)
    end
  end
end

local function complete(because)
  local lost = (run.size or 0) - redis.call('ZCOUNT', CANDIDATES, '-inf', '(0')
  set('lost', lost)
  local node_at, n = assign(redis.call('ZRANGE', CANDIDATES, 0, run.max - 1, 'WITHSCORES'))
  local nodes, ranks = {}, {}
  for rank = 0, n - 1 do
    nodes[rank + 1], ranks[2 * rank + 1], ranks[2 * rank + 2] = node_at[rank], rank, node_at[rank]
  end
  redis.call('ZREMRANGEBYRANK', RANKS, 0, -1)
  in_portions('ZADD', RANKS, ranks)
  in_portions('SADD', MEMBERS, nodes) -- it is empty already (I1)
  redis.call('ZREMRANGEBYRANK', CANDIDATES, 0, n - 1)
  set('epoch', run.epoch + 1)
  set('size', n)
  set('master', redis.call('HGET', ENDPOINTS, node_at[0]) or '')
  set('completed_at', now)
  set('broken', nil)
  set('member_lost', nil)
  set('deadline', nil)
  set('roll_answered', nil)
  end_admission()
  record('completed', node_at[0], 'because', because, 'lost', lost, 'members', table.concat(nodes, ' '))
  wake('complete')
  wake_drains(nodes)
  touch()
end

-- Completes the rendezvous if possible; else sets `deadline`, at which it could complete without further nodes.
local function try_complete()
  if not roll_call_is_over() then
    return
  end
  local n = redis.call('ZCARD', CANDIDATES)
  if run.closed or not run.min or n < run.min then
    return run.deadline and set('deadline', nil)
  end
  if redis.call('SCARD', MEMBERS) > 0 or run.restoring then
    return -- I1: a member of the last round may still be training
  end
  local first = redis.call('ZRANGE', CANDIDATES, 0, 0, 'WITHSCORES')
  local continues = tonumber(first[2]) < 0 -- a node of the last round is here: then every node known to be alive is
  if n >= run.max then
    return complete('max_nodes')
  elseif continues and (n >= run.size or run.replacement == 0) then
    return complete('all_joined')
  elseif not run.deadline then
    set('deadline', now + (continues and run.replacement or run.last_call))
    if run.size then
      wake('deadline') -- for nodes that asked before; in a run's first rendezvous they are too few to use it
    end
  end
  if now >= run.deadline then
    complete(continues and 'replacement' or 'last_call')
  end
end
