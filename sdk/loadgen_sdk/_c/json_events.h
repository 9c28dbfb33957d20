/* Reads the JSON of the most common events, for the fast path. Part of _compiled.c.
 *
 * Whatever is not understood here, for whatever reason, is left to Python. All `skip_*` and
 * `parse_*` functions take the position of a value and the end of the data. They return the
 * position after the value, or NULL if it is something else. */

/* -- skipping values --------------------------------------------------------------------------- */

static const char *skip_space(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r'))
        at++;
    return at;
}

/* Return whether the eight bytes at `at` are ASCII without a quote, a backslash or a control
 * character. Each of these is found in all bytes at once: `x - 1 & ~x` has the high bit where a
 * byte of `x` is zero. */
static int are_plain_bytes(const char *at)
{
    const uint64_t ones = 0x0101010101010101;
    const uint64_t high_bits = 0x80 * ones;
    uint64_t bytes;
    memcpy(&bytes, at, sizeof bytes);
    uint64_t quotes = bytes ^ '"' * ones;
    uint64_t backslashes = bytes ^ '\\' * ones;
    uint64_t has_quote = (quotes - ones) & ~quotes;
    uint64_t has_backslash = (backslashes - ones) & ~backslashes;
    uint64_t has_control = (bytes - 0x20 * ones) & ~bytes;
    return !((has_quote | has_backslash | has_control | bytes) & high_bits);
}

/* Return whether a backslash and this byte are an escape sequence that is understood here. */
static int is_simple_escape(char byte)
{
    return byte != '\0' && strchr("\"\\/bfnrt", byte) != NULL;
}

/* Skip a string. Without `escapes`, a string that has an escape sequence is not accepted. */
static const char *skip_string(const char *at, const char *end, int escapes)
{
    if (at >= end || *at != '"')
        return NULL;
    const char *start = ++at;
    int is_ascii = 1;
    while (end - at >= 8 && are_plain_bytes(at))
        at += 8;
    for (; at < end && *at != '"'; at++) {
        unsigned char byte = (unsigned char)*at;
        if (byte < 0x20)
            return NULL;
        if (byte >= 0x80)
            is_ascii = 0;
        if (byte == '\\') {
            at++;
            if (!escapes || at == end || !is_simple_escape(*at))
                return NULL;
        }
    }
    if (at == end || (!is_ascii && !is_utf8(start, at)))
        return NULL;
    return at + 1;
}

static const char *skip_literal(const char *at, const char *end, const char *word)
{
    size_t size = strlen(word);
    return (size_t)(end - at) >= size && memcmp(at, word, size) == 0 ? at + size : NULL;
}

/* Skip at most MAX_NUMBER_DIGITS digits. */
static const char *skip_digits(const char *at, const char *end)
{
    const char *start = at;
    while (at < end && *at >= '0' && *at <= '9')
        at++;
    return at == start || at - start > MAX_NUMBER_DIGITS ? NULL : at;
}

/* Skip a number without an exponent. */
static const char *skip_number(const char *at, const char *end)
{
    if (*at == '-')
        at++;
    int has_leading_zero = end - at >= 2 && *at == '0' && at[1] >= '0' && at[1] <= '9';
    if (has_leading_zero)
        return NULL;
    at = skip_digits(at, end);
    return at != NULL && at < end && *at == '.' ? skip_digits(at + 1, end) : at;
}

/* Skip a colon and the space around it. */
static const char *skip_colon(const char *at, const char *end)
{
    at = skip_space(at, end);
    return at < end && *at == ':' ? skip_space(at + 1, end) : NULL;
}

/* Skip the name of a field and the colon after it. */
static const char *skip_field_name(const char *at, const char *end)
{
    at = skip_string(at, end, 0);
    return at == NULL ? NULL : skip_colon(at, end);
}

static const char *skip_value(const char *at, const char *end, int depth);

/* Skip an object or a list, at whose opening bracket `at` is. */
static const char *skip_container(const char *at, const char *end, int depth)
{
    int is_object = *at == '{';
    char closing = is_object ? '}' : ']';
    at = skip_space(at + 1, end);
    if (at < end && *at == closing)
        return at + 1;
    for (;;) {
        if (is_object && (at = skip_field_name(at, end)) == NULL)
            return NULL;
        at = skip_value(at, end, depth + 1);
        if (at == NULL)
            return NULL;
        at = skip_space(at, end);
        if (at >= end)
            return NULL;
        if (*at == closing)
            return at + 1;
        if (*at != ',')
            return NULL;
        at = skip_space(at + 1, end);
    }
}

/* Skip any value. `depth` is the number of containers around it. */
static const char *skip_value(const char *at, const char *end, int depth)
{
    if (at >= end || depth > MAX_DEPTH)
        return NULL;
    switch (*at) {
    case '"':
        return skip_string(at, end, 1);
    case 'n':
        return skip_literal(at, end, "null");
    case 't':
        return skip_literal(at, end, "true");
    case 'f':
        return skip_literal(at, end, "false");
    case '{':
    case '[':
        return skip_container(at, end, depth);
    default:
        return skip_number(at, end);
    }
}

/* -- what is read of an event ------------------------------------------------------------------ */

/* What an event says. */
typedef struct {
    const char *finish; /* the finish reason, or NULL */
    Py_ssize_t finish_size;
    PyObject *usage; /* as Python decodes it, or NULL */
    char output;     /* it has output */
    char answer;     /* it has output that is not reasoning */
} EventContent;

/* How the value of a field is read. A field that is not known is skipped. If a known field occurs
 * twice, only the last one counts, so such an event is left to Python. */
enum Kind {
    ANYTHING,   /* any value, which is skipped */
    REFUSED,    /* events of other APIs have this field */
    NOTHING,    /* null only */
    NO_CALLS,   /* null or an empty list */
    EMPTY_TEXT, /* null or an empty text */
    CONTENT,
    REASONING,
    TEXT, /* output of completions */
    FINISH,
    DELTA,
    CHOICES,
    USAGE,
};

typedef struct {
    const char *name;
    size_t size;
    enum Kind kind;
} Field;

#define FIELD(name, kind)                                                                          \
    {                                                                                              \
        name, sizeof name - 1, kind                                                                \
    }
#define END_OF_FIELDS                                                                              \
    {                                                                                              \
        NULL, 0, ANYTHING                                                                          \
    }

static const Field event_fields[] = {
    FIELD("choices", CHOICES),
    FIELD("usage", USAGE),
    FIELD("error", NOTHING),
    FIELD("message", NOTHING),
    FIELD("detail", NOTHING),
    FIELD("timings", NOTHING),
    FIELD("nvext", NOTHING),
    FIELD("metrics", NOTHING),
    FIELD("data", NOTHING),
    FIELD("results", NOTHING),
    FIELD("output", NOTHING),
    FIELD("type", REFUSED),
    END_OF_FIELDS,
};

static const Field choice_fields[] = {
    FIELD("delta", DELTA),
    FIELD("text", TEXT),
    FIELD("finish_reason", FINISH),
    FIELD("token_ids", NOTHING),
    FIELD("message", NOTHING),
    FIELD("meta_info", NOTHING),
    FIELD("speculative_decoding", NOTHING),
    END_OF_FIELDS,
};

static const Field delta_fields[] = {
    FIELD("role", ANYTHING),
    FIELD("content", CONTENT),
    FIELD("reasoning_content", REASONING),
    FIELD("reasoning", REASONING),
    FIELD("tool_calls", NO_CALLS),
    FIELD("function_call", NO_CALLS),
    FIELD("refusal", EMPTY_TEXT),
    FIELD("token_ids", NOTHING),
    END_OF_FIELDS,
};

/* A value of an event that may differ in the next event of the same pattern. */
typedef struct {
    const char *start;
    const char *end;
    enum Kind kind;
} Variable;

enum ChoicesFound {
    NO_CHOICES = 0,
    CHOICES_LIST = 1,
    CHOICES_NULL = 2
}; /* flags: the field may occur as both */

/* What was found in an event while it was parsed. `has_content` and the like mean a text that is
 * not empty. */
typedef struct {
    char has_delta;
    char has_content;
    char has_reasoning;
    char has_text;
    char has_unknown_text; /* in a field of the delta that is not known */
    char choices;          /* flags of ChoicesFound */
    int variable_count;    /* may be more than MAX_VARIABLES, of which no more are kept */
    Variable variables[MAX_VARIABLES];
} EventScan;

/* -- usage ------------------------------------------------------------------------------------- */

/* Return whether a value is a count of tokens: an int, not a bool, that is_valid into 31 bits. */
static int is_count(PyObject *value)
{
    int is_valid = Py_TYPE(value) == &PyLong_Type;
    int64_t number = is_valid ? read_number(value, &is_valid) : 0;
    return is_valid && number >= 0 && number < 1LL << 31;
}

/* Return the value of an attribute that is a count of tokens, or -1 if it is none. Set an exception
 * if the attribute does not exist. */
static int64_t count_attribute(PyObject *owner, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(owner, name);
    int is_valid = 1;
    int64_t count = value != NULL && is_count(value) ? read_number(value, &is_valid) : -1;
    Py_XDECREF(value);
    return count;
}

/* Return the output tokens of a usage in the names of chat, or -1 for any other usage. */
static int64_t read_output_tokens(PyObject *usage)
{
    if (count_attribute(usage, name_prompt_tokens) < 0)
        return -1;
    return count_attribute(usage, name_completion_tokens);
}

/* The usages that were decoded last, because many responses have the same one. Nothing changes
 * them. `output_tokens` is the result of `read_output_tokens`, or NOT_READ. */
enum { CACHED_USAGES = 4, USAGE_BYTES = 256, NOT_READ = -2 };
static struct {
    PyObject *decoded;
    int64_t output_tokens;
    Py_ssize_t size;
    char bytes[USAGE_BYTES];
} usages[CACHED_USAGES];

/* Return the result of `read_output_tokens`, from the cache if the usage is there. */
static int64_t output_tokens_of(PyObject *usage)
{
    for (int i = 0; i < CACHED_USAGES; i++) {
        if (usages[i].decoded != usage)
            continue;
        if (usages[i].output_tokens == NOT_READ)
            usages[i].output_tokens = read_output_tokens(usage);
        return usages[i].output_tokens;
    }
    return read_output_tokens(usage);
}

/* Add a usage to the cache, in the place of the oldest one. Its bytes are a whole object. */
static void cache_usage(const char *at, const char *end, PyObject *decoded)
{
    static int oldest;
    memcpy(usages[oldest].bytes, at, (size_t)(end - at));
    usages[oldest].size = end - at;
    usages[oldest].output_tokens = NOT_READ;
    set_field(&usages[oldest].decoded, decoded);
    oldest = (oldest + 1) % CACHED_USAGES;
}

/* Parse a usage. `*usage` becomes a new reference to what Python decodes, or NULL if Python
 * fails. */
static const char *parse_usage(const char *at, const char *end, PyObject **usage)
{
    for (int i = 0; i < CACHED_USAGES; i++) {
        Py_ssize_t size = usages[i].size;
        /* What begins with a whole object is that object. */
        if (usages[i].decoded != NULL && end - at >= size &&
            memcmp(usages[i].bytes, at, (size_t)size) == 0) {
            *usage = usages[i].decoded;
            Py_INCREF(*usage);
            return at + size;
        }
    }
    const char *after = skip_value(at, end, 0);
    PyObject *raw = after == NULL ? NULL : PyBytes_FromStringAndSize(at, after - at);
    *usage = raw == NULL ? NULL : PyObject_CallFunctionObjArgs(decode_usage, raw, NULL);
    Py_XDECREF(raw);
    if (*usage == NULL) {
        PyErr_Clear();
        return NULL;
    }
    if (*at == '{' && after - at <= USAGE_BYTES)
        cache_usage(at, after, *usage);
    return after;
}

/* -- parsing an event -------------------------------------------------------------------------- */

static const char *parse_object(const char *at, const char *end, const Field *fields,
                                EventContent *content, EventScan *scan);

/* Return whether a string, from its opening quote to the position after it, is not empty. */
static int is_full_string(const char *at, const char *after)
{
    return after != NULL && *at == '"' && after - at > 2;
}

/* Parse a list of at most one choice. */
static const char *parse_choices(const char *at, const char *end, EventContent *content,
                                 EventScan *scan)
{
    if (at >= end || *at != '[')
        return NULL;
    scan->choices |= CHOICES_LIST;
    at = skip_space(at + 1, end);
    if (at < end && *at == ']')
        return at + 1;
    at = parse_object(at, end, choice_fields, content, scan);
    if (at == NULL)
        return NULL;
    at = skip_space(at, end);
    return at < end && *at == ']' ? at + 1 : NULL;
}

/* Parse a text, and note in `*has_text` if it is not empty. */
static const char *parse_text(const char *at, const char *end, char *has_text)
{
    const char *after = skip_string(at, end, 1);
    if (is_full_string(at, after))
        *has_text = 1;
    return after;
}

static const char *parse_finish_reason(const char *at, const char *end, EventContent *content)
{
    const char *after = skip_string(at, end, 0);
    if (is_full_string(at, after)) {
        content->finish = at + 1;
        content->finish_size = after - at - 2;
    }
    return after;
}

/* Parse the value of a field. */
static const char *parse_value(enum Kind kind, const char *at, const char *end,
                               EventContent *content, EventScan *scan)
{
    const char *after_null =
        kind != REFUSED && at < end && *at == 'n' ? skip_literal(at, end, "null") : NULL;
    if (after_null != NULL) {
        if (kind == CHOICES) /* as if there were none: an event of another API */
            scan->choices |= CHOICES_NULL;
        return after_null;
    }
    switch (kind) {
    case ANYTHING:
        return skip_value(at, end, 0);
    case NO_CALLS:
        return skip_literal(at, end, "[]");
    case EMPTY_TEXT:
        return skip_literal(at, end, "\"\"");
    case CONTENT:
        return parse_text(at, end, &scan->has_content);
    case REASONING:
        return parse_text(at, end, &scan->has_reasoning);
    case TEXT:
        return parse_text(at, end, &scan->has_text);
    case FINISH:
        return parse_finish_reason(at, end, content);
    case DELTA:
        scan->has_delta = 1;
        return parse_object(at, end, delta_fields, content, scan);
    case CHOICES:
        return parse_choices(at, end, content, scan);
    case USAGE:
        return parse_usage(at, end, &content->usage);
    case REFUSED:
    case NOTHING: /* null was accepted above */
        break;
    }
    return NULL;
}

/* Note a value that may differ in the next event of the same pattern. */
static void note_variable(EventScan *scan, const char *start, const char *end, enum Kind kind)
{
    if (scan->variable_count < MAX_VARIABLES)
        scan->variables[scan->variable_count] = (Variable){start, end, kind};
    scan->variable_count++;
}

/* Parse the value of a field, and note whether another value in its place would say the same: any
 * value that is skipped, and any text in the place of a text. In a field of the delta that is not
 * known, a text may be output, so that only a text may take the place of a text there. */
static const char *parse_and_note_value(enum Kind kind, int is_unknown_in_delta, const char *at,
                                        const char *end, EventContent *content, EventScan *scan)
{
    const char *after = parse_value(kind, at, end, content, scan);
    int is_text = is_full_string(at, after);
    int is_known_text = is_text && (kind == CONTENT || kind == REASONING || kind == TEXT);
    if (is_unknown_in_delta) {
        if (is_text) {
            scan->has_unknown_text = 1;
            note_variable(scan, at, after, TEXT);
        }
        return after;
    }
    int is_skipped = after != NULL && kind == ANYTHING && *at != 'n';
    if (is_known_text || is_skipped || (kind == USAGE && content->usage != NULL))
        note_variable(scan, at, after, kind);
    return after;
}

/* Return the field with this name, or the end of the fields. */
static const Field *find_field(const Field *fields, const char *name, size_t size)
{
    const Field *field = fields;
    while (field->name != NULL && (field->size != size || memcmp(field->name, name, size) != 0))
        field++;
    return field;
}

/* Parse an object with these fields, of which each may occur once. */
static const char *parse_object(const char *at, const char *end, const Field *fields,
                                EventContent *content, EventScan *scan)
{
    unsigned seen_fields = 0; /* a bit for each */
    if (at >= end || *at != '{')
        return NULL;
    at = skip_space(at + 1, end);
    if (at < end && *at == '}')
        return at + 1;
    for (;;) {
        const char *name = at + 1;
        const char *name_end = skip_string(at, end, 0);
        if (name_end == NULL)
            return NULL;
        const Field *field = find_field(fields, name, (size_t)(name_end - 1 - name));
        int is_known = field->name != NULL;
        unsigned field_bit = 1u << (field - fields);
        if (is_known && (seen_fields & field_bit))
            return NULL;
        seen_fields |= field_bit;
        at = skip_colon(name_end, end);
        if (at == NULL)
            return NULL;
        at = parse_and_note_value(field->kind, fields == delta_fields && !is_known, at, end,
                                  content, scan);
        if (at == NULL)
            return NULL;
        at = skip_space(at, end);
        if (at >= end)
            return NULL;
        if (*at == '}')
            return at + 1;
        if (*at != ',')
            return NULL;
        at = skip_space(at + 1, end);
    }
}

/* -- patterns of events ------------------------------------------------------------------------ */

/* An event that was parsed lately. Another event that has the same bytes around values of the same
 * kinds says the same, so it is not parsed again. Positions are offsets into `bytes`. */
typedef struct {
    Py_ssize_t size;
    int variable_count;
    Py_ssize_t start[MAX_VARIABLES];
    Py_ssize_t end[MAX_VARIABLES];
    enum Kind kind[MAX_VARIABLES];
    Py_ssize_t finish; /* of the finish reason, or 0 without one */
    Py_ssize_t finish_size;
    char output;
    char answer;
    char bytes[PATTERN_BYTES];
} EventPattern;

static EventPattern patterns[PATTERNS];
static int next_pattern;

/* Return whether this byte may continue a number. What follows a value is compared as well, so that
 * no value ends too early. */
static int continues_number(char byte)
{
    return (byte >= '0' && byte <= '9') || byte == '.';
}

/* Skip a value in the place of variable `i` of a pattern. `*usage` becomes a new reference if it is
 * a usage. */
static const char *match_variable(const EventPattern *pattern, int i, const char *value,
                                  const char *end, PyObject **usage)
{
    enum Kind kind = pattern->kind[i];
    if (kind == USAGE)
        return *value == 'n' ? NULL : parse_usage(value, end, usage);
    Py_ssize_t size = pattern->end[i] - pattern->start[i];
    int is_same_value = end - value > size &&
                        memcmp(value, pattern->bytes + pattern->start[i], (size_t)size) == 0 &&
                        !continues_number(value[size]);
    if (is_same_value)
        return value + size;
    if (kind == ANYTHING)
        return *value == 'n' ? NULL : skip_value(value, end, 0);
    const char *after = *value == '"' ? skip_string(value, end, 1) : NULL;
    return is_full_string(value, after) ? after : NULL;
}

/* Return whether an event matches a pattern. If it does, `*content` becomes what it says. */
static int match_pattern(const EventPattern *pattern, const char *at, const char *end,
                         EventContent *content)
{
    Py_ssize_t matched = 0; /* bytes of the pattern */
    Py_ssize_t tail = pattern->size;
    const char *finish = NULL;
    PyObject *usage = NULL;
    if (pattern->variable_count > 0)
        tail -= pattern->end[pattern->variable_count - 1];
    int has_same_tail =
        pattern->size > 0 && end - at >= tail &&
        memcmp(end - tail, pattern->bytes + pattern->size - tail, (size_t)tail) == 0;
    if (!has_same_tail)
        return 0;
    for (int i = 0; i < pattern->variable_count; i++) {
        Py_ssize_t size = pattern->start[i] - matched;
        if (end - at <= size || memcmp(at, pattern->bytes + matched, (size_t)size) != 0)
            goto no_match;
        if (pattern->finish > matched)
            finish = at + (pattern->finish - matched);
        at = match_variable(pattern, i, at + size, end, &usage);
        if (at == NULL)
            goto no_match;
        matched = pattern->end[i];
    }
    if (end - at != tail)
        goto no_match;
    if (pattern->finish > matched)
        finish = at + (pattern->finish - matched);
    *content = (EventContent){.finish = finish,
                              .finish_size = pattern->finish_size,
                              .usage = usage,
                              .output = pattern->output,
                              .answer = pattern->answer};
    return 1;
no_match:
    Py_XDECREF(usage);
    return 0;
}

/* Keep an event that was parsed as a pattern, in the place of the oldest one. */
static void remember_pattern(const char *at, const char *end, const EventContent *content,
                             const EventScan *scan)
{
    if (end - at > PATTERN_BYTES || scan->variable_count > MAX_VARIABLES)
        return;
    EventPattern *pattern = &patterns[next_pattern];
    next_pattern = (next_pattern + 1) % PATTERNS;
    pattern->size = end - at;
    memcpy(pattern->bytes, at, (size_t)pattern->size);
    pattern->variable_count = scan->variable_count;
    for (int i = 0; i < scan->variable_count; i++) {
        pattern->start[i] = scan->variables[i].start - at;
        pattern->end[i] = scan->variables[i].end - at;
        pattern->kind[i] = scan->variables[i].kind;
    }
    pattern->finish = content->finish == NULL ? 0 : content->finish - at;
    pattern->finish_size = content->finish_size;
    pattern->output = content->output;
    pattern->answer = content->answer;
}

/* Parse the payload of an event and fill in `*content` with what it says.
 *
 * Return 0 if the event has to be left to Python. An event that matches the pattern of an
 * earlier one is not parsed again. */
static int parse_fast_path_event(const char *payload, const char *end, EventContent *content)
{
    *content = (EventContent){0};
    if (end - payload == 6 && memcmp(payload, "[DONE]", 6) == 0)
        return 1;
    for (int i = 0; i < PATTERNS; i++)
        if (match_pattern(&patterns[i], payload, end, content))
            return 1;
    EventScan scan = {.choices = NO_CHOICES, .variable_count = 0};
    const char *at = parse_object(skip_space(payload, end), end, event_fields, content, &scan);
    int is_whole = at != NULL && skip_space(at, end) == end;
    content->answer = scan.has_delta ? scan.has_content : scan.has_text;
    content->output = content->answer || (scan.has_delta && scan.has_reasoning);
    /* ResponseReader notes output in unknown fields before the first known output. */
    int may_have_unknown_output = scan.has_unknown_text && !content->output;
    if (!is_whole || scan.choices != CHOICES_LIST || may_have_unknown_output) {
        Py_CLEAR(content->usage);
        return 0;
    }
    remember_pattern(payload, end, content, &scan);
    return 1;
}
