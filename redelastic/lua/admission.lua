-- admission: the part of join and admit that lets new nodes into a round that has room, which restarts its workers. They wait
-- until the round is `admit_interval` old, so that nodes that come at about the same time share one restart; then the members'
-- workers are asked to save, and the new nodes are let in once they have (admit.lua), or their time is over.

-- The first of the nodes that are new; nil if there is none.
local function newcomer()
  return redis.call('ZRANGEBYSCORE', CANDIDATES, '(0', '+inf', 'LIMIT', 0, 1)[1]
end

local function admit(saved)
  local node = newcomer()
  record('admitted', node, 'breaks', 1, 'saved', saved)
  break_round(false, 'joined', node)
end

-- Whether new nodes wait to be let in.
local function is_held()
  return not run.broken and not run.closed and redis.call('SCARD', MEMBERS) > 0 and run.size < run.max and newcomer()
end

-- Takes the admission of new nodes a step further.
--
-- timeout: how long the members' workers have to save (ms); 0: nobody asks them to; -1: for ever, and they are not asked
--    either, but save by themselves some time
-- begins: whether no new node waited before
-- Returns in how many ms the next step can follow, -1 if only a save or another change leads to it; nil if they are let in.
local function await_admission(node, timeout, interval, begins)
  if begins or not run.admit_from then
    local completed_at, lost = unpack(redis.call('HMGET', RUN, 'completed_at', 'lost'))
    local replaces = tonumber(lost or 0) > 0 -- the round is short of nodes: it waits for nobody
    set('admit_from', replaces and now or math.max(now, math.floor(tonumber(completed_at) or now) + interval))
    set('admit_by', nil)
    set('save', nil)
  end
  if now < run.admit_from then
    return run.admit_from - now
  end
  if timeout ~= 0 and not run.save then
    set('save', ask_to_save(node, '', timeout))
    set('admit_by', timeout > 0 and now + timeout or nil)
  end
  if timeout == 0 or run.admit_by and now >= run.admit_by then
    admit(0)
    return nil
  end
  return run.admit_by and math.max(0, run.admit_by - now) or -1
end
