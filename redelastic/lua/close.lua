-- close: no rendezvous of this run completes any more (I5). Asked again, it changes nothing (I8).
--
-- KEYS 1-9 of run.lua
-- ARGV 1 by whom, 2 ttl (ms)
-- Reply by whom the run was closed first
set('ttl', run.ttl or tonumber(ARGV[2]))
if not run.closed then
  set('closed', ARGV[1])
  set('deadline', nil)
  wake('closed', ARGV[1])
end
touch()
return run.closed
