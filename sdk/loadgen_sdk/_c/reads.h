/* A usual read of an answer, a request that is sent, a connection that is free again. Part of _compiled.c. */

typedef struct {
    Said events[MOST_EVENTS];
    PyObject *head; /* borrowed from the known heads: what the head of the answer says; NULL: it came before */
    int count, chunks, outputs, ended;
} Usual;

static void forget(Usual *usual)
{
    for (int i = 0; i < usual->count; i++)
        Py_CLEAR(usual->events[i].usage);
    usual->count = 0;
}

/* The head at the beginning of a read, if it is known and one of a stream of events in chunks; what follows it. */
static const char *usual_head(const char *data, const char *end, Usual *usual)
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
static int look(State *exchange, State *response, State *decoder, State *reading, const char *data, Py_ssize_t size,
                Usual *usual)
{
    const char *at = data, *end = data + size, *content, *close;
    int fits = 1;
    if (reading->field[R_pieces] != Py_None || reading->field[R_sink] != Py_None ||
        PyObject_Size(decoder->field[D__unparsed]) != 0 || is_true(decoder, D__after_cr) ||
        PyObject_Size(response->field[P__unparsed]) != 0)
        return 0;
    int64_t status = number_of(response->field[P_status], &fits), learned = number_of(reading->field[R_learned], &fits);
    int64_t plain = number_of(reading->field[R_plain_events], &fits);
    if (!fits)
        return 0;
    if (status == 0) {
        if (response->field[P__mode] != mode_head || (at = usual_head(data, end, usual)) == NULL)
            return 0;
    } else if (!is_true(exchange, X_is_event_stream) || !is_true(response, P_chunked) || is_true(response, P_complete) ||
               !is_true(exchange, X_at_start))
        return 0;
    while (at < end) {
        if (end - at == 5 && memcmp(at, "0\r\n\r\n", 5) == 0) {
            usual->ended = 1;
            break;
        }
        const char *next = chunk(at, end, &content, &close);
        if (next == NULL || memchr(content, '\r', (size_t)(close - content)) != NULL)
            return 0;
        for (; content < close; usual->count++) {
            const char *event = line_event(content, close);
            if (event == NULL || usual->count == MOST_EVENTS ||
                !usual_event(content + 6, event - 2, &usual->events[usual->count]))
                return 0;
            usual->outputs += usual->events[usual->count].output;
            content = event;
        }
        usual->chunks++;
        at = next;
    }
    return !usual->outputs || (reading->field[R_template] == Py_None && learned > 3 + plain / 4);
}

/* What a reading counts, while the events of a read are taken. */
typedef struct {
    int64_t first_event, first_token, first_answer, last_token, end, output_events, max_gap, max_gap_error, stamp_error,
        unsure_at, unsure_error;
} Counts;
#define COUNTS(F)                                                                                                      \
    F(first_event) F(first_token) F(first_answer) F(last_token) F(end) F(output_events) F(max_gap) F(max_gap_error)    \
    F(stamp_error) F(unsure_at) F(unsure_error)

static int load_counts(State *reading, Counts *counts)
{
    int fits = 1;
#define LOAD(name) counts->name = number_of(reading->field[R_##name], &fits);
    COUNTS(LOAD)
#undef LOAD
    return fits;
}

/* -1 with an exception. `stored`: what the fields hold now. */
static int store_counts(State *reading, const Counts *counts, Counts *stored)
{
#define STORE(name)                                                                                                    \
    if (counts->name != stored->name && put_number(reading, R_##name, counts->name) < 0)                               \
        return -1;
    COUNTS(STORE)
#undef STORE
    *stored = *counts;
    return 0;
}

static int append_number(PyObject *flow, PyObject *name, int64_t value)
{
    PyObject *list = PyObject_GetAttr(flow, name), *number = PyLong_FromLongLong(value);
    int failed = list == NULL || number == NULL || PyList_Append(list, number) < 0;
    Py_XDECREF(list);
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

/* A count of tokens: a number, and no bool, that fits into 31 bits. */
static int is_count(PyObject *value)
{
    int fits = Py_TYPE(value) == &PyLong_Type;
    int64_t number = fits ? number_of(value, &fits) : 0;
    return fits && number >= 0 && number < 1LL << 31;
}

static PyObject *token_count(PyObject *Py_UNUSED(module), PyObject *value)
{
    PyObject *count = is_count(value) ? value : Py_None;
    Py_INCREF(count);
    return count;
}

/* Reading._read_usage, which is left to Python where the counts are not those of chat, or of no output. -1 with an
   exception. What the reading counts has been stored. */
static int take_usage(State *reading, const Counts *counts, PyObject *usage)
{
    PyObject *prompt = PyObject_GetAttr(usage, name_prompt_tokens), *output = PyObject_GetAttr(usage, name_completion_tokens);
    int failed = prompt == NULL || output == NULL, fits = 1;
    if (!failed && is_count(prompt) && is_count(output) && PyObject_IsTrue(output)) {
        put_same(reading, R_usage_counts, usage);
        if (counts->output_events == 1 && number_of(reading->field[R_first_event_tokens], &fits) == 0 && fits &&
            PyObject_Size(reading->field[R_finish_reason]) == 0)
            put_same(reading, R_first_event_tokens, output);
    } else if (!failed) {
        PyObject *done = PyObject_CallMethod((PyObject *)reading, "_read_usage", "O", usage);
        failed = done == NULL;
        Py_XDECREF(done);
    }
    Py_XDECREF(prompt);
    Py_XDECREF(output);
    return failed ? -1 : 0;
}

/* Reading.take. -1 with an exception. */
static int take_events(State *reading, Counts *counts, Counts *stored, const Said *events, int count, int64_t stamp,
                       int64_t error)
{
    PyObject *flow = reading->field[R_flow];
    if (count && counts->first_event < 0)
        counts->first_event = stamp;
    for (int i = 0; i < count; i++) {
        const Said *said = &events[i];
        if (said->output && counts->last_token < 0) {
            counts->first_token = stamp;
            counts->stamp_error = error;
        }
        if (said->answer && counts->first_answer < 0)
            counts->first_answer = stamp;
        if (said->finish != NULL) {
            PyObject *reason = PyUnicode_DecodeUTF8(said->finish, said->finish_size, "strict");
            if (reason == NULL)
                return -1;
            put(reading, R_finish_reason, reason);
            counts->end = stamp;
        }
        if (said->output) {
            if (counts->last_token >= 0) {
                int64_t gap = stamp - counts->last_token;
                if (append_number(flow, name_gaps, gap) < 0)
                    return -1;
                if (gap > counts->max_gap) {
                    counts->max_gap = gap;
                    counts->max_gap_error = error;
                }
            }
            if (append_number(flow, name_instants, stamp) < 0)
                return -1;
            counts->output_events++;
            counts->last_token = counts->end = stamp;
        }
        if (said->usage != NULL) {
            if (store_counts(reading, counts, stored) < 0 || take_usage(reading, counts, said->usage) < 0)
                return -1;
        }
    }
    return 0;
}

/* Reading.take_unsure, of the first `unsure` events and the others. -1 with an exception. */
static int take_unsure(State *reading, Counts *counts, Counts *stored, const Usual *usual, int unsure, int64_t stamp,
                       int64_t error, int one_write)
{
    int64_t before = counts->output_events, largest = counts->max_gap;
    if (take_events(reading, counts, stored, usual->events, unsure, stamp, error) < 0)
        return -1;
    int64_t outputs = counts->output_events - before;
    if (take_events(reading, counts, stored, usual->events + unsure, usual->count - unsure, stamp, 0) < 0)
        return -1;
    if (counts->output_events > before + outputs)
        counts->unsure_at = -1;
    else if (outputs) {
        counts->unsure_at = stamp;
        counts->unsure_error = error;
        if (PyObject_Size(reading->field[R_finish_reason]) > 0) {
            outputs--;
            if (counts->output_events > 1) { /* both are not negative: stamps grow */
                int64_t gap = (stamp - counts->first_token) / (counts->output_events - 1);
                counts->unsure_error = error < gap ? error : gap;
            }
        }
    }
    if (outputs && !one_write) {
        PyObject *errors = PyObject_GetAttr(reading->field[R_flow], name_errors);
        PyObject *pair = errors == NULL ? NULL : Py_BuildValue("LL", (long long)error, (long long)outputs);
        int failed = pair == NULL || PyList_Append(errors, pair) < 0;
        Py_XDECREF(errors);
        Py_XDECREF(pair);
        if (failed)
            return -1;
    }
    if ((one_write || !outputs) && counts->max_gap > largest)
        counts->max_gap_error = 0;
    return 0;
}

/* The events of a usual read: Exchange._take_read from there on. -1 with an exception. */
static int take_usual_events(State *exchange, State *reading, Counts *counts, Counts *stored, const Usual *usual,
                             PyObject *read_at_object, int64_t stamp, int64_t read_at, int64_t empty_at, int64_t sent)
{
    int first = counts->first_token < 0, single = usual->chunks == 1;
    if (usual->count == 0)
        return 0;
    if (!first && single) {
        if (take_events(reading, counts, stored, usual->events, usual->count, stamp, 0) < 0)
            return -1;
    } else {
        int64_t earliest = first && sent > empty_at ? sent : empty_at;
        int unsure = usual->ended ? usual->count : single ? 0 : usual->count - 1;
        if (take_unsure(reading, counts, stored, usual, unsure, stamp, stamp - earliest, single) < 0)
            return -1;
    }
    if (first && counts->first_token >= 0) {
        if (put_number(exchange, X_client_lag, read_at - stamp) < 0)
            return -1;
        if (exchange->field[X_on_first] != Py_None) {
            PyObject *told;
            if (store_counts(reading, counts, stored) < 0 ||
                (told = PyObject_CallFunctionObjArgs(exchange->field[X_on_first], reading->field[R_first_token], NULL)) ==
                    NULL)
                return -1;
            Py_DECREF(told);
        }
    }
    put_same(exchange, X_progress, read_at_object);
    return 0;
}

/* The end of a usual answer: Exchange._complete. -1 with an exception. */
static int complete(State *exchange, State *reading, PyObject *stamp)
{
    PyObject *failure = NULL;
    int sound = 1;
    if (PyObject_Size(reading->field[R_error]) == 0 && PyObject_Size(reading->field[R_malformed]) == 0 &&
        (sound = PySet_Contains(endings, reading->field[R_finish_reason])) > 0 &&
        number_of(reading->field[R_first_event], &sound) >= 0 && sound) {
        failure = Py_None;
        Py_INCREF(failure);
    } else if (sound >= 0)
        failure = PyObject_CallMethod((PyObject *)reading, "judge", "OOO", Py_True, Py_False, Py_True);
    if (failure == NULL)
        return -1;
    put(exchange, X_failure, failure);
    put_same(exchange, X_done, stamp);
    return 0;
}

/* Take a read if it is usual: 1 if the answer is over, 0 if not, 2 if it is not usual, -1 with an exception. */
static int take_usual(State *exchange, PyObject *read)
{
    State *response = (State *)exchange->field[X_response], *decoder = (State *)exchange->field[X_decoder];
    State *reading = (State *)exchange->field[X_reading];
    if (!PyTuple_Check(read) || PyTuple_Size(read) != 5 || !PyBytes_Check(PyTuple_GetItem(read, 0)) ||
        Py_TYPE((PyObject *)response) != response_class || Py_TYPE((PyObject *)decoder) != decoder_class || Py_TYPE((PyObject *)reading) != reading_class)
        return 2;
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(PyTuple_GetItem(read, 0), &data, &size) < 0)
        return -1;
    Usual usual = {.count = 0};
    Counts counts, stored;
    int fits = 1, result = -1;
    PyObject *stamp_object = PyTuple_GetItem(read, 1), *read_at_object = PyTuple_GetItem(read, 2);
    int64_t stamp = number_of(stamp_object, &fits), read_at = number_of(read_at_object, &fits);
    int64_t empty_at = number_of(PyTuple_GetItem(read, 3), &fits), sent = number_of(exchange->field[X_sent], &fits);
    int64_t received = number_of(exchange->field[X_bytes_received], &fits);
    if (!fits || size == 0 || !load_counts(reading, &counts) ||
        !look(exchange, response, decoder, reading, data, size, &usual) || stamp < counts.first_token) {
        forget(&usual);
        return 2;
    }
    stored = counts;
    Py_INCREF((PyObject *)reading); /* who is told of the first output may send the request again */
    Py_INCREF((PyObject *)response);
    if (put_number(exchange, X_bytes_received, received + size) < 0)
        goto over;
    if (usual.head != NULL) {
        static const int places[] = {P_status, P_headers, P__mode, P__bytes_left, P_reusable, P_uses_left, P_idle_limit_s};
        for (int i = 0; i < 7; i++)
            put_same(response, places[i], PyTuple_GetItem(usual.head, i));
        put_same(response, P_chunked, Py_True);
        put_same(response, P_until_close, Py_False);
        put_same(exchange, X_first_byte, stamp_object);
        put_same(exchange, X_kernel_stamp, PyTuple_GetItem(read, 4));
        put_same(exchange, X_is_event_stream, Py_True);
        put_same(exchange, X_at_start, Py_True);
    }
    if (usual.chunks)
        put_same(decoder, D_started, Py_True);
    if (usual.ended) {
        put_same(response, P__mode, mode_end);
        put_same(response, P_complete, Py_True);
        put_same(response, P_surplus, no_bytes);
        put_same(exchange, X_at_start, Py_False);
    }
    if (take_usual_events(exchange, reading, &counts, &stored, &usual, read_at_object, stamp, read_at, empty_at, sent) <
            0 ||
        store_counts(reading, &counts, &stored) < 0)
        goto over;
    result = usual.ended ? (complete(exchange, reading, stamp_object) < 0 ? -1 : 1) : 0;
over:
    Py_DECREF((PyObject *)reading);
    Py_DECREF((PyObject *)response);
    forget(&usual);
    return result;
}

/* Call a method of Python with the parts of a read. 1 if it says so, 0 if not, -1 with an exception. */
static int by_python(State *exchange, const char *name, PyObject *read)
{
    PyObject *method = PyObject_GetAttrString((PyObject *)exchange, name), *parts = PySequence_Tuple(read);
    PyObject *over = method == NULL || parts == NULL ? NULL : PyObject_CallObject(method, parts);
    Py_XDECREF(method);
    Py_XDECREF(parts);
    int result = over == NULL ? -1 : PyObject_IsTrue(over);
    Py_XDECREF(over);
    return result;
}

static PyObject *exchange_arrived(PyObject *self, PyObject *reads)
{
    State *exchange = (State *)self;
    Py_ssize_t count = PySequence_Size(reads);
    if (count < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *read = PySequence_GetItem(reads, i);
        Py_ssize_t parts = read == NULL ? -1 : PySequence_Size(read);
        int over = parts < 0 ? -1 : parts == 3 ? 2 : take_usual(exchange, read);
        if (over == 2) {
            over = by_python(exchange, parts == 3 ? "_take_run" : "_take_read", read);
            over = parts == 3 && over > 0 ? 0 : over;
        }
        Py_XDECREF(read);
        if (over < 0)
            return NULL;
        if (over) {
            if (i + 1 < count) /* bytes after the end */
                put_same((State *)exchange->field[X_response], P_reusable, Py_False);
            Py_RETURN_TRUE;
        }
    }
    State *response = (State *)exchange->field[X_response], *reading = (State *)exchange->field[X_reading];
    int fits = 1, at_start = is_true(exchange, X_at_start);
    int patient = is_true(exchange, X_is_event_stream) && is_true(response, P_chunked) &&
                  number_of(reading->field[R_first_token], &fits) >= 0 && exchange->field[X_sink] == Py_None;
    put_same(exchange, X_patient, patient ? Py_True : Py_False);
    put_same(exchange, X_template, at_start ? reading->field[R_template] : Py_None);
    if (patient && !at_start)
        put_same(exchange, X_split, Py_True);
    Py_RETURN_FALSE;
}

static PyMethodDef exchange_methods[] = {
    {"fresh", exchange_fresh, METH_NOARGS, NULL},
    {"arrived", exchange_arrived, METH_O, NULL},
    {NULL},
};
static PyMethodDef response_methods[] = {{NULL}}, decoder_methods[] = {{NULL}}, reading_methods[] = {{NULL}};

/* Whether an inbox is that of a connection without TLS, whose request asked for so few events that no template is learned,
   and which has reads for it alone: the exchange, borrowed; else NULL. */
static State *usual_exchange(Inbox *inbox)
{
    State *exchange = (State *)inbox->busy;
    if (inbox->ended_at || inbox->held || inbox->run_count || inbox->template != Py_None || inbox->reads == NULL ||
        !PyList_Check(inbox->reads) || PyList_Size(inbox->reads) < 1 || inbox->tls != Py_None || inbox->closed ||
        exchange == NULL || exchange_class == NULL || Py_TYPE((PyObject *)exchange) != exchange_class ||
        Py_TYPE(exchange->field[X_reading]) != reading_class)
        return NULL;
    int fits = 1, whole = 1;
    int64_t learned = number_of(((State *)exchange->field[X_reading])->field[R_learned], &fits);
    if (number_of(exchange->field[X_first_byte], &fits) < 0) { /* it may be the end of an idle connection: 408 */
        PyObject *first = PyList_GetItem(inbox->reads, 0), *data = PyTuple_Check(first) ? PyTuple_GetItem(first, 0) : NULL;
        whole = data != NULL && PyBytes_Check(data) && PyBytes_Size(data) > 10 &&
                memcmp(PyBytes_AsString(data), "HTTP/1.1 2", 10) == 0;
        PyErr_Clear();
    }
    return fits && whole && learned == ENOUGH ? exchange : NULL;
}

/* Receiver.hand_over: -1 with an exception. */
static int hand_over(Receiver *receiver, PyObject *value)
{
    if (!is_inbox(value))
        return -1;
    Inbox *inbox = (Inbox *)value;
    PyObject *exchange = (PyObject *)usual_exchange(inbox);
    if (exchange == NULL)
        return 0;
    Py_INCREF(exchange);
    PyObject *reads = receiver_take((PyObject *)receiver, value);
    inbox->queued = 0;
    PyObject *over = reads == NULL ? NULL : exchange_arrived(exchange, reads);
    Py_XDECREF(reads);
    if (over == Py_False)
        inbox->patient = (char)is_true((State *)exchange, X_patient);
    Py_DECREF(exchange);
    Py_XDECREF(over); /* it is one of two that last */
    return over == NULL ? -1 : over == Py_True ? 2 : 1;
}

static PyObject *receiver_hand_over(PyObject *self, PyObject *value)
{
    int how = hand_over((Receiver *)self, value);
    return how < 0 ? NULL : PyLong_FromLong(how);
}

/* An attribute that is a number; `*fits` becomes 0 where it is none, or not there. */
static int64_t number_in(PyObject *owner, PyObject *name, int *fits)
{
    PyObject *value = PyObject_GetAttr(owner, name);
    int64_t number = number_of(value, fits);
    Py_XDECREF(value);
    return number;
}

/* Whether an attribute is this object, or, for NULL, an empty list. */
static int is_same(PyObject *owner, PyObject *name, PyObject *expected)
{
    PyObject *value = PyObject_GetAttr(owner, name);
    int same = value != NULL && (expected == NULL ? PyList_Check(value) && PyList_Size(value) == 0 : value == expected);
    Py_XDECREF(value);
    return same;
}

static int set_number(PyObject *owner, PyObject *name, int64_t value)
{
    PyObject *number = PyLong_FromLongLong(value);
    int failed = number == NULL || PyObject_SetAttr(owner, name, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

/* Whether a connection can take a request. */
static int is_free(const Inbox *inbox)
{
    return !inbox->closed && inbox->tls == Py_None && inbox->unsent != NULL && PyList_Check(inbox->unsent) &&
           PyList_Size(inbox->unsent) == 0;
}

/* Receiver.carry */
static PyObject *receiver_carry(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count)
{
    int fits = 1;
    if (count != 4 || exchange_class == NULL || Py_TYPE(args[0]) != exchange_class || !PySet_Check(args[3]))
        return PyLong_FromLong(-1);
    State *exchange = (State *)args[0];
    PyObject *idle = args[1], *awaited = args[3], *head = exchange->field[X_head], *body = exchange->field[X_payload];
    Py_ssize_t size = PySequence_Size(idle);
    PyObject *connection = size > 0 ? PySequence_GetItem(idle, size - 1) : NULL;
    Inbox *inbox;
    if (connection == NULL || !PyObject_TypeCheck(connection, inbox_type) || !is_free(inbox = (Inbox *)connection) ||
        !PyBytes_Check(head) || !PyBytes_Check(body))
        goto unusual;
    int64_t now = clock_ns(CLOCK_MONOTONIC), reuse = number_of(args[2], &fits);
    int64_t before = number_of(exchange->field[X_bytes_sent], &fits);
    if (!fits || now - inbox->idle_since > reuse)
        goto unusual;
    PyObject *taken = PyObject_CallMethodObjArgs(idle, name_pop, NULL);
    Py_XDECREF(taken);
    if (taken == NULL || put_number(exchange, X_ready, now) < 0)
        goto failed;
    Py_INCREF((PyObject *)exchange);
    replace(&inbox->busy, (PyObject *)exchange);
    inbox->patient = 0;
    put_same(exchange, X_connection, connection);
    put_same(exchange, X_reused, inbox->served > 0 ? Py_True : Py_False);
    Py_INCREF(Py_None);
    replace(&inbox->template, Py_None);
    if (inbox->served <= 0 && /* the first on its connection */
        (put_number(exchange, X_tcp, inbox->tcp_ns) < 0 || put_number(exchange, X_tls, inbox->tls_ns) < 0))
        goto failed;
    if (PySet_Add(awaited, (PyObject *)exchange) < 0)
        goto failed;
    struct iovec vectors[2] = {{.iov_base = PyBytes_AsString(head), .iov_len = (size_t)PyBytes_Size(head)},
                               {.iov_base = PyBytes_AsString(body), .iov_len = (size_t)PyBytes_Size(body)}};
    int64_t at = 0, whole = (int64_t)(vectors[0].iov_len + vectors[1].iov_len);
    int64_t sent = sent_parts(inbox->fd, vectors, 2, &at);
    if (put_number(exchange, X_sent, at) < 0 || put_number(exchange, X_bytes_sent, before + whole) < 0)
        goto failed;
    Py_DECREF(connection);
    return PyLong_FromLongLong(sent < 0 ? 0 : whole - sent); /* after an error, the next read reports it */
unusual:
    Py_XDECREF(connection);
    PyErr_Clear();
    return PyLong_FromLong(-1);
failed:
    Py_DECREF(connection);
    return NULL;
}

/* Receiver.free */
static PyObject *receiver_free(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !PyObject_TypeCheck(args[0], inbox_type) || !PyDict_Check(args[2]) || !PySet_Check(args[3]))
        Py_RETURN_NONE;
    Inbox *inbox = (Inbox *)args[0];
    PyObject *idle = args[1], *in_flight = args[2], *awaited = args[3], *busy = inbox->busy;
    State *exchange = (State *)busy;
    if (busy == NULL || exchange_class == NULL || Py_TYPE(busy) != exchange_class || is_true(exchange, X_over) ||
        Py_TYPE(exchange->field[X_response]) != response_class)
        Py_RETURN_NONE;
    State *response = (State *)exchange->field[X_response];
    if (!is_true(response, P_complete) || !is_true(response, P_reusable) || response->field[P_uses_left] != Py_None ||
        response->field[P_idle_limit_s] != Py_None || inbox->unsent == NULL || !PyList_Check(inbox->unsent) ||
        PyList_Size(inbox->unsent) != 0)
        Py_RETURN_NONE;
    Py_INCREF(Py_None);
    inbox->busy = Py_None; /* its reference is that of `busy` now */
    inbox->served++;
    if (move((Receiver *)self, inbox, 0) < 0)
        goto failed;
    inbox->idle_since = clock_ns(CLOCK_MONOTONIC);
    PyObject *done = PyObject_CallMethodObjArgs(idle, name_append, args[0], NULL);
    Py_XDECREF(done);
    if (done == NULL)
        goto failed;
    put_same(exchange, X_connection, Py_None);
    put_same(exchange, X_payload, no_bytes);
    if (PySet_Discard(awaited, busy) < 0)
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

static int follow(Receiver *receiver, PyObject *connection);

/* Receiver.hand_over_queued: the time, or -1 with an exception. `*others` becomes 1 where Python was called for one. */
static int64_t hand_over_slice(Receiver *receiver, int64_t slice_ns, PyObject *other, int *others)
{
    int64_t now = clock_ns(CLOCK_MONOTONIC), ends = now + slice_ns;
    for (int handed = 1; PyObject_Size(receiver->queue) > 0; handed++) {
        PyObject *connection = PyObject_CallFunctionObjArgs(receiver->queue_popleft, NULL), *done = NULL;
        int how = connection == NULL ? -1 : hand_over(receiver, connection);
        int followed = how == 2 ? follow(receiver, connection) : 0, failed = how < 0 || followed < 0;
        if (how == 2 && !followed) {
            PyObject *peer = ((Inbox *)connection)->peer;
            Py_INCREF(peer);
            done = PyObject_CallMethodObjArgs(peer, name_over, connection, NULL);
            Py_DECREF(peer);
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

static PyObject *receiver_hand_over_queued(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    int fits = count == 2, others = 0;
    int64_t slice_ns = fits ? number_of(args[0], &fits) : 0;
    if (!fits) {
        PyErr_SetString(PyExc_TypeError, "hand_over_queued(slice_ns, other)");
        return NULL;
    }
    int64_t now = hand_over_slice((Receiver *)self, slice_ns, args[1], &others);
    return now < 0 ? NULL : PyLong_FromLongLong(now);
}
