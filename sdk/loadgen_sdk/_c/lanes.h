/* From one request of a lane to the next. Part of _compiled.c. */

/* Receiver.follow */
static PyObject *receiver_follow(PyObject *self, PyObject *value)
{
    if (value != Py_None && (!PyTuple_Check(value) || PyTuple_Size(value) != F_COUNT)) {
        PyErr_SetString(PyExc_TypeError, "what is followed is a tuple of what a pool and a Succession have");
        return NULL;
    }
    static long long last;
    PyObject *before = ((Receiver *)self)->followed;
    ((Receiver *)self)->following = ++last;
    Py_CLEAR(((Receiver *)self)->known);
    ((Receiver *)self)->span = NULL;
    Py_INCREF(value);
    ((Receiver *)self)->followed = value == Py_None ? NULL : value;
    if (value == Py_None)
        Py_DECREF(value);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

/* A number of a list; `*fits` becomes 0 where there is none. */
static int64_t number_at(PyObject *list, int64_t at, int *fits)
{
    if (!PyList_Check(list) || at < 0 || at >= PyList_Size(list)) {
        *fits = 0;
        return 0;
    }
    return number_of(PyList_GetItem(list, (Py_ssize_t)at), fits);
}

/* These two: -1 with an exception. */
static int add_at(PyObject *list, int64_t at, int64_t more)
{
    int fits = 1;
    PyObject *sum = PyLong_FromLongLong(number_at(list, at, &fits) + more);
    return sum == NULL ? -1 : PyList_SetItem(list, (Py_ssize_t)at, sum);
}

static int add_in(PyObject *owner, PyObject *name, int64_t more)
{
    int fits = 1;
    int64_t sum = number_in(owner, name, &fits) + more;
    if (fits)
        return set_number(owner, name, sum);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "what is counted is a number");
    return -1;
}

/* The head of a request whose pool has the lines `head`; NULL with an exception. */
static PyObject *head_of(PyObject *head, PyObject *name, int64_t number, Py_ssize_t length)
{
    char numbers[2][24], *ends[2];
    int64_t of[2] = {number, length};
    for (int i = 0; i < 2; i++) {
        char *to = ends[i] = numbers[i] + sizeof numbers[i];
        do
            *--to = (char)('0' + of[i] % 10);
        while (of[i] /= 10);
        of[i] = to - numbers[i];
    }
    const struct {
        const char *at;
        Py_ssize_t size;
    } parts[] = {{PyBytes_AsString(head), PyBytes_Size(head)},
                 {"X-Request-Id: ", 14},
                 {PyBytes_AsString(name), PyBytes_Size(name)},
                 {numbers[0] + of[0], ends[0] - numbers[0] - of[0]},
                 {"\r\nContent-Length: ", 18},
                 {numbers[1] + of[1], ends[1] - numbers[1] - of[1]},
                 {"\r\n\r\n", 4}};
    Py_ssize_t size = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        size += parts[i].size;
    PyObject *made = PyBytes_FromStringAndSize(NULL, size);
    char *to = made == NULL ? NULL : PyBytes_AsString(made);
    for (size_t i = 0; to != NULL && i < sizeof parts / sizeof *parts; i++) {
        memcpy(to, parts[i].at, (size_t)parts[i].size);
        to += parts[i].size;
    }
    return made;
}

/* A lane whose request has ended: where it stands, and what comes next. */
typedef struct {
    Begun ended; /* the request that ended */
    int64_t next;
    int counted; /* its stage has a number of requests */
    Row row;
} Lane;

/* How many lanes a stage has, and the number behind its last request. -1 where it does not say. */
static int look_at_span(Receiver *receiver, PyObject *span)
{
    if (receiver->span == span)
        return 0;
    int fits = 1;
    PyObject *chains = PyObject_GetAttr(span, name_chains);
    receiver->lanes = number_in(span, name_lanes, &fits);
    receiver->behind = chains == Py_None ? INT64_MAX : number_of(chains, &fits) + number_in(span, name_first_chain, &fits);
    Py_XDECREF(chains);
    receiver->span = fits ? span : NULL;
    return fits ? 0 : -1;
}

#define WITH(name) PyTuple_GetItem(with, F_##name)

/* What its owner keeps of a request, where the owner is the one that is followed: 1, else 0. */
static int look_at_begun(Receiver *receiver, const Exchange *exchange, Begun *begun)
{
    PyObject *with = receiver->followed, *on_done = exchange->on_done;
    int fits = 1;
    if (exchange->begun_by == receiver->following && exchange->begun.on_done == on_done) {
        *begun = exchange->begun;
        return 1;
    }
    if ((PyObject *)Py_TYPE(on_done) != WITH(partial) || !is_same(on_done, name_func, WITH(ended)))
        return 0;
    PyObject *args = PyObject_GetAttr(on_done, name_args);
    fits = args != NULL && PyTuple_Check(args) && PyTuple_Size(args) == 3;
    if (fits) {
        PyObject *start = PyTuple_GetItem(args, 0);
        *begun = (Begun){on_done, start, PyTuple_GetItem(args, 2), number_in(start, name_number, &fits),
                         number_in(start, name_session, &fits), number_in(start, name_stage, &fits),
                         number_in(start, name_lane, &fits)};
    }
    Py_XDECREF(args); /* which are those of `on_done` */
    return fits;
}

/* Whether that is all: a request of a lane has ended well, and its next one is due at once, before all else. Nothing is
   changed. -1 with an exception. */
static int look_at_lane(Receiver *receiver, const Inbox *inbox, Lane *lane)
{
    PyObject *busy = inbox->busy, *with = receiver->followed;
    Exchange *exchange = (Exchange *)busy;
    int fits = 1, usual = 0;
    if (busy == NULL || exchange_class == NULL || Py_TYPE(busy) != exchange_class || exchange->over ||
        !look_at_begun(receiver, exchange, &lane->ended))
        goto over;
    PyObject *spans = WITH(spans);
    int64_t number = lane->ended.number, session = lane->ended.session, stage = lane->ended.stage, at = lane->ended.lane;
    int64_t begin = number_of(WITH(start_ns), &fits), worker = number_of(WITH(worker), &fits);
    if (!fits || at < 0 || session >= 0 || stage < 0 || !PyTuple_Check(spans) || stage >= PyTuple_Size(spans) ||
        number_at(WITH(refusals), 0, &fits) != 0)
        goto over;
    if (look_at_span(receiver, PyTuple_GetItem(spans, (Py_ssize_t)stage)) < 0)
        goto over;
    lane->next = number + receiver->lanes;
    lane->counted = receiver->behind != INT64_MAX;
    int64_t ends = number_at(WITH(ends), stage, &fits), left = lane->counted ? number_at(WITH(left), stage, &fits) : 2;
    const int64_t place[ROW_PLACE] = {number, number, stage, worker, 0, session, 0, at};
    memcpy(lane->row.place, place, sizeof place);
    if (!fits || lane->next >= receiver->behind || left < 2 || !write_row(&lane->row, busy, begin, lane->ended.built))
        goto over;
    int64_t now = clock_ns(CLOCK_MONOTONIC), reuse = number_in(WITH(pool), name_reuse_ns, &fits);
    PyObject *key = PyLong_FromLongLong(number);
    usual = fits && key != NULL && lane->row.ended < ends && begin + lane->row.ended <= now && now < receiver->wake_at &&
            reuse > USUAL_REUSE_NS && PyDict_GetItemWithError(WITH(started), key) == lane->ended.start &&
            PyDict_Contains(WITH(exchanges), key) == 1;
    Py_XDECREF(key);
over:
    PyErr_Clear();
    return usual;
}

/* Drop a number of a dictionary. -1 with an exception. */
static int drop(PyObject *dictionary, PyObject *number)
{
    return number == NULL ? -1 : PyDict_DelItem(dictionary, number);
}

/* Record what has ended: Driver._on_done and Dispatcher.finished. -1 with an exception. */
static int end_of_lane(PyObject *with, const Lane *lane)
{
    PyObject *number = PyLong_FromLongLong(lane->row.place[0]), *counters = WITH(counters);
    int failed = drop(WITH(exchanges), number) < 0 || drop(WITH(started), number) < 0 ||
                 add_in(counters, name_ok, 1) < 0 ||
                 (lane->row.ttft >= 0 && tell(WITH(recent), PyLong_FromLongLong(lane->row.ttft)) < 0) ||
                 tell(WITH(row), PyBytes_FromStringAndSize((const char *)lane->row.bytes, row_bytes)) < 0 ||
                 (lane->counted && add_at(WITH(left), lane->ended.stage, -1) < 0);
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

enum { BODY_NUMBERS = 5 };

/* Where the numbers of a request's body are, or NULL. */
static const int64_t *find_body(const int64_t *rows, Py_ssize_t count, int64_t number)
{
    Py_ssize_t low = 0, high = count;
    if (count > 1 && number >= rows[0] && rows[BODY_NUMBERS] > rows[0]) { /* usually they follow each other evenly */
        int64_t at = (number - rows[0]) / (rows[BODY_NUMBERS] - rows[0]);
        if (at < count && rows[at * BODY_NUMBERS] == number)
            return rows + at * BODY_NUMBERS;
    }
    while (low < high) {
        Py_ssize_t middle = low + (high - low) / 2;
        if (rows[middle * BODY_NUMBERS] < number)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && rows[low * BODY_NUMBERS] == number ? rows + low * BODY_NUMBERS : NULL;
}

/* The body of a request that was built in advance, and whose block of the file was read; NULL, without an exception, where
   that is not so. `*built`: what is known of it; NULL, with an exception, where that failed. */
static PyObject *body_of(Receiver *receiver, PyObject *with, int64_t stage, int64_t number, PyObject **built)
{
    PyObject *lists = WITH(rows), *rows = PyList_Check(lists) && stage < PyList_Size(lists) ? PyList_GetItem(lists, (Py_ssize_t)stage) : NULL;
    PyObject *blocks = WITH(blocks), *body = NULL;
    int fits = 1;
    int64_t block_bytes = number_of(WITH(block_bytes), &fits), tokens = 0, asked = 0;
    Py_buffer buffer;
    if (rows == NULL || !fits || block_bytes <= 0 || !PyDict_Check(blocks))
        return NULL;
    if (PyObject_GetBuffer(rows, &buffer, PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        return NULL;
    }
    const int64_t *row = find_body(buffer.buf, buffer.len / (BODY_NUMBERS * (Py_ssize_t)sizeof *row), number);
    if (row != NULL) {
        int64_t offset = row[1], length = row[2];
        tokens = row[3];
        asked = row[4];
        PyObject *key = offset < 0 || length <= 0 ? NULL : PyLong_FromLongLong(offset / block_bytes);
        PyObject *block = key == NULL ? NULL : PyDict_GetItemWithError(blocks, key);
        int64_t at = offset % block_bytes;
        if (block != NULL && PyBytes_Check(block) && length <= PyBytes_Size(block) - at)
            body = PyBytes_FromStringAndSize(PyBytes_AsString(block) + at, (Py_ssize_t)length);
        Py_XDECREF(key);
        PyErr_Clear();
    }
    PyBuffer_Release(&buffer);
    if (body != NULL && (receiver->known == NULL || receiver->known_tokens != tokens || receiver->known_asked != asked)) {
        PyObject *known = PyObject_CallFunction(WITH(known), "LL", (long long)tokens, (long long)asked);
        PyObject *before = receiver->known;
        receiver->known = known;
        receiver->known_tokens = tokens;
        receiver->known_asked = asked;
        Py_XDECREF(before);
    }
    *built = body == NULL ? NULL : receiver->known;
    Py_XINCREF(*built);
    return body;
}

/* Start the next request of a lane on this connection, which is free: Driver._send and Pool.send. -1 with an exception. */
static int next_of_lane(Receiver *receiver, PyObject *with, const Lane *lane, PyObject *connection)
{
    int failed = 1, fits = 1;
    int64_t due = lane->row.ended + number_of(WITH(start_ns), &fits);
    PyObject *flow = PyList_GetItem(WITH(flows), (Py_ssize_t)lane->ended.stage);
    PyObject *number = PyLong_FromLongLong(lane->next), *stage = PyLong_FromLongLong(lane->ended.stage), *head = NULL;
    PyObject *of_lane = PyLong_FromLongLong(lane->ended.lane), *ended = PyLong_FromLongLong(lane->row.ended);
    PyObject *start = NULL, *built = NULL, *asked = NULL, *on_done = NULL, *pair = NULL;
    PyObject *body = NULL;
    Exchange *exchange = NULL;
    if (number == NULL || stage == NULL || flow == NULL || of_lane == NULL || ended == NULL ||
        (start = PyObject_CallFunctionObjArgs(WITH(start), number, stage, never, zero, of_lane, ended, NULL)) == NULL)
        goto over;
    if ((body = body_of(receiver, with, lane->ended.stage, lane->next, &built)) == NULL) {
        PyObject *taken = PyObject_CallFunctionObjArgs(WITH(take), stage, number, NULL);
        if (taken == NULL || !PyArg_ParseTuple(taken, "SO", &body, &built))
            body = built = NULL;
        Py_XINCREF(body);
        Py_XINCREF(built);
        Py_XDECREF(taken);
    }
    if (built == NULL || /* with an exception */
        (asked = PyObject_GetAttr(built, name_asked_output)) == NULL ||
        (head = head_of(WITH(head), WITH(name), lane->next, PyBytes_Size(body))) == NULL ||
        (on_done = PyObject_CallFunctionObjArgs(WITH(partial), WITH(ended), start, zero, built, NULL)) == NULL ||
        (exchange = (Exchange *)made(exchange_class)) == NULL)
        goto over;
    const Given given = {
        .request = Py_None, .head = head, .payload = body, .on_done = on_done, .flow = flow, .sink = Py_None,
        .on_first = Py_None, .due = due, .asked_output = number_of(asked, &fits), .stream = WITH(stream) == Py_True,
        .keep_text = WITH(keep_text) == Py_True, .keep_headers = WITH(keep_headers) == Py_True};
    if (begin_exchange(exchange, &given) < 0)
        goto over;
    exchange->deadline = due + number_of(WITH(timeout), &fits);
    exchange->begun = (Begun){on_done, start, built, lane->next, -1, lane->ended.stage, lane->ended.lane};
    exchange->begun_by = receiver->following;
    if ((pair = Py_BuildValue("OO", zero, (PyObject *)exchange)) == NULL || PyDict_SetItem(WITH(started), number, start) < 0 ||
        PyDict_SetItem(WITH(exchanges), number, pair) < 0 ||
        PyDict_SetItem(WITH(in_flight), (PyObject *)exchange, Py_None) < 0 || add_at(WITH(sent), lane->ended.stage, 1) < 0 ||
        add_in(WITH(counters), name_sent, 1) < 0 || add_in(WITH(pool), name_sent_this_tick, 1) < 0)
        goto over;
    int64_t left = PyBytes_Check(body) && is_free((Inbox *)connection) ? carry(exchange, connection, WITH(awaited)) : -1;
    failed = left == -2;
    if (left != 0 && !failed) {
        PyObject *unsent = left == -1 && keep_idle(WITH(idle), connection) < 0 ? NULL : PyLong_FromLongLong(left);
        PyObject *told = unsent == NULL
                             ? NULL
                             : PyObject_CallMethodObjArgs(WITH(pool), name_carried, (PyObject *)exchange, unsent, NULL);
        failed = told == NULL;
        Py_XDECREF(told);
        Py_XDECREF(unsent);
    }
over:
    Py_XDECREF(number);
    Py_XDECREF(stage);
    Py_XDECREF(of_lane);
    Py_XDECREF(ended);
    Py_XDECREF(start);
    Py_XDECREF(body);
    Py_XDECREF(built);
    Py_XDECREF(head);
    Py_XDECREF(asked);
    Py_XDECREF(on_done);
    Py_XDECREF(pair);
    Py_XDECREF((PyObject *)exchange);
    return failed ? -1 : 0;
}

/* Go on by itself from the end of an answer: 1 if that was done; 0: all is left as it was; -1 with an exception. */
static int follow(Receiver *receiver, PyObject *connection)
{
    PyObject *with = receiver->followed;
    Lane lane;
    if (with == NULL || ((Inbox *)connection)->peer != WITH(pool) || !look_at_lane(receiver, (Inbox *)connection, &lane)) {
        PyErr_Clear();
        return 0;
    }
    Py_INCREF(with); /* who is called may end it */
    PyObject *freed = freed_by(receiver, (Inbox *)connection, WITH(in_flight), WITH(awaited));
    int done = freed == NULL ? -1 : freed != Py_None;
    if (done > 0) {
        ((Exchange *)freed)->over = 1;
        if (end_of_lane(with, &lane) < 0 || next_of_lane(receiver, with, &lane, connection) < 0)
            done = -1;
    }
    Py_XDECREF(freed);
    Py_DECREF(with);
    return done;
}
#undef WITH
