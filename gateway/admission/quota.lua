-- One tenant's limits, its keys' and its models': checked and taken all or nothing, on the server's own clock.
--
-- Rates are GCRA (the leaky bucket as a meter, ITU-T I.371, annex A). Of each only the debt is kept: how long it takes
-- until all that was taken is paid off. One unit costs T = window / limit, and a take is allowed while the debt stays
-- within the window. So who has rested may take the whole limit at once and gets one unit back every T; in any t
-- seconds never more than limit * (1 + t / window), and there is no window edge.
--
-- What lasts for a day or a month would outlive this server's data, were they lost: its ledger is in SQL. Where such a
-- limit has no state (yet, or any more) nothing is admitted, from a moment (`since`) that is noted, until `recall` has
-- brought what the ledger says was used before it. What is brought of a moment that is not noted is of data that were
-- lost meanwhile. What began before may still reach the ledger, so the state remembers `since` and how much that was
-- (`known`), and asks for a check when it is twice as old as at the last. What began later is counted here alone.
--
-- KEYS: state (hash: a limit's field -> its state), leases (sorted set: request id -> when the lease ends, ms; negative
--   once that is past and what counts requests at once has been given back), held (hash: request id -> what it took,
--   id .. PROGRESS -> how far it is), usage (stream)
-- ARGV[1] is the call; moments are in microseconds:
--   acquire, id, lease ms, prompt, completion, step, input price, output price, note, then of each limit: field, limit
--     A request for `prompt` and at most `completion` tokens, of which it is granted a multiple of `step` or refused.
--     -> {1 allowed or 0, completion tokens granted, now, of each limit: remaining, wait, reset (the last two in ms),
--         of each to be checked: its number from 0 on, since}
--     -> {2, of each to be recalled: its number, since}, and then nothing was taken
--   recall, field, limit, since, owed, known
--     owed: of what was used before `since`, what counts then. known: all of it. The first call makes the state; a later
--     one for the same `since` adds what has become known, in any order and however often.
--   settle, id, tokens used, cost, requests used (0 or 1), event or '' to add none
--     -> the event's id in the stream (the request's own without an event); nothing if the id holds no lease (any more),
--        and then nothing was done
--   extend, lease ms, then of each request: id, progress or ''     -> the ids that hold no lease (any more)
--   restore, lease ms, id, taken when, tokens, note, then of each limit: field, limit
--     Puts back a lease that was lost with this server's data, without asking whether there is room. The limits are
--     those of what is held at once.
--   expired, at most   -> of each lease that has ended: id, tokens taken, note, progress or '', taken when, ended when (ms)
--
-- A field ends with its limit's kind: r requests a minute, t tokens a minute, d tokens a day, c requests at once,
-- o tokens at once, b micro-units of money a calendar month (UTC), m changes of adapters a minute, u uploads at once. Prices are micro-units per million tokens; with at
-- most 10^9 of them and 4 * 10^6 tokens all products are exact.

local STATE, LEASES, HELD, USAGE = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local PROGRESS = ':progress'
local NOTED = '?'
local WINDOW = {r = 60000000, t = 60000000, d = 86400000000, m = 60000000}
-- Kinds of which a request takes one; kinds that are held only while it runs.
local SINGLE = {r = true, c = true, m = true, u = true}
local GAUGE = {c = true, o = true, u = true}
-- The longest that anything here is good for is a month; what nobody touches for longer goes by itself.
local KEEP_MS = 35 * 86400000
-- Nobody knows when a running request ends; a second is how long it is worth waiting before asking again.
local GAUGE_WAIT_MS = 1000
-- The age at which what was recalled is checked first: a ledger is about as far behind as this.
local FIRST_CHECK = 250000
-- Leases that one call ends, and fields it looks at for what is paid off.
local SWEEP, SAMPLE = 100, 10

local NOTHING = struct.pack('dd', 0, 0)

local floor, ceil, max, min = math.floor, math.ceil, math.max, math.min

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local now_ms = floor(now / 1000)

-- The calendar month as a number, when it began, and the ms until the next. Hinnant's civil_from_days: years begin in
-- March.
local month, month_start, month_left_ms
local function calendar()
  local days = floor(clock[1] / 86400)
  local era = floor((days + 719468) / 146097)
  local day = days + 719468 - era * 146097
  local year = floor((day - floor(day / 1460) + floor(day / 36524) - floor(day / 146096)) / 365)
  day = day - (365 * year + floor(year / 4) - floor(year / 100))
  local of_year = floor((5 * day + 2) / 153)
  local next_month = floor((153 * (of_year + 1) + 2) / 5)
  if of_year == 11 then
    -- February belongs to the year that begins with it in January.
    local civil = year + era * 400 + 1
    local leap = civil % 4 == 0 and (civil % 100 ~= 0 or civil % 400 == 0)
    next_month = leap and 366 or 365
  end
  month = (year + era * 400) * 12 + of_year
  month_start = (days - day + floor((153 * of_year + 2) / 5)) * 86400000000
  month_left_ms = (days + next_month - day) * 86400000 - now_ms
end

-- State: of a rate {when, debt in microseconds then}, of a budget {month, spent in it}, as two doubles: exact, unlike
-- decimals. Of what is recalled three more: {since, known, when to check}. Of what is taken at once a decimal integer.
local function debt_of(state)
  if not state then
    return 0
  end
  local at, debt = struct.unpack('dd', state)
  return max(0, debt - max(0, now - at))
end

local function spent_of(state)
  if not state then
    return 0
  end
  local of_month, spent = struct.unpack('dd', state)
  return of_month == month and spent or 0
end

-- A new state of a rate or a budget. `state`: the one before, whose last three are kept.
local function packed(first, second, state)
  return struct.pack('dd', first, second) .. string.sub(state or '', 17)
end

local function cost_of(tokens_in, tokens_out, price_in, price_out)
  return ceil((tokens_in * price_in + tokens_out * price_out) / 1000000)
end

local function kind_of(field)
  return string.sub(field, -1)
end

local function is_recalled(kind)
  return kind == 'b' or kind == 'd'
end

-- What a request takes of a limit.
local function amount_of(kind, tokens, cost)
  if SINGLE[kind] then
    return 1
  end
  return kind == 'b' and cost or tokens
end

-- Adds `sign` times what a lease holds of what is limited at once.
local function hold(record, sign)
  for i = 1, #record.limits, 2 do
    local field = record.limits[i]
    local kind = kind_of(field)
    if GAUGE[kind] then
      local left = redis.call('HINCRBY', STATE, field, sign * amount_of(kind, record.tokens, 0))
      if left <= 0 then
        redis.call('HDEL', STATE, field)
      end
    end
  end
end

local function record_of(id)
  local packed = redis.call('HGET', HELD, id)
  return packed and cmsgpack.unpack(packed)
end

-- Ends the leases whose time is past: releases their slots; the rest waits to be settled. A lease without a note (an
-- upload's) needs no settlement and is removed.
local function sweep()
  local ended = redis.call('ZRANGEBYSCORE', LEASES, 1, now_ms, 'WITHSCORES', 'LIMIT', 0, SWEEP)
  for i = 1, #ended, 2 do
    local id = ended[i]
    local record = record_of(id)
    if record then
      hold(record, -1)
      if record.note == '' then
        redis.call('HDEL', HELD, id, id .. PROGRESS)
        redis.call('ZREM', LEASES, id)
      else
        redis.call('ZADD', LEASES, -ended[i + 1], id)
      end
    else
      redis.call('ZREM', LEASES, id)
    end
  end
end

-- From when on nothing is admitted on a limit that has no state; noted now if it is not yet.
local function noted(field, kind)
  local since = tonumber(redis.call('HGET', STATE, field .. NOTED))
  if not since or kind == 'b' and since < month_start then
    since = now
    redis.call('HSET', STATE, field .. NOTED, string.format('%d', since))
    redis.call('PEXPIRE', STATE, KEEP_MS)
  end
  return since
end

local function acquire(id, lease_ms, prompt, completion, step, price_in, price_out, note)
  sweep()
  local first = 10
  local count = (#ARGV - first + 1) / 2
  local fields, kinds, limits = {}, {}, {}
  for i = 1, count do
    local at = first + (i - 1) * 2
    fields[i], kinds[i], limits[i] = ARGV[at], kind_of(ARGV[at]), tonumber(ARGV[at + 1])
    if kinds[i] == 'b' and not month then
      calendar()
    end
  end

  local states = count > 0 and redis.call('HMGET', STATE, unpack(fields)) or {}
  local unknown = {2}
  for i = 1, count do
    if is_recalled(kinds[i]) and not states[i] then
      unknown[#unknown + 1], unknown[#unknown + 2] = i - 1, noted(fields[i], kinds[i])
    end
  end
  if #unknown > 1 then
    return unknown
  end

  -- What is used of each limit, in its own unit, and how many tokens of completion that leaves.
  local used, room = {}, {}
  local granted = completion
  for i = 1, count do
    local kind, limit = kinds[i], limits[i]
    if WINDOW[kind] then
      used[i] = debt_of(states[i])
      local unit = WINDOW[kind] / limit
      -- Sums of T's fractions may miss the window by less than a thousandth of a unit.
      room[i] = max(0, floor((WINDOW[kind] - used[i]) / unit + 0.001))
    else
      used[i] = kind == 'b' and spent_of(states[i]) or tonumber(states[i] or 0)
      room[i] = max(0, limit - used[i])
    end
    if kind == 'b' then
      if price_out > 0 then
        -- Never more than the largest cost there is, so that the product is exact.
        granted = min(granted, floor((min(room[i], 8000000000) * 1000000 - prompt * price_in) / price_out))
      end
    elseif not SINGLE[kind] then
      granted = min(granted, room[i] - prompt)
    end
  end

  -- A call that is sent again because its answer was lost has been paid for.
  local again = record_of(id)
  if again then
    granted = again.completion
  else
    local least = min(step, completion)
    granted = granted < completion and max(least, floor(granted / step) * step) or completion
  end
  local tokens, cost = prompt + granted, cost_of(prompt, granted, price_in, price_out)

  local waits, allowed = {}, true
  for i = 1, count do
    local kind = kinds[i]
    local excess = amount_of(kind, tokens, cost) - room[i]
    waits[i] = 0
    if excess > 0 and not again then
      allowed = false
      if WINDOW[kind] then
        local unit = WINDOW[kind] / limits[i]
        waits[i] = max(1, ceil((used[i] + (amount_of(kind, tokens, cost) - 0.001) * unit - WINDOW[kind]) / 1000))
      else
        waits[i] = kind == 'b' and month_left_ms or GAUGE_WAIT_MS
      end
    end
  end

  local due = {}
  if allowed and not again then
    local record = {
      tokens = tokens, completion = granted, cost = cost, month = month, note = note, at = now, limits = {},
    }
    local writes = {}
    for i = 1, count do
      local kind = kinds[i]
      local amount = amount_of(kind, tokens, cost)
      room[i] = room[i] - amount
      local state
      if WINDOW[kind] then
        used[i] = used[i] + amount * (WINDOW[kind] / limits[i])
        state = packed(now, used[i], states[i])
      elseif kind == 'b' then
        -- A new month has nothing before it, as a rule: nobody waits for the ledger to say so.
        local before = struct.unpack('d', states[i]) == month and states[i] or struct.pack('ddddd', month, 0, now, 0, 0)
        state = packed(month, used[i] + amount, before)
      else
        state = used[i] + amount
      end
      if is_recalled(kind) then
        local since, known, check = struct.unpack('ddd', state, 17)
        if check <= now then
          due[#due + 1], due[#due + 2] = i - 1, since
          state = string.sub(state, 1, 16) .. struct.pack('ddd', since, known, now + max(now - since, FIRST_CHECK))
        end
      end
      writes[2 * i - 1], writes[2 * i] = fields[i], state
      record.limits[2 * i - 1], record.limits[2 * i] = fields[i], limits[i]
    end
    if count > 0 then
      redis.call('HSET', STATE, unpack(writes))
      redis.call('PEXPIRE', STATE, KEEP_MS)
    end
    redis.call('HSET', HELD, id, cmsgpack.pack(record))
    redis.call('PEXPIRE', HELD, KEEP_MS)
    redis.call('ZADD', LEASES, now_ms + lease_ms, id)
    redis.call('PEXPIRE', LEASES, KEEP_MS)
  end

  local reply = {allowed and 1 or 0, granted, again and again.at or now}
  for i = 1, count do
    local reset = 0
    if WINDOW[kinds[i]] then
      reset = ceil(used[i] / 1000)
    elseif kinds[i] == 'b' then
      reset = month_left_ms
    end
    local at = 3 * i + 1
    reply[at], reply[at + 1], reply[at + 2] = room[i], waits[i], reset
  end
  for i = 1, #due do
    reply[#reply + 1] = due[i]
  end
  return reply
end

local function recall(field, limit, since, owed, known)
  local kind, state = kind_of(field), redis.call('HGET', STATE, field)
  local unit = kind == 'd' and WINDOW[kind] / limit
  if state then
    local first, second = struct.unpack('dd', state)
    local of, before, check = struct.unpack('ddd', state, 17)
    if of ~= since or known <= before then
      return 0
    end
    if kind == 'd' then
      first, second = now, debt_of(state) + (known - before) * unit
    else
      second = second + known - before
    end
    state = struct.pack('ddddd', first, second, since, known, check)
  else
    calendar()
    if redis.call('HGET', STATE, field .. NOTED) ~= string.format('%d', since) or kind == 'b' and since < month_start then
      return 0
    end
    redis.call('HDEL', STATE, field .. NOTED)
    local first, second = month, owed
    if kind == 'd' then
      first, second = now, max(0, owed * unit - (now - since))
    end
    state = struct.pack('ddddd', first, second, since, known, since + FIRST_CHECK)
  end
  redis.call('HSET', STATE, field, state)
  redis.call('PEXPIRE', STATE, KEEP_MS)
  return 1
end

local function settle(id, tokens, cost, requests, event)
  local record = record_of(id)
  if not record then
    return false
  end
  local lease = redis.call('ZSCORE', LEASES, id)
  redis.call('HDEL', HELD, id, id .. PROGRESS)
  redis.call('ZREM', LEASES, id)
  if lease and tonumber(lease) > 0 then
    hold(record, -1)
  end
  for i = 1, #record.limits, 2 do
    local field, limit = record.limits[i], record.limits[i + 1]
    local kind = kind_of(field)
    if WINDOW[kind] then
      local more = SINGLE[kind] and requests - 1 or tokens - record.tokens
      if more ~= 0 then
        local state = redis.call('HGET', STATE, field)
        local debt = debt_of(state) + more * (WINDOW[kind] / limit)
        redis.call('HSET', STATE, field, packed(now, max(0, debt), state))
      end
    elseif kind == 'b' and cost ~= record.cost then
      -- What was begun last month was last month's.
      local state = redis.call('HGET', STATE, field)
      local of_month, spent = struct.unpack('dd', state or NOTHING)
      if of_month == record.month then
        redis.call('HSET', STATE, field, packed(of_month, max(0, spent + cost - record.cost), state))
      end
    end
  end
  return event == '' and id or redis.call('XADD', USAGE, '*', 'event', event)
end

local function extend(lease_ms)
  local lost = {}
  for i = 3, #ARGV, 2 do
    local id, progress = ARGV[i], ARGV[i + 1]
    local lease = redis.call('ZSCORE', LEASES, id)
    if lease then
      if tonumber(lease) < 0 then
        -- Given up too early: its gateway was away, not dead.
        hold(record_of(id), 1)
      end
      redis.call('ZADD', LEASES, now_ms + lease_ms, id)
      if progress ~= '' then
        redis.call('HSET', HELD, id .. PROGRESS, progress)
      end
    else
      lost[#lost + 1] = id
    end
  end
  return lost
end

local function restore(lease_ms, id, at, tokens, note)
  if record_of(id) then
    return 0
  end
  local record = {tokens = tokens, completion = 0, cost = 0, note = note, at = at, limits = {}}
  for i = 7, #ARGV, 2 do
    record.limits[i - 6], record.limits[i - 5] = ARGV[i], tonumber(ARGV[i + 1])
  end
  hold(record, 1)
  redis.call('HSET', HELD, id, cmsgpack.pack(record))
  redis.call('ZADD', LEASES, now_ms + lease_ms, id)
  for i = 1, 3 do
    redis.call('PEXPIRE', KEYS[i], KEEP_MS)
  end
  return 1
end

-- Forgets what some limits would say of themselves by default; a key or a model that is gone leaves no more than that.
local function forget_some()
  local sample = redis.call('HRANDFIELD', STATE, SAMPLE, 'WITHVALUES')
  calendar()
  for i = 1, #sample, 2 do
    local field, state = sample[i], sample[i + 1]
    local kind = kind_of(field)
    local gone
    if kind == 'b' then
      gone = struct.unpack('d', state) < month - 1
    elseif kind == 'd' then
      -- The ledger as well must know of nothing that counts.
      gone = debt_of(state) == 0 and struct.unpack('d', state) < now - 2 * WINDOW[kind]
    elseif kind == NOTED then
      gone = tonumber(state) < now - WINDOW.d
    else
      gone = WINDOW[kind] and debt_of(state) == 0
    end
    if gone then
      redis.call('HDEL', STATE, field)
    end
  end
end

local function expired(at_most)
  sweep()
  forget_some()
  local found = {}
  local ended = redis.call('ZREVRANGEBYSCORE', LEASES, 0, '-inf', 'WITHSCORES', 'LIMIT', 0, at_most)
  for i = 1, #ended, 2 do
    local id = ended[i]
    local record = record_of(id)
    local progress = redis.call('HGET', HELD, id .. PROGRESS) or ''
    if record then
      found[#found + 1] = {id, record.tokens, record.note, progress, record.at, -ended[i + 1]}
    else
      redis.call('ZREM', LEASES, id)
    end
  end
  return found
end

local call = ARGV[1]
if call == 'acquire' then
  return acquire(ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]),
    tonumber(ARGV[8]), ARGV[9])
elseif call == 'settle' then
  return settle(ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6])
elseif call == 'recall' then
  return recall(ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]))
elseif call == 'extend' then
  return extend(tonumber(ARGV[2]))
elseif call == 'restore' then
  return restore(tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6])
elseif call == 'expired' then
  return expired(tonumber(ARGV[2]))
end
return redis.error_reply('unknown call ' .. tostring(call))
