-- readmit: forgets that a host's workers failed, so that its nodes are no longer barred, and wakes the nodes that wait for this.
-- Sent again, it changes nothing (I8).
--
-- KEYS 1-10 of run.lua
-- ARGV 1 name of the host, 2 reason: the asker, and why
-- Reply 1, or 0 if the host had no failures
local name, reason = ARGV[1], ARGV[2]
if not run.ttl or redis.call('HDEL', FAILURES, name) == 0 then
  return 0
end
record('readmitted', name, 'reason', reason)
wake('readmit')
touch()
return 1
