-- drain: asks a node to let its workers save and to leave. If it is a member, the others are woken: their workers save too.
-- The node itself learns of it from its next heartbeat at the latest. Sent again while the node is there, it changes
-- nothing (I8).
--
-- KEYS 1-11 of run.lua
-- ARGV 1 node, 2 reason, 3 timeout: how long the workers have to save (ms)
-- Reply 1, or 0 if the node is neither member nor candidate
local node, reason, timeout = ARGV[1], ARGV[2], ARGV[3]
if not redis.call('ZSCORE', LEASES, node) then
  return 0
end
if redis.call('HSETNX', RUN, 'draining ' .. node, timeout .. ' ' .. reason) == 1 then
  local is_recorded_alone = record('drain', node, 'reason', reason, 'timeout_ms', timeout)
  if redis.call('SISMEMBER', MEMBERS, node) == 1 then -- a candidate has no workers, so the other nodes have nothing to save for
    -- Of many drains at once only a few wake the others, then one a second: one save serves all of them.
    local second = string.format('%.0f %.0f', run.epoch or 0, math.floor(now / 1000))
    if is_recorded_alone or redis.call('HGET', RUN, 'drain_woke') ~= second then
      redis.call('HSET', RUN, 'drain_woke', second)
      wake_drain(node, timeout, reason)
    end
  end
end
return 1
