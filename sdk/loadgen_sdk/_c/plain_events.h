/* Recognises plain events, which differ from an earlier event of the same response in their text
 * alone. Part of _compiled.c.
 *
 * The reference is transport/plain_events.py with wire_formats/reference.py. All `skip_*` functions
 * return the position after what they skip, or NULL if it is something else. */

/* The bytes around the text of a plain event's payload. `before` ends with the opening quote of the
 * text, and `after` begins with the closing quote. */
typedef struct {
    const char *before, *after;
    Py_ssize_t before_size, after_size;
} Template;

/* Return whether these bytes are valid UTF-8. */
static int is_utf8(const char *at, const char *end)
{
    PyObject *decoded = PyUnicode_DecodeUTF8(at, end - at, "strict");
    if (decoded == NULL) {
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(decoded);
    return 1;
}

/* Skip a text that is not empty and has no escapes, up to its closing quote. */
static const char *skip_plain_text(const char *text, const char *end)
{
    const char *at = text;
    int is_ascii = 1;
    for (; at < end && *at != '"'; at++) {
        unsigned char byte = (unsigned char)*at;
        if (byte < 0x20 || byte == '\\')
            return NULL;
        if (byte >= 0x80)
            is_ascii = 0;
    }
    if (at == text || at == end || (!is_ascii && !is_utf8(text, at)))
        return NULL;
    return at;
}

/* Skip certain bytes. */
static const char *skip_bytes(const char *at, const char *end, const char *bytes, Py_ssize_t size)
{
    return end - at >= size && memcmp(at, bytes, (size_t)size) == 0 ? at + size : NULL;
}

/* Skip the payload of a plain event. */
static const char *skip_plain_payload(const char *at, const char *end, const Template *template)
{
    at = skip_bytes(at, end, template->before, template->before_size);
    if (at == NULL)
        return NULL;
    at = skip_plain_text(at, end);
    return at == NULL ? NULL : skip_bytes(at, end, template->after, template->after_size);
}

/* Skip a plain event. */
static const char *skip_plain_event(const char *at, const char *end, const Template *template)
{
    at = skip_bytes(at, end, "data: ", DATA_PREFIX_BYTES);
    if (at == NULL)
        return NULL;
    at = skip_plain_payload(at, end, template);
    return at == NULL ? NULL : skip_bytes(at, end, "\n\n", EVENT_END_BYTES);
}

/* Skip an event that is one line of data, which is not empty. */
static const char *skip_line_event(const char *at, const char *end)
{
    const char *data = skip_bytes(at, end, "data: ", DATA_PREFIX_BYTES);
    if (data == NULL)
        return NULL;
    const char *line_end = memchr(data, '\n', (size_t)(end - data));
    if (line_end == NULL || line_end == data)
        return NULL;
    return skip_bytes(line_end, end, "\n\n", EVENT_END_BYTES);
}

/* Return the value of a hexadecimal digit, or -1. */
static int hex_value(char digit)
{
    if (digit >= '0' && digit <= '9')
        return digit - '0';
    if (digit >= 'a' && digit <= 'f')
        return digit - 'a' + 10;
    if (digit >= 'A' && digit <= 'F')
        return digit - 'A' + 10;
    return -1;
}

/* Parse a whole chunk that is not empty and has no extensions. Its content is from `*content` to
 * `*content_end`. Return the position after the chunk, or NULL. */
static const char *parse_chunk(const char *at, const char *end, const char **content,
                               const char **content_end)
{
    int64_t size = 0; /* The digits may be more than a Py_ssize_t of 32 bits holds. */
    int digits = 0;
    for (; at < end && hex_value(*at) >= 0 && digits <= MAX_SIZE_DIGITS; at++) {
        size = size * 16 + hex_value(*at);
        digits++;
    }
    if (digits == 0 || digits > MAX_SIZE_DIGITS || size == 0)
        return NULL;
    at = skip_bytes(at, end, "\r\n", 2);
    if (at == NULL || end - at < size + 2)
        return NULL;
    *content = at;
    *content_end = at + size;
    return skip_bytes(*content_end, end, "\r\n", 2);
}

/* Parse a chunk that holds plain events only. `*events` becomes their number. Return the position
 * after the chunk, or NULL. */
static const char *parse_plain_chunk(const char *at, const char *end, const Template *template,
                                     Py_ssize_t *events)
{
    const char *content, *content_end;
    const char *next = parse_chunk(at, end, &content, &content_end);
    *events = 0;
    while (next != NULL && content < content_end) {
        content = skip_plain_event(content, content_end, template);
        if (content == NULL)
            return NULL;
        ++*events;
    }
    return next;
}

/* -- functions for Python ---------------------------------------------------------------------- */

/* Append the number of plain events, if there are any, and reset it. Return -1 with an
 * exception. */
static int append_plain_count(PyObject *events, Py_ssize_t *plain_events)
{
    if (*plain_events == 0)
        return 0;
    PyObject *number = PyLong_FromSsize_t(*plain_events);
    *plain_events = 0;
    int failed = number == NULL || PyList_Append(events, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

/* Append a payload. Return -1 with an exception. */
static int append_payload(PyObject *events, const char *at, const char *end)
{
    PyObject *payload = PyBytes_FromStringAndSize(at, end - at);
    int failed = payload == NULL || PyList_Append(events, payload) < 0;
    Py_XDECREF(payload);
    return failed ? -1 : 0;
}

/* Return whether a content has only events that are one line of data each. */
static int has_line_events_only(const char *at, const char *end)
{
    if (memchr(at, '\r', (size_t)(end - at)) != NULL)
        return 0;
    while (at != NULL && at < end)
        at = skip_line_event(at, end);
    return at != NULL;
}

/* Append the events of a content that has line events only. Plain ones are added to
 * `*plain_events`. Return -1 with an exception. */
static int append_line_events(PyObject *events, const char *at, const char *end,
                              const Template *template, Py_ssize_t *plain_events)
{
    while (at < end) {
        const char *next = skip_line_event(at, end);
        int is_plain = template->before_size > 0 && skip_plain_event(at, end, template) == next;
        if (is_plain)
            ++*plain_events;
        else if (append_plain_count(events, plain_events) < 0 ||
                 append_payload(events, at + DATA_PREFIX_BYTES, next - EVENT_END_BYTES) < 0)
            return -1;
        at = next;
    }
    return 0;
}

/* parse_whole_chunks(data, before, after) */
static PyObject *parse_whole_chunks(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *data;
    Py_ssize_t size;
    Template template;
    if (!PyArg_ParseTuple(args, "y#y#y#", &data, &size, &template.before, &template.before_size,
                          &template.after, &template.after_size))
        return NULL;
    PyObject *events = PyList_New(0);
    if (events == NULL)
        return NULL;
    const char *at = data;
    const char *end = data + size;
    Py_ssize_t chunks = 0;
    Py_ssize_t plain_events = 0; /* that were not appended yet */
    while (at < end) {
        const char *content, *content_end;
        Py_ssize_t plain_in_chunk = 0;
        const char *next = NULL;
        if (template.before_size > 0)
            next = parse_plain_chunk(at, end, &template, &plain_in_chunk);
        if (next != NULL)
            plain_events += plain_in_chunk;
        else {
            next = parse_chunk(at, end, &content, &content_end);
            if (next == NULL || !has_line_events_only(content, content_end))
                break;
            if (append_line_events(events, content, content_end, &template, &plain_events) < 0)
                goto failed;
        }
        chunks++;
        at = next;
    }
    if (append_plain_count(events, &plain_events) == 0)
        return Py_BuildValue("nNn", chunks, events, (Py_ssize_t)(at - data));
failed:
    Py_DECREF(events);
    return NULL;
}

/* Return whether an item is the payload of a plain event. */
static int is_plain_payload(PyObject *item, const Template *template)
{
    char *data;
    Py_ssize_t size;
    if (!PyBytes_Check(item) || PyBytes_AsStringAndSize(item, &data, &size) < 0)
        return 0;
    return skip_plain_payload(data, data + size, template) == data + size;
}

/* count_leading_plain_events(events, start, before, after) */
static PyObject *count_leading_plain_events(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *events;
    Py_ssize_t start;
    Template template;
    if (!PyArg_ParseTuple(args, "Ony#y#", &events, &start, &template.before, &template.before_size,
                          &template.after, &template.after_size))
        return NULL;
    if (!PyList_Check(events) || start < 0) {
        PyErr_SetString(PyExc_TypeError, "events are a list");
        return NULL;
    }
    Py_ssize_t index = start;
    Py_ssize_t plain_events = 0;
    for (; index < PyList_Size(events); index++) {
        PyObject *item = PyList_GetItem(events, index);
        if (PyLong_Check(item)) { /* so many plain events */
            Py_ssize_t count = PyLong_AsSsize_t(item);
            if (count < 0 && PyErr_Occurred())
                return NULL;
            plain_events += count;
        } else if (is_plain_payload(item, &template))
            plain_events++;
        else
            break;
    }
    return Py_BuildValue("nn", index - start, plain_events);
}
