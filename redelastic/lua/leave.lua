-- leave: takes a node out of the run for good. A member that has finished thereby closes the run, so that the other
-- members, which finish too, do not regroup; a member that has failed for good stops it. Not while the round is broken:
-- then the other members have to go on without it. A node that is not a member of the newest round closes nothing (I4).
--
-- KEYS 1-11 of run.lua
-- ARGV 1-19 of restore.lua, 20 what becomes of the run: 'goes on' | 'closes' | 'stops', 21... fields of the event `left`
-- I1 I4 I5 I6 I8 I9
local run_then = ARGV[20]
restore()
if not run.ttl then -- nothing of this run is on the server, perhaps not yet
  redis.call('SET', STATUS, 'left', 'PX', ARGV[9])
  return
end
if redis.call('GET', STATUS) == 'left' then
  return
end
reap(ARGV[17] == '1')
redis.call('SET', STATUS, 'left', 'PX', run.ttl) -- a late copy of this node's join must not bring it back
local was_here = redis.call('ZSCORE', LEASES, node)
local was_member, failed = remove(node)
local closes = was_member and run_then ~= 'goes on' and not run.broken and not run.closed
if was_member and not closes and not run.closed then
  record_break(failed, 'left', node, unpack(ARGV, 21))
elseif was_here then
  record('left', node, unpack(ARGV, 21))
end
if closes then
  close(run_then == 'stops', node, unpack(ARGV, 21))
end
try_complete()
if run.flush_at and redis.call('ZCARD', LEASES) == 0 then
  flush_merged_events() -- no heartbeat will come that flushes them
end
touch()
