/* Reads the JSON of the most common events, for the fast path. Part of _compiled.c.
 *
 * An event that is not understood here, for whatever reason, is left to Python. Every `skip_*` and
 * `parse_*` function takes a position (`cursor`) and the end of the data. It returns the position
 * after what it has read, or NULL if the data is something else. Nothing at `end` or behind it is
 * read. */

/* Limits of what is understood here. */
enum {
    MAX_DEPTH = 16,         /* nested objects and lists */
    MAX_NUMBER_DIGITS = 17, /* before or after the decimal point */
    MAX_FIELDS = 16,        /* of a table of fields */
    MAX_VARIABLES = 12,     /* of a pattern (see `EventPattern`) */
    PATTERN_BYTES = 1024,
    PATTERN_COUNT = 8,
};

/* -- skipping JSON values ---------------------------------------------------------------------- */

/* Skip the white space of JSON. Return the position of the next other byte. */
static const char *skip_space(const char *cursor, const char *end)
{
    while (cursor < end &&
           (*cursor == ' ' || *cursor == '\t' || *cursor == '\n' || *cursor == '\r'))
        cursor++;
    return cursor;
}

/* Return whether a backslash and this byte are an escape sequence of JSON. `\u` is left out,
 * because its code point would have to be checked. */
static int is_simple_escape(char byte)
{
    return byte != '\0' && strchr("\"\\/bfnrt", byte) != NULL;
}

/* Whether a string with escape sequences is accepted. */
enum EscapeRule { REFUSE_ESCAPES, ACCEPT_ESCAPES };

/* Skip an escape sequence in a string, from its backslash. Return the position after it, or NULL if
 * it is incomplete or not accepted. */
static const char *skip_escape(const char *backslash, const char *end, enum EscapeRule rule)
{
    const char *escaped = backslash + 1;
    if (rule == REFUSE_ESCAPES || escaped == end || !is_simple_escape(*escaped))
        return NULL;
    return escaped + 1;
}

/* Return the position of the closing quote of a JSON string, from a position in the string on.
 *
 * Return NULL if there is none, or if control characters or escapes that are not accepted come
 * before it. `*is_ascii` becomes 0 if other bytes than ASCII do. */
static const char *find_closing_quote(const char *cursor, const char *end, enum EscapeRule rule,
                                      int *is_ascii)
{
    while (cursor < end && *cursor != '"') {
        unsigned char byte = (unsigned char)*cursor;
        if (byte < FIRST_PRINTABLE_BYTE)
            return NULL;

        if (byte >= FIRST_NON_ASCII_BYTE)
            *is_ascii = 0;

        cursor = byte == '\\' ? skip_escape(cursor, end, rule) : cursor + 1;
        if (cursor == NULL)
            return NULL;
    }

    return cursor < end ? cursor : NULL;
}

/* Skip a JSON string, from its opening quote. Return the position after its closing quote, or NULL
 * if it is incomplete, is not UTF-8, or has control characters or escapes that are not accepted. */
static const char *skip_string(const char *cursor, const char *end, enum EscapeRule rule)
{
    int has_opening_quote = cursor < end && *cursor == '"';
    if (!has_opening_quote)
        return NULL;

    const char *text = cursor + 1;

    /* Most strings are ASCII without escapes, and this is the position of the closing quote. */
    const char *plain_end = skip_plain_ascii(text, end);
    int is_ascii = 1;
    const char *closing_quote = find_closing_quote(plain_end, end, rule, &is_ascii);
    if (closing_quote == NULL)
        return NULL;

    int is_valid_text = is_ascii || is_utf8(text, closing_quote);
    return is_valid_text ? closing_quote + 1 : NULL;
}

/* Skip a fixed JSON text, such as null. Return the position after it, or NULL. */
static const char *skip_literal(const char *cursor, const char *end, const char *literal)
{
    return skip_bytes(cursor, end, literal, (Py_ssize_t)strlen(literal));
}

/* Return whether there is a decimal digit at a position before `end`. */
static int is_digit_at(const char *cursor, const char *end)
{
    return cursor < end && *cursor >= '0' && *cursor <= '9';
}

/* Skip 1 to MAX_NUMBER_DIGITS digits. Return the position after the last digit, or NULL if there
 * are more or none. */
static const char *skip_digits(const char *cursor, const char *end)
{
    const char *start = cursor;
    while (is_digit_at(cursor, end))
        cursor++;
    Py_ssize_t count = cursor - start;
    return count >= 1 && count <= MAX_NUMBER_DIGITS ? cursor : NULL;
}

/* Skip a JSON number without an exponent, such as -1.5. Return the position after it, or NULL if it
 * is something else, or has a leading zero, which JSON forbids. */
static const char *skip_number(const char *cursor, const char *end)
{
    if (cursor < end && *cursor == '-')
        cursor++;

    int has_leading_zero = cursor < end && *cursor == '0' && is_digit_at(cursor + 1, end);
    if (has_leading_zero)
        return NULL;

    cursor = skip_digits(cursor, end);
    int has_fraction = cursor != NULL && cursor < end && *cursor == '.';
    return has_fraction ? skip_digits(cursor + 1, end) : cursor;
}

/* Skip a colon and the space around it. Return the position after it, or NULL. */
static const char *skip_colon(const char *cursor, const char *end)
{
    cursor = skip_space(cursor, end);
    int has_colon = cursor < end && *cursor == ':';
    return has_colon ? skip_space(cursor + 1, end) : NULL;
}

/* Skip the name of a field and the colon after it. Return the position of its value, or NULL. */
static const char *skip_field_name(const char *cursor, const char *end)
{
    cursor = skip_string(cursor, end, REFUSE_ESCAPES);
    return cursor == NULL ? NULL : skip_colon(cursor, end);
}

/* Skip what follows an element of a JSON object or list: a comma, or the closing bracket.
 *
 * `*is_last` becomes 1 after the bracket, else 0. Return the position of the next element or after
 * the bracket, or NULL if there is something else. */
static const char *skip_element_end(const char *cursor, const char *end, char closing_bracket,
                                    int *is_last)
{
    cursor = skip_space(cursor, end);
    if (cursor >= end)
        return NULL;
    *is_last = *cursor == closing_bracket;
    if (*is_last)
        return cursor + 1;
    return *cursor == ',' ? skip_space(cursor + 1, end) : NULL;
}

static const char *skip_value(const char *cursor, const char *end, int depth);

/* Skip a JSON object or list, at whose opening bracket `cursor` is.
 *
 * `depth` is the number of objects and lists around it. Return the position after the closing
 * bracket, or NULL if the data is incomplete or malformed. */
static const char *skip_container(const char *cursor, const char *end, int depth)
{
    int is_object = *cursor == '{';
    char closing_bracket = is_object ? '}' : ']';
    cursor = skip_space(cursor + 1, end);
    if (cursor < end && *cursor == closing_bracket)
        return cursor + 1;

    int is_last = 0;
    while (!is_last) {
        if (is_object)
            cursor = skip_field_name(cursor, end);

        if (cursor == NULL)
            return NULL;

        cursor = skip_value(cursor, end, depth + 1);
        if (cursor == NULL)
            return NULL;

        cursor = skip_element_end(cursor, end, closing_bracket, &is_last);
        if (cursor == NULL)
            return NULL;
    }

    return cursor;
}

/* Skip any JSON value. `depth` is the number of objects and lists around it, which is limited.
 * Return the position after the value, or NULL if it is malformed or not understood here. */
static const char *skip_value(const char *cursor, const char *end, int depth)
{
    if (cursor >= end || depth > MAX_DEPTH)
        return NULL;

    switch (*cursor) {
    case '"':
        return skip_string(cursor, end, ACCEPT_ESCAPES);
    case 'n':
        return skip_literal(cursor, end, "null");
    case 't':
        return skip_literal(cursor, end, "true");
    case 'f':
        return skip_literal(cursor, end, "false");
    case '{':
    case '[':
        return skip_container(cursor, end, depth);
    default:
        return skip_number(cursor, end);
    }
}

/* -- the fields of an event -------------------------------------------------------------------- */

/* What an event says, as far as it matters for the measurement. */
typedef struct {
    const char *finish_reason; /* a part of the payload without its quotes, or NULL */
    Py_ssize_t finish_reason_size;
    PyObject *usage; /* the token usage as Python decodes it (an own reference), or NULL */
    char has_output; /* a text that is not empty */
    char has_answer; /* an output that is not reasoning */
} EventContent;

/* How the value of a field is read. A field that is in no table is skipped like ANY_VALUE. Every
 * kind but FIELD_OF_OTHER_API accepts null. */
enum ValueKind {
    ANY_VALUE,
    FIELD_OF_OTHER_API, /* is not accepted, because such an event needs another parser */
    NULL_ONLY,
    EMPTY_LIST_ONLY,
    EMPTY_TEXT_ONLY,
    CONTENT_TEXT,
    REASONING_TEXT,
    COMPLETION_TEXT, /* the output of the completions API */
    FINISH_REASON,
    DELTA_OBJECT,
    CHOICES_LIST,
    USAGE_OBJECT,
};

typedef struct {
    const char *name;
    size_t name_size;
    enum ValueKind kind;
} Field;

#define FIELD(name, kind) {name, sizeof name - 1, kind}
#define END_OF_FIELDS {NULL, 0, ANY_VALUE}

static const Field event_fields[] = {
    FIELD("choices", CHOICES_LIST),
    FIELD("usage", USAGE_OBJECT),
    FIELD("error", NULL_ONLY),
    FIELD("message", NULL_ONLY),
    FIELD("detail", NULL_ONLY),
    FIELD("timings", NULL_ONLY),
    FIELD("nvext", NULL_ONLY),
    FIELD("metrics", NULL_ONLY),
    FIELD("data", NULL_ONLY),
    FIELD("results", NULL_ONLY),
    FIELD("output", NULL_ONLY),
    FIELD("type", FIELD_OF_OTHER_API),
    END_OF_FIELDS,
};

static const Field choice_fields[] = {
    FIELD("delta", DELTA_OBJECT),
    FIELD("text", COMPLETION_TEXT),
    FIELD("finish_reason", FINISH_REASON),
    FIELD("token_ids", NULL_ONLY),
    FIELD("message", NULL_ONLY),
    FIELD("meta_info", NULL_ONLY),
    FIELD("speculative_decoding", NULL_ONLY),
    END_OF_FIELDS,
};

static const Field delta_fields[] = {
    FIELD("role", ANY_VALUE),
    FIELD("content", CONTENT_TEXT),
    FIELD("reasoning_content", REASONING_TEXT),
    FIELD("reasoning", REASONING_TEXT),
    FIELD("tool_calls", EMPTY_LIST_ONLY),
    FIELD("function_call", EMPTY_LIST_ONLY),
    FIELD("refusal", EMPTY_TEXT_ONLY),
    FIELD("token_ids", NULL_ONLY),
    END_OF_FIELDS,
};

_Static_assert(sizeof event_fields / sizeof *event_fields <= MAX_FIELDS, "raise MAX_FIELDS");

/* A value of an event that may differ in another event that says the same, such as its text. */
typedef struct {
    const char *start;
    const char *end;
    enum ValueKind kind;
} Variable;

/* What was found in an event while it was parsed. */
typedef struct {
    EventContent content; /* without `has_output` and `has_answer`, which are known at the end */

    char has_choices_list;
    char has_choices_null;
    char has_delta;

    /* Texts that are not empty */
    char has_content;
    char has_reasoning;
    char has_completion_text;
    char has_unknown_text; /* in a field of the delta that is in no table */

    int variable_count; /* may be more than MAX_VARIABLES, of which no more are stored */
    Variable variables[MAX_VARIABLES];
} EventScan;

/* -- token usage ------------------------------------------------------------------------------- */

/* Return a Python object as a count of tokens, or -1 if it is none.
 *
 * A count is an int of at most 31 bits, as the columns of the results hold it. A bool is no count,
 * although it is an int in Python. This function does not raise. */
static int64_t read_token_count(PyObject *value)
{
    int64_t count;
    int is_int = Py_TYPE(value) == &PyLong_Type && read_int64(value, &count);
    return is_int && count >= 0 && count <= MAX_TOKEN_COUNT ? count : -1;
}

/* Return an attribute of an object as a count of tokens, or -1 if it is none or does not exist.
 * This function does not raise. */
static int64_t read_token_count_attribute(PyObject *owner, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(owner, name);
    if (value == NULL) {
        PyErr_Clear();
        return -1;
    }

    int64_t count = read_token_count(value);
    Py_DECREF(value);
    return count;
}

/* Return the number of output tokens of a usage with the field names of the chat API
 * (`prompt_tokens` and `completion_tokens`), or -1 for any other usage. */
static int64_t count_output_tokens(PyObject *usage)
{
    if (read_token_count_attribute(usage, name_prompt_tokens) < 0)
        return -1;
    return read_token_count_attribute(usage, name_completion_tokens);
}

/* A usage that was decoded lately. Many responses have the same one, and nothing changes it. */
typedef struct {
    PyObject *decoded;     /* NULL if this item of the cache is empty */
    int64_t output_tokens; /* the result of `count_output_tokens` */
    Py_ssize_t size;
    char json[MAX_CACHED_USAGE_BYTES]; /* a whole object, with its closing brace */
} CachedUsage;

static CachedUsage usage_cache[CACHED_USAGES];

/* Remove all usages from the cache. */
static void clear_usage_cache(void)
{
    for (int i = 0; i < CACHED_USAGES; i++)
        Py_CLEAR(usage_cache[i].decoded);
}

/* Return the cached usage whose JSON is at `cursor`, or NULL if it is not in the cache.
 *
 * It is enough that the data begins with the JSON of a cached usage: that JSON is an object with
 * its closing brace, so that the object in the data ends there too. */
static const CachedUsage *find_cached_usage(const char *cursor, const char *end)
{
    for (int i = 0; i < CACHED_USAGES; i++) {
        const CachedUsage *cached = &usage_cache[i];
        if (cached->decoded != NULL && skip_bytes(cursor, end, cached->json, cached->size) != NULL)
            return cached;
    }
    return NULL;
}

/* Return the number of output tokens of a decoded usage, or -1 if its fields do not have the names
 * of the chat API (`prompt_tokens` and `completion_tokens`).
 *
 * `parse_usage` returns the very object in the cache for a usage that is cached, so it is enough to
 * compare the pointers. */
static int64_t output_tokens_of_usage(PyObject *usage)
{
    for (int i = 0; i < CACHED_USAGES; i++) {
        const CachedUsage *cached = &usage_cache[i];
        if (cached->decoded == usage)
            return cached->output_tokens;
    }
    return count_output_tokens(usage);
}

/* Add a usage to the cache, in the place of the oldest one.
 *
 * `start` and `end` are the bounds of its JSON, which must be an object, as `find_cached_usage`
 * assumes, and must have at most MAX_CACHED_USAGE_BYTES. */
static void add_to_usage_cache(const char *start, const char *end, PyObject *decoded)
{
    static int oldest_index; /* in `usage_cache`, kept between calls */
    CachedUsage *cached = &usage_cache[oldest_index];
    oldest_index = (oldest_index + 1) % CACHED_USAGES;
    cached->size = end - start;
    memcpy(cached->json, start, (size_t)cached->size);
    cached->output_tokens = count_output_tokens(decoded);
    set_field(&cached->decoded, decoded);
}

/* Decode the JSON of a usage by the registered function of Python. Return a new reference, or NULL
 * without an exception if the function fails. */
static PyObject *decode_usage_in_python(const char *start, const char *end)
{
    PyObject *json = PyBytes_FromStringAndSize(start, end - start);
    PyObject *usage = NULL;
    if (json != NULL) {
        usage = PyObject_CallFunctionObjArgs(decode_usage, json, NULL);
        Py_DECREF(json);
    }

    if (usage == NULL)
        PyErr_Clear();

    return usage;
}

/* Parse the token usage of an event. `*usage` becomes a new reference to the decoded usage.
 *
 * Return the position after it, or NULL if the value is no valid usage. */
static const char *parse_usage(const char *cursor, const char *end, PyObject **usage)
{
    const CachedUsage *cached = find_cached_usage(cursor, end);
    if (cached != NULL) {
        Py_INCREF(cached->decoded);
        *usage = cached->decoded;
        return cursor + cached->size;
    }

    const char *usage_end = skip_value(cursor, end, 0);
    if (usage_end == NULL)
        return NULL;

    PyObject *decoded = decode_usage_in_python(cursor, usage_end);
    if (decoded == NULL)
        return NULL;

    int is_object = *cursor == '{';
    if (is_object && usage_end - cursor <= MAX_CACHED_USAGE_BYTES)
        add_to_usage_cache(cursor, usage_end, decoded);

    *usage = decoded;
    return usage_end;
}

/* -- parsing an event -------------------------------------------------------------------------- */

static const char *parse_object(const char *cursor, const char *end, const Field *fields,
                                EventScan *scan);

/* Return whether a value, from `start` to the position after it, is a string that is not empty. The
 * end is NULL if the value could not be read. */
static int is_nonempty_string(const char *start, const char *value_end)
{
    const Py_ssize_t quotes = 2;
    return value_end != NULL && *start == '"' && value_end - start > quotes;
}

/* Return whether a JSON value is null. No other value begins with this letter. */
static int is_null(const char *value)
{
    return *value == 'n';
}

/* Parse the list of the choices of an event, which may have one item at most. Several choices are
 * left to Python. Return the position after the list, or NULL if it is something else. */
static const char *parse_choices(const char *cursor, const char *end, EventScan *scan)
{
    if (cursor >= end || *cursor != '[')
        return NULL;

    scan->has_choices_list = 1;
    cursor = skip_space(cursor + 1, end);
    int is_empty = cursor < end && *cursor == ']';
    if (is_empty)
        return cursor + 1;

    cursor = parse_object(cursor, end, choice_fields, scan);
    if (cursor == NULL)
        return NULL;

    int is_last;
    cursor = skip_element_end(cursor, end, ']', &is_last);
    return cursor != NULL && is_last ? cursor : NULL;
}

/* Parse a text. `*has_text` becomes 1 if it is not empty. Return the position after its closing
 * quote, or NULL if it is no string or not understood here. */
static const char *parse_text(const char *cursor, const char *end, char *has_text)
{
    const char *text_end = skip_string(cursor, end, ACCEPT_ESCAPES);
    if (is_nonempty_string(cursor, text_end))
        *has_text = 1;
    return text_end;
}

/* Parse the finish reason of a choice, such as "stop". An empty one counts as none. Return the
 * position after its closing quote, or NULL if it is no string without escapes. */
static const char *parse_finish_reason(const char *cursor, const char *end, EventScan *scan)
{
    const char *string_end = skip_string(cursor, end, REFUSE_ESCAPES);
    if (is_nonempty_string(cursor, string_end)) {
        const char *opening_quote = cursor;
        const char *closing_quote = string_end - 1;
        scan->content.finish_reason = opening_quote + 1;
        scan->content.finish_reason_size = closing_quote - (opening_quote + 1);
    }

    return string_end;
}

/* Parse the value of a field, which `kind` describes, and store in `*scan` what it says of the
 * event.
 *
 * Null is accepted for every kind but FIELD_OF_OTHER_API. Return the position after the value, or
 * NULL if the event has to be left to Python. */
static const char *parse_value(enum ValueKind kind, const char *cursor, const char *end,
                               EventScan *scan)
{
    const char *null_end = skip_literal(cursor, end, "null");
    int is_accepted_null = null_end != NULL && kind != FIELD_OF_OTHER_API;
    if (is_accepted_null) {
        if (kind == CHOICES_LIST)
            scan->has_choices_null = 1;
        return null_end;
    }

    switch (kind) {
    case FIELD_OF_OTHER_API:
    case NULL_ONLY:
        return NULL;
    case ANY_VALUE:
        return skip_value(cursor, end, 0);
    case EMPTY_LIST_ONLY:
        return skip_literal(cursor, end, "[]");
    case EMPTY_TEXT_ONLY:
        return skip_literal(cursor, end, "\"\"");
    case CONTENT_TEXT:
        return parse_text(cursor, end, &scan->has_content);
    case REASONING_TEXT:
        return parse_text(cursor, end, &scan->has_reasoning);
    case COMPLETION_TEXT:
        return parse_text(cursor, end, &scan->has_completion_text);
    case FINISH_REASON:
        return parse_finish_reason(cursor, end, scan);
    case DELTA_OBJECT:
        scan->has_delta = 1;
        return parse_object(cursor, end, delta_fields, scan);
    case CHOICES_LIST:
        return parse_choices(cursor, end, scan);
    case USAGE_OBJECT:
        return parse_usage(cursor, end, &scan->content.usage);
    }
    return NULL;
}

/* Add a value to the variables of an event, the values that may differ in similar events. Only the
 * first MAX_VARIABLES are stored, but all are counted, because an event with more becomes no
 * pattern. */
static void add_variable(EventScan *scan, const char *start, const char *end, enum ValueKind kind)
{
    if (scan->variable_count < MAX_VARIABLES)
        scan->variables[scan->variable_count] = (Variable){start, end, kind};
    scan->variable_count++;
}

/* Return whether a value that was parsed may differ in a later event without changing what the
 * event says. Such a value is a variable of the pattern by which later events are recognised.
 *
 * The variables are values that are skipped, such as ids, texts that are not empty, and usages,
 * which are parsed again in each event. A null is none, because a text or a usage in its place
 * would say something else. */
static int is_variable(enum ValueKind kind, const char *start, const char *value_end,
                       const EventScan *scan)
{
    switch (kind) {
    case ANY_VALUE:
        return !is_null(start);
    case CONTENT_TEXT:
    case REASONING_TEXT:
    case COMPLETION_TEXT:
        return is_nonempty_string(start, value_end);
    case USAGE_OBJECT:
        return scan->content.usage != NULL; /* It is NULL if the value is null. */
    default:
        return 0;
    }
}

/* Parse the value of a field of this kind, and add it to the variables of the event if it is one.
 * Return the position after the value, or NULL if the event has to be left to Python. */
static const char *parse_field_value(enum ValueKind kind, const char *cursor, const char *end,
                                     EventScan *scan)
{
    const char *value_end = parse_value(kind, cursor, end, scan);
    if (value_end != NULL && is_variable(kind, cursor, value_end, scan))
        add_variable(scan, cursor, value_end, kind);
    return value_end;
}

/* Skip the value of a field of a delta (the new part of the output) whose name is not known. Return
 * the position after the value, or NULL if it is malformed.
 *
 * A text in it may be output of a server that loadgen does not know. It is therefore noted, and in
 * a similar event only a text may take its place. */
static const char *skip_unknown_delta_value(const char *cursor, const char *end, EventScan *scan)
{
    const char *value_end = skip_value(cursor, end, 0);
    if (is_nonempty_string(cursor, value_end)) {
        scan->has_unknown_text = 1;
        add_variable(scan, cursor, value_end, COMPLETION_TEXT);
    }
    return value_end;
}

/* Return the field with this name, or NULL if it is not in the table. */
static const Field *find_field(const Field *fields, const char *name, size_t name_size)
{
    for (const Field *field = fields; field->name != NULL; field++) {
        if (field->name_size == name_size && memcmp(field->name, name, name_size) == 0)
            return field;
    }
    return NULL;
}

/* Parse the name of a field and the colon after it. `*field` becomes the field of the table, or
 * NULL if its name is not in it. Return the position of its value, or NULL. */
static const char *parse_field_name(const char *cursor, const char *end, const Field *fields,
                                    const Field **field)
{
    const char *name_end = skip_string(cursor, end, REFUSE_ESCAPES);
    if (name_end == NULL)
        return NULL;
    const char *name = cursor + 1;
    const char *closing_quote = name_end - 1;
    *field = find_field(fields, name, (size_t)(closing_quote - name));
    return skip_colon(name_end, end);
}

/* Parse the value of a field whose name is not in the table `fields`, and store in `*scan` whether
 * it may be output.
 *
 * Only in a delta, which is the new part of the output, may an unknown field have output. Elsewhere
 * the value is skipped. Return the position after it, or NULL if it is malformed. */
static const char *parse_unknown_field_value(const char *cursor, const char *end,
                                             const Field *fields, EventScan *scan)
{
    int is_in_delta = fields == delta_fields;
    if (is_in_delta)
        return skip_unknown_delta_value(cursor, end, scan);
    return parse_field_value(ANY_VALUE, cursor, end, scan);
}

/* Parse one field of a JSON object, its name and its value, and store what it says in `*scan`.
 *
 * `fields` is the table of the known fields, and `was_parsed` has a flag for each of them. Return
 * the position after the value. Return NULL if Python has to parse the event: the field is
 * malformed, has a value that is not understood here, or occurs for the second time. */
static const char *parse_field(const char *cursor, const char *end, const Field *fields,
                               char *was_parsed, EventScan *scan)
{
    const Field *field;

    cursor = parse_field_name(cursor, end, fields, &field);
    if (cursor == NULL)
        return NULL;
    if (field == NULL)
        return parse_unknown_field_value(cursor, end, fields, scan);

    Py_ssize_t field_index = field - fields;
    if (was_parsed[field_index])
        return NULL; /* In Python, the last of several fields of one name counts. */

    was_parsed[field_index] = 1;
    return parse_field_value(field->kind, cursor, end, scan);
}

/* Parse a JSON object whose known fields are in the table `fields`, and store what they say in
 * `*scan`.
 *
 * Return the position after the object, or NULL if the event has to be left to Python: the object
 * is malformed, or it has a value or a repeated field that is not understood here. */
static const char *parse_object(const char *cursor, const char *end, const Field *fields,
                                EventScan *scan)
{
    char was_parsed[MAX_FIELDS] = {0};
    if (cursor >= end || *cursor != '{')
        return NULL;

    cursor = skip_space(cursor + 1, end);
    int is_empty = cursor < end && *cursor == '}';
    if (is_empty)
        return cursor + 1;

    int is_last = 0;
    while (!is_last) {
        cursor = parse_field(cursor, end, fields, was_parsed, scan);
        if (cursor == NULL)
            return NULL;
        cursor = skip_element_end(cursor, end, '}', &is_last);
        if (cursor == NULL)
            return NULL;
    }

    return cursor;
}

/* Set what kind of output an event has, from the texts that were found in it.
 *
 * The output of a chat is in a delta, and that of a completion in a text of its own. Reasoning is
 * output, but no part of the answer. */
static void set_output_kind(const EventScan *scan, EventContent *content)
{
    if (scan->has_delta) {
        content->has_answer = scan->has_content;
        content->has_output = scan->has_content || scan->has_reasoning;
    } else {
        content->has_answer = scan->has_completion_text;
        content->has_output = scan->has_completion_text;
    }
}

/* Parse the JSON of an event, and set `*content` to what it says: whether it has output, its finish
 * reason and its token usage (a new reference). `scan` receives the values that may differ in other
 * events.
 *
 * Return 1, or 0 if the event has to be left to Python. */
static int parse_event_json(const char *payload, const char *end, EventScan *scan,
                            EventContent *content)
{
    const char *object_end = parse_object(skip_space(payload, end), end, event_fields, scan);
    *content = scan->content;
    set_output_kind(scan, content);

    int is_whole = object_end != NULL && skip_space(object_end, end) == end;

    /* Without choices, or with null as their list, it is an event of another API. */
    int is_chat_event = scan->has_choices_list && !scan->has_choices_null;

    /* A text in an unknown field may be output, which the reader in Python counts. */
    int may_have_unknown_output = scan->has_unknown_text && !content->has_output;
    if (is_whole && is_chat_event && !may_have_unknown_output)
        return 1;

    Py_CLEAR(content->usage);
    return 0;
}

/* -- patterns of events ------------------------------------------------------------------------ */

/* A range of the bytes of a pattern. */
typedef struct {
    Py_ssize_t start;
    Py_ssize_t size;
} Span;

/* An event that was parsed lately, to recognise events that say the same without parsing them.
 *
 * It is a sequence of fixed bytes (literals) and variables, as in a template. Of the event
 *
 *     {"id":"c-1","choices":[{"delta":{"content":"Hi"}}]}
 *
 * the variables are "c-1" and "Hi", and the literals are what is before, between and after them.
 * An event with the same literals, and with variables of the same kinds, says the same. */
typedef struct {
    char is_used;
    int variable_count;
    Span variables[MAX_VARIABLES];
    enum ValueKind kinds[MAX_VARIABLES]; /* of the variables */
    Span literals[MAX_VARIABLES + 1]; /* literals[i] is before variable i, the last one after all */

    int finish_reason_literal;       /* the index of the literal that has the finish reason */
    Py_ssize_t finish_reason_offset; /* of the finish reason in this literal */
    Py_ssize_t finish_reason_size;   /* 0 without a finish reason */
    char has_output;
    char has_answer;
    char bytes[PATTERN_BYTES]; /* the payload of the event */
} EventPattern;

/* The last patterns. An event of one response often matches that of another. */
static EventPattern patterns[PATTERN_COUNT];

/* Return whether this byte could continue a number that ends before it. */
static int continues_number(char byte)
{
    return (byte >= '0' && byte <= '9') || byte == '.';
}

/* Return whether the data begins with the same JSON value as a pattern has for this variable.
 *
 * The value in the data must not be longer: a number must not go on with 12 where the pattern has
 * 1. Any other value, such as a string, has an end of its own. */
static int has_same_value(const EventPattern *pattern, const Span *variable, const char *cursor,
                          const char *end)
{
    const char *value = pattern->bytes + variable->start;
    const char *value_end = skip_bytes(cursor, end, value, variable->size);
    return value_end != NULL && value_end < end && !continues_number(*value_end);
}

/* Match the value of an event with variable `index` of a pattern, a value that may differ.
 *
 * `cursor` is at the first byte of the value, before `end`. `*usage` becomes a new reference if the
 * value is a token usage. Return the position after the value, or NULL if it may not take the place
 * of the variable: a null is no usage and no text, and an empty text is no output. */
static const char *match_variable(const EventPattern *pattern, int index, const char *cursor,
                                  const char *end, PyObject **usage)
{
    enum ValueKind kind = pattern->kinds[index];
    const Span *variable = &pattern->variables[index];
    if (kind == USAGE_OBJECT)
        return is_null(cursor) ? NULL : parse_usage(cursor, end, usage);

    /* Most values, such as ids, are the same in all events, and are only compared. */
    if (has_same_value(pattern, variable, cursor, end))
        return cursor + variable->size;
    if (kind == ANY_VALUE)
        return is_null(cursor) ? NULL : skip_value(cursor, end, 0);

    const char *text_end = skip_string(cursor, end, ACCEPT_ESCAPES);
    return is_nonempty_string(cursor, text_end) ? text_end : NULL;
}

/* Skip the literal `index` of a pattern, the fixed bytes between two variables. Return the position
 * after it, or NULL if the data begins with other bytes. */
static const char *skip_pattern_literal(const EventPattern *pattern, int index, const char *cursor,
                                        const char *end)
{
    const Span *literal = &pattern->literals[index];
    return skip_bytes(cursor, end, pattern->bytes + literal->start, literal->size);
}

/* Match an event, from its beginning to its end, with the parts of a pattern: the literals (fixed
 * bytes) and the variables (values that may differ) between them.
 *
 * `literal_starts[i]` becomes the position of literal `i` in the event. `*usage` becomes a new
 * reference if a usage was parsed, even if a later part does not match. Return whether the event
 * matches. */
static int match_pattern_parts(const EventPattern *pattern, const char *cursor, const char *end,
                               const char **literal_starts, PyObject **usage)
{
    /* Each variable follows the literal of the same index. */
    for (int i = 0; i < pattern->variable_count; i++) {
        literal_starts[i] = cursor;
        const char *value = skip_pattern_literal(pattern, i, cursor, end);
        int has_value = value != NULL && value < end;
        if (!has_value)
            return 0;

        cursor = match_variable(pattern, i, value, end, usage);
        if (cursor == NULL)
            return 0;
    }

    int last_literal = pattern->variable_count;
    literal_starts[last_literal] = cursor;
    return skip_pattern_literal(pattern, last_literal, cursor, end) == end;
}

/* Return whether an event ends with the last literal of a pattern, the bytes after all values that
 * may differ. This is compared first, because other events often differ there, for example in their
 * finish reason. */
static int ends_like_pattern(const EventPattern *pattern, const char *payload, const char *end)
{
    const Span *literal = &pattern->literals[pattern->variable_count];
    if (end - payload < literal->size)
        return 0;
    return memcmp(end - literal->size, pattern->bytes + literal->start, (size_t)literal->size) == 0;
}

/* Recognise an event that says the same as an earlier one, the pattern, without parsing it.
 *
 * It may differ from the pattern only in its variables: texts, the token usage, and values without
 * a meaning here, such as ids. Return 1 and set `*content`: the kind of output and the finish
 * reason are those of the pattern, and the usage is that of the event (a new reference). Return 0
 * if the event differs in anything else. */
static int match_pattern(const EventPattern *pattern, const char *payload, const char *end,
                         EventContent *content)
{
    if (!pattern->is_used || !ends_like_pattern(pattern, payload, end))
        return 0;

    /* Where in this event the bytes between the variables are */
    const char *literal_starts[MAX_VARIABLES + 1];
    PyObject *usage = NULL;
    if (!match_pattern_parts(pattern, payload, end, literal_starts, &usage)) {
        Py_XDECREF(usage);
        return 0;
    }

    *content = (EventContent){
        .usage = usage,
        .has_output = pattern->has_output,
        .has_answer = pattern->has_answer,
    };
    int has_finish_reason = pattern->finish_reason_size > 0;
    if (has_finish_reason) {
        /* It is in a literal, whose bytes are the same as in the pattern. */
        const char *literal = literal_starts[pattern->finish_reason_literal];
        content->finish_reason = literal + pattern->finish_reason_offset;
        content->finish_reason_size = pattern->finish_reason_size;
    }

    return 1;
}

/* Divide the payload of an event of `size` bytes into the variables of a pattern, which are values
 * that may differ in other events, and the literals, which are the bytes between them.
 *
 * The payload {"a":1} with the variable 1 has the literals {"a": and }. */
static void set_pattern_parts(EventPattern *pattern, const EventScan *scan, const char *payload,
                              Py_ssize_t size)
{
    Py_ssize_t literal_start = 0;
    pattern->variable_count = scan->variable_count;

    for (int i = 0; i < scan->variable_count; i++) {
        const Variable *variable = &scan->variables[i];
        Py_ssize_t variable_start = variable->start - payload;
        Py_ssize_t variable_end = variable->end - payload;
        pattern->literals[i] = (Span){literal_start, variable_start - literal_start};
        pattern->variables[i] = (Span){variable_start, variable_end - variable_start};
        pattern->kinds[i] = variable->kind;
        literal_start = variable_end;
    }

    pattern->literals[scan->variable_count] = (Span){literal_start, size - literal_start};
}

/* Note where in a pattern the finish reason of its event is: in which literal, and at which offset.
 *
 * A pattern consists of variables, the values that may differ in other events, and literals, the
 * bytes between them. The finish reason is never a variable, so that it is inside a literal.
 * Literal `i` is the one before variable `i`. */
static void locate_finish_reason(EventPattern *pattern, const EventContent *content,
                                 const char *payload)
{
    pattern->finish_reason_size = content->finish_reason_size;
    if (content->finish_reason_size == 0)
        return;

    Py_ssize_t position = content->finish_reason - payload;
    int variables_before = 0;
    while (variables_before < pattern->variable_count &&
           pattern->variables[variables_before].start < position)
        variables_before++;

    int literal_index = variables_before;
    pattern->finish_reason_literal = literal_index;
    pattern->finish_reason_offset = position - pattern->literals[literal_index].start;
}

/* Make an event that was just parsed a pattern, by which later events are recognised that differ
 * from it only in values such as texts and ids.
 *
 * There are PATTERN_COUNT patterns, and the new one replaces the oldest one. An event that is too
 * long or has too many such values becomes no pattern. */
static void add_pattern(const char *payload, const char *end, const EventContent *content,
                        const EventScan *scan)
{
    static int oldest_index; /* in `patterns`, kept between calls */
    Py_ssize_t size = end - payload;
    if (size > PATTERN_BYTES || scan->variable_count > MAX_VARIABLES)
        return;

    EventPattern *pattern = &patterns[oldest_index];
    oldest_index = (oldest_index + 1) % PATTERN_COUNT;
    pattern->is_used = 1;
    memcpy(pattern->bytes, payload, (size_t)size);
    set_pattern_parts(pattern, scan, payload, size);
    locate_finish_reason(pattern, content, payload);
    pattern->has_output = content->has_output;
    pattern->has_answer = content->has_answer;
}

/* Parse the payload of an event, and set `*content` to what it says.
 *
 * An event that matches the pattern of an earlier one is not parsed again. Return 1, or 0 if the
 * event has to be left to Python. After 1, `content->usage` may hold a reference that the caller
 * must release. */
static int parse_common_event(const char *payload, const char *end, EventContent *content)
{
    *content = (EventContent){0};
    int is_end_marker = skip_literal(payload, end, "[DONE]") == end;
    if (is_end_marker)
        return 1;

    for (int i = 0; i < PATTERN_COUNT; i++) {
        if (match_pattern(&patterns[i], payload, end, content))
            return 1;
    }

    EventScan scan = {0};
    if (!parse_event_json(payload, end, &scan, content))
        return 0;

    add_pattern(payload, end, content, &scan);
    return 1;
}
