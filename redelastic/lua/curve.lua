-- curve: adds what a node has measured to what the run's nodes have measured in this minute, on the server's clock.
--
-- KEYS 1 curves (hash)   minute since 1970 -> 'measure=value/more' for each measure: the sum over nodes, and of how many; or
--                        the greatest, and when it was reported, in ms; first -> the first minute that may be there
-- ARGV 1 ttl (ms), 2 how many minutes are kept, then of each measure: its name, 'sum' or 'max', the value
local CURVES, KEPT = KEYS[1], tonumber(ARGV[2])

local clock = redis.call('TIME')
local minute, now = math.floor(clock[1] / 60), clock[1] * 1000 + math.floor(clock[2] / 1000)

local point = {}
for measure, value, more in string.gmatch(redis.call('HGET', CURVES, minute) or '', '(%S+)=([^/%s]+)/(%S+)') do
  value, more = tonumber(value), tonumber(more)
  point[measure] = value and more and { value, more } -- else redelastic did not write it
end
for i = 3, #ARGV, 3 do
  local measure, value = ARGV[i], tonumber(ARGV[i + 2])
  local before = point[measure]
  if ARGV[i + 1] == 'sum' then
    point[measure] = { (before and before[1] or 0) + value, (before and before[2] or 0) + 1 }
  elseif not before or value > before[1] then
    point[measure] = { value, now }
  end
end
local texts = {}
for measure, figures in pairs(point) do
  texts[#texts + 1] = string.format('%s=%.17g/%.0f', measure, figures[1], figures[2])
end
redis.call('HSET', CURVES, minute, table.concat(texts, ' '))

local first = tonumber(redis.call('HGET', CURVES, 'first') or minute) or minute
for old = math.max(first, minute - 2 * KEPT), minute - KEPT do
  redis.call('HDEL', CURVES, old)
end
redis.call('HSET', CURVES, 'first', math.min(math.max(first, minute - KEPT + 1), minute))
redis.call('PEXPIRE', CURVES, ARGV[1])
