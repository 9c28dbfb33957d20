"""The Lua script by which Redis keeps shared limits: one round trip for each step of a process.

It does what `SharedRateLimiter` does in Python, and the same tests hold for both. Times are
microseconds of the clock of the Redis server.

    KEYS[1]      the key of the state
    ARGV[1]      the step: enter, correct, cancel or pause
    ARGV[2]      the rules, as JSON: name, limit, period, burst (-1 for none) and grain
    ARGV[3]      how long the state is kept after the step, in ms
    ARGV[4..]    the arguments of the step

The state has a window of bookings for each rule (`windows`), the line of waiting processes
(`line`), the grants that their processes have not fetched (`ready`), and the end of a pause
(`paused`).
"""

SCRIPT = """
local step, rules, kept_ms = ARGV[1], cjson.decode(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local stored = redis.call('GET', KEYS[1])
local state = {windows = {}, line = {}, ready = {}, paused = 0}
if stored then state = cmsgpack.unpack(stored) end

-- A grant is dropped if its process does not fetch it within this time, because it has died.
local UNFETCHED_GRANT_US = 60000000

-- Returns how much of a rule a call takes. `tokens` has the output tokens in it.
local function amount_of(rule, tokens, output)
    if rule.name == 'requests' then return 1 end
    if rule.name == 'tokens' then return tokens end
    if rule.name == 'input_tokens' then return tokens - output end
    return output
end

-- Returns the window of a rule: the times and amounts of its bookings, and when all of them would
-- be paid back at the rate of the limit (`paid`, by which bursts are limited).
local function window_of(windows, rule)
    windows[rule.name] = windows[rule.name] or {times = {}, amounts = {}, paid = 0}
    return windows[rule.name]
end

-- Forgets the bookings that are older than a period, and returns the sum of the others.
local function drop_old_bookings(window, rule, at)
    local times, amounts, sum = {}, {}, 0
    for i, booked_at in ipairs(window.times) do
        if booked_at + rule.period > at then
            times[#times + 1] = booked_at
            amounts[#amounts + 1] = window.amounts[i]
            sum = sum + window.amounts[i]
        end
    end
    window.times, window.amounts = times, amounts
    return sum
end

-- Returns the first time, not before `earliest`, at which a rule allows an amount.
-- More than the limit is allowed when no other booking is left.
local function allowed_at(window, rule, earliest, amount)
    local free = rule.limit - drop_old_bookings(window, rule, earliest)
    local at = earliest
    if rule.burst >= 0 then at = math.max(at, math.ceil(window.paid - rule.burst)) end
    local times = window.times
    if #times == 0 or amount <= free then return at end
    for i, booked_at in ipairs(times) do
        free = free + window.amounts[i]
        if amount <= free then return math.max(at, booked_at + rule.period) end
    end
    return math.max(at, times[#times] + rule.period)
end

-- Returns the first time at which all rules allow a call, by their present bookings.
local function call_allowed_at(windows, earliest, tokens, output)
    local at = math.max(earliest, state.paused)
    for _, rule in ipairs(rules) do
        local amount = amount_of(rule, tokens, output)
        at = math.max(at, allowed_at(window_of(windows, rule), rule, earliest, amount))
    end
    return at
end

-- Two times of the same grain are one booking, so that the lists stay short.
local function is_same_grain(rule, a, b)
    return math.floor(a / rule.grain) == math.floor(b / rule.grain)
end

local function book(windows, at, tokens, output)
    for _, rule in ipairs(rules) do
        local window = window_of(windows, rule)
        local amount = amount_of(rule, tokens, output)
        local last = #window.times
        if last > 0 and is_same_grain(rule, window.times[last], at) then
            window.times[last] = math.max(at, window.times[last])
            window.amounts[last] = window.amounts[last] + amount
        else
            window.times[last + 1] = math.max(at, window.times[last] or 0)
            window.amounts[last + 1] = amount
        end
        window.paid = math.max(window.paid, at) + amount * rule.period / rule.limit
    end
end

-- Replaces the amounts that were booked at a time by those that the call has used.
local function correct(booked_at, old_tokens, old_output, tokens, output)
    for _, rule in ipairs(rules) do
        local window = window_of(state.windows, rule)
        local change = amount_of(rule, tokens, output) - amount_of(rule, old_tokens, old_output)
        for i, other_booked_at in ipairs(window.times) do
            if is_same_grain(rule, other_booked_at, booked_at) then
                window.amounts[i] = window.amounts[i] + change
                window.paid = window.paid + change * rule.period / rule.limit
                break
            end
        end
    end
end

-- A place in the line is {entry_id, tokens, output}, and a grant is {booked_at, tokens, output}.
-- A entry_id names a process.
local function index_in_line(entry_id)
    for i, place in ipairs(state.line) do
        if place[1] == entry_id then return i end
    end
end

-- Books the calls at the front of the line that are allowed now.
local function grant_first_places()
    while #state.line > 0 do
        local entry_id, tokens, output = unpack(state.line[1])
        if call_allowed_at(state.windows, now, tokens, output) > now then return end
        table.remove(state.line, 1)
        book(state.windows, now, tokens, output)
        state.ready[entry_id] = {now, tokens, output}
    end
end

-- Returns when it will be the turn of a process, if nothing changes: books all places before it in
-- a copy of the windows.
local function expected_turn(entry_id)
    local windows = cmsgpack.unpack(cmsgpack.pack(state.windows))
    local at = now
    for _, place in ipairs(state.line) do
        at = call_allowed_at(windows, at, place[2], place[3])
        if place[1] == entry_id then break end
        book(windows, at, place[2], place[3])
    end
    return at
end

-- Returns {1, the time of the grant} or {0, the time to wait}. Numbers are texts, because Redis
-- would cut the digits of a large one.
local function enter(entry_id, tokens, output)
    if not state.ready[entry_id] then
        state.line[index_in_line(entry_id) or #state.line + 1] = {entry_id, tokens, output}
    end
    grant_first_places()
    local grant = state.ready[entry_id]
    if not grant then return {0, string.format('%.0f', expected_turn(entry_id) - now)} end
    state.ready[entry_id] = nil
    correct(grant[1], grant[2], grant[3], tokens, output)
    return {1, string.format('%.0f', grant[1])}
end

-- Removes a process from the line. A grant that it did not fetch counts as a request without
-- tokens.
local function cancel(entry_id)
    local grant = state.ready[entry_id]
    if grant then correct(grant[1], grant[2], grant[3], 0, 0) end
    state.ready[entry_id] = nil
    local index = index_in_line(entry_id)
    if index then table.remove(state.line, index) end
end

for entry_id, grant in pairs(state.ready) do
    if grant[1] < now - UNFETCHED_GRANT_US then state.ready[entry_id] = nil end
end
local result = {}
if step == 'enter' then
    result = enter(ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]))
elseif step == 'correct' then
    local booked_at = tonumber(ARGV[4])
    local old_tokens, old_output = tonumber(ARGV[5]), tonumber(ARGV[6])
    correct(booked_at, old_tokens, old_output, tonumber(ARGV[7]), tonumber(ARGV[8]))
elseif step == 'cancel' then
    cancel(ARGV[4])
elseif step == 'pause' then
    state.paused = math.max(state.paused, now + tonumber(ARGV[4]))
end
redis.call('SET', KEYS[1], cmsgpack.pack(state), 'PX', kept_ms)
return result
"""
