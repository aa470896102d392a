-- One tenant's limits, checked and taken all or nothing, on the server's own clock.
--
-- Requests and tokens are GCRA (the leaky bucket as a meter, ITU-T I.371, annex A): of each limit only the
-- "theoretical arrival time" is kept, the moment at which the tenant will have paid off all it took. One unit costs
-- T = 60 s / limit, and a take is allowed while the debt stays within 60 s. So a rested tenant may take its whole limit
-- at once and gets one unit back every T; in any t seconds never more than limit * (1 + t / 60), and no window edge.
--
-- KEYS: requests' time, tokens' time (microseconds), leases (sorted set: request id -> expiry, ms)
-- ARGV[1] is the call:
--   acquire, id, requests per minute, tokens per minute, max concurrent, tokens, lease ms
--     -> {allowed 0|1, requests' wait, tokens' wait, concurrency's wait,
--         requests remaining, requests' debt, tokens remaining, tokens' debt}          (waits and debts in ms)
--   settle, id, requests per minute, tokens per minute, tokens taken, tokens used, requests used (0|1)
--     -> 1, or 0 if this id holds no lease (any more)
--   extend, lease ms, id...                                    -> how many of the ids still hold their lease

local WINDOW = 60000000
-- Sums of T's fractions may miss the window by less than this (microseconds).
local SLACK = 1

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local now_ms = math.floor(now / 1000)

local function debt(key)
  local paid_off = tonumber(redis.call('GET', key) or '0')
  return math.max(0, paid_off - now)
end

local function owe(key, amount)
  if amount > 0 then
    -- %.3f: tostring would round to 14 digits, which is less than the clock has.
    redis.call('SET', key, string.format('%.3f', now + amount), 'PX', math.ceil(amount / 1000) + 1000)
  else
    redis.call('DEL', key)
  end
end

local function milliseconds(amount)
  return math.max(0, math.ceil(amount / 1000))
end

local function acquire(id, requests_limit, tokens_limit, max_concurrent, tokens, lease_ms)
  local request_cost, token_cost = WINDOW / requests_limit, WINDOW / tokens_limit
  local requests_debt, tokens_debt = debt(KEYS[1]), debt(KEYS[2])
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now_ms)
  -- A call that is sent again because its answer was lost has been paid for.
  local again = redis.call('ZSCORE', KEYS[3], id)

  local requests_wait, tokens_wait, lease_wait = 0, 0, 0
  if not again then
    requests_wait = milliseconds(requests_debt + request_cost - WINDOW - SLACK)
    tokens_wait = milliseconds(tokens_debt + tokens * token_cost - WINDOW - SLACK)
    if redis.call('ZCARD', KEYS[3]) >= max_concurrent then
      -- Nobody knows when a running request ends; a second is how long it is worth waiting before asking again.
      lease_wait = 1000
    end
  end

  local allowed = requests_wait == 0 and tokens_wait == 0 and lease_wait == 0
  if allowed and not again then
    requests_debt = requests_debt + request_cost
    tokens_debt = tokens_debt + tokens * token_cost
    owe(KEYS[1], requests_debt)
    owe(KEYS[2], tokens_debt)
    redis.call('ZADD', KEYS[3], now_ms + lease_ms, id)
    redis.call('PEXPIRE', KEYS[3], lease_ms * 2)
  end
  return {
    allowed and 1 or 0, requests_wait, tokens_wait, lease_wait,
    math.max(0, math.floor((WINDOW - requests_debt + SLACK) / request_cost)), milliseconds(requests_debt),
    math.max(0, math.floor((WINDOW - tokens_debt + SLACK) / token_cost)), milliseconds(tokens_debt),
  }
end

local function settle(id, requests_limit, tokens_limit, taken, used, requests_used)
  if redis.call('ZREM', KEYS[3], id) == 0 then
    return 0
  end
  owe(KEYS[1], debt(KEYS[1]) + (requests_used - 1) * WINDOW / requests_limit)
  owe(KEYS[2], debt(KEYS[2]) + (used - taken) * WINDOW / tokens_limit)
  return 1
end

local function extend(lease_ms)
  local held = 0
  for i = 3, #ARGV do
    if redis.call('ZSCORE', KEYS[3], ARGV[i]) then
      redis.call('ZADD', KEYS[3], 'XX', now_ms + lease_ms, ARGV[i])
      held = held + 1
    end
  end
  redis.call('PEXPIRE', KEYS[3], lease_ms * 2)
  return held
end

local call = ARGV[1]
if call == 'acquire' then
  return acquire(ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]))
elseif call == 'settle' then
  return settle(ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]))
elseif call == 'extend' then
  return extend(tonumber(ARGV[2]))
end
return redis.error_reply('unknown call ' .. tostring(call))
