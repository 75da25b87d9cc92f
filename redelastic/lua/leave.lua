-- leave: takes a node out of the run for good. A member that has finished closes the run with it, so that the others,
-- who finish too, are not asked to regroup. Not so while the round is broken: then the others have to go on without it.
-- A node that is no member of the newest round closes nothing (I4).
--
-- KEYS 1-9 of run.lua
-- ARGV 1 node, 2 reason, 3 finished: 1 or 0
-- I1 I4 I5 I6 I8
local node, reason, finished = ARGV[1], ARGV[2], ARGV[3] == '1'
if not run.ttl then
  return -- nothing of this run is on the server
end
if redis.call('GET', STATUS) == 'left' then
  return
end
reap()
redis.call('SET', STATUS, 'left', 'PX', run.ttl) -- a late copy of this node's join must not bring it back
local was_member = remove(node)
if was_member and finished and not run.broken and not run.closed then
  set('closed', node)
  wake('closed', node .. ' finished')
elseif was_member and not run.closed then
  break_round(node .. ' ' .. reason, 'lost')
end
try_complete()
touch()
