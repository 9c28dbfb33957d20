/* SocketBuffer: the reads of one socket that its owner has not taken yet. Part of _compiled.c.
 *
 * The reference is transport/receiver.py, which describes the fields. */

/* One read, as `Read` in transport/response_state.py. */
typedef struct {
    const char *data;
    Py_ssize_t size;
    int64_t timestamp, read_at, empty_at;
    char from_kernel;
} Read;

/* A read that Python has not asked for yet. Its bytes follow it in memory. */
typedef struct WaitingRead {
    struct WaitingRead *next;
    Read read;
} WaitingRead;

/* A read of plain events only. `error` is by how much all events but the last may have arrived
 * before the timestamp, or CAME_IN_ONE_CHUNK. */
enum { CAME_IN_ONE_CHUNK = -1 };
typedef struct {
    long long timestamp, events, error;
} PlainRead;

typedef struct {
    PyObject_HEAD
    PyObject *reads; /* a list of the tuples `Read` and `PlainRun` */
    WaitingRead *first_waiting,
        *last_waiting; /* the reads after those; while there are any, there is no run */
    int waiting_count;
    PyObject *template; /* a tuple (before, after), or None */
    PlainRead *plain_reads;
    int plain_read_count, plain_read_capacity;
    long long plain_bytes, plain_read_at;
    long long emptied_at, ended_at, epoll_changed_at, events_until_urgent;
    PyObject *exchange, *owner, *tls, *unsent;
    long long idle_since, responses_served, tcp_connect_ns, tls_handshake_ns;
    int fd;
    int error;
    char is_last_read_full, is_readable, can_batch_reads, is_queued, is_deferred, is_closed;
} SocketBuffer;

static PyTypeObject *socket_buffer_type;

/* Set a reference to a value, and take over the reference that the caller has. */
static void set_field_stealing(PyObject **place, PyObject *value)
{
    PyObject *previous = *place;
    *place = value;
    Py_XDECREF(previous);
}

/* Set a reference to a value. */
static void set_field(PyObject **place, PyObject *value)
{
    Py_INCREF(value);
    set_field_stealing(place, value);
}

static int is_socket_buffer(PyObject *value)
{
    if (PyObject_TypeCheck(value, socket_buffer_type))
        return 1;
    PyErr_SetString(PyExc_TypeError, "not a SocketBuffer");
    return 0;
}

static int socket_buffer_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    SocketBuffer *buffer = (SocketBuffer *)self;
    if (!PyArg_ParseTuple(args, "iL", &buffer->fd, &buffer->emptied_at))
        return -1;
    PyObject *reads = PyList_New(0);
    PyObject *unsent = PyList_New(0);
    if (reads == NULL || unsent == NULL) {
        Py_XDECREF(reads);
        Py_XDECREF(unsent);
        return -1;
    }
    set_field_stealing(&buffer->reads, reads);
    set_field_stealing(&buffer->unsent, unsent);
    set_field(&buffer->template, Py_None);
    set_field(&buffer->exchange, Py_None);
    set_field(&buffer->owner, Py_None);
    set_field(&buffer->tls, Py_None);
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

/* -- reads that Python has not asked for ------------------------------------------------------- */

/* Remove the waiting reads from a buffer and return the first of them. */
static WaitingRead *detach_waiting(SocketBuffer *buffer)
{
    WaitingRead *first = buffer->first_waiting;
    buffer->first_waiting = NULL;
    buffer->last_waiting = NULL;
    buffer->waiting_count = 0;
    return first;
}

static void free_waiting(WaitingRead *waiting)
{
    while (waiting != NULL) {
        WaitingRead *next = waiting->next;
        PyMem_Free(waiting);
        waiting = next;
    }
}

/* Append a copy of a read to the waiting reads. Return -1 with an exception. */
static int append_read(SocketBuffer *buffer, const Read *read)
{
    WaitingRead *waiting = PyMem_Malloc(sizeof *waiting + (size_t)read->size);
    if (waiting == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    waiting->next = NULL;
    waiting->read = *read;
    waiting->read.data = memcpy(waiting + 1, read->data, (size_t)read->size);
    if (buffer->first_waiting == NULL)
        buffer->first_waiting = waiting;
    else
        buffer->last_waiting->next = waiting;
    buffer->last_waiting = waiting;
    buffer->waiting_count++;
    return 0;
}

/* Return a read as Python has it. */
static PyObject *read_tuple(const Read *read)
{
    PyObject *items[] = {
        PyBytes_FromStringAndSize(read->data, read->size),
        PyLong_FromLongLong(read->timestamp),
        PyLong_FromLongLong(read->read_at),
        PyLong_FromLongLong(read->empty_at),
        PyBool_FromLong(read->from_kernel),
    };
    enum { ITEMS = sizeof items / sizeof *items };
    PyObject *tuple = PyTuple_New(ITEMS);
    int failed = tuple == NULL;
    for (int i = 0; i < ITEMS; i++) {
        if (items[i] == NULL)
            failed = 1;
        if (tuple != NULL)
            PyTuple_SetItem(tuple, i, items[i]); /* takes over the reference */
        else
            Py_XDECREF(items[i]);
    }
    if (failed)
        Py_CLEAR(tuple);
    return tuple;
}

/* Move the waiting reads to the list of reads, and return the list, borrowed, or NULL with an
 * exception. */
static PyObject *materialize_reads(SocketBuffer *buffer)
{
    if (buffer->reads == NULL || !PyList_Check(buffer->reads)) {
        PyErr_SetString(PyExc_TypeError, "the reads of a SocketBuffer are a list");
        return NULL;
    }
    int failed = 0;
    WaitingRead *first = detach_waiting(buffer);
    for (WaitingRead *waiting = first; waiting != NULL && !failed; waiting = waiting->next) {
        PyObject *read = read_tuple(&waiting->read);
        failed = read == NULL || PyList_Append(buffer->reads, read) < 0;
        Py_XDECREF(read);
    }
    free_waiting(first);
    return failed ? NULL : buffer->reads;
}

static PyObject *socket_buffer_reads(PyObject *self, void *Py_UNUSED(closure))
{
    PyObject *reads = materialize_reads((SocketBuffer *)self);
    Py_XINCREF(reads);
    return reads;
}

static int socket_buffer_set_reads(PyObject *self, PyObject *value, void *Py_UNUSED(closure))
{
    free_waiting(detach_waiting((SocketBuffer *)self));
    Py_XINCREF(value);
    set_field_stealing(&((SocketBuffer *)self)->reads, value);
    return 0;
}

/* Return how many reads wait. A run counts as one. */
static Py_ssize_t count_reads(const SocketBuffer *buffer)
{
    return PyList_Size(buffer->reads) + buffer->waiting_count;
}

/* -- reads of plain events --------------------------------------------------------------------- */

/* Fill in a template from the tuple of a buffer. Return -1 with an exception. */
static int template_of(const SocketBuffer *buffer, Template *template)
{
    PyObject *before = PyTuple_GetItem(buffer->template, 0);
    PyObject *after = PyTuple_GetItem(buffer->template, 1);
    if (before == NULL || after == NULL)
        return -1;
    if (PyBytes_AsStringAndSize(before, (char **)&template->before, &template->before_size) < 0)
        return -1;
    return PyBytes_AsStringAndSize(after, (char **)&template->after, &template->after_size);
}

/* Append a read to the run of a buffer. Return -1 with an exception. */
static int append_plain_read(SocketBuffer *buffer, const PlainRead *read)
{
    if (buffer->plain_read_count == buffer->plain_read_capacity) {
        int capacity = buffer->plain_read_capacity ? buffer->plain_read_capacity * 2 : 32;
        PlainRead *run = PyMem_Realloc(buffer->plain_reads, (size_t)capacity * sizeof *run);
        if (run == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        buffer->plain_reads = run;
        buffer->plain_read_capacity = capacity;
    }
    buffer->plain_reads[buffer->plain_read_count++] = *read;
    return 0;
}

/* Add a read to the run of a buffer if it holds plain events only. Return whether it does, or -1
 * with an exception. Of a large read, only the first chunk is looked at. */
static int count_if_plain(SocketBuffer *buffer, const Read *read)
{
    Template template;
    if (template_of(buffer, &template) < 0)
        return -1;
    const char *at = read->data;
    const char *end = at + read->size;
    Py_ssize_t chunks = 0, events = 0, events_in_chunk = 0;
    do {
        at = parse_plain_chunk(at, end, &template, &events_in_chunk);
        chunks++;
        events += events_in_chunk;
    } while (at != NULL && at < end && read->size < LARGE_READ_BYTES);
    if (at != end)
        return 0;
    int64_t error = chunks > 1 ? read->timestamp - read->empty_at : CAME_IN_ONE_CHUNK;
    if (append_plain_read(buffer, &(PlainRead){read->timestamp, events, error}) < 0)
        return -1;
    buffer->plain_bytes += read->size;
    buffer->plain_read_at = read->read_at;
    return 1;
}

/* Return a plain read as Python has it: a timestamp for one event, a `EventBatch` for several. */
static PyObject *plain_read_object(const PlainRead *read)
{
    if (read->events == 1)
        return PyLong_FromLongLong(read->timestamp);
    if (read->error == CAME_IN_ONE_CHUNK)
        return Py_BuildValue("LLO", read->timestamp, read->events, Py_None);
    return Py_BuildValue("LLL", read->timestamp, read->events, read->error);
}

/* Return the run of a buffer as Python has it. */
static PyObject *plain_run_tuple(const SocketBuffer *buffer)
{
    PyObject *arrivals = PyList_New(buffer->plain_read_count);
    if (arrivals == NULL)
        return NULL;
    for (int i = 0; i < buffer->plain_read_count; i++) {
        PyObject *arrival = plain_read_object(&buffer->plain_reads[i]);
        if (arrival == NULL) {
            Py_DECREF(arrivals);
            return NULL;
        }
        PyList_SetItem(arrivals, i, arrival); /* takes over the reference */
    }
    return Py_BuildValue("NLL", arrivals, buffer->plain_bytes, buffer->plain_read_at);
}

/* -- the type ---------------------------------------------------------------------------------- */

static void socket_buffer_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    socket_buffer_clear(self);
    free_waiting(detach_waiting((SocketBuffer *)self));
    PyMem_Free(((SocketBuffer *)self)->plain_reads);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

#define BUFFER_MEMBER(name, type, flags)                                                           \
    {                                                                                              \
#name, type, offsetof(SocketBuffer, name), flags, NULL                                     \
    }

static PyMemberDef socket_buffer_members[] = {
    BUFFER_MEMBER(template, T_OBJECT_EX, 0),
    BUFFER_MEMBER(emptied_at, T_LONGLONG, 0),
    BUFFER_MEMBER(ended_at, T_LONGLONG, 0),
    BUFFER_MEMBER(epoll_changed_at, T_LONGLONG, READONLY),
    BUFFER_MEMBER(events_until_urgent, T_LONGLONG, READONLY),
    BUFFER_MEMBER(fd, T_INT, READONLY),
    BUFFER_MEMBER(error, T_INT, 0),
    BUFFER_MEMBER(is_last_read_full, T_BOOL, 0),
    BUFFER_MEMBER(is_readable, T_BOOL, 0),
    BUFFER_MEMBER(can_batch_reads, T_BOOL, 0),
    BUFFER_MEMBER(is_queued, T_BOOL, 0),
    BUFFER_MEMBER(is_deferred, T_BOOL, READONLY),
    BUFFER_MEMBER(exchange, T_OBJECT_EX, 0),
    BUFFER_MEMBER(owner, T_OBJECT_EX, 0),
    BUFFER_MEMBER(tls, T_OBJECT_EX, 0),
    BUFFER_MEMBER(unsent, T_OBJECT_EX, 0),
    BUFFER_MEMBER(idle_since, T_LONGLONG, 0),
    BUFFER_MEMBER(responses_served, T_LONGLONG, 0),
    BUFFER_MEMBER(tcp_connect_ns, T_LONGLONG, 0),
    BUFFER_MEMBER(tls_handshake_ns, T_LONGLONG, 0),
    BUFFER_MEMBER(is_closed, T_BOOL, 0),
    {NULL},
};

static PyGetSetDef socket_buffer_properties[] = {
    {"reads", socket_buffer_reads, socket_buffer_set_reads, NULL, NULL},
    {NULL},
};

static PyType_Slot socket_buffer_slots[] = {
    {Py_tp_init, socket_buffer_init},
    {Py_tp_dealloc, socket_buffer_dealloc},
    {Py_tp_traverse, socket_buffer_traverse},
    {Py_tp_clear, socket_buffer_clear},
    {Py_tp_members, socket_buffer_members},
    {Py_tp_getset, socket_buffer_properties},
    {0, NULL},
};

static PyType_Spec socket_buffer_spec = {
    .name = "loadgen_sdk._compiled.SocketBuffer",
    .basicsize = sizeof(SocketBuffer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = socket_buffer_slots,
};
