/* Receiver: reads the sockets of two epoll instances in one loop. Part of _compiled.c.
 *
 * The reference implementation is transport/receiver.py. It describes the fields and the methods,
 * and explains deferred sockets, merged reads and the constants. All times are monotonic, in ns. */

typedef struct {
    PyObject_HEAD

    /* The queue to which buffers with reads are added, and its bound methods */
    PyObject *queue;
    PyObject *queue_append;
    PyObject *queue_popleft;
    long long queued_reads;

    /* The sockets, and the descriptors that the receiver polls */
    SocketBuffer **buffers; /* indexed by descriptor, NULL for a descriptor without a buffer */
    int buffers_size;
    int epoll;
    int deferred_epoll;
    int timer;

    /* Polls and what they reported */
    long long now;
    long long wall_to_monotonic_ns;
    long long last_poll_at;
    long long poll_started_at;
    long long ready_count;
    long long poll_count;
    long long read_count;

    /* What comes next */
    long long wake_at;
    long long timer_armed_for;
    long long next_poll_at;
    long long reads_when_planned; /* `read_count` when `next_poll_at` was set */

    /* Deferring */
    char is_deferring;
    char is_traffic_heavy;
    long long deferred_count; /* sockets in the deferred epoll */
    long long last_deferred_poll_at;
    long long merged_reads; /* reads of deferred sockets that held several events */
    long long defer_again_at;
    long long pause_ns;

    /* The decision period, after which it is decided whether to defer, and its counts */
    long long period_start;
    long long deferred_reads;
    long long timely_reads; /* in polls that were not late */
    long long timely_merged_reads;

    struct epoll_event events[MAX_READY];
    char read_area[READ_BYTES];
} Receiver;

/* Add, change or remove a descriptor of an epoll instance. Return 0, or -1 with an OSError. */
static int control_epoll(int epoll, int operation, int fd, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.fd = fd};
    if (epoll_ctl(epoll, operation, fd, &event) == 0)
        return 0;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

/* -- creation and destruction ------------------------------------------------------------------ */

/* Read the descriptors of the two epoll instances and the timer. Return 0, or -1 with an
 * exception. */
static int read_descriptors(Receiver *receiver, PyObject *epoll, PyObject *deferred_epoll,
                            PyObject *timer)
{
    receiver->epoll = PyObject_AsFileDescriptor(epoll);
    if (receiver->epoll < 0)
        return -1;

    receiver->deferred_epoll = PyObject_AsFileDescriptor(deferred_epoll);
    if (receiver->deferred_epoll < 0)
        return -1;

    receiver->timer = PyObject_AsFileDescriptor(timer);
    return receiver->timer < 0 ? -1 : 0;
}

/* Set the times of a new receiver, which has not polled yet and does not defer (read late) any
 * socket. */
static void init_times(Receiver *receiver)
{
    int64_t now = clock_ns(CLOCK_MONOTONIC);

    /* What is added to a timestamp of the kernel, which uses the wall clock */
    receiver->wall_to_monotonic_ns = now - clock_ns(CLOCK_REALTIME);
    receiver->now = now;
    receiver->last_poll_at = now;
    receiver->poll_started_at = now;
    receiver->last_deferred_poll_at = now;
    receiver->period_start = now;
    receiver->pause_ns = DEFER_PAUSE_NS; /* the first pause if deferring does harm */
    receiver->wake_at = FOREVER;         /* The caller has not set a time to send a request. */
}

/* Receiver(epoll, deferred_epoll, timer, queue): a receiver without sockets.
 *
 * A socket in the first epoll instance wakes the process when data arrives. The second one is for
 * sockets whose events are not urgent. As long as there is little traffic, the second one is itself
 * registered in the first one, so that data in its sockets wakes the process too. */
static int receiver_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    Receiver *receiver = (Receiver *)self;
    PyObject *epoll, *deferred_epoll, *timer, *queue;

    if (!PyArg_ParseTuple(args, "OOOO", &epoll, &deferred_epoll, &timer, &queue))
        return -1;
    if (read_descriptors(receiver, epoll, deferred_epoll, timer) < 0)
        return -1;

    /* The bound methods are kept, because they are called for each queued buffer. */
    if (set_field_to_attribute(&receiver->queue_append, queue, "append") < 0 ||
        set_field_to_attribute(&receiver->queue_popleft, queue, "popleft") < 0)
        return -1;

    set_field(&receiver->queue, queue);
    init_times(receiver);
    return control_epoll(receiver->epoll, EPOLL_CTL_ADD, receiver->deferred_epoll, EPOLLIN);
}

/* Visit the objects of a receiver for the garbage collector. Py_VISIT ignores the NULL of a
 * descriptor without a buffer. */
static int receiver_traverse(PyObject *self, visitproc visit, void *arg)
{
    Receiver *receiver = (Receiver *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(receiver->queue);
    Py_VISIT(receiver->queue_append);
    Py_VISIT(receiver->queue_popleft);

    for (int fd = 0; fd < receiver->buffers_size; fd++)
        Py_VISIT((PyObject *)receiver->buffers[fd]);

    return 0;
}

/* Release the objects of a receiver. The table of buffers is detached first, because releasing a
 * buffer can call Python code, which may use the receiver. */
static int receiver_clear(PyObject *self)
{
    Receiver *receiver = (Receiver *)self;
    Py_CLEAR(receiver->queue);
    Py_CLEAR(receiver->queue_append);
    Py_CLEAR(receiver->queue_popleft);
    SocketBuffer **buffers = receiver->buffers;
    int size = receiver->buffers_size;
    receiver->buffers = NULL;
    receiver->buffers_size = 0;

    for (int fd = 0; fd < size; fd++)
        Py_XDECREF((PyObject *)buffers[fd]);

    PyMem_Free(buffers);
    return 0;
}

static void receiver_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    receiver_clear(self);
    free_object(self);
}

/* -- adding and removing sockets --------------------------------------------------------------- */

/* Return the buffer of a descriptor (borrowed), or NULL if it has none. */
static SocketBuffer *find_buffer(const Receiver *receiver, int fd)
{
    int is_in_table = fd >= 0 && fd < receiver->buffers_size;
    return is_in_table ? receiver->buffers[fd] : NULL;
}

/* Make the table of buffers large enough for a descriptor. Return 0, or -1 with an exception. */
static int reserve_buffer(Receiver *receiver, int fd)
{
    if (fd < receiver->buffers_size)
        return 0;

    int size = fd * 2 + 64; /* twice what is needed, so that the table seldom grows */
    SocketBuffer **buffers = PyMem_Realloc(receiver->buffers, (size_t)size * sizeof *buffers);
    if (buffers == NULL) {
        PyErr_NoMemory();
        return -1;
    }

    for (int new_fd = receiver->buffers_size; new_fd < size; new_fd++)
        buffers[new_fd] = NULL;

    receiver->buffers = buffers;
    receiver->buffers_size = size;
    return 0;
}

/* Receiver.add(buffer): read the socket of this buffer from now on. */
static PyObject *receiver_add(PyObject *self, PyObject *value)
{
    Receiver *receiver = (Receiver *)self;
    if (!check_socket_buffer(value))
        return NULL;

    int fd = ((SocketBuffer *)value)->fd;
    if (fd < 0) {
        PyErr_SetString(PyExc_ValueError, "the descriptor of a socket must not be negative");
        return NULL;
    }
    if (reserve_buffer(receiver, fd) < 0)
        return NULL;

    set_field((PyObject **)&receiver->buffers[fd], value);
    Py_RETURN_NONE;
}

/* Let another epoll instance watch a socket. Return 0, or -1 with an exception. */
static int move_between_epolls(int from_epoll, int to_epoll, int fd, uint32_t events)
{
    if (control_epoll(from_epoll, EPOLL_CTL_DEL, fd, 0) < 0)
        return -1;
    return control_epoll(to_epoll, EPOLL_CTL_ADD, fd, events);
}

/* Move a socket to the deferred epoll or back to the first one, unless it is there already.
 *
 * A deferred socket has no urgent events. It does not wake the process while there is much traffic,
 * but is polled about every millisecond. Return 0, or -1 with an exception. */
static int set_deferred(Receiver *receiver, SocketBuffer *buffer, int should_defer)
{
    if (buffer->is_deferred == should_defer)
        return 0;

    int status;

    if (should_defer)
        status = move_between_epolls(receiver->epoll, receiver->deferred_epoll, buffer->fd,
                                     DEFERRED_EPOLL_EVENTS);
    else
        status =
            move_between_epolls(receiver->deferred_epoll, receiver->epoll, buffer->fd, EPOLLIN);

    if (status < 0)
        return -1;

    buffer->is_deferred = (char)should_defer;

    /* Earlier polls of its new epoll did not watch the socket, so they prove nothing about it. */
    buffer->epoll_changed_at = clock_ns(CLOCK_MONOTONIC);
    receiver->deferred_count += should_defer ? 1 : -1;
    receiver->is_deferring = receiver->is_traffic_heavy && receiver->deferred_count > 0;

    return 0;
}

/* Receiver.defer(buffer, events): let a socket be read late until it has received so many plain
 * events. With 0 events, it wakes the process again as soon as data arrives. */
static PyObject *receiver_defer(PyObject *self, PyObject *args)
{
    PyObject *value;
    long long events;

    if (!PyArg_ParseTuple(args, "OL", &value, &events))
        return NULL;
    if (!check_socket_buffer(value))
        return NULL;

    SocketBuffer *buffer = (SocketBuffer *)value;
    buffer->events_until_urgent = events;
    int should_defer = events > 0;
    if (set_deferred((Receiver *)self, buffer, should_defer) < 0)
        return NULL;

    Py_RETURN_NONE;
}

/* Receiver.stop_deferring(buffer): wake the process again when data arrives at this socket. */
static PyObject *receiver_stop_deferring(PyObject *self, PyObject *value)
{
    if (!check_socket_buffer(value))
        return NULL;
    if (set_deferred((Receiver *)self, (SocketBuffer *)value, 0) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Receiver.remove(buffer): stop reading the socket of this buffer, which may be closed then. */
static PyObject *receiver_remove(PyObject *self, PyObject *value)
{
    Receiver *receiver = (Receiver *)self;
    if (!check_socket_buffer(value))
        return NULL;

    /* The caller unregisters the socket from the first epoll, so it must be in that one. */
    if (set_deferred(receiver, (SocketBuffer *)value, 0) < 0)
        return NULL;

    int fd = ((SocketBuffer *)value)->fd;
    if (find_buffer(receiver, fd) != NULL)
        Py_CLEAR(receiver->buffers[fd]);

    Py_RETURN_NONE;
}

/* -- queueing and taking reads ----------------------------------------------------------------- */

/* Append the plain reads of a buffer, which were only counted, to its list of reads as one
 * `PlainRun`. Return 0, or -1 with an exception. */
static int flush_plain_reads(Receiver *receiver, SocketBuffer *buffer)
{
    if (buffer->plain_read_count == 0)
        return 0;
    if (append_stealing(buffer->reads, new_plain_run_tuple(buffer)) < 0)
        return -1;

    buffer->plain_read_count = 0;
    buffer->plain_bytes = 0;

    if (buffer->is_queued)
        receiver->queued_reads++;

    return 0;
}

/* Receiver.take_reads(buffer): return the list of all reads of a buffer, and empty the buffer.
 *
 * If the buffer is in the queue, it stays there. The result is a new reference, or NULL with an
 * exception. */
static PyObject *receiver_take_reads(PyObject *self, PyObject *value)
{
    Receiver *receiver = (Receiver *)self;
    if (!check_socket_buffer(value))
        return NULL;

    SocketBuffer *buffer = (SocketBuffer *)value;
    if (move_waiting_reads_to_list(buffer) < 0 || flush_plain_reads(receiver, buffer) < 0)
        return NULL;

    PyObject *empty_list = PyList_New(0);
    if (empty_list == NULL)
        return NULL;

    PyObject *reads = buffer->reads; /* The caller gets the reference that the buffer had. */
    buffer->reads = empty_list;

    if (buffer->is_queued)
        receiver->queued_reads -= PyList_Size(reads);

    return reads;
}

/* Queue a buffer, so that its reads are delivered to its owner, unless it is in the queue already.
 * Return 0, or -1 with an exception. */
static int enqueue(Receiver *receiver, SocketBuffer *buffer)
{
    if (buffer->is_queued)
        return 0;
    if (flush_plain_reads(receiver, buffer) < 0)
        return -1;

    buffer->is_queued = 1;
    receiver->queued_reads += count_reads(buffer);
    return discard_result(
        PyObject_CallFunctionObjArgs(receiver->queue_append, (PyObject *)buffer, NULL));
}

/* -- reading a socket -------------------------------------------------------------------------- */

/* Return when the kernel received a message, in ns of the wall clock, or 0 if it made no timestamp.
 *
 * The kernel adds its timestamp to the message as a control message. The timestamp is 0 for a
 * packet that arrived before timestamps were switched on. */
static int64_t kernel_timestamp(struct msghdr *message)
{
    struct cmsghdr *control = CMSG_FIRSTHDR(message);
    for (; control != NULL; control = CMSG_NXTHDR(message, control)) {
        int is_timestamp =
            control->cmsg_level == SOL_SOCKET && control->cmsg_type == SO_TIMESTAMPNS;
        if (!is_timestamp)
            continue;
        struct timespec received_at;
        memcpy(&received_at, CMSG_DATA(control), sizeof received_at);
        return received_at.tv_sec == 0 ? 0 : timespec_ns(&received_at);
    }

    return 0;
}

/* Receive bytes from a socket into the read area of the receiver.
 *
 * Return the number of bytes, 0 at the end of the connection, or -1 with `errno`. `*wall_timestamp`
 * becomes the kernel's timestamp of the newest packet, in ns of the wall clock, or 0 if there is
 * none. */
static ssize_t receive_message(Receiver *receiver, int fd, int64_t *wall_timestamp)
{
    union {
        char bytes[CMSG_SPACE(sizeof(struct timespec))];
        struct cmsghdr aligned; /* gives `bytes` the alignment that control messages need */
    } control;
    struct iovec vector = {.iov_base = receiver->read_area, .iov_len = READ_BYTES};
    struct msghdr message = {
        .msg_iov = &vector,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof control.bytes,
    };
    ssize_t size;
    do {
        size = recvmsg(fd, &message, 0);
    } while (size < 0 && errno == EINTR);

    *wall_timestamp = size > 0 ? kernel_timestamp(&message) : 0;
    return size;
}

/* Return the monotonic time at which the newest packet of a read arrived.
 *
 * It is the kernel's timestamp, or the time of the read if there is none (`wall_timestamp` is 0).
 * The kernel uses the wall clock, which may be set meanwhile. The result is therefore limited to
 * the time in which the packet can have arrived: after the socket was last known to be empty
 * (`empty_at`) and before it was read. */
static int64_t arrival_time(const Receiver *receiver, int64_t wall_timestamp, int64_t empty_at,
                            int64_t read_at)
{
    if (wall_timestamp == 0)
        return read_at;

    int64_t timestamp = wall_timestamp + receiver->wall_to_monotonic_ns;
    if (timestamp > read_at)
        return read_at;
    if (timestamp < empty_at)
        return empty_at;

    return timestamp;
}

/* Return whether a read ends like the last chunk of a response, "0\r\n\r\n". The read must be
 * larger than the bytes that are compared. */
static int ends_like_last_chunk(const Read *read)
{
    const char *read_end = read->data + read->size;
    return memcmp(read_end - CHUNKED_BODY_END_BYTES, CHUNKED_BODY_END, CHUNKED_BODY_END_BYTES) == 0;
}

/* Return whether the owner of a buffer must be called for the read that was just stored in it.
 *
 * A read is urgent in four cases:
 * 1. The owner wants every read.
 * 2. The buffer has a template, by which the usual events are recognised and only counted. This
 *    read was stored with its bytes, so it is unusual and may end the response.
 * 3. It may end the response, because it ends like the last chunk, or is so small that it may be
 *    the last 1 to 4 bytes of that chunk.
 * 4. So much waits already that waiting for more saves nothing. */
static int is_urgent(const SocketBuffer *buffer, const Read *read)
{
    int wants_every_read = !buffer->can_batch_reads;
    if (wants_every_read || has_template(buffer))
        return 1;
    int may_end_response = read->size <= SMALL_READ_BYTES || ends_like_last_chunk(read);
    int has_much = read->size >= LARGE_READ_BYTES || count_reads(buffer) >= MAX_BATCHED_READS;
    return may_end_response || has_much;
}

/* Update the counts after the newest plain read of a buffer, and queue the buffer if it has many.
 *
 * A plain read is one of which only the timestamp and the number of events were stored. It is
 * merged if it held several chunks, which may have arrived at different times. If many reads of
 * deferred sockets (those that are read late) are merged, too few timestamps are exact. Return 0,
 * or -1 with an exception. */
static int account_for_plain_read(Receiver *receiver, SocketBuffer *buffer)
{
    const PlainRead *read = &buffer->plain_reads[buffer->plain_read_count - 1];
    if (buffer->is_deferred) {
        buffer->events_until_urgent -= read->event_count;
        int is_merged = read->uncertainty_ns != ARRIVED_IN_ONE_CHUNK;
        if (is_merged)
            receiver->merged_reads++;
    }

    return buffer->plain_read_count >= MAX_RUN_READS ? enqueue(receiver, buffer) : 0;
}

/* Store a read with its bytes, and queue the buffer if its owner must act. Return 0, or -1 with an
 * exception. */
static int store_read_with_bytes(Receiver *receiver, SocketBuffer *buffer, const Read *read)
{
    if (append_waiting_read(buffer, read) < 0)
        return -1;
    if (buffer->is_queued) {
        receiver->queued_reads++;
        return 0;
    }
    return is_urgent(buffer, read) ? enqueue(receiver, buffer) : 0;
}

/* Store a read in the buffer of its socket, and queue the buffer if its owner must act.
 *
 * A template is the bytes around the text of an event. If all events of the read match it, only
 * their number and the timestamp are stored, instead of the bytes. This is done only while no other
 * read waits with its bytes, because the owner has to get all reads in their order. Return 0, or -1
 * with an exception. */
static int store_read(Receiver *receiver, SocketBuffer *buffer, const Read *read)
{
    int may_be_counted = has_template(buffer) && count_reads(buffer) == 0;
    if (!may_be_counted)
        return store_read_with_bytes(receiver, buffer, read);

    int was_counted = try_store_plain_read(buffer, read);
    int has_failed = was_counted < 0;
    if (has_failed)
        return -1;
    if (was_counted)
        return account_for_plain_read(receiver, buffer);

    /* The reads that were counted before come first. */
    if (flush_plain_reads(receiver, buffer) < 0)
        return -1;

    return store_read_with_bytes(receiver, buffer, read);
}

/* Return the last time at which a socket is known to have been empty, before a read of it.
 *
 * Either a read emptied it, or a poll did not report it (`previous_poll_at`, the last such poll).
 * Such a poll proves nothing if the last read left bytes in the socket, or if the socket came into
 * its epoll after the poll. */
static int64_t find_empty_at(const SocketBuffer *buffer, int64_t previous_poll_at)
{
    int poll_saw_empty_socket =
        !buffer->is_last_read_full && previous_poll_at > buffer->epoll_changed_at;
    if (poll_saw_empty_socket && previous_poll_at > buffer->emptied_at)
        return previous_poll_at;
    return buffer->emptied_at;
}

/* Store the bytes that were received into the read area. Return 0, or -1 with an exception.
 *
 * `wall_timestamp` is the kernel's timestamp, or 0 without one. `previous_poll_at` is the time of
 * the last poll that did not report the socket. */
static int store_received_bytes(Receiver *receiver, SocketBuffer *buffer, Py_ssize_t size,
                                int64_t wall_timestamp, int64_t read_at, int64_t previous_poll_at)
{
    int64_t empty_at = find_empty_at(buffer, previous_poll_at);
    buffer->is_last_read_full = size == READ_BYTES; /* The socket may hold more bytes then. */

    if (!buffer->is_last_read_full)
        buffer->emptied_at = read_at;

    const Read read = {
        .data = receiver->read_area,
        .size = size,
        .timestamp = arrival_time(receiver, wall_timestamp, empty_at, read_at),
        .read_at = read_at,
        .empty_at = empty_at,
        .from_kernel = wall_timestamp != 0,
    };
    return store_read(receiver, buffer, &read);
}

/* Note that a connection has ended, and queue its buffer. `error` is the `errno` of a failure, or 0
 * for a regular end. Return 0, or -1 with an exception. */
static int store_end(Receiver *receiver, SocketBuffer *buffer, int error, int64_t ended_at)
{
    if (error != 0)
        buffer->error = error;
    buffer->ended_at = ended_at;
    return enqueue(receiver, buffer);
}

/* Read one socket once, and store in its buffer what was read, or the end of the connection.
 *
 * `previous_poll_at` is when the last poll began that did not report the socket: it was empty then.
 * Return the time after the read, or -1 with an exception. */
static int64_t read_socket(Receiver *receiver, SocketBuffer *buffer, int64_t previous_poll_at)
{
    int64_t wall_timestamp;
    ssize_t size = receive_message(receiver, buffer->fd, &wall_timestamp);
    int error = size < 0 ? errno : 0; /* before another call changes `errno` */
    int64_t read_at = clock_ns(CLOCK_MONOTONIC);
    int has_nothing_to_read = error == EAGAIN || error == EWOULDBLOCK;
    if (has_nothing_to_read)
        return read_at;
    if (check_reads(buffer) < 0)
        return -1;

    receiver->read_count++;
    int has_data = size > 0;
    int status;
    if (has_data)
        status =
            store_received_bytes(receiver, buffer, size, wall_timestamp, read_at, previous_poll_at);
    else
        status = store_end(receiver, buffer, error, read_at);

    return status < 0 ? -1 : read_at;
}

/* -- writing to a socket ----------------------------------------------------------------------- */

/* Shorten a list of byte ranges so that they have at most MAX_WRITE_BYTES together.
 *
 * Return how many of the ranges are left. The last of them may be shorter than before. */
static size_t limit_vectors(struct iovec *vectors, size_t count)
{
    size_t bytes_left = MAX_WRITE_BYTES;
    for (size_t i = 0; i < count; i++) {
        if (vectors[i].iov_len >= bytes_left) {
            vectors[i].iov_len = bytes_left;
            return i + 1;
        }
        bytes_left -= vectors[i].iov_len;
    }

    return count;
}

/* Send a message without raising SIGPIPE, and again if a signal interrupts it. Return the number of
 * bytes, or -1 with `errno`. */
static ssize_t send_message(int fd, const struct msghdr *message)
{
    ssize_t written_bytes;
    do {
        written_bytes = sendmsg(fd, message, MSG_NOSIGNAL);
    } while (written_bytes < 0 && errno == EINTR);
    return written_bytes;
}

/* Write the first MAX_WRITE_BYTES of some byte ranges to a socket with one system call.
 *
 * Return how many bytes the socket accepted. That is 0 if it cannot take more now. Return
 * WRITE_FAILED if the connection is broken, which the next read of the socket reports.
 *
 * `*started_at` becomes the time just before the system call. The lengths in `vectors` are reduced
 * if they exceed the limit, so the caller must not use them afterwards. */
static long long write_vectors(int fd, struct iovec *vectors, size_t count, int64_t *started_at)
{
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = limit_vectors(vectors, count)};
    ssize_t written_bytes;
    int error;

    *started_at = clock_ns(CLOCK_MONOTONIC);
    Py_BEGIN_ALLOW_THREADS
    written_bytes = send_message(fd, &message);
    error = errno; /* before Python, which runs again after this, changes it */
    Py_END_ALLOW_THREADS
    if (written_bytes >= 0)
        return written_bytes;
    int is_socket_full = error == EAGAIN || error == EWOULDBLOCK;

    return is_socket_full ? 0 : WRITE_FAILED;
}

enum { MAX_PARTS = 4 };

/* The parts of a request that are written together, such as its head and its body. */
typedef struct {
    Py_ssize_t count;
    Py_buffer views[MAX_PARTS];      /* keep the bytes of the Python objects alive */
    struct iovec vectors[MAX_PARTS]; /* the same bytes in the form that sendmsg takes */
} WriteParts;

/* Release the Python objects of the parts. */
static void release_parts(WriteParts *parts)
{
    for (Py_ssize_t i = 0; i < parts->count; i++)
        PyBuffer_Release(&parts->views[i]);
    parts->count = 0;
}

/* Get the bytes of a tuple of at most MAX_PARTS bytes-like objects.
 *
 * Return 0, and then the caller must call `release_parts`, or -1 with an exception. */
static int acquire_parts(PyObject *tuple, WriteParts *parts)
{
    parts->count = 0;
    if (PyTuple_Size(tuple) > MAX_PARTS) {
        PyErr_SetString(PyExc_ValueError, "more than four parts");
        return -1;
    }

    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++) {
        Py_buffer *view = &parts->views[i];
        if (PyObject_GetBuffer(PyTuple_GetItem(tuple, i), view, PyBUF_SIMPLE) < 0) {
            release_parts(parts);
            return -1;
        }
        parts->vectors[i] = (struct iovec){.iov_base = view->buf, .iov_len = (size_t)view->len};
        parts->count++;
    }

    return 0;
}

/* Receiver.send(buffer, parts): write a tuple of bytes-like objects to the socket of a buffer.
 *
 * Return the tuple (time before the first byte, number of bytes that the socket accepted). The
 * number is WRITE_FAILED (-1) after an error of the socket. */
static PyObject *receiver_send(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *value, *parts_tuple;

    if (!PyArg_ParseTuple(args, "OO!", &value, &PyTuple_Type, &parts_tuple))
        return NULL;
    if (!check_socket_buffer(value))
        return NULL;

    WriteParts parts;
    if (acquire_parts(parts_tuple, &parts) < 0)
        return NULL;

    int fd = ((SocketBuffer *)value)->fd;
    int64_t started_at;
    long long written_bytes = write_vectors(fd, parts.vectors, (size_t)parts.count, &started_at);
    release_parts(&parts);

    return Py_BuildValue("LL", (long long)started_at, written_bytes);
}

/* -- time -------------------------------------------------------------------------------------- */

/* Set the timer, which then wakes the process at a monotonic time. Return 0, or -1 with an
 * OSError. */
static int arm_timer(Receiver *receiver, int64_t wake_time)
{
    receiver->timer_armed_for = wake_time;
    if (wake_time <= 0)
        wake_time = 1; /* Any time in the past wakes at once, but 0 would disarm the timer. */

    struct itimerspec setting = {
        .it_value = {.tv_sec = wake_time / NS_PER_S, .tv_nsec = wake_time % NS_PER_S}};
    if (timerfd_settime(receiver->timer, TFD_TIMER_ABSTIME, &setting, NULL) == 0)
        return 0;

    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

/* Plan the next poll of a load generator that awaits responses, and set the timer for it.
 *
 * A poll proves that the sockets that it does not report are empty. Frequent polls therefore bound
 * the uncertainty of a timestamp if two events arrive in one read. Under heavy traffic the interval
 * is longer, because each read is a poll as well.
 *
 * The timer is set for `timer_limit` at the latest, or not at all if that is NO_TIMER. Return 0, or
 * -1 with an exception. */
static int plan_next_poll(Receiver *receiver, int64_t now, int64_t timer_limit)
{
    long long reads_since_plan = receiver->read_count - receiver->reads_when_planned;
    int is_traffic_heavy = reads_since_plan > BUSY_READS;
    int64_t interval_ns = is_traffic_heavy ? BUSY_POLL_EVERY_NS : POLL_EVERY_NS;
    receiver->next_poll_at = now + interval_ns;
    receiver->reads_when_planned = receiver->read_count;
    if (timer_limit == NO_TIMER)
        return 0;

    return arm_timer(receiver, min_int64(receiver->next_poll_at, timer_limit));
}

/* Return the monotonic time, and measure the offset from the wall clock to it.
 *
 * The offset converts the kernel's timestamps. It is not used if the process was interrupted
 * between the readings of both clocks. */
static int64_t read_clocks(Receiver *receiver)
{
    int64_t monotonic = clock_ns(CLOCK_MONOTONIC);
    int64_t wall = clock_ns(CLOCK_REALTIME);
    int64_t duration_ns = clock_ns(CLOCK_MONOTONIC) - monotonic;
    if (duration_ns < MAX_CLOCK_READING_NS)
        receiver->wall_to_monotonic_ns = monotonic - wall;
    return monotonic;
}

/* -- deferred sockets -------------------------------------------------------------------------- */

/* Read a deferred socket that its epoll has reported. Return the time, or -1 with an exception.
 *
 * A deferred socket has no urgent events, so that it is polled about every millisecond only. It
 * goes back to the first epoll, which reports a socket until it is empty, in three cases: its next
 * events are urgent, its connection has ended, or the read may have left data in it. The deferred
 * epoll is edge-triggered, so that it would not report these data again. */
static int64_t read_deferred_socket(Receiver *receiver, const struct epoll_event *event,
                                    int64_t previous_poll_at, int64_t now)
{
    SocketBuffer *buffer = find_buffer(receiver, event->data.fd);
    if (buffer == NULL)
        return now;

    int64_t read_at = read_socket(receiver, buffer, previous_poll_at);
    if (read_at < 0)
        return -1;

    int may_have_more_data = buffer->is_last_read_full;
    int has_ended = event->events != EPOLLIN;
    int is_urgent_again = buffer->events_until_urgent <= 0;
    int should_stop_deferring = may_have_more_data || has_ended || is_urgent_again;
    if (should_stop_deferring && set_deferred(receiver, buffer, 0) < 0)
        return -1;

    return read_at;
}

/* Count the reads of a poll of the deferred sockets, which are read about every millisecond only.
 *
 * The counts decide later whether deferring merges too many events into one read. Merged reads
 * count only if the poll was timely. A late one finds several events in a socket because the
 * process was busy, not because of deferring. */
static void count_deferred_reads(Receiver *receiver, int ready, int is_timely,
                                 long long merged_reads)
{
    receiver->deferred_reads += ready;
    if (is_timely) {
        receiver->timely_reads += ready;
        receiver->timely_merged_reads += merged_reads;
    }
}

/* Read the deferred sockets that a poll has just reported, and count how many of the reads were
 * merged into `*merged_reads`: they held several events, of which only the last has an exact
 * timestamp. Return the time, or -1 with an exception. */
static int64_t read_deferred_sockets(Receiver *receiver, int ready_count, int64_t now,
                                     long long *merged_reads)
{
    int64_t previous_poll_at = receiver->last_deferred_poll_at;
    long long merged_reads_before = receiver->merged_reads;

    for (int i = 0; i < ready_count; i++) {
        now = read_deferred_socket(receiver, &receiver->events[i], previous_poll_at, now);
        if (now < 0)
            return -1;
    }

    *merged_reads = receiver->merged_reads - merged_reads_before;
    return now;
}

/* Return whether a poll of the deferred sockets that begins now is on time.
 *
 * Of a poll that is late, nothing can be concluded: it finds several events in a socket because the
 * process was busy, not because sockets are read late on purpose. */
static int is_deferred_poll_timely(const Receiver *receiver, int64_t poll_started_at)
{
    return receiver->is_deferring && poll_started_at < receiver->next_poll_at + DEFER_NS;
}

/* Poll the deferred sockets, which are those that are read late, and read the ones that are ready.
 *
 * A poll reports MAX_DEFERRED_READY sockets at most. If it reports so many, it may have left out
 * others, so it is no proof that these were empty, and the next poll follows at once. Return the
 * time, or -1 with an exception. */
static int64_t receive_deferred(Receiver *receiver, int64_t poll_started_at)
{
    int is_timely = is_deferred_poll_timely(receiver, poll_started_at);
    int ready_count = epoll_wait(receiver->deferred_epoll, receiver->events, MAX_DEFERRED_READY, 0);
    if (ready_count < 0)
        ready_count = 0; /* A signal interrupted the poll. The next one reports the same sockets. */

    receiver->ready_count += ready_count;

    long long merged_reads;
    int64_t now = read_deferred_sockets(receiver, ready_count, poll_started_at, &merged_reads);
    if (now < 0)
        return -1;

    count_deferred_reads(receiver, ready_count, is_timely, merged_reads);

    int may_have_left_out_sockets = ready_count == MAX_DEFERRED_READY;
    if (!may_have_left_out_sockets)
        receiver->last_deferred_poll_at = poll_started_at;

    if (receiver->is_deferring)
        receiver->next_poll_at = may_have_left_out_sockets ? now : now + DEFER_NS;

    return now;
}

/* Begin deferring: from now on, data at a socket in the deferred epoll does not wake the process,
 * and these sockets are polled about every millisecond. Return 0, or -1 with an exception. */
static int begin_deferring(Receiver *receiver, int64_t now)
{
    receiver->is_traffic_heavy = 1;
    receiver->is_deferring = receiver->deferred_count > 0;
    receiver->next_poll_at = now;
    return control_epoll(receiver->epoll, EPOLL_CTL_DEL, receiver->deferred_epoll, 0);
}

/* End deferring: the first epoll watches the deferred one again, so that data at any socket wakes
 * the process. Return 0, or -1 with an exception. */
static int end_deferring(Receiver *receiver)
{
    receiver->is_traffic_heavy = 0;
    receiver->is_deferring = 0;
    return control_epoll(receiver->epoll, EPOLL_CTL_ADD, receiver->deferred_epoll, EPOLLIN);
}

/* End deferring (reading sockets late) if reads became rare, or if too many of them were merged:
 * they held several events, of which only the last has an exact timestamp.
 *
 * After too many merged reads, deferring may not begin again before a pause, and the next pause is
 * twice as long, because the traffic probably stays as it is. Return 0, or -1 with an exception. */
static int end_deferring_if_needed(Receiver *receiver, int64_t now, long long reads_per_s,
                                   int has_too_many_merged)
{
    if (has_too_many_merged) {
        receiver->defer_again_at = now + receiver->pause_ns;
        receiver->pause_ns *= 2;
        return end_deferring(receiver);
    }
    receiver->pause_ns = DEFER_PAUSE_NS;
    return reads_per_s < DEFER_DOWN_TO_READS_PER_S ? end_deferring(receiver) : 0;
}

/* Begin a decision period, in which no reads were counted yet. */
static void start_decision_period(Receiver *receiver, int64_t now)
{
    receiver->period_start = now;
    receiver->deferred_reads = 0;
    receiver->timely_reads = 0;
    receiver->timely_merged_reads = 0;
}

/* End a decision period: decide from its reads whether to defer, and start the next period.
 *
 * To defer means to read sockets late, which saves wake-ups of the process when reads are frequent.
 * It begins at a higher rate of reads than it ends, so that it does not toggle. It also ends if
 * more than one in READS_PER_MERGED_READ reads was merged: such a read held several events, of
 * which only the last has an exact timestamp. Return 0, or -1 with an exception. */
static int end_decision_period(Receiver *receiver, int64_t now)
{
    long long reads_per_s = receiver->deferred_reads * NS_PER_S / (now - receiver->period_start);
    int has_too_many_merged =
        receiver->timely_merged_reads * READS_PER_MERGED_READ > receiver->timely_reads;
    start_decision_period(receiver, now);

    int had_decided_to_defer = receiver->is_traffic_heavy;
    if (had_decided_to_defer)
        return end_deferring_if_needed(receiver, now, reads_per_s, has_too_many_merged);

    int has_enough_reads = reads_per_s >= DEFER_FROM_READS_PER_S;
    int is_pause_over = now >= receiver->defer_again_at;
    return has_enough_reads && is_pause_over ? begin_deferring(receiver, now) : 0;
}

/* -- receiving --------------------------------------------------------------------------------- */

/* When `receive` returns, and how long it waits. */
typedef struct {
    int max_wait_ms;     /* the longest wait of each poll, 0 for none, negative for no limit */
    int64_t return_at;   /* when to return at the latest */
    int64_t timer_limit; /* the latest time for which the timer may be set, or NO_TIMER */
} ReceiveLimits;

/* Return how long the next poll may wait, in ms, or a negative number for no limit.
 *
 * Deferred sockets do not end a wait, but are polled about every millisecond. While there are any,
 * a poll that may wait does so only until the next poll of the deferred sockets. The shortest wait
 * of epoll, DEFER_WAIT_MS, is exact enough for that. */
static int poll_wait_ms(const Receiver *receiver, int max_wait_ms)
{
    if (!receiver->is_deferring || max_wait_ms == 0)
        return max_wait_ms;
    return receiver->next_poll_at > receiver->now ? DEFER_WAIT_MS : 0;
}

/* Poll the first epoll once, for at most `max_wait_ms` (negative for no limit).
 *
 * Return the number of ready descriptors, which are in `receiver->events`, or -1 with an exception.
 * A signal ends the wait, and its handler may raise. */
static int poll_once(Receiver *receiver, int max_wait_ms)
{
    int wait_ms = poll_wait_ms(receiver, max_wait_ms);
    int ready;

    if (wait_ms == 0)
        ready = epoll_wait(receiver->epoll, receiver->events, MAX_READY, 0);
    else {
        Py_BEGIN_ALLOW_THREADS
        ready = epoll_wait(receiver->epoll, receiver->events, MAX_READY, wait_ms);
        Py_END_ALLOW_THREADS
    }

    if (ready >= 0)
        return ready;
    if (errno != EINTR) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }

    return PyErr_CheckSignals() < 0 ? -1 : 0;
}

/* Append a pair (descriptor, events) to the list of what the caller has to handle.
 *
 * The list is created with its first item: `*unhandled` is NULL until then, because there usually
 * is nothing. Return 0, or -1 with an exception. */
static int append_unhandled(PyObject **unhandled, int fd, uint32_t events)
{
    if (*unhandled == NULL)
        *unhandled = PyList_New(0);
    if (*unhandled == NULL)
        return -1;
    return append_stealing(*unhandled, Py_BuildValue("iI", fd, events));
}

/* Handle one descriptor that a poll has reported.
 *
 * - A connected socket that has data, or whose connection has ended, is read.
 * - A connected socket that can be written is appended to `*unhandled`, for the caller.
 * - Any other descriptor, the timer or a socket that is still connecting, is appended there too.
 *
 * Return the time after the read, in ns. That is `now` if nothing was read, or -1 with an
 * exception. */
static int64_t handle_ready_descriptor(Receiver *receiver, const struct epoll_event *event,
                                       int64_t previous_poll_at, int64_t now, PyObject **unhandled)
{
    SocketBuffer *buffer = find_buffer(receiver, event->data.fd);
    int is_connected_socket = buffer != NULL && buffer->is_readable;
    int can_be_written = (event->events & EPOLLOUT) != 0;
    int is_for_caller = !is_connected_socket || can_be_written;
    if (is_for_caller && append_unhandled(unhandled, event->data.fd, event->events) < 0)
        return -1;
    if (!is_connected_socket)
        return now;

    int has_data_or_end = (event->events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0;
    int was_end_read_before = buffer->ended_at != 0;
    if (!has_data_or_end || was_end_read_before)
        return now;

    return read_socket(receiver, buffer, previous_poll_at);
}

/* Read the sockets that a poll has just reported in `receiver->events`.
 *
 * The previous poll did not report these sockets, so they were empty when it began. A poll proves
 * this of all other sockets only if it has reported fewer than it can (MAX_READY).
 *
 * What is not a readable socket is added to `*unhandled`, for the caller. `*has_deferred_data`
 * becomes 1 if the epoll of the deferred sockets is itself ready, because one of them has data.
 * Return the time after the last read, or -1 with an exception. */
static int64_t read_ready(Receiver *receiver, int ready_count, PyObject **unhandled,
                          int *has_deferred_data)
{
    int64_t previous_poll_at = receiver->last_poll_at;
    int is_report_complete = ready_count < MAX_READY;
    if (is_report_complete)
        receiver->last_poll_at = receiver->poll_started_at;

    int64_t now = receiver->now;
    *has_deferred_data = 0;

    for (int i = 0; i < ready_count; i++) {
        const struct epoll_event *event = &receiver->events[i];
        int is_deferred_epoll = event->data.fd == receiver->deferred_epoll;
        if (is_deferred_epoll)
            *has_deferred_data = 1;
        else
            now = handle_ready_descriptor(receiver, event, previous_poll_at, now, unhandled);

        if (now < 0)
            return -1;
    }

    return now;
}

/* Return whether it is time to poll the deferred sockets, which do not wake the process.
 *
 * The process is awake, so this is done a little before the planned time. If a request is due
 * (`wake_at`), it is sent first, and the poll may be up to DEFER_NS late. */
static int is_deferred_poll_due(const Receiver *receiver, int64_t now)
{
    int is_request_due = now >= receiver->wake_at;
    if (is_request_due)
        return now > receiver->next_poll_at + DEFER_NS;
    return now > receiver->next_poll_at - EARLY_DEFERRED_POLL_NS;
}

/* Read the sockets that a poll has reported, and then, if it is time for that, poll and read the
 * deferred sockets, which are read late.
 *
 * Under heavy traffic (`was_deferring`, when the poll began), deferred sockets are polled at
 * planned times. Under light traffic the poll reports the deferred epoll itself if one of its
 * sockets has data. Return the time after the reads, or -1 with an exception. */
static int64_t read_sockets(Receiver *receiver, int ready_count, int was_deferring,
                            PyObject **unhandled)
{
    int has_deferred_data;
    int64_t read_at = read_ready(receiver, ready_count, unhandled, &has_deferred_data);
    if (read_at < 0)
        return -1;
    int should_poll_deferred =
        was_deferring ? is_deferred_poll_due(receiver, read_at) : has_deferred_data;
    return should_poll_deferred ? receive_deferred(receiver, read_at) : read_at;
}

/* End a pass, which is one poll with the reads of the sockets that it has reported.
 *
 * First, at the end of a decision period, decide whether sockets are read late ("deferred"). While
 * they are, the time of the next poll is known. Otherwise plan the next poll, if the planned time
 * has passed or is so near that another poll would tell nothing new.
 *
 * The timer is set for `timer_limit` at the latest, or not at all if that is NO_TIMER. Return 0, or
 * -1 with an exception. */
static int plan_after_pass(Receiver *receiver, int64_t now, int64_t timer_limit)
{
    receiver->now = now;
    receiver->poll_started_at = now;
    int is_period_over = now - receiver->period_start > DECISION_PERIOD_NS;
    if (is_period_over) {
        int status = end_decision_period(receiver, now);
        if (status < 0)
            return -1;
    }
    if (receiver->is_deferring)
        return 0;

    int is_next_poll_near = now > receiver->next_poll_at - PLAN_AHEAD_NS;
    return is_next_poll_near ? plan_next_poll(receiver, now, timer_limit) : 0;
}

/* Update the time and the counts after a poll that reported `ready` descriptors. */
static void note_poll(Receiver *receiver, int ready)
{
    receiver->now = read_clocks(receiver);
    receiver->poll_count++;
    receiver->ready_count = ready;
}

/* Return whether a request is due (`wake_at`) and so many sockets are ready that reading them would
 * delay it. */
static int must_send_before_reading(const Receiver *receiver)
{
    int is_request_due = receiver->now >= receiver->wake_at;
    return is_request_due && receiver->ready_count > MAX_READY_BEFORE_SENDING;
}

/* Return whether `receive` has to return after a pass, which is one poll with its reads.
 *
 * It returns if there is work for the caller, if its time is over, or if its wait is over: nothing
 * was ready within the longest wait. A wait without a limit is never over. While sockets are
 * deferred (read late), however, each poll waits only for a short time, so that there are polls
 * that report nothing. */
static int is_receiving_over(const Receiver *receiver, const ReceiveLimits *limits,
                             int was_deferring, const PyObject *unhandled)
{
    int has_work_for_caller = unhandled != NULL || PyObject_Size(receiver->queue) > 0;
    int is_time_over = receiver->now >= limits->return_at;
    if (has_work_for_caller || is_time_over)
        return 1;

    int has_unlimited_wait = limits->max_wait_ms < 0;
    int was_wait_cut_short = was_deferring && has_unlimited_wait;
    int was_anything_ready = receiver->ready_count > 0;

    return !was_anything_ready && !was_wait_cut_short;
}

/* Whether `receive` goes on after a pass. */
enum PassResult {
    PASS_FAILED = -1, /* with an exception */
    POLL_AGAIN = 0,
    RETURN_TO_CALLER = 1,
};

/* Run one pass of `receive`: poll once, read what is ready, and plan the next poll.
 *
 * If a request is due and many sockets are ready, nothing is read, so that the caller sends the
 * request on time. Events for the caller are added to the list `*unhandled`, which is NULL without
 * any. */
static enum PassResult run_pass(Receiver *receiver, const ReceiveLimits *limits,
                                PyObject **unhandled)
{
    int was_deferring = receiver->is_deferring; /* when the poll began */
    int ready = poll_once(receiver, limits->max_wait_ms);
    if (ready < 0)
        return PASS_FAILED;

    note_poll(receiver, ready);
    if (must_send_before_reading(receiver))
        return RETURN_TO_CALLER;

    int64_t now = read_sockets(receiver, ready, was_deferring, unhandled);
    if (now < 0)
        return PASS_FAILED;

    /* With unhandled events, the caller acts now and sets the timer afterwards. */
    int64_t timer_limit = *unhandled != NULL ? NO_TIMER : limits->timer_limit;
    if (plan_after_pass(receiver, now, timer_limit) < 0)
        return PASS_FAILED;

    int is_over = is_receiving_over(receiver, limits, was_deferring, *unhandled);
    return is_over ? RETURN_TO_CALLER : POLL_AGAIN;
}

/* Poll and read repeatedly, until there is work for the caller, the time `limits->return_at` has
 * come, or nothing is ready.
 *
 * `*unhandled` becomes a new list of the descriptors and events that the caller has to handle, such
 * as the timer, or NULL if there are none. Return 0, or -1 with an exception. */
static int receive(Receiver *receiver, const ReceiveLimits *limits, PyObject **unhandled)
{
    *unhandled = NULL;
    enum PassResult result = POLL_AGAIN;
    while (result == POLL_AGAIN)
        result = run_pass(receiver, limits, unhandled);

    if (result == PASS_FAILED) {
        Py_CLEAR(*unhandled);
        return -1;
    }

    return 0;
}

/* Receiver.receive(max_wait_ms, return_at, timer_limit): poll and read repeatedly, until there is
 * work for the caller, the time `return_at` has come, or nothing is ready.
 *
 * `max_wait_ms` is the longest wait of each poll, and `timer_limit` the latest time for which the
 * timer may be set (-1 for no timer). Return the list of the pairs (descriptor, events) that the
 * caller has to handle, which is often empty. */
static PyObject *receiver_receive(PyObject *self, PyObject *args)
{
    int max_wait_ms;
    long long return_at, timer_limit;

    if (!PyArg_ParseTuple(args, "iLL", &max_wait_ms, &return_at, &timer_limit))
        return NULL;

    const ReceiveLimits limits = {
        .max_wait_ms = max_wait_ms,
        .return_at = return_at,
        .timer_limit = timer_limit,
    };
    PyObject *unhandled;
    if (receive((Receiver *)self, &limits, &unhandled) < 0)
        return NULL;

    return unhandled != NULL ? unhandled : PyList_New(0);
}
