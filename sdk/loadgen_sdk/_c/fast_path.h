/* The fast path of reading a response: feeds the most common reads to an exchange without calling
 * Python. Part of _compiled.c.
 *
 * A read is on the fast path if its head, if it has one, was seen before, if its body is whole
 * chunks of whole events of at most one choice, and if no template has to be learned from it. It
 * is parsed completely before anything of it is used. Any other read is left to Python as it
 * came. The reference is transport/exchange.py with wire_formats/response_reader.py, and the
 * tests compare both. */

/* The result of feeding a read. */
enum FeedResult {
    FEED_FAILED = -1, /* with an exception */
    RESPONSE_GOES_ON = 0,
    RESPONSE_OVER = 1,
    NOT_FAST_PATH = 2, /* nothing was fed */
};

/* A read that was parsed on the fast path. */
typedef struct {
    EventContent events[MAX_EVENTS];
    int event_count;
    int chunks;
    int outputs;    /* events with output */
    int has_end;    /* the response ends with this read */
    PyObject *head; /* borrowed from the known heads, or NULL if the head came before */
} FastPathRead;

/* Release the token usages of the events of a parsed read. */
static void release_usages(FastPathRead *fast_read)
{
    for (int i = 0; i < fast_read->event_count; i++)
        Py_CLEAR(fast_read->events[i].usage);
    fast_read->event_count = 0;
}

/* -- parsing a read ---------------------------------------------------------------------------- */

/* The items of `ResponseHead` in transport/http1.py. */
enum {
    HEAD_STATUS,
    HEAD_HEADERS,
    HEAD_MODE,
    HEAD_LENGTH,
    HEAD_REUSABLE,
    HEAD_USES_LEFT,
    HEAD_IDLE_LIMIT,
    HEAD_ITEMS
};

#define HEAD_END "\r\n\r\n"
enum { HEAD_END_BYTES = sizeof HEAD_END - 1 };

/* Return whether a read begins with the status line of a successful response (2xx). */
static int begins_with_success(const char *data, Py_ssize_t size)
{
    static const char start[] = "HTTP/1.1 2";
    const Py_ssize_t start_size = sizeof start - 1;
    return size > start_size && memcmp(data, start, (size_t)start_size) == 0;
}

/* Return the end of a response head, before its blank line, or NULL if the head is incomplete. */
static const char *find_head_end(const char *data, const char *end)
{
    for (const char *at = data; at < end; at++) {
        at = memchr(at, '\r', (size_t)(end - at));
        if (at == NULL || end - at < HEAD_END_BYTES)
            return NULL;
        if (memcmp(at, HEAD_END, HEAD_END_BYTES) == 0)
            return at;
    }
    return NULL;
}

/* Return whether a parsed head (a tuple `ResponseHead`) is that of a chunked, uncompressed
 * stream of server-sent events. */
static int is_stream_head(PyObject *head)
{
    if (!PyTuple_Check(head) || PyTuple_Size(head) != HEAD_ITEMS)
        return 0;
    PyObject *headers = PyTuple_GetItem(head, HEAD_HEADERS);
    if (!PyDict_Check(headers))
        return 0;
    PyObject *type = PyDict_GetItemWithError(headers, name_content_type);
    return type != NULL && PyUnicode_Check(type) &&
           PyUnicode_Tailmatch(type, event_stream, 0, PY_SSIZE_T_MAX, -1) == 1 &&
           PyUnicode_Compare(PyTuple_GetItem(head, HEAD_MODE), mode_chunked) == 0 &&
           PyDict_GetItemWithError(headers, name_content_encoding) == NULL && !PyErr_Occurred();
}

/* Return whether `data` begins with these header lines and the blank line after them. */
static int begins_with_head(const char *data, const char *end, const char *lines, Py_ssize_t size)
{
    return end - data >= size + HEAD_END_BYTES && memcmp(data, lines, (size_t)size) == 0 &&
           memcmp(data + size, HEAD_END, HEAD_END_BYTES) == 0;
}

/* Find the head at the beginning of a read among the heads that Python has parsed before.
 *
 * Set `fast_read->head` and return the position after the head. Return NULL if the head is unknown,
 * or if it is not that of a stream of events. A server repeats its head byte by byte until the date
 * in it changes, so the last head is compared first, which saves the look-up. */
static const char *parse_known_head(const char *data, const char *end, FastPathRead *fast_read)
{
    static PyObject *last_lines, *last_head;
    if (!begins_with_success(data, end - data))
        return NULL;
    if (last_lines != NULL) {
        Py_ssize_t size = PyBytes_Size(last_lines);
        if (begins_with_head(data, end, PyBytes_AsString(last_lines), size)) {
            fast_read->head = last_head;
            return data + size + HEAD_END_BYTES;
        }
    }
    const char *head_end = find_head_end(data, end);
    if (head_end == NULL)
        return NULL;
    PyObject *lines = PyBytes_FromStringAndSize(data, head_end - data);
    PyObject *head = lines == NULL ? NULL : PyDict_GetItemWithError(known_heads, lines);
    int is_known_stream_head = head != NULL && is_stream_head(head);
    if (is_known_stream_head) {
        set_field(&last_head, head);
        set_field(&last_lines, lines);
        fast_read->head = head;
    }
    Py_XDECREF(lines);
    PyErr_Clear();
    return is_known_stream_head ? head_end + HEAD_END_BYTES : NULL;
}

/* Parse the events in the content of a chunk and add them to the read.
 *
 * Return 0 if any of them has to be left to Python, such as one with several lines. */
static int parse_fast_path_events(const char *content, const char *end, FastPathRead *fast_read)
{
    if (memchr(content, '\r', (size_t)(end - content)) != NULL)
        return 0;
    while (content < end) {
        const char *next = skip_line_event(content, end);
        if (next == NULL || fast_read->event_count == MAX_EVENTS)
            return 0;
        EventContent *event = &fast_read->events[fast_read->event_count];
        if (!parse_fast_path_event(content + DATA_PREFIX_BYTES, next - EVENT_END_BYTES, event))
            return 0;
        fast_read->event_count++;
        fast_read->outputs += event->output;
        content = next;
    }
    return 1;
}

/* Return whether the state of a response allows its next read on the fast path.
 *
 * It does not if the text is kept or passed on, if the last read ended within a chunk or an
 * event, or if the response is not a stream of events in chunks. */
static int is_state_on_fast_path(const Exchange *exchange, const Read *read)
{
    const ResponseParser *response = (ResponseParser *)exchange->response;
    const SseDecoder *decoder = (SseDecoder *)exchange->decoder;
    const ResponseReader *reader = (ResponseReader *)exchange->reader;
    int needs_texts = reader->text_pieces != Py_None || reader->on_output != Py_None;
    int is_between_events = PyObject_Size(decoder->_unparsed) == 0 && !decoder->_is_after_cr &&
                            PyObject_Size(response->_unparsed) == 0;
    int has_earlier_timestamp = read->timestamp < reader->first_token;
    if (needs_texts || !is_between_events || read->size == 0 || has_earlier_timestamp)
        return 0;
    if (response->status == 0)
        return response->_mode == mode_head;
    return exchange->is_event_stream && response->is_chunked && !response->is_complete &&
           exchange->is_at_chunk_start;
}

/* Return whether the reader has a template of plain events, or may still learn one.
 *
 * It learns further templates as long as each one after the first three recognises four events. */
static int uses_templates(const ResponseReader *reader)
{
    const int free_templates = 3;
    const int events_per_template = 4;
    return reader->template != Py_None ||
           reader->learned_templates <= free_templates + reader->plain_events / events_per_template;
}

/* Parse a read without changing the exchange. Return whether it is on the fast path. */
static int parse_fast_path_read(const Exchange *exchange, const Read *read, FastPathRead *fast_read)
{
    const ResponseParser *response = (ResponseParser *)exchange->response;
    const char *at = read->data;
    const char *end = at + read->size;
    if (!is_state_on_fast_path(exchange, read))
        return 0;
    if (response->status == 0) {
        at = parse_known_head(at, end, fast_read);
        if (at == NULL)
            return 0;
    }
    while (at < end) {
        int is_last_chunk = end - at == 5 && memcmp(at, "0\r\n\r\n", 5) == 0;
        if (is_last_chunk) {
            fast_read->has_end = 1;
            break;
        }
        const char *content, *content_end;
        at = parse_chunk(at, end, &content, &content_end);
        if (at == NULL || !parse_fast_path_events(content, content_end, fast_read))
            return 0;
        fast_read->chunks++;
    }
    return fast_read->outputs == 0 || !uses_templates((ResponseReader *)exchange->reader);
}

/* -- feeding events to the reader -------------------------------------------------------------- */

enum TimelineList { GAPS, TIMESTAMPS };

/* Append a number to one of the lists of an event timeline. Return -1 with an exception.
 *
 * Events of many responses are added to one timeline, so its lists are looked up only when the
 * timeline changes. They are never replaced. */
static int append_to_timeline(PyObject *timeline, enum TimelineList list, int64_t value)
{
    static PyObject *last_timeline, *lists[2];
    if (timeline != last_timeline) {
        PyObject *gaps = PyObject_GetAttr(timeline, name_gaps);
        PyObject *timestamps = PyObject_GetAttr(timeline, name_timestamps);
        if (gaps == NULL || timestamps == NULL) {
            Py_XDECREF(gaps);
            Py_XDECREF(timestamps);
            return -1;
        }
        set_field(&last_timeline, timeline);
        set_field_stealing(&lists[GAPS], gaps);
        set_field_stealing(&lists[TIMESTAMPS], timestamps);
    }
    PyObject *number = PyLong_FromLongLong(value);
    int failed = number == NULL || PyList_Append(lists[list], number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

/* Append a pair (uncertainty, number of events) to the uncertainties of an event timeline.
 * Return -1 with an exception. */
static int append_uncertainty(PyObject *timeline, int64_t uncertainty_ns, int64_t count)
{
    PyObject *errors = PyObject_GetAttr(timeline, name_uncertainties);
    PyObject *pair =
        errors == NULL ? NULL : Py_BuildValue("LL", (long long)uncertainty_ns, (long long)count);
    int failed = pair == NULL || PyList_Append(errors, pair) < 0;
    Py_XDECREF(errors);
    Py_XDECREF(pair);
    return failed ? -1 : 0;
}

/* Return a value as an int if it is a count of tokens, else None: `token_count` of
 * wire_formats/reference.py. */
static PyObject *token_count(PyObject *Py_UNUSED(module), PyObject *value)
{
    if (PyFloat_Check(value)) { /* Some servers write 8.0. */
        double number = PyFloat_AsDouble(value);
        int is_count_of_tokens =
            number >= 0 && number < (double)(1LL << 31) && number == (double)(int64_t)number;
        if (is_count_of_tokens)
            return PyLong_FromDouble(number);
    }
    PyObject *count = is_count(value) ? value : Py_None;
    Py_INCREF(count);
    return count;
}

/* Keep the token usage of an event, as `ResponseReader._read_usage`. Return -1 with an exception.
 *
 * A usage that does not name its counts as chat does, or that has no output tokens, is left to the
 * method in Python. Otherwise it is the newest usage with output tokens, which is kept. */
static int feed_usage(ResponseReader *reader, PyObject *usage)
{
    int64_t output_tokens = output_tokens_of(usage);
    if (output_tokens <= 0) {
        PyErr_Clear();
        PyObject *result = PyObject_CallMethod((PyObject *)reader, "_read_usage", "O", usage);
        Py_XDECREF(result);
        return result == NULL ? -1 : 0;
    }
    set_field(&reader->usage_counts, usage);
    int is_with_first_output = reader->output_events == 1 && reader->first_event_tokens == 0 &&
                               PyObject_Size(reader->finish_reason) == 0;
    if (is_with_first_output)
        reader->first_event_tokens = output_tokens;
    return 0;
}

/* Count an event with output, and the gap before it. Return -1 with an exception. */
static int count_output_event(ResponseReader *reader, int64_t timestamp, int64_t uncertainty_ns)
{
    if (reader->last_token >= 0) {
        int64_t gap = timestamp - reader->last_token;
        if (append_to_timeline(reader->timeline, GAPS, gap) < 0)
            return -1;
        if (gap > reader->max_gap) {
            reader->max_gap = gap;
            reader->max_gap_uncertainty = uncertainty_ns;
        }
    }
    if (append_to_timeline(reader->timeline, TIMESTAMPS, timestamp) < 0)
        return -1;
    reader->output_events++;
    reader->last_token = timestamp;
    reader->end = timestamp;
    return 0;
}

/* Note what one event says: output, the finish reason and the usage. Return -1 with an exception.
 *
 * `uncertainty_ns` is by how much the event may have arrived before `timestamp`. */
static int feed_event(ResponseReader *reader, const EventContent *event, int64_t timestamp,
                      int64_t uncertainty_ns)
{
    if (event->output && reader->last_token < 0) {
        reader->first_token = timestamp;
        reader->first_token_uncertainty = uncertainty_ns;
    }
    if (event->answer && reader->first_answer < 0)
        reader->first_answer = timestamp;
    if (event->finish != NULL) {
        PyObject *reason = PyUnicode_DecodeUTF8(event->finish, event->finish_size, "strict");
        if (reason == NULL)
            return -1;
        set_field_stealing(&reader->finish_reason, reason);
        reader->end = timestamp;
    }
    if (event->output && count_output_event(reader, timestamp, uncertainty_ns) < 0)
        return -1;
    return event->usage == NULL ? 0 : feed_usage(reader, event->usage);
}

/* Feed events of one timestamp to the reader, as `ResponseReader.feed`. Return -1 with an
 * exception. */
static int feed_events(ResponseReader *reader, const EventContent *events, int count,
                       int64_t timestamp, int64_t uncertainty_ns)
{
    if (count > 0 && reader->first_event < 0)
        reader->first_event = timestamp;
    for (int i = 0; i < count; i++)
        if (feed_event(reader, &events[i], timestamp, uncertainty_ns) < 0)
            return -1;
    return 0;
}

/* Return the uncertainty of the last output event if only the end of the response follows it.
 *
 * A server sends the end at most one step after the last output, so the uncertainty is at most
 * the mean gap between output events. Neither number is negative, because timestamps grow. */
static int64_t uncertainty_before_end(const ResponseReader *reader, int64_t timestamp,
                                      int64_t uncertainty_ns)
{
    if (reader->output_events <= 1)
        return uncertainty_ns;
    int64_t mean_gap = (timestamp - reader->first_token) / (reader->output_events - 1);
    return uncertainty_ns < mean_gap ? uncertainty_ns : mean_gap;
}

/* Feed the events of a read, of which the first `uncertain_count` may have arrived before its
 * timestamp by at most `uncertainty_ns`, as `ResponseReader.feed_with_uncertainty`, which
 * explains the rules. Return -1 with an exception. */
static int feed_with_uncertainty(ResponseReader *reader, const FastPathRead *fast_read,
                                 int uncertain_count, int64_t timestamp, int64_t uncertainty_ns,
                                 int is_one_write)
{
    const EventContent *certain_events = fast_read->events + uncertain_count;
    int certain_count = fast_read->event_count - uncertain_count;
    int64_t outputs_before_read = reader->output_events;
    int64_t max_gap_before_read = reader->max_gap;

    if (feed_events(reader, fast_read->events, uncertain_count, timestamp, uncertainty_ns) < 0)
        return -1;
    int64_t uncertain_outputs = reader->output_events - outputs_before_read;
    if (feed_events(reader, certain_events, certain_count, timestamp, 0) < 0)
        return -1;
    int has_certain_output = reader->output_events > outputs_before_read + uncertain_outputs;

    if (has_certain_output)
        reader->uncertain_timestamp = NEVER; /* the timestamp of the last output event is exact */
    else if (uncertain_outputs > 0) {
        reader->uncertain_timestamp = timestamp;
        reader->timestamp_uncertainty = uncertainty_ns;
        int has_end = PyObject_Size(reader->finish_reason) > 0;
        if (has_end) {
            uncertain_outputs--;
            reader->timestamp_uncertainty =
                uncertainty_before_end(reader, timestamp, uncertainty_ns);
        }
    }
    if (uncertain_outputs > 0 && !is_one_write &&
        append_uncertainty(reader->timeline, uncertainty_ns, uncertain_outputs) < 0)
        return -1;
    int are_gaps_exact = is_one_write || uncertain_outputs == 0;
    if (are_gaps_exact && reader->max_gap > max_gap_before_read)
        reader->max_gap_uncertainty = 0;
    return 0;
}

/* -- feeding reads to the exchange ------------------------------------------------------------- */

/* Feed the events of a read to the reader, as `Exchange._feed_events`. Return -1 with an exception.
 *
 * After the first output, a read of a single chunk is one write of the server, so its timestamp is
 * exact. Otherwise the events may have arrived since the socket was last known to be empty. At the
 * first output, note how late it was read and call `on_first_output`. */
static int feed_fast_path_events(Exchange *exchange, ResponseReader *reader,
                                 const FastPathRead *fast_read, const Read *read)
{
    int is_before_first_output = reader->first_token < 0;
    int is_one_chunk = fast_read->chunks == 1;
    if (!is_before_first_output && is_one_chunk)
        return feed_events(reader, fast_read->events, fast_read->event_count, read->timestamp, 0);

    int64_t earliest = read->empty_at;
    if (is_before_first_output && exchange->sent_at > earliest)
        earliest = exchange->sent_at; /* The response cannot have begun before the request. */
    int uncertain_count = is_one_chunk ? 0 : fast_read->event_count - 1;
    if (fast_read->has_end)
        uncertain_count = fast_read->event_count; /* The last chunk came with the newest packet. */
    if (feed_with_uncertainty(reader, fast_read, uncertain_count, read->timestamp,
                              read->timestamp - earliest, is_one_chunk) < 0)
        return -1;

    int has_first_output = is_before_first_output && reader->first_token >= 0;
    if (!has_first_output)
        return 0;
    exchange->client_lag = read->read_at - read->timestamp;
    if (exchange->on_first_output == Py_None)
        return 0;
    return call_with(exchange->on_first_output, PyLong_FromLongLong(reader->first_token));
}

/* End the exchange after a complete response, as `Exchange._finish_response`. Return -1 with an
 * exception.
 *
 * A response with a known finish reason and without errors has succeeded. Any other is judged by
 * the method of the reader in Python. */
static int finish_response(Exchange *exchange, ResponseReader *reader, int64_t timestamp)
{
    int has_error = PyObject_Size(reader->error) > 0 || PyObject_Size(reader->parse_error) > 0;
    int has_known_end = 0;
    if (!has_error && reader->first_event >= 0) {
        has_known_end = PySet_Contains(endings, reader->finish_reason);
        if (has_known_end < 0)
            return -1;
    }
    if (has_known_end)
        set_field(&exchange->failure, Py_None);
    else {
        PyObject *is_framing_complete = Py_True, *ends_with_connection = Py_False;
        PyObject *is_stream = Py_True;
        PyObject *failure =
            PyObject_CallMethod((PyObject *)reader, "find_failure", "OOO", is_framing_complete,
                                ends_with_connection, is_stream);
        if (failure == NULL)
            return -1;
        set_field_stealing(&exchange->failure, failure);
    }
    exchange->done_at = timestamp;
    return 0;
}

/* Take over a parsed head of a stream of events, as `ResponseParser._use_head`, and note when it
 * came, as `Exchange._feed_head`. */
static void use_head(Exchange *exchange, ResponseParser *response, PyObject *head, const Read *read)
{
    int is_valid = 1;
    response->status = read_number(PyTuple_GetItem(head, HEAD_STATUS), &is_valid);
    set_field(&response->headers, PyTuple_GetItem(head, HEAD_HEADERS));
    set_field(&response->_mode, PyTuple_GetItem(head, HEAD_MODE));
    set_field(&response->_bytes_left, PyTuple_GetItem(head, HEAD_LENGTH));
    set_field(&response->uses_left, PyTuple_GetItem(head, HEAD_USES_LEFT));
    set_field(&response->idle_limit_s, PyTuple_GetItem(head, HEAD_IDLE_LIMIT));
    response->is_reusable = PyTuple_GetItem(head, HEAD_REUSABLE) == Py_True;
    response->is_chunked = 1;
    response->ends_with_connection = 0;
    exchange->is_event_stream = 1;
    exchange->is_at_chunk_start = 1;
    exchange->head_received_at = read->timestamp;
    exchange->has_kernel_timestamp = read->from_kernel;
}

/* Update an exchange by a read that was parsed on the fast path. Return whether the response is
 * over. */
static enum FeedResult apply_fast_path_read(Exchange *exchange, ResponseParser *response,
                                            ResponseReader *reader, const FastPathRead *fast_read,
                                            const Read *read)
{
    exchange->bytes_received += read->size;
    if (fast_read->head != NULL)
        use_head(exchange, response, fast_read->head, read);
    if (fast_read->chunks > 0)
        ((SseDecoder *)exchange->decoder)->has_started = 1;
    if (fast_read->has_end) {
        set_field(&response->_mode, mode_end);
        set_field(&response->surplus, no_bytes);
        response->is_complete = 1;
        exchange->is_at_chunk_start = 0;
    }
    if (fast_read->event_count > 0) {
        if (feed_fast_path_events(exchange, reader, fast_read, read) < 0)
            return FEED_FAILED;
        exchange->last_event_read_at = read->read_at;
    }
    if (!fast_read->has_end)
        return RESPONSE_GOES_ON;
    return finish_response(exchange, reader, read->timestamp) < 0 ? FEED_FAILED : RESPONSE_OVER;
}

/* Feed a read to an exchange if it is on the fast path. Otherwise change nothing and return
 * NOT_FAST_PATH. */
static enum FeedResult try_feed_on_fast_path(Exchange *exchange, const Read *read)
{
    if (Py_TYPE(exchange->response) != response_class ||
        Py_TYPE(exchange->decoder) != decoder_class || Py_TYPE(exchange->reader) != reader_class)
        return NOT_FAST_PATH;
    FastPathRead fast_read;
    /* The array of events is large, so it is not cleared. */
    fast_read.event_count = 0;
    fast_read.chunks = 0;
    fast_read.outputs = 0;
    fast_read.has_end = 0;
    fast_read.head = NULL;
    enum FeedResult result = NOT_FAST_PATH;
    if (parse_fast_path_read(exchange, read, &fast_read)) {
        PyObject *response = exchange->response, *reader = exchange->reader;
        Py_INCREF(response); /* `on_first_output` may send the request again. */
        Py_INCREF(reader);
        result = apply_fast_path_read(exchange, (ResponseParser *)response,
                                      (ResponseReader *)reader, &fast_read, read);
        Py_DECREF(response);
        Py_DECREF(reader);
    }
    release_usages(&fast_read);
    return result;
}

/* The items of the tuple `Read` in transport/response_state.py, and the size of `PlainRun`. */
enum { ITEM_DATA, ITEM_TIMESTAMP, ITEM_READ_AT, ITEM_EMPTY_AT, ITEM_FROM_KERNEL, READ_ITEMS };
enum { PLAIN_RUN_ITEMS = 3 };

/* Fill in `*read` from the tuple that Python has of it. Return 0 if the value is something else.
 *
 * The bytes are not copied, so the tuple must live as long as `*read` is used. */
static int read_from_tuple(PyObject *tuple, Read *read)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != READ_ITEMS)
        return 0;
    PyObject *data = PyTuple_GetItem(tuple, ITEM_DATA);
    if (!PyBytes_Check(data))
        return 0;
    int is_valid = 1;
    read->data = PyBytes_AsString(data);
    read->size = PyBytes_Size(data);
    read->timestamp = read_number(PyTuple_GetItem(tuple, ITEM_TIMESTAMP), &is_valid);
    read->read_at = read_number(PyTuple_GetItem(tuple, ITEM_READ_AT), &is_valid);
    read->empty_at = read_number(PyTuple_GetItem(tuple, ITEM_EMPTY_AT), &is_valid);
    read->from_kernel = PyTuple_GetItem(tuple, ITEM_FROM_KERNEL) == Py_True;
    return is_valid;
}

/* Call a Python method of the exchange with the items of a read, or of a run of plain reads.
 *
 * The method returns True if the response is over. */
static enum FeedResult feed_in_python(Exchange *exchange, const char *method_name, PyObject *items)
{
    PyObject *method = PyObject_GetAttrString((PyObject *)exchange, method_name);
    PyObject *arguments = PySequence_Tuple(items);
    PyObject *is_over =
        method == NULL || arguments == NULL ? NULL : PyObject_CallObject(method, arguments);
    Py_XDECREF(method);
    Py_XDECREF(arguments);
    int result = is_over == NULL ? -1 : PyObject_IsTrue(is_over);
    Py_XDECREF(is_over);
    if (result < 0)
        return FEED_FAILED;
    return result ? RESPONSE_OVER : RESPONSE_GOES_ON;
}

/* Feed a read to an exchange, on the fast path or by the method in Python. */
static enum FeedResult feed_read(Exchange *exchange, const Read *read)
{
    enum FeedResult result = try_feed_on_fast_path(exchange, read);
    if (result != NOT_FAST_PATH)
        return result;
    PyObject *tuple = read_tuple(read);
    if (tuple == NULL)
        return FEED_FAILED;
    result = feed_in_python(exchange, "_feed_read", tuple);
    Py_DECREF(tuple);
    return result;
}

/* Feed a tuple `Read` or `PlainRun` that Python has. A run never ends a response. */
static enum FeedResult feed_tuple(Exchange *exchange, PyObject *tuple)
{
    Py_ssize_t size = PySequence_Size(tuple);
    if (size < 0)
        return FEED_FAILED;
    if (size == PLAIN_RUN_ITEMS) {
        enum FeedResult result = feed_in_python(exchange, "_feed_plain_run", tuple);
        return result == FEED_FAILED ? FEED_FAILED : RESPONSE_GOES_ON;
    }
    Read read;
    if (read_from_tuple(tuple, &read)) {
        enum FeedResult result = try_feed_on_fast_path(exchange, &read);
        if (result != NOT_FAST_PATH)
            return result;
    }
    return feed_in_python(exchange, "_feed_read", tuple);
}

/* Note how the receiver may treat the next reads of a response that goes on, as at the end of
 * `ExchangeState.feed_reads`. */
static void update_batching(Exchange *exchange)
{
    const ResponseReader *reader = (ResponseReader *)exchange->reader;
    const ResponseParser *response = (ResponseParser *)exchange->response;
    exchange->can_batch_reads = exchange->is_event_stream && response->is_chunked &&
                                reader->first_token >= 0 && exchange->on_output == Py_None;
    set_field(&exchange->template, exchange->is_at_chunk_start ? reader->template : Py_None);
    if (exchange->can_batch_reads && !exchange->is_at_chunk_start)
        exchange->has_split_chunks = 1;
}

/* Give up the connection after this response, because the server sent bytes after its end. */
static void note_surplus(Exchange *exchange)
{
    ((ResponseParser *)exchange->response)->is_reusable = 0;
}

/* ExchangeState.feed_reads: feed a list of reads and return True if the response is over. */
static PyObject *exchange_feed_reads(PyObject *self, PyObject *reads)
{
    Exchange *exchange = (Exchange *)self;
    Py_ssize_t count = PySequence_Size(reads);
    if (count < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(reads, i);
        enum FeedResult result = item == NULL ? FEED_FAILED : feed_tuple(exchange, item);
        Py_XDECREF(item);
        if (result == FEED_FAILED)
            return NULL;
        if (result == RESPONSE_OVER) {
            if (i + 1 < count)
                note_surplus(exchange);
            Py_RETURN_TRUE;
        }
    }
    update_batching(exchange);
    Py_RETURN_FALSE;
}

/* Feed reads that only C has so far, in their order, until the response is over. */
static enum FeedResult feed_waiting_reads(Exchange *exchange, const WaitingRead *waiting)
{
    for (; waiting != NULL; waiting = waiting->next) {
        enum FeedResult result = feed_read(exchange, &waiting->read);
        if (result == RESPONSE_OVER && waiting->next != NULL)
            note_surplus(exchange);
        if (result != RESPONSE_GOES_ON)
            return result;
    }
    update_batching(exchange);
    return RESPONSE_GOES_ON;
}

static PyMethodDef exchange_methods[] = {
    {"reset_response", exchange_reset_response, METH_NOARGS, NULL},
    {"feed_reads", exchange_feed_reads, METH_O, NULL},
    {NULL},
};
static PyMethodDef response_methods[] = {{NULL}};
static PyMethodDef decoder_methods[] = {{NULL}};
static PyMethodDef reader_methods[] = {{NULL}};
