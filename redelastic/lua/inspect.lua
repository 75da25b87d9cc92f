-- inspect: reads everything about a run at one moment. It changes nothing.
--
-- KEYS 1-10 of run.lua
-- Reply {now (ms), run, ranks, members, candidates, leases, failures}: names and values in turn
return {
  now, redis.call('HGETALL', RUN), redis.call('ZRANGE', RANKS, 0, -1, 'WITHSCORES'), redis.call('SMEMBERS', MEMBERS),
  redis.call('ZRANGE', CANDIDATES, 0, -1, 'WITHSCORES'), redis.call('ZRANGE', LEASES, 0, -1, 'WITHSCORES'),
  redis.call('HGETALL', FAILURES),
}
