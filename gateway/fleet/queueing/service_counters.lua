-- Service of each tenant over all gateway processes, and where tenants are active.
--
-- KEYS: 1 zset of active tenants by counter, 2 zset of presences (process:tenant) by the time of their last renewal,
-- 3 zset of idle tenants by counter, 4 hash of the number of processes where a tenant is active, 5 hash of active
-- tenants' weights. All keys expire together.
-- ARGV: the process (16 characters), milliseconds until a presence ends without renewal, then for each tenant: its id,
-- its weight, the service to add, and 1 if it is active in the process, else 0.
-- Returns the sum of the weights of all active tenants, then each tenant's counter and number of processes.
local active, presences, idle, processes, weights = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local process, alive = ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local SUM = ''  -- field of `weights`; no tenant has an empty id

local function end_presence(tenant)
    if redis.call('HINCRBY', processes, tenant, -1) > 0 then return end
    redis.call('HDEL', processes, tenant)
    local counter = redis.call('ZSCORE', active, tenant)
    if counter then
        redis.call('ZREM', active, tenant)
        redis.call('ZADD', idle, counter, tenant)
    end
    redis.call('HINCRBYFLOAT', weights, SUM, -tonumber(redis.call('HGET', weights, tenant) or 0))
    redis.call('HDEL', weights, tenant)
end

local function set_weight(tenant, weight)
    local before = tonumber(redis.call('HGET', weights, tenant) or 0)
    if before ~= tonumber(weight) then
        redis.call('HINCRBYFLOAT', weights, SUM, tonumber(weight) - before)
        redis.call('HSET', weights, tenant, weight)
    end
end

-- A process that died does not renew its presences.
for _, member in ipairs(redis.call('ZRANGEBYSCORE', presences, '-inf', now - alive)) do
    redis.call('ZREM', presences, member)
    end_presence(string.sub(member, #process + 2))
end
if redis.call('ZCARD', active) == 0 then
    -- Without active tenants all counters restart at 0.
    redis.call('DEL', active, presences, idle, processes, weights)
end
local first = redis.call('ZRANGE', active, 0, 0, 'WITHSCORES')
local least = tonumber(first[2]) or 0

local function begin_presence(tenant)
    if redis.call('HINCRBY', processes, tenant, 1) > 1 then return end
    -- A tenant that returns from idle starts at the least active counter: idling earns no credit, and a debt stays.
    local before = tonumber(redis.call('ZSCORE', idle, tenant)) or 0
    redis.call('ZREM', idle, tenant)
    redis.call('ZADD', active, string.format('%.17g', math.max(before, least)), tenant)
end

for i = 3, #ARGV, 4 do
    local tenant, weight, service, is_active = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3] == '1'
    local member = process .. ':' .. tenant
    if is_active then
        if redis.call('ZADD', presences, now, member) == 1 then begin_presence(tenant) end
        set_weight(tenant, weight)
    end
    if tonumber(service) ~= 0 then
        redis.call('ZINCRBY', redis.call('ZSCORE', active, tenant) and active or idle, service, tenant)
    end
    if not is_active and redis.call('ZREM', presences, member) == 1 then end_presence(tenant) end
end
-- An idle tenant at or below the least active counter would be raised to it anyway.
redis.call('ZREMRANGEBYSCORE', idle, '-inf', least)
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, 60 * alive) end

local result = {redis.call('HGET', weights, SUM) or '0'}
for i = 3, #ARGV, 4 do
    local tenant = ARGV[i]
    result[#result + 1] = redis.call('ZSCORE', active, tenant) or redis.call('ZSCORE', idle, tenant) or '0'
    result[#result + 1] = redis.call('HGET', processes, tenant) or '0'
end
return result
