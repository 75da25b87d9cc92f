-- note: adds an event that an agent reports; sent again, it is added again.
--
-- KEYS 1-11 of run.lua
-- ARGV 1 event, 2 node, 3... fields of the event: names and values in turn
record(unpack(ARGV))
