/* Receiver: reads the sockets of two epoll instances in one loop. Part of _compiled.c.
 *
 * The reference is transport/receiver.py, which describes the fields and says what the methods
 * do. */

typedef struct {
    PyObject_HEAD
    PyObject *queue;
    PyObject *queue_append, *queue_popleft; /* its methods */
    SocketBuffer **buffers;                 /* by descriptor, NULL where there is none */
    int buffers_size;
    int epoll, deferred_epoll, timer;
    long long now, last_poll_at, poll_started_at, to_monotonic, next_poll_at, timer_armed_for,
        reads_when_planned, wake_at;
    long long ready_count, queued_reads, poll_count, read_count;
    long long last_deferred_poll_at, deferred_count, deferred_reads, timely_reads, merged_reads;
    long long period_start, defer_again_at, pause_ns;
    char is_deferring, is_traffic_heavy;
    struct epoll_event events[MAX_READY];
    char read_area[READ_BYTES];
} Receiver;

/* Change what an epoll instance watches. Return -1 with an exception. */
static int control_epoll(int epoll, int operation, int fd, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.fd = fd};
    if (epoll_ctl(epoll, operation, fd, &event) == 0)
        return 0;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

/* Set a reference to an attribute of a value. Return -1 with an exception. */
static int set_attribute_of(PyObject **place, PyObject *value, const char *name)
{
    PyObject *attribute = PyObject_GetAttrString(value, name);
    if (attribute == NULL)
        return -1;
    set_field_stealing(place, attribute);
    return 0;
}

static int receiver_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    Receiver *receiver = (Receiver *)self;
    PyObject *poll, *deferred_poll, *timer, *queue;
    if (!PyArg_ParseTuple(args, "OOOO", &poll, &deferred_poll, &timer, &queue))
        return -1;
    receiver->epoll = PyObject_AsFileDescriptor(poll);
    if (receiver->epoll < 0)
        return -1;
    receiver->deferred_epoll = PyObject_AsFileDescriptor(deferred_poll);
    if (receiver->deferred_epoll < 0)
        return -1;
    receiver->timer = PyObject_AsFileDescriptor(timer);
    if (receiver->timer < 0)
        return -1;
    if (set_attribute_of(&receiver->queue_append, queue, "append") < 0 ||
        set_attribute_of(&receiver->queue_popleft, queue, "popleft") < 0)
        return -1;
    set_field(&receiver->queue, queue);
    int64_t now = clock_ns(CLOCK_MONOTONIC);
    receiver->now = now;
    receiver->last_poll_at = now;
    receiver->poll_started_at = now;
    receiver->last_deferred_poll_at = now;
    receiver->period_start = now;
    receiver->pause_ns = DEFER_PAUSE_NS;
    receiver->wake_at = FOREVER;
    receiver->to_monotonic = now - clock_ns(CLOCK_REALTIME);
    return control_epoll(receiver->epoll, EPOLL_CTL_ADD, receiver->deferred_epoll, EPOLLIN);
}

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
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    receiver_clear(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* -- the buffers ------------------------------------------------------------------------------- */

/* Return the buffer of a descriptor (borrowed), or NULL. */
static SocketBuffer *find_buffer(const Receiver *receiver, int fd)
{
    return fd >= 0 && fd < receiver->buffers_size ? receiver->buffers[fd] : NULL;
}

/* Make room for a descriptor. Return -1 with an exception. */
static int reserve_buffer(Receiver *receiver, int fd)
{
    if (fd < receiver->buffers_size)
        return 0;
    int size = fd * 2 + 64;
    SocketBuffer **buffers = PyMem_Realloc(receiver->buffers, (size_t)size * sizeof *buffers);
    if (buffers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memset(buffers + receiver->buffers_size, 0,
           (size_t)(size - receiver->buffers_size) * sizeof *buffers);
    receiver->buffers = buffers;
    receiver->buffers_size = size;
    return 0;
}

static PyObject *receiver_add(PyObject *self, PyObject *value)
{
    Receiver *receiver = (Receiver *)self;
    if (!is_socket_buffer(value))
        return NULL;
    int fd = ((SocketBuffer *)value)->fd;
    if (fd < 0) {
        PyErr_SetString(PyExc_ValueError, "a descriptor below 0");
        return NULL;
    }
    if (reserve_buffer(receiver, fd) < 0)
        return NULL;
    set_field((PyObject **)&receiver->buffers[fd], value);
    Py_RETURN_NONE;
}

/* Move a socket to the deferred epoll or back. Return -1 with an exception. */
static int set_deferred(Receiver *receiver, SocketBuffer *buffer, int is_deferred)
{
    if (buffer->is_deferred == is_deferred)
        return 0;
    int from = is_deferred ? receiver->epoll : receiver->deferred_epoll;
    int to = is_deferred ? receiver->deferred_epoll : receiver->epoll;
    uint32_t events = is_deferred ? DEFERRED_EPOLL_EVENTS : EPOLLIN;
    if (control_epoll(from, EPOLL_CTL_DEL, buffer->fd, 0) < 0 ||
        control_epoll(to, EPOLL_CTL_ADD, buffer->fd, events) < 0)
        return -1;
    receiver->deferred_count += is_deferred ? 1 : -1;
    buffer->is_deferred = (char)is_deferred;
    buffer->epoll_changed_at = clock_ns(CLOCK_MONOTONIC);
    receiver->is_deferring = receiver->is_traffic_heavy && receiver->deferred_count > 0;
    return 0;
}

static PyObject *receiver_defer(PyObject *self, PyObject *args)
{
    PyObject *value;
    long long events;
    if (!PyArg_ParseTuple(args, "OL", &value, &events) || !is_socket_buffer(value))
        return NULL;
    SocketBuffer *buffer = (SocketBuffer *)value;
    buffer->events_until_urgent = events;
    if (set_deferred((Receiver *)self, buffer, events > 0) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *receiver_stop_deferring(PyObject *self, PyObject *value)
{
    if (!is_socket_buffer(value) || set_deferred((Receiver *)self, (SocketBuffer *)value, 0) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *receiver_remove(PyObject *self, PyObject *value)
{
    Receiver *receiver = (Receiver *)self;
    if (!is_socket_buffer(value) || set_deferred(receiver, (SocketBuffer *)value, 0) < 0)
        return NULL;
    int fd = ((SocketBuffer *)value)->fd;
    SocketBuffer *previous = find_buffer(receiver, fd);
    if (previous != NULL) {
        receiver->buffers[fd] = NULL;
        Py_DECREF((PyObject *)previous);
    }
    Py_RETURN_NONE;
}

/* Append the run of plain reads to the reads of a buffer. Return -1 with an exception. */
static int flush_plain_reads(Receiver *receiver, SocketBuffer *buffer)
{
    if (buffer->plain_read_count == 0)
        return 0;
    PyObject *run = plain_run_tuple(buffer);
    if (run == NULL)
        return -1;
    int failed = PyList_Append(buffer->reads, run) < 0;
    Py_DECREF(run);
    if (buffer->is_queued && !failed)
        receiver->queued_reads++;
    buffer->plain_read_count = 0;
    buffer->plain_bytes = 0;
    return failed ? -1 : 0;
}

static PyObject *receiver_take_reads(PyObject *self, PyObject *value)
{
    Receiver *receiver = (Receiver *)self;
    if (!is_socket_buffer(value))
        return NULL;
    SocketBuffer *buffer = (SocketBuffer *)value;
    PyObject *empty = PyList_New(0);
    PyObject *reads = empty == NULL ? NULL : materialize_reads(buffer);
    if (reads == NULL || flush_plain_reads(receiver, buffer) < 0) {
        Py_XDECREF(empty);
        return NULL;
    }
    if (buffer->is_queued)
        receiver->queued_reads -= PyList_Size(reads);
    buffer->reads = empty; /* The caller gets the reference to the reads. */
    return reads;
}

/* Queue a buffer for its owner. Return -1 with an exception. */
static int enqueue(Receiver *receiver, SocketBuffer *buffer)
{
    if (buffer->is_queued)
        return 0;
    if (flush_plain_reads(receiver, buffer) < 0)
        return -1;
    buffer->is_queued = 1;
    receiver->queued_reads += count_reads(buffer);
    PyObject *result =
        PyObject_CallFunctionObjArgs(receiver->queue_append, (PyObject *)buffer, NULL);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* -- reading a socket -------------------------------------------------------------------------- */

/* Return the kernel's timestamp of a message on the wall clock, or 0 without one. */
static int64_t kernel_timestamp(struct msghdr *message)
{
    for (struct cmsghdr *control = CMSG_FIRSTHDR(message); control;
         control = CMSG_NXTHDR(message, control)) {
        if (control->cmsg_level == SOL_SOCKET && control->cmsg_type == SO_TIMESTAMPNS) {
            struct timespec at;
            memcpy(&at, CMSG_DATA(control), sizeof at);
            return at.tv_sec ? (int64_t)at.tv_sec * NS_PER_S + at.tv_nsec : 0;
        }
    }
    return 0;
}

/* Read from a socket into the read area. Return the number of bytes, or -1 after an error.
 * `*wall_timestamp` becomes the kernel's timestamp, or 0 without one. */
static ssize_t receive_message(Receiver *receiver, int fd, int64_t *wall_timestamp)
{
    union {
        char bytes[CMSG_SPACE(sizeof(struct timespec))];
        struct cmsghdr aligned;
    } control;
    struct iovec vector = {.iov_base = receiver->read_area, .iov_len = READ_BYTES};
    struct msghdr message = {
        .msg_iov = &vector,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof control.bytes,
    };
    ssize_t size;
    do
        size = recvmsg(fd, &message, 0);
    while (size < 0 && errno == EINTR);
    *wall_timestamp = size > 0 ? kernel_timestamp(&message) : 0;
    return size;
}

/* Return the time at which a read arrived: the kernel's timestamp, within the bounds that are
 * known. */
static int64_t arrival_time(const Receiver *receiver, int64_t wall_timestamp, int64_t read_at,
                            int64_t empty_at)
{
    if (!wall_timestamp)
        return read_at;
    int64_t timestamp = wall_timestamp + receiver->to_monotonic;
    if (timestamp > read_at)
        return read_at;
    return timestamp < empty_at ? empty_at : timestamp;
}

/* Return whether the owner must be called for a read that was kept. */
static int is_urgent(const SocketBuffer *buffer, const Read *read, int has_template)
{
    return !buffer->can_batch_reads || has_template || count_reads(buffer) >= MAX_BATCHED_READS ||
           read->size <= SMALL_READ_BYTES || read->size >= LARGE_READ_BYTES ||
           memcmp(read->data + read->size - 4, "\r\n\r\n", 4) == 0;
}

/* Note that the last read of the run was counted. Return -1 with an exception. */
static int count_stored_plain_read(Receiver *receiver, SocketBuffer *buffer)
{
    const PlainRead *read = &buffer->plain_reads[buffer->plain_read_count - 1];
    if (buffer->is_deferred) {
        buffer->events_until_urgent -= read->events;
        if (read->error != CAME_IN_ONE_CHUNK && read->events > 1)
            receiver->merged_reads++;
    }
    return buffer->plain_read_count >= MAX_RUN_READS ? enqueue(receiver, buffer) : 0;
}

/* Count a read of plain events or keep any other, and queue the buffer if it is necessary. Return
 * -1 with an exception. */
static int store_read(Receiver *receiver, SocketBuffer *buffer, const Read *read)
{
    int has_template = buffer->template != NULL && PyTuple_Check(buffer->template);
    if (has_template && count_reads(buffer) == 0) {
        int is_plain = count_if_plain(buffer, read);
        if (is_plain < 0)
            return -1;
        if (is_plain)
            return count_stored_plain_read(receiver, buffer);
        if (flush_plain_reads(receiver, buffer) < 0)
            return -1;
    }
    if (append_read(buffer, read) < 0)
        return -1;
    if (buffer->is_queued) {
        receiver->queued_reads++;
        return 0;
    }
    return is_urgent(buffer, read, has_template) ? enqueue(receiver, buffer) : 0;
}

/* Read one socket once. Return the time, or -1 with an exception. */
static int64_t read_socket(Receiver *receiver, SocketBuffer *buffer, int64_t previous_poll_at)
{
    int64_t wall_timestamp;
    ssize_t size = receive_message(receiver, buffer->fd, &wall_timestamp);
    if (size < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return clock_ns(CLOCK_MONOTONIC);
        buffer->error = errno;
        size = 0;
    }
    int64_t read_at = clock_ns(CLOCK_MONOTONIC);
    if (buffer->reads == NULL || !PyList_Check(buffer->reads)) {
        PyErr_SetString(PyExc_TypeError, "the reads of a SocketBuffer are a list");
        return -1;
    }
    receiver->read_count++;
    if (size == 0) {
        buffer->ended_at = read_at;
        return enqueue(receiver, buffer) < 0 ? -1 : read_at;
    }
    int64_t empty_at = buffer->emptied_at;
    int poll_saw_empty_socket =
        !buffer->is_last_read_full && previous_poll_at > buffer->epoll_changed_at;
    if (poll_saw_empty_socket && empty_at < previous_poll_at)
        empty_at = previous_poll_at;
    buffer->is_last_read_full = size == READ_BYTES;
    if (!buffer->is_last_read_full)
        buffer->emptied_at = read_at;
    const Read read = {
        .data = receiver->read_area,
        .size = size,
        .timestamp = arrival_time(receiver, wall_timestamp, read_at, empty_at),
        .read_at = read_at,
        .empty_at = empty_at,
        .from_kernel = wall_timestamp != 0,
    };
    return store_read(receiver, buffer, &read) < 0 ? -1 : read_at;
}

/* -- writing to a socket ----------------------------------------------------------------------- */

/* Shorten the vectors to MAX_WRITE_BYTES together and return how many of them are left. */
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

/* Write to a socket, at most MAX_WRITE_BYTES. Return how many bytes it accepted, or -1 after an
 * error. `*started_at` becomes the time before the first byte. */
static long long write_parts(int fd, struct iovec *vectors, size_t count, int64_t *started_at)
{
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = limit_vectors(vectors, count)};
    ssize_t written;
    *started_at = clock_ns(CLOCK_MONOTONIC);
    Py_BEGIN_ALLOW_THREADS do written = sendmsg(fd, &message, MSG_NOSIGNAL);
    while (written < 0 && errno == EINTR)
        ;
    if (written < 0)
        written = errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
    Py_END_ALLOW_THREADS return written;
}

enum { MAX_PARTS = 4 };

/* Receiver.send(buffer, parts) */
static PyObject *receiver_send(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *value, *parts;
    if (!PyArg_ParseTuple(args, "OO!", &value, &PyTuple_Type, &parts) || !is_socket_buffer(value))
        return NULL;
    Py_ssize_t count = PyTuple_Size(parts);
    if (count > MAX_PARTS) {
        PyErr_SetString(PyExc_ValueError, "more than four parts");
        return NULL;
    }
    struct iovec vectors[MAX_PARTS];
    Py_buffer views[MAX_PARTS];
    Py_ssize_t view_count = 0;
    PyObject *result = NULL;
    for (; view_count < count; view_count++) {
        Py_buffer *view = &views[view_count];
        if (PyObject_GetBuffer(PyTuple_GetItem(parts, view_count), view, PyBUF_SIMPLE) < 0)
            goto release;
        vectors[view_count] = (struct iovec){.iov_base = view->buf, .iov_len = (size_t)view->len};
    }
    int64_t started_at;
    long long written =
        write_parts(((SocketBuffer *)value)->fd, vectors, (size_t)count, &started_at);
    result = Py_BuildValue("LL", (long long)started_at, written);
release:
    while (view_count-- > 0)
        PyBuffer_Release(&views[view_count]);
    return result;
}

/* -- time -------------------------------------------------------------------------------------- */

/* Set the timer. Return -1 with an exception. */
static int arm_timer(Receiver *receiver, int64_t at)
{
    receiver->timer_armed_for = at;
    if (at <= 0)
        at = 1; /* 0 would disarm it. */
    struct itimerspec setting = {.it_value = {.tv_sec = at / NS_PER_S, .tv_nsec = at % NS_PER_S}};
    if (timerfd_settime(receiver->timer, TFD_TIMER_ABSTIME, &setting, NULL) == 0)
        return 0;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

/* Plan the next poll. Set the timer for it or for `timer_limit`, if that is not negative. Return
 * -1 with an exception. */
static int plan_next_poll(Receiver *receiver, int64_t now, int64_t timer_limit)
{
    int is_busy = receiver->read_count - receiver->reads_when_planned > BUSY_READS;
    receiver->next_poll_at = now + (is_busy ? BUSY_POLL_EVERY_NS : POLL_EVERY_NS);
    receiver->reads_when_planned = receiver->read_count;
    if (timer_limit < 0)
        return 0;
    return arm_timer(receiver,
                     receiver->next_poll_at < timer_limit ? receiver->next_poll_at : timer_limit);
}

/* Return the time, and update the offset between the monotonic clock and the wall clock. */
static int64_t read_clocks(Receiver *receiver)
{
    int64_t now = clock_ns(CLOCK_MONOTONIC);
    int64_t wall = clock_ns(CLOCK_REALTIME);
    if (clock_ns(CLOCK_MONOTONIC) - now < MAX_CLOCK_READING_NS)
        receiver->to_monotonic = now - wall;
    return now;
}

/* -- deferred sockets -------------------------------------------------------------------------- */

/* Poll the deferred sockets once and read those that are ready. Return the time, or -1 with an
 * exception. */
static int64_t receive_deferred(Receiver *receiver, int64_t now)
{
    int ready = epoll_wait(receiver->deferred_epoll, receiver->events, MANY_READY, 0);
    if (ready < 0)
        ready = 0; /* A signal came. */
    receiver->ready_count += ready;
    int64_t previous_poll_at = receiver->last_deferred_poll_at;
    int64_t merged_reads_before = receiver->merged_reads;
    int is_timely = receiver->is_deferring && now < receiver->next_poll_at + DEFER_NS;
    if (ready < MANY_READY)
        receiver->last_deferred_poll_at = now;
    for (int i = 0; i < ready; i++) {
        SocketBuffer *buffer = find_buffer(receiver, receiver->events[i].data.fd);
        if (buffer == NULL)
            continue;
        now = read_socket(receiver, buffer, previous_poll_at);
        if (now < 0)
            return -1;
        /* An edge is reported once, but the first epoll reports for as long as there is data. */
        int is_urgent_again = buffer->is_last_read_full || receiver->events[i].events != EPOLLIN ||
                              buffer->events_until_urgent <= 0;
        if (is_urgent_again && set_deferred(receiver, buffer, 0) < 0)
            return -1;
    }
    receiver->deferred_reads += ready;
    if (is_timely)
        receiver->timely_reads += ready;
    else
        receiver->merged_reads = merged_reads_before;
    if (receiver->is_deferring)
        receiver->next_poll_at = ready < MANY_READY ? now + DEFER_NS : now;
    return now;
}

/* Defer while there are many events, unless that makes too many timestamps uncertain. Return -1
 * with an exception. */
static int decide_whether_to_defer(Receiver *receiver, int64_t now)
{
    long long reads_per_s = receiver->deferred_reads * NS_PER_S / (now - receiver->period_start);
    int has_too_many_merged =
        receiver->merged_reads * READS_PER_MERGED_READ > receiver->timely_reads;
    receiver->deferred_reads = 0;
    receiver->timely_reads = 0;
    receiver->merged_reads = 0;
    receiver->period_start = now;
    if (!receiver->is_traffic_heavy) {
        if (reads_per_s < DEFER_FROM_READS_PER_S || now < receiver->defer_again_at)
            return 0;
        receiver->is_traffic_heavy = 1;
        receiver->is_deferring = receiver->deferred_count > 0;
        receiver->next_poll_at = now;
        return control_epoll(receiver->epoll, EPOLL_CTL_DEL, receiver->deferred_epoll, 0);
    }
    if (has_too_many_merged) {
        receiver->defer_again_at = now + receiver->pause_ns;
        receiver->pause_ns *= 2;
    } else
        receiver->pause_ns = DEFER_PAUSE_NS;
    if (!has_too_many_merged && reads_per_s >= DEFER_DOWN_TO_READS_PER_S)
        return 0;
    receiver->is_deferring = 0;
    receiver->is_traffic_heavy = 0;
    return control_epoll(receiver->epoll, EPOLL_CTL_ADD, receiver->deferred_epoll, EPOLLIN);
}

/* -- receiving --------------------------------------------------------------------------------- */

/* Poll once. Return the number of ready descriptors, or -1 with an exception. */
static int poll_once(Receiver *receiver, int wait_ms)
{
    int ready;
    if (receiver->is_deferring && wait_ms)
        wait_ms = receiver->next_poll_at > receiver->now ? DEFER_WAIT_MS : 0;
    if (wait_ms == 0)
        ready = epoll_wait(receiver->epoll, receiver->events, MAX_READY, 0);
    else {
        Py_BEGIN_ALLOW_THREADS ready =
            epoll_wait(receiver->epoll, receiver->events, MAX_READY, wait_ms);
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

/* Append a descriptor and its events to a list, which is made where it is NULL. Return -1 with an
 * exception. */
static int append_unhandled(PyObject **unhandled, int fd, uint32_t events)
{
    if (*unhandled == NULL && (*unhandled = PyList_New(0)) == NULL)
        return -1;
    PyObject *other = Py_BuildValue("iI", fd, events);
    int failed = other == NULL || PyList_Append(*unhandled, other) < 0;
    Py_XDECREF(other);
    return failed ? -1 : 0;
}

/* Read the sockets that a poll reported, and append what is not for the receiver to `*unhandled`.
 * `*has_deferred_data` becomes 1 if a deferred socket is ready. Return the time, or -1 with an
 * exception. */
static int64_t read_ready(Receiver *receiver, int ready, int64_t previous_poll_at, int64_t now,
                          PyObject **unhandled, int *has_deferred_data)
{
    for (int i = 0; i < ready; i++) {
        int fd = receiver->events[i].data.fd;
        uint32_t events = receiver->events[i].events;
        if (fd == receiver->deferred_epoll) {
            *has_deferred_data = 1;
            continue;
        }
        SocketBuffer *buffer = find_buffer(receiver, fd);
        int is_readable = buffer != NULL && buffer->is_readable;
        int is_for_caller = !is_readable || events & EPOLLOUT;
        if (is_for_caller && append_unhandled(unhandled, fd, events) < 0)
            return -1;
        int has_data_or_end = events & (EPOLLIN | EPOLLHUP | EPOLLERR);
        if (!is_readable || buffer->ended_at || (is_for_caller && !has_data_or_end))
            continue;
        now = read_socket(receiver, buffer, previous_poll_at);
        if (now < 0)
            return -1;
    }
    return now;
}

/* Receiver.receive. `*unhandled` is NULL if there are none. Return -1 with an exception. */
static int receive(Receiver *receiver, int wait_ms, int64_t return_at, int64_t timer_limit,
                   PyObject **unhandled)
{
    int64_t wake_at = receiver->wake_at;
    *unhandled = NULL;
    for (;;) {
        int is_deferring = receiver->is_deferring;
        int ready = poll_once(receiver, wait_ms);
        if (ready < 0)
            goto failed;
        int64_t now = read_clocks(receiver);
        receiver->poll_count++;
        receiver->ready_count = ready;
        receiver->now = now;
        if (now >= wake_at && ready > MANY_READY)
            return 0;
        int64_t previous_poll_at = receiver->last_poll_at;
        if (ready < MAX_READY) /* else it may not have reported all ready sockets */
            receiver->last_poll_at = receiver->poll_started_at;
        int has_deferred_data = 0;
        now = read_ready(receiver, ready, previous_poll_at, now, unhandled, &has_deferred_data);
        if (now < 0)
            goto failed;
        if (is_deferring) { /* A request that is due is sent first, once. */
            int64_t tolerance_ns = now >= wake_at ? DEFER_NS : -DEFER_NS / 2;
            has_deferred_data = now - receiver->next_poll_at > tolerance_ns;
        }
        if (has_deferred_data) {
            now = receive_deferred(receiver, now);
            if (now < 0)
                goto failed;
        }
        receiver->poll_started_at = now;
        receiver->now = now;
        if (now - receiver->period_start > DECISION_PERIOD_NS &&
            decide_whether_to_defer(receiver, now) < 0)
            goto failed;
        int is_time_to_plan =
            !receiver->is_deferring && now > receiver->next_poll_at - POLL_EVERY_NS / 2;
        if (is_time_to_plan &&
            plan_next_poll(receiver, now, *unhandled != NULL ? -1 : timer_limit) < 0)
            goto failed;
        int is_idle_pass = receiver->ready_count == 0 && !(is_deferring && wait_ms < 0);
        if (is_idle_pass || now >= return_at || *unhandled != NULL ||
            PyObject_Size(receiver->queue) > 0)
            return 0;
    }
failed:
    Py_CLEAR(*unhandled);
    return -1;
}

static PyObject *receiver_receive(PyObject *self, PyObject *args)
{
    int wait_ms;
    long long return_at, timer_limit;
    PyObject *unhandled;
    if (!PyArg_ParseTuple(args, "iLL", &wait_ms, &return_at, &timer_limit) ||
        receive((Receiver *)self, wait_ms, return_at, timer_limit, &unhandled) < 0)
        return NULL;
    return unhandled != NULL ? unhandled : PyList_New(0);
}

static int64_t read_number(PyObject *value, int *is_valid);
static int64_t deliver_slice(Receiver *receiver, int64_t slice_ns, PyObject *deliver_in_python,
                             int *called_python);

/* Return whether the timer fired and nothing else came that is not for the receiver. If so, clear
 * the timer as Reactor._clear_timer does. */
static int clear_timer_if_only_event(Receiver *receiver, PyObject *unhandled)
{
    uint64_t expirations;
    int is_valid = 1;
    if (PyList_Size(unhandled) != 1)
        return 0;
    if (read_number(PyTuple_GetItem(PyList_GetItem(unhandled, 0), 0), &is_valid) != receiver->timer)
        return 0;
    if (receiver->timer_armed_for > receiver->last_poll_at)
        receiver->last_poll_at = receiver->timer_armed_for;
    receiver->timer_armed_for = 0;
    return read(receiver->timer, &expirations, sizeof expirations) >= 0 || errno == EAGAIN;
}

/* The arguments of Receiver.receive_and_deliver. */
typedef struct {
    int wait_ms;
    long long return_at, tick_at, slice_ns;
    PyObject *open_exchanges, *deliver;
} ReceiveArguments;

/* Return when the receiver has to do something else than to receive. */
static int64_t next_deadline(const Receiver *receiver, const ReceiveArguments *arguments)
{
    return receiver->wake_at < arguments->tick_at ? receiver->wake_at : arguments->tick_at;
}

/* Set the timer as Reactor._arm_timer does. Return -1 with an exception. */
static int arm_for_next_pass(Receiver *receiver, const ReceiveArguments *arguments)
{
    int64_t at = next_deadline(receiver, arguments);
    int is_polling_often = PySet_Size(arguments->open_exchanges) > 0 && !receiver->is_deferring;
    if (is_polling_often && receiver->next_poll_at < at)
        at = receiver->next_poll_at;
    return at == receiver->timer_armed_for ? 0 : arm_timer(receiver, at);
}

/* Receiver.receive_and_deliver */
static PyObject *receiver_receive_and_deliver(PyObject *self, PyObject *args)
{
    Receiver *receiver = (Receiver *)self;
    ReceiveArguments arguments;
    if (!PyArg_ParseTuple(args, "iLLO!LO", &arguments.wait_ms, &arguments.return_at,
                          &arguments.tick_at, &PySet_Type, &arguments.open_exchanges,
                          &arguments.slice_ns, &arguments.deliver))
        return NULL;
    int called_python = 0;
    for (;;) {
        PyObject *unhandled;
        int64_t timer_limit = next_deadline(receiver, &arguments);
        int64_t return_at = arguments.return_at < timer_limit ? arguments.return_at : timer_limit;
        int wait_ms = PyObject_Size(receiver->queue) > 0 ? 0 : arguments.wait_ms;
        int is_awaiting = PySet_Size(arguments.open_exchanges) > 0;
        if (receive(receiver, wait_ms, return_at, is_awaiting ? timer_limit : -1, &unhandled) < 0)
            return NULL;
        if (unhandled != NULL && !clear_timer_if_only_event(receiver, unhandled))
            return unhandled;
        Py_CLEAR(unhandled);
        if (receiver->now >= receiver->wake_at)
            return PyList_New(0);
        if (PyObject_Size(receiver->queue) > 0) {
            receiver->now =
                deliver_slice(receiver, arguments.slice_ns, arguments.deliver, &called_python);
            if (receiver->now < 0)
                return NULL;
        }
        int is_time_over =
            receiver->now >= arguments.return_at || receiver->now >= arguments.tick_at;
        int is_idle = receiver->ready_count == 0 && PyObject_Size(receiver->queue) == 0;
        if (called_python || is_time_over || is_idle || receiver->queued_reads >= BACKLOG_LIMIT)
            Py_RETURN_NONE;
        if (arm_for_next_pass(receiver, &arguments) < 0)
            return NULL;
    }
}

/* -- the type ---------------------------------------------------------------------------------- */

static PyObject *receiver_deliver(PyObject *self, PyObject *value);
static PyObject *receiver_deliver_queued(PyObject *self, PyObject *const *args, Py_ssize_t count);
static PyObject *receiver_try_send_on_idle(PyObject *self, PyObject *const *args, Py_ssize_t count);
static PyObject *receiver_try_recycle(PyObject *self, PyObject *const *args, Py_ssize_t count);

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

#define RECEIVER_MEMBER(name, type, flags)                                                         \
    {                                                                                              \
#name, type, offsetof(Receiver, name), flags, NULL                                         \
    }

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
