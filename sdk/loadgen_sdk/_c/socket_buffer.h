/* SocketBuffer: the reads of one socket that its owner has not taken yet. Part of _compiled.c.
 *
 * The reference implementation is transport/receiver.py, which describes the fields. */

/* One read of a socket, as `Read` in transport/response_state.py. Times are monotonic, in ns. */
typedef struct {
    const char *data;
    Py_ssize_t size;
    int64_t timestamp; /* when the newest packet arrived */
    int64_t read_at;   /* when the process had read the data */
    int64_t empty_at;  /* the last time at which the socket was known to be empty */
    char from_kernel;  /* the kernel made the timestamp */
} Read;

/* A read in the linked list of those for which no Python object was created yet. Its bytes follow
 * this struct in memory. */
typedef struct WaitingRead {
    struct WaitingRead *next;
    Read read;
} WaitingRead;

/* Stands for the uncertainty of a read whose events came in one chunk, which is one write of the
 * server, so that all of them arrived at the timestamp. */
enum { ARRIVED_IN_ONE_CHUNK = -1 };

/* What is kept of a read that holds plain events only: the timestamp and the number of events. */
typedef struct {
    long long timestamp;
    long long event_count;
    long long uncertainty_ns; /* so much earlier all events but the last may have arrived */
} PlainRead;

typedef struct {
    PyObject_HEAD

    /* What was read and not taken yet: first the Python objects, then the waiting reads, then the
     * plain reads. There are no plain reads while there is anything else. */
    PyObject *reads; /* a list of tuples `Read` and `PlainRun` of Python */
    WaitingRead *first_waiting;
    WaitingRead *last_waiting;
    int waiting_count;
    PlainRead *plain_reads;
    int plain_read_count;
    int plain_read_capacity;
    long long plain_bytes;
    long long plain_read_at;
    char is_queued;

    /* What the receiver knows of the socket */
    int fd;
    int error;
    long long emptied_at;
    long long ended_at;
    long long epoll_changed_at;
    char is_readable;
    char is_last_read_full;
    char is_deferred;

    /* How urgent the next reads are, as the owner says */
    char can_batch_reads;
    PyObject *template; /* a tuple (before, after), or None */
    long long events_until_urgent;

    /* What belongs to the owner of the connection */
    PyObject *owner;
    PyObject *exchange;
    PyObject *tls;
    PyObject *unsent;
    char is_closed;
    long long idle_since;
    long long responses_served;
    long long tcp_connect_ns;
    long long tls_handshake_ns;
} SocketBuffer;

static PyTypeObject *socket_buffer_type;

/* Return whether an object is a SocketBuffer. If it is not, set a TypeError. */
static int check_socket_buffer(PyObject *value)
{
    if (PyObject_TypeCheck(value, socket_buffer_type))
        return 1;
    PyErr_SetString(PyExc_TypeError, "not a SocketBuffer");
    return 0;
}

/* -- waiting reads ----------------------------------------------------------------------------- */

/* Remove the waiting reads from a buffer. Return the first of them, which the caller has to free
 * with `free_waiting_reads`. */
static WaitingRead *detach_waiting_reads(SocketBuffer *buffer)
{
    WaitingRead *first = buffer->first_waiting;
    buffer->first_waiting = NULL;
    buffer->last_waiting = NULL;
    buffer->waiting_count = 0;
    return first;
}

/* Free a linked list of waiting reads. */
static void free_waiting_reads(WaitingRead *waiting)
{
    while (waiting != NULL) {
        WaitingRead *next = waiting->next;
        PyMem_Free(waiting);
        waiting = next;
    }
}

/* Append a copy of a read to the waiting reads of a buffer, for which no Python objects are created
 * unless Python asks for them. Return 0, or -1 with an exception. */
static int append_waiting_read(SocketBuffer *buffer, const Read *read)
{
    WaitingRead *waiting = PyMem_Malloc(sizeof *waiting + (size_t)read->size);
    if (waiting == NULL) {
        PyErr_NoMemory();
        return -1;
    }

    void *data = waiting + 1; /* the bytes after the struct */
    memcpy(data, read->data, (size_t)read->size);
    waiting->next = NULL;
    waiting->read = *read;
    waiting->read.data = data;

    if (buffer->first_waiting == NULL)
        buffer->first_waiting = waiting;
    else
        buffer->last_waiting->next = waiting;

    buffer->last_waiting = waiting;
    buffer->waiting_count++;
    return 0;
}

/* The items of the tuple `Read` in transport/response_state.py. */
enum ReadItem {
    READ_DATA,
    READ_TIMESTAMP,
    READ_READ_AT,
    READ_EMPTY_AT,
    READ_FROM_KERNEL,
    READ_ITEM_COUNT
};

/* Return a new tuple (data, timestamp, read_at, empty_at, from_kernel) for a read of a socket, as
 * Python handles it, or NULL with an exception. */
static PyObject *new_read_tuple(const Read *read)
{
    /* "y#" takes the bytes and their size. "L" is an int, and "O" takes a new reference. */
    return Py_BuildValue("y#LLLO", read->data, read->size, (long long)read->timestamp,
                         (long long)read->read_at, (long long)read->empty_at,
                         read->from_kernel ? Py_True : Py_False);
}

/* Return 0 if the field `reads`, which Python may set, is a list. Else return -1 with a
 * TypeError. */
static int check_reads(const SocketBuffer *buffer)
{
    if (buffer->reads != NULL && PyList_Check(buffer->reads))
        return 0;
    PyErr_SetString(PyExc_TypeError, "the reads of a SocketBuffer are a list");
    return -1;
}

/* Move the waiting reads of a buffer to its list `reads`, as Python objects. Return 0, or -1 with
 * an exception. */
static int move_waiting_reads_to_list(SocketBuffer *buffer)
{
    if (check_reads(buffer) < 0)
        return -1;

    int status = 0;
    WaitingRead *first = detach_waiting_reads(buffer);
    for (WaitingRead *waiting = first; waiting != NULL && status == 0; waiting = waiting->next)
        status = append_stealing(buffer->reads, new_read_tuple(&waiting->read));

    free_waiting_reads(first);
    return status;
}

/* Return how many reads a buffer holds, without the plain reads, which were only counted. A
 * `PlainRun` in the list counts as one. */
static Py_ssize_t count_reads(const SocketBuffer *buffer)
{
    return PyList_Size(buffer->reads) + buffer->waiting_count;
}

/* -- plain reads ------------------------------------------------------------------------------- */

/* Return whether a buffer has a template, so that reads of plain events are only counted. */
static int has_template(const SocketBuffer *buffer)
{
    return buffer->template != NULL && PyTuple_Check(buffer->template);
}

/* Read the template of plain events from the tuple (before, after) of a buffer.
 *
 * The bytes are not copied: they stay valid as long as the tuple. Return 0, or -1 with an exception
 * if the tuple does not consist of bytes. */
static int read_template(const SocketBuffer *buffer, Template *template)
{
    PyObject *before = PyTuple_GetItem(buffer->template, 0);
    PyObject *after = PyTuple_GetItem(buffer->template, 1);
    if (before == NULL || after == NULL)
        return -1;
    if (PyBytes_AsStringAndSize(before, (char **)&template->before, &template->before_size) < 0)
        return -1;
    return PyBytes_AsStringAndSize(after, (char **)&template->after, &template->after_size);
}

/* Append a read to the array of plain reads of a buffer, which doubles its capacity when it is
 * full. Return 0, or -1 with an exception. */
static int append_plain_read(SocketBuffer *buffer, const PlainRead *read)
{
    const int first_capacity = 32;
    if (buffer->plain_read_count == buffer->plain_read_capacity) {
        int capacity =
            buffer->plain_read_capacity > 0 ? buffer->plain_read_capacity * 2 : first_capacity;
        PlainRead *plain_reads =
            PyMem_Realloc(buffer->plain_reads, (size_t)capacity * sizeof *plain_reads);
        if (plain_reads == NULL) {
            PyErr_NoMemory();
            return -1;
        }

        buffer->plain_reads = plain_reads;
        buffer->plain_read_capacity = capacity;
    }

    buffer->plain_reads[buffer->plain_read_count] = *read;
    buffer->plain_read_count++;
    return 0;
}

/* Count the chunks and the events of a read, if it holds nothing but plain events.
 *
 * A plain event differs in its text alone from the event of which the template was made. Return 1,
 * or 0 if the read holds anything else. A large read of several chunks gives 0 too: it is passed on
 * at once, so that counting its events would save nothing. */
static int count_plain_events(const Read *read, const Template *template, Py_ssize_t *chunk_count,
                              Py_ssize_t *event_count)
{
    const char *cursor = read->data;
    const char *end = read->data + read->size;
    int is_large = read->size >= LARGE_READ_BYTES;
    *chunk_count = 0;
    *event_count = 0;

    while (cursor < end) {
        if (is_large && *chunk_count == 1)
            return 0;

        Py_ssize_t events_in_chunk;
        cursor = parse_plain_chunk(cursor, end, template, &events_in_chunk);
        if (cursor == NULL)
            return 0;

        *chunk_count += 1;
        *event_count += events_in_chunk;
    }

    return 1;
}

/* Store a read as a plain read, without its bytes, if it holds nothing but plain events, which
 * differ from an earlier event in their text alone.
 *
 * Several chunks may be several packets, of which only the newest has arrived at the timestamp. A
 * single chunk is one write of the server, so that its events have arrived together. Return 1 if
 * the read was stored, 0 if it holds anything else, or -1 with an exception. */
static int try_store_plain_read(SocketBuffer *buffer, const Read *read)
{
    Template template;
    Py_ssize_t chunk_count, event_count;

    if (read_template(buffer, &template) < 0)
        return -1;
    if (!count_plain_events(read, &template, &chunk_count, &event_count))
        return 0;

    const PlainRead plain_read = {
        .timestamp = read->timestamp,
        .event_count = event_count,
        .uncertainty_ns = chunk_count > 1 ? read->timestamp - read->empty_at : ARRIVED_IN_ONE_CHUNK,
    };
    if (append_plain_read(buffer, &plain_read) < 0)
        return -1;

    buffer->plain_bytes += read->size;
    buffer->plain_read_at = read->read_at;
    return 1;
}

/* Return a new object for a plain read: its timestamp as an int if it holds one event, or the tuple
 * `EventBatch` (timestamp, number of events, uncertainty in ns or None) for several events. Return
 * NULL with an exception. */
static PyObject *new_plain_read_object(const PlainRead *read)
{
    if (read->event_count == 1)
        return PyLong_FromLongLong(read->timestamp);
    if (read->uncertainty_ns == ARRIVED_IN_ONE_CHUNK)
        return Py_BuildValue("LLO", read->timestamp, read->event_count, Py_None);
    return Py_BuildValue("LLL", read->timestamp, read->event_count, read->uncertainty_ns);
}

/* Return a new tuple `PlainRun` for the plain reads of a buffer, of which only the timestamp and
 * the number of events are known, or NULL with an exception.
 *
 * Its items are the list of the reads, the number of their bytes, and the time of the last one. */
static PyObject *new_plain_run_tuple(const SocketBuffer *buffer)
{
    PyObject *arrivals = PyList_New(buffer->plain_read_count);
    if (arrivals == NULL)
        return NULL;

    for (int i = 0; i < buffer->plain_read_count; i++) {
        PyObject *arrival = new_plain_read_object(&buffer->plain_reads[i]);
        if (arrival == NULL) {
            Py_DECREF(arrivals);
            return NULL;
        }
        PyList_SetItem(arrivals, i, arrival); /* The list takes over the reference. */
    }

    /* "N" takes over the reference to the list. */
    return Py_BuildValue("NLL", arrivals, buffer->plain_bytes, buffer->plain_read_at);
}

/* -- the type ---------------------------------------------------------------------------------- */

/* SocketBuffer(fd, now): the empty buffer of a socket that was opened at the time `now`. */
static int socket_buffer_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    SocketBuffer *buffer = (SocketBuffer *)self;
    long long now;

    if (!PyArg_ParseTuple(args, "iL", &buffer->fd, &now))
        return -1;
    if (set_new_list(&buffer->reads) < 0 || set_new_list(&buffer->unsent) < 0)
        return -1;

    set_field(&buffer->template, Py_None);
    set_field(&buffer->exchange, Py_None);
    set_field(&buffer->owner, Py_None);
    set_field(&buffer->tls, Py_None);
    buffer->emptied_at = now;
    buffer->idle_since = now;

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

static void socket_buffer_dealloc(PyObject *self)
{
    SocketBuffer *buffer = (SocketBuffer *)self;
    PyObject_GC_UnTrack(self);
    socket_buffer_clear(self);
    free_waiting_reads(detach_waiting_reads(buffer));
    PyMem_Free(buffer->plain_reads);
    free_object(self);
}

/* The getter of `reads`. It creates the Python objects of the reads that have none yet. */
static PyObject *socket_buffer_get_reads(PyObject *self, void *Py_UNUSED(closure))
{
    SocketBuffer *buffer = (SocketBuffer *)self;
    if (move_waiting_reads_to_list(buffer) < 0)
        return NULL;
    Py_INCREF(buffer->reads);
    return buffer->reads;
}

/* The setter of `reads`. It drops the reads that are waiting. */
static int socket_buffer_set_reads(PyObject *self, PyObject *value, void *Py_UNUSED(closure))
{
    SocketBuffer *buffer = (SocketBuffer *)self;
    free_waiting_reads(detach_waiting_reads(buffer));
    Py_XINCREF(value); /* It is NULL if the attribute is deleted. */
    set_field_stealing(&buffer->reads, value);
    return 0;
}

/* Describe a field of SocketBuffer that Python can read, and write unless it is READONLY. */
#define BUFFER_MEMBER(name, type, flags) {#name, type, offsetof(SocketBuffer, name), flags, NULL}

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
    {"reads", socket_buffer_get_reads, socket_buffer_set_reads, NULL, NULL},
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
