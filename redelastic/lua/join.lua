-- join: asks for a place in a round later than `after`; asked again, it answers the same (I8). A blocked node asks
-- again whenever it is woken, and when `wait` has passed.
--
-- KEYS 1-9 of run.lua, 10 data, 11 waits, 12 once: the store of round `after`, which ends now
-- ARGV 1 node, 2 after: last epoch that the node held, 0 if none, 3 endpoint, 4 label, 5 status (JSON), 6 min, 7 max,
--      8 last_call, 9 replacement, 10 lease, 11 interval, 12 ttl (all in ms)
-- Reply {'complete', epoch, rank, size, master, lost: how many nodes of the round before did not come back}
--       {'waiting', epoch, last wake id, wait: ms until the rendezvous may complete by itself or -1, spare: 1 or 0}
--       {'closed', by whom, spare: 1 or 0} | {'mismatch', min, max} | {'left'}
-- I1 I2 I3 I4 I5 I6 I8
local node, after, endpoint, label, status = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local min, max = tonumber(ARGV[6]), tonumber(ARGV[7])

if redis.call('GET', STATUS) == 'left' then
  return { 'left' } -- a late copy of a request that this node had taken back
end
reap()
local is_member = redis.call('SISMEMBER', MEMBERS, node) == 1
local is_candidate = redis.call('ZSCORE', CANDIDATES, node)
if run.closed then
  local spare = is_candidate and tonumber(is_candidate) > 0 and run.size == run.max
  return { 'closed', run.closed, spare and 1 or 0 }
end

local empty = redis.call('ZCARD', LEASES) == 0
if empty or not run.min then
  for i, field in ipairs({ 'min', 'max', 'last_call', 'replacement', 'lease', 'interval', 'ttl' }) do
    set(field, tonumber(ARGV[5 + i]))
  end
elseif min ~= run.min or max ~= run.max then
  try_complete() -- some may just have been reaped
  return { 'mismatch', run.min, run.max }
end
if after > (run.epoch or -1) then
  set('epoch', after) -- the server lost its data: no epoch is given twice (I4)
end

local regroups = is_member and run.epoch <= after
local rank = is_member and redis.call('ZSCORE', RANKS, node)
if is_member and not rank then
  error('CORRUPT ' .. KEYS[2] .. ': the member ' .. node .. ' has no rank')
end
if regroups or not (is_member or is_candidate) then -- not for a late copy of a join, whose port is closed by now
  redis.call('HSET', ENDPOINTS, node, endpoint)
  if label ~= '' then
    redis.call('HSET', LABELS, node, label)
  end
end
redis.call('SET', STATUS, status, 'PX', ARGV[10])
redis.call('ZADD', LEASES, now + ARGV[10], node) -- before it is a candidate: whatever fails then, it can be reaped
if regroups then
  redis.call('SREM', MEMBERS, node)
  redis.call('ZADD', CANDIDATES, FORMER + rank, node)
  break_round(node .. ' regroups', 'regroups')
  for i = 10, 12 do
    redis.call('PEXPIRE', KEYS[i], 60000) -- the last waiters on the old round's store still read that it is over
  end
elseif not is_member and not is_candidate then
  redis.call('ZADD', CANDIDATES, redis.call('HINCRBY', RUN, 'arrivals', 1), node)
  if redis.call('SCARD', MEMBERS) > 0 and run.size < run.max then
    break_round(node .. ' waits to join', 'waits')
  end
end
try_complete()
touch()

if run.epoch > after and redis.call('SISMEMBER', MEMBERS, node) == 1 then
  local master, lost = unpack(redis.call('HMGET', RUN, 'master', 'lost'))
  return { 'complete', run.epoch, tonumber(redis.call('ZSCORE', RANKS, node)), run.size, master, tonumber(lost) }
end
local last = redis.call('XREVRANGE', WAKE, '+', '-', 'COUNT', 1)
local full = run.size == run.max and redis.call('SCARD', MEMBERS) == run.size
return { 'waiting', run.epoch, last[1] and last[1][1] or '0-0', run.deadline and math.max(0, run.deadline - now) or -1, full and 1 or 0 }
