-- leave: takes a node out of the run for good. A member that has finished closes the run with it, so that the others,
-- who finish too, are not asked to regroup; a node that is no member of the newest round cannot (I4).
--
-- KEYS 1-9 of run.lua
-- ARGV 1 node, 2 reason, 3 finished: 1 or 0
-- Reply 1 if the node was a member, else 0
-- I1 I4 I5 I6 I8
local node, reason, finished = ARGV[1], ARGV[2], ARGV[3] == '1'
if not run.ttl then
  return 0 -- nothing of this run is on the server
end
reap()
if redis.call('GET', STATUS) == 'left' then
  return 0
end
redis.call('SET', STATUS, 'left', 'PX', run.ttl) -- a late copy of this node's join must not bring it back
local was_member = remove(node)
if was_member and finished and not run.closed then
  set('closed', node)
  wake('closed', node .. ' finished')
elseif was_member and not run.closed then
  break_round(node .. ' ' .. reason, true)
end
set('beat_at', now)
try_complete()
touch()
return was_member and 1 or 0
