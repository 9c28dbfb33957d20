/* A usual read of an answer, a request that is sent, a connection that is free again. Part of _compiled.c. */

typedef struct {
    EventContent events[MAX_EVENTS];
    PyObject *head; /* borrowed from the known heads: what the head of the answer says; NULL: it came before */
    int count, chunks, outputs, ended;
} UsualRead;

static void release_usages(UsualRead *usual)
{
    for (int i = 0; i < usual->count; i++)
        Py_CLEAR(usual->events[i].usage);
    usual->count = 0;
}

/* The head at the beginning of a read, if it is known and one of a stream of events in chunks; what follows it. */
static const char *parse_usual_head(const char *data, const char *end, UsualRead *usual)
{
    static PyObject *last_lines, *last_head; /* of a server that repeats itself */
    const char *stop = data;
    if (end - data < 16 || memcmp(data, "HTTP/1.1 2", 10) != 0)
        return NULL;
    if (last_lines != NULL) {
        char *lines;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(last_lines, &lines, &size) == 0 && end - data >= size + 4 &&
            memcmp(data, lines, (size_t)size) == 0 && memcmp(data + size, "\r\n\r\n", 4) == 0) {
            usual->head = last_head;
            return data + size + 4;
        }
    }
    do {
        stop = memchr(stop, '\r', (size_t)(end - stop));
        if (stop == NULL || end - stop < 4)
            return NULL;
    } while (memcmp(stop++, "\r\n\r\n", 4) != 0);
    stop--;
    PyObject *lines = PyBytes_FromStringAndSize(data, stop - data);
    PyObject *head = lines == NULL ? NULL : PyDict_GetItemWithError(known_heads, lines);
    if (head != NULL && PyTuple_Check(head) && PyTuple_Size(head) == 7) {
        PyObject *headers = PyTuple_GetItem(head, 1), *mode = PyTuple_GetItem(head, 2);
        PyObject *type = PyDict_Check(headers) ? PyDict_GetItemWithError(headers, name_content_type) : NULL;
        if (type != NULL && PyUnicode_Check(type) && PyUnicode_Tailmatch(type, event_stream, 0, PY_SSIZE_T_MAX, -1) == 1 &&
            PyUnicode_Compare(mode, mode_chunked) == 0 &&
            PyDict_GetItemWithError(headers, name_content_encoding) == NULL && !PyErr_Occurred()) {
            Py_INCREF(head);
            Py_XDECREF(last_head);
            last_head = head;
            Py_XDECREF(last_lines);
            last_lines = lines;
            usual->head = head;
            return stop + 4;
        }
    }
    Py_XDECREF(lines);
    PyErr_Clear();
    return NULL;
}

/* Look at a read without taking anything of it: whether it is usual. */
static int parse_usual_read(const Exchange *exchange, const ResponseParser *response, const SseDecoder *decoder, const ResponseReader *reader,
                const Read *read, UsualRead *usual)
{
    const char *at = read->data, *end = at + read->size, *content, *close;
    if (reader->pieces != Py_None || reader->sink != Py_None || PyObject_Size(decoder->_unparsed) != 0 ||
        decoder->_after_cr || PyObject_Size(response->_unparsed) != 0 || read->size == 0 ||
        read->timestamp < reader->first_token)
        return 0;
    if (response->status == 0) {
        if (response->_mode != mode_head || (at = parse_usual_head(at, end, usual)) == NULL)
            return 0;
    } else if (!exchange->is_event_stream || !response->chunked || response->complete || !exchange->at_chunk_start)
        return 0;
    while (at < end) {
        if (end - at == 5 && memcmp(at, "0\r\n\r\n", 5) == 0) {
            usual->ended = 1;
            break;
        }
        const char *next = parse_chunk(at, end, &content, &close);
        if (next == NULL || memchr(content, '\r', (size_t)(close - content)) != NULL)
            return 0;
        for (; content < close; usual->count++) {
            const char *event = skip_line_event(content, close);
            if (event == NULL || usual->count == MAX_EVENTS ||
                !parse_usual_event(content + 6, event - 2, &usual->events[usual->count]))
                return 0;
            usual->outputs += usual->events[usual->count].output;
            content = event;
        }
        usual->chunks++;
        at = next;
    }
    return !usual->outputs || (reader->template == Py_None && reader->learned > 3 + reader->plain_events / 4);
}

/* Append to a list of a flow, which has its lists as long as it lasts. -1 with an exception. */
enum { GAPS, INSTANTS };
static int append_number(PyObject *flow, int which, int64_t value)
{
    static PyObject *last, *lists[2];
    if (flow != last) {
        PyObject *gaps = PyObject_GetAttr(flow, name_gaps), *instants = PyObject_GetAttr(flow, name_instants);
        if (gaps == NULL || instants == NULL) {
            Py_XDECREF(gaps);
            Py_XDECREF(instants);
            return -1;
        }
        set_object(&last, flow);
        set_stolen(&lists[GAPS], gaps);
        set_stolen(&lists[INSTANTS], instants);
    }
    PyObject *number = PyLong_FromLongLong(value);
    int failed = number == NULL || PyList_Append(lists[which], number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

static PyObject *token_count(PyObject *Py_UNUSED(module), PyObject *value)
{
    if (PyFloat_Check(value)) { /* some servers write 8.0 */
        double number = PyFloat_AsDouble(value);
        if (number >= 0 && number < (double)(1LL << 31) && number == (double)(int64_t)number)
            return PyLong_FromDouble(number);
    }
    PyObject *count = is_count(value) ? value : Py_None;
    Py_INCREF(count);
    return count;
}

/* Reading._read_usage, which is left to Python where the counts are not those of chat, or of no output. -1 with an
   exception. */
static int feed_usage(ResponseReader *reader, PyObject *usage)
{
    int64_t output_tokens = output_tokens_of(usage);
    if (output_tokens <= 0) {
        PyErr_Clear();
        PyObject *done = PyObject_CallMethod((PyObject *)reader, "_read_usage", "O", usage);
        Py_XDECREF(done);
        return done == NULL ? -1 : 0;
    }
    set_object(&reader->usage_counts, usage);
    if (reader->output_events == 1 && reader->first_event_tokens == 0 && PyObject_Size(reader->finish_reason) == 0)
        reader->first_event_tokens = output_tokens;
    return 0;
}

/* Reading.take. -1 with an exception. */
static int feed_events(ResponseReader *reader, const EventContent *events, int count, int64_t timestamp, int64_t error)
{
    if (count && reader->first_event < 0)
        reader->first_event = timestamp;
    for (int i = 0; i < count; i++) {
        const EventContent *content = &events[i];
        if (content->output && reader->last_token < 0) {
            reader->first_token = timestamp;
            reader->stamp_error = error;
        }
        if (content->answer && reader->first_answer < 0)
            reader->first_answer = timestamp;
        if (content->finish != NULL) {
            PyObject *reason = PyUnicode_DecodeUTF8(content->finish, content->finish_size, "strict");
            if (reason == NULL)
                return -1;
            set_stolen(&reader->finish_reason, reason);
            reader->end = timestamp;
        }
        if (content->output) {
            if (reader->last_token >= 0) {
                int64_t gap = timestamp - reader->last_token;
                if (append_number(reader->flow, GAPS, gap) < 0)
                    return -1;
                if (gap > reader->max_gap) {
                    reader->max_gap = gap;
                    reader->max_gap_error = error;
                }
            }
            if (append_number(reader->flow, INSTANTS, timestamp) < 0)
                return -1;
            reader->output_events++;
            reader->last_token = reader->end = timestamp;
        }
        if (content->usage != NULL && feed_usage(reader, content->usage) < 0)
            return -1;
    }
    return 0;
}

/* Reading.take_unsure, of the first `unsure` events and the others. -1 with an exception. */
static int feed_with_uncertainty(ResponseReader *reader, const UsualRead *usual, int unsure, int64_t timestamp, int64_t error, int one_write)
{
    int64_t before = reader->output_events, largest = reader->max_gap;
    if (feed_events(reader, usual->events, unsure, timestamp, error) < 0)
        return -1;
    int64_t outputs = reader->output_events - before;
    if (feed_events(reader, usual->events + unsure, usual->count - unsure, timestamp, 0) < 0)
        return -1;
    if (reader->output_events > before + outputs)
        reader->unsure_at = NEVER;
    else if (outputs) {
        reader->unsure_at = timestamp;
        reader->unsure_error = error;
        if (PyObject_Size(reader->finish_reason) > 0) {
            outputs--;
            if (reader->output_events > 1) { /* both are not negative: stamps grow */
                int64_t gap = (timestamp - reader->first_token) / (reader->output_events - 1);
                reader->unsure_error = error < gap ? error : gap;
            }
        }
    }
    if (outputs && !one_write) {
        PyObject *errors = PyObject_GetAttr(reader->flow, name_errors);
        PyObject *pair = errors == NULL ? NULL : Py_BuildValue("LL", (long long)error, (long long)outputs);
        int failed = pair == NULL || PyList_Append(errors, pair) < 0;
        Py_XDECREF(errors);
        Py_XDECREF(pair);
        if (failed)
            return -1;
    }
    if ((one_write || !outputs) && reader->max_gap > largest)
        reader->max_gap_error = 0;
    return 0;
}

/* The events of a usual read: Exchange._feed_read from there on. -1 with an exception. */
static int feed_usual_events(Exchange *exchange, ResponseReader *reader, const UsualRead *usual, const Read *read)
{
    int first = reader->first_token < 0, single = usual->chunks == 1;
    if (usual->count == 0)
        return 0;
    if (!first && single) {
        if (feed_events(reader, usual->events, usual->count, read->timestamp, 0) < 0)
            return -1;
    } else {
        int64_t earliest = first && exchange->sent > read->empty_at ? exchange->sent : read->empty_at;
        int unsure = usual->ended ? usual->count : single ? 0 : usual->count - 1;
        if (feed_with_uncertainty(reader, usual, unsure, read->timestamp, read->timestamp - earliest, single) < 0)
            return -1;
    }
    if (first && reader->first_token >= 0) {
        exchange->client_lag = read->read_at - read->timestamp;
        if (exchange->on_first != Py_None && call_and_drop(exchange->on_first, PyLong_FromLongLong(reader->first_token)) < 0)
            return -1;
    }
    exchange->progress = read->read_at;
    return 0;
}

/* The end of a usual answer: Exchange._complete. -1 with an exception. */
static int complete_exchange(Exchange *exchange, ResponseReader *reader, int64_t timestamp)
{
    PyObject *failure = NULL;
    int sound = 1;
    if (PyObject_Size(reader->error) == 0 && PyObject_Size(reader->malformed) == 0 &&
        (sound = PySet_Contains(endings, reader->finish_reason)) > 0 && reader->first_event >= 0) {
        failure = Py_None;
        Py_INCREF(failure);
    } else if (sound >= 0)
        failure = PyObject_CallMethod((PyObject *)reader, "judge", "OOO", Py_True, Py_False, Py_True);
    if (failure == NULL)
        return -1;
    set_stolen(&exchange->failure, failure);
    exchange->done = timestamp;
    return 0;
}

/* Take a read if it is usual: 1 if the answer is over, 0 if not, 2 if it is not usual, -1 with an exception. */
static int feed_usual_read(Exchange *exchange, const Read *read)
{
    ResponseParser *response = (ResponseParser *)exchange->response;
    ResponseReader *reader = (ResponseReader *)exchange->reader;
    UsualRead usual = {.count = 0};
    int fits = 1, result = -1;
    if (Py_TYPE(exchange->response) != response_class || Py_TYPE(exchange->decoder) != decoder_class ||
        Py_TYPE(exchange->reader) != reader_class)
        return 2;
    if (!parse_usual_read(exchange, response, (SseDecoder *)exchange->decoder, reader, read, &usual)) {
        release_usages(&usual);
        return 2;
    }
    Py_INCREF((PyObject *)reader); /* who is told of the first output may send the request again */
    Py_INCREF((PyObject *)response);
    exchange->bytes_received += read->size;
    if (usual.head != NULL) {
        PyObject **places[] = {&response->headers, &response->_mode, &response->_bytes_left};
        for (int i = 0; i < 3; i++)
            set_object(places[i], PyTuple_GetItem(usual.head, i + 1));
        set_object(&response->uses_left, PyTuple_GetItem(usual.head, 5));
        set_object(&response->idle_limit_s, PyTuple_GetItem(usual.head, 6));
        response->status = read_number(PyTuple_GetItem(usual.head, 0), &fits);
        response->reusable = PyTuple_GetItem(usual.head, 4) == Py_True;
        response->chunked = exchange->is_event_stream = exchange->at_chunk_start = 1;
        response->until_close = 0;
        exchange->first_byte = read->timestamp;
        exchange->kernel_stamp = read->from_kernel;
    }
    if (usual.chunks)
        ((SseDecoder *)exchange->decoder)->started = 1;
    if (usual.ended) {
        set_object(&response->_mode, mode_end);
        set_object(&response->surplus, no_bytes);
        response->complete = 1;
        exchange->at_chunk_start = 0;
    }
    if (feed_usual_events(exchange, reader, &usual, read) == 0)
        result = !usual.ended ? 0 : complete_exchange(exchange, reader, read->timestamp) < 0 ? -1 : 1;
    Py_DECREF((PyObject *)reader);
    Py_DECREF((PyObject *)response);
    release_usages(&usual);
    return result;
}

/* A read as Python has it: 0 where it is another thing. */
static int read_of(PyObject *tuple, Read *read)
{
    char *data;
    int fits = 1;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 5 || !PyBytes_Check(PyTuple_GetItem(tuple, 0)))
        return 0;
    PyBytes_AsStringAndSize(PyTuple_GetItem(tuple, 0), &data, &read->size);
    read->data = data;
    read->timestamp = read_number(PyTuple_GetItem(tuple, 1), &fits);
    read->read_at = read_number(PyTuple_GetItem(tuple, 2), &fits);
    read->empty_at = read_number(PyTuple_GetItem(tuple, 3), &fits);
    read->from_kernel = PyTuple_GetItem(tuple, 4) == Py_True;
    return fits;
}

/* Call a method of Python with the parts of a read. 1 if it says so, 0 if not, -1 with an exception. */
static int call_python_feed(Exchange *exchange, const char *name, PyObject *read)
{
    PyObject *method = PyObject_GetAttrString((PyObject *)exchange, name), *parts = PySequence_Tuple(read);
    PyObject *over = method == NULL || parts == NULL ? NULL : PyObject_CallObject(method, parts);
    Py_XDECREF(method);
    Py_XDECREF(parts);
    int result = over == NULL ? -1 : PyObject_IsTrue(over);
    Py_XDECREF(over);
    return result;
}

/* Take a read, usual or not: 1 if the answer is over, 0 if not, -1 with an exception. */
static int feed_any_read(Exchange *exchange, const Read *read)
{
    int over = feed_usual_read(exchange, read);
    if (over != 2)
        return over;
    PyObject *tuple = read_tuple(read);
    over = tuple == NULL ? -1 : call_python_feed(exchange, "_feed_read", tuple);
    Py_XDECREF(tuple);
    return over;
}

/* What is said of the reads to come, after some that have not ended the answer. */
static void update_batching(Exchange *exchange)
{
    ResponseReader *reader = (ResponseReader *)exchange->reader;
    exchange->may_batch = exchange->is_event_stream && ((ResponseParser *)exchange->response)->chunked &&
                        reader->first_token >= 0 && exchange->sink == Py_None;
    set_object(&exchange->template, exchange->at_chunk_start ? reader->template : Py_None);
    if (exchange->may_batch && !exchange->at_chunk_start)
        exchange->splits_chunks = 1;
}

static PyObject *exchange_feed_reads(PyObject *self, PyObject *reads)
{
    Exchange *exchange = (Exchange *)self;
    Read one;
    Py_ssize_t count = PySequence_Size(reads);
    if (count < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *read = PySequence_GetItem(reads, i);
        Py_ssize_t parts = read == NULL ? -1 : PySequence_Size(read);
        int over = parts < 0 ? -1 : parts == 3 || !read_of(read, &one) ? 2 : feed_usual_read(exchange, &one);
        if (over == 2) {
            over = call_python_feed(exchange, parts == 3 ? "_feed_run" : "_feed_read", read);
            over = parts == 3 && over > 0 ? 0 : over;
        }
        Py_XDECREF(read);
        if (over < 0)
            return NULL;
        if (over) {
            if (i + 1 < count) /* bytes after the end */
                ((ResponseParser *)exchange->response)->reusable = 0;
            Py_RETURN_TRUE;
        }
    }
    update_batching(exchange);
    Py_RETURN_FALSE;
}

static PyMethodDef exchange_methods[] = {
    {"reset_response", exchange_reset_response, METH_NOARGS, NULL},
    {"feed_reads", exchange_feed_reads, METH_O, NULL},
    {NULL},
};
static PyMethodDef response_methods[] = {{NULL}}, decoder_methods[] = {{NULL}}, reader_methods[] = {{NULL}};

/* Whether an buffer is that of a connection without TLS, whose request asked for so few events that no template is learned,
   and which has reads for it alone: the exchange, borrowed; else NULL. */
static Exchange *exchange_for_delivery(SocketBuffer *buffer)
{
    Exchange *exchange = (Exchange *)buffer->exchange;
    if (buffer->ended_at || buffer->is_deferred || buffer->run_count || buffer->template != Py_None || buffer->reads == NULL ||
        !PyList_Check(buffer->reads) || count_reads(buffer) < 1 || buffer->tls != Py_None || buffer->is_closed ||
        exchange == NULL || exchange_class == NULL || Py_TYPE((PyObject *)exchange) != exchange_class ||
        Py_TYPE(exchange->reader) != reader_class || ((ResponseReader *)exchange->reader)->learned != NO_MORE_TEMPLATES)
        return NULL;
    if (exchange->first_byte < 0) { /* it may be the end of an idle connection: 408 */
        Read read;
        const Read *first = &read;
        if (PyList_Size(buffer->reads) == 0)
            first = &buffer->first->read;
        else if (!read_of(PyList_GetItem(buffer->reads, 0), &read))
            return NULL;
        if (first->size <= 10 || memcmp(first->data, "HTTP/1.1 2", 10) != 0)
            return NULL;
    }
    return exchange;
}

/* Exchange.feed_reads, of reads that are no tuples: 1 if the answer is over, 0 if not, -1 with an exception. */
static int feed_waiting_reads(Exchange *exchange, const WaitingRead *kept)
{
    for (; kept != NULL; kept = kept->next) {
        int over = feed_any_read(exchange, &kept->read);
        if (over > 0 && kept->next != NULL) /* bytes after the end */
            ((ResponseParser *)exchange->response)->reusable = 0;
        if (over)
            return over;
    }
    update_batching(exchange);
    return 0;
}

/* Receiver.deliver: -1 with an exception. */
static int deliver(Receiver *receiver, PyObject *value)
{
    if (!is_socket_buffer(value))
        return -1;
    SocketBuffer *buffer = (SocketBuffer *)value;
    Exchange *exchange = exchange_for_delivery(buffer);
    int over = -1;
    if (exchange == NULL)
        return 0;
    Py_INCREF((PyObject *)exchange);
    if (PyList_Size(buffer->reads) == 0) {
        receiver->queued_reads -= buffer->is_queued ? buffer->kept : 0;
        buffer->is_queued = 0;
        WaitingRead *kept = detach_waiting(buffer);
        over = feed_waiting_reads(exchange, kept);
        free_waiting(kept);
    } else {
        PyObject *reads = receiver_take_reads((PyObject *)receiver, value);
        buffer->is_queued = 0;
        PyObject *done = reads == NULL ? NULL : exchange_feed_reads((PyObject *)exchange, reads);
        Py_XDECREF(reads);
        over = done == NULL ? -1 : done == Py_True;
        Py_XDECREF(done);
    }
    if (over == 0)
        buffer->may_batch = exchange->may_batch;
    Py_DECREF((PyObject *)exchange);
    return over < 0 ? -1 : over + 1;
}

static PyObject *receiver_deliver(PyObject *self, PyObject *value)
{
    int how = deliver((Receiver *)self, value);
    return how < 0 ? NULL : PyLong_FromLong(how);
}

/* Whether a connection can take a request. */
static int can_carry_request(const SocketBuffer *buffer)
{
    return !buffer->is_closed && buffer->tls == Py_None && buffer->unsent != NULL && PyList_Check(buffer->unsent) &&
           PyList_Size(buffer->unsent) == 0;
}

/* Send a request, whose head and body are bytes, on a free connection: how many bytes the socket did not take, -2 with an
   exception. */
static int64_t send_on_connection(Exchange *exchange, PyObject *connection, PyObject *open_exchanges)
{
    SocketBuffer *buffer = (SocketBuffer *)connection;
    set_object(&buffer->exchange, (PyObject *)exchange);
    set_object(&buffer->template, Py_None);
    set_object(&exchange->connection, connection);
    buffer->may_batch = 0;
    exchange->reused = buffer->responses_served > 0;
    if (!exchange->reused) { /* the first on its connection */
        exchange->tcp = buffer->tcp_ns;
        exchange->tls = buffer->tls_ns;
    }
    if (PySet_Add(open_exchanges, (PyObject *)exchange) < 0)
        return -2;
    PyObject *const parts[] = {exchange->head, exchange->payload};
    struct iovec vectors[2];
    int64_t at = 0, whole = 0;
    for (int i = 0; i < 2; i++) {
        vectors[i] = (struct iovec){.iov_base = PyBytes_AsString(parts[i]), .iov_len = (size_t)PyBytes_Size(parts[i])};
        whole += (int64_t)vectors[i].iov_len;
    }
    int64_t sent = write_parts(buffer->fd, vectors, 2, &at);
    exchange->ready = exchange->sent = at;
    exchange->bytes_sent += whole;
    return sent < 0 ? 0 : whole - sent; /* after an error, the next read reports it */
}

/* Receiver.send_on_idle */
static PyObject *receiver_send_on_idle(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count)
{
    int fits = 1;
    if (count != 4 || exchange_class == NULL || Py_TYPE(args[0]) != exchange_class || !PySet_Check(args[3]))
        return PyLong_FromLong(-1);
    Exchange *exchange = (Exchange *)args[0];
    PyObject *idle = args[1], *taken = NULL;
    Py_ssize_t size = PySequence_Size(idle);
    PyObject *connection = size > 0 ? PySequence_GetItem(idle, size - 1) : NULL;
    int64_t reuse = read_number(args[2], &fits), left = -1;
    if (connection != NULL && PyObject_TypeCheck(connection, socket_buffer_type) && can_carry_request((SocketBuffer *)connection) &&
        PyBytes_Check(exchange->head) && PyBytes_Check(exchange->payload) && fits &&
        clock_ns(CLOCK_MONOTONIC) - ((SocketBuffer *)connection)->idle_since <= reuse) {
        taken = PyObject_CallMethodObjArgs(idle, name_pop, NULL);
        left = taken == NULL ? -2 : send_on_connection(exchange, connection, args[3]);
        Py_XDECREF(taken);
    } else
        PyErr_Clear();
    Py_XDECREF(connection);
    return left == -2 ? NULL : PyLong_FromLongLong(left);
}

/* The exchange of a connection that is free again, but not among the idle ones; None: all is left as it was; NULL with an
   exception. */
static PyObject *detach_exchange(Receiver *receiver, SocketBuffer *buffer, PyObject *in_flight, PyObject *open_exchanges)
{
    PyObject *busy = buffer->exchange;
    Exchange *exchange = (Exchange *)busy;
    if (busy == NULL || exchange_class == NULL || Py_TYPE(busy) != exchange_class || exchange->is_reported ||
        Py_TYPE(exchange->response) != response_class)
        Py_RETURN_NONE;
    ResponseParser *response = (ResponseParser *)exchange->response;
    if (!response->complete || !response->reusable || response->uses_left != Py_None ||
        response->idle_limit_s != Py_None || buffer->unsent == NULL || !PyList_Check(buffer->unsent) ||
        PyList_Size(buffer->unsent) != 0)
        Py_RETURN_NONE;
    Py_INCREF(Py_None);
    buffer->exchange = Py_None; /* its reference is that of `busy` now */
    buffer->responses_served++;
    if (set_deferred(receiver, buffer, 0) < 0)
        goto failed;
    set_object(&exchange->connection, Py_None);
    set_object(&exchange->payload, no_bytes);
    if (PySet_Discard(open_exchanges, busy) < 0)
        goto failed;
    if (PyDict_GetItemWithError(in_flight, busy) != NULL) {
        if (PyDict_DelItem(in_flight, busy) < 0)
            goto failed;
    } else if (PyErr_Occurred())
        goto failed;
    return busy;
failed:
    Py_DECREF(busy);
    return NULL;
}

/* -1 with an exception. */
static int add_to_idle(PyObject *idle, PyObject *connection)
{
    ((SocketBuffer *)connection)->idle_since = clock_ns(CLOCK_MONOTONIC);
    PyObject *done = PyObject_CallMethodObjArgs(idle, name_append, connection, NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Receiver.recycle */
static PyObject *receiver_recycle(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !PyObject_TypeCheck(args[0], socket_buffer_type) || !PyDict_Check(args[2]) || !PySet_Check(args[3]))
        Py_RETURN_NONE;
    PyObject *freed = detach_exchange((Receiver *)self, (SocketBuffer *)args[0], args[2], args[3]);
    if (freed != NULL && freed != Py_None && add_to_idle(args[1], args[0]) < 0)
        Py_CLEAR(freed);
    return freed;
}

/* Receiver.deliver_queued: the time, or -1 with an exception. `*others` becomes 1 where Python was called for one. */
static int64_t deliver_slice(Receiver *receiver, int64_t slice_ns, PyObject *other, int *others)
{
    int64_t now = clock_ns(CLOCK_MONOTONIC), ends = now + slice_ns;
    for (int handed = 1; PyObject_Size(receiver->queue) > 0; handed++) {
        PyObject *connection = PyObject_CallFunctionObjArgs(receiver->queue_popleft, NULL), *done = NULL;
        int how = connection == NULL ? -1 : deliver(receiver, connection);
        int failed = how < 0;
        if (how == 2) {
            PyObject *owner = ((SocketBuffer *)connection)->owner;
            Py_INCREF(owner);
            done = PyObject_CallMethodObjArgs(owner, name_response_completed, connection, NULL);
            Py_DECREF(owner);
            failed = done == NULL;
            *others = 1;
        } else if (how == 0) {
            done = PyObject_CallFunctionObjArgs(other, connection, NULL);
            failed = done == NULL;
            *others = 1;
        }
        Py_XDECREF(done);
        Py_XDECREF(connection);
        if (failed)
            return -1;
        if (!(handed & 7) && (now = clock_ns(CLOCK_MONOTONIC)) > ends)
            break;
    }
    return now;
}

static PyObject *receiver_deliver_queued(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    int fits = count == 2, others = 0;
    int64_t slice_ns = fits ? read_number(args[0], &fits) : 0;
    if (!fits) {
        PyErr_SetString(PyExc_TypeError, "deliver_queued(slice_ns, other)");
        return NULL;
    }
    int64_t now = deliver_slice((Receiver *)self, slice_ns, args[1], &others);
    return now < 0 ? NULL : PyLong_FromLongLong(now);
}
