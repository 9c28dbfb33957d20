/* `SocketBuffer` and `Receiver`, whose reference is transport/receiver.py: sockets that are read, in one loop. Part of _compiled.c. */

/* -- SocketBuffer */

/* One read, as `Read` in transport/exchange.py. */
typedef struct {
    const char *data;
    Py_ssize_t size;
    int64_t timestamp, read_at, empty_at;
    char from_kernel;
} Read;

/* A read that waits, its bytes behind it: Python has it as a tuple where it asks for it. */
typedef struct WaitingRead {
    struct WaitingRead *next;
    Read read;
} WaitingRead;

/* A read of plain events only. `error`: how wrong the stamp of all but the last one can be; -1: they are one chunk. */
typedef struct {
    long long timestamp, events, error;
} PlainRead;

typedef struct {
    PyObject_HEAD
    PyObject *reads;    /* list of (bytes, stamp, read_at, empty_at, from_kernel) and (plain reads, bytes, read_at) */
    WaitingRead *first_waiting, *last_waiting; /* the reads behind those; where there are some, there is no run */
    int waiting_count;
    PyObject *template; /* (before, after), or None */
    PlainRead *run;
    long long run_bytes, run_read_at;
    int run_count, run_size;
    long long emptied_at;
    long long ended_at;
    long long epoll_changed_at, events_until_urgent;
    PyObject *exchange, *owner, *tls, *unsent; /* of a connection */
    long long idle_since, responses_served, tcp_ns, tls_ns;
    int fd;
    int error;
    char may_hold_more, is_readable, may_batch, is_queued, is_deferred, is_closed;
} SocketBuffer;

static PyTypeObject *socket_buffer_type;

static void set_stolen(PyObject **place, PyObject *value) /* takes the reference */
{
    PyObject *before = *place;
    *place = value;
    Py_XDECREF(before);
}

static int socket_buffer_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    SocketBuffer *buffer = (SocketBuffer *)self;
    if (!PyArg_ParseTuple(args, "iL", &buffer->fd, &buffer->emptied_at))
        return -1;
    PyObject *reads = PyList_New(0), *unsent = PyList_New(0);
    if (reads == NULL || unsent == NULL) {
        Py_XDECREF(reads);
        Py_XDECREF(unsent);
        return -1;
    }
    set_stolen(&buffer->reads, reads);
    set_stolen(&buffer->unsent, unsent);
    PyObject **nones[] = {&buffer->template, &buffer->exchange, &buffer->owner, &buffer->tls};
    for (int i = 0; i < 4; i++) {
        Py_INCREF(Py_None);
        set_stolen(nones[i], Py_None);
    }
    buffer->idle_since = buffer->emptied_at;
    return 0;
}

static int socket_buffer_traverse(PyObject *self, visitproc visit, void *arg)
{
    SocketBuffer *buffer = (SocketBuffer *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(buffer->reads);
    Py_VISIT(buffer->template);
    Py_VISIT(buffer->exchange);
    Py_VISIT(buffer->owner);
    Py_VISIT(buffer->tls);
    Py_VISIT(buffer->unsent);
    return 0;
}

static int socket_buffer_clear(PyObject *self)
{
    SocketBuffer *buffer = (SocketBuffer *)self;
    Py_CLEAR(buffer->reads);
    Py_CLEAR(buffer->template);
    Py_CLEAR(buffer->exchange);
    Py_CLEAR(buffer->owner);
    Py_CLEAR(buffer->tls);
    Py_CLEAR(buffer->unsent);
    return 0;
}

/* The reads of an buffer that are no tuples yet, which has none then. */
static WaitingRead *detach_waiting(SocketBuffer *buffer)
{
    WaitingRead *first = buffer->first_waiting;
    buffer->first_waiting = buffer->last_waiting = NULL;
    buffer->waiting_count = 0;
    return first;
}

static void free_waiting(WaitingRead *kept)
{
    while (kept != NULL) {
        WaitingRead *next = kept->next;
        PyMem_Free(kept);
        kept = next;
    }
}

/* -1 with an exception. */
static int append_read(SocketBuffer *buffer, const Read *read)
{
    WaitingRead *kept = PyMem_Malloc(sizeof *kept + (size_t)read->size);
    if (kept == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *kept = (WaitingRead){.read = *read};
    kept->read.data = memcpy(kept + 1, read->data, (size_t)read->size);
    if (buffer->first_waiting == NULL)
        buffer->first_waiting = kept;
    else
        buffer->last_waiting->next = kept;
    buffer->last_waiting = kept;
    buffer->waiting_count++;
    return 0;
}

static PyObject *read_tuple(const Read *read)
{
    PyObject *items[5] = {
        PyBytes_FromStringAndSize(read->data, read->size),
        PyLong_FromLongLong(read->timestamp),
        PyLong_FromLongLong(read->read_at),
        PyLong_FromLongLong(read->empty_at),
        PyBool_FromLong(read->from_kernel),
    };
    PyObject *tuple = PyTuple_New(5);
    int failed = tuple == NULL;
    for (int i = 0; i < 5; i++) {
        if (items[i] == NULL)
            failed = 1;
        if (tuple != NULL)
            PyTuple_SetItem(tuple, i, items[i]); /* takes the reference */
        else
            Py_XDECREF(items[i]);
    }
    if (failed)
        Py_CLEAR(tuple);
    return tuple;
}

/* All reads of an buffer but its run, as Python has them: borrowed, or NULL with an exception. */
static PyObject *materialize_reads(SocketBuffer *buffer)
{
    if (buffer->reads == NULL || !PyList_Check(buffer->reads)) {
        PyErr_SetString(PyExc_TypeError, "the reads of an buffer are a list");
        return NULL;
    }
    WaitingRead *first = detach_waiting(buffer);
    for (WaitingRead *kept = first; kept != NULL; kept = kept->next) {
        PyObject *read = read_tuple(&kept->read);
        int failed = read == NULL || PyList_Append(buffer->reads, read) < 0;
        Py_XDECREF(read);
        if (failed) {
            free_waiting(first);
            return NULL;
        }
    }
    free_waiting(first);
    return buffer->reads;
}

static PyObject *socket_buffer_reads(PyObject *self, void *Py_UNUSED(none))
{
    PyObject *reads = materialize_reads((SocketBuffer *)self);
    Py_XINCREF(reads);
    return reads;
}

static int socket_buffer_set_reads(PyObject *self, PyObject *value, void *Py_UNUSED(none))
{
    free_waiting(detach_waiting((SocketBuffer *)self));
    Py_XINCREF(value);
    set_stolen(&((SocketBuffer *)self)->reads, value);
    return 0;
}

static PyGetSetDef socket_buffer_computed[] = {{"reads", socket_buffer_reads, socket_buffer_set_reads, NULL, NULL}, {NULL}};

/* How many reads wait, each run as one. The reads are a list. */
static Py_ssize_t count_reads(const SocketBuffer *buffer)
{
    return PyList_Size(buffer->reads) + buffer->waiting_count;
}

static void socket_buffer_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    socket_buffer_clear(self);
    free_waiting(detach_waiting((SocketBuffer *)self));
    PyMem_Free(((SocketBuffer *)self)->run);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMemberDef socket_buffer_members[] = {
    {"template", T_OBJECT_EX, offsetof(SocketBuffer, template), 0, NULL},
    {"emptied_at", T_LONGLONG, offsetof(SocketBuffer, emptied_at), 0, NULL},
    {"ended_at", T_LONGLONG, offsetof(SocketBuffer, ended_at), 0, NULL},
    {"epoll_changed_at", T_LONGLONG, offsetof(SocketBuffer, epoll_changed_at), READONLY, NULL},
    {"events_until_urgent", T_LONGLONG, offsetof(SocketBuffer, events_until_urgent), READONLY, NULL},
    {"fd", T_INT, offsetof(SocketBuffer, fd), READONLY, NULL},
    {"error", T_INT, offsetof(SocketBuffer, error), 0, NULL},
    {"may_hold_more", T_BOOL, offsetof(SocketBuffer, may_hold_more), 0, NULL},
    {"is_readable", T_BOOL, offsetof(SocketBuffer, is_readable), 0, NULL},
    {"may_batch", T_BOOL, offsetof(SocketBuffer, may_batch), 0, NULL},
    {"is_queued", T_BOOL, offsetof(SocketBuffer, is_queued), 0, NULL},
    {"is_deferred", T_BOOL, offsetof(SocketBuffer, is_deferred), READONLY, NULL},
    {"exchange", T_OBJECT_EX, offsetof(SocketBuffer, exchange), 0, NULL},
    {"owner", T_OBJECT_EX, offsetof(SocketBuffer, owner), 0, NULL},
    {"tls", T_OBJECT_EX, offsetof(SocketBuffer, tls), 0, NULL},
    {"unsent", T_OBJECT_EX, offsetof(SocketBuffer, unsent), 0, NULL},
    {"idle_since", T_LONGLONG, offsetof(SocketBuffer, idle_since), 0, NULL},
    {"responses_served", T_LONGLONG, offsetof(SocketBuffer, responses_served), 0, NULL},
    {"tcp_ns", T_LONGLONG, offsetof(SocketBuffer, tcp_ns), 0, NULL},
    {"tls_ns", T_LONGLONG, offsetof(SocketBuffer, tls_ns), 0, NULL},
    {"is_closed", T_BOOL, offsetof(SocketBuffer, is_closed), 0, NULL},
    {NULL},
};

static PyType_Slot socket_buffer_slots[] = {
    {Py_tp_init, socket_buffer_init},
    {Py_tp_dealloc, socket_buffer_dealloc},
    {Py_tp_traverse, socket_buffer_traverse},
    {Py_tp_clear, socket_buffer_clear},
    {Py_tp_members, socket_buffer_members},
    {Py_tp_getset, socket_buffer_computed},
    {0, NULL},
};

static PyType_Spec socket_buffer_spec = {
    .name = "loadgen_sdk._compiled.SocketBuffer",
    .basicsize = sizeof(SocketBuffer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = socket_buffer_slots,
};

/* Whether a read is plain events only, which are then counted in the run of this buffer; -1 with an exception. */
static int count_if_plain(SocketBuffer *buffer, const char *data, Py_ssize_t size, int64_t timestamp, int64_t read_at, int64_t empty_at)
{
    Template template;
    PyObject *before = PyTuple_GetItem(buffer->template, 0), *after = PyTuple_GetItem(buffer->template, 1);
    if (before == NULL || after == NULL ||
        PyBytes_AsStringAndSize(before, (char **)&template.before, &template.before_size) < 0 ||
        PyBytes_AsStringAndSize(after, (char **)&template.after, &template.after_size) < 0)
        return -1;
    const char *at = data, *end = data + size;
    Py_ssize_t chunks = 0, events = 0, found = 0;
    do {
        at = parse_plain_chunk(at, end, &template, &found);
        chunks++;
        events += found;
    } while (at != NULL && at < end && size < LARGE_READ_BYTES);
    if (at != end)
        return 0;
    if (buffer->run_count == buffer->run_size) {
        int larger = buffer->run_size ? buffer->run_size * 2 : 32;
        PlainRead *run = PyMem_Realloc(buffer->run, (size_t)larger * sizeof *run);
        if (run == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        buffer->run = run;
        buffer->run_size = larger;
    }
    buffer->run[buffer->run_count++] = (PlainRead){timestamp, events, chunks > 1 ? timestamp - empty_at : -1};
    buffer->run_bytes += size;
    buffer->run_read_at = read_at;
    return 1;
}

/* -- Receiver */

typedef struct {
    PyObject_HEAD
    PyObject *queue;
    PyObject *queue_append, *queue_popleft;
    SocketBuffer **buffers; /* by descriptor; NULL where there is none */
    int buffers_size;
    int epoll, deferred_epoll, timer;
    long long now, last_poll, poll_started, to_monotonic, next_poll_at, timer_armed_for, reads_at_poll, wake_at;
    long long ready_count, queued_reads, poll_count, read_count;
    long long last_deferred_poll, deferred_count, deferred_reads, timely_reads, shared_reads, period_start, defer_again_at, pause_ns;
    char is_deferring, has_many_events;
    struct epoll_event events[MAX_READY];
    char read_area[READ_BYTES];
} Receiver;

/* -1 with an exception. */
static int control_epoll(int epoll, int operation, int fd, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.fd = fd};
    if (epoll_ctl(epoll, operation, fd, &event) == 0)
        return 0;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

static int receiver_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    Receiver *receiver = (Receiver *)self;
    PyObject *poll, *held, *timer, *queue;
    if (!PyArg_ParseTuple(args, "OOOO", &poll, &held, &timer, &queue))
        return -1;
    receiver->epoll = PyObject_AsFileDescriptor(poll);
    if (receiver->epoll < 0)
        return -1;
    receiver->deferred_epoll = PyObject_AsFileDescriptor(held);
    if (receiver->deferred_epoll < 0)
        return -1;
    receiver->timer = PyObject_AsFileDescriptor(timer);
    if (receiver->timer < 0)
        return -1;
    PyObject *append = PyObject_GetAttrString(queue, "append");
    if (append == NULL)
        return -1;
    set_stolen(&receiver->queue_append, append);
    PyObject *popleft = PyObject_GetAttrString(queue, "popleft");
    if (popleft == NULL)
        return -1;
    set_stolen(&receiver->queue_popleft, popleft);
    Py_INCREF(queue);
    Py_XDECREF(receiver->queue);
    receiver->queue = queue;
    receiver->now = receiver->last_poll = receiver->poll_started = clock_ns(CLOCK_MONOTONIC);
    receiver->last_deferred_poll = receiver->period_start = receiver->now;
    receiver->pause_ns = DEFER_PAUSE_NS;
    receiver->wake_at = FOREVER;
    receiver->to_monotonic = receiver->now - clock_ns(CLOCK_REALTIME);
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

static int is_socket_buffer(PyObject *value)
{
    if (PyObject_TypeCheck(value, socket_buffer_type))
        return 1;
    PyErr_SetString(PyExc_TypeError, "not an SocketBuffer");
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
    if (fd >= receiver->buffers_size) {
        int size = fd * 2 + 64;
        SocketBuffer **larger = PyMem_Realloc(receiver->buffers, (size_t)size * sizeof(SocketBuffer *));
        if (larger == NULL)
            return PyErr_NoMemory();
        memset(larger + receiver->buffers_size, 0, (size_t)(size - receiver->buffers_size) * sizeof(SocketBuffer *));
        receiver->buffers = larger;
        receiver->buffers_size = size;
    }
    Py_INCREF(value);
    PyObject *previous = (PyObject *)receiver->buffers[fd];
    receiver->buffers[fd] = (SocketBuffer *)value;
    Py_XDECREF(previous);
    Py_RETURN_NONE;
}

/* From one epoll to the other. -1 with an exception. */
static int set_deferred(Receiver *receiver, SocketBuffer *buffer, int held)
{
    if (buffer->is_deferred == held)
        return 0;
    int from = held ? receiver->epoll : receiver->deferred_epoll, to = held ? receiver->deferred_epoll : receiver->epoll;
    if (control_epoll(from, EPOLL_CTL_DEL, buffer->fd, 0) < 0 ||
        control_epoll(to, EPOLL_CTL_ADD, buffer->fd, held ? DEFERRED_EPOLL_EVENTS : EPOLLIN) < 0)
        return -1;
    receiver->deferred_count += held ? 1 : -1;
    buffer->is_deferred = (char)held;
    buffer->epoll_changed_at = clock_ns(CLOCK_MONOTONIC);
    receiver->is_deferring = receiver->has_many_events && receiver->deferred_count > 0;
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
    if (fd >= 0 && fd < receiver->buffers_size) {
        PyObject *previous = (PyObject *)receiver->buffers[fd];
        receiver->buffers[fd] = NULL;
        Py_XDECREF(previous);
    }
    Py_RETURN_NONE;
}

/* Put the run behind the reads. -1 with an exception. */
static int end_run(Receiver *receiver, SocketBuffer *buffer)
{
    if (buffer->run_count == 0)
        return 0;
    PyObject *stamps = PyList_New(buffer->run_count);
    if (stamps == NULL)
        return -1;
    for (int i = 0; i < buffer->run_count; i++) {
        PlainRead *read = &buffer->run[i];
        PyObject *item;
        if (read->events == 1)
            item = PyLong_FromLongLong(read->timestamp);
        else if (read->error < 0)
            item = Py_BuildValue("LLO", read->timestamp, read->events, Py_None);
        else
            item = Py_BuildValue("LLL", read->timestamp, read->events, read->error);
        if (item == NULL) {
            Py_DECREF(stamps);
            return -1;
        }
        PyList_SetItem(stamps, i, item);
    }
    PyObject *run = Py_BuildValue("NLL", stamps, buffer->run_bytes, buffer->run_read_at);
    if (run == NULL)
        return -1;
    int failed = PyList_Append(buffer->reads, run) < 0;
    Py_DECREF(run);
    receiver->queued_reads += buffer->is_queued && !failed;
    buffer->run_count = 0;
    buffer->run_bytes = 0;
    return failed ? -1 : 0;
}

static PyObject *receiver_take_reads(PyObject *self, PyObject *value)
{
    if (!is_socket_buffer(value))
        return NULL;
    SocketBuffer *buffer = (SocketBuffer *)value;
    PyObject *empty = PyList_New(0), *reads = empty == NULL ? NULL : materialize_reads(buffer);
    if (reads == NULL || end_run((Receiver *)self, buffer) < 0) {
        Py_XDECREF(empty);
        return NULL;
    }
    if (buffer->is_queued)
        ((Receiver *)self)->queued_reads -= PyList_Size(reads);
    buffer->reads = empty;
    return reads;
}

static int enqueue(Receiver *receiver, SocketBuffer *buffer)
{
    if (buffer->is_queued)
        return 0;
    if (end_run(receiver, buffer) < 0)
        return -1;
    buffer->is_queued = 1;
    receiver->queued_reads += count_reads(buffer);
    PyObject *done = PyObject_CallFunctionObjArgs(receiver->queue_append, (PyObject *)buffer, NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* The kernel's stamp of what was read, on the wall clock; 0 without one. */
static int64_t kernel_timestamp(struct msghdr *message)
{
    for (struct cmsghdr *control = CMSG_FIRSTHDR(message); control; control = CMSG_NXTHDR(message, control)) {
        if (control->cmsg_level == SOL_SOCKET && control->cmsg_type == SO_TIMESTAMPNS) {
            struct timespec at;
            memcpy(&at, CMSG_DATA(control), sizeof at);
            return at.tv_sec ? (int64_t)at.tv_sec * 1000000000 + at.tv_nsec : 0;
        }
    }
    return 0;
}

/* Read one socket once. Returns the time, or -1 with an exception. */
static int64_t read_socket(Receiver *receiver, SocketBuffer *buffer, int64_t previous_poll)
{
    union {
        char bytes[CMSG_SPACE(sizeof(struct timespec))];
        struct cmsghdr aligned;
    } control;
    struct iovec vector = {.iov_base = receiver->read_area, .iov_len = READ_BYTES};
    struct msghdr message = {
        .msg_iov = &vector, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t size;
    do
        size = recvmsg(buffer->fd, &message, 0);
    while (size < 0 && errno == EINTR);
    if (size < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return clock_ns(CLOCK_MONOTONIC);
        buffer->error = errno;
        size = 0;
    }
    int64_t read_at = clock_ns(CLOCK_MONOTONIC);
    if (buffer->reads == NULL || !PyList_Check(buffer->reads)) {
        PyErr_SetString(PyExc_TypeError, "the reads of an buffer are a list");
        return -1;
    }
    receiver->read_count++;
    if (size == 0) {
        buffer->ended_at = read_at;
        return enqueue(receiver, buffer) < 0 ? -1 : read_at;
    }
    int64_t empty_at = buffer->emptied_at;
    if (empty_at < previous_poll && !buffer->may_hold_more && previous_poll > buffer->epoll_changed_at)
        empty_at = previous_poll;
    buffer->may_hold_more = size == READ_BYTES;
    if (!buffer->may_hold_more)
        buffer->emptied_at = read_at;
    int64_t timestamp = read_at, wall = kernel_timestamp(&message);
    if (wall) {
        timestamp = wall + receiver->to_monotonic;
        if (timestamp > read_at)
            timestamp = read_at;
        else if (timestamp < empty_at)
            timestamp = empty_at;
    }
    int templated = buffer->template != NULL && PyTuple_Check(buffer->template);
    if (templated && count_reads(buffer) == 0) {
        int plain = count_if_plain(buffer, receiver->read_area, size, timestamp, read_at, empty_at);
        if (plain < 0)
            return -1;
        if (plain) {
            if (buffer->is_deferred) {
                PlainRead *last = &buffer->run[buffer->run_count - 1];
                buffer->events_until_urgent -= last->events;
                receiver->shared_reads += last->error >= 0 && last->events > 1;
            }
            return buffer->run_count >= MAX_RUN_READS && enqueue(receiver, buffer) < 0 ? -1 : read_at;
        }
        if (end_run(receiver, buffer) < 0)
            return -1;
    }
    const Read read = {receiver->read_area, size, timestamp, read_at, empty_at, wall != 0};
    if (append_read(buffer, &read) < 0)
        return -1;
    if (buffer->is_queued)
        receiver->queued_reads++;
    else if (!buffer->may_batch || templated || count_reads(buffer) >= MAX_BATCHED_READS || size <= SMALL_READ_BYTES || size >= LARGE_READ_BYTES ||
             memcmp(receiver->read_area + size - 4, "\r\n\r\n", 4) == 0)
        if (enqueue(receiver, buffer) < 0)
            return -1;
    return read_at;
}

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

/* Write to a socket, at most MAX_WRITE_BYTES, and return how many bytes it took, or -1 after an error. `*at` becomes the
   time before the first byte. */
static long long write_parts(int fd, struct iovec *vectors, size_t count, int64_t *at)
{
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = limit_vectors(vectors, count)};
    ssize_t taken;
    *at = clock_ns(CLOCK_MONOTONIC);
    Py_BEGIN_ALLOW_THREADS
    do
        taken = sendmsg(fd, &message, MSG_NOSIGNAL);
    while (taken < 0 && errno == EINTR);
    if (taken < 0)
        taken = errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
    Py_END_ALLOW_THREADS
    return taken;
}

/* Receiver.send */
static PyObject *receiver_send(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *value, *parts;
    struct iovec vectors[4];
    if (!PyArg_ParseTuple(args, "OO!", &value, &PyTuple_Type, &parts) || !is_socket_buffer(value))
        return NULL;
    Py_ssize_t count = PyTuple_Size(parts);
    if (count > 4) {
        PyErr_SetString(PyExc_ValueError, "more than four parts");
        return NULL;
    }
    Py_buffer buffers[4];
    Py_ssize_t buffered = 0;
    PyObject *result = NULL;
    for (; buffered < count; buffered++) {
        Py_buffer *buffer = &buffers[buffered];
        if (PyObject_GetBuffer(PyTuple_GetItem(parts, buffered), buffer, PyBUF_SIMPLE) < 0)
            goto release;
        vectors[buffered] = (struct iovec){.iov_base = buffer->buf, .iov_len = (size_t)buffer->len};
    }
    int64_t at;
    long long taken = write_parts(((SocketBuffer *)value)->fd, vectors, (size_t)count, &at);
    result = Py_BuildValue("LL", (long long)at, taken);
release:
    while (buffered-- > 0)
        PyBuffer_Release(&buffers[buffered]);
    return result;
}

/* -1 with an exception. */
static int arm_timer(Receiver *receiver, int64_t at)
{
    receiver->timer_armed_for = at;
    if (at <= 0)
        at = 1; /* 0 would disarm it */
    struct itimerspec armed = {.it_value = {.tv_sec = at / 1000000000, .tv_nsec = at % 1000000000}};
    if (timerfd_settime(receiver->timer, TFD_TIMER_ABSTIME, &armed, NULL) == 0)
        return 0;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

/* Plan the next poll, and arm the timer for it, or for what is due before. */
static int plan_next_poll(Receiver *receiver, int64_t now, int64_t due_at)
{
    int busy = receiver->read_count - receiver->reads_at_poll > BUSY_READS;
    receiver->next_poll_at = now + (busy ? BUSY_POLL_EVERY_NS : POLL_EVERY_NS);
    receiver->reads_at_poll = receiver->read_count;
    if (due_at < 0)
        return 0;
    return arm_timer(receiver, receiver->next_poll_at < due_at ? receiver->next_poll_at : due_at);
}

/* The time. Notes how the clock of the stamps differs from it. */
static int64_t read_clocks(Receiver *receiver)
{
    int64_t now = clock_ns(CLOCK_MONOTONIC), wall = clock_ns(CLOCK_REALTIME);
    if (clock_ns(CLOCK_MONOTONIC) - now < MAX_CLOCK_READING_NS)
        receiver->to_monotonic = now - wall;
    return now;
}

/* Poll the held sockets once and read what is ready. Returns the time, or -1 with an exception. */
static int64_t receive_deferred(Receiver *receiver, int64_t now)
{
    int ready = epoll_wait(receiver->deferred_epoll, receiver->events, MANY_READY, 0);
    if (ready < 0)
        ready = 0; /* EINTR */
    receiver->ready_count += ready;
    int64_t previous_poll = receiver->last_deferred_poll, shared = receiver->shared_reads;
    int timely = receiver->is_deferring && now < receiver->next_poll_at + DEFER_NS;
    if (ready < MANY_READY)
        receiver->last_deferred_poll = now;
    for (int i = 0; i < ready; i++) {
        int fd = receiver->events[i].data.fd;
        SocketBuffer *buffer = fd >= 0 && fd < receiver->buffers_size ? receiver->buffers[fd] : NULL;
        if (buffer == NULL)
            continue;
        now = read_socket(receiver, buffer, previous_poll);
        if (now < 0)
            return -1;
        /* an edge is reported once; the first epoll reports for as long as there is something to read */
        if ((buffer->may_hold_more || receiver->events[i].events != EPOLLIN || buffer->events_until_urgent <= 0) &&
            set_deferred(receiver, buffer, 0) < 0)
            return -1;
    }
    receiver->deferred_reads += ready;
    if (timely)
        receiver->timely_reads += ready;
    else
        receiver->shared_reads = shared;
    if (receiver->is_deferring)
        receiver->next_poll_at = ready < MANY_READY ? now + DEFER_NS : now;
    return now;
}

/* Hold while there are many events, unless that makes too many stamps unsure. -1 with an exception. */
static int decide_whether_to_defer(Receiver *receiver, int64_t now)
{
    long long per_second = receiver->deferred_reads * 1000000000 / (now - receiver->period_start);
    int too_many_shared = receiver->shared_reads * READS_PER_SHARED_READ > receiver->timely_reads;
    receiver->deferred_reads = receiver->timely_reads = receiver->shared_reads = 0;
    receiver->period_start = now;
    if (!receiver->has_many_events) {
        if (per_second < DEFER_FROM_READS_PER_S || now < receiver->defer_again_at)
            return 0;
        receiver->has_many_events = 1;
        receiver->is_deferring = receiver->deferred_count > 0;
        receiver->next_poll_at = now;
        return control_epoll(receiver->epoll, EPOLL_CTL_DEL, receiver->deferred_epoll, 0);
    }
    if (too_many_shared) {
        receiver->defer_again_at = now + receiver->pause_ns;
        receiver->pause_ns *= 2;
    } else
        receiver->pause_ns = DEFER_PAUSE_NS;
    if (!too_many_shared && per_second >= DEFER_DOWN_TO_READS_PER_S)
        return 0;
    receiver->is_deferring = receiver->has_many_events = 0;
    return control_epoll(receiver->epoll, EPOLL_CTL_ADD, receiver->deferred_epoll, EPOLLIN);
}

/* Receiver.receive; `*others` is NULL where there are none. -1 with an exception. */
static int receive(Receiver *receiver, int wait_ms, int64_t until, int64_t due_at, PyObject **others)
{
    int64_t wake_at = receiver->wake_at;
    *others = NULL;
    for (;;) {
        int ready, is_deferring = receiver->is_deferring;
        int wait = is_deferring && wait_ms ? (receiver->next_poll_at > receiver->now ? DEFER_WAIT_MS : 0) : wait_ms;
        if (wait == 0)
            ready = epoll_wait(receiver->epoll, receiver->events, MAX_READY, 0);
        else {
            Py_BEGIN_ALLOW_THREADS
            ready = epoll_wait(receiver->epoll, receiver->events, MAX_READY, wait);
            Py_END_ALLOW_THREADS
        }
        if (ready < 0) {
            if (errno != EINTR) {
                PyErr_SetFromErrno(PyExc_OSError);
                goto failed;
            }
            if (PyErr_CheckSignals() < 0)
                goto failed;
            ready = 0;
        }
        int64_t now = read_clocks(receiver);
        receiver->poll_count++;
        receiver->ready_count = ready;
        receiver->now = now;
        if (now >= wake_at && ready > MANY_READY)
            return 0;
        int64_t previous_poll = receiver->last_poll;
        if (ready < MAX_READY) /* else there may be ready sockets that it did not report */
            receiver->last_poll = receiver->poll_started;
        int poll_deferred = 0;
        for (int i = 0; i < ready; i++) {
            int fd = receiver->events[i].data.fd;
            uint32_t events = receiver->events[i].events;
            SocketBuffer *buffer = fd >= 0 && fd < receiver->buffers_size ? receiver->buffers[fd] : NULL;
            if (fd == receiver->deferred_epoll) {
                poll_deferred = 1;
                continue;
            }
            if (buffer == NULL || events & EPOLLOUT || !buffer->is_readable) {
                PyObject *other = Py_BuildValue("iI", fd, events);
                int bad = other == NULL || (*others == NULL && (*others = PyList_New(0)) == NULL) ||
                          PyList_Append(*others, other) < 0;
                Py_XDECREF(other);
                if (bad)
                    goto failed;
                if (buffer == NULL || !buffer->is_readable || !(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
                    continue;
            }
            if (!buffer->ended_at) {
                now = read_socket(receiver, buffer, previous_poll);
                if (now < 0)
                    goto failed;
            }
        }
        if (is_deferring) /* a request that is due is sent before, once */
            poll_deferred = now - receiver->next_poll_at > (now >= wake_at ? DEFER_NS : -DEFER_NS / 2);
        if (poll_deferred) {
            now = receive_deferred(receiver, now);
            if (now < 0)
                goto failed;
        }
        receiver->poll_started = receiver->now = now;
        if (now - receiver->period_start > DECISION_PERIOD_NS && decide_whether_to_defer(receiver, now) < 0)
            goto failed;
        if (!receiver->is_deferring && now > receiver->next_poll_at - POLL_EVERY_NS / 2 &&
            plan_next_poll(receiver, now, *others != NULL ? -1 : due_at) < 0)
            goto failed;
        int nothing_came = receiver->ready_count == 0 && !(is_deferring && wait_ms < 0);
        if (nothing_came || now >= until || *others != NULL || PyObject_Size(receiver->queue))
            return 0;
    }
failed:
    Py_CLEAR(*others);
    return -1;
}

static PyObject *receiver_receive(PyObject *self, PyObject *args)
{
    int wait_ms;
    long long until, due_at;
    PyObject *others;
    if (!PyArg_ParseTuple(args, "iLL", &wait_ms, &until, &due_at) ||
        receive((Receiver *)self, wait_ms, until, due_at, &others) < 0)
        return NULL;
    return others != NULL ? others : PyList_New(0);
}

static int64_t read_number(PyObject *value, int *fits);
static int64_t deliver_slice(Receiver *receiver, int64_t slice_ns, PyObject *other, int *others);

/* Whether the timer fired, and nothing else came that is no socket to read: then as in Wire._other_event. */
static int is_only_timer(Receiver *receiver, PyObject *others)
{
    uint64_t fired;
    int fits = 1;
    if (PyList_Size(others) != 1 || read_number(PyTuple_GetItem(PyList_GetItem(others, 0), 0), &fits) != receiver->timer)
        return 0;
    if (receiver->timer_armed_for > receiver->last_poll)
        receiver->last_poll = receiver->timer_armed_for;
    receiver->timer_armed_for = 0;
    return read(receiver->timer, &fired, sizeof fired) >= 0 || errno == EAGAIN;
}

/* Receiver.run */
static PyObject *receiver_run(PyObject *self, PyObject *args)
{
    Receiver *receiver = (Receiver *)self;
    int wait_ms, called = 0;
    long long until, tick_at, slice_ns;
    PyObject *open_exchanges, *other, *others;
    if (!PyArg_ParseTuple(args, "iLLO!LO", &wait_ms, &until, &tick_at, &PySet_Type, &open_exchanges, &slice_ns, &other))
        return NULL;
    for (;;) {
        int64_t due_at = receiver->wake_at < tick_at ? receiver->wake_at : tick_at;
        if (receive(receiver, PyObject_Size(receiver->queue) ? 0 : wait_ms, until < due_at ? until : due_at,
                    PySet_Size(open_exchanges) ? due_at : -1, &others) < 0)
            return NULL;
        if (others != NULL && !is_only_timer(receiver, others))
            return others;
        Py_CLEAR(others);
        if (receiver->now >= receiver->wake_at)
            return PyList_New(0);
        if (PyObject_Size(receiver->queue) > 0 &&
            (receiver->now = deliver_slice(receiver, slice_ns, other, &called)) < 0)
            return NULL;
        int64_t now = receiver->now;
        if (called || now >= until || now >= tick_at || receiver->queued_reads >= BACKLOG_LIMIT ||
            (!receiver->ready_count && !PyObject_Size(receiver->queue)))
            Py_RETURN_NONE;
        int64_t at = receiver->wake_at < tick_at ? receiver->wake_at : tick_at;
        if (receiver->next_poll_at < at && PySet_Size(open_exchanges) && !receiver->is_deferring)
            at = receiver->next_poll_at;
        if (at != receiver->timer_armed_for && arm_timer(receiver, at) < 0)
            return NULL;
    }
}


static PyObject *receiver_deliver(PyObject *self, PyObject *value);
static PyObject *receiver_deliver_queued(PyObject *self, PyObject *const *args, Py_ssize_t count);
static PyObject *receiver_send_on_idle(PyObject *self, PyObject *const *args, Py_ssize_t count);
static PyObject *receiver_recycle(PyObject *self, PyObject *const *args, Py_ssize_t count);

static PyMethodDef receiver_methods[] = {
    {"add", receiver_add, METH_O, NULL},
    {"remove", receiver_remove, METH_O, NULL},
    {"defer", receiver_defer, METH_VARARGS, NULL},
    {"stop_deferring", receiver_stop_deferring, METH_O, NULL},
    {"take_reads", receiver_take_reads, METH_O, NULL},
    {"receive", receiver_receive, METH_VARARGS, NULL},
    {"run", receiver_run, METH_VARARGS, NULL},
    {"send", receiver_send, METH_VARARGS, NULL},
    {"deliver", receiver_deliver, METH_O, NULL},
    {"deliver_queued", (PyCFunction)(void (*)(void))receiver_deliver_queued, METH_FASTCALL, NULL},
    {"send_on_idle", (PyCFunction)(void (*)(void))receiver_send_on_idle, METH_FASTCALL, NULL},
    {"recycle", (PyCFunction)(void (*)(void))receiver_recycle, METH_FASTCALL, NULL},
    {NULL},
};

static PyMemberDef receiver_members[] = {
    {"now", T_LONGLONG, offsetof(Receiver, now), 0, NULL},
    {"last_poll", T_LONGLONG, offsetof(Receiver, last_poll), 0, NULL},
    {"next_poll_at", T_LONGLONG, offsetof(Receiver, next_poll_at), 0, NULL},
    {"timer_armed_for", T_LONGLONG, offsetof(Receiver, timer_armed_for), 0, NULL},
    {"wake_at", T_LONGLONG, offsetof(Receiver, wake_at), 0, NULL},
    {"poll_started", T_LONGLONG, offsetof(Receiver, poll_started), 0, NULL},
    {"is_deferring", T_BOOL, offsetof(Receiver, is_deferring), READONLY, NULL},
    {"ready_count", T_LONGLONG, offsetof(Receiver, ready_count), 0, NULL},
    {"queued_reads", T_LONGLONG, offsetof(Receiver, queued_reads), 0, NULL},
    {"poll_count", T_LONGLONG, offsetof(Receiver, poll_count), 0, NULL},
    {"read_count", T_LONGLONG, offsetof(Receiver, read_count), 0, NULL},
    {NULL},
};

static PyType_Slot receiver_slots[] = {
    {Py_tp_init, receiver_init},         {Py_tp_dealloc, receiver_dealloc},
    {Py_tp_traverse, receiver_traverse}, {Py_tp_clear, receiver_clear},
    {Py_tp_methods, receiver_methods},   {Py_tp_members, receiver_members},
    {0, NULL},
};

static PyType_Spec receiver_spec = {
    .name = "loadgen_sdk._compiled.Receiver",
    .basicsize = sizeof(Receiver),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = receiver_slots,
};
