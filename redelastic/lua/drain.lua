-- drain: asks a node to let its workers save and to leave, and tells every node of the run. The wake-up is for speed: the
-- node's next heartbeat tells it too. Asked again while the node is there, it changes nothing (I8).
--
-- KEYS 1-11 of run.lua
-- ARGV 1 node, 2 reason, 3 timeout: how long the workers have to save (ms)
-- Reply 1, or 0 if the node is neither member nor candidate
local node, reason, timeout = ARGV[1], ARGV[2], ARGV[3]
if not redis.call('ZSCORE', LEASES, node) then
  return 0
end
if redis.call('HSETNX', RUN, 'draining ' .. node, timeout .. ' ' .. reason) == 1 then
  if record('drain', node, reason) then -- else the others have been asked to save by now, by those that drain with it
    redis.call('XADD', WAKE, 'MAXLEN', '~', 64, '*', 'event', 'drain', 'epoch', run.epoch or 0, 'node', node,
      'reason', reason, 'timeout', timeout)
  end
  touch() -- the wake stream may be new
end
return 1
