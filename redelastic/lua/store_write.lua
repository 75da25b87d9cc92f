-- write: what every verb that writes to a store begins with, after store.lua.

-- I4: a node that was cut off while its run went on writes nothing.
local function fence()
  if superseded() then
    error('FENCED round ' .. EPOCH .. ' is over: the run is at epoch ' .. redis.call('HGET', RUN, 'epoch'))
  end
end

-- Wakes whoever is blocked on `key`, and tells a small value at once; `stream` is the key's wake-up stream.
local function fire(key, stream)
  if redis.call('HDEL', WAITS, key) == 1 then
    local value = redis.call('HGET', DATA, key)
    if value and #value <= 4096 then
      redis.call('XADD', stream, 'MAXLEN', 1, '*', 'value', value)
    else
      redis.call('XADD', stream, 'MAXLEN', 1, '*', 'set', 1)
    end
    redis.call('PEXPIRE', stream, 60000)
  end
end

-- Both keys get their time to live anew once a hundredth of it is gone: at each write that would cost as much as the
-- write, in replicas too. Where one is new, so is the other, or `data` has just been made again.
local function touch()
  if redis.call('PTTL', DATA) < 0.99 * TTL then
    redis.call('PEXPIRE', DATA, TTL)
    redis.call('PEXPIRE', ONCE, TTL)
  end
end

-- Whether the effect of this very request is already there, and the reply to it. Senders number their requests: a late
-- copy of one before the last, which somebody has long had an answer to, is refused.
local function done(sender, request)
  local number, kind, reply = string.match(redis.call('HGET', ONCE, sender) or '', '^(%d+)([ @]?)(.*)$')
  number = tonumber(number) or 0
  if number > tonumber(request) then
    error('a late copy of request ' .. request .. ', after request ' .. number)
  elseif number < tonumber(request) then
    if kind == '@' then
      redis.call('HDEL', ONCE, sender .. '@')
    end
    return false
  end
  return true, kind == '@' and redis.call('HGET', ONCE, sender .. '@') or kind == ' ' and reply
end

-- `reply` may be nil: nothing.
local function remember(sender, request, reply)
  local long = reply and #reply > 256
  redis.call('HSET', ONCE, sender, request .. (long and '@' or reply and ' ' .. reply or ''))
  if long then
    redis.call('HSET', ONCE, sender .. '@', reply)
  end
end
