/* Feeds reads to an exchange, usual ones without Python. Part of _compiled.c.

   A usual read has a head that was seen before, whole chunks of whole events of one choice, and no
   template to learn. It is parsed completely before anything of it is used, so that a read that is
   not usual can be left to Python as it came. The reference is transport/exchange.py with
   wire_formats/response_reader.py. */

/* The result of feeding a read. */
enum FeedResult {
    FEED_FAILED = -1, /* with an exception */
    RESPONSE_GOES_ON = 0,
    RESPONSE_OVER = 1,
    NOT_USUAL = 2, /* nothing was fed */
};

/* A usual read. */
typedef struct {
    EventContent events[MAX_EVENTS];
    int event_count;
    int chunks;
    int outputs;    /* events with output */
    int has_end;    /* the response ends with this read */
    PyObject *head; /* borrowed from the known heads, or NULL if the head came before */
} UsualRead;

static void release_usages(UsualRead *usual)
{
    for (int i = 0; i < usual->event_count; i++)
        Py_CLEAR(usual->events[i].usage);
    usual->event_count = 0;
}

/* -- parsing a usual read ---------------------------------------------------------------------- */

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

/* Return the end of the head, before its blank line, or NULL. */
static const char *find_head_end(const char *data, const char *end)
{
    for (const char *at = data; at < end; at++) {
        at = memchr(at, '\r', (size_t)(end - at));
        if (at == NULL || end - at < 4)
            return NULL;
        if (memcmp(at, "\r\n\r\n", 4) == 0)
            return at;
    }
    return NULL;
}

/* Return whether a parsed head is one of a stream of events in chunks that are not compressed. */
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

/* Find the head at the beginning of a read among the known heads. Return what follows it, or NULL
   if it is not known or not one of a stream of events. */
static const char *parse_usual_head(const char *data, const char *end, UsualRead *usual)
{
    static PyObject *last_lines, *last_head; /* of a server that repeats itself */
    if (end - data < 16 || memcmp(data, "HTTP/1.1 2", 10) != 0)
        return NULL;
    if (last_lines != NULL) {
        const char *lines = PyBytes_AsString(last_lines);
        Py_ssize_t size = PyBytes_Size(last_lines);
        int is_same = end - data >= size + 4 && memcmp(data, lines, (size_t)size) == 0 &&
                      memcmp(data + size, "\r\n\r\n", 4) == 0;
        if (is_same) {
            usual->head = last_head;
            return data + size + 4;
        }
    }
    const char *head_end = find_head_end(data, end);
    if (head_end == NULL)
        return NULL;
    PyObject *lines = PyBytes_FromStringAndSize(data, head_end - data);
    PyObject *head = lines == NULL ? NULL : PyDict_GetItemWithError(known_heads, lines);
    int is_usual = head != NULL && is_stream_head(head);
    if (is_usual) {
        set_field(&last_head, head);
        set_field(&last_lines, lines);
        usual->head = head;
    }
    Py_XDECREF(lines);
    PyErr_Clear();
    return is_usual ? head_end + 4 : NULL;
}

/* Parse the events of a chunk's content. Return whether all of them are usual. */
static int parse_usual_events(const char *content, const char *end, UsualRead *usual)
{
    if (memchr(content, '\r', (size_t)(end - content)) != NULL)
        return 0;
    while (content < end) {
        const char *next = skip_line_event(content, end);
        if (next == NULL || usual->event_count == MAX_EVENTS)
            return 0;
        EventContent *event = &usual->events[usual->event_count];
        if (!parse_usual_event(content + DATA_PREFIX_BYTES, next - EVENT_END_BYTES, event))
            return 0;
        usual->event_count++;
        usual->outputs += event->output;
        content = next;
    }
    return 1;
}

/* Return whether the state of a response allows a usual read. */
static int can_read_be_usual(const Exchange *exchange, const Read *read)
{
    const ResponseParser *response = (ResponseParser *)exchange->response;
    const SseDecoder *decoder = (SseDecoder *)exchange->decoder;
    const ResponseReader *reader = (ResponseReader *)exchange->reader;
    int keeps_nothing = reader->text_pieces == Py_None && reader->on_output == Py_None;
    int is_between_events = PyObject_Size(decoder->_unparsed) == 0 && !decoder->_is_after_cr &&
                            PyObject_Size(response->_unparsed) == 0;
    if (!keeps_nothing || !is_between_events || read->size == 0 ||
        read->timestamp < reader->first_token)
        return 0;
    if (response->status == 0)
        return response->_mode == mode_head;
    return exchange->is_event_stream && response->is_chunked && !response->is_complete &&
           exchange->is_at_chunk_start;
}

/* Parse a read without changing anything. Return whether it is usual. */
static int parse_usual_read(const Exchange *exchange, const Read *read, UsualRead *usual)
{
    const ResponseParser *response = (ResponseParser *)exchange->response;
    const ResponseReader *reader = (ResponseReader *)exchange->reader;
    const char *at = read->data;
    const char *end = at + read->size;
    if (!can_read_be_usual(exchange, read))
        return 0;
    if (response->status == 0 && (at = parse_usual_head(at, end, usual)) == NULL)
        return 0;
    while (at < end) {
        if (end - at == 5 && memcmp(at, "0\r\n\r\n", 5) == 0) {
            usual->has_end = 1;
            break;
        }
        const char *content, *content_end;
        at = parse_chunk(at, end, &content, &content_end);
        if (at == NULL || !parse_usual_events(content, content_end, usual))
            return 0;
        usual->chunks++;
    }
    int learns_template =
        reader->template != Py_None || reader->learned_templates <= 3 + reader->plain_events / 4;
    return usual->outputs == 0 || !learns_template;
}

/* -- feeding events to the reader -------------------------------------------------------------- */

/* Append a number to the gaps or to the instants of an event timeline, whose lists stay the same.
   Return -1 with an exception. */
enum TimelineList { GAPS, TIMESTAMPS };
static int append_to_timeline(PyObject *timeline, enum TimelineList which, int64_t value)
{
    static PyObject *last_timeline, *lists[2];
    if (timeline != last_timeline) {
        PyObject *gaps = PyObject_GetAttr(timeline, name_gaps);
        PyObject *instants = PyObject_GetAttr(timeline, name_timestamps);
        if (gaps == NULL || instants == NULL) {
            Py_XDECREF(gaps);
            Py_XDECREF(instants);
            return -1;
        }
        set_field(&last_timeline, timeline);
        set_field_stealing(&lists[GAPS], gaps);
        set_field_stealing(&lists[TIMESTAMPS], instants);
    }
    PyObject *number = PyLong_FromLongLong(value);
    int failed = number == NULL || PyList_Append(lists[which], number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

/* Append the uncertainty of `count` events to the errors of an event timeline. Return -1 with an
   exception. */
static int append_error(PyObject *timeline, int64_t error, int64_t count)
{
    PyObject *errors = PyObject_GetAttr(timeline, name_uncertainties);
    PyObject *pair =
        errors == NULL ? NULL : Py_BuildValue("LL", (long long)error, (long long)count);
    int failed = pair == NULL || PyList_Append(errors, pair) < 0;
    Py_XDECREF(errors);
    Py_XDECREF(pair);
    return failed ? -1 : 0;
}

/* token_count of wire_formats/reference.py */
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

/* ResponseReader._read_usage, which is called where the counts are not in the names of chat or say
   that there is no output. Return -1 with an exception. */
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
static int count_output_event(ResponseReader *reader, int64_t timestamp, int64_t error)
{
    if (reader->last_token >= 0) {
        int64_t gap = timestamp - reader->last_token;
        if (append_to_timeline(reader->timeline, GAPS, gap) < 0)
            return -1;
        if (gap > reader->max_gap) {
            reader->max_gap = gap;
            reader->max_gap_uncertainty = error;
        }
    }
    if (append_to_timeline(reader->timeline, TIMESTAMPS, timestamp) < 0)
        return -1;
    reader->output_events++;
    reader->last_token = timestamp;
    reader->end = timestamp;
    return 0;
}

/* Feed one event to the reader. Return -1 with an exception. */
static int feed_event(ResponseReader *reader, const EventContent *event, int64_t timestamp,
                      int64_t error)
{
    if (event->output && reader->last_token < 0) {
        reader->first_token = timestamp;
        reader->first_token_uncertainty = error;
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
    if (event->output && count_output_event(reader, timestamp, error) < 0)
        return -1;
    return event->usage == NULL ? 0 : feed_usage(reader, event->usage);
}

/* ResponseReader.feed. Return -1 with an exception. */
static int feed_events(ResponseReader *reader, const EventContent *events, int count,
                       int64_t timestamp, int64_t error)
{
    if (count > 0 && reader->first_event < 0)
        reader->first_event = timestamp;
    for (int i = 0; i < count; i++)
        if (feed_event(reader, &events[i], timestamp, error) < 0)
            return -1;
    return 0;
}

/* ResponseReader.feed_with_uncertainty, where the first `uncertain` events are those that may have
   arrived earlier, by at most `error` ns. Return -1 with an exception. */
static int feed_with_uncertainty(ResponseReader *reader, const UsualRead *usual, int uncertain,
                                 int64_t timestamp, int64_t error, int is_one_write)
{
    int64_t outputs_before = reader->output_events;
    int64_t max_gap_before = reader->max_gap;
    if (feed_events(reader, usual->events, uncertain, timestamp, error) < 0)
        return -1;
    int64_t uncertain_outputs = reader->output_events - outputs_before;
    if (feed_events(reader, usual->events + uncertain, usual->event_count - uncertain, timestamp,
                    0) < 0)
        return -1;
    int has_certain_output = reader->output_events > outputs_before + uncertain_outputs;
    if (has_certain_output)
        reader->uncertain_timestamp = NEVER;
    else if (uncertain_outputs > 0) {
        reader->uncertain_timestamp = timestamp;
        reader->timestamp_uncertainty = error;
        if (PyObject_Size(reader->finish_reason) > 0) {
            uncertain_outputs--;
            if (reader->output_events >
                1) { /* Both numbers are not negative, because timestamps grow. */
                int64_t mean_gap = (timestamp - reader->first_token) / (reader->output_events - 1);
                reader->timestamp_uncertainty = error < mean_gap ? error : mean_gap;
            }
        }
    }
    if (uncertain_outputs > 0 && !is_one_write &&
        append_error(reader->timeline, error, uncertain_outputs) < 0)
        return -1;
    if ((is_one_write || uncertain_outputs == 0) && reader->max_gap > max_gap_before)
        reader->max_gap_uncertainty = 0;
    return 0;
}

/* -- feeding reads to the exchange ------------------------------------------------------------- */

/* Exchange._feed_events. Return -1 with an exception. */
static int feed_usual_events(Exchange *exchange, ResponseReader *reader, const UsualRead *usual,
                             const Read *read)
{
    int is_first = reader->first_token < 0;
    int is_one_chunk = usual->chunks == 1;
    if (!is_first && is_one_chunk)
        return feed_events(reader, usual->events, usual->event_count, read->timestamp, 0);
    int64_t earliest = read->empty_at;
    if (is_first && exchange->sent_at > earliest)
        earliest = exchange->sent_at;
    int uncertain = is_one_chunk ? 0 : usual->event_count - 1;
    if (usual->has_end)
        uncertain = usual->event_count;
    int64_t error = read->timestamp - earliest;
    if (feed_with_uncertainty(reader, usual, uncertain, read->timestamp, error, is_one_chunk) < 0)
        return -1;
    if (!is_first || reader->first_token < 0)
        return 0;
    exchange->client_lag = read->read_at - read->timestamp;
    if (exchange->on_first_output == Py_None)
        return 0;
    return call_with(exchange->on_first_output, PyLong_FromLongLong(reader->first_token));
}

/* Exchange._finish_response of a usual response. Return -1 with an exception. */
static int complete_exchange(Exchange *exchange, ResponseReader *reader, int64_t timestamp)
{
    int has_usual_end = 0;
    if (PyObject_Size(reader->error) == 0 && PyObject_Size(reader->parse_error) == 0 &&
        reader->first_event >= 0) {
        has_usual_end = PySet_Contains(endings, reader->finish_reason);
        if (has_usual_end < 0)
            return -1;
    }
    if (has_usual_end)
        set_field(&exchange->failure, Py_None);
    else {
        PyObject *failure = PyObject_CallMethod((PyObject *)reader, "find_failure", "OOO", Py_True,
                                                Py_False, Py_True);
        if (failure == NULL)
            return -1;
        set_field_stealing(&exchange->failure, failure);
    }
    exchange->done_at = timestamp;
    return 0;
}

/* ResponseParser._use_head, with what an exchange notes of the head. */
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

/* Update an exchange by a usual read. */
static enum FeedResult use_usual_read(Exchange *exchange, ResponseParser *response,
                                      ResponseReader *reader, const UsualRead *usual,
                                      const Read *read)
{
    exchange->bytes_received += read->size;
    if (usual->head != NULL)
        use_head(exchange, response, usual->head, read);
    if (usual->chunks > 0)
        ((SseDecoder *)exchange->decoder)->has_started = 1;
    if (usual->has_end) {
        set_field(&response->_mode, mode_end);
        set_field(&response->surplus, no_bytes);
        response->is_complete = 1;
        exchange->is_at_chunk_start = 0;
    }
    if (usual->event_count > 0) {
        if (feed_usual_events(exchange, reader, usual, read) < 0)
            return FEED_FAILED;
        exchange->last_event_read_at = read->read_at;
    }
    if (!usual->has_end)
        return RESPONSE_GOES_ON;
    return complete_exchange(exchange, reader, read->timestamp) < 0 ? FEED_FAILED : RESPONSE_OVER;
}

/* Feed a read if it is usual. */
static enum FeedResult feed_usual_read(Exchange *exchange, const Read *read)
{
    if (Py_TYPE(exchange->response) != response_class ||
        Py_TYPE(exchange->decoder) != decoder_class || Py_TYPE(exchange->reader) != reader_class)
        return NOT_USUAL;
    UsualRead usual;
    usual.event_count = usual.chunks = usual.outputs = usual.has_end = 0;
    usual.head = NULL;
    enum FeedResult result = NOT_USUAL;
    if (parse_usual_read(exchange, read, &usual)) {
        PyObject *response = exchange->response, *reader = exchange->reader;
        Py_INCREF(response); /* `on_first` may send the request again. */
        Py_INCREF(reader);
        result = use_usual_read(exchange, (ResponseParser *)response, (ResponseReader *)reader,
                                &usual, read);
        Py_DECREF(response);
        Py_DECREF(reader);
    }
    release_usages(&usual);
    return result;
}

enum {
    READ_ITEMS = 5,
    RUN_ITEMS = 3
}; /* of the tuples `Read` and `PlainRun` in transport/response_state.py */

/* Fill in `*read` from a tuple. Return 0 if it is something else. */
static int read_from_tuple(PyObject *tuple, Read *read)
{
    int is_valid = 1;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != READ_ITEMS ||
        !PyBytes_Check(PyTuple_GetItem(tuple, 0)))
        return 0;
    read->data = PyBytes_AsString(PyTuple_GetItem(tuple, 0));
    read->size = PyBytes_Size(PyTuple_GetItem(tuple, 0));
    read->timestamp = read_number(PyTuple_GetItem(tuple, 1), &is_valid);
    read->read_at = read_number(PyTuple_GetItem(tuple, 2), &is_valid);
    read->empty_at = read_number(PyTuple_GetItem(tuple, 3), &is_valid);
    read->from_kernel = PyTuple_GetItem(tuple, 4) == Py_True;
    return is_valid;
}

/* Call a method of the exchange in Python with the items of a read or a run. */
static enum FeedResult feed_by_python(Exchange *exchange, const char *method_name, PyObject *items)
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

/* Feed a read, usual or not. */
static enum FeedResult feed_read(Exchange *exchange, const Read *read)
{
    enum FeedResult result = feed_usual_read(exchange, read);
    if (result != NOT_USUAL)
        return result;
    PyObject *tuple = read_tuple(read);
    if (tuple == NULL)
        return FEED_FAILED;
    result = feed_by_python(exchange, "_feed_read", tuple);
    Py_DECREF(tuple);
    return result;
}

/* Feed a read or a run that Python has. */
static enum FeedResult feed_item(Exchange *exchange, PyObject *item)
{
    Py_ssize_t size = PySequence_Size(item);
    if (size < 0)
        return FEED_FAILED;
    if (size == RUN_ITEMS)
        return feed_by_python(exchange, "_feed_plain_run", item) == FEED_FAILED ? FEED_FAILED
                                                                          : RESPONSE_GOES_ON;
    Read read;
    enum FeedResult result =
        read_from_tuple(item, &read) ? feed_usual_read(exchange, &read) : NOT_USUAL;
    return result == NOT_USUAL ? feed_by_python(exchange, "_feed_read", item) : result;
}

/* Note how urgent the next reads are, after some that have not ended the response. */
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

/* The server sent bytes after the end of the response. */
static void note_surplus(Exchange *exchange)
{
    ((ResponseParser *)exchange->response)->is_reusable = 0;
}

/* ExchangeState.feed_reads */
static PyObject *exchange_feed_reads(PyObject *self, PyObject *reads)
{
    Exchange *exchange = (Exchange *)self;
    Py_ssize_t count = PySequence_Size(reads);
    if (count < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(reads, i);
        enum FeedResult result = item == NULL ? FEED_FAILED : feed_item(exchange, item);
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

/* The same, of reads that Python does not have yet. */
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
