/* `Inbox` and `Receiver`, whose reference is transport/receiver.py: sockets that are read, in one loop. Part of _compiled.c. */

/* -- Inbox */

/* One read, as `Read` in transport/exchange.py. */
typedef struct {
    const char *data;
    Py_ssize_t size;
    int64_t stamp, read_at, empty_at;
    char from_kernel;
} Read;

/* A read that waits, its bytes behind it: Python has it as a tuple where it asks for it. */
typedef struct Kept {
    struct Kept *next;
    Read read;
} Kept;

/* A read of plain events only. `error`: how wrong the stamp of all but the last one can be; -1: they are one chunk. */
typedef struct {
    long long stamp, events, error;
} PlainRead;

typedef struct {
    PyObject_HEAD
    PyObject *reads;    /* list of (bytes, stamp, read_at, empty_at, from_kernel) and (plain reads, bytes, read_at) */
    Kept *first, *last; /* the reads behind those; where there are some, there is no run */
    int kept;
    PyObject *template; /* (before, after), or None */
    PlainRead *run;
    long long run_bytes, run_read_at;
    int run_count, run_size;
    long long emptied_at;
    long long ended_at;
    long long moved_at, held_events;
    PyObject *busy, *peer, *tls, *unsent; /* of a connection */
    long long idle_since, served, tcp_ns, tls_ns;
    int fd;
    int error;
    char filled, open, patient, queued, held, closed;
} Inbox;

static PyTypeObject *inbox_type;

static void replace(PyObject **place, PyObject *value) /* takes the reference */
{
    PyObject *before = *place;
    *place = value;
    Py_XDECREF(before);
}

static int inbox_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    Inbox *inbox = (Inbox *)self;
    if (!PyArg_ParseTuple(args, "iL", &inbox->fd, &inbox->emptied_at))
        return -1;
    PyObject *reads = PyList_New(0), *unsent = PyList_New(0);
    if (reads == NULL || unsent == NULL) {
        Py_XDECREF(reads);
        Py_XDECREF(unsent);
        return -1;
    }
    replace(&inbox->reads, reads);
    replace(&inbox->unsent, unsent);
    PyObject **nones[] = {&inbox->template, &inbox->busy, &inbox->peer, &inbox->tls};
    for (int i = 0; i < 4; i++) {
        Py_INCREF(Py_None);
        replace(nones[i], Py_None);
    }
    inbox->idle_since = inbox->emptied_at;
    return 0;
}

static int inbox_traverse(PyObject *self, visitproc visit, void *arg)
{
    Inbox *inbox = (Inbox *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(inbox->reads);
    Py_VISIT(inbox->template);
    Py_VISIT(inbox->busy);
    Py_VISIT(inbox->peer);
    Py_VISIT(inbox->tls);
    Py_VISIT(inbox->unsent);
    return 0;
}

static int inbox_clear(PyObject *self)
{
    Inbox *inbox = (Inbox *)self;
    Py_CLEAR(inbox->reads);
    Py_CLEAR(inbox->template);
    Py_CLEAR(inbox->busy);
    Py_CLEAR(inbox->peer);
    Py_CLEAR(inbox->tls);
    Py_CLEAR(inbox->unsent);
    return 0;
}

/* The reads of an inbox that are no tuples yet, which has none then. */
static Kept *take_kept(Inbox *inbox)
{
    Kept *first = inbox->first;
    inbox->first = inbox->last = NULL;
    inbox->kept = 0;
    return first;
}

static void drop_kept(Kept *kept)
{
    while (kept != NULL) {
        Kept *next = kept->next;
        PyMem_Free(kept);
        kept = next;
    }
}

/* -1 with an exception. */
static int keep(Inbox *inbox, const Read *read)
{
    Kept *kept = PyMem_Malloc(sizeof *kept + (size_t)read->size);
    if (kept == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *kept = (Kept){.read = *read};
    kept->read.data = memcpy(kept + 1, read->data, (size_t)read->size);
    if (inbox->first == NULL)
        inbox->first = kept;
    else
        inbox->last->next = kept;
    inbox->last = kept;
    inbox->kept++;
    return 0;
}

static PyObject *read_tuple(const Read *read)
{
    PyObject *items[5] = {
        PyBytes_FromStringAndSize(read->data, read->size),
        PyLong_FromLongLong(read->stamp),
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

/* All reads of an inbox but its run, as Python has them: borrowed, or NULL with an exception. */
static PyObject *reads_of(Inbox *inbox)
{
    if (inbox->reads == NULL || !PyList_Check(inbox->reads)) {
        PyErr_SetString(PyExc_TypeError, "the reads of an inbox are a list");
        return NULL;
    }
    Kept *first = take_kept(inbox);
    for (Kept *kept = first; kept != NULL; kept = kept->next) {
        PyObject *read = read_tuple(&kept->read);
        int failed = read == NULL || PyList_Append(inbox->reads, read) < 0;
        Py_XDECREF(read);
        if (failed) {
            drop_kept(first);
            return NULL;
        }
    }
    drop_kept(first);
    return inbox->reads;
}

static PyObject *inbox_reads(PyObject *self, void *Py_UNUSED(none))
{
    PyObject *reads = reads_of((Inbox *)self);
    Py_XINCREF(reads);
    return reads;
}

static int inbox_set_reads(PyObject *self, PyObject *value, void *Py_UNUSED(none))
{
    drop_kept(take_kept((Inbox *)self));
    Py_XINCREF(value);
    replace(&((Inbox *)self)->reads, value);
    return 0;
}

static PyGetSetDef inbox_computed[] = {{"reads", inbox_reads, inbox_set_reads, NULL, NULL}, {NULL}};

/* How many reads wait, each run as one. The reads are a list. */
static Py_ssize_t reads_in(const Inbox *inbox)
{
    return PyList_Size(inbox->reads) + inbox->kept;
}

static void inbox_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    inbox_clear(self);
    drop_kept(take_kept((Inbox *)self));
    PyMem_Free(((Inbox *)self)->run);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMemberDef inbox_members[] = {
    {"template", T_OBJECT_EX, offsetof(Inbox, template), 0, NULL},
    {"emptied_at", T_LONGLONG, offsetof(Inbox, emptied_at), 0, NULL},
    {"ended_at", T_LONGLONG, offsetof(Inbox, ended_at), 0, NULL},
    {"moved_at", T_LONGLONG, offsetof(Inbox, moved_at), READONLY, NULL},
    {"held_events", T_LONGLONG, offsetof(Inbox, held_events), READONLY, NULL},
    {"fd", T_INT, offsetof(Inbox, fd), READONLY, NULL},
    {"error", T_INT, offsetof(Inbox, error), 0, NULL},
    {"filled", T_BOOL, offsetof(Inbox, filled), 0, NULL},
    {"open", T_BOOL, offsetof(Inbox, open), 0, NULL},
    {"patient", T_BOOL, offsetof(Inbox, patient), 0, NULL},
    {"queued", T_BOOL, offsetof(Inbox, queued), 0, NULL},
    {"held", T_BOOL, offsetof(Inbox, held), READONLY, NULL},
    {"busy", T_OBJECT_EX, offsetof(Inbox, busy), 0, NULL},
    {"peer", T_OBJECT_EX, offsetof(Inbox, peer), 0, NULL},
    {"tls", T_OBJECT_EX, offsetof(Inbox, tls), 0, NULL},
    {"unsent", T_OBJECT_EX, offsetof(Inbox, unsent), 0, NULL},
    {"idle_since", T_LONGLONG, offsetof(Inbox, idle_since), 0, NULL},
    {"served", T_LONGLONG, offsetof(Inbox, served), 0, NULL},
    {"tcp_ns", T_LONGLONG, offsetof(Inbox, tcp_ns), 0, NULL},
    {"tls_ns", T_LONGLONG, offsetof(Inbox, tls_ns), 0, NULL},
    {"closed", T_BOOL, offsetof(Inbox, closed), 0, NULL},
    {NULL},
};

static PyType_Slot inbox_slots[] = {
    {Py_tp_init, inbox_init},
    {Py_tp_dealloc, inbox_dealloc},
    {Py_tp_traverse, inbox_traverse},
    {Py_tp_clear, inbox_clear},
    {Py_tp_members, inbox_members},
    {Py_tp_getset, inbox_computed},
    {0, NULL},
};

static PyType_Spec inbox_spec = {
    .name = "loadgen_sdk._compiled.Inbox",
    .basicsize = sizeof(Inbox),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = inbox_slots,
};

/* Whether a read is plain events only, which are then counted in the run of this inbox; -1 with an exception. */
static int count_plain(Inbox *inbox, const char *data, Py_ssize_t size, int64_t stamp, int64_t read_at, int64_t empty_at)
{
    Template template;
    PyObject *before = PyTuple_GetItem(inbox->template, 0), *after = PyTuple_GetItem(inbox->template, 1);
    if (before == NULL || after == NULL ||
        PyBytes_AsStringAndSize(before, (char **)&template.before, &template.before_size) < 0 ||
        PyBytes_AsStringAndSize(after, (char **)&template.after, &template.after_size) < 0)
        return -1;
    const char *at = data, *end = data + size;
    Py_ssize_t chunks = 0, events = 0, found = 0;
    do {
        at = plain_chunk(at, end, &template, &found);
        chunks++;
        events += found;
    } while (at != NULL && at < end && size < MANY_BYTES);
    if (at != end)
        return 0;
    if (inbox->run_count == inbox->run_size) {
        int larger = inbox->run_size ? inbox->run_size * 2 : 32;
        PlainRead *run = PyMem_Realloc(inbox->run, (size_t)larger * sizeof *run);
        if (run == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        inbox->run = run;
        inbox->run_size = larger;
    }
    inbox->run[inbox->run_count++] = (PlainRead){stamp, events, chunks > 1 ? stamp - empty_at : -1};
    inbox->run_bytes += size;
    inbox->run_read_at = read_at;
    return 1;
}

/* -- Receiver */

typedef struct {
    PyObject_HEAD
    PyObject *queue;
    PyObject *queue_append, *queue_popleft;
    Inbox **inboxes; /* by descriptor; NULL where there is none */
    int inboxes_size;
    int epoll, held, timer;
    long long now, last_poll, poll_started, to_monotonic, poll_at, armed_for, reads_at_poll, wake_at;
    long long ready, waiting, polls, reads;
    long long last_held_poll, held_count, held_reads, timely_reads, shared_reads, look_began, hold_from, pause_ns;
    char holding, many_events;
    struct epoll_event events[MOST_READY];
    char buffer[READ_BYTES];
} Receiver;

/* -1 with an exception. */
static int watch(int epoll, int operation, int fd, uint32_t events)
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
    receiver->held = PyObject_AsFileDescriptor(held);
    if (receiver->held < 0)
        return -1;
    receiver->timer = PyObject_AsFileDescriptor(timer);
    if (receiver->timer < 0)
        return -1;
    PyObject *append = PyObject_GetAttrString(queue, "append");
    if (append == NULL)
        return -1;
    replace(&receiver->queue_append, append);
    PyObject *popleft = PyObject_GetAttrString(queue, "popleft");
    if (popleft == NULL)
        return -1;
    replace(&receiver->queue_popleft, popleft);
    Py_INCREF(queue);
    Py_XDECREF(receiver->queue);
    receiver->queue = queue;
    receiver->now = receiver->last_poll = receiver->poll_started = clock_ns(CLOCK_MONOTONIC);
    receiver->last_held_poll = receiver->look_began = receiver->now;
    receiver->pause_ns = PAUSE_NS;
    receiver->wake_at = FOREVER;
    receiver->to_monotonic = receiver->now - clock_ns(CLOCK_REALTIME);
    return watch(receiver->epoll, EPOLL_CTL_ADD, receiver->held, EPOLLIN);
}

static int receiver_traverse(PyObject *self, visitproc visit, void *arg)
{
    Receiver *receiver = (Receiver *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(receiver->queue);
    Py_VISIT(receiver->queue_append);
    Py_VISIT(receiver->queue_popleft);
    for (int fd = 0; fd < receiver->inboxes_size; fd++)
        Py_VISIT((PyObject *)receiver->inboxes[fd]);
    return 0;
}

static int receiver_clear(PyObject *self)
{
    Receiver *receiver = (Receiver *)self;
    Py_CLEAR(receiver->queue);
    Py_CLEAR(receiver->queue_append);
    Py_CLEAR(receiver->queue_popleft);
    Inbox **inboxes = receiver->inboxes;
    int size = receiver->inboxes_size;
    receiver->inboxes = NULL;
    receiver->inboxes_size = 0;
    for (int fd = 0; fd < size; fd++)
        Py_XDECREF((PyObject *)inboxes[fd]);
    PyMem_Free(inboxes);
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

static int is_inbox(PyObject *value)
{
    if (PyObject_TypeCheck(value, inbox_type))
        return 1;
    PyErr_SetString(PyExc_TypeError, "not an Inbox");
    return 0;
}

static PyObject *receiver_add(PyObject *self, PyObject *value)
{
    Receiver *receiver = (Receiver *)self;
    if (!is_inbox(value))
        return NULL;
    int fd = ((Inbox *)value)->fd;
    if (fd < 0) {
        PyErr_SetString(PyExc_ValueError, "a descriptor below 0");
        return NULL;
    }
    if (fd >= receiver->inboxes_size) {
        int size = fd * 2 + 64;
        Inbox **larger = PyMem_Realloc(receiver->inboxes, (size_t)size * sizeof(Inbox *));
        if (larger == NULL)
            return PyErr_NoMemory();
        memset(larger + receiver->inboxes_size, 0, (size_t)(size - receiver->inboxes_size) * sizeof(Inbox *));
        receiver->inboxes = larger;
        receiver->inboxes_size = size;
    }
    Py_INCREF(value);
    PyObject *previous = (PyObject *)receiver->inboxes[fd];
    receiver->inboxes[fd] = (Inbox *)value;
    Py_XDECREF(previous);
    Py_RETURN_NONE;
}

/* From one epoll to the other. -1 with an exception. */
static int move(Receiver *receiver, Inbox *inbox, int held)
{
    if (inbox->held == held)
        return 0;
    int from = held ? receiver->epoll : receiver->held, to = held ? receiver->held : receiver->epoll;
    if (watch(from, EPOLL_CTL_DEL, inbox->fd, 0) < 0 ||
        watch(to, EPOLL_CTL_ADD, inbox->fd, held ? HELD_EVENTS : EPOLLIN) < 0)
        return -1;
    receiver->held_count += held ? 1 : -1;
    inbox->held = (char)held;
    inbox->moved_at = clock_ns(CLOCK_MONOTONIC);
    receiver->holding = receiver->many_events && receiver->held_count > 0;
    return 0;
}

static PyObject *receiver_hold(PyObject *self, PyObject *args)
{
    PyObject *value;
    long long events;
    if (!PyArg_ParseTuple(args, "OL", &value, &events) || !is_inbox(value))
        return NULL;
    Inbox *inbox = (Inbox *)value;
    inbox->held_events = events;
    if (move((Receiver *)self, inbox, events > 0) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *receiver_release(PyObject *self, PyObject *value)
{
    if (!is_inbox(value) || move((Receiver *)self, (Inbox *)value, 0) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *receiver_remove(PyObject *self, PyObject *value)
{
    Receiver *receiver = (Receiver *)self;
    if (!is_inbox(value) || move(receiver, (Inbox *)value, 0) < 0)
        return NULL;
    int fd = ((Inbox *)value)->fd;
    if (fd >= 0 && fd < receiver->inboxes_size) {
        PyObject *previous = (PyObject *)receiver->inboxes[fd];
        receiver->inboxes[fd] = NULL;
        Py_XDECREF(previous);
    }
    Py_RETURN_NONE;
}

/* Put the run behind the reads. -1 with an exception. */
static int end_run(Receiver *receiver, Inbox *inbox)
{
    if (inbox->run_count == 0)
        return 0;
    PyObject *stamps = PyList_New(inbox->run_count);
    if (stamps == NULL)
        return -1;
    for (int i = 0; i < inbox->run_count; i++) {
        PlainRead *read = &inbox->run[i];
        PyObject *item = read->events == 1 ? PyLong_FromLongLong(read->stamp)
                                           : Py_BuildValue("LLL", read->stamp, read->events, read->error);
        if (item == NULL) {
            Py_DECREF(stamps);
            return -1;
        }
        PyList_SetItem(stamps, i, item);
    }
    PyObject *run = Py_BuildValue("NLL", stamps, inbox->run_bytes, inbox->run_read_at);
    if (run == NULL)
        return -1;
    int failed = PyList_Append(inbox->reads, run) < 0;
    Py_DECREF(run);
    receiver->waiting += inbox->queued && !failed;
    inbox->run_count = 0;
    inbox->run_bytes = 0;
    return failed ? -1 : 0;
}

static PyObject *receiver_take(PyObject *self, PyObject *value)
{
    if (!is_inbox(value))
        return NULL;
    Inbox *inbox = (Inbox *)value;
    PyObject *empty = PyList_New(0), *reads = empty == NULL ? NULL : reads_of(inbox);
    if (reads == NULL || end_run((Receiver *)self, inbox) < 0) {
        Py_XDECREF(empty);
        return NULL;
    }
    if (inbox->queued)
        ((Receiver *)self)->waiting -= PyList_Size(reads);
    inbox->reads = empty;
    return reads;
}

static int enqueue(Receiver *receiver, Inbox *inbox)
{
    if (inbox->queued)
        return 0;
    if (end_run(receiver, inbox) < 0)
        return -1;
    inbox->queued = 1;
    receiver->waiting += reads_in(inbox);
    PyObject *done = PyObject_CallFunctionObjArgs(receiver->queue_append, (PyObject *)inbox, NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* The kernel's stamp of what was read, on the wall clock; 0 without one. */
static int64_t stamp_of(struct msghdr *message)
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
static int64_t read_socket(Receiver *receiver, Inbox *inbox, int64_t previous_poll)
{
    union {
        char bytes[CMSG_SPACE(sizeof(struct timespec))];
        struct cmsghdr aligned;
    } control;
    struct iovec vector = {.iov_base = receiver->buffer, .iov_len = READ_BYTES};
    struct msghdr message = {
        .msg_iov = &vector, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t size;
    do
        size = recvmsg(inbox->fd, &message, 0);
    while (size < 0 && errno == EINTR);
    if (size < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return clock_ns(CLOCK_MONOTONIC);
        inbox->error = errno;
        size = 0;
    }
    int64_t read_at = clock_ns(CLOCK_MONOTONIC);
    if (inbox->reads == NULL || !PyList_Check(inbox->reads)) {
        PyErr_SetString(PyExc_TypeError, "the reads of an inbox are a list");
        return -1;
    }
    receiver->reads++;
    if (size == 0) {
        inbox->ended_at = read_at;
        return enqueue(receiver, inbox) < 0 ? -1 : read_at;
    }
    int64_t empty_at = inbox->emptied_at;
    if (empty_at < previous_poll && !inbox->filled && previous_poll > inbox->moved_at)
        empty_at = previous_poll;
    inbox->filled = size == READ_BYTES;
    if (!inbox->filled)
        inbox->emptied_at = read_at;
    int64_t stamp = read_at, wall = stamp_of(&message);
    if (wall) {
        stamp = wall + receiver->to_monotonic;
        if (stamp > read_at)
            stamp = read_at;
        else if (stamp < empty_at)
            stamp = empty_at;
    }
    int templated = inbox->template != NULL && PyTuple_Check(inbox->template);
    if (templated && reads_in(inbox) == 0) {
        int plain = count_plain(inbox, receiver->buffer, size, stamp, read_at, empty_at);
        if (plain < 0)
            return -1;
        if (plain) {
            if (inbox->held) {
                PlainRead *last = &inbox->run[inbox->run_count - 1];
                inbox->held_events -= last->events;
                receiver->shared_reads += last->error >= 0 && last->events > 1;
            }
            return inbox->run_count >= RUN_READS && enqueue(receiver, inbox) < 0 ? -1 : read_at;
        }
        if (end_run(receiver, inbox) < 0)
            return -1;
    }
    const Read read = {receiver->buffer, size, stamp, read_at, empty_at, wall != 0};
    if (keep(inbox, &read) < 0)
        return -1;
    if (inbox->queued)
        receiver->waiting++;
    else if (!inbox->patient || templated || reads_in(inbox) >= KEPT_READS || size <= FEW_BYTES || size >= MANY_BYTES ||
             memcmp(receiver->buffer + size - 4, "\r\n\r\n", 4) == 0)
        if (enqueue(receiver, inbox) < 0)
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
static long long sent_parts(int fd, struct iovec *vectors, size_t count, int64_t *at)
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
    if (!PyArg_ParseTuple(args, "OO!", &value, &PyTuple_Type, &parts) || !is_inbox(value))
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
    long long taken = sent_parts(((Inbox *)value)->fd, vectors, (size_t)count, &at);
    result = Py_BuildValue("LL", (long long)at, taken);
release:
    while (buffered-- > 0)
        PyBuffer_Release(&buffers[buffered]);
    return result;
}

/* -1 with an exception. */
static int arm(Receiver *receiver, int64_t at)
{
    receiver->armed_for = at;
    if (at <= 0)
        at = 1; /* 0 would disarm it */
    struct itimerspec armed = {.it_value = {.tv_sec = at / 1000000000, .tv_nsec = at % 1000000000}};
    if (timerfd_settime(receiver->timer, TFD_TIMER_ABSTIME, &armed, NULL) == 0)
        return 0;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

/* Plan the next poll, and arm the timer for it, or for what is due before. */
static int move_poll(Receiver *receiver, int64_t now, int64_t due_at)
{
    int busy = receiver->reads - receiver->reads_at_poll > BUSY_READS;
    receiver->poll_at = now + (busy ? BUSY_POLL_EVERY_NS : POLL_EVERY_NS);
    receiver->reads_at_poll = receiver->reads;
    if (due_at < 0)
        return 0;
    return arm(receiver, receiver->poll_at < due_at ? receiver->poll_at : due_at);
}

/* The time. Notes how the clock of the stamps differs from it. */
static int64_t read_clocks(Receiver *receiver)
{
    int64_t now = clock_ns(CLOCK_MONOTONIC), wall = clock_ns(CLOCK_REALTIME);
    if (clock_ns(CLOCK_MONOTONIC) - now < MAPPING_NS)
        receiver->to_monotonic = now - wall;
    return now;
}

/* Poll the held sockets once and read what is ready. Returns the time, or -1 with an exception. */
static int64_t receive_held(Receiver *receiver, int64_t now)
{
    int ready = epoll_wait(receiver->held, receiver->events, READ_FIRST, 0);
    if (ready < 0)
        ready = 0; /* EINTR */
    receiver->ready += ready;
    int64_t previous_poll = receiver->last_held_poll, shared = receiver->shared_reads;
    int timely = receiver->holding && now < receiver->poll_at + HOLD_NS;
    if (ready < READ_FIRST)
        receiver->last_held_poll = now;
    for (int i = 0; i < ready; i++) {
        int fd = receiver->events[i].data.fd;
        Inbox *inbox = fd >= 0 && fd < receiver->inboxes_size ? receiver->inboxes[fd] : NULL;
        if (inbox == NULL)
            continue;
        now = read_socket(receiver, inbox, previous_poll);
        if (now < 0)
            return -1;
        /* an edge is reported once; the first epoll reports for as long as there is something to read */
        if ((inbox->filled || receiver->events[i].events != EPOLLIN || inbox->held_events <= 0) &&
            move(receiver, inbox, 0) < 0)
            return -1;
    }
    receiver->held_reads += ready;
    if (timely)
        receiver->timely_reads += ready;
    else
        receiver->shared_reads = shared;
    if (receiver->holding)
        receiver->poll_at = ready < READ_FIRST ? now + HOLD_NS : now;
    return now;
}

/* Hold while there are many events, unless that makes too many stamps unsure. -1 with an exception. */
static int decide_whether_to_hold(Receiver *receiver, int64_t now)
{
    long long per_second = receiver->held_reads * 1000000000 / (now - receiver->look_began);
    int too_many_shared = receiver->shared_reads * SHARED_ONE_OF > receiver->timely_reads;
    receiver->held_reads = receiver->timely_reads = receiver->shared_reads = 0;
    receiver->look_began = now;
    if (!receiver->many_events) {
        if (per_second < HOLD_FROM || now < receiver->hold_from)
            return 0;
        receiver->many_events = 1;
        receiver->holding = receiver->held_count > 0;
        receiver->poll_at = now;
        return watch(receiver->epoll, EPOLL_CTL_DEL, receiver->held, 0);
    }
    if (too_many_shared) {
        receiver->hold_from = now + receiver->pause_ns;
        receiver->pause_ns *= 2;
    } else
        receiver->pause_ns = PAUSE_NS;
    if (!too_many_shared && per_second >= HOLD_DOWN_TO)
        return 0;
    receiver->holding = receiver->many_events = 0;
    return watch(receiver->epoll, EPOLL_CTL_ADD, receiver->held, EPOLLIN);
}

/* Receiver.receive; `*others` is NULL where there are none. -1 with an exception. */
static int receive(Receiver *receiver, int wait_ms, int64_t until, int64_t due_at, PyObject **others)
{
    int64_t wake_at = receiver->wake_at;
    *others = NULL;
    for (;;) {
        int ready, holding = receiver->holding;
        int wait = holding && wait_ms ? (receiver->poll_at > receiver->now ? HOLD_MS : 0) : wait_ms;
        if (wait == 0)
            ready = epoll_wait(receiver->epoll, receiver->events, MOST_READY, 0);
        else {
            Py_BEGIN_ALLOW_THREADS
            ready = epoll_wait(receiver->epoll, receiver->events, MOST_READY, wait);
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
        receiver->polls++;
        receiver->ready = ready;
        receiver->now = now;
        if (now >= wake_at && ready > READ_FIRST)
            return 0;
        int64_t previous_poll = receiver->last_poll;
        if (ready < MOST_READY) /* else there may be ready sockets that it did not report */
            receiver->last_poll = receiver->poll_started;
        int look_at_held = 0;
        for (int i = 0; i < ready; i++) {
            int fd = receiver->events[i].data.fd;
            uint32_t events = receiver->events[i].events;
            Inbox *inbox = fd >= 0 && fd < receiver->inboxes_size ? receiver->inboxes[fd] : NULL;
            if (fd == receiver->held) {
                look_at_held = 1;
                continue;
            }
            if (inbox == NULL || events & EPOLLOUT || !inbox->open) {
                PyObject *other = Py_BuildValue("iI", fd, events);
                int bad = other == NULL || (*others == NULL && (*others = PyList_New(0)) == NULL) ||
                          PyList_Append(*others, other) < 0;
                Py_XDECREF(other);
                if (bad)
                    goto failed;
                if (inbox == NULL || !inbox->open || !(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
                    continue;
            }
            if (!inbox->ended_at) {
                now = read_socket(receiver, inbox, previous_poll);
                if (now < 0)
                    goto failed;
            }
        }
        if (holding) /* a request that is due is sent before, once */
            look_at_held = now - receiver->poll_at > (now >= wake_at ? HOLD_NS : -HOLD_NS / 2);
        if (look_at_held) {
            now = receive_held(receiver, now);
            if (now < 0)
                goto failed;
        }
        receiver->poll_started = receiver->now = now;
        if (now - receiver->look_began > LOOK_NS && decide_whether_to_hold(receiver, now) < 0)
            goto failed;
        if (!receiver->holding && now > receiver->poll_at - POLL_EVERY_NS / 2 &&
            move_poll(receiver, now, *others != NULL ? -1 : due_at) < 0)
            goto failed;
        int nothing_came = receiver->ready == 0 && !(holding && wait_ms < 0);
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

static int64_t number_of(PyObject *value, int *fits);
static int64_t hand_over_slice(Receiver *receiver, int64_t slice_ns, PyObject *other, int *others);

/* Whether the timer fired, and nothing else came that is no socket to read: then as in Wire._other_event. */
static int is_timer_alone(Receiver *receiver, PyObject *others)
{
    uint64_t fired;
    int fits = 1;
    if (PyList_Size(others) != 1 || number_of(PyTuple_GetItem(PyList_GetItem(others, 0), 0), &fits) != receiver->timer)
        return 0;
    if (receiver->armed_for > receiver->last_poll)
        receiver->last_poll = receiver->armed_for;
    receiver->armed_for = 0;
    return read(receiver->timer, &fired, sizeof fired) >= 0 || errno == EAGAIN;
}

/* Receiver.go */
static PyObject *receiver_go(PyObject *self, PyObject *args)
{
    Receiver *receiver = (Receiver *)self;
    int wait_ms, called = 0;
    long long until, tick_at, slice_ns;
    PyObject *awaited, *other, *others;
    if (!PyArg_ParseTuple(args, "iLLO!LO", &wait_ms, &until, &tick_at, &PySet_Type, &awaited, &slice_ns, &other))
        return NULL;
    for (;;) {
        int64_t due_at = receiver->wake_at < tick_at ? receiver->wake_at : tick_at;
        if (receive(receiver, PyObject_Size(receiver->queue) ? 0 : wait_ms, until < due_at ? until : due_at,
                    PySet_Size(awaited) ? due_at : -1, &others) < 0)
            return NULL;
        if (others != NULL && !is_timer_alone(receiver, others))
            return others;
        Py_CLEAR(others);
        if (receiver->now >= receiver->wake_at)
            return PyList_New(0);
        if (PyObject_Size(receiver->queue) > 0 &&
            (receiver->now = hand_over_slice(receiver, slice_ns, other, &called)) < 0)
            return NULL;
        int64_t now = receiver->now;
        if (called || now >= until || now >= tick_at || receiver->waiting >= BACKLOG_LIMIT ||
            (!receiver->ready && !PyObject_Size(receiver->queue)))
            Py_RETURN_NONE;
        int64_t at = receiver->wake_at < tick_at ? receiver->wake_at : tick_at;
        if (receiver->poll_at < at && PySet_Size(awaited) && !receiver->holding)
            at = receiver->poll_at;
        if (at != receiver->armed_for && arm(receiver, at) < 0)
            return NULL;
    }
}


static PyObject *receiver_hand_over(PyObject *self, PyObject *value);
static PyObject *receiver_hand_over_queued(PyObject *self, PyObject *const *args, Py_ssize_t count);
static PyObject *receiver_carry(PyObject *self, PyObject *const *args, Py_ssize_t count);
static PyObject *receiver_free(PyObject *self, PyObject *const *args, Py_ssize_t count);

static PyMethodDef receiver_methods[] = {
    {"add", receiver_add, METH_O, NULL},
    {"remove", receiver_remove, METH_O, NULL},
    {"hold", receiver_hold, METH_VARARGS, NULL},
    {"release", receiver_release, METH_O, NULL},
    {"take", receiver_take, METH_O, NULL},
    {"receive", receiver_receive, METH_VARARGS, NULL},
    {"go", receiver_go, METH_VARARGS, NULL},
    {"send", receiver_send, METH_VARARGS, NULL},
    {"hand_over", receiver_hand_over, METH_O, NULL},
    {"hand_over_queued", (PyCFunction)(void (*)(void))receiver_hand_over_queued, METH_FASTCALL, NULL},
    {"carry", (PyCFunction)(void (*)(void))receiver_carry, METH_FASTCALL, NULL},
    {"free", (PyCFunction)(void (*)(void))receiver_free, METH_FASTCALL, NULL},
    {NULL},
};

static PyMemberDef receiver_members[] = {
    {"now", T_LONGLONG, offsetof(Receiver, now), 0, NULL},
    {"last_poll", T_LONGLONG, offsetof(Receiver, last_poll), 0, NULL},
    {"poll_at", T_LONGLONG, offsetof(Receiver, poll_at), 0, NULL},
    {"armed_for", T_LONGLONG, offsetof(Receiver, armed_for), 0, NULL},
    {"wake_at", T_LONGLONG, offsetof(Receiver, wake_at), 0, NULL},
    {"poll_started", T_LONGLONG, offsetof(Receiver, poll_started), 0, NULL},
    {"holding", T_BOOL, offsetof(Receiver, holding), READONLY, NULL},
    {"ready", T_LONGLONG, offsetof(Receiver, ready), 0, NULL},
    {"waiting", T_LONGLONG, offsetof(Receiver, waiting), 0, NULL},
    {"polls", T_LONGLONG, offsetof(Receiver, polls), 0, NULL},
    {"reads", T_LONGLONG, offsetof(Receiver, reads), 0, NULL},
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
