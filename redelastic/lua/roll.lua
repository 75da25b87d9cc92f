-- roll: the part of every verb that judges a roll call (I7). While one is open, the lease of each node that has not answered
-- ends at `roll_until`. Only a request that knows of the call is an answer: the sender of any other may be dead by now.
-- No round completes meanwhile.
local ANSWER_MS = 0.2 -- time that Redis may need for each answer
local LAST_CHANCE_SHARE = 0.2 -- of the timeout

-- Lua passes at most a few thousand arguments at once.
local function in_portions(command, key, args)
  for i = 1, #args, 1000 do
    redis.call(command, key, unpack(args, i, math.min(i + 999, #args)))
  end
end

local function lease_until(at, nodes)
  local scores = {}
  for i, node in ipairs(nodes) do
    scores[2 * i - 1], scores[2 * i] = at, node
  end
  in_portions('ZADD', LEASES, scores)
end

local function open_roll_call(node, timeout)
  local window = math.min(timeout * (1 - LAST_CHANCE_SHARE) + ANSWER_MS * redis.call('ZCARD', LEASES), run.lease / 2)
  set('roll_called_at', now)
  set('roll_called_by', node)
  set('roll_timeout', timeout)
  set('roll_until', now + math.floor(window))
  lease_until(run.roll_until, redis.call('ZRANGEBYSCORE', LEASES, '(' .. run.roll_until, '+inf'))
  add_wake_up('roll_call', 'called_at', now)
end

-- The roll call that a node which last heard of `heard` still has to answer, or 0.
local function to_answer(node, heard)
  local expiry = run.roll_until and heard ~= run.roll_called_at and redis.call('ZSCORE', LEASES, node)
  return expiry and tonumber(expiry) <= run.roll_until and run.roll_called_at or 0
end

-- The longest lease and interval count for all nodes: else each heartbeat of the slowest node would look like an outage's end.
local function renew(node, heard)
  local lease, interval = tonumber(ARGV[7]), tonumber(ARGV[8])
  if lease > (run.lease or 0) then
    set('lease', lease)
  end
  if interval > (run.interval or 0) then
    set('interval', interval)
  end
  redis.call('ZADD', LEASES, to_answer(node, heard) > 0 and run.roll_until or now + run.lease, node)
end

local function end_roll_call()
  for _, field in ipairs({ 'called_at', 'called_by', 'timeout', 'until', 'last_chance', 'again' }) do
    set('roll_' .. field, nil)
  end
end

-- The first check after its end may run before answers that a frozen server has not read yet: the silent nodes get one
-- last chance. A node that is not `steady` has just found Redis again, so other nodes may still be looking for it: then no
-- node is judged, and each lease ends when it would have ended at the latest, so that a roll call delays no loss.
local function judge_roll_call(steady)
  if not run.roll_until or now < run.roll_until then
    return
  end
  local silent = redis.call('ZRANGEBYSCORE', LEASES, '-inf', run.roll_until)
  if not steady then
    lease_until(math.max(run.roll_called_at + run.lease, now + run.interval), silent)
    end_roll_call()
  elseif not run.roll_last_chance then
    set('roll_last_chance', 1)
    set('roll_until', now + math.ceil(math.min(run.roll_timeout * LAST_CHANCE_SHARE + ANSWER_MS * #silent, run.lease / 4)))
    lease_until(run.roll_until, silent)
  end
end

-- Ends the roll call once no node is silent; returns whether none is open then. If no member was lost, the failure that it
-- was called for is the workers' own, and the nodes that wait for this verdict are woken.
local function roll_call_is_over()
  if not run.roll_until then
    return true
  elseif redis.call('ZCOUNT', LEASES, '-inf', run.roll_until) > 0 then
    return false
  end
  local called_at, called_by, timeout, again = run.roll_called_at, run.roll_called_by, run.roll_timeout, run.roll_again
  end_roll_call()
  if run.member_lost then
    return true
  end
  set('roll_answered', called_at)
  local nodes = redis.call('ZCARD', LEASES)
  record('roll_call', called_by, 'answers', nodes, 'took_ms', now - called_at)
  add_wake_up('answered', 'called_at', called_at)
  if again and nodes > 0 then
    open_roll_call(again, timeout)
  end
  return not run.roll_until
end
