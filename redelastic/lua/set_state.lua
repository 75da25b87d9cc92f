-- set_state: compare-and-set of a backend's state on its fencing token, as torch's RendezvousBackend asks for it.
--
-- KEYS 1 state (hash): state, token, request
-- ARGV 1 the new state, 2 the token that it is based on; '' if it must be the first, 3 id of this request, 4 ttl (ms)
-- Reply {state, token, applied: 1 or 0}, or nothing: there is no state although the token says that there was one
-- I4: a token is never issued twice, not even after the state has expired. I8: a repeated request finds its own id.
local state, token, request = unpack(redis.call('HMGET', KEYS[1], 'state', 'token', 'request'))
if token and not (state and tonumber(token)) then
  error('CORRUPT ' .. KEYS[1] .. ': field token is not a number, or field state is missing')
elseif request == ARGV[3] then
  return { state, token, 1 }
elseif (token or '') ~= ARGV[2] then
  return token and { state, token, 0 } or false
end
local clock = redis.call('TIME')
local micros = clock[1] * 1000000 + clock[2]
token = string.format('%.0f', math.max(micros, (tonumber(token) or 0) + 1))
redis.call('HSET', KEYS[1], 'state', ARGV[1], 'token', token, 'request', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return { ARGV[1], token, 1 }
