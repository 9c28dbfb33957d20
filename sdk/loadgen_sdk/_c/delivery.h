/* Delivers reads to exchanges, and sends and ends requests, in the usual case. Part of _compiled.c.
 *
 * Every other case is left to the reactor and the pool in Python, which are the reference. An
 * exchange is a request with its response. */

/* The result of delivering the reads of a socket buffer to the exchange of its connection.
 * `Receiver.deliver` returns it as a number. */
enum Delivery {
    DELIVERY_FAILED = -1, /* with an exception */
    LEFT_TO_PYTHON = 0,   /* nothing was done, because the case is not a usual one */
    DELIVERED = 1,        /* the response goes on */
    COMPLETED = 2,        /* the response is over */
};

/* -- delivering reads -------------------------------------------------------------------------- */

/* Return whether the first read of a buffer begins with the status line of a success (2xx).
 *
 * Another response needs Python: it may be a 408 with which a server ends an idle connection, which
 * is no response to the request. */
static int begins_successful_response(const SocketBuffer *buffer)
{
    if (PyList_Size(buffer->reads) == 0) {
        const Read *first = &buffer->first_waiting->read;
        return begins_with_success(first->data, first->size);
    }

    Read first;
    if (!parse_read_tuple(PyList_GetItem(buffer->reads, 0), &first))
        return 0;

    return begins_with_success(first.data, first.size);
}

/* Return whether C can deliver the reads of a buffer, as far as the buffer tells.
 *
 * Python handles a connection that has ended, that uses TLS, or whose response is long. There are
 * three signs of a long response: its socket is read late (`is_deferred`), events of it that differ
 * in their text alone were only counted, or they may be, because there is a template for them. */
static int has_ordinary_reads(const SocketBuffer *buffer)
{
    int is_open = !buffer->ended_at && !buffer->is_closed;
    int has_tls = buffer->tls != Py_None;
    if (!is_open || has_tls)
        return 0;

    int has_counted_reads = buffer->plain_read_count > 0;
    int has_template = buffer->template != Py_None;
    if (buffer->is_deferred || has_counted_reads || has_template)
        return 0;

    int has_read_list = buffer->reads != NULL && PyList_Check(buffer->reads);
    return has_read_list && count_reads(buffer) > 0;
}

/* Return the exchange (a request with its response) of a connection, borrowed.
 *
 * Return NULL if the connection has none, or if it is not of the registered class: only of that one
 * are the fields known here. */
static Exchange *find_exchange(const SocketBuffer *buffer)
{
    PyObject *exchange = buffer->exchange;
    int is_known =
        exchange != NULL && exchange_class != NULL && Py_TYPE(exchange) == exchange_class;
    return is_known ? (Exchange *)exchange : NULL;
}

/* Return whether a reader was created for a response of few events, from which it learns no
 * templates (the bytes around the text of an event, by which later events are recognised). */
static int expects_few_events(const ResponseReader *reader)
{
    return reader->learned_templates == NO_MORE_TEMPLATES;
}

/* Return the exchange (a request with its response, borrowed) to which C can deliver the reads of a
 * buffer, or NULL if the pool in Python has to deliver them.
 *
 * C delivers only short responses. Of a longer one, the pool also decides whether its socket is
 * read late. The first read must begin a response that reports a success. */
static Exchange *find_exchange_for_delivery(const SocketBuffer *buffer)
{
    if (!has_ordinary_reads(buffer))
        return NULL;

    Exchange *exchange = find_exchange(buffer);
    if (exchange == NULL || Py_TYPE(exchange->reader) != reader_class)
        return NULL;
    if (!expects_few_events((ResponseReader *)exchange->reader))
        return NULL;

    int is_first_read = exchange->head_received_at == NEVER;
    if (is_first_read && !begins_successful_response(buffer))
        return NULL;

    return exchange;
}

/* Feed the waiting reads of a buffer, for which no Python objects exist, to its exchange (a request
 * with its response). The buffer is empty and not in the queue afterwards. */
static enum FeedResult feed_waiting_reads_of_buffer(Receiver *receiver, SocketBuffer *buffer,
                                                    Exchange *exchange)
{
    if (buffer->is_queued)
        receiver->queued_reads -= buffer->waiting_count;
    buffer->is_queued = 0;
    WaitingRead *waiting = detach_waiting_reads(buffer);
    enum FeedResult result = feed_waiting_reads(exchange, waiting);
    free_waiting_reads(waiting);
    return result;
}

/* Feed all reads of a buffer, as Python objects, to its exchange (a request with its response). The
 * buffer is empty and not in the queue afterwards. */
static enum FeedResult feed_listed_reads(Receiver *receiver, SocketBuffer *buffer,
                                         Exchange *exchange)
{
    PyObject *reads = receiver_take_reads((PyObject *)receiver, (PyObject *)buffer);
    buffer->is_queued = 0;
    if (reads == NULL)
        return FEED_FAILED;
    enum FeedResult result = feed_read_sequence(exchange, reads);
    Py_DECREF(reads);
    return result;
}

/* Feed the reads of a buffer to its exchange, and empty the buffer.
 *
 * The usual reads are waiting ones, without Python objects. They become Python objects only if
 * something has asked for the list of reads before. */
static enum FeedResult feed_buffer(Receiver *receiver, SocketBuffer *buffer, Exchange *exchange)
{
    int has_python_reads = PyList_Size(buffer->reads) > 0;
    if (has_python_reads)
        return feed_listed_reads(receiver, buffer, exchange);
    return feed_waiting_reads_of_buffer(receiver, buffer, exchange);
}

/* Deliver the reads of a socket buffer to its exchange (a request with its response).
 *
 * Return LEFT_TO_PYTHON if the exchange is not one that C handles. While the response goes on, it
 * says whether its next reads may be batched, which means that they are delivered together. */
static enum Delivery deliver(Receiver *receiver, PyObject *value)
{
    if (!check_socket_buffer(value))
        return DELIVERY_FAILED;

    SocketBuffer *buffer = (SocketBuffer *)value;
    Exchange *exchange = find_exchange_for_delivery(buffer);
    if (exchange == NULL)
        return LEFT_TO_PYTHON;

    /* A function that is called meanwhile may remove the exchange from the buffer. */
    Py_INCREF((PyObject *)exchange);
    enum FeedResult result = feed_buffer(receiver, buffer, exchange);
    if (result == RESPONSE_GOES_ON)
        buffer->can_batch_reads = exchange->can_batch_reads;

    Py_DECREF((PyObject *)exchange);
    if (result == FEED_FAILED)
        return DELIVERY_FAILED;

    return result == RESPONSE_OVER ? COMPLETED : DELIVERED;
}

/* Receiver.deliver(buffer): deliver the reads of a buffer. Return a `Delivery` as a number. */
static PyObject *receiver_deliver(PyObject *self, PyObject *value)
{
    enum Delivery delivery = deliver((Receiver *)self, value);
    return delivery == DELIVERY_FAILED ? NULL : PyLong_FromLong(delivery);
}

/* -- sending a request ------------------------------------------------------------------------- */

/* Return whether everything that was sent on a connection has been accepted by its socket. */
static int has_sent_all(const SocketBuffer *buffer)
{
    return buffer->unsent != NULL && PyList_Check(buffer->unsent) &&
           PyList_Size(buffer->unsent) == 0;
}

/* Stands for the number of bytes that the socket did not accept if the request was left to
 * Python. */
enum { NOT_SENT = -1 };

/* Connect an exchange (a request with its response) with the idle connection that will carry it. */
static void assign_connection(Exchange *exchange, SocketBuffer *buffer)
{
    set_field(&buffer->exchange, (PyObject *)exchange);
    set_field(&exchange->connection, (PyObject *)buffer);

    /* What the last response said of its reads does not hold for the next one. */
    set_field(&buffer->template, Py_None);
    buffer->can_batch_reads = 0;

    exchange->is_connection_reused = buffer->responses_served > 0;
    if (!exchange->is_connection_reused) {
        exchange->tcp_connect_ns = buffer->tcp_connect_ns;
        exchange->tls_handshake_ns = buffer->tls_handshake_ns;
    }
}

/* Return the byte range of a Python bytes object. It stays valid as long as the object. */
static struct iovec vector_of_bytes(PyObject *bytes)
{
    return (struct iovec){.iov_base = PyBytes_AsString(bytes),
                          .iov_len = (size_t)PyBytes_Size(bytes)};
}

/* Write the head and the body of a request, which are bytes, to a socket, and note the times.
 *
 * `*unsent_bytes` becomes the number of bytes that the socket did not accept, which Python writes
 * later. It is 0 after an error, because the next read of the socket reports the error. */
static void write_request(Exchange *exchange, int fd, int64_t *unsent_bytes)
{
    struct iovec vectors[] = {vector_of_bytes(exchange->head), vector_of_bytes(exchange->body)};
    int64_t total_bytes = (int64_t)(vectors[0].iov_len + vectors[1].iov_len);
    int64_t started_at;
    int64_t written_bytes = write_vectors(fd, vectors, 2, &started_at);
    exchange->ready_at = started_at; /* The connection was open, so that sending began at once. */
    exchange->sent_at = started_at;
    exchange->bytes_sent += total_bytes; /* with those that Python writes later */
    *unsent_bytes = written_bytes == WRITE_FAILED ? 0 : total_bytes - written_bytes;
}

/* Return whether an object is a connection without TLS that can carry a request now: it is open,
 * has nothing left to send, and has been idle for at most `max_idle_ns`. */
static int is_usable_connection(PyObject *value, int64_t max_idle_ns)
{
    if (!PyObject_TypeCheck(value, socket_buffer_type))
        return 0;
    const SocketBuffer *buffer = (SocketBuffer *)value;
    if (buffer->is_closed || buffer->tls != Py_None || !has_sent_all(buffer))
        return 0;
    int64_t idle_ns = clock_ns(CLOCK_MONOTONIC) - buffer->idle_since;
    return idle_ns <= max_idle_ns;
}

/* Return the newest of the idle connections, as a new reference, or NULL without an exception if
 * there is none. */
static PyObject *get_newest_idle(PyObject *idle)
{
    Py_ssize_t size = PySequence_Size(idle);
    PyObject *connection = size > 0 ? PySequence_GetItem(idle, size - 1) : NULL;
    if (connection == NULL)
        PyErr_Clear();
    return connection;
}

/* Remove `connection`, the newest one in `idle`, from there, and send a request on it.
 *
 * The caller has a reference to the connection, so the one that `pop` returns is not needed.
 * `*unsent_bytes` becomes the number of bytes that the socket did not accept. Return 0, or -1 with
 * an exception. */
static int pop_idle_and_send(PyObject *idle, SocketBuffer *connection, Exchange *exchange,
                             PyObject *open_exchanges, int64_t *unsent_bytes)
{
    if (discard_result(PyObject_CallMethodObjArgs(idle, name_pop, NULL)) < 0)
        return -1;
    assign_connection(exchange, connection);
    if (PySet_Add(open_exchanges, (PyObject *)exchange) < 0)
        return -1;
    write_request(exchange, connection->fd, unsent_bytes);
    return 0;
}

/* Return whether an object is an exchange (a request with its response) whose request can be sent
 * in C, because its head and its body are bytes. */
static int is_sendable_exchange(PyObject *value)
{
    if (exchange_class == NULL || Py_TYPE(value) != exchange_class)
        return 0;
    const Exchange *exchange = (Exchange *)value;
    return PyBytes_Check(exchange->head) && PyBytes_Check(exchange->body);
}

/* Receiver.try_send_on_idle(exchange, idle, max_idle_ns, open_exchanges): send a request on the
 * connection that became idle last.
 *
 * This is the usual case, which costs no calls of the pool and the reactor in Python. `idle` is a
 * deque of connections, and the exchange is added to the set `open_exchanges`. Return how many
 * bytes the socket did not accept, or NOT_SENT if nothing was done: the arguments have other types,
 * or the connection cannot be used. */
static PyObject *receiver_try_send_on_idle(PyObject *Py_UNUSED(self), PyObject *const *args,
                                           Py_ssize_t count)
{
    enum { EXCHANGE, IDLE, MAX_IDLE_NS, OPEN_EXCHANGES, ARGUMENT_COUNT };
    int64_t max_idle_ns = 0;
    int are_usual_arguments =
        count == ARGUMENT_COUNT && is_sendable_exchange(args[EXCHANGE]) &&
        read_int64(args[MAX_IDLE_NS], &max_idle_ns) && PySet_Check(args[OPEN_EXCHANGES]);
    if (!are_usual_arguments)
        return PyLong_FromLong(NOT_SENT);

    PyObject *connection = get_newest_idle(args[IDLE]);
    if (connection == NULL)
        return PyLong_FromLong(NOT_SENT);

    int64_t unsent_bytes = NOT_SENT;
    int status = 0; /* or -1 with an exception */
    if (is_usable_connection(connection, max_idle_ns))
        status = pop_idle_and_send(args[IDLE], (SocketBuffer *)connection,
                                   (Exchange *)args[EXCHANGE], args[OPEN_EXCHANGES], &unsent_bytes);

    Py_DECREF(connection);
    return status < 0 ? NULL : PyLong_FromLongLong(unsent_bytes);
}

/* -- ending a request -------------------------------------------------------------------------- */

/* Return whether a connection can carry another request as it is, so that C may make it idle.
 *
 * Its response must be complete and not yet reported to the caller, and the server must not have
 * limited the use of the connection in a Keep-Alive header, which the pool in Python observes. */
static int can_recycle(const SocketBuffer *buffer)
{
    const Exchange *exchange = find_exchange(buffer);
    if (exchange == NULL || exchange->is_reported || Py_TYPE(exchange->response) != response_class)
        return 0;

    const ResponseParser *response = (ResponseParser *)exchange->response;
    int has_server_limit = response->uses_left != Py_None || response->idle_limit_s != Py_None;
    if (has_server_limit || !response->is_complete || !response->is_reusable)
        return 0;

    return has_sent_all(buffer);
}

/* Remove an exchange from the requests in flight: the dict of its pool, and the set of all pools.
 * It may be missing in both. Return 0, or -1 with an exception. */
static int remove_from_flight(PyObject *exchange, PyObject *in_flight, PyObject *open_exchanges)
{
    if (PySet_Discard(open_exchanges, exchange) < 0)
        return -1;
    if (PyDict_GetItemWithError(in_flight, exchange) != NULL)
        return PyDict_DelItem(in_flight, exchange);
    return PyErr_Occurred() ? -1 : 0;
}

/* Append a connection to the deque of idle ones. Return 0, or -1 with an exception. */
static int add_to_idle(PyObject *idle, SocketBuffer *connection)
{
    connection->idle_since = clock_ns(CLOCK_MONOTONIC);
    return discard_result(
        PyObject_CallMethodObjArgs(idle, name_append, (PyObject *)connection, NULL));
}

/* Separate an exchange from its connection, which becomes urgent again for its next response.
 *
 * The body of the request is released, because it may be large and is not sent again. Return 0, or
 * -1 with an exception. */
static int release_connection(Receiver *receiver, SocketBuffer *connection, Exchange *exchange)
{
    set_field(&connection->exchange, Py_None);
    connection->responses_served++;
    if (set_deferred(receiver, connection, 0) < 0)
        return -1;
    set_field(&exchange->connection, Py_None);
    set_field(&exchange->body, no_bytes);
    return 0;
}

/* Make the connection of a completed response idle, and remove the exchange (the request with its
 * response) from the requests in flight. Return 0, or -1 with an exception. */
static int recycle_connection(Receiver *receiver, SocketBuffer *connection, PyObject *exchange,
                              PyObject *idle, PyObject *in_flight, PyObject *open_exchanges)
{
    if (release_connection(receiver, connection, (Exchange *)exchange) < 0)
        return -1;
    if (remove_from_flight(exchange, in_flight, open_exchanges) < 0)
        return -1;
    return add_to_idle(idle, connection);
}

/* Receiver.try_recycle(buffer, idle, in_flight, open_exchanges): make the connection of a completed
 * response idle.
 *
 * This is the usual end of a request, which costs no calls of the pool in Python. `idle` is a deque
 * of connections. The exchange is removed from the dict `in_flight` and from the set
 * `open_exchanges`. Return the exchange (a new reference), whose completion the caller reports, or
 * None if nothing was done: the arguments have other types, or `can_recycle` is false. */
static PyObject *receiver_try_recycle(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    enum { BUFFER, IDLE, IN_FLIGHT, OPEN_EXCHANGES, ARGUMENT_COUNT }; /* indexes of `args` */
    int are_usual_arguments = count == ARGUMENT_COUNT &&
                              PyObject_TypeCheck(args[BUFFER], socket_buffer_type) &&
                              PyDict_Check(args[IN_FLIGHT]) && PySet_Check(args[OPEN_EXCHANGES]);
    if (!are_usual_arguments)
        Py_RETURN_NONE;

    SocketBuffer *connection = (SocketBuffer *)args[BUFFER];
    if (!can_recycle(connection))
        Py_RETURN_NONE;

    PyObject *exchange = connection->exchange;
    Py_INCREF(exchange); /* The connection drops its own reference. This one is the result. */
    if (recycle_connection((Receiver *)self, connection, exchange, args[IDLE], args[IN_FLIGHT],
                           args[OPEN_EXCHANGES]) < 0) {
        Py_DECREF(exchange);
        return NULL;
    }

    return exchange;
}

/* -- delivering the queue ---------------------------------------------------------------------- */

/* Tell the owner of a connection, usually a pool, that its response is complete, by calling
 * `owner.response_completed(connection)`. Return 0, or -1 with an exception. */
static int report_completed(PyObject *connection)
{
    PyObject *owner = ((SocketBuffer *)connection)->owner;
    Py_INCREF(owner); /* The call may set another owner. */
    int status = discard_result(
        PyObject_CallMethodObjArgs(owner, name_response_completed, connection, NULL));
    Py_DECREF(owner);
    return status;
}

/* Deliver the reads of a connection to its request: in C, or by calling `deliver_in_python` with
 * the connection.
 *
 * `*called_python` becomes 1 if a function in Python was called. It may, for example, have sent a
 * request, so that the loop that delivers has to return to its caller. Return 0, or -1 with an
 * exception. */
static int deliver_connection(Receiver *receiver, PyObject *connection, PyObject *deliver_in_python,
                              int *called_python)
{
    switch (deliver(receiver, connection)) {
    case DELIVERED:
        return 0;
    case COMPLETED:
        *called_python = 1;
        return report_completed(connection);
    case LEFT_TO_PYTHON:
        *called_python = 1;
        return discard_result(PyObject_CallFunctionObjArgs(deliver_in_python, connection, NULL));
    case DELIVERY_FAILED:
        return -1;
    }
    return -1; /* not reached: the cases are complete */
}

/* Remove the first connection from the queue and deliver its reads.
 *
 * `*called_python` becomes 1 if a Python function was called. Return 0, or -1 with an exception. */
static int deliver_first_in_queue(Receiver *receiver, PyObject *deliver_in_python,
                                  int *called_python)
{
    PyObject *connection = PyObject_CallFunctionObjArgs(receiver->queue_popleft, NULL);
    if (connection == NULL)
        return -1;
    int status = deliver_connection(receiver, connection, deliver_in_python, called_python);
    Py_DECREF(connection);
    return status;
}

/* Deliver the queued buffers, one after the other, for at most about `slice_ns`.
 *
 * The time is limited because sockets are not read meanwhile. The clock is read after every
 * DELIVERIES_PER_CLOCK_READING buffers. `*called_python` becomes 1 if a Python function was called.
 * Return the monotonic time, or -1 with an exception. */
static int64_t deliver_for_slice(Receiver *receiver, int64_t slice_ns, PyObject *deliver_in_python,
                                 int *called_python)
{
    int64_t now = clock_ns(CLOCK_MONOTONIC);
    int64_t slice_end = now + slice_ns;
    int delivered = 0;
    while (PyObject_Size(receiver->queue) > 0) {
        if (deliver_first_in_queue(receiver, deliver_in_python, called_python) < 0)
            return -1;

        delivered++;
        if (delivered % DELIVERIES_PER_CLOCK_READING == 0) {
            now = clock_ns(CLOCK_MONOTONIC);
            if (now > slice_end)
                break;
        }
    }

    return now;
}

/* Receiver.deliver_queued(slice_ns, deliver_in_python): pass the reads of the queued buffers on to
 * their requests, for at most about `slice_ns`.
 *
 * This is done in C in the usual case. Otherwise the function `deliver_in_python` is called with
 * the buffer. Return the monotonic time in ns. */
static PyObject *receiver_deliver_queued(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    enum { SLICE_NS, DELIVER_IN_PYTHON, ARGUMENT_COUNT }; /* indexes of `args` */
    int64_t slice_ns;

    if (count != ARGUMENT_COUNT || !read_int64(args[SLICE_NS], &slice_ns)) {
        PyErr_SetString(PyExc_TypeError,
                        "deliver_queued() takes a slice in ns (an int) and a function");
        return NULL;
    }

    /* This tells a loop in C to return to Python. Here that happens in any case. */
    int called_python = 0;
    int64_t now =
        deliver_for_slice((Receiver *)self, slice_ns, args[DELIVER_IN_PYTHON], &called_python);
    return now < 0 ? NULL : PyLong_FromLongLong(now);
}

/* -- receiving and delivering ------------------------------------------------------------------ */

/* The arguments of Receiver.receive_and_deliver. Times are monotonic, in ns. */
typedef struct {
    int max_wait_ms;          /* the longest wait of each poll, or negative for no limit */
    long long return_at;      /* when the turn of the caller is over */
    long long tick_at;        /* when the next tick of the caller is due */
    long long slice_ns;       /* for how long to deliver before the next poll */
    PyObject *open_exchanges; /* the set of the requests in flight */
    PyObject *deliver;        /* is called with a buffer that is not delivered in C */
} TurnArguments;

/* Return when the caller has to do something else than to receive: send the next request at
 * `wake_at`, or check for timeouts at its next tick. */
static int64_t caller_due_at(const Receiver *receiver, const TurnArguments *arguments)
{
    return min_int64(receiver->wake_at, arguments->tick_at);
}

/* Poll and read until there is something to deliver, or until the caller has something to do.
 *
 * The caller is a load generator, which receives without a break for its turn of the event loop.
 * Three limits depend on what it is waiting for:
 * - A poll does not wait while reads are still queued.
 * - The method returns at the end of the turn, or when the caller has to send or to check timeouts.
 * - The timer, which makes the polls frequent, is set only while responses are awaited.
 *
 * `*unhandled` becomes a list of what the caller has to handle, or NULL. Return 0, or -1 with an
 * exception. */
static int receive_for_turn(Receiver *receiver, const TurnArguments *arguments,
                            PyObject **unhandled)
{
    int64_t due_at = caller_due_at(receiver, arguments);
    int has_queued_reads = PyObject_Size(receiver->queue) > 0;
    int awaits_responses = PySet_Size(arguments->open_exchanges) > 0;
    const ReceiveLimits limits = {
        .max_wait_ms = has_queued_reads ? 0 : arguments->max_wait_ms,
        .return_at = min_int64(arguments->return_at, due_at),
        .timer_limit = awaits_responses ? due_at : NO_TIMER,
    };

    return receive(receiver, &limits, unhandled);
}

/* Return whether a list of pairs (descriptor, events) has one item, and this is the timer. */
static int is_timer_only(const Receiver *receiver, PyObject *unhandled)
{
    if (PyList_Size(unhandled) != 1)
        return 0;
    PyObject *descriptor_and_events = PyList_GetItem(unhandled, 0);
    int64_t descriptor;
    int is_valid = read_int64(PyTuple_GetItem(descriptor_and_events, 0), &descriptor);
    return is_valid && descriptor == receiver->timer;
}

/* Clear the timer, which has fired. Return 1, or 0 if reading it failed, which is left to Python.
 *
 * The poll that reported the timer looked at the sockets after the time for which the timer was
 * set. The sockets that it did not report were therefore still empty at that time. */
static int clear_timer(Receiver *receiver)
{
    int64_t fired_at = receiver->timer_armed_for;
    receiver->last_poll_at = max_int64(receiver->last_poll_at, fired_at);
    receiver->timer_armed_for = 0; /* It is set for no time now. */
    uint64_t expirations;
    int was_read = read(receiver->timer, &expirations, sizeof expirations) >= 0;
    int was_cleared_before = !was_read && errno == EAGAIN;
    return was_read || was_cleared_before;
}

/* Deliver queued buffers for at most about `arguments->slice_ns`, if there are any, and update the
 * time of the receiver.
 *
 * `*called_python` becomes 1 if a function in Python was called for one of them. Return 0, or -1
 * with an exception. */
static int deliver_for_turn(Receiver *receiver, const TurnArguments *arguments, int *called_python)
{
    int has_queued_reads = PyObject_Size(receiver->queue) > 0;
    if (!has_queued_reads)
        return 0;

    int64_t now =
        deliver_for_slice(receiver, arguments->slice_ns, arguments->deliver, called_python);
    if (now < 0)
        return -1;

    receiver->now = now;
    return 0;
}

/* Return whether the receiver has to return to its caller in Python.
 *
 * That is so after a Python function was called, which may have changed what is to be done, at the
 * end of the turn or at a tick, without traffic, and if so many reads wait for delivery that
 * nothing more should be read. */
static int is_turn_over(const Receiver *receiver, const TurnArguments *arguments, int called_python)
{
    int is_time_over = receiver->now >= arguments->return_at || receiver->now >= arguments->tick_at;
    int is_idle = receiver->ready_count == 0 && PyObject_Size(receiver->queue) == 0;
    int has_backlog = receiver->queued_reads >= BACKLOG_LIMIT;
    return called_python || is_time_over || is_idle || has_backlog;
}

/* Set the timer for the next poll or for the caller, whichever comes first, as
 * `Reactor._arm_timer`.
 *
 * The timer ends the wait of a poll. The next poll has to be in time only while responses are
 * awaited. While sockets are deferred, a poll waits for at most a millisecond anyway. Return 0, or
 * -1 with an exception. */
static int arm_timer_for_next_pass(Receiver *receiver, const TurnArguments *arguments)
{
    int64_t timer_at = caller_due_at(receiver, arguments);
    int awaits_responses = PySet_Size(arguments->open_exchanges) > 0;
    if (awaits_responses && !receiver->is_deferring)
        timer_at = min_int64(timer_at, receiver->next_poll_at);
    int is_armed = timer_at == receiver->timer_armed_for;
    return is_armed ? 0 : arm_timer(receiver, timer_at);
}

/* Receive as `receive_for_turn` does. If only the timer is left to handle, clear it here, so that
 * `*unhandled` becomes NULL. Return 0, or -1 with an exception. */
static int receive_and_clear_timer(Receiver *receiver, const TurnArguments *arguments,
                                   PyObject **unhandled)
{
    if (receive_for_turn(receiver, arguments, unhandled) < 0)
        return -1;
    if (*unhandled == NULL)
        return 0;

    int is_handled = is_timer_only(receiver, *unhandled) && clear_timer(receiver);
    if (is_handled)
        Py_CLEAR(*unhandled);

    return 0;
}

/* Receive and deliver, pass by pass, until the caller in Python has something to do or its turn is
 * over.
 *
 * Return the list of the descriptors that the caller has to handle, an empty list if a request is
 * due (`wake_at`), None if the turn is over, or NULL with an exception. */
static PyObject *run_turn(Receiver *receiver, const TurnArguments *arguments)
{
    int called_python = 0;
    int is_over = 0;
    while (!is_over) {
        PyObject *unhandled;
        if (receive_and_clear_timer(receiver, arguments, &unhandled) < 0)
            return NULL;
        if (unhandled != NULL)
            return unhandled;

        int is_request_due = receiver->now >= receiver->wake_at;
        if (is_request_due)
            return PyList_New(0);
        if (deliver_for_turn(receiver, arguments, &called_python) < 0)
            return NULL;

        is_over = is_turn_over(receiver, arguments, called_python);
        if (!is_over && arm_timer_for_next_pass(receiver, arguments) < 0)
            return NULL;
    }

    Py_RETURN_NONE;
}

/* Receiver.receive_and_deliver(max_wait_ms, return_at, tick_at, open_exchanges, slice_ns, deliver):
 * receive and deliver for a load generator, without calling Python, until it has something to do.
 *
 * The turn of a load generator is the time for which the event loop lets it run. The reactor in
 * Python would otherwise call the receiver for each poll. `TurnArguments` describes the arguments.
 * Return the list of pairs (descriptor, events) that the caller has to handle, or None if there is
 * nothing left. */
static PyObject *receiver_receive_and_deliver(PyObject *self, PyObject *args)
{
    TurnArguments arguments;
    /* "i" is an int, "L" a long long, "O!" an object of a type, and "O" any object. */
    if (!PyArg_ParseTuple(args, "iLLO!LO", &arguments.max_wait_ms, &arguments.return_at,
                          &arguments.tick_at, &PySet_Type, &arguments.open_exchanges,
                          &arguments.slice_ns, &arguments.deliver))
        return NULL;
    return run_turn((Receiver *)self, &arguments);
}

/* -- the type Receiver ------------------------------------------------------------------------- */

/* The flags of a method that gets its arguments as a C array, which saves creating a tuple. */
#define FAST_METHOD(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL

static PyMethodDef receiver_methods[] = {
    {"add", receiver_add, METH_O, NULL},
    {"remove", receiver_remove, METH_O, NULL},
    {"defer", receiver_defer, METH_VARARGS, NULL},
    {"stop_deferring", receiver_stop_deferring, METH_O, NULL},
    {"take_reads", receiver_take_reads, METH_O, NULL},
    {"receive", receiver_receive, METH_VARARGS, NULL},
    {"receive_and_deliver", receiver_receive_and_deliver, METH_VARARGS, NULL},
    {"send", receiver_send, METH_VARARGS, NULL},
    {"deliver", receiver_deliver, METH_O, NULL},
    {"deliver_queued", FAST_METHOD(receiver_deliver_queued), NULL},
    {"try_send_on_idle", FAST_METHOD(receiver_try_send_on_idle), NULL},
    {"try_recycle", FAST_METHOD(receiver_try_recycle), NULL},
    {NULL},
};

/* Describe a field of Receiver that Python can read, and write unless it is READONLY. */
#define RECEIVER_MEMBER(name, type, flags) {#name, type, offsetof(Receiver, name), flags, NULL}

static PyMemberDef receiver_members[] = {
    RECEIVER_MEMBER(now, T_LONGLONG, 0),
    RECEIVER_MEMBER(last_poll_at, T_LONGLONG, 0),
    RECEIVER_MEMBER(next_poll_at, T_LONGLONG, 0),
    RECEIVER_MEMBER(timer_armed_for, T_LONGLONG, 0),
    RECEIVER_MEMBER(wake_at, T_LONGLONG, 0),
    RECEIVER_MEMBER(poll_started_at, T_LONGLONG, 0),
    RECEIVER_MEMBER(is_deferring, T_BOOL, READONLY),
    RECEIVER_MEMBER(ready_count, T_LONGLONG, 0),
    RECEIVER_MEMBER(queued_reads, T_LONGLONG, 0),
    RECEIVER_MEMBER(poll_count, T_LONGLONG, 0),
    RECEIVER_MEMBER(read_count, T_LONGLONG, 0),
    {NULL},
};

static PyType_Slot receiver_slots[] = {
    {Py_tp_init, receiver_init},
    {Py_tp_dealloc, receiver_dealloc},
    {Py_tp_traverse, receiver_traverse},
    {Py_tp_clear, receiver_clear},
    {Py_tp_methods, receiver_methods},
    {Py_tp_members, receiver_members},
    {0, NULL},
};

static PyType_Spec receiver_spec = {
    .name = "loadgen_sdk._compiled.Receiver",
    .basicsize = sizeof(Receiver),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = receiver_slots,
};
