-- admit: lets new nodes into the round, since all its members' workers have saved. Sent again, or for an older round or save, it
-- changes nothing (I4, I8).
--
-- KEYS 1-11 of run.lua
-- ARGV 1 epoch, 2 save: id of the wake-up that asked for it
-- Reply 1, or 0 if nobody waits for this save
-- I4 I8
if tonumber(ARGV[1]) ~= run.epoch or run.save ~= ARGV[2] or not is_held() then
  return 0
end
admit(1)
return 1
