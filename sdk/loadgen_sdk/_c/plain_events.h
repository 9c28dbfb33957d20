/* Recognises plain events, which differ from an earlier event of the same response in their text
 * alone. Part of _compiled.c.
 *
 * The reference implementation is transport/plain_events.py with wire_formats/reference.py. It
 * explains plain events, templates and chunks.
 *
 * Every `skip_*` and `parse_*` function takes a position (`cursor`) and the end of the data. It
 * returns the position after what it has skipped, or NULL if the data is something else. Nothing at
 * `end` or behind it is read. */

/* The bytes around the text of a plain event.
 *
 * An example: for the event {"choices":[{"text":"Hello"}]}, `before` is {"choices":[{"text":" with
 * the opening quote, and `after` is "}]} with the closing quote. Without a template, `before_size`
 * is 0. */
typedef struct {
    const char *before, *after;
    Py_ssize_t before_size, after_size;
} Template;

/* Return whether the bytes from `start` to `end` are valid UTF-8. */
static int is_utf8(const char *start, const char *end)
{
    PyObject *decoded = PyUnicode_DecodeUTF8(start, end - start, "strict");
    if (decoded == NULL) {
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(decoded);
    return 1;
}

/* Skip `size` bytes that are known. Return the position after them, or NULL if the data from
 * `cursor` to `end` begins with other bytes. */
static const char *skip_bytes(const char *cursor, const char *end, const char *bytes,
                              Py_ssize_t size)
{
    int begins_with_bytes = end - cursor >= size && memcmp(cursor, bytes, (size_t)size) == 0;
    return begins_with_bytes ? cursor + size : NULL;
}

/* The bytes that stand for themselves in a JSON string: ASCII without control characters, the quote
 * and the backslash. */
static const char is_plain_ascii[256] = {
    [' '] = 1,
    ['!'] = 1,
    ['#' ... '['] = 1,
    [']' ... 0x7f] = 1,
};

/* Skip the bytes that stand for themselves in a JSON string. Return the position of the first other
 * byte, or the end. */
static const char *skip_plain_ascii(const char *cursor, const char *end)
{
    while (cursor < end && is_plain_ascii[(unsigned char)*cursor])
        cursor++;
    return cursor;
}

/* Skip the text of an event if it is plain. Return the position of its closing quote, or NULL.
 *
 * A plain text can be used without decoding JSON: it is not empty, and is UTF-8 without control
 * characters and backslashes. As there are no escaped quotes, the first quote ends it. */
static const char *skip_plain_text(const char *text, const char *end)
{
    /* Most texts are plain ASCII, and the loop after this has nothing left to do. */
    const char *cursor = skip_plain_ascii(text, end);
    int has_other_bytes = 0; /* that are a part of a character of UTF-8 */
    for (; cursor < end && *cursor != '"'; cursor++) {
        unsigned char byte = (unsigned char)*cursor;
        int needs_decoding = byte < FIRST_PRINTABLE_BYTE || byte == '\\';
        if (needs_decoding)
            return NULL;
        if (byte >= FIRST_NON_ASCII_BYTE)
            has_other_bytes = 1;
    }

    int is_empty = cursor == text;
    int has_closing_quote = cursor < end;
    if (is_empty || !has_closing_quote)
        return NULL;

    int is_invalid = has_other_bytes && !is_utf8(text, cursor);
    return is_invalid ? NULL : cursor;
}

/* Skip the JSON of a plain event, which differs in its text alone from the event of which the
 * template was made: the bytes before the text, the text, and the bytes after it. Return the
 * position after it, or NULL if it is another event. */
static const char *skip_plain_payload(const char *cursor, const char *end, const Template *template)
{
    cursor = skip_bytes(cursor, end, template->before, template->before_size);
    if (cursor == NULL)
        return NULL;
    cursor = skip_plain_text(cursor, end);
    if (cursor == NULL)
        return NULL;
    return skip_bytes(cursor, end, template->after, template->after_size);
}

/* Skip a plain event: "data: ", its JSON and a blank line. The JSON differs from that of which the
 * template was made in its text alone. Return the position after the event, or NULL if it is
 * another event. */
static const char *skip_plain_event(const char *cursor, const char *end, const Template *template)
{
    cursor = skip_bytes(cursor, end, DATA_PREFIX, DATA_PREFIX_BYTES);
    if (cursor == NULL)
        return NULL;
    cursor = skip_plain_payload(cursor, end, template);
    if (cursor == NULL)
        return NULL;
    return skip_bytes(cursor, end, EVENT_END, EVENT_END_BYTES);
}

/* Skip a server-sent event that is a single line of data: `data: `, at least one more byte, and a
 * blank line. Return the position after the blank line, or NULL if the data begins with anything
 * else, such as an event of several lines. */
static const char *skip_line_event(const char *cursor, const char *end)
{
    const char *payload = skip_bytes(cursor, end, DATA_PREFIX, DATA_PREFIX_BYTES);
    if (payload == NULL)
        return NULL;

    const char *line_end = memchr(payload, '\n', (size_t)(end - payload));
    int has_payload = line_end != NULL && line_end > payload;
    if (!has_payload)
        return NULL;

    return skip_bytes(line_end, end, EVENT_END, EVENT_END_BYTES);
}

/* -- chunks of an HTTP body -------------------------------------------------------------------- */

/* Return the value of a hexadecimal digit, or -1 for any other byte. */
static int hex_digit_value(char digit)
{
    if (digit >= '0' && digit <= '9')
        return digit - '0';
    if (digit >= 'a' && digit <= 'f')
        return digit - 'a' + 10;
    if (digit >= 'A' && digit <= 'F')
        return digit - 'A' + 10;
    return -1;
}

/* Parse the size of a chunk, a hexadecimal number of 1 to MAX_SIZE_DIGITS digits, into `*size`.
 * Return the position after it, or NULL if there is no such number. */
static const char *parse_chunk_size(const char *cursor, const char *end, int64_t *size)
{
    int digits = 0;
    *size = 0;

    for (; cursor < end && hex_digit_value(*cursor) >= 0; cursor++) {
        if (digits == MAX_SIZE_DIGITS)
            return NULL;
        *size = *size * 16 + hex_digit_value(*cursor);
        digits++;
    }

    return digits > 0 ? cursor : NULL;
}

/* Parse one chunk of a chunked body, whose content is from `*content` to `*content_end`.
 *
 * An example is "5\r\nhello\r\n" with the content "hello". Return the position after the chunk, or
 * NULL if it is incomplete, empty, or has extensions after its size. */
static const char *parse_chunk(const char *cursor, const char *end, const char **content,
                               const char **content_end)
{
    int64_t size; /* wider than Py_ssize_t of 32 bits, which a size of 8 digits may exceed */

    cursor = parse_chunk_size(cursor, end, &size);
    if (cursor == NULL || size == 0)
        return NULL;

    cursor = skip_bytes(cursor, end, CHUNK_END, CHUNK_END_BYTES);
    if (cursor == NULL || end - cursor < size + CHUNK_END_BYTES)
        return NULL;

    *content = cursor;
    *content_end = cursor + size;
    return skip_bytes(*content_end, end, CHUNK_END, CHUNK_END_BYTES);
}

/* Parse a chunk of an HTTP body that holds nothing but plain events.
 *
 * A plain event differs in its text alone from the event of which `template` was made.
 * `*event_count` becomes the number of events. Return the position after the chunk, or NULL if it
 * is incomplete or holds anything else. */
static const char *parse_plain_chunk(const char *cursor, const char *end, const Template *template,
                                     Py_ssize_t *event_count)
{
    const char *content, *content_end;
    const char *chunk_end = parse_chunk(cursor, end, &content, &content_end);
    if (chunk_end == NULL)
        return NULL;

    *event_count = 0;
    while (content < content_end) {
        content = skip_plain_event(content, content_end, template);
        if (content == NULL)
            return NULL;
        *event_count += 1;
    }

    return chunk_end;
}

/* -- parse_whole_chunks ------------------------------------------------------------------------ */

/* The events of the chunks that were parsed so far, in the form in which Python gets them. */
typedef struct {
    PyObject *items;          /* a list: a payload as bytes, or a number of plain events */
    Py_ssize_t pending_plain; /* the last plain events, whose number is not in the list yet */
    const Template *template; /* recognises plain events */
} EventList;

/* Append the number of the plain events since the last item of the list, unless it is 0.
 *
 * An example: of the plain event A, the other event B, and the plain events C and D, the list is
 * [1, payload of B, 2]. So this is called before another event is appended, and at the end. Return
 * 0, or -1 with an exception. */
static int flush_pending_plain(EventList *events)
{
    if (events->pending_plain == 0)
        return 0;
    PyObject *number = PyLong_FromSsize_t(events->pending_plain);
    events->pending_plain = 0;
    return append_stealing(events->items, number);
}

/* Return whether the content of a chunk consists of server-sent events that are one line of data
 * each. */
static int has_line_events_only(const char *content, const char *end)
{
    int has_carriage_return = memchr(content, '\r', (size_t)(end - content)) != NULL;
    if (has_carriage_return)
        return 0;

    while (content < end) {
        content = skip_line_event(content, end);
        if (content == NULL)
            return 0;
    }

    return 1;
}

/* Append the server-sent event from `start` to `end`, a line such as `data: {"text":"Hi"}` with a
 * blank line after it.
 *
 * If the event is plain, which means that it differs from an earlier one in its text alone, it is
 * only counted. Otherwise its payload is appended: the bytes after `data: `. The number of the
 * plain events before it is appended first. Return 0, or -1 with an exception. */
static int append_line_event(EventList *events, const char *start, const char *end)
{
    const Template *template = events->template;
    int has_template = template->before_size > 0;
    int is_plain = has_template && skip_plain_event(start, end, template) == end;
    if (is_plain) {
        events->pending_plain++;
        return 0;
    }
    if (flush_pending_plain(events) < 0)
        return -1;

    const char *payload = start + DATA_PREFIX_BYTES;
    Py_ssize_t payload_bytes = (end - EVENT_END_BYTES) - payload;
    return append_stealing(events->items, PyBytes_FromStringAndSize(payload, payload_bytes));
}

/* Append the events of the content of a chunk, which passed `has_line_events_only`. Return 0, or -1
 * with an exception. */
static int append_line_events(EventList *events, const char *content, const char *end)
{
    while (content < end) {
        const char *event_end = skip_line_event(content, end);
        if (append_line_event(events, content, event_end) < 0)
            return -1;
        content = event_end;
    }
    return 0;
}

/* The result of appending the events of a chunk to an `EventList`. */
enum ChunkResult {
    CHUNK_FAILED = -1, /* with an exception */
    CHUNK_APPENDED = 0,
    CHUNK_NOT_RECOGNISED = 1, /* nothing was appended, and Python decodes the chunk */
};

/* Count the events of a chunk if all of them are plain: they differ from an earlier event in their
 * text alone. Return the position after the chunk, or NULL if nothing was counted. */
static const char *count_plain_chunk(EventList *events, const char *chunk, const char *end)
{
    int has_template = events->template->before_size > 0;
    if (!has_template)
        return NULL;

    Py_ssize_t event_count;
    const char *chunk_end = parse_plain_chunk(chunk, end, events->template, &event_count);
    if (chunk_end != NULL)
        events->pending_plain += event_count;

    return chunk_end;
}

/* Append the events of the chunk at `*cursor`, and move `*cursor` to its end.
 *
 * A chunk that holds nothing but plain events is the usual case and is tried first. A chunk that is
 * incomplete, or holds anything but events of one line each, is not recognised, and `*cursor` stays
 * where it is. */
static enum ChunkResult append_chunk(EventList *events, const char **cursor, const char *end)
{
    const char *chunk_end = count_plain_chunk(events, *cursor, end);
    if (chunk_end == NULL) {
        const char *content, *content_end;
        chunk_end = parse_chunk(*cursor, end, &content, &content_end);
        if (chunk_end == NULL || !has_line_events_only(content, content_end))
            return CHUNK_NOT_RECOGNISED;
        if (append_line_events(events, content, content_end) < 0)
            return CHUNK_FAILED;
    }

    *cursor = chunk_end;
    return CHUNK_APPENDED;
}

/* The chunks at the beginning of some data that were recognised. */
typedef struct {
    Py_ssize_t count;
    Py_ssize_t size_bytes; /* of all of them together */
} WholeChunks;

/* Append the events of the chunks at the beginning of the data, up to the first chunk that is
 * incomplete or not recognised. Describe these chunks in `*chunks`. Return 0, or -1 with an
 * exception. */
static int append_whole_chunks(EventList *events, const char *data, Py_ssize_t size,
                               WholeChunks *chunks)
{
    const char *end = data + size;
    const char *cursor = data;
    chunks->count = 0;

    while (cursor < end) {
        enum ChunkResult result = append_chunk(events, &cursor, end);
        if (result == CHUNK_FAILED)
            return -1;
        if (result == CHUNK_NOT_RECOGNISED)
            break;
        chunks->count++;
    }

    chunks->size_bytes = cursor - data;
    return flush_pending_plain(events);
}

/* The Python function parse_whole_chunks(data, before_text, after_text).
 *
 * Recognise the events in the whole chunks at the beginning of `data`, a part of an HTTP body.
 * `before_text` and `after_text` are the bytes around the text of a plain event, an event that
 * differs from an earlier one in its text alone. Both are empty if they are not known yet.
 *
 * Return the tuple (number of chunks, list of events, number of bytes). Each event is in the list
 * as its payload, but a number stands for that many consecutive plain events. The result for two
 * chunks of one plain event each is (2, [2], size). */
static PyObject *parse_whole_chunks(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *data;
    Py_ssize_t size;
    Template template;

    /* Each "y#" reads the bytes of an argument and their number. */
    if (!PyArg_ParseTuple(args, "y#y#y#", &data, &size, &template.before, &template.before_size,
                          &template.after, &template.after_size))
        return NULL;

    EventList events = {.items = PyList_New(0), .pending_plain = 0, .template = &template};
    if (events.items == NULL)
        return NULL;

    WholeChunks chunks;
    if (append_whole_chunks(&events, data, size, &chunks) < 0) {
        Py_DECREF(events.items);
        return NULL;
    }

    /* "n" is a Py_ssize_t. "N" is an object whose reference the tuple takes over. */
    return Py_BuildValue("nNn", chunks.count, events.items, chunks.size_bytes);
}

/* -- count_leading_plain_events ---------------------------------------------------------------- */

/* Return whether an object is the payload of a plain event, as bytes. */
static int is_plain_payload(PyObject *payload, const Template *template)
{
    if (!PyBytes_Check(payload))
        return 0;
    const char *data = PyBytes_AsString(payload);
    const char *end = data + PyBytes_Size(payload);
    return skip_plain_payload(data, end, template) == end;
}

/* Count the plain events that an item of a list of events stands for, into `*count`.
 *
 * An item is the payload of one event, or an int that stands for so many plain events. Return 1, 0
 * if the item is another event, or -1 with an exception if the int is too large. */
static int count_plain_events_of_item(PyObject *item, const Template *template, Py_ssize_t *count)
{
    *count = 1;
    if (!PyLong_Check(item))
        return is_plain_payload(item, template);
    *count = PyLong_AsSsize_t(item);
    return *count == -1 && PyErr_Occurred() ? -1 : 1;
}

/* The consecutive plain events in a list of events. */
typedef struct {
    Py_ssize_t items;  /* how many items of the list they are */
    Py_ssize_t events; /* how many events these items stand for */
} PlainItems;

/* Count the plain events in the list `events` from the index `start` on, up to the first other one.
 *
 * An example: in the list [3, payload of a plain event, payload of another event], they are 2 items
 * and 4 events. Return 0, or -1 with an exception. */
static int count_plain_items(PyObject *events, Py_ssize_t start, const Template *template,
                             PlainItems *plain)
{
    *plain = (PlainItems){0};
    for (Py_ssize_t index = start; index < PyList_Size(events); index++) {
        Py_ssize_t event_count;
        int is_plain =
            count_plain_events_of_item(PyList_GetItem(events, index), template, &event_count);
        if (is_plain < 0)
            return -1;
        if (!is_plain)
            return 0;

        plain->items++;
        plain->events += event_count;
    }

    return 0;
}

/* The Python function count_leading_plain_events(events, start, before_text, after_text).
 *
 * Count the consecutive plain events in the list `events` from the index `start` on. A plain event
 * differs from an earlier one in its text alone, which is between the bytes `before_text` and
 * `after_text`. An item of the list is the payload of one event, or the number of several plain
 * events that were recognised before. Return the tuple (number of items, number of events). */
static PyObject *count_leading_plain_events(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *events;
    Py_ssize_t start;
    Template template;

    /* "O!" is an object of a type, "n" a Py_ssize_t, and "y#" bytes and their number. */
    if (!PyArg_ParseTuple(args, "O!ny#y#", &PyList_Type, &events, &start, &template.before,
                          &template.before_size, &template.after, &template.after_size))
        return NULL;
    if (start < 0) {
        PyErr_SetString(PyExc_TypeError, "the index of the first event must not be negative");
        return NULL;
    }

    PlainItems plain;
    if (count_plain_items(events, start, &template, &plain) < 0)
        return NULL;

    return Py_BuildValue("nn", plain.items, plain.events);
}
