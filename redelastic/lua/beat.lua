-- beat: renews a node's lease, and tells it how its run stands.
--
-- KEYS 1-9 of run.lua, 10 data, 11 waits, 12 once: the store of the node's round
-- ARGV 1 node, 2 lease (ms), 3 status (JSON)
-- Reply {standing: 'member' | 'candidate' | 'fenced' | 'unknown', epoch, why the round is broken or '', candidates,
--        closed by whom or '', ms until the lease of another node runs out or -1}
-- I6 I7 I8 I9
local node, lease, status = ARGV[1], tonumber(ARGV[2]), ARGV[3]
if not run.epoch then
  return { 'unknown', 0, '', 0, run.closed or '', -1 } -- the server lost its data: no verdict on anybody
end
reap()
if redis.call('ZSCORE', LEASES, node) then
  redis.call('ZADD', LEASES, now + lease, node)
  redis.call('SET', STATUS, status, 'PX', lease)
end
try_complete()
local standing = 'fenced'
if redis.call('SISMEMBER', MEMBERS, node) == 1 then
  standing = 'member'
elseif redis.call('ZSCORE', CANDIDATES, node) then
  standing = 'candidate'
end
if redis.call('PTTL', RUN) < run.ttl / 2 then
  touch()
  for i = 10, 12 do
    redis.call('PEXPIRE', KEYS[i], run.ttl)
  end
end

local expires_in = -1
local soonest = redis.call('ZRANGE', LEASES, 0, 1, 'WITHSCORES')
for i = 1, #soonest, 2 do
  if soonest[i] ~= node then
    expires_in = math.max(0, soonest[i + 1] - now)
    break
  end
end
return { standing, run.epoch, run.broken or '', redis.call('ZCARD', CANDIDATES), run.closed or '', expires_in }
