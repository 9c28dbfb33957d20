/* Delivers reads to exchanges, and sends and ends requests where nothing else is to be done. Part
 * of _compiled.c.
 *
 * Every other case is left to the reactor and the pool in Python. */

/* The result of delivering the reads of a socket buffer, which Python gets as a number. */
enum Delivery { DELIVERY_FAILED = -1, LEFT_TO_PYTHON = 0, DELIVERED = 1, COMPLETED = 2 };

/* Return whether the first read of a response cannot be a 408 that ends an idle connection. */
static int begins_successful_response(const SocketBuffer *buffer)
{
    Read from_python;
    const Read *first = &from_python;
    if (PyList_Size(buffer->reads) == 0)
        first = &buffer->first_waiting->read;
    else if (!read_from_tuple(PyList_GetItem(buffer->reads, 0), &from_python))
        return 0;
    return begins_with_success(first->data, first->size);
}

/* Return the exchange (borrowed) to which the reads of a buffer can be delivered here, or NULL. The
 * connection has no TLS, and so few events were requested that no template is learned. */
static Exchange *exchange_for_delivery(const SocketBuffer *buffer)
{
    Exchange *exchange = (Exchange *)buffer->exchange;
    int is_ordinary = !buffer->ended_at && !buffer->is_closed && !buffer->is_deferred &&
                      buffer->plain_read_count == 0 && buffer->template == Py_None &&
                      buffer->tls == Py_None;
    if (!is_ordinary || buffer->reads == NULL || !PyList_Check(buffer->reads) ||
        count_reads(buffer) < 1)
        return NULL;
    if (exchange == NULL || exchange_class == NULL ||
        Py_TYPE((PyObject *)exchange) != exchange_class ||
        Py_TYPE(exchange->reader) != reader_class)
        return NULL;
    if (((ResponseReader *)exchange->reader)->learned_templates != NO_MORE_TEMPLATES)
        return NULL;
    if (exchange->head_received_at < 0 && !begins_successful_response(buffer))
        return NULL;
    return exchange;
}

/* Feed the reads of a buffer to its exchange, and empty the buffer. */
static enum FeedResult feed_buffer(Receiver *receiver, SocketBuffer *buffer, Exchange *exchange)
{
    if (PyList_Size(buffer->reads) == 0) {
        if (buffer->is_queued)
            receiver->queued_reads -= buffer->waiting_count;
        buffer->is_queued = 0;
        WaitingRead *waiting = detach_waiting(buffer);
        enum FeedResult result = feed_waiting_reads(exchange, waiting);
        free_waiting(waiting);
        return result;
    }
    PyObject *reads = receiver_take_reads((PyObject *)receiver, (PyObject *)buffer);
    buffer->is_queued = 0;
    PyObject *is_over = reads == NULL ? NULL : exchange_feed_reads((PyObject *)exchange, reads);
    Py_XDECREF(reads);
    if (is_over == NULL)
        return FEED_FAILED;
    enum FeedResult result = is_over == Py_True ? RESPONSE_OVER : RESPONSE_GOES_ON;
    Py_DECREF(is_over);
    return result;
}

/* Deliver the reads of a socket buffer if they can be delivered here. */
static enum Delivery deliver(Receiver *receiver, PyObject *value)
{
    if (!is_socket_buffer(value))
        return DELIVERY_FAILED;
    SocketBuffer *buffer = (SocketBuffer *)value;
    Exchange *exchange = exchange_for_delivery(buffer);
    if (exchange == NULL)
        return LEFT_TO_PYTHON;
    Py_INCREF((PyObject *)exchange);
    enum FeedResult result = feed_buffer(receiver, buffer, exchange);
    if (result == RESPONSE_GOES_ON)
        buffer->can_batch_reads = exchange->can_batch_reads;
    Py_DECREF((PyObject *)exchange);
    if (result == FEED_FAILED)
        return DELIVERY_FAILED;
    return result == RESPONSE_OVER ? COMPLETED : DELIVERED;
}

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

enum { NOT_SENT = -1, SENDING_FAILED = -2 };

/* Send a request, whose head and body are bytes, on an idle connection. Return how many bytes the
 * socket did not accept, or SENDING_FAILED with an exception. */
static int64_t send_on_connection(Exchange *exchange, PyObject *connection,
                                  PyObject *open_exchanges)
{
    SocketBuffer *buffer = (SocketBuffer *)connection;
    set_field(&buffer->exchange, (PyObject *)exchange);
    set_field(&buffer->template, Py_None);
    set_field(&exchange->connection, connection);
    buffer->can_batch_reads = 0;
    exchange->is_connection_reused = buffer->responses_served > 0;
    if (!exchange->is_connection_reused) {
        exchange->tcp_connect_ns = buffer->tcp_connect_ns;
        exchange->tls_handshake_ns = buffer->tls_handshake_ns;
    }
    if (PySet_Add(open_exchanges, (PyObject *)exchange) < 0)
        return SENDING_FAILED;
    struct iovec vectors[] = {
        {.iov_base = PyBytes_AsString(exchange->head),
         .iov_len = (size_t)PyBytes_Size(exchange->head)},
        {.iov_base = PyBytes_AsString(exchange->body),
         .iov_len = (size_t)PyBytes_Size(exchange->body)},
    };
    int64_t total_bytes = (int64_t)(vectors[0].iov_len + vectors[1].iov_len);
    int64_t started_at;
    int64_t sent_bytes = write_parts(buffer->fd, vectors, 2, &started_at);
    exchange->ready_at = started_at;
    exchange->sent_at = started_at;
    exchange->bytes_sent += total_bytes;
    return sent_bytes < 0 ? 0
                          : total_bytes - sent_bytes; /* An error is reported by the next read. */
}

/* Return whether a value is a connection that can carry a request now. */
static int is_usable_connection(PyObject *value, int64_t reuse_ns)
{
    if (!PyObject_TypeCheck(value, socket_buffer_type))
        return 0;
    const SocketBuffer *buffer = (SocketBuffer *)value;
    return !buffer->is_closed && buffer->tls == Py_None && has_sent_all(buffer) &&
           clock_ns(CLOCK_MONOTONIC) - buffer->idle_since <= reuse_ns;
}

/* Receiver.try_send_on_idle(exchange, idle, reuse_ns, open_exchanges) */
static PyObject *receiver_try_send_on_idle(PyObject *Py_UNUSED(self), PyObject *const *args,
                                           Py_ssize_t count)
{
    if (count != 4 || exchange_class == NULL || Py_TYPE(args[0]) != exchange_class ||
        !PySet_Check(args[3]))
        return PyLong_FromLong(NOT_SENT);
    Exchange *exchange = (Exchange *)args[0];
    PyObject *idle = args[1];
    int is_valid = 1;
    int64_t reuse_ns = read_number(args[2], &is_valid);
    Py_ssize_t size = PySequence_Size(idle);
    PyObject *connection = size > 0 ? PySequence_GetItem(idle, size - 1) : NULL;
    int64_t unsent_bytes = NOT_SENT;
    int is_usable = connection != NULL && is_valid && PyBytes_Check(exchange->head) &&
                    PyBytes_Check(exchange->body) && is_usable_connection(connection, reuse_ns);
    if (is_usable) {
        PyObject *popped = PyObject_CallMethodObjArgs(idle, name_pop, NULL);
        unsent_bytes =
            popped == NULL ? SENDING_FAILED : send_on_connection(exchange, connection, args[3]);
        Py_XDECREF(popped);
    } else
        PyErr_Clear();
    Py_XDECREF(connection);
    return unsent_bytes == SENDING_FAILED ? NULL : PyLong_FromLongLong(unsent_bytes);
}

/* -- ending a request -------------------------------------------------------------------------- */

/* Return whether a connection whose response is complete can carry another request, without any
 * limit by the server. */
static int can_recycle(const SocketBuffer *buffer)
{
    const Exchange *exchange = (Exchange *)buffer->exchange;
    if (exchange == NULL || exchange_class == NULL ||
        Py_TYPE((PyObject *)exchange) != exchange_class || exchange->is_reported ||
        Py_TYPE(exchange->response) != response_class)
        return 0;
    const ResponseParser *response = (ResponseParser *)exchange->response;
    return response->is_complete && response->is_reusable && response->uses_left == Py_None &&
           response->idle_limit_s == Py_None && has_sent_all(buffer);
}

/* Remove an exchange from the requests in flight. Return -1 with an exception. */
static int remove_from_flight(PyObject *exchange, PyObject *in_flight, PyObject *open_exchanges)
{
    if (PySet_Discard(open_exchanges, exchange) < 0)
        return -1;
    if (PyDict_GetItemWithError(in_flight, exchange) != NULL)
        return PyDict_DelItem(in_flight, exchange);
    return PyErr_Occurred() ? -1 : 0;
}

/* Make a connection idle. Return -1 with an exception. */
static int add_to_idle(PyObject *idle, PyObject *connection)
{
    ((SocketBuffer *)connection)->idle_since = clock_ns(CLOCK_MONOTONIC);
    PyObject *result = PyObject_CallMethodObjArgs(idle, name_append, connection, NULL);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Receiver.try_recycle(buffer, idle, in_flight, open_exchanges) */
static PyObject *receiver_try_recycle(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !PyObject_TypeCheck(args[0], socket_buffer_type) || !PyDict_Check(args[2]) ||
        !PySet_Check(args[3]) || !can_recycle((SocketBuffer *)args[0]))
        Py_RETURN_NONE;
    SocketBuffer *buffer = (SocketBuffer *)args[0];
    PyObject *exchange = buffer->exchange; /* takes over the reference of the buffer */
    Py_INCREF(Py_None);
    buffer->exchange = Py_None;
    buffer->responses_served++;
    int failed = set_deferred((Receiver *)self, buffer, 0) < 0;
    if (!failed) {
        set_field(&((Exchange *)exchange)->connection, Py_None);
        set_field(&((Exchange *)exchange)->body, no_bytes);
        failed =
            remove_from_flight(exchange, args[2], args[3]) < 0 || add_to_idle(args[1], args[0]) < 0;
    }
    if (failed)
        Py_CLEAR(exchange);
    return exchange;
}

/* -- delivering the queue ---------------------------------------------------------------------- */

/* Call `response_completed` of the owner of a connection. Return -1 with an exception. */
static int report_completed(PyObject *connection)
{
    PyObject *owner = ((SocketBuffer *)connection)->owner;
    Py_INCREF(owner);
    PyObject *result = PyObject_CallMethodObjArgs(owner, name_response_completed, connection, NULL);
    Py_DECREF(owner);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Deliver the first buffer in the queue. `*called_python` becomes 1 if Python was called for it.
 * Return -1 with an exception. */
static int deliver_first(Receiver *receiver, PyObject *deliver_in_python, int *called_python)
{
    PyObject *connection = PyObject_CallFunctionObjArgs(receiver->queue_popleft, NULL);
    if (connection == NULL)
        return -1;
    int status = 0;
    switch (deliver(receiver, connection)) {
    case DELIVERED:
        break;
    case COMPLETED:
        *called_python = 1;
        status = report_completed(connection);
        break;
    case LEFT_TO_PYTHON:
        *called_python = 1;
        Py_INCREF(connection);
        status = call_with(deliver_in_python, connection);
        break;
    case DELIVERY_FAILED:
        status = -1;
        break;
    }
    Py_DECREF(connection);
    return status;
}

enum { DELIVERIES_PER_CLOCK_READING = 8 };

/* Receiver.deliver_queued: return the time, or -1 with an exception. `*called_python` becomes 1 if
 * Python was called. */
static int64_t deliver_slice(Receiver *receiver, int64_t slice_ns, PyObject *deliver_in_python,
                             int *called_python)
{
    int64_t now = clock_ns(CLOCK_MONOTONIC);
    int64_t slice_end = now + slice_ns;
    for (int delivered = 1; PyObject_Size(receiver->queue) > 0; delivered++) {
        if (deliver_first(receiver, deliver_in_python, called_python) < 0)
            return -1;
        if (delivered % DELIVERIES_PER_CLOCK_READING == 0) {
            now = clock_ns(CLOCK_MONOTONIC);
            if (now > slice_end)
                break;
        }
    }
    return now;
}

static PyObject *receiver_deliver_queued(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    int is_valid = count == 2;
    int called_python = 0;
    int64_t slice_ns = is_valid ? read_number(args[0], &is_valid) : 0;
    if (!is_valid) {
        PyErr_SetString(PyExc_TypeError, "deliver_queued(slice_ns, deliver)");
        return NULL;
    }
    int64_t now = deliver_slice((Receiver *)self, slice_ns, args[1], &called_python);
    return now < 0 ? NULL : PyLong_FromLongLong(now);
}
