/* JSON of usual events: what is not understood here, for whatever reason, is left to Python. Part of _compiled.c. */

static const char *skip_space(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r'))
        at++;
    return at;
}

/* Whether the eight bytes at `at` are such as a string has before its end: ASCII without a quote, a backslash, a control. */
static int are_plain_bytes(const char *at)
{
    const uint64_t each = 0x0101010101010101, high = 0x80 * each;
    uint64_t bytes, quotes, escapes;
    memcpy(&bytes, at, sizeof bytes);
    quotes = bytes ^ '"' * each;
    escapes = bytes ^ '\\' * each;
    return !((((quotes - each) & ~quotes) | ((escapes - each) & ~escapes) | ((bytes - 0x20 * each) & ~bytes) | bytes) & high);
}

/* A string whose opening quote is at `at`: what follows it, or NULL. Its bytes end before that. */
static const char *skip_string(const char *at, const char *end, int escapes)
{
    if (at >= end || *at != '"')
        return NULL;
    const char *start = ++at;
    int ascii = 1;
    while (end - at >= 8 && are_plain_bytes(at))
        at += 8;
    for (; at < end && *at != '"'; at++) {
        unsigned char byte = (unsigned char)*at;
        if (byte < 0x20)
            return NULL;
        if (byte >= 0x80)
            ascii = 0;
        if (byte == '\\' && (!escapes || ++at == end || strchr("\"\\/bfnrt", *at) == NULL || *at == '\0'))
            return NULL;
    }
    if (at == end)
        return NULL;
    if (!ascii) {
        PyObject *decoded = PyUnicode_DecodeUTF8(start, at - start, "strict");
        if (decoded == NULL) {
            PyErr_Clear();
            return NULL;
        }
        Py_DECREF(decoded);
    }
    return at + 1;
}

static const char *skip_literal(const char *at, const char *end, const char *word)
{
    size_t size = strlen(word);
    return (size_t)(end - at) >= size && memcmp(at, word, size) == 0 ? at + size : NULL;
}

static const char *skip_digits(const char *at, const char *end)
{
    const char *start = at;
    while (at < end && *at >= '0' && *at <= '9')
        at++;
    return at == start || at - start > 17 ? NULL : at;
}

/* Any value: what follows it, or NULL. */
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
    case '[': {
        char closing = *at == '{' ? '}' : ']';
        at = skip_space(at + 1, end);
        if (at < end && *at == closing)
            return at + 1;
        for (;;) {
            if (closing == '}') {
                at = skip_string(at, end, 0);
                at = at == NULL ? NULL : skip_space(at, end);
                if (at == NULL || at >= end || *at != ':')
                    return NULL;
                at = skip_space(at + 1, end);
            }
            at = skip_value(at, end, depth + 1);
            at = at == NULL ? NULL : skip_space(at, end);
            if (at == NULL || at >= end)
                return NULL;
            if (*at == closing)
                return at + 1;
            if (*at != ',')
                return NULL;
            at = skip_space(at + 1, end);
        }
    }
    default:
        if (*at == '-')
            at++;
        if (end - at >= 2 && *at == '0' && at[1] >= '0' && at[1] <= '9')
            return NULL;
        at = skip_digits(at, end);
        return at != NULL && at < end && *at == '.' ? skip_digits(at + 1, end) : at;
    }
}

/* What an event says. `finish`: the reason, of `finish_size` bytes; `usage`: as decoded by Python, or NULL. */
typedef struct {
    const char *finish;
    Py_ssize_t finish_size;
    PyObject *usage;
    char output, answer;
} EventContent;

/* The fields that are read, and how: every other is skipped. Of a field that is known twice only the last one counts,
   so such an event is left to Python. */
enum Kind { ANYTHING, REFUSED, NOTHING, NO_CALLS, EMPTY_TEXT, CONTENT, REASONING, TEXT, FINISH, DELTA, CHOICES, USAGE };
typedef struct {
    const char *name;
    size_t size;
    enum Kind kind;
} Field;
#define FIELD(name, kind) {name, sizeof name - 1, kind}
static const Field event_fields[] = {
    FIELD("choices", CHOICES), FIELD("usage", USAGE),   FIELD("error", NOTHING),  FIELD("message", NOTHING), FIELD("detail", NOTHING),
    FIELD("timings", NOTHING), FIELD("nvext", NOTHING), FIELD("metrics", NOTHING), FIELD("data", NOTHING),   FIELD("results", NOTHING),
    FIELD("output", NOTHING),  FIELD("type", REFUSED),   {NULL, 0, ANYTHING},
};
static const Field choice_fields[] = {
    FIELD("delta", DELTA),       FIELD("text", TEXT),         FIELD("finish_reason", FINISH),           FIELD("token_ids", NOTHING),
    FIELD("message", NOTHING),   FIELD("meta_info", NOTHING), FIELD("speculative_decoding", NOTHING), {NULL, 0, ANYTHING},
};
static const Field delta_fields[] = {
    FIELD("role", ANYTHING),
    FIELD("content", CONTENT),       FIELD("reasoning_content", REASONING), FIELD("reasoning", REASONING), FIELD("tool_calls", NO_CALLS),
    FIELD("function_call", NO_CALLS), FIELD("refusal", EMPTY_TEXT),          FIELD("token_ids", NOTHING),   {NULL, 0, ANYTHING},
};

/* A value of an event that may differ in the next one of its form: where it begins, where it ends, how it is read. */
typedef struct {
    const char *at, *after;
    enum Kind kind;
} Variable;

/* How the texts of a choice are weighed: `delta`: there is one; `content`, `reasoning`, `text`: they are not empty.
   `unknown_text`: a field of the delta that is not known holds a text. */
typedef struct {
    char delta, content, reasoning, text, choices, unknown_text;
    int variables; /* more than MOST_HOLES: some were not kept */
    Variable variable[MAX_VARIABLES];
} EventScan;

static const char *parse_object(const char *at, const char *end, const Field *fields, EventContent *content, EventScan *scan);

/* A count of tokens: a number, and no bool, that fits into 31 bits. */
static int is_count(PyObject *value)
{
    int fits = Py_TYPE(value) == &PyLong_Type;
    int64_t number = fits ? read_number(value, &fits) : 0;
    return fits && number >= 0 && number < 1LL << 31;
}

/* The value of an attribute that is a count of tokens, or -1 if it is none. Sets an exception if it does not exist. */
static int64_t count_attribute(PyObject *owner, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(owner, name);
    int fits = 1;
    int64_t count = value != NULL && is_count(value) ? read_number(value, &fits) : -1;
    Py_XDECREF(value);
    return count;
}

/* The output tokens of a usage in the names of chat, or -1 for any other usage. */
static int64_t read_output_tokens(PyObject *usage)
{
    if (count_attribute(usage, name_prompt_tokens) < 0)
        return -1;
    return count_attribute(usage, name_completion_tokens);
}

/* The usages that were decoded last, because many responses have the same one. Nothing changes them. `output_tokens` is
   the result of `read_output_tokens`, or NOT_READ. */
enum { CACHED_USAGES = 4, USAGE_BYTES = 256, NOT_READ = -2 };
static struct {
    PyObject *decoded;
    int64_t output_tokens;
    Py_ssize_t size;
    char bytes[USAGE_BYTES];
} usages[CACHED_USAGES];

/* The same as `read_output_tokens`, from the cache if the usage is there. */
static int64_t output_tokens_of(PyObject *usage)
{
    for (int i = 0; i < CACHED_USAGES; i++)
        if (usages[i].decoded == usage) {
            if (usages[i].output_tokens == NOT_READ)
                usages[i].output_tokens = read_output_tokens(usage);
            return usages[i].output_tokens;
        }
    return read_output_tokens(usage);
}

/* A usage at `at`, as Python decodes it, and what follows it; NULL where it is none, or Python fails: then the whole event
   does, and is looked at there. What begins as a whole object ends with it. */
static const char *parse_usage(const char *at, const char *end, PyObject **usage)
{
    static int next;
    for (int i = 0; i < CACHED_USAGES; i++)
        if (usages[i].decoded != NULL && end - at >= usages[i].size && memcmp(usages[i].bytes, at, (size_t)usages[i].size) == 0) {
            Py_INCREF(*usage = usages[i].decoded);
            return at + usages[i].size;
        }
    const char *after = skip_value(at, end, 0);
    PyObject *raw = after == NULL ? NULL : PyBytes_FromStringAndSize(at, after - at);
    *usage = raw == NULL ? NULL : PyObject_CallFunctionObjArgs(decode_usage, raw, NULL);
    Py_XDECREF(raw);
    if (*usage == NULL) {
        PyErr_Clear();
        return NULL;
    }
    if (*at == '{' && after - at <= USAGE_BYTES) {
        memcpy(usages[next].bytes, at, (size_t)(after - at));
        usages[next].size = after - at;
        usages[next].output_tokens = NOT_READ;
        set_object(&usages[next].decoded, *usage);
        next = (next + 1) % CACHED_USAGES;
    }
    return after;
}

/* The value of a field: what follows it, or NULL. */
static const char *parse_value(enum Kind kind, const char *at, const char *end, EventContent *content, EventScan *scan)
{
    const char *after = kind != REFUSED && at < end && *at == 'n' ? skip_literal(at, end, "null") : NULL;
    if (after != NULL) {
        scan->choices |= kind == CHOICES ? 2 : 0; /* as if there were none: events of other APIs */
        return after;
    }
    switch (kind) {
    case ANYTHING:
        return skip_value(at, end, 0);
    case NO_CALLS:
        return skip_literal(at, end, "[]");
    case EMPTY_TEXT:
        return skip_literal(at, end, "\"\"");
    case CONTENT:
    case REASONING:
    case TEXT: {
        after = skip_string(at, end, 1);
        char full = after != NULL && after - at > 2;
        *(kind == CONTENT ? &scan->content : kind == TEXT ? &scan->text : &scan->reasoning) |= full;
        return after;
    }
    case FINISH:
        after = skip_string(at, end, 0);
        if (after != NULL && after - at > 2) {
            content->finish = at + 1;
            content->finish_size = after - at - 2;
        }
        return after;
    case DELTA:
        scan->delta = 1;
        return parse_object(at, end, delta_fields, content, scan);
    case CHOICES:
        if (at >= end || *at != '[')
            return NULL;
        scan->choices |= 1;
        at = skip_space(at + 1, end);
        if (at < end && *at == ']')
            return at + 1;
        at = parse_object(at, end, choice_fields, content, scan);
        at = at == NULL ? NULL : skip_space(at, end);
        return at != NULL && at < end && *at == ']' ? at + 1 : NULL;
    case USAGE:
        return parse_usage(at, end, &content->usage);
    default: /* NOTHING is null alone; REFUSED: events of other APIs have it */
        return NULL;
    }
}

/* The same, and it is noted where another value says the same: any value that is skipped, any text in place of one.
   `unknown_in_delta`: the field is one that is not known, of a delta, where only a text may stand in place of a text. */
static const char *parse_and_note_value(enum Kind kind, int unknown_in_delta, const char *at, const char *end, EventContent *content, EventScan *scan)
{
    const char *after = parse_value(kind, at, end, content, scan);
    int full_text = after != NULL && *at == '"' && after - at > 2;
    int text = full_text && (kind == CONTENT || kind == REASONING || kind == TEXT || unknown_in_delta);
    int skipped_value = after != NULL && kind == ANYTHING && !unknown_in_delta && *at != 'n';
    if (unknown_in_delta && full_text)
        scan->unknown_text = 1;
    if (text || skipped_value || (kind == USAGE && content->usage != NULL)) {
        if (scan->variables < MAX_VARIABLES)
            scan->variable[scan->variables] = (Variable){at, after, unknown_in_delta ? TEXT : kind};
        scan->variables++;
    }
    return after;
}

static const char *parse_object(const char *at, const char *end, const Field *fields, EventContent *content, EventScan *scan)
{
    unsigned known = 0;
    if (at >= end || *at != '{')
        return NULL;
    at = skip_space(at + 1, end);
    if (at < end && *at == '}')
        return at + 1;
    for (;;) {
        const char *name = at + 1, *after = skip_string(at, end, 0);
        if (after == NULL)
            return NULL;
        size_t size = (size_t)(after - 1 - name);
        int i = 0;
        while (fields[i].name != NULL && (fields[i].size != size || memcmp(fields[i].name, name, size) != 0))
            i++;
        if (fields[i].name != NULL) {
            if (known & 1u << i)
                return NULL;
            known |= 1u << i;
        }
        at = skip_space(after, end);
        if (at >= end || *at != ':')
            return NULL;
        int unknown_in_delta = fields == delta_fields && fields[i].name == NULL;
        at = parse_and_note_value(fields[i].kind, unknown_in_delta, skip_space(at + 1, end), end, content, scan);
        at = at == NULL ? NULL : skip_space(at, end);
        if (at == NULL || at >= end)
            return NULL;
        if (*at == '}')
            return at + 1;
        if (*at != ',')
            return NULL;
        at = skip_space(at + 1, end);
    }
}

/* Forms of events that were read lately: the bytes of one, the values in it that may differ, what it says. An event that
   has the same bytes around values of these kinds says the same, and is not read again. */
typedef struct {
    Py_ssize_t size, at[MAX_VARIABLES], after[MAX_VARIABLES];
    enum Kind kind[MAX_VARIABLES];
    int variables;
    Py_ssize_t finish, finish_size; /* 0: it does not finish */
    char output, answer;
    char bytes[PATTERN_BYTES];
} EventPattern;
static EventPattern patterns[PATTERNS];
static int next_pattern;

/* Whether this may be another byte of a number. What follows is compared as well, so no value ends too early. */
static int continues_number(const char *at)
{
    return (*at >= '0' && *at <= '9') || *at == '.';
}

/* Whether an event is of this form; if so, what it says. */
static int match_pattern(const EventPattern *pattern, const char *at, const char *end, EventContent *content)
{
    Py_ssize_t from = 0, rest = pattern->size - (pattern->variables ? pattern->after[pattern->variables - 1] : 0);
    const char *finish = NULL;
    PyObject *usage = NULL;
    if (pattern->size == 0 || end - at < rest || memcmp(end - rest, pattern->bytes + pattern->size - rest, (size_t)rest) != 0)
        return 0;
    for (int i = 0; i < pattern->variables; i++) {
        Py_ssize_t same = pattern->at[i] - from;
        if (end - at <= same || memcmp(at, pattern->bytes + from, (size_t)same) != 0)
            goto other;
        if (pattern->finish > from)
            finish = at + (pattern->finish - from);
        const char *value = at + same, *known = pattern->bytes + pattern->at[i];
        Py_ssize_t size = pattern->after[i] - pattern->at[i];
        if (pattern->kind[i] != USAGE && end - value > size && memcmp(value, known, (size_t)size) == 0 && !continues_number(value + size))
            at = value + size;
        else if (pattern->kind[i] == USAGE) {
            if (*value == 'n' || (at = parse_usage(value, end, &usage)) == NULL)
                goto other;
        } else if (pattern->kind[i] == ANYTHING) {
            if (*value == 'n' || (at = skip_value(value, end, 0)) == NULL)
                goto other;
        } else if (*value != '"' || (at = skip_string(value, end, 1)) == NULL || at - value < 3)
            goto other;
        from = pattern->after[i];
    }
    if (end - at != rest)
        goto other;
    if (pattern->finish > from)
        finish = at + (pattern->finish - from);
    *content = (EventContent){.finish = finish, .finish_size = pattern->finish_size, .usage = usage, .output = pattern->output, .answer = pattern->answer};
    return 1;
other:
    Py_XDECREF(usage);
    return 0;
}

/* Keep the form of an event. */
static void remember_pattern(const char *at, const char *end, const EventContent *content, const EventScan *scan)
{
    if (end - at > PATTERN_BYTES || scan->variables > MAX_VARIABLES)
        return;
    EventPattern *pattern = &patterns[next_pattern];
    next_pattern = (next_pattern + 1) % PATTERNS;
    pattern->size = end - at;
    memcpy(pattern->bytes, at, (size_t)pattern->size);
    pattern->variables = scan->variables;
    for (int i = 0; i < scan->variables; i++) {
        pattern->at[i] = scan->variable[i].at - at;
        pattern->after[i] = scan->variable[i].after - at;
        pattern->kind[i] = scan->variable[i].kind;
    }
    pattern->finish = content->finish == NULL ? 0 : content->finish - at;
    pattern->finish_size = content->finish_size;
    pattern->output = content->output;
    pattern->answer = content->answer;
}

/* Whether the payload of an event is usual; if so, what it says. */
static int parse_usual_event(const char *at, const char *end, EventContent *content)
{
    EventScan scan;
    const char *begin = at;
    scan.delta = scan.content = scan.reasoning = scan.text = scan.choices = scan.unknown_text = 0;
    scan.variables = 0;
    *content = (EventContent){0};
    if (end - at == 6 && memcmp(at, "[DONE]", 6) == 0)
        return 1;
    for (int i = 0; i < PATTERNS; i++)
        if (match_pattern(&patterns[i], at, end, content))
            return 1;
    *content = (EventContent){0};
    at = parse_object(skip_space(at, end), end, event_fields, content, &scan);
    if (at == NULL || skip_space(at, end) != end || scan.choices != 1) {
        Py_CLEAR(content->usage);
        return 0;
    }
    content->answer = scan.delta ? scan.content : scan.text;
    content->output = content->answer || (scan.delta && scan.reasoning);
    if (scan.unknown_text && !content->output) { /* Reading._note_unknown_output looks at it */
        Py_CLEAR(content->usage);
        return 0;
    }
    remember_pattern(begin, end, content, &scan);
    return 1;
}
