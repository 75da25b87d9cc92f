-- note: adds an event that an agent tells of; sent again, it is added again.
--
-- KEYS 1-11 of run.lua
-- ARGV names and values of the event's fields in turn
redis.call('XADD', EVENTS, 'MAXLEN', '~', 10000, '*', 'epoch', run.epoch or 0, 'size', run.size or 0, unpack(ARGV))
redis.call('PEXPIRE', EVENTS, run.ttl or 7200000)
