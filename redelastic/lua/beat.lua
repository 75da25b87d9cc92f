-- beat: renews a node's lease, and reports where the node and its run stand.
--
-- KEYS 1-11 of run.lua, 12 data of the store of the node's round
-- ARGV 1-19 of restore.lua
-- Reply {standing: 'member' | 'candidate' | 'fenced' | 'unknown', epoch, why the round is broken or '', candidates,
--        why it is closed or '', ms until the lease of another node runs out or -1, stop: 1 or 0,
--        'timeout (ms) reason' if it was asked to drain or '', the roll call that it has to answer or 0}
-- I6 I7 I8 I9
restore()
if not run.epoch then -- the server has forgotten the run, and this node knows of no round: no verdict on the node
  return { 'unknown', 0, '', 0, run.closed or '', -1, run.stop and 1 or 0, '', 0 }
end
reap(ARGV[17] == '1')
local heard = tonumber(ARGV[18])
if redis.call('ZSCORE', LEASES, node) then
  renew(node, heard)
  redis.call('SET', STATUS, status, 'PX', ARGV[7])
end
try_complete()
local standing = 'fenced'
if redis.call('SISMEMBER', MEMBERS, node) == 1 then
  standing = 'member'
elseif redis.call('ZSCORE', CANDIDATES, node) then
  standing = 'candidate'
elseif run.closed and not redis.call('ZSCORE', RANKS, node) then
  standing = 'unknown' -- the server had forgotten its round, and a closed run is not put back: its workers may finish
end
if is_aging() then
  touch()
end
local left = standing == 'member' and redis.call('PTTL', KEYS[12]) or -1
if left >= 0 and left < run.ttl / 2 then -- checked apart: nodes without a round may have renewed only the run's own keys
  redis.call('PEXPIRE', KEYS[12], run.ttl)
end

local expires_in = -1
local soonest = redis.call('ZRANGE', LEASES, 0, 1, 'WITHSCORES')
for i = 1, #soonest, 2 do
  if soonest[i] ~= node then
    expires_in = math.max(0, soonest[i + 1] - now)
    break
  end
end
return { standing, run.epoch, run.broken or '', redis.call('ZCARD', CANDIDATES), run.closed or '', expires_in,
  run.stop and 1 or 0, redis.call('HGET', RUN, 'draining ' .. node) or '', to_answer(node, heard) }
