-- close: no further rendezvous of this run completes (I5). Asked again, it changes nothing (I8), except that a closed run
-- may still be stopped.
--
-- KEYS 1-11 of run.lua
-- ARGV 1 why, 2 ttl (ms), 3 stop: 1 if the nodes have to end their workers too, 0 if those may finish
-- Reply why the run was first closed
set('ttl', run.ttl or tonumber(ARGV[2]))
if not run.closed or (ARGV[3] == '1' and not run.stop) then
  close(run.closed or ARGV[1], '', ARGV[3] == '1')
end
touch()
return run.closed
