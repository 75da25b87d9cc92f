-- close: no further rendezvous of this run completes (I5). Asked again, it changes nothing (I8), except that a closed run
-- may still be stopped.
--
-- KEYS 1-11 of run.lua
-- ARGV 1 ttl (ms), 2 stop: 1 if the nodes have to end their workers too, 0 if the workers may finish, 3 node that asks, or '',
--      4... fields of the event `closed`
-- Reply why the run was first closed, as JSON
local stop = ARGV[2] == '1'
run.ttl = run.ttl or tonumber(ARGV[1]) -- written below: what fails leaves nothing
if not run.closed or (stop and not run.stop) then
  close(stop, unpack(ARGV, 3))
end
set('ttl', run.ttl)
set('protocol', PROTOCOL)
touch()
return run.closed
