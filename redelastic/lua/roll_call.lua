-- roll_call: asks every node to answer, since workers of a member failed and a lost peer may be the cause. A node that
-- stays silent is out after `timeout` instead of a lease. If the open roll call began before the failure, another one follows it.
-- Sent again, it changes nothing (I8); for an older round it does nothing (I4).
--
-- KEYS 1-11 of run.lua
-- ARGV 1 node, 2 epoch, 3 ago: how long ago its workers failed (ms), 4 timeout (ms)
-- Reply {when they failed (ms of the server's clock), answered: 1 if every node has answered since, else 0}, or {} if the
--       leases have to decide: the node is not a member, the run is closed, or Redis was away when the workers failed
-- I4 I7 I8 I9
local node, epoch, failed_at, timeout = ARGV[1], tonumber(ARGV[2]), now - ARGV[3], tonumber(ARGV[4])

if not run.ttl then
  return {} -- nothing of this run is on the server
end
reap(true)
local was_away = run.outage_at and failed_at <= run.outage_at -- the others may still be looking for Redis
local refused = was_away or epoch ~= run.epoch or run.closed or run.restoring
  or redis.call('SISMEMBER', MEMBERS, node) == 0
if not refused then
  if run.roll_until then
    if run.roll_called_at < failed_at then
      set('roll_again', node)
    end
  elseif not run.member_lost and (run.roll_answered or 0) < failed_at then
    open_roll_call(node, timeout)
  end
end
try_complete()
if refused then
  return {}
end
return { failed_at, (run.roll_answered or 0) >= failed_at and 1 or 0 }
