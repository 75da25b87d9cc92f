-- join: asks for a place in a round later than `after`; asked again, it answers the same (I8). A blocked node asks
-- again whenever it is woken, and when `wait` has passed.
--
-- KEYS 1-11 of run.lua, 12 data of the store of round `after`, which ends now
-- ARGV 1-19 of restore.lua, 20 after: last epoch that the node held, 0 if none, 21 endpoint, 22 label, 23 admit_timeout,
--      24 admit_interval (ms): how this node is let into a round that trains (admission.lua); both 0: at once,
--      25 1 if its workers have left round `after` and wait for the next one, else 0
-- Reply {'complete', epoch, rank, size, master, completed_at, lost: how many nodes of the previous round did not come back,
--        incarnation}
--       {'waiting', epoch, last wake id, wait: ms until the rendezvous may complete, or it may be let in, by itself or -1,
--        spare: 1 or 0, the roll call that it has to answer or 0, held: 1 if it waits to be let in, else 0}
--       {'closed', why, spare: 1 or 0, stop: 1 or 0} | {'mismatch', min, max, lease, interval (ms)} | {'left'}
-- I1 I2 I3 I4 I5 I6 I8
local min, max, after, endpoint, label = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[20]), ARGV[21], ARGV[22]
local heard = tonumber(ARGV[18])
local admit_timeout, admit_interval = tonumber(ARGV[23]), tonumber(ARGV[24])
local is_patient = admit_timeout ~= 0 or admit_interval > 0

if redis.call('GET', STATUS) == 'left' then
  return { 'left' } -- a late copy of a request that this node has since withdrawn
end
restore()
reap(ARGV[17] == '1')
local is_member = redis.call('SISMEMBER', MEMBERS, node) == 1
local is_candidate = redis.call('ZSCORE', CANDIDATES, node)
if run.closed then
  local spare = is_candidate and tonumber(is_candidate) > 0 and run.size == run.max
  return { 'closed', run.closed, spare and 1 or 0, run.stop and 1 or 0 }
end

if tonumber(ARGV[10]) > 0 and not is_member and not is_candidate then
  try_complete() -- nodes may just have been reaped
  return { 'left' } -- it held a round and has lost its lease: it comes back as a new node, or this is a late copy (I4)
end

local empty = redis.call('ZCARD', LEASES) == 0
if empty or not run.min then
  set_up()
elseif min ~= run.min or max ~= run.max then
  try_complete() -- nodes may just have been reaped
  return { 'mismatch', run.min or false, run.max or false, run.lease or 0, run.interval or 0 }
end
if not is_my_run() then
  after = 0
elseif after > (run.epoch or -1) then
  set('epoch', after) -- the server has forgotten it: no epoch is used twice (I4)
  set('incarnation', ARGV[19] ~= '' and ARGV[19] or run.incarnation)
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
redis.call('SET', STATUS, status, 'PX', ARGV[7])
renew(node, heard) -- before it is a candidate: if anything fails then, it can still be reaped
if regroups then
  redis.call('SREM', MEMBERS, node)
  redis.call('ZADD', CANDIDATES, FORMER + rank, node)
  record_break(false, 'regrouped', node, unpack(ARGV[25] == '1' and { 'parked', 1 } or {}))
  redis.call('PEXPIRE', KEYS[12], math.min(60000, run.ttl)) -- some may still read it
elseif not is_member and not is_candidate then
  redis.call('ZADD', CANDIDATES, redis.call('HINCRBY', RUN, 'arrivals', 1), node)
  if redis.call('SCARD', MEMBERS) > 0 and run.size < run.max and not is_patient then
    record_break(false, 'joined', node)
  else
    record('joined', node)
  end
end
local next_step
if is_patient and not is_member and is_held() then
  local begins = not is_candidate and redis.call('ZCOUNT', CANDIDATES, '(0', '+inf') == 1
  next_step = await_admission(node, admit_timeout, admit_interval, begins)
end
try_complete()
if redis.call('ZCARD', CANDIDATES) == 1 or label ~= '' and redis.call('HLEN', LABELS) == 1 or empty or is_aging() then
  touch() -- some keys may be new; in a large group not every join does this
end

if run.epoch > after and redis.call('SISMEMBER', MEMBERS, node) == 1 then
  local master, completed_at, lost = unpack(redis.call('HMGET', RUN, 'master', 'completed_at', 'lost'))
  return { 'complete', run.epoch or false, tonumber(redis.call('ZSCORE', RANKS, node)), run.size or false, master or '',
    tonumber(completed_at) or 0, tonumber(lost) or 0, run.incarnation or '' }
end
local last = redis.call('XREVRANGE', WAKE, '+', '-', 'COUNT', 1)
local full = run.size == run.max and redis.call('SCARD', MEMBERS) == run.size
local wait = run.deadline and math.max(0, run.deadline - now) or next_step or -1
return { 'waiting', run.epoch or false, last[1] and last[1][1] or '0-0', wait, full and 1 or 0,
  to_answer(node, heard), -- even a roll call opened just now: the node reads on from the last wake-up
  next_step and 1 or 0 }
