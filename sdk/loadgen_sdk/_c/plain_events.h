/* Events that are like those before them but for their text, alone and in chunks of HTTP/1.1. Part of _compiled.c. */

/* The bytes `data: BEFORE` and `AFTER\n\n` around the text of a plain event; AFTER begins with the closing quote. */
typedef struct {
    const char *before, *after;
    Py_ssize_t before_size, after_size;
} Template;

/* The text of a plain event at `text`, before `end`: where its closing quote is, else NULL. */
static const char *skip_plain_text(const char *text, const char *end)
{
    const char *stop = text;
    int ascii = 1;
    for (; stop < end && *stop != '"'; stop++) {
        unsigned char byte = (unsigned char)*stop;
        if (byte < 0x20 || byte == '\\')
            return NULL;
        if (byte >= 0x80)
            ascii = 0;
    }
    if (stop == text || stop == end)
        return NULL;
    if (!ascii) {
        PyObject *decoded = PyUnicode_DecodeUTF8(text, stop - text, "strict");
        if (decoded == NULL) {
            PyErr_Clear();
            return NULL;
        }
        Py_DECREF(decoded);
    }
    return stop;
}

/* The payload of a plain event at `at`, before `end`: where it ends, else NULL. */
static const char *skip_plain_payload(const char *at, const char *end, const Template *template)
{
    if (end - at < template->before_size || memcmp(at, template->before, (size_t)template->before_size) != 0)
        return NULL;
    const char *stop = skip_plain_text(at + template->before_size, end);
    if (stop == NULL || end - stop < template->after_size ||
        memcmp(stop, template->after, (size_t)template->after_size) != 0)
        return NULL;
    return stop + template->after_size;
}

/* A plain event at `at`, before `end`: where it ends, else NULL. */
static const char *skip_plain_event(const char *at, const char *end, const Template *template)
{
    if (end - at < 6 || memcmp(at, "data: ", 6) != 0)
        return NULL;
    const char *stop = skip_plain_payload(at + 6, end, template);
    return stop == NULL || end - stop < 2 || memcmp(stop, "\n\n", 2) != 0 ? NULL : stop + 2;
}

/* An event at `at`, before `end`, that is one line of data, which is not empty: where it ends, else NULL. */
static const char *skip_line_event(const char *at, const char *end)
{
    if (end - at < 6 || memcmp(at, "data: ", 6) != 0)
        return NULL;
    const char *line_end = memchr(at, '\n', (size_t)(end - at));
    return line_end == NULL || line_end == at + 6 || line_end + 1 == end || line_end[1] != '\n' ? NULL : line_end + 2;
}

/* A whole chunk at `at`, before `end`: its content is from `*content` to `*close`; returns what follows it, or NULL. */
static const char *parse_chunk(const char *at, const char *end, const char **content, const char **close)
{
    int64_t length = 0; /* eight digits are more than a Py_ssize_t of 32 bits holds */
    const char *digits = at;
    for (; at < end && at - digits <= MAX_SIZE_DIGITS; at++) {
        int digit = *at >= '0' && *at <= '9'   ? *at - '0'
                    : *at >= 'a' && *at <= 'f' ? *at - 'a' + 10
                    : *at >= 'A' && *at <= 'F' ? *at - 'A' + 10
                                               : -1;
        if (digit < 0)
            break;
        length = length * 16 + digit;
    }
    if (at == digits || at - digits > MAX_SIZE_DIGITS || length == 0 || end - at < 4 || memcmp(at, "\r\n", 2) != 0)
        return NULL;
    at += 2;
    if (end - at < length + 2 || memcmp(at + length, "\r\n", 2) != 0)
        return NULL;
    *content = at;
    *close = at + length;
    return at + length + 2;
}

/* A chunk at `at` that holds nothing but plain events: what follows it, and how many events it holds; else NULL. */
static const char *parse_plain_chunk(const char *at, const char *end, const Template *template, Py_ssize_t *events)
{
    const char *content, *close, *next = parse_chunk(at, end, &content, &close);
    *events = 0;
    while (next != NULL && content < close) {
        content = skip_plain_event(content, close, template);
        if (content == NULL)
            return NULL;
        ++*events;
    }
    return next;
}

/* -- for Python */

/* Append a number of plain events, if there are any, or a payload. -1 with an exception. */
static int append_plain(PyObject *events, Py_ssize_t *plain)
{
    if (*plain == 0)
        return 0;
    PyObject *number = PyLong_FromSsize_t(*plain);
    *plain = 0;
    int failed = number == NULL || PyList_Append(events, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

static int append_payload(PyObject *events, const char *at, const char *end)
{
    PyObject *payload = PyBytes_FromStringAndSize(at, end - at);
    int failed = payload == NULL || PyList_Append(events, payload) < 0;
    Py_XDECREF(payload);
    return failed ? -1 : 0;
}

static PyObject *parse_whole_chunks(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *data;
    Py_ssize_t size;
    Template template;
    if (!PyArg_ParseTuple(args, "y#y#y#", &data, &size, &template.before, &template.before_size, &template.after,
                          &template.after_size))
        return NULL;
    PyObject *events = PyList_New(0);
    if (events == NULL)
        return NULL;
    const char *at = data, *end = data + size, *next, *content, *close;
    Py_ssize_t chunks = 0, plain = 0, found = 0;
    while (at < end) {
        if (template.before_size && (next = parse_plain_chunk(at, end, &template, &found)) != NULL) {
            plain += found;
            chunks++;
            at = next;
            continue;
        }
        next = parse_chunk(at, end, &content, &close);
        if (next == NULL || memchr(content, '\r', (size_t)(close - content)) != NULL)
            break;
        const char *event = content;
        while (event != NULL && event < close)
            event = skip_line_event(event, close);
        if (event == NULL)
            break;
        for (; content < close; content = event) {
            event = skip_line_event(content, close);
            if (template.before_size && skip_plain_event(content, close, &template) == event) {
                plain++;
                continue;
            }
            if (append_plain(events, &plain) < 0 || append_payload(events, content + 6, event - 2) < 0)
                goto failed;
        }
        chunks++;
        at = next;
    }
    if (append_plain(events, &plain) == 0)
        return Py_BuildValue("nNn", chunks, events, (Py_ssize_t)(at - data));
failed:
    Py_DECREF(events);
    return NULL;
}

static PyObject *plain_run(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *events;
    Py_ssize_t start;
    Template template;
    if (!PyArg_ParseTuple(args, "Ony#y#", &events, &start, &template.before, &template.before_size, &template.after,
                          &template.after_size))
        return NULL;
    if (!PyList_Check(events) || start < 0) {
        PyErr_SetString(PyExc_TypeError, "events are a list");
        return NULL;
    }
    Py_ssize_t position = start, found = 0;
    for (; position < PyList_Size(events); position++) {
        PyObject *event = PyList_GetItem(events, position);
        if (PyLong_Check(event)) {
            Py_ssize_t plain = PyLong_AsSsize_t(event);
            if (plain < 0 && PyErr_Occurred())
                return NULL;
            found += plain;
            continue;
        }
        char *data;
        Py_ssize_t size;
        if (!PyBytes_Check(event) || PyBytes_AsStringAndSize(event, &data, &size) < 0 ||
            skip_plain_payload(data, data + size, &template) != data + size)
            break;
        found++;
    }
    return Py_BuildValue("nn", position - start, found);
}
