-- close: no rendezvous of this run completes any more (I5). Asked again, it changes nothing (I8), but that a run that was
-- closed may be stopped still.
--
-- KEYS 1-11 of run.lua
-- ARGV 1 why, 2 ttl (ms), 3 stop: 1 when the nodes have to end their workers too, 0 when those may finish
-- Reply why the run was closed first
set('ttl', run.ttl or tonumber(ARGV[2]))
if not run.closed or (ARGV[3] == '1' and not run.stop) then
  close(run.closed or ARGV[1], '', ARGV[3] == '1')
end
touch()
return run.closed
