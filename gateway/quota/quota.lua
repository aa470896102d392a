-- Limits of one tenant, its keys and its models, by the server's own clock. A request is reserved on all or on none.
--
-- Rates are leaky buckets used as meters (GCRA; ITU-T I.371, annex A). A bucket's debt is the time until all usage is
-- paid off: one unit costs T = window / limit, and the debt shrinks by a second every second. The tokens of a request
-- pass two stages:
--   held   While the request runs, it holds the tokens that it may still use. Held tokens do not decay, because they
--          may be used at any moment. A hold is the whole reservation, or starts with the prompt and the expected
--          completion and grows.
--   debt   The tokens that it really used become debt, which decays from then on: at its end, and with each `grow` and
--          `extend` while it runs. A request that needs more than was expected grows its hold, or is ended.
-- A hold is made or grows only if debt + T * held stays within the window. So in any t seconds the tokens really used
-- are at most limit * (1 + t / window): used tokens are either debt, of which at most t was paid off, or still held. A
-- new request leaves a quarter of the window, or as much as it could grow, to the growth of running ones. A request
-- counts towards a rate of requests when it is admitted.
--
-- Budgets and limits of a day outlive this server's data, because the ledger in SQL has them. If such a limit has no
-- state, the script stores the current moment (`since`) and admits nothing until `backfill` copies the usage before
-- `since` from the ledger. A request that was admitted before `since` reaches the state through the ledger only:
-- `backfill` is repeated and adds the rows that have arrived (`known`). A request that was admitted later is counted
-- here only.
--
-- Another server (a restart, a failover) may hold older data. The state therefore contains the server's run id: if it
-- differs, the states of budgets and days are dropped and backfilled. A large state is dropped in parts, and until the
-- last one no request under such limits is admitted.
--
-- KEYS: state (hash: a limit's field -> its state), leases (sorted set: request id -> end of the lease, ms; negative
--   once the lease has ended and the request's slots are released), held (hash: request id -> its record,
--   id .. PROGRESS -> its progress), usage (stream), abandoned (sorted set: request id -> moment, ms, at which another
--   gateway settled the request)
-- ARGV[1] is the call; moments are in microseconds:
--   acquire, id, lease ms, prompt, completion, expected, step, input price, output price, note, then of each limit:
--     field, limit
--     Reserves `prompt` and at most `completion` tokens; of the completion it grants a multiple of `step` or refuses.
--     Rates hold `expected` of the completion at first.
--     -> {1 if allowed or 0, completion tokens granted, moment of the ledger's row, of each limit: remaining, wait,
--         reset (both in ms), the room that running requests reserve, of each limit whose backfill is to be repeated: its
--         number from 0 on, since}
--     -> {2, of each limit to be backfilled: its number, since}; nothing is reserved. {2} if another server's states are
--        not dropped yet: the call is to be repeated.
--   peek, then of each limit: field, limit
--     Writes nothing.
--     -> of each limit: remaining, reset (ms), `since` of its backfill if its usage is unknown here, else 0, `since` of a
--        backfill that is to be repeated, else 0. A limit with unknown usage is measured as if it had none before `since`.
--   backfill, field, limit, since, counted, known, then of a rolling budget the cost of each of its days, the oldest first
--     known: the total usage before `since`. counted: the part of it that still counts at `since`. The first call creates
--     the state; later ones for the same `since` add the difference in `known`, in any order and however often. A rolling
--     budget adds it to the day of `since`, because late usage is of the time just before `since`.
--   settle, id, tokens used, cost, requests used (0 or 1), event or '' to add none, 1 if another gateway settles or 0
--     -> the event's id in the stream, the request's id if there is no event; nil, without any change, if the id holds
--        no lease, or if another gateway settles a request whose own gateway lives and has extended its lease again
--   grow, id, used, wanted, expected
--     Turns `used` tokens into debt and holds up to `wanted` more, but never less than is left of the hold.
--     -> {total of tokens that may be used, wait (ms), field of the exceeded limit or ''}; nil if the id holds no lease.
--        wait: if nothing was wanted or a part was denied, the time until the rates admit the same request again, which
--        then holds `expected` of its completion at first
--   extend, lease ms, then of each request: id, progress or '', tokens used or ''     -> the ids that hold no lease
--   restore, lease ms, id, admission, tokens, completion, cost, held, charged, note, then of each limit: field, limit
--     Restores a lease that was lost with this server's data, without a check for room. The limits do not include rates
--     of requests. -> without any change: nil if another gateway has settled the request, -1 if it is older than a day
--   forget, field, ...   Drops those fields of limits of ended keys that no running request uses and that are paid off.
--     The ledger has the usage of the others. -> the number of dropped fields
--   expired, at most   -> of each ended lease: id, tokens reserved, note, progress or '', moment of the ledger's row,
--     end (ms)
--
-- A field ends with the letter of its limit's kind. The tables of the kinds' properties precede this text
-- (gateway/quota/script.py makes them of kinds.py):
--   WINDOW      window of a rate, in microseconds
--   TAKES_ONE   a request takes one, whatever its size
--   GAUGE       a request takes its amount only while it runs
--   TOKEN_RATE  a token rate, with both stages
--   BUDGET      micro-units of money in a period (UTC)
--   PERIOD      of a budget: day, week (from Monday), month or 30 days
--   ROLLING     of a rolling budget, which counts the last days: their number, with today
--   BACKFILLED  the ledger has its usage
-- So do the constants of the arithmetic that gateway/quota/local.py repeats: HEADROOM, GAUGE_WAIT_MS, MAX_DECAY_MS,
-- MAX_STEP.
-- Prices are micro-units per million tokens; up to prices of 10^9 and 4 * 10^6 tokens all products are exact.

local STATE, LEASES, RECORDS, USAGE, ABANDONED = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local PROGRESS = ':progress'
-- Suffixes of a limit's field: the moment `since` of a pending backfill, and the tokens of a rate that running requests
-- hold, or the money of a budget that they reserve. The held tokens are not in the debt; the reserved money is in the
-- amount spent.
local PENDING, HOLD = '?', '#'
-- Fields of no limit: the server's run id with the moment (ms) when it was last compared, the moment (ms) when the
-- counts of running requests were last compared with their records, the HSCAN cursor from which the next comparison
-- continues, and, while another server's states are dropped, the present run id, the cursor from which the next part
-- continues and the moment (ms) of the last part. Cursors are absent at the beginning.
local SERVER, RECOUNTED, CURSOR, DROPPED = '@', '!', '>', '<'
-- Version of a record. The previous release had no stages: its records have no version, and their reservations are in
-- the debt. A record of version 2 without `held` holds its whole reservation. Gateways that do not support `held` treat
-- every record like that, and so count too much rather than too little.
local VERSION = 2
-- Expiry of an unused key. The longest period of any limit is a month.
local KEEP_MS = 35 * 86400000
-- Time for which ABANDONED keeps an id. Older requests are not restored, so none is settled twice.
local ABANDONED_MS = 86400000
-- Age at which a backfill is repeated first: the ledger lags by about as much. It is repeated each time that the age has
-- doubled, and at least every 30 s in the first hour (the longest time that a request may run).
local FIRST_CHECK, MAX_CHECK, OFTEN = 250000, 30000000, 3600000000
-- Intervals at which the server's run id and the counts of running requests are compared.
local SERVER_MS, COUNT_MS = 5000, 15000
-- Maximum number of leases that one call ends, and of fields that it checks for paid-off states.
local SWEEP, SAMPLE = 100, 10
-- Maximum of fields that one comparison reads, of fields that one part of a drop reads, and fields of one HSCAN reply, all
-- approximate. Reading 160,000 fields takes 300 ms, and dropping them twice as long; all tenants wait meanwhile. Pause
-- (ms) between two parts of a drop.
local MAX_SCANNED, MAX_DROPPED, SCAN, PAUSE_MS = 5000, 2000, 500, 20
-- Maximum number of arguments of one HSET or HDEL, far below Lua's limit. It is even.
local MAX_ARGUMENTS = 2000

local floor, ceil, max, min = math.floor, math.ceil, math.max, math.min

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local now_ms = floor(now / 1000)

-- Cached fields of STATE, and the names of those that `flush` writes. All writes of a call are sent together, because a
-- call from Lua costs more than its work.
local cached, changed = {}, {}

-- Return a field of STATE, false if there is none.
local function read(field)
  local value = cached[field]
  if value == nil then
    value = redis.call('HGET', STATE, field)
    cached[field] = value
  end
  return value
end

-- Return several fields of STATE, read with one call.
local function read_all(names)
  local values = #names > 0 and redis.call('HMGET', STATE, unpack(names)) or {}
  for i = 1, #names do
    if changed[names[i]] then
      values[i] = cached[names[i]]
    else
      cached[names[i]] = values[i]
    end
  end
  return values
end

-- Set a field of STATE; false removes it.
local function write(field, value)
  cached[field], changed[field] = value, true
end

local function send(command, arguments)
  for first = 1, #arguments, MAX_ARGUMENTS do
    redis.call(command, STATE, unpack(arguments, first, math.min(first + MAX_ARGUMENTS - 1, #arguments)))
  end
end

-- Send the writes to STATE.
local function flush()
  local values, removed = {}, {}
  for field in pairs(changed) do
    if cached[field] then
      values[#values + 1], values[#values + 2] = field, cached[field]
    else
      removed[#removed + 1] = field
    end
  end
  send('HSET', values)
  send('HDEL', removed)
  if #values > 0 then
    redis.call('PEXPIRE', STATE, KEEP_MS)
  end
  cached, changed = {}, {}
end

-- Return the calendar month of a moment (seconds) as a number, its start (microseconds) and its end (ms). The algorithm
-- is Hinnant's civil_from_days, in which years begin in March.
local function calendar(seconds)
  local days = floor(seconds / 86400)
  local era = floor((days + 719468) / 146097)
  local day = days + 719468 - era * 146097
  local year = floor((day - floor(day / 1460) + floor(day / 36524) - floor(day / 146096)) / 365)
  day = day - (365 * year + floor(year / 4) - floor(year / 100))
  local of_year = floor((5 * day + 2) / 153)
  local next_month = floor((153 * (of_year + 1) + 2) / 5)
  if of_year == 11 then
    -- The length of February depends on the civil year, which began in January.
    local civil = year + era * 400 + 1
    local leap = civil % 4 == 0 and (civil % 100 ~= 0 or civil % 400 == 0)
    next_month = leap and 366 or 365
  end
  local start = (days - day + floor((153 * of_year + 2) / 5)) * 86400000000
  return (year + era * 400) * 12 + of_year, start, (days - day + next_month) * 86400000
end

-- Return the period of a budget at a moment (seconds): its number, its start (microseconds) and its end (ms). Weeks begin
-- on Monday; the day 0 was a Thursday.
local function period_at(kind, seconds)
  local name = PERIOD[kind]
  if name == 'month' then
    return calendar(seconds)
  end
  local length, number = 1, floor(seconds / 86400)
  if ROLLING[kind] then
    return number, (number - ROLLING[kind] + 1) * 86400000000, (number + 1) * 86400000
  end
  local first = number
  if name == 'week' then
    length, number = 7, floor((number + 3) / 7)
    first = 7 * number - 3
  end
  return number, first * 86400000000, (first + length) * 86400000
end

-- Present periods by kind: {number, start, end}.
local periods = {}
local function period(kind)
  if not periods[kind] then
    periods[kind] = {period_at(kind, tonumber(clock[1]))}
  end
  return periods[kind]
end

-- Return the debt of a rate's state. States are packed doubles, which are exact, unlike decimals:
--   rate     moment, debt in microseconds at that moment, then a backfilled limit's three, then its basis
--   budget   number of the period, amount spent in it, then a backfilled limit's three; the number of a rolling budget
--            is that of its last day, and the amounts of its days follow the three, the oldest first
--   a backfilled limit's three: since, known, moment of the next backfill
-- The basis of a debt is the limit by whose T it was computed. A count of running requests or of their held tokens is a
-- decimal integer.
local function debt_of(state)
  if not state then
    return 0
  end
  local at, debt = struct.unpack('dd', state)
  return max(0, debt - max(0, now - at))
end

-- Return the moment from which a rate's new state decays: now, or later if the clock was set back.
local function decays_from(state)
  local at = state and struct.unpack('d', state) or now
  return at - now > MAX_STEP and now or max(at, now)
end

-- Return the part of `amount`, added to a debt at the moment `at`, that can be refunded. The rest may be paid off
-- already. `speed`: the seconds of debt that were paid off in each second: 1, or more if the limit was lowered since.
local function refundable(amount, at, state, speed)
  return max(0, amount - speed * max(0, decays_from(state) - at))
end

-- Return the amount spent of a budget. The state of a rolling one is `rolled`.
local function spent_of(kind, state)
  local of_period, spent = struct.unpack('dd', state)
  return (ROLLING[kind] or of_period == period(kind)[1]) and spent or 0
end

-- Return the amounts of a rolling budget's days.
local function days_of(kind, state)
  local days = {struct.unpack(string.rep('d', ROLLING[kind]), state, 41)}
  -- The position behind the last amount.
  days[ROLLING[kind] + 1] = nil
  return days
end

-- Return a rolling budget's new state. `state`: another one, whose backfill fields are kept.
local function packed_days(last, days, state)
  local spent = 0
  for i = 1, #days do
    spent = spent + days[i]
  end
  return struct.pack('dd', last, spent) .. string.sub(state, 17, 40) .. struct.pack(string.rep('d', #days), unpack(days))
end

-- Return a rolling budget's state without the days that have left the period. A state of tomorrow stays as it is, unless
-- the clock was far ahead when it was written.
local function rolled(kind, state)
  local last, today = struct.unpack('d', state), period(kind)[1]
  if last == today or last > today and last * 86400000000 - now <= MAX_STEP then
    return state
  end
  local days, kept, shift = days_of(kind, state), {}, max(0, today - last)
  for i = 1, #days do
    kept[i] = days[i + shift] or 0
  end
  return packed_days(today, kept, state)
end

-- Return a rolling budget's state with `more` spent on a day, which has no effect outside of the period.
local function spent_on(kind, state, day, more)
  local last, days = struct.unpack('d', state), days_of(kind, state)
  local place = day - last + #days
  if not days[place] then
    return state
  end
  days[place] = max(0, days[place] + more)
  return packed_days(last, days, state)
end

-- Return the state of a backfilled limit of which nothing is used. `since`: the time of its backfill.
local function unused(kind, since)
  local state = struct.pack('ddddd', BUDGET[kind] and period(kind)[1] or now, 0, since, 0, 0)
  return state .. string.rep(struct.pack('d', 0), ROLLING[kind] or 0)
end

local function cost_of(tokens_in, tokens_out, price_in, price_out)
  return ceil((tokens_in * price_in + tokens_out * price_out) / 1000000)
end

local function kind_of(field)
  return string.sub(field, -1)
end

-- Return the basis of a rate's state; `limit` without a state or for a state of the previous release.
local function basis_of(kind, state, limit)
  local at = BACKFILLED[kind] and 41 or 17
  return state and #state >= at + 7 and struct.unpack('d', state, at) or limit
end

-- Return a rate's new state. `state`: the old one; its backfill fields are kept.
local function packed_rate(kind, moment, debt, basis, state)
  if BACKFILLED[kind] then
    return struct.pack('dd', moment, debt) .. string.sub(state, 17, 40) .. struct.pack('d', basis)
  end
  return struct.pack('ddd', moment, debt, basis)
end

-- Return a budget's new state. `state`: the old one; its backfill fields are kept.
local function packed_budget(of_period, spent, state)
  return struct.pack('dd', of_period, spent) .. string.sub(state, 17)
end

-- Return a state with other backfill fields.
local function with_backfill(state, since, known, check)
  return string.sub(state, 1, 16) .. struct.pack('ddd', since, known, check) .. string.sub(state, 41)
end

-- Return (a rate's state, its debt in microseconds of `limit`, the microseconds by which the debt is paid off earlier
-- than at the rate of `limit`). A changed limit keeps the number of used tokens. While they exceed a lowered limit, the
-- state keeps its basis, so that the excess is paid off at the former rate. So a limit never refuses for longer than
-- its window.
local function under_limit(field, kind, state, limit, has_held)
  if not state and not has_held then
    return state, 0, 0
  end
  local at, debt, basis, _ = now, 0, limit, nil
  if state and BACKFILLED[kind] and #state >= 48 then
    at, debt, _, _, _, basis = struct.unpack('dddddd', state)
  elseif state and not BACKFILLED[kind] and #state >= 24 then
    at, debt, basis = struct.unpack('ddd', state)
  elseif state then
    at, debt = struct.unpack('dd', state)
  end
  debt = max(0, debt - max(0, now - at))
  local is_ahead = at - now > MAX_STEP
  if state and basis == limit and not is_ahead then
    return state, debt, 0
  end
  local window, of_limit = WINDOW[kind], debt * (basis / limit)
  if basis < limit or basis > limit and of_limit <= window then
    state = packed_rate(kind, decays_from(state), of_limit, limit, state)
    write(field, state)
  elseif is_ahead or not state then
    -- Either the state was written while the clock was far ahead, and its debt begins to decay now; or there is no
    -- state yet and requests that were admitted under another limit run, whose use counts under this one.
    state = packed_rate(kind, now, debt, basis, state)
    write(field, state)
  end
  return state, of_limit, max(0, of_limit - window) * (1 - limit / basis)
end

-- Return the amount that a request takes of a limit.
local function amount_of(kind, tokens, cost)
  if TAKES_ONE[kind] then
    return 1
  end
  return BUDGET[kind] and cost or tokens
end

local function change(field, by)
  if by == 0 then
    return
  end
  local left = (read(field) or 0) + by
  write(field, left > 0 and string.format('%d', left))
end

-- Add `sign` times the slots of a record (requests, uploads and tokens at once) to the counts.
local function count_slots(record, sign)
  for i = 1, #record.limits, 2 do
    local kind = kind_of(record.limits[i])
    if GAUGE[kind] then
      change(record.limits[i], sign * amount_of(kind, record.tokens, 0))
    end
  end
end

-- Return the tokens of a record that are held of rates.
local function held_of(record)
  return record.v == VERSION and (record.held or record.tokens) or 0
end

-- Return the tokens of a record that are in the debt of rates.
local function charged_of(record)
  return record.v == VERSION and (record.charged or 0) or record.tokens
end

-- Return the moment of a record's row in the ledger. Records of the previous release lack it; their admission counts.
local function row_of(record)
  return record.row or record.at
end

-- Return whether a request's usage reaches the state of a limit through the ledger: it was admitted before the state's
-- `since`, or there is no state.
local function is_the_ledgers(record, kind, state)
  return BACKFILLED[kind] and (not state or row_of(record) < struct.unpack('d', state, 17))
end

-- Return the money of a record that is in the amount spent of a budget's state. A request that was admitted in an earlier
-- period belongs to that period.
local function reserved_of(record, kind, state)
  if is_the_ledgers(record, kind, state) then
    return 0
  end
  local of_period = struct.unpack('d', state)
  local is_counted = ROLLING[kind] or of_period == period_at(kind, floor(record.at / 1000000))
  return is_counted and record.cost or 0
end

-- Add `more` to the tokens that are held of a record's rates.
local function change_held(record, more)
  for i = 1, #record.limits, 2 do
    if TOKEN_RATE[kind_of(record.limits[i])] then
      change(record.limits[i] .. HOLD, more)
    end
  end
end

local function record_of(id)
  local packed = redis.call('HGET', RECORDS, id)
  return packed and cmsgpack.unpack(packed)
end

-- Remove a count of running requests for which no record has an amount.
local function clear(field, sums)
  local kind = kind_of(field)
  if (GAUGE[kind] or kind == HOLD) and not sums[field] then
    write(field, false)
  end
end

-- Call a function with each field of STATE from an HSCAN cursor on, up to about `most`. Return the next cursor, which is
-- '0' at the end. A field that exists during all calls of a scan is found at least once.
local function scan(cursor, most, visit)
  local seen = 0
  repeat
    local found
    cursor, found = unpack(redis.call('HSCAN', STATE, cursor, 'COUNT', SCAN))
    for i = 1, #found, 2 do
      visit(found[i])
    end
    seen = seen + #found / 2
  until cursor == '0' or seen >= most
  return cursor
end

-- Set the counts of running requests to the sums over their records. The two differ if this server has lost some of its
-- keys, or if a gateway of the previous release, which does not count held tokens, has settled a request. In a large
-- state the counts without any record are removed by several calls.
local function recount()
  flush()
  local sums = {}
  local leases = redis.call('ZRANGE', LEASES, 0, -1, 'WITHSCORES')
  for i = 1, #leases, 2 do
    local record = record_of(leases[i])
    if not record then
      -- Without a record the lease cannot be settled. If its request runs, its gateway restores it.
      redis.call('ZREM', LEASES, leases[i])
    else
      for j = 1, #record.limits, 2 do
        local field, kind = record.limits[j], kind_of(record.limits[j])
        if GAUGE[kind] and tonumber(leases[i + 1]) > 0 then
          sums[field] = (sums[field] or 0) + amount_of(kind, record.tokens, 0)
        elseif TOKEN_RATE[kind] and record.v == VERSION then
          sums[field .. HOLD] = (sums[field .. HOLD] or 0) + held_of(record)
        elseif BUDGET[kind] then
          sums[field .. HOLD] = (sums[field .. HOLD] or 0) + reserved_of(record, kind, read(field))
        end
      end
    end
  end
  local before = read(CURSOR) or '0'
  local cursor = scan(before, MAX_SCANNED, function(field) clear(field, sums) end)
  if cursor ~= before then
    write(CURSOR, cursor ~= '0' and cursor)
  end
  for field, sum in pairs(sums) do
    write(field, sum > 0 and string.format('%d', sum))
  end
end

-- End the leases that were not extended in time: release their slots, but leave rates and budgets to the settlement. A
-- lease without a note (of an upload) needs no settlement and is removed. `is_dry`: only count, in the cached fields.
local function sweep(is_dry)
  local ended = redis.call('ZRANGEBYSCORE', LEASES, 1, now_ms, 'WITHSCORES', 'LIMIT', 0, SWEEP)
  local complete = true
  for i = 1, #ended, 2 do
    local id = ended[i]
    local record = record_of(id)
    if not record then
      complete = false
    else
      count_slots(record, -1)
      if record.note == '' then
        change_held(record, -held_of(record))
        if not is_dry then
          redis.call('HDEL', RECORDS, id, id .. PROGRESS)
          redis.call('ZREM', LEASES, id)
        end
      elseif not is_dry then
        redis.call('ZADD', LEASES, -ended[i + 1], id)
      end
    end
  end
  if not complete and not is_dry then
    recount()
  end
end

-- Drop the states of budgets and days if another server wrote them, because they may lack later usage. Return whether
-- none of them is left. `is_dry`: only tell. A gateway of an earlier release drops all of them at once.
local function drop_others(is_dry)
  local run_id, at = string.match(read(SERVER) or '', '^(%x+) (%d+)$')
  if at and math.abs(now_ms - at) < SERVER_MS then
    return true
  end
  local info = redis.pcall('INFO', 'server')
  local current = type(info) == 'string' and string.match(info, 'run_id:(%x+)')
  if not current then
    -- The server's access rules forbid INFO.
    return true
  end
  if current ~= run_id then
    if is_dry then
      return false
    end
    local of, cursor, last = string.match(read(DROPPED) or '', '^(%x+) (%d+) (%d+)$')
    if of ~= current then
      -- The cursor of another server means nothing here.
      cursor = '0'
    elseif math.abs(now_ms - last) < PAUSE_MS then
      return false
    end
    cursor = scan(cursor, MAX_DROPPED, function(field)
      local kind = kind_of(field)
      if BACKFILLED[kind] or kind == PENDING then
        write(field, false)
      end
    end)
    if cursor ~= '0' then
      write(DROPPED, current .. ' ' .. cursor .. ' ' .. string.format('%d', now_ms))
      return false
    end
  end
  if read(DROPPED) then
    write(DROPPED, false)
  end
  write(SERVER, current .. ' ' .. string.format('%d', now_ms))
  return true
end

-- Return the moment at which a backfill that is repeated now is to be repeated next.
local function next_check(since)
  local age = now - since
  local pause = age < OFTEN and min(age, MAX_CHECK) or age
  return now + max(pause, FIRST_CHECK)
end

-- Return the `since` of a limit without state, which admits nothing until its backfill. Store the current moment if it
-- has no `since` yet.
local function pending_since(field, kind)
  local since = tonumber(read(field .. PENDING))
  if not since or BUDGET[kind] and since < period(kind)[2] then
    since = now
    write(field .. PENDING, string.format('%d', since))
  end
  return since
end

-- Limits of an `acquire` or a `peek`, as parallel arrays, which are faster than a table for each limit:
--   states     the state of each limit; from count + 1 on, the tokens or the money that running requests hold of it
--   used       of a gauge or budget: the used requests, tokens or money
--   held_time  of a rate: the time of its held tokens, in microseconds
--   occupied   of a rate: its debt and `held_time`, in microseconds
--   early      of a rate: microseconds by which its debt is paid off earlier than at the limit's own rate
--   room       requests, tokens or money left
--   reserved   of a token rate or a budget: what would be left in addition if running requests used nothing more
--   waits      ms until the request has room
local count, fields, kinds, limits, states
local used, held_time, occupied, early, room, reserved, waits = {}, {}, {}, {}, {}, {}, {}

-- Read the limits, which begin with the argument `first`. Return false if another server's states are not dropped yet;
-- those of these limits then count as dropped. `is_dry`: drop none.
local function read_limits(first, is_dry)
  local names, backfilled = {}, false
  count, fields, kinds, limits = (#ARGV - first + 1) / 2, {}, {}, {}
  for i = 1, count do
    local field = ARGV[first + 2 * i - 2]
    local kind = kind_of(field)
    fields[i], kinds[i], limits[i] = field, kind, tonumber(ARGV[first + 2 * i - 1])
    names[i], names[count + i] = field, field .. HOLD
    backfilled = backfilled or BACKFILLED[kind]
  end
  local are_own = not backfilled or drop_others(is_dry)
  for i = 1, are_own and 0 or count do
    if BACKFILLED[kinds[i]] then
      write(fields[i], false)
      write(fields[i] .. PENDING, false)
    end
  end
  states = read_all(names)
  return are_own
end

-- Return the moment of the request's row in the ledger, and {2, the limits to backfill first}. The moment is never before
-- a `since`, even if the clock was set back, because the request's usage is counted here.
local function not_backfilled()
  local row, unknown = now, {2}
  for i = 1, count do
    if BACKFILLED[kinds[i]] then
      local since = states[i] and struct.unpack('d', states[i], 17)
      if since and since - now > MAX_STEP then
        -- The backfill was made while the clock was far ahead. Date its sums to now.
        local _, known = struct.unpack('dd', states[i], 17)
        states[i] = with_backfill(states[i], now, known, now + FIRST_CHECK)
        write(fields[i], states[i])
        since = now
      end
      if since then
        row = max(row, since)
      else
        unknown[#unknown + 1], unknown[#unknown + 2] = i - 1, pending_since(fields[i], kinds[i])
      end
    end
  end
  return row, unknown
end

-- Return the money that running requests reserve of the budget i. That of an earlier period is not in `used`.
local function held_money(i)
  return min(used[i], tonumber(states[count + i] or 0))
end

-- Compute `used`, `held_time`, `occupied`, `early`, `room` and `reserved` of the limits.
local function measure()
  for i = 1, count do
    local kind, limit, state = kinds[i], limits[i], states[i]
    local window = WINDOW[kind]
    reserved[i] = 0
    if window then
      local unit, held_tokens, debt = window / limit, states[count + i], 0
      states[i], debt, early[i] = under_limit(fields[i], kind, state, limit, held_tokens)
      held_time[i] = TOKEN_RATE[kind] and (held_tokens or 0) * unit or 0
      occupied[i] = debt + held_time[i]
      -- The rounding error of a sum of T is below a thousandth of a unit.
      room[i] = max(0, floor((window - occupied[i]) / unit + 0.001))
      if held_time[i] > 0 then
        reserved[i] = max(0, floor((window - debt) / unit + 0.001)) - room[i]
      end
    else
      if ROLLING[kind] then
        state = rolled(kind, state)
        states[i] = state
      end
      used[i] = BUDGET[kind] and spent_of(kind, state) or tonumber(state or 0)
      room[i] = max(0, limit - used[i])
      if BUDGET[kind] then
        reserved[i] = max(0, limit - used[i] + held_money(i)) - room[i]
      end
    end
  end
end

-- Return the completion tokens that the limits have room for, or the fewest that suffice.
local function granted_of(ask)
  local granted = ask.completion
  for i = 1, count do
    local kind, left = kinds[i], room[i]
    if BUDGET[kind] then
      if ask.price_out > 0 then
        -- The bound is above the highest possible cost and keeps the product exact.
        local money = min(left, 8000000000) * 1000000 - ask.prompt * ask.price_in
        granted = min(granted, floor(money / ask.price_out))
      end
    elseif not TAKES_ONE[kind] then
      local is_enough = TOKEN_RATE[kind] and ask.prompt + ask.expected + floor(limits[i] / HEADROOM) <= left
      granted = is_enough and granted or min(granted, left - ask.prompt)
    end
  end
  if granted >= ask.completion then
    return ask.completion
  end
  return max(min(ask.step, ask.completion), floor(granted / ask.step) * ask.step)
end

-- Return the wait (ms) until a rate without room has room for `needed` microseconds. A wait of at most MAX_DECAY_MS lasts
-- until the debt is low enough, whatever running requests do. Otherwise, running requests are expected to return what they
-- hold: the end of one is unknown, so a request is to be repeated soon, but not before the debt alone leaves room. `later`:
-- the microseconds by which the debt is paid off later than at the rate of the limit.
local function rate_wait(window, debt, held, needed, later)
  local excess = debt + needed - window
  local decay = ceil((excess + held + later) / 1000)
  if held + needed <= window and decay <= MAX_DECAY_MS then
    return max(1, decay)
  end
  return max(GAUGE_WAIT_MS, excess > 0 and ceil((excess + later) / 1000) or 0)
end

-- Return the wait (ms) until the limit i has room for `amount`, 0 if it has room now.
local function wait_for(i, amount)
  if amount <= room[i] then
    return 0
  end
  local kind, window = kinds[i], WINDOW[kinds[i]]
  if BUDGET[kind] and amount <= room[i] + reserved[i] then
    return GAUGE_WAIT_MS
  end
  if ROLLING[kind] then
    local last, left, days = struct.unpack('d', states[i]), used[i] - held_money(i), days_of(kind, states[i])
    local leaves = #days
    for place = 1, #days do
      left = left - days[place]
      if left + amount <= limits[i] then
        leaves = place
        break
      end
    end
    return (last + leaves) * 86400000 - now_ms
  end
  if not window then
    return BUDGET[kind] and period(kind)[3] - now_ms or GAUGE_WAIT_MS
  end
  local needed = (amount - 0.001) * (window / limits[i])
  local later = decays_from(states[i]) - now - early[i]
  return rate_wait(window, occupied[i] - held_time[i], held_time[i], needed, later)
end

-- Take `amount` of the limit i. Return the `since` of a backfill that is to be repeated, or nil.
local function take(i, amount)
  local kind, before = kinds[i], states[i]
  local state, due = before, nil
  room[i] = room[i] - amount
  if WINDOW[kind] then
    occupied[i] = occupied[i] + amount * (WINDOW[kind] / limits[i])
    if TOKEN_RATE[kind] then
      change(fields[i] .. HOLD, amount)
    else
      state = packed_rate(kind, decays_from(before), occupied[i], limits[i], before)
    end
  elseif ROLLING[kind] then
    state = spent_on(kind, before, period(kind)[1], amount)
    change(fields[i] .. HOLD, amount)
  elseif BUDGET[kind] then
    -- A new period begins with nothing spent and nothing reserved, without a backfill.
    local number = period(kind)[1]
    local is_present = struct.unpack('d', before) == number
    state = packed_budget(number, used[i] + amount, is_present and before or unused(kind, now))
    if not is_present then
      write(fields[i] .. HOLD, false)
    end
    change(fields[i] .. HOLD, amount)
  else
    change(fields[i], amount)
  end
  if BACKFILLED[kind] then
    local since, known, check = struct.unpack('ddd', state, 17)
    if check <= now then
      due = since
      state = with_backfill(state, since, known, next_check(since))
    end
  end
  if state ~= before then
    write(fields[i], state)
    states[i] = state
  end
  return due
end

-- Store a lease with its record.
local function store_lease(id, lease_ms, record)
  redis.call('HSET', RECORDS, id, cmsgpack.pack(record))
  redis.call('ZADD', LEASES, now_ms + lease_ms, id)
  redis.call('PEXPIRE', LEASES, KEEP_MS)
  redis.call('PEXPIRE', RECORDS, KEEP_MS)
end

-- Return the ms until the limit i has all of its room again if nothing more is used.
local function reset_of(i)
  if WINDOW[kinds[i]] then
    return ceil((occupied[i] - early[i]) / 1000)
  end
  if ROLLING[kinds[i]] then
    local last, days = struct.unpack('d', states[i]), days_of(kinds[i], states[i])
    for place = #days, 1, -1 do
      if days[place] > 0 then
        return (last + place) * 86400000 - now_ms
      end
    end
    return 0
  end
  return BUDGET[kinds[i]] and period(kinds[i])[3] - now_ms or 0
end

-- Return the reply of `acquire`. `due`: the backfills to be repeated.
local function reply_of(allowed, granted, row, due)
  local reply = {allowed and 1 or 0, granted, row}
  for i = 1, count do
    local at = 4 * i
    reply[at], reply[at + 1], reply[at + 2], reply[at + 3] = room[i], waits[i], reset_of(i), reserved[i]
  end
  for i = 1, #due do
    reply[#reply + 1] = due[i]
  end
  return reply
end

local function peek()
  sweep(true)
  read_limits(2, true)
  local _, unknown = not_backfilled()
  local since, again = {}, {}
  for i = 1, count do
    if BACKFILLED[kinds[i]] and states[i] then
      local of, _, check = struct.unpack('ddd', states[i], 17)
      again[i] = check <= now and of
    end
  end
  for i = 2, #unknown, 2 do
    local at = unknown[i] + 1
    since[at], states[at] = unknown[i + 1], unused(kinds[at], 0)
  end
  measure()
  local reply = {}
  for i = 1, count do
    local at = 4 * i
    reply[at - 3], reply[at - 2], reply[at - 1], reply[at] = room[i], reset_of(i), since[i] or 0, again[i] or 0
  end
  cached, changed = {}, {}
  return reply
end

local function acquire(ask)
  sweep()
  if not read_limits(11) then
    return {2}
  end
  local row, unknown = not_backfilled()
  if #unknown > 1 then
    return unknown
  end
  measure()
  -- A call that is repeated because its answer was lost has already made its reservation.
  local again = record_of(ask.id)
  local granted = again and again.completion or granted_of(ask)
  local tokens, cost = ask.prompt + granted, cost_of(ask.prompt, granted, ask.price_in, ask.price_out)
  local at_first = ask.prompt + min(ask.expected, granted)
  local allowed = true
  for i = 1, count do
    local kind, limit = kinds[i], limits[i]
    local amount = amount_of(kind, tokens, cost)
    if TOKEN_RATE[kind] then
      amount = min(tokens, at_first + floor(limit / HEADROOM), limit)
    end
    waits[i] = again and 0 or wait_for(i, amount)
    allowed = allowed and waits[i] == 0
  end
  local due = {}
  if allowed and not again then
    local record = {
      v = VERSION, tokens = tokens, completion = granted, cost = cost, note = ask.note, at = now, row = row,
      -- Gateways of the previous release need the month.
      month = calendar(tonumber(clock[1])), limits = {}, held = at_first, charged = 0,
    }
    for i = 1, count do
      local kind = kinds[i]
      local since = take(i, TOKEN_RATE[kind] and at_first or amount_of(kind, tokens, cost))
      if since then
        due[#due + 1], due[#due + 2] = i - 1, since
      end
      record.limits[2 * i - 1], record.limits[2 * i] = fields[i], limits[i]
    end
    store_lease(ask.id, ask.lease_ms, record)
  elseif not allowed and redis.call('EXISTS', LEASES) == 0 then
    -- No request runs, so counts above zero are wrong. Those of other limits are left to the calls of `recount`.
    for i = 1, count do
      clear(fields[i], {})
      clear(fields[i] .. HOLD, {})
    end
  end
  return reply_of(allowed, granted, again and row_of(again) or row, due)
end

local function backfill(field, limit, since, counted, known)
  local kind, state = kind_of(field), read(field)
  local window = WINDOW[kind]
  if state then
    local first, second = struct.unpack('dd', state)
    local of, before, check = struct.unpack('ddd', state, 17)
    if of ~= since then
      return 0
    end
    if check <= now then
      -- A `peek` found it due, and would find it due each time.
      check = next_check(since)
      write(field, with_backfill(state, since, before, check))
    end
    if known <= before then
      return 0
    end
    if window then
      local basis = basis_of(kind, state, limit)
      state = packed_rate(kind, decays_from(state), debt_of(state) + (known - before) * (window / basis), basis, state)
    elseif ROLLING[kind] then
      state = spent_on(kind, rolled(kind, state), floor(since / 86400000000), known - before)
    else
      state = packed_budget(first, second + known - before, state)
    end
    state = with_backfill(state, since, known, check)
  else
    if read(field .. PENDING) ~= string.format('%d', since) or BUDGET[kind] and since < period(kind)[2] then
      return 0
    end
    write(field .. PENDING, false)
    if BUDGET[kind] then
      -- The costs of running requests reach the new state through the ledger.
      write(field .. HOLD, false)
    end
    local check = since + FIRST_CHECK
    if window then
      -- More than the limit counts if it was lowered. With this basis all of it is paid off within a window.
      local basis = max(limit, counted)
      state = struct.pack('dddddd', now, max(0, counted * window / basis - (now - since)), since, known, check, basis)
    elseif ROLLING[kind] then
      local day, days = floor(since / 86400000000), days_of(kind, unused(kind, since))
      days[#days] = counted
      for i = 7, #ARGV do
        days[i - 6] = tonumber(ARGV[i])
      end
      state = rolled(kind, packed_days(day, days, struct.pack('ddddd', 0, 0, since, known, check)))
    else
      state = struct.pack('ddddd', period(kind)[1], counted, since, known, check)
    end
  end
  write(field, state)
  return 1
end

-- Read the states of a record's limits, and what is held of its rates and budgets, with one call.
local function read_states(record)
  local names = {}
  for i = 1, #record.limits, 2 do
    local field = record.limits[i]
    names[#names + 1] = field
    if TOKEN_RATE[kind_of(field)] or BUDGET[kind_of(field)] then
      names[#names + 1] = field .. HOLD
    end
  end
  read_all(names)
end

-- Correct one limit to the real usage of a request.
local function settle_limit(record, field, kind, limit, tokens, cost, requests)
  local state = read(field)
  if is_the_ledgers(record, kind, state) then
    return
  end
  if WINDOW[kind] then
    local basis = basis_of(kind, state, limit)
    local more = (TAKES_ONE[kind] and requests - 1 or tokens - charged_of(record)) * (WINDOW[kind] / basis)
    if more < 0 then
      more = -refundable(-more, record.at, state, max(1, limit / basis))
    end
    local debt = max(0, debt_of(state) + more)
    if state or debt > 0 then
      write(field, packed_rate(kind, decays_from(state), debt, basis, state))
    end
  elseif BUDGET[kind] then
    local number = period_at(kind, floor(record.at / 1000000))
    local of_period, spent = struct.unpack('dd', state)
    if ROLLING[kind] then
      write(field, spent_on(kind, rolled(kind, state), number, cost - record.cost))
    elseif of_period == number then
      write(field, packed_budget(of_period, max(0, spent + cost - record.cost), state))
    end
    change(field .. HOLD, -reserved_of(record, kind, state))
  end
end

local function settle(id, tokens, cost, requests, event, is_abandoned)
  local record, is_live = record_of(id), tonumber(redis.call('ZSCORE', LEASES, id) or 0) > 0
  if not record or is_abandoned and is_live then
    return false
  end
  read_states(record)
  redis.call('HDEL', RECORDS, id, id .. PROGRESS)
  redis.call('ZREM', LEASES, id)
  if is_abandoned then
    redis.call('ZREMRANGEBYSCORE', ABANDONED, '-inf', now_ms - ABANDONED_MS)
    redis.call('ZADD', ABANDONED, now_ms, id)
    redis.call('PEXPIRE', ABANDONED, ABANDONED_MS)
  end
  local held = held_of(record)
  for i = 1, #record.limits, 2 do
    local field = record.limits[i]
    local kind = kind_of(field)
    if not GAUGE[kind] then
      settle_limit(record, field, kind, record.limits[i + 1], tokens, cost, requests)
    elseif is_live then
      change(field, -amount_of(kind, record.tokens, 0))
    end
    if TOKEN_RATE[kind] then
      change(field .. HOLD, -held)
    end
  end
  return event == '' and id or redis.call('XADD', USAGE, '*', 'event', event)
end

-- Return the wait (ms) until the limit `field` admits a record's request again if it ends now, 0 if it does so at once.
-- `tokens`: those that it holds at first. `held`: its present hold.
local function wait_again(record, field, limit, tokens, held)
  local kind, state = kind_of(field), read(field)
  local window, basis = WINDOW[kind], basis_of(kind, state, limit)
  local unit, amount, others = window / basis, 1, 0
  if TOKEN_RATE[kind] then
    amount = min(record.tokens, tokens + floor(basis / HEADROOM), basis)
    others = max(0, (read(field .. HOLD) or 0) - held) * unit
  end
  local debt, needed = debt_of(state), (amount - 0.001) * unit
  if debt + others + needed <= window then
    return 0
  end
  return rate_wait(window, debt, others, needed, decays_from(state) - now)
end

-- Add `more` used tokens of a request to the debt of its rates, and compute its new hold: up to `wanted` tokens instead
-- of `held`. Return the hold and the field of the exceeded limit, or '' if nothing was denied. `tokens`: those that the
-- same request would hold at first.
local function move(record, held, more, wanted, tokens)
  local granted, longest, blocking = wanted, 0, ''
  for i = 1, #record.limits, 2 do
    local field, kind = record.limits[i], kind_of(record.limits[i])
    if TOKEN_RATE[kind] then
      local state = read(field)
      local basis = basis_of(kind, state, record.limits[i + 1])
      local window, unit = WINDOW[kind], WINDOW[kind] / basis
      local debt = debt_of(state) + more * unit
      if more > 0 then
        write(field, packed_rate(kind, decays_from(state), debt, basis, state))
      end
      local others = max(0, (read(field .. HOLD) or 0) - held) * unit
      granted = min(granted, floor((window - debt - others) / unit + 0.001))
      local excess = debt + others + (wanted - 0.001) * unit - window
      if excess > 0 and wanted > 0 then
        local this = 1 + wait_again(record, field, record.limits[i + 1], tokens, held)
        if this > longest then
          longest, blocking = this, field
        end
      end
    end
  end
  return max(granted, held - more, 0), blocking
end

local function grow(id, used, wanted, expected)
  local record = record_of(id)
  if not record then
    return false
  end
  if record.v ~= VERSION then
    return {record.tokens, 0, ''}
  end
  read_states(record)
  local charged, held = charged_of(record), held_of(record)
  local more, asks_for_wait = max(0, used - charged), wanted == 0 and expected
  local tokens = record.tokens - record.completion + min(expected or 0, record.completion)
  wanted = max(0, min(wanted, record.tokens - charged - more))
  for i = 1, #record.limits, 2 do
    local field, kind = record.limits[i], kind_of(record.limits[i])
    if more > 0 and TOKEN_RATE[kind] and is_the_ledgers(record, kind, read(field)) then
      -- The ledger counts the usage when the request has ended. The used tokens stay held until then.
      wanted, more = wanted + more, 0
    end
  end
  local granted, blocking = move(record, held, more, wanted, tokens)
  local wait = 0
  for i = 1, (asks_for_wait or blocking ~= '') and #record.limits or 0, 2 do
    if WINDOW[kind_of(record.limits[i])] then
      wait = max(wait, wait_again(record, record.limits[i], record.limits[i + 1], tokens, held))
    end
  end
  if more > 0 or granted ~= held then
    change_held(record, granted - held)
    record.charged, record.held = charged + more, granted
    redis.call('HSET', RECORDS, id, cmsgpack.pack(record))
  end
  return {charged + more + granted, wait, blocking}
end

local function extend(lease_ms)
  local lost = {}
  for i = 3, #ARGV, 3 do
    local id, progress, used = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
    local lease, record = redis.call('ZSCORE', LEASES, id), record_of(id)
    if lease and record then
      if tonumber(lease) < 0 then
        -- The lease ended although its gateway runs, because the gateway could not reach this server.
        count_slots(record, 1)
      end
      redis.call('ZADD', LEASES, now_ms + lease_ms, id)
      if progress ~= '' then
        redis.call('HSET', RECORDS, id .. PROGRESS, progress)
      end
      if used then
        grow(id, used, 0)
      end
    else
      lost[#lost + 1] = id
    end
  end
  local counted = tonumber(read(RECOUNTED) or 0)
  if #lost > 0 or math.abs(now_ms - counted) >= COUNT_MS then
    recount()
    write(RECOUNTED, string.format('%d', now_ms))
  end
  return lost
end

local function restore(lease_ms, id, at, tokens, completion, cost, held, charged, note)
  if redis.call('ZSCORE', ABANDONED, id) then
    return false
  elseif now - at > ABANDONED_MS * 1000 then
    return -1
  elseif redis.call('ZSCORE', LEASES, id) and record_of(id) then
    return 0
  end
  local record = {
    v = VERSION, tokens = tokens, completion = completion, cost = cost, month = calendar(floor(at / 1000000)),
    held = held, charged = charged, note = note, at = at, limits = {},
  }
  for i = 11, #ARGV do
    record.limits[i - 10] = i % 2 == 1 and ARGV[i] or tonumber(ARGV[i])
  end
  -- `extend` has found the lease missing and recounted all others.
  count_slots(record, 1)
  change_held(record, held)
  for i = 1, #record.limits, 2 do
    local field, kind = record.limits[i], kind_of(record.limits[i])
    if BUDGET[kind] then
      change(field .. HOLD, reserved_of(record, kind, read(field)))
    end
  end
  store_lease(id, lease_ms, record)
  return 1
end

local function forget()
  local is_used, count_dropped = {}, 0
  local leases = redis.call('ZRANGE', LEASES, 0, -1)
  for i = 1, #leases do
    local record = record_of(leases[i])
    for j = 1, record and #record.limits or 0, 2 do
      is_used[record.limits[j]] = true
    end
  end
  for i = 2, #ARGV do
    local field = ARGV[i]
    local limit = string.match(field, '^(.+)[' .. HOLD .. PENDING .. ']$') or field
    local kind = kind_of(field)
    -- The debt of a minute is known here only.
    local is_owed = WINDOW[kind] and not BACKFILLED[kind] and debt_of(read(field)) > 0
    if not is_used[limit] and not is_owed then
      write(field, false)
      count_dropped = count_dropped + 1
    end
  end
  return count_dropped
end

-- Drop the states of some limits that equal the default, so that deleted keys and models leave no state behind.
local function forget_some()
  local sample = redis.call('HRANDFIELD', STATE, SAMPLE, 'WITHVALUES')
  for i = 1, #sample, 2 do
    local field, state = sample[i], sample[i + 1]
    local kind = kind_of(field)
    local gone
    if BUDGET[kind] then
      gone = struct.unpack('d', state) < period(kind)[1] - (ROLLING[kind] or 1)
    elseif BACKFILLED[kind] then
      -- The ledger must have no usage that still counts either.
      gone = debt_of(state) == 0 and struct.unpack('d', state) < now - 2 * WINDOW[kind]
    elseif kind == PENDING then
      gone = tonumber(state) < now - 86400000000
    else
      gone = WINDOW[kind] and debt_of(state) == 0
    end
    if gone then
      write(field, false)
    end
  end
end

local function expired(at_most)
  sweep()
  recount()
  forget_some()
  local found = {}
  local ended = redis.call('ZREVRANGEBYSCORE', LEASES, 0, '-inf', 'WITHSCORES', 'LIMIT', 0, at_most)
  for i = 1, #ended, 2 do
    local id = ended[i]
    local record = record_of(id)
    local progress = redis.call('HGET', RECORDS, id .. PROGRESS) or ''
    if record then
      found[#found + 1] = {id, record.tokens, record.note, progress, row_of(record), -ended[i + 1]}
    else
      redis.call('ZREM', LEASES, id)
    end
  end
  return found
end

local call, reply = ARGV[1], nil
if call == 'acquire' then
  reply = acquire({
    id = ARGV[2], lease_ms = tonumber(ARGV[3]), prompt = tonumber(ARGV[4]), completion = tonumber(ARGV[5]),
    expected = tonumber(ARGV[6]), step = tonumber(ARGV[7]), price_in = tonumber(ARGV[8]), price_out = tonumber(ARGV[9]),
    note = ARGV[10],
  })
elseif call == 'peek' then
  reply = peek()
elseif call == 'settle' then
  reply = settle(ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], ARGV[7] == '1')
elseif call == 'backfill' then
  reply = backfill(ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]))
elseif call == 'grow' then
  reply = grow(ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]))
elseif call == 'extend' then
  reply = extend(tonumber(ARGV[2]))
elseif call == 'restore' then
  reply = restore(tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]),
    tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10])
elseif call == 'forget' then
  reply = forget()
elseif call == 'expired' then
  reply = expired(tonumber(ARGV[2]))
else
  reply = redis.error_reply('unknown call ' .. tostring(call))
end
flush()
return reply
