-- events: the part of every verb that writes down what happened, in the stream `events`, for people and tools: what many
-- nodes do at the same time is merged into a few events.

-- A list of texts and whole numbers, as JSON.
local function as_json(list)
  for i, value in ipairs(list) do
    list[i] = type(value) == 'number' and string.format('%.0f', value) or value
  end
  return cjson.encode(list)
end

-- The names and values in a JSON text from Redis, from the `first` on; none if redelastic did not write it.
local function from_json(text, first)
  local known, list = pcall(cjson.decode, text)
  local pairs = {}
  for i = first or 1, known and type(list) == 'table' and #list or 0 do
    pairs[#pairs + 1] = type(list[i]) == 'string' and list[i] or ''
  end
  return #pairs % 2 == 0 and pairs or {}
end

-- Adds an entry to a stream; returns its id. A stream that holds the largest id, as only a user of the run can have written it,
-- takes no other: it begins anew, with an event that says so.
local function append(stream, limit, count, ...)
  local id = redis.pcall('XADD', stream, limit, '~', count, '*', ...)
  if type(id) == 'table' then -- an error
    if string.find(id.err, 'last possible ID', 1, true) then
      redis.call('DEL', stream)
      append(EVENTS, 'MAXLEN', 10000, 'event', 'cleared', 'epoch', run.epoch or 0, 'size', run.size or 0, 'node', '',
        'stream', stream == WAKE and 'wake' or 'events')
    end
    id = redis.call('XADD', stream, limit, '~', count, '*', ...) -- raises any other error
  end
  redis.call('PEXPIRE', stream, run.ttl or 86400000)
  return id
end

-- Keeps some 10,000 events, of 6 MiB at most, which take up to 8: whenever 3 MiB have been `written`, it drops all before
-- `mark`, where these 3 MiB begin.
local function add(...)
  local size, limit, count = 0, 'MAXLEN', 10000
  for _, field in ipairs({ ... }) do
    size = size + #tostring(field)
  end
  local full = run.ttl and (run.written or 0) + size > 3145728
  if full then
    limit, count = 'MINID', string.match(run.mark or '', '^%d+%-%d+$') or '0-0'
  end
  local id = append(EVENTS, limit, count, ...)
  if full then
    set('mark', id)
    set('written', size)
  elseif run.ttl then -- else there is no run yet, and this must not make one
    set('written', (run.written or 0) + size)
  end
end

-- What many nodes do at the same time is one event: from the 17th in a row on, each within a second of the one before,
-- nodes are collected, and recorded together once 64 have come, a second has passed, or another event is recorded that
-- they may have led to. A field `many <event>` holds the row: when the last came, epoch, size, count, the nodes not yet
-- recorded, and the first one's fields.
-- MERGED is a string, since a table would be built anew for every verb.
local MERGED = '|joined|regrouped|started|lost|left|drain|saved|failed|hung|log|refused|barred|unreached|'

local function is_merged(event)
  return string.find(MERGED, '|' .. event .. '|', 1, true)
end

local function row_of(event)
  local row = redis.call('HGET', RUN, 'many ' .. event)
  local last, epoch, size, count, nodes, fields = string.match(row or '', '^(%d+) (%d+) (%d+) (%d+) ([^\n]*)\n(.*)$')
  return tonumber(last), tonumber(epoch), size, tonumber(count), nodes, fields
end

local function keep_row(event, last, epoch, size, count, nodes, fields)
  local numbers = string.format('%.0f %.0f %.0f %.0f ', last, epoch, size, count)
  redis.call('HSET', RUN, 'many ' .. event, numbers .. nodes .. '\n' .. fields)
end

local function flush_merged_events()
  set('flush_at', nil)
  for event in string.gmatch(MERGED, '[^|]+') do
    local last, epoch, size, count, nodes, fields = row_of(event)
    if last and nodes ~= '' then
      add('event', event, 'epoch', epoch, 'size', size, 'node', string.match(nodes, '^%S*'), 'nodes', nodes,
        unpack(from_json(fields)))
      keep_row(event, last, epoch, size, count, '', '')
    end
  end
end

-- Records an event of a node, with the fields of its kind (names and values in turn). Returns whether it is recorded by
-- itself, after anything collected before it. An event that broke a round always is, and the log of the worker that failed
-- first: people look for its lines.
local function record(event, node, ...)
  local this, size, fields = run.epoch or 0, run.size or 0, { ... }
  local stands_out = fields[1] == 'breaks' or event == 'log' and node == run.blamed_node
  if is_merged(event) and run.ttl and not stands_out then
    local last, epoch, _, count, nodes, first_fields = row_of(event)
    local is_new = not last or epoch ~= this or now - last > 1000 or now < last
    local encoded = fields[1] and as_json(fields) or '[]'
    local says_all = event == 'left' or event == 'regrouped' -- whose fields hold for all nodes of a merged event
    if last and nodes ~= '' and (is_new or says_all and encoded ~= first_fields) then
      flush_merged_events()
      nodes = ''
    end
    count = is_new and 0 or count
    if count >= 16 then
      local first = nodes == ''
      keep_row(event, now, this, size, count + 1, first and node or nodes .. ' ' .. node, first and encoded or first_fields)
      if (count - 15) % 64 == 0 then
        flush_merged_events()
      elseif not run.flush_at then
        set('flush_at', now + 1000)
      end
      return false
    end
    keep_row(event, now, this, size, count + 1, '', '')
  end
  if run.flush_at then
    flush_merged_events()
  end
  add('event', event, 'epoch', this, 'size', size, 'node', node, unpack(fields))
  return true
end
