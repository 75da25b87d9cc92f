-- restore: the part of join, beat and leave that puts back what the server has forgotten of a round, from what its members know
-- (I9). The highest epoch wins. Only the number of members is known until each has identified itself: no other round
-- completes before all have, or a lease has passed (I1).
--
-- ARGV 1 node, 2 status (JSON), 3 min, 4 max, 5 last_call, 6 replacement, 7 lease, 8 interval, 9 ttl (all in ms),
--      10 epoch of the round that the node holds or 0, 11 its rank in it, 12 size, 13 master of that round, 14 when it was
--      completed (ms of the server's clock), 15 why the run is closed, as JSON, or '', 16 stop: 1 or 0, 17 steady: 1 if the node has
--      not lost Redis within the last lease, else 0, 18 heard: the last roll call that it knows of, or 0, 19 incarnation
--      of the run that it was last in, or ''
local node, status = ARGV[1], ARGV[2]
local SETTINGS = { 'min', 'max', 'last_call', 'replacement', 'lease', 'interval', 'ttl' }

-- Whether the server's run is the one that this node knows of, or has no round yet.
local function is_my_run()
  return (run.epoch or 0) == 0 or run.incarnation == ARGV[19]
end

-- Whether this node's knowledge of the run counts. Right after a server has come back empty, new nodes may form a run of
-- their own before all survivors have reported, which takes a heartbeat interval: the new run gives way to the survivors' run.
-- Later it stands: the run's record was removed and its id used again, while this node was cut off.
local function is_heard()
  return is_my_run() or now < (run.created_at or 0) + 1.5 * run.interval
end

local function set_up()
  set('protocol', PROTOCOL)
  if not run.incarnation then
    set('incarnation', node)
    set('created_at', now)
  end
  for i, field in ipairs(SETTINGS) do
    set(field, tonumber(ARGV[2 + i]))
  end
end

local function take_over(epoch)
  if not is_my_run() then
    local members = redis.call('SMEMBERS', MEMBERS)
    table.sort(members)
    for _, member in ipairs(members) do
      lose(member, 'cause', 'conflict')
    end
  end -- else its members have rejoined, left or lost their leases before this later round (I1), though the server forgot that
  set_up()
  set('incarnation', ARGV[19])
  set('epoch', epoch)
  set('size', tonumber(ARGV[12]))
  set('master', ARGV[13])
  set('lost', 0)
  set('completed_at', tonumber(ARGV[14]))
  set('restoring', now + run.lease)
  for _, field in ipairs({ 'broken', 'member_lost', 'deadline', 'roll_answered' }) do
    set(field, nil)
  end
  end_roll_call()
  end_admission()
  redis.call('DEL', RANKS, MEMBERS)
  for _, candidate in ipairs(redis.call('ZRANGEBYSCORE', CANDIDATES, '-inf', '(0')) do -- of an older round
    redis.call('ZADD', CANDIDATES, redis.call('HINCRBY', RUN, 'arrivals', 1), candidate)
  end
  record('restored', node)
end

local function restore()
  local epoch, rank, size = tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
  if ARGV[15] ~= '' and is_heard() and (not run.closed or ARGV[16] == '1' and not run.stop) then
    set('ttl', run.ttl or tonumber(ARGV[9]))
    set('protocol', PROTOCOL)
    set('closed', run.closed or ARGV[15])
    close(ARGV[16] == '1', node, unpack(from_json(ARGV[15], 3)))
    touch()
  end
  if run.closed or rank >= size or not is_heard() or redis.call('GET', STATUS) == 'left' then
    return
  end
  if epoch > (run.epoch or 0) then
    take_over(epoch)
  end
  if epoch ~= run.epoch or not is_my_run() then
    return
  end
  local master, completed_at = unpack(redis.call('HMGET', RUN, 'master', 'completed_at'))
  local same_round = size == run.size and ARGV[13] == master and ARGV[14] == completed_at
  local place = redis.call('ZSCORE', RANKS, node)
  if place and not (same_round and tonumber(place) == rank) and redis.call('SISMEMBER', MEMBERS, node) == 1 then
    lose(node, 'cause', 'conflict') -- one that the server has forgotten
  end
  if place or not run.restoring or not same_round or redis.call('ZCOUNT', RANKS, rank, rank) > 0 then
    return -- of two rounds with one epoch the first stays: the node is fenced
  end
  redis.call('ZREM', CANDIDATES, node)
  redis.call('ZADD', RANKS, rank, node)
  redis.call('ZADD', LEASES, now + run.lease, node)
  redis.call('SADD', MEMBERS, node)
  if redis.call('ZCARD', RANKS) == run.size then
    set('restoring', nil)
    local waiting = redis.call('ZRANGE', CANDIDATES, 0, 0)[1]
    if waiting and run.size < run.max then
      record_break(false, 'joined', waiting)
    end
  end
  touch()
end
