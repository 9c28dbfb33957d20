/* JSON of usual events: what is not understood here, for whatever reason, is left to Python. Part of _compiled.c. */

static const char *space(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r'))
        at++;
    return at;
}

/* Whether the eight bytes at `at` are such as a string has before its end: ASCII without a quote, a backslash, a control. */
static int are_plain(const char *at)
{
    const uint64_t each = 0x0101010101010101, high = 0x80 * each;
    uint64_t bytes, quotes, escapes;
    memcpy(&bytes, at, sizeof bytes);
    quotes = bytes ^ '"' * each;
    escapes = bytes ^ '\\' * each;
    return !((((quotes - each) & ~quotes) | ((escapes - each) & ~escapes) | ((bytes - 0x20 * each) & ~bytes) | bytes) & high);
}

/* A string whose opening quote is at `at`: what follows it, or NULL. Its bytes end before that. */
static const char *string(const char *at, const char *end, int escapes)
{
    if (at >= end || *at != '"')
        return NULL;
    const char *start = ++at;
    int ascii = 1;
    while (end - at >= 8 && are_plain(at))
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

static const char *literal(const char *at, const char *end, const char *word)
{
    size_t size = strlen(word);
    return (size_t)(end - at) >= size && memcmp(at, word, size) == 0 ? at + size : NULL;
}

static const char *digits(const char *at, const char *end)
{
    const char *start = at;
    while (at < end && *at >= '0' && *at <= '9')
        at++;
    return at == start || at - start > 17 ? NULL : at;
}

/* Any value: what follows it, or NULL. */
static const char *skipped(const char *at, const char *end, int depth)
{
    if (at >= end || depth > MOST_DEPTH)
        return NULL;
    switch (*at) {
    case '"':
        return string(at, end, 1);
    case 'n':
        return literal(at, end, "null");
    case 't':
        return literal(at, end, "true");
    case 'f':
        return literal(at, end, "false");
    case '{':
    case '[': {
        char closing = *at == '{' ? '}' : ']';
        at = space(at + 1, end);
        if (at < end && *at == closing)
            return at + 1;
        for (;;) {
            if (closing == '}') {
                at = string(at, end, 0);
                at = at == NULL ? NULL : space(at, end);
                if (at == NULL || at >= end || *at != ':')
                    return NULL;
                at = space(at + 1, end);
            }
            at = skipped(at, end, depth + 1);
            at = at == NULL ? NULL : space(at, end);
            if (at == NULL || at >= end)
                return NULL;
            if (*at == closing)
                return at + 1;
            if (*at != ',')
                return NULL;
            at = space(at + 1, end);
        }
    }
    default:
        if (*at == '-')
            at++;
        if (end - at >= 2 && *at == '0' && at[1] >= '0' && at[1] <= '9')
            return NULL;
        at = digits(at, end);
        return at != NULL && at < end && *at == '.' ? digits(at + 1, end) : at;
    }
}

/* What an event says. `finish`: the reason, of `finish_size` bytes; `usage`: as decoded by Python, or NULL. */
typedef struct {
    const char *finish;
    Py_ssize_t finish_size;
    PyObject *usage;
    char output, answer;
} Said;

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
} Hole;

/* How the texts of a choice are weighed: `delta`: there is one; `content`, `reasoning`, `text`: they are not empty.
   `unknown_text`: a field of the delta that is not known holds a text. */
typedef struct {
    char delta, content, reasoning, text, choices, unknown_text;
    int holes; /* more than MOST_HOLES: some were not kept */
    Hole hole[MOST_HOLES];
} Seen;

static const char *object(const char *at, const char *end, const Field *fields, Said *said, Seen *seen);

/* A count of tokens: a number, and no bool, that fits into 31 bits. */
static int is_count(PyObject *value)
{
    int fits = Py_TYPE(value) == &PyLong_Type;
    int64_t number = fits ? number_of(value, &fits) : 0;
    return fits && number >= 0 && number < 1LL << 31;
}

/* The value of an attribute that is a count of tokens, or -1 if it is none. Sets an exception if it does not exist. */
static int64_t count_attribute(PyObject *owner, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(owner, name);
    int fits = 1;
    int64_t count = value != NULL && is_count(value) ? number_of(value, &fits) : -1;
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
enum { USAGES = 4, USAGE_BYTES = 256, NOT_READ = -2 };
static struct {
    PyObject *decoded;
    int64_t output_tokens;
    Py_ssize_t size;
    char bytes[USAGE_BYTES];
} usages[USAGES];

/* The same as `read_output_tokens`, from the cache if the usage is there. */
static int64_t output_tokens_of(PyObject *usage)
{
    for (int i = 0; i < USAGES; i++)
        if (usages[i].decoded == usage) {
            if (usages[i].output_tokens == NOT_READ)
                usages[i].output_tokens = read_output_tokens(usage);
            return usages[i].output_tokens;
        }
    return read_output_tokens(usage);
}

/* A usage at `at`, as Python decodes it, and what follows it; NULL where it is none, or Python fails: then the whole event
   does, and is looked at there. What begins as a whole object ends with it. */
static const char *usage_at(const char *at, const char *end, PyObject **usage)
{
    static int next;
    for (int i = 0; i < USAGES; i++)
        if (usages[i].decoded != NULL && end - at >= usages[i].size && memcmp(usages[i].bytes, at, (size_t)usages[i].size) == 0) {
            Py_INCREF(*usage = usages[i].decoded);
            return at + usages[i].size;
        }
    const char *after = skipped(at, end, 0);
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
        put_same(&usages[next].decoded, *usage);
        next = (next + 1) % USAGES;
    }
    return after;
}

/* The value of a field: what follows it, or NULL. */
static const char *value_in(enum Kind kind, const char *at, const char *end, Said *said, Seen *seen)
{
    const char *after = kind != REFUSED && at < end && *at == 'n' ? literal(at, end, "null") : NULL;
    if (after != NULL) {
        seen->choices |= kind == CHOICES ? 2 : 0; /* as if there were none: events of other APIs */
        return after;
    }
    switch (kind) {
    case ANYTHING:
        return skipped(at, end, 0);
    case NO_CALLS:
        return literal(at, end, "[]");
    case EMPTY_TEXT:
        return literal(at, end, "\"\"");
    case CONTENT:
    case REASONING:
    case TEXT: {
        after = string(at, end, 1);
        char full = after != NULL && after - at > 2;
        *(kind == CONTENT ? &seen->content : kind == TEXT ? &seen->text : &seen->reasoning) |= full;
        return after;
    }
    case FINISH:
        after = string(at, end, 0);
        if (after != NULL && after - at > 2) {
            said->finish = at + 1;
            said->finish_size = after - at - 2;
        }
        return after;
    case DELTA:
        seen->delta = 1;
        return object(at, end, delta_fields, said, seen);
    case CHOICES:
        if (at >= end || *at != '[')
            return NULL;
        seen->choices |= 1;
        at = space(at + 1, end);
        if (at < end && *at == ']')
            return at + 1;
        at = object(at, end, choice_fields, said, seen);
        at = at == NULL ? NULL : space(at, end);
        return at != NULL && at < end && *at == ']' ? at + 1 : NULL;
    case USAGE:
        return usage_at(at, end, &said->usage);
    default: /* NOTHING is null alone; REFUSED: events of other APIs have it */
        return NULL;
    }
}

/* The same, and it is noted where another value says the same: any value that is skipped, any text in place of one.
   `unknown_in_delta`: the field is one that is not known, of a delta, where only a text may stand in place of a text. */
static const char *value_of(enum Kind kind, int unknown_in_delta, const char *at, const char *end, Said *said, Seen *seen)
{
    const char *after = value_in(kind, at, end, said, seen);
    int full_text = after != NULL && *at == '"' && after - at > 2;
    int text = full_text && (kind == CONTENT || kind == REASONING || kind == TEXT || unknown_in_delta);
    int skipped_value = after != NULL && kind == ANYTHING && !unknown_in_delta && *at != 'n';
    if (unknown_in_delta && full_text)
        seen->unknown_text = 1;
    if (text || skipped_value || (kind == USAGE && said->usage != NULL)) {
        if (seen->holes < MOST_HOLES)
            seen->hole[seen->holes] = (Hole){at, after, unknown_in_delta ? TEXT : kind};
        seen->holes++;
    }
    return after;
}

static const char *object(const char *at, const char *end, const Field *fields, Said *said, Seen *seen)
{
    unsigned known = 0;
    if (at >= end || *at != '{')
        return NULL;
    at = space(at + 1, end);
    if (at < end && *at == '}')
        return at + 1;
    for (;;) {
        const char *name = at + 1, *after = string(at, end, 0);
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
        at = space(after, end);
        if (at >= end || *at != ':')
            return NULL;
        int unknown_in_delta = fields == delta_fields && fields[i].name == NULL;
        at = value_of(fields[i].kind, unknown_in_delta, space(at + 1, end), end, said, seen);
        at = at == NULL ? NULL : space(at, end);
        if (at == NULL || at >= end)
            return NULL;
        if (*at == '}')
            return at + 1;
        if (*at != ',')
            return NULL;
        at = space(at + 1, end);
    }
}

/* Forms of events that were read lately: the bytes of one, the values in it that may differ, what it says. An event that
   has the same bytes around values of these kinds says the same, and is not read again. */
typedef struct {
    Py_ssize_t size, at[MOST_HOLES], after[MOST_HOLES];
    enum Kind kind[MOST_HOLES];
    int holes;
    Py_ssize_t finish, finish_size; /* 0: it does not finish */
    char output, answer;
    char bytes[FORM_BYTES];
} Form;
static Form forms[FORMS];
static int next_form;

/* Whether this may be another byte of a number. What follows is compared as well, so no value ends too early. */
static int goes_on(const char *at)
{
    return (*at >= '0' && *at <= '9') || *at == '.';
}

/* Whether an event is of this form; if so, what it says. */
static int of_form(const Form *form, const char *at, const char *end, Said *said)
{
    Py_ssize_t from = 0, rest = form->size - (form->holes ? form->after[form->holes - 1] : 0);
    const char *finish = NULL;
    PyObject *usage = NULL;
    if (form->size == 0 || end - at < rest || memcmp(end - rest, form->bytes + form->size - rest, (size_t)rest) != 0)
        return 0;
    for (int i = 0; i < form->holes; i++) {
        Py_ssize_t same = form->at[i] - from;
        if (end - at <= same || memcmp(at, form->bytes + from, (size_t)same) != 0)
            goto other;
        if (form->finish > from)
            finish = at + (form->finish - from);
        const char *value = at + same, *known = form->bytes + form->at[i];
        Py_ssize_t size = form->after[i] - form->at[i];
        if (form->kind[i] != USAGE && end - value > size && memcmp(value, known, (size_t)size) == 0 && !goes_on(value + size))
            at = value + size;
        else if (form->kind[i] == USAGE) {
            if (*value == 'n' || (at = usage_at(value, end, &usage)) == NULL)
                goto other;
        } else if (form->kind[i] == ANYTHING) {
            if (*value == 'n' || (at = skipped(value, end, 0)) == NULL)
                goto other;
        } else if (*value != '"' || (at = string(value, end, 1)) == NULL || at - value < 3)
            goto other;
        from = form->after[i];
    }
    if (end - at != rest)
        goto other;
    if (form->finish > from)
        finish = at + (form->finish - from);
    *said = (Said){.finish = finish, .finish_size = form->finish_size, .usage = usage, .output = form->output, .answer = form->answer};
    return 1;
other:
    Py_XDECREF(usage);
    return 0;
}

/* Keep the form of an event. */
static void keep_form(const char *at, const char *end, const Said *said, const Seen *seen)
{
    if (end - at > FORM_BYTES || seen->holes > MOST_HOLES)
        return;
    Form *form = &forms[next_form];
    next_form = (next_form + 1) % FORMS;
    form->size = end - at;
    memcpy(form->bytes, at, (size_t)form->size);
    form->holes = seen->holes;
    for (int i = 0; i < seen->holes; i++) {
        form->at[i] = seen->hole[i].at - at;
        form->after[i] = seen->hole[i].after - at;
        form->kind[i] = seen->hole[i].kind;
    }
    form->finish = said->finish == NULL ? 0 : said->finish - at;
    form->finish_size = said->finish_size;
    form->output = said->output;
    form->answer = said->answer;
}

/* Whether the payload of an event is usual; if so, what it says. */
static int usual_event(const char *at, const char *end, Said *said)
{
    Seen seen;
    const char *begin = at;
    seen.delta = seen.content = seen.reasoning = seen.text = seen.choices = seen.unknown_text = 0;
    seen.holes = 0;
    *said = (Said){0};
    if (end - at == 6 && memcmp(at, "[DONE]", 6) == 0)
        return 1;
    for (int i = 0; i < FORMS; i++)
        if (of_form(&forms[i], at, end, said))
            return 1;
    *said = (Said){0};
    at = object(space(at, end), end, event_fields, said, &seen);
    if (at == NULL || space(at, end) != end || seen.choices != 1) {
        Py_CLEAR(said->usage);
        return 0;
    }
    said->answer = seen.delta ? seen.content : seen.text;
    said->output = said->answer || (seen.delta && seen.reasoning);
    if (seen.unknown_text && !said->output) { /* Reading._note_unknown_output looks at it */
        Py_CLEAR(said->usage);
        return 0;
    }
    keep_form(begin, end, said, &seen);
    return 1;
}
