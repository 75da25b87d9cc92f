-- charge: counts a failure of workers against the budget of the whole job, once a round, and against the host where a
-- worker failed first. Once a round has lost a member, no failure in it counts: workers fail because their peer is gone
-- (changes.lua takes back what was counted before). Sent again, it counts nothing twice (I8); for an older round, or from a
-- node that is gone, it counts nothing (I4).
--
-- KEYS 1-11 of run.lua
-- ARGV 1 node, 2 name of its host, 3 epoch, 4 ago: how long ago its worker failed (ms), 5 step: the last one that its
--      workers reported or -1, 6 budget: restarts that the job may make or -1, 7 patience: restarts in a row that may
--      bring no progress or -1, 8 limit: of failed rounds in a row for one host or -1,
--      9 final: 1 if a loss would be known by now, so that a used-up limit stops the run; else 0,
--      10... fields of the event `failed`
-- Reply {restarts of the job, rounds in a row in which this host failed first, why the run has to be stopped, as JSON, or ''}
local node, name, epoch = ARGV[1], ARGV[2], tonumber(ARGV[3])
local failed_at = now - ARGV[4]
local step = math.min(tonumber(ARGV[5]), 2 ^ 53 - 2) -- a Lua number is exact only below 2^53; run.lua rejects others
local budget, patience, limit, final = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9] == '1'

-- A row ends when a round ends for another reason, or by another host's failure. A barred host stays barred.
local function end_rows()
  local counts = redis.call('HGETALL', FAILURES)
  for i = 1, #counts, 2 do
    local goes_on = run.charged == epoch - 1 and counts[i] == run.blamed
    if not goes_on and (limit < 0 or tonumber(counts[i + 1]) < limit) then
      redis.call('HDEL', FAILURES, counts[i])
    end
  end
end

local function blame()
  set('failed_at', failed_at)
  set('blamed', name)
  set('blamed_node', node)
  redis.call('HINCRBY', FAILURES, name, 1)
end

local verdict = run.stop and run.closed or ''
if epoch == run.epoch and not run.closed and redis.call('ZSCORE', LEASES, node) then
  if redis.call('HGET', RUN, 'failed ' .. node) ~= ARGV[3] then
    redis.call('HSET', RUN, 'failed ' .. node, epoch)
    record('failed', node, 'age_ms', ARGV[4], unpack(ARGV, 10))
  end
  if not run.member_lost then
    set('limit', limit >= 0 and limit or nil)
    if run.charged ~= epoch then
      end_rows()
      set('charged', epoch)
      set('idle', (run.restarts or 0) > 0 and (run.idle or 0) + 1 or 0)
      set('restarts', (run.restarts or 0) + 1)
      blame()
    elseif failed_at < run.failed_at then -- it failed first, though it reports later
      unblame()
      blame()
    end
    if step >= (run.progress or 0) then
      set('progress', step + 1)
      set('idle', 0)
    end
  end
  if run.charged == epoch then -- even if the charged node is lost by now
    local fields
    if patience >= 0 and run.idle >= math.max(1, patience) then
      fields = { 'cause', 'progress', 'restarts', run.idle, 'last_step', run.progress and run.progress - 1 or '', unpack(ARGV, 10) }
    elseif budget >= 0 and run.restarts > budget then
      fields = { 'cause', 'restarts', 'restarts', budget, unpack(ARGV, 10) }
    end
    verdict = fields and as_json({ 'stopped', node, unpack(fields) }) or ''
    if fields and final then
      close(true, node, unpack(fields))
    end
  end
  touch()
end
return { run.restarts or 0, tonumber(redis.call('HGET', FAILURES, name) or 0), verdict }
