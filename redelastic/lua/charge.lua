-- charge: counts a failure of workers against the budget of the whole job, once a round, and against the host where a
-- worker failed first, if that is known. Once a round has lost a member, no failure in it counts: workers fail because their peer is gone
-- (changes.lua takes back what was counted before). It also counts the rounds in a row that brought no progress. Sent
-- again, it counts nothing twice (I8); for an older round, or from a node that is gone, it counts nothing (I4).
--
-- KEYS 1-11 of run.lua
-- ARGV 1 node, 2 name of its host, '' if nothing shows that the cause lies there, 3 epoch, 4 ago: how long ago its worker failed (ms), 5 step: the last one that its
--      workers reported or -1, 6 news: what they reported in this round: 2 something that is progress whatever the step, 1 a step,
--      0 nothing, though they did in an earlier one, -1 nothing, as ever, 7 budget: restarts that the job may make or -1,
--      8 patience: restarts in a row that may bring no progress or -1, 9 limit: of failed rounds in a row for one host or -1,
--      10 final: 1 if a loss would be known by now, so that a used-up limit stops the run; else 0,
--      11... fields of the event `failed`
-- Reply {restarts of the job, rounds in a row in which this host failed first, why the run has to be stopped, as JSON, or ''}
local node, name, epoch = ARGV[1], ARGV[2], tonumber(ARGV[3])
local failed_at = now - ARGV[4]
local step = math.min(tonumber(ARGV[5]), 2 ^ 53 - 2) -- a Lua number is exact only below 2^53; run.lua rejects others
local news, budget, patience, limit = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local final = ARGV[10] == '1'

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
  if name ~= '' then
    redis.call('HINCRBY', FAILURES, name, 1)
  end
end

-- Counts this round among the restarts in a row without progress, once, unless it brought some. A round that a node broke
-- by joining, leaving or regrouping does not count. One that lost a node counts only if its workers had reported a step before:
-- when many nodes go one after the other, a round may be too short for a step.
local function judge()
  if news == 2 or step >= (run.progress or 0) then
    set('progress', math.max(run.progress or 0, step + 1))
    set('idle', 0)
    set('judged', epoch)
  elseif run.judged ~= epoch and (not run.broken and news >= 0 or run.member_lost == 'lost' and news >= 1) then
    set('idle', (run.idle or 0) + 1)
    set('judged', epoch)
  end
  if news >= 1 then
    set('stepped', epoch)
  end
end

local verdict = run.stop and run.closed or ''
local is_member = epoch == run.epoch and redis.call('ZSCORE', LEASES, node)
if is_member and not run.stop and redis.call('HGET', RUN, 'failed ' .. node) ~= ARGV[3] then
  redis.call('HSET', RUN, 'failed ' .. node, epoch)
  record('failed', node, 'age_ms', ARGV[4], unpack(ARGV, 11))
end
if is_member and not run.closed then
  if not run.member_lost then
    set('limit', limit >= 0 and limit or nil)
    if run.charged ~= epoch then
      end_rows()
      set('charged', epoch)
      set('restarts', (run.restarts or 0) + 1)
      blame()
    elseif name ~= '' and (run.blamed == '' or failed_at < run.failed_at) then -- it failed first, though it reports later
      unblame()
      blame()
    end
  end
  judge()
  local fields
  if run.judged == epoch and patience >= 0 and run.idle >= math.max(1, patience) then
    local last_step = (run.progress or 0) > 0 and run.progress - 1 or ''
    fields = { 'cause', 'progress', 'restarts', run.idle, 'last_step', last_step, unpack(ARGV, 11) }
  elseif run.charged == epoch and budget >= 0 and run.restarts > budget then -- even if the charged node is lost by now
    fields = { 'cause', 'restarts', 'restarts', budget, unpack(ARGV, 11) }
  end
  verdict = fields and as_json({ 'stopped', node, unpack(fields) }) or ''
  if fields and final then
    close(true, node, unpack(fields))
  end
  touch()
end
return { run.restarts or 0, tonumber(redis.call('HGET', FAILURES, name) or 0), verdict }
