-- note: adds an event that an agent reports; sent again, it is added again.
--
-- KEYS 1-11 of run.lua
-- ARGV 1 event, 2 node, 3 reason, 4 detail, '' for none
record(ARGV[1], ARGV[2], ARGV[3], ARGV[4])
