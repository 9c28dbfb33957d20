"""What Redis does for shared limits, in its own language: `SharedGate` of shared_gate.py, one round trip for each step.

The same tests hold for both. Instants are microseconds of the server's clock.
"""

SCRIPT = """
local step, rules, kept_ms = ARGV[1], cjson.decode(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local raw = redis.call('GET', KEYS[1])
local state = raw and cmsgpack.unpack(raw) or {windows = {}, line = {}, ready = {}, paused = 0}

local function amount(rule, tokens, output)
    if rule.name == 'requests' then return 1 end
    if rule.name == 'tokens' then return tokens end
    if rule.name == 'input_tokens' then return tokens - output end
    return output
end

local function window(windows, rule)
    windows[rule.name] = windows[rule.name] or {times = {}, amounts = {}, paid = 0}
    return windows[rule.name]
end

-- the instant at which so much more is allowed
local function free_at(w, rule, at_least, wanted)
    local times, amounts, sum = {}, {}, 0
    for i, booked_at in ipairs(w.times) do
        if booked_at + rule.period > at_least then
            times[#times + 1], amounts[#amounts + 1] = booked_at, w.amounts[i]
            sum = sum + w.amounts[i]
        end
    end
    w.times, w.amounts = times, amounts
    local at = at_least
    if rule.burst >= 0 then at = math.max(at, math.ceil(w.paid - rule.burst)) end
    local free = rule.limit - sum
    if #times == 0 or wanted <= free then return at end
    for i, booked_at in ipairs(times) do
        free = free + amounts[i]
        if wanted <= free then return math.max(at, booked_at + rule.period) end
    end
    return math.max(at, times[#times] + rule.period)
end

local function ask(windows, at, tokens, output)
    local granted_at = math.max(at, state.paused)
    for _, rule in ipairs(rules) do
        local found = free_at(window(windows, rule), rule, at, amount(rule, tokens, output))
        granted_at = math.max(granted_at, found)
    end
    return granted_at
end

local function book(windows, at, tokens, output)
    for _, rule in ipairs(rules) do
        local w, more = window(windows, rule), amount(rule, tokens, output)
        local last = #w.times
        if last > 0 and math.floor(w.times[last] / rule.grain) == math.floor(at / rule.grain) then
            w.times[last], w.amounts[last] = math.max(at, w.times[last]), w.amounts[last] + more
        else
            w.times[last + 1], w.amounts[last + 1] = math.max(at, w.times[last] or 0), more
        end
        w.paid = math.max(w.paid, at) + more * rule.period / rule.limit
    end
end

local function correct(at, old_tokens, old_output, tokens, output)
    for _, rule in ipairs(rules) do
        local more = amount(rule, tokens, output) - amount(rule, old_tokens, old_output)
        local w = window(state.windows, rule)
        for i, booked_at in ipairs(w.times) do
            if math.floor(booked_at / rule.grain) == math.floor(at / rule.grain) then
                w.amounts[i] = w.amounts[i] + more
                w.paid = w.paid + more * rule.period / rule.limit
                break
            end
        end
    end
end

local function place_of(ticket)
    for i, place in ipairs(state.line) do
        if place[1] == ticket then return i end
    end
end

local function enter(ticket, tokens, output)
    if not state.ready[ticket] then
        state.line[place_of(ticket) or #state.line + 1] = {ticket, tokens, output}
    end
    while #state.line > 0 do
        local first = state.line[1]
        if ask(state.windows, now, first[2], first[3]) > now then break end
        table.remove(state.line, 1)
        book(state.windows, now, first[2], first[3])
        state.ready[first[1]] = {now, first[2], first[3]}
    end
    local grant = state.ready[ticket]
    if grant then
        state.ready[ticket] = nil
        correct(grant[1], grant[2], grant[3], tokens, output)
        return {1, string.format('%.0f', grant[1])}
    end
    local windows, at = cmsgpack.unpack(cmsgpack.pack(state.windows)), now
    for _, place in ipairs(state.line) do
        at = ask(windows, at, place[2], place[3])
        if place[1] == ticket then break end
        book(windows, at, place[2], place[3])
    end
    return {0, string.format('%.0f', at - now)}
end

local answer = {}
for ticket, grant in pairs(state.ready) do
    if grant[1] < now - 60000000 then state.ready[ticket] = nil end
end
if step == 'enter' then
    answer = enter(ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]))
elseif step == 'correct' then
    correct(tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]))
elseif step == 'cancel' then
    local grant = state.ready[ARGV[4]]
    if grant then correct(grant[1], grant[2], grant[3], 0, 0) end
    state.ready[ARGV[4]] = nil
    local place = place_of(ARGV[4])
    if place then table.remove(state.line, place) end
elseif step == 'pause' then
    state.paused = math.max(state.paused, now + tonumber(ARGV[4]))
end
redis.call('SET', KEYS[1], cmsgpack.pack(state), 'PX', kept_ms)
return answer
"""
