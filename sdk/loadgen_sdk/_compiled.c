/* The parts of the client that run once per event, in C: the twins of `Inbox` and `Receiver` in transport/receiver.py, of
   `Exchange.arrived` with the state of an answer, and of the functions in transport/plain.py and dialects/reader.py, which
   say what they do. tests/sdk/test_compiled.py holds the two against
   each other. Built where a C compiler is found; `compiled.py` chooses. Only the limited API of Python 3.11 is used,
   so that one build serves every later version. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define VERSION 9 /* of these functions: compiled.py asks for the same, else it takes Python's */

enum {
    READ_BYTES = 32 << 10,
    MOST_READY = 1024,
    MAPPING_NS = 5000,
    POLL_EVERY_NS = 1000000,
    BUSY_POLL_EVERY_NS = 2000000,
    BUSY_READS = 4,
    READ_FIRST = 32,
    BACKLOG_LIMIT = 20000,
    HOLD_MS = 1,
    HOLD_NS = 1000000,
    LOOK_NS = 100000000,
    HOLD_FROM = 4000,
    HOLD_DOWN_TO = 2000,
    SHARED_ONE_OF = 100,
    KEPT_READS = 64,
    RUN_READS = 512,
    FEW_BYTES = 4,
    MANY_BYTES = 2048,
    MOST_SIZE_DIGITS = 8,
    SPAN_BYTES = 4,
    SHORT_WORD = 16,
    LONGEST_WORD = 255,
    WORD_ROOM = LONGEST_WORD + SHORT_WORD, /* that a word may need, with what is written behind a short one */
};

#define PAUSE_NS 1000000000LL
#define FOREVER (1LL << 62)
#define USUAL_REUSE_NS 1000000000LL /* a connection that was used just now can be used again */
#define HELD_EVENTS (EPOLLIN | EPOLLRDHUP | EPOLLET)

#ifndef SO_TIMESTAMPNS
#define SO_TIMESTAMPNS 35
#endif

static int64_t clock_ns(clockid_t clock)
{
    struct timespec at;
    clock_gettime(clock, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

/* -- plain events -------------------------------------------------------------------------------------------------- */

/* The bytes `data: BEFORE` and `AFTER\n\n` around the text of a plain event; AFTER begins with the closing quote. */
typedef struct {
    const char *before, *after;
    Py_ssize_t before_size, after_size;
} Template;

/* The text of a plain event at `text`, before `end`: where its closing quote is, else NULL. */
static const char *plain_text(const char *text, const char *end)
{
    const char *stop = text;
    int ascii = 1;
    for (; stop < end && *stop != '"'; stop++) {
        unsigned char byte = (unsigned char)*stop;
        if (byte < 0x20 || byte == '\\')
            return NULL;
        if (byte >= 0x80)
            ascii = 0;
    }
    if (stop == text || stop == end)
        return NULL;
    if (!ascii) {
        PyObject *decoded = PyUnicode_DecodeUTF8(text, stop - text, "strict");
        if (decoded == NULL) {
            PyErr_Clear();
            return NULL;
        }
        Py_DECREF(decoded);
    }
    return stop;
}

/* The payload of a plain event at `at`, before `end`: where it ends, else NULL. */
static const char *plain_payload(const char *at, const char *end, const Template *template)
{
    if (end - at < template->before_size || memcmp(at, template->before, (size_t)template->before_size) != 0)
        return NULL;
    const char *stop = plain_text(at + template->before_size, end);
    if (stop == NULL || end - stop < template->after_size ||
        memcmp(stop, template->after, (size_t)template->after_size) != 0)
        return NULL;
    return stop + template->after_size;
}

/* A plain event at `at`, before `end`: where it ends, else NULL. */
static const char *plain_event(const char *at, const char *end, const Template *template)
{
    if (end - at < 6 || memcmp(at, "data: ", 6) != 0)
        return NULL;
    const char *stop = plain_payload(at + 6, end, template);
    return stop == NULL || end - stop < 2 || memcmp(stop, "\n\n", 2) != 0 ? NULL : stop + 2;
}

/* An event at `at`, before `end`, that is one line of data: where it ends, else NULL. */
static const char *line_event(const char *at, const char *end)
{
    if (end - at < 6 || memcmp(at, "data: ", 6) != 0)
        return NULL;
    const char *line_end = memchr(at, '\n', (size_t)(end - at));
    return line_end == NULL || line_end + 1 == end || line_end[1] != '\n' ? NULL : line_end + 2;
}

/* A whole chunk at `at`, before `end`: its content is from `*content` to `*close`; returns what follows it, or NULL. */
static const char *chunk(const char *at, const char *end, const char **content, const char **close)
{
    int64_t length = 0; /* eight digits are more than a Py_ssize_t of 32 bits holds */
    const char *digits = at;
    for (; at < end && at - digits <= MOST_SIZE_DIGITS; at++) {
        int digit = *at >= '0' && *at <= '9'   ? *at - '0'
                    : *at >= 'a' && *at <= 'f' ? *at - 'a' + 10
                    : *at >= 'A' && *at <= 'F' ? *at - 'A' + 10
                                               : -1;
        if (digit < 0)
            break;
        length = length * 16 + digit;
    }
    if (at == digits || at - digits > MOST_SIZE_DIGITS || length == 0 || end - at < 4 || memcmp(at, "\r\n", 2) != 0)
        return NULL;
    at += 2;
    if (end - at < length + 2 || memcmp(at + length, "\r\n", 2) != 0)
        return NULL;
    *content = at;
    *close = at + length;
    return at + length + 2;
}

/* A chunk at `at` that holds nothing but plain events: what follows it, and how many events it holds; else NULL. */
static const char *plain_chunk(const char *at, const char *end, const Template *template, Py_ssize_t *events)
{
    const char *content, *close, *next = chunk(at, end, &content, &close);
    *events = 0;
    while (next != NULL && content < close) {
        content = plain_event(content, close, template);
        if (content == NULL)
            return NULL;
        ++*events;
    }
    return next;
}

/* -- Inbox --------------------------------------------------------------------------------------------------------- */

/* A read of plain events only. `error`: how wrong the stamp of all but the last one can be; -1: they are one chunk. */
typedef struct {
    long long stamp, events, error;
} PlainRead;

typedef struct {
    PyObject_HEAD
    PyObject *reads;    /* list of (bytes, stamp, read_at, empty_at, from_kernel) and (plain reads, bytes, read_at) */
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

static void inbox_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    inbox_clear(self);
    PyMem_Free(((Inbox *)self)->run);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMemberDef inbox_members[] = {
    {"reads", T_OBJECT_EX, offsetof(Inbox, reads), 0, NULL},
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

/* -- Receiver ------------------------------------------------------------------------------------------------------ */

/* What goes on by itself, from the end of a usual answer to the next request of its lane: the pool's part, and the fields
   of `Succession` in transport/succession.py, in their order. */
#define FOLLOWED_FIELDS(F)                                                                                             \
    F(pool) F(idle) F(in_flight) F(awaited) F(head) F(timeout) F(stream) F(keep_text) F(keep_headers)                  \
    F(ended) F(partial) F(start) F(started) F(exchanges) F(ends) F(left) F(spans) F(sent) F(counters) F(recent) F(row) \
    F(refusals) F(take) F(flows) F(start_ns) F(worker) F(name) F(rows) F(blocks) F(block_bytes) F(known)
#define F(name) F_##name,
enum { FOLLOWED_FIELDS(F) F_COUNT };
#undef F

typedef struct {
    PyObject_HEAD
    PyObject *queue;
    PyObject *queue_append, *queue_popleft;
    PyObject *followed; /* a tuple of these, or NULL */
    PyObject *known;    /* what was said last of a body with so many tokens, of which so many are asked for; or NULL */
    long long known_tokens, known_asked;
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
    Py_VISIT(receiver->followed);
    Py_VISIT(receiver->known);
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
    Py_CLEAR(receiver->followed);
    Py_CLEAR(receiver->known);
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
    if (inbox->reads == NULL || !PyList_Check(inbox->reads)) {
        PyErr_SetString(PyExc_TypeError, "the reads of an inbox are a list");
        return NULL;
    }
    PyObject *empty = PyList_New(0);
    if (empty == NULL || end_run((Receiver *)self, inbox) < 0) {
        Py_XDECREF(empty);
        return NULL;
    }
    PyObject *reads = inbox->reads;
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
    receiver->waiting += PyList_Size(inbox->reads);
    PyObject *done = PyObject_CallFunctionObjArgs(receiver->queue_append, (PyObject *)inbox, NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *read_tuple(const char *data, Py_ssize_t size, int64_t stamp, int64_t read_at, int64_t empty_at,
                            int from_kernel)
{
    PyObject *items[5] = {
        PyBytes_FromStringAndSize(data, size),
        PyLong_FromLongLong(stamp),
        PyLong_FromLongLong(read_at),
        PyLong_FromLongLong(empty_at),
        PyBool_FromLong(from_kernel),
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
    if (templated && PyList_Size(inbox->reads) == 0) {
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
    PyObject *read = read_tuple(receiver->buffer, size, stamp, read_at, empty_at, wall != 0);
    if (read == NULL)
        return -1;
    int failed = PyList_Append(inbox->reads, read) < 0;
    Py_DECREF(read);
    if (failed)
        return -1;
    if (inbox->queued)
        receiver->waiting++;
    else if (!inbox->patient || templated || PyList_Size(inbox->reads) >= KEPT_READS || size <= FEW_BYTES || size >= MANY_BYTES ||
             memcmp(receiver->buffer + size - 4, "\r\n\r\n", 4) == 0)
        if (enqueue(receiver, inbox) < 0)
            return -1;
    return read_at;
}

/* Write to a socket: how many bytes it took, -1 after an error. `*at`: the instant before the first byte. */
static long long sent_parts(int fd, struct iovec *vectors, size_t count, int64_t *at)
{
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = count};
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
    for (Py_ssize_t i = 0; i < count; i++) {
        char *data;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(parts, i), &data, &size) < 0)
            return NULL;
        vectors[i] = (struct iovec){.iov_base = data, .iov_len = (size_t)size};
    }
    int64_t at;
    long long taken = sent_parts(((Inbox *)value)->fd, vectors, (size_t)count, &at);
    return Py_BuildValue("LL", (long long)at, taken);
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
static PyObject *receiver_follow(PyObject *self, PyObject *value);

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
    {"follow", receiver_follow, METH_O, NULL},
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

/* -- plain events for Python -------------------------------------------------------------------------------------- */

/* Append a number of plain events, if there are any, or a payload. -1 with an exception. */
static int append_plain(PyObject *events, Py_ssize_t *plain)
{
    if (*plain == 0)
        return 0;
    PyObject *number = PyLong_FromSsize_t(*plain);
    *plain = 0;
    int failed = number == NULL || PyList_Append(events, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

static int append_payload(PyObject *events, const char *at, const char *end)
{
    PyObject *payload = PyBytes_FromStringAndSize(at, end - at);
    int failed = payload == NULL || PyList_Append(events, payload) < 0;
    Py_XDECREF(payload);
    return failed ? -1 : 0;
}

static PyObject *whole_chunks(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *data;
    Py_ssize_t size;
    Template template;
    if (!PyArg_ParseTuple(args, "y#y#y#", &data, &size, &template.before, &template.before_size, &template.after,
                          &template.after_size))
        return NULL;
    PyObject *events = PyList_New(0);
    if (events == NULL)
        return NULL;
    const char *at = data, *end = data + size, *next, *content, *close;
    Py_ssize_t chunks = 0, plain = 0, found = 0;
    while (at < end) {
        if (template.before_size && (next = plain_chunk(at, end, &template, &found)) != NULL) {
            plain += found;
            chunks++;
            at = next;
            continue;
        }
        next = chunk(at, end, &content, &close);
        if (next == NULL || memchr(content, '\r', (size_t)(close - content)) != NULL)
            break;
        const char *event = content;
        while (event != NULL && event < close)
            event = line_event(event, close);
        if (event == NULL)
            break;
        for (; content < close; content = event) {
            event = line_event(content, close);
            if (template.before_size && plain_event(content, close, &template) == event) {
                plain++;
                continue;
            }
            if (append_plain(events, &plain) < 0 || append_payload(events, content + 6, event - 2) < 0)
                goto failed;
        }
        chunks++;
        at = next;
    }
    if (append_plain(events, &plain) == 0)
        return Py_BuildValue("nNn", chunks, events, (Py_ssize_t)(at - data));
failed:
    Py_DECREF(events);
    return NULL;
}

static PyObject *plain_run(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *events;
    Py_ssize_t start;
    Template template;
    if (!PyArg_ParseTuple(args, "Ony#y#", &events, &start, &template.before, &template.before_size, &template.after,
                          &template.after_size))
        return NULL;
    if (!PyList_Check(events) || start < 0) {
        PyErr_SetString(PyExc_TypeError, "events are a list");
        return NULL;
    }
    Py_ssize_t position = start, found = 0;
    for (; position < PyList_Size(events); position++) {
        PyObject *event = PyList_GetItem(events, position);
        if (PyLong_Check(event)) {
            Py_ssize_t plain = PyLong_AsSsize_t(event);
            if (plain < 0 && PyErr_Occurred())
                return NULL;
            found += plain;
            continue;
        }
        char *data;
        Py_ssize_t size;
        if (!PyBytes_Check(event) || PyBytes_AsStringAndSize(event, &data, &size) < 0 ||
            plain_payload(data, data + size, &template) != data + size)
            break;
        found++;
    }
    return Py_BuildValue("nn", position - start, found);
}

/* -- answers ------------------------------------------------------------------------------------------------------- */

/* The state of an answer: the twins of `Exchange`, `Response`, `Decoder` and `Reading`, whose fields are kept here, where
   both the methods in Python and the functions below find them. `arrived` does what Exchange.arrived_in_python does:
   itself for reads of a usual answer (a head that was seen before, whole chunks of whole events of one choice, whose
   template is not to be learned), by the methods in Python for every other. A read is looked at before anything of it
   is taken, so that one that is not usual is left as it came. */

typedef struct {
    PyObject_HEAD
    PyObject *field[];
} State;

#define EXCHANGE_FIELDS(F)                                                                                             \
    F(asked_output) F(at_start) F(body_bytes) F(body_parts) F(bytes_received) F(bytes_sent) F(client_lag) F(connection) \
    F(deadline) F(decoder) F(done) F(due) F(failure) F(first_byte) F(flow) F(head) F(is_event_stream) F(keep_headers)  \
    F(keep_text) F(kernel_stamp) F(on_done) F(on_first) F(over) F(patient) F(payload) F(progress) F(reading) F(ready)  \
    F(request) F(resent) F(response) F(reused) F(sent) F(sink) F(split) F(stream) F(tcp) F(template) F(tls) F(tries)
#define RESPONSE_FIELDS(F)                                                                                             \
    F(_bytes_left) F(_mode) F(_unparsed) F(chunked) F(complete) F(headers) F(idle_limit_s) F(reusable) F(status)       \
    F(surplus) F(until_close) F(uses_left)
#define DECODER_FIELDS(F) F(_after_cr) F(_earlier) F(_earlier_bytes) F(_unparsed) F(started)
#define READING_FIELDS(F)                                                                                              \
    F(end) F(error) F(finish_reason) F(first_answer) F(first_event) F(first_event_tokens) F(first_token) F(flow)       \
    F(last_token) F(learned) F(malformed) F(max_gap) F(max_gap_error) F(output_events) F(pieces) F(plain_events)       \
    F(reasoning_pieces) F(response_id) F(server_timing) F(sink) F(stamp_error) F(template) F(tool_deltas) F(unsure_at) \
    F(unsure_error) F(usage_counts)

#define X(name) X_##name,
enum { EXCHANGE_FIELDS(X) X_COUNT };
#undef X
#define P(name) P_##name,
enum { RESPONSE_FIELDS(P) P_COUNT };
#undef P
#define D(name) D_##name,
enum { DECODER_FIELDS(D) D_COUNT };
#undef D
#define R(name) R_##name,
enum { READING_FIELDS(R) R_COUNT };
#undef R

enum { MOST_EVENTS = 16, MOST_DEPTH = 16, LAST_EVENTS = 4, MOST_HOLES = 12, FORMS = 8, FORM_BYTES = 1024 };
#define ENOUGH (1LL << 60)

/* What the functions need of Python; set by `answers`. */
static PyTypeObject *exchange_class, *response_class, *decoder_class, *reading_class;
static PyObject *known_heads, *decode_usage, *endings;
/* Values that the fields have at first, and names. */
static PyObject *never, *zero, *enough, *no_text, *no_bytes, *mode_head, *mode_chunked, *mode_end, *event_stream;
static PyObject *name_prompt_tokens, *name_completion_tokens;
static PyObject *name_number, *name_session, *name_stage, *name_lane, *name_lanes, *name_chains, *name_first_chain;
static PyObject *name_func, *name_args, *name_ok, *name_sent, *name_sent_this_tick, *name_reuse_ns, *name_carried;
static PyObject *name_over;
static PyObject *name_pop, *name_append;
static PyObject *name_prompt_details, *name_input_details, *name_completion_details, *name_output_details;
static PyObject *name_created, *name_cache_write, *name_cached, *name_reasoning, *name_tokens, *name_asked_output;
static PyObject *name_gaps, *name_instants, *name_errors, *name_content_type, *name_content_encoding;

static void put(State *state, int at, PyObject *value) /* takes the reference */
{
    replace(&state->field[at], value);
}

static void put_same(State *state, int at, PyObject *value)
{
    Py_INCREF(value);
    put(state, at, value);
}

static int put_number(State *state, int at, int64_t value)
{
    PyObject *number = PyLong_FromLongLong(value);
    if (number == NULL)
        return -1;
    put(state, at, number);
    return 0;
}

static int is_true(State *state, int at)
{
    return state->field[at] == Py_True;
}

/* A number of at most 62 bits; `*fits` becomes 0 where the field holds something else. */
static int64_t number_of(PyObject *value, int *fits)
{
    if (value == NULL || !PyLong_Check(value)) {
        *fits = 0;
        return 0;
    }
    int overflow = 0;
    int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow || number > (1LL << 62) || number < -(1LL << 62)) {
        *fits = 0;
        return 0;
    }
    return number;
}

#define STATE_TYPE(kind, count, table)                                                                                 \
    static int kind##_traverse(PyObject *self, visitproc visit, void *arg)                                             \
    {                                                                                                                  \
        Py_VISIT(Py_TYPE(self));                                                                                       \
        for (int i = 0; i < count; i++)                                                                                \
            Py_VISIT(((State *)self)->field[i]);                                                                       \
        return 0;                                                                                                      \
    }                                                                                                                  \
    static int kind##_clear(PyObject *self)                                                                            \
    {                                                                                                                  \
        for (int i = 0; i < count; i++)                                                                                \
            Py_CLEAR(((State *)self)->field[i]);                                                                       \
        return 0;                                                                                                      \
    }                                                                                                                  \
    static void kind##_dealloc(PyObject *self)                                                                         \
    {                                                                                                                  \
        PyTypeObject *type = Py_TYPE(self);                                                                            \
        PyObject_GC_UnTrack(self);                                                                                     \
        kind##_clear(self);                                                                                            \
        freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);                                                 \
        release(self);                                                                                                 \
        Py_DECREF(type);                                                                                               \
    }                                                                                                                  \
    static PyMemberDef kind##_members[] = {table{NULL}};                                                               \
    static PyType_Slot kind##_slots[] = {                                                                              \
        {Py_tp_init, kind##_init},       {Py_tp_dealloc, kind##_dealloc}, {Py_tp_traverse, kind##_traverse},           \
        {Py_tp_clear, kind##_clear},     {Py_tp_members, kind##_members}, {Py_tp_methods, kind##_methods},             \
        {Py_tp_getset, kind##_computed}, {0, NULL},                                                                    \
    };                                                                                                                 \
    static PyType_Spec kind##_spec = {                                                                                 \
        .name = "loadgen_sdk._compiled." #kind "_state",                                                               \
        .basicsize = (int)(offsetof(State, field) + count * sizeof(PyObject *)),                                       \
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,                                        \
        .slots = kind##_slots,                                                                                         \
    };
#define MEMBER(name, at) {name, T_OBJECT_EX, (Py_ssize_t)(offsetof(State, field) + (at) * sizeof(PyObject *)), 0, NULL},

/* -- their beginnings */

static void put_all(State *state, const int *fields, size_t count, PyObject *value)
{
    for (size_t i = 0; i < count; i++)
        put_same(state, fields[i], value);
}
#define PUT_ALL(state, fields, value) put_all(state, fields, sizeof(fields) / sizeof *(fields), value)

/* `headers` and the lists are made where they are needed alone: -1 with an exception. */
static int begin_response(State *state)
{
    PyObject *headers = PyDict_New();
    if (headers == NULL)
        return -1;
    put(state, P_headers, headers);
    put_same(state, P__bytes_left, zero);
    put_same(state, P__mode, mode_head);
    put_same(state, P__unparsed, no_bytes);
    put_same(state, P_chunked, Py_False);
    put_same(state, P_complete, Py_False);
    put_same(state, P_idle_limit_s, Py_None);
    put_same(state, P_reusable, Py_True);
    put_same(state, P_status, zero);
    put_same(state, P_surplus, no_bytes);
    put_same(state, P_until_close, Py_False);
    put_same(state, P_uses_left, Py_None);
    return 0;
}

static int begin_decoder(State *state)
{
    PyObject *earlier = PyList_New(0);
    if (earlier == NULL)
        return -1;
    put(state, D__earlier, earlier);
    put_same(state, D__after_cr, Py_False);
    put_same(state, D__earlier_bytes, zero);
    put_same(state, D__unparsed, no_bytes);
    put_same(state, D_started, Py_False);
    return 0;
}

static int begin_reading(State *state, PyObject *flow, int keep_text, PyObject *sink, int few)
{
    static const int nevers[] = {R_end, R_first_answer, R_first_event, R_first_token, R_last_token, R_unsure_at};
    static const int zeros[] = {R_first_event_tokens, R_max_gap, R_max_gap_error, R_output_events, R_plain_events,
                                R_stamp_error, R_unsure_error};
    static const int texts[] = {R_error, R_finish_reason, R_malformed, R_response_id};
    static const int nones[] = {R_pieces, R_reasoning_pieces, R_server_timing, R_template, R_usage_counts};
    PUT_ALL(state, nevers, never);
    PUT_ALL(state, zeros, zero);
    PUT_ALL(state, texts, no_text);
    PUT_ALL(state, nones, Py_None);
    put_same(state, R_flow, flow);
    put_same(state, R_sink, sink);
    put_same(state, R_learned, few ? enough : zero);
    static const int lists[] = {R_tool_deltas, R_pieces, R_reasoning_pieces};
    for (int i = 0; i < (keep_text ? 3 : 1); i++) {
        PyObject *list = PyList_New(0);
        if (list == NULL)
            return -1;
        put(state, lists[i], list);
    }
    return 0;
}

static int response_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    return PyArg_ParseTuple(args, "") ? begin_response((State *)self) : -1;
}

static int decoder_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    return PyArg_ParseTuple(args, "") ? begin_decoder((State *)self) : -1;
}

static int reading_init(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"flow", "keep_text", "sink", "few", NULL};
    PyObject *flow, *sink = Py_None;
    int keep_text = 0, few = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|pO$p", names, &flow, &keep_text, &sink, &few))
        return -1;
    return begin_reading((State *)self, flow, keep_text, sink, few);
}

static State *made(PyTypeObject *class)
{
    if (class == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "what is an answer was not said");
        return NULL;
    }
    return (State *)PyType_GenericAlloc(class, 0);
}

/* What is known of the answer, before a request is sent, or sent again: see Exchange.fresh. -1 with an exception. */
static int begin_answer(State *exchange)
{
    static const int zeros[] = {X_client_lag, X_progress, X_body_bytes};
    static const int falses[] = {X_kernel_stamp, X_patient, X_at_start, X_split, X_is_event_stream};
    put_same(exchange, X_sent, never);
    put_same(exchange, X_first_byte, never);
    PUT_ALL(exchange, zeros, zero);
    PUT_ALL(exchange, falses, Py_False);
    put_same(exchange, X_template, Py_None);
    PyObject *parts = PyList_New(0);
    if (parts == NULL)
        return -1;
    put(exchange, X_body_parts, parts);
    State *response = made(response_class);
    if (response == NULL || begin_response(response) < 0) {
        Py_XDECREF((PyObject *)response);
        return -1;
    }
    put(exchange, X_response, (PyObject *)response);
    State *decoder = made(decoder_class);
    if (decoder == NULL || begin_decoder(decoder) < 0) {
        Py_XDECREF((PyObject *)decoder);
        return -1;
    }
    put(exchange, X_decoder, (PyObject *)decoder);
    int overflow = 0, keep_text = PyObject_IsTrue(exchange->field[X_keep_text]);
    long long asked = PyLong_AsLongLongAndOverflow(exchange->field[X_asked_output], &overflow);
    if (keep_text < 0 || (asked == -1 && PyErr_Occurred()))
        return -1;
    State *reading = made(reading_class);
    if (reading == NULL || begin_reading(reading, exchange->field[X_flow], keep_text, exchange->field[X_sink],
                                         !overflow && asked > 0 && asked <= LAST_EVENTS) < 0) {
        Py_XDECREF((PyObject *)reading);
        return -1;
    }
    put(exchange, X_reading, (PyObject *)reading);
    return 0;
}

/* What an exchange is given: those by place, then those by name. */
enum { BY_PLACE = 6, GIVEN = 12 };
static const int given_at[GIVEN] = {X_request, X_head,         X_payload,   X_due,          X_on_done, X_flow,
                                    X_stream,  X_asked_output, X_keep_text, X_keep_headers, X_sink,    X_on_first};
static PyObject *given_names[GIVEN];

/* -1 with an exception. */
static int begin_exchange(State *exchange, PyObject *const given[GIVEN])
{
    for (int i = 0; i < GIVEN; i++)
        put_same(exchange, given_at[i], given[i]);
    static const int nevers[] = {X_done, X_ready, X_tcp, X_tls};
    static const int zeros[] = {X_resent, X_tries, X_deadline, X_bytes_sent, X_bytes_received};
    PUT_ALL(exchange, nevers, never);
    PUT_ALL(exchange, zeros, zero);
    put_same(exchange, X_connection, Py_None);
    put_same(exchange, X_failure, Py_None);
    put_same(exchange, X_over, Py_False);
    put_same(exchange, X_reused, Py_False);
    return begin_answer(exchange);
}

/* The names are looked up as they are: to parse them makes a new text of each. */
static int exchange_init(PyObject *self, PyObject *args, PyObject *keywords)
{
    State *exchange = (State *)self;
    PyObject *given[GIVEN] = {[7] = zero, Py_False, Py_False, Py_None, Py_None};
    Py_ssize_t places = PyTuple_Size(args), named = 0;
    for (int i = 0; i < GIVEN; i++) {
        PyObject *value = i < BY_PLACE && i < places ? PyTuple_GetItem(args, i) : NULL;
        if (value == NULL && keywords != NULL) {
            value = PyDict_GetItemWithError(keywords, given_names[i]);
            named += value != NULL;
        }
        if (value != NULL)
            given[i] = value;
    }
    int fits = places <= BY_PLACE && (keywords == NULL || PyDict_Size(keywords) == named);
    for (int i = 0; i < GIVEN; i++)
        fits = fits && given[i] != NULL;
    if (!fits || !PyLong_Check(given[7]) || !PyBool_Check(given[8]) || !PyBool_Check(given[9])) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "Exchange() takes what its namesake in Python does");
        return -1;
    }
    return begin_exchange(exchange, given);
}

static PyObject *exchange_fresh(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (begin_answer((State *)self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* -- JSON of usual events: what is not understood here, for whatever reason, is left to Python */

static const char *space(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r'))
        at++;
    return at;
}

/* Whether the eight bytes at `at` are such as a string has before its end: ASCII without a quote, a backslash, a control. */
static int are_plain(const char *at)
{
    const uint64_t each = 0x0101010101010101, high = 0x80 * each;
    uint64_t bytes, quotes, escapes;
    memcpy(&bytes, at, sizeof bytes);
    quotes = bytes ^ '"' * each;
    escapes = bytes ^ '\\' * each;
    return !((((quotes - each) & ~quotes) | ((escapes - each) & ~escapes) | ((bytes - 0x20 * each) & ~bytes) | bytes) & high);
}

/* A string whose opening quote is at `at`: what follows it, or NULL. Its bytes end before that. */
static const char *string(const char *at, const char *end, int escapes)
{
    if (at >= end || *at != '"')
        return NULL;
    const char *start = ++at;
    int ascii = 1;
    while (end - at >= 8 && are_plain(at))
        at += 8;
    for (; at < end && *at != '"'; at++) {
        unsigned char byte = (unsigned char)*at;
        if (byte < 0x20)
            return NULL;
        if (byte >= 0x80)
            ascii = 0;
        if (byte == '\\' && (!escapes || ++at == end || strchr("\"\\/bfnrt", *at) == NULL || *at == '\0'))
            return NULL;
    }
    if (at == end)
        return NULL;
    if (!ascii) {
        PyObject *decoded = PyUnicode_DecodeUTF8(start, at - start, "strict");
        if (decoded == NULL) {
            PyErr_Clear();
            return NULL;
        }
        Py_DECREF(decoded);
    }
    return at + 1;
}

static const char *literal(const char *at, const char *end, const char *word)
{
    size_t size = strlen(word);
    return (size_t)(end - at) >= size && memcmp(at, word, size) == 0 ? at + size : NULL;
}

static const char *digits(const char *at, const char *end)
{
    const char *start = at;
    while (at < end && *at >= '0' && *at <= '9')
        at++;
    return at == start || at - start > 17 ? NULL : at;
}

/* Any value: what follows it, or NULL. */
static const char *skipped(const char *at, const char *end, int depth)
{
    if (at >= end || depth > MOST_DEPTH)
        return NULL;
    switch (*at) {
    case '"':
        return string(at, end, 1);
    case 'n':
        return literal(at, end, "null");
    case 't':
        return literal(at, end, "true");
    case 'f':
        return literal(at, end, "false");
    case '{':
    case '[': {
        char closing = *at == '{' ? '}' : ']';
        at = space(at + 1, end);
        if (at < end && *at == closing)
            return at + 1;
        for (;;) {
            if (closing == '}') {
                at = string(at, end, 0);
                at = at == NULL ? NULL : space(at, end);
                if (at == NULL || at >= end || *at != ':')
                    return NULL;
                at = space(at + 1, end);
            }
            at = skipped(at, end, depth + 1);
            at = at == NULL ? NULL : space(at, end);
            if (at == NULL || at >= end)
                return NULL;
            if (*at == closing)
                return at + 1;
            if (*at != ',')
                return NULL;
            at = space(at + 1, end);
        }
    }
    default:
        if (*at == '-')
            at++;
        if (end - at >= 2 && *at == '0' && at[1] >= '0' && at[1] <= '9')
            return NULL;
        at = digits(at, end);
        return at != NULL && at < end && *at == '.' ? digits(at + 1, end) : at;
    }
}

/* What an event says. `finish`: the reason, of `finish_size` bytes; `usage`: as decoded by Python, or NULL. */
typedef struct {
    const char *finish;
    Py_ssize_t finish_size;
    PyObject *usage;
    char output, answer;
} Said;

/* The fields that are read, and how: every other is skipped. Of a field that is known twice only the last one counts,
   so such an event is left to Python. */
enum Kind { ANYTHING, REFUSED, NOTHING, NO_CALLS, EMPTY_TEXT, CONTENT, REASONING, TEXT, FINISH, DELTA, CHOICES, USAGE };
typedef struct {
    const char *name;
    size_t size;
    enum Kind kind;
} Field;
#define FIELD(name, kind) {name, sizeof name - 1, kind}
static const Field event_fields[] = {
    FIELD("choices", CHOICES), FIELD("usage", USAGE),   FIELD("error", NOTHING),  FIELD("message", NOTHING), FIELD("detail", NOTHING),
    FIELD("timings", NOTHING), FIELD("nvext", NOTHING), FIELD("metrics", NOTHING), FIELD("data", NOTHING),   FIELD("results", NOTHING),
    FIELD("output", NOTHING),  FIELD("type", REFUSED),   {NULL, 0, ANYTHING},
};
static const Field choice_fields[] = {
    FIELD("delta", DELTA),       FIELD("text", TEXT),         FIELD("finish_reason", FINISH),           FIELD("token_ids", NOTHING),
    FIELD("message", NOTHING),   FIELD("meta_info", NOTHING), FIELD("speculative_decoding", NOTHING), {NULL, 0, ANYTHING},
};
static const Field delta_fields[] = {
    FIELD("content", CONTENT),       FIELD("reasoning_content", REASONING), FIELD("reasoning", REASONING), FIELD("tool_calls", NO_CALLS),
    FIELD("function_call", NO_CALLS), FIELD("refusal", EMPTY_TEXT),          FIELD("token_ids", NOTHING),   {NULL, 0, ANYTHING},
};

/* A value of an event that may differ in the next one of its form: where it begins, where it ends, how it is read. */
typedef struct {
    const char *at, *after;
    enum Kind kind;
} Hole;

/* How the texts of a choice are weighed: `delta`: there is one; `content`, `reasoning`, `text`: they are not empty. */
typedef struct {
    char delta, content, reasoning, text, choices;
    int holes; /* more than MOST_HOLES: some were not kept */
    Hole hole[MOST_HOLES];
} Seen;

static const char *object(const char *at, const char *end, const Field *fields, Said *said, Seen *seen);

/* Usages that were decoded lately, which nobody changes: many answers have the same one. */
enum { USAGES = 4, USAGE_BYTES = 256 };
static struct {
    PyObject *decoded;
    Py_ssize_t size;
    char bytes[USAGE_BYTES];
} usages[USAGES];

/* What follows a usage, or NULL. */
static const char *after_usage(const char *at, const char *end)
{
    for (int i = 0; i < USAGES; i++) /* what begins as a whole object ends with it */
        if (usages[i].decoded != NULL && end - at >= usages[i].size && memcmp(usages[i].bytes, at, (size_t)usages[i].size) == 0)
            return at + usages[i].size;
    return skipped(at, end, 0);
}

/* A usage as Python decodes it. NULL where it does not: the whole event then fails there as well, and is looked at there. */
static PyObject *usage_of(const char *at, const char *after)
{
    static int next;
    for (int i = 0; i < USAGES; i++)
        if (usages[i].decoded != NULL && after - at == usages[i].size && memcmp(usages[i].bytes, at, (size_t)(after - at)) == 0) {
            Py_INCREF(usages[i].decoded);
            return usages[i].decoded;
        }
    PyObject *raw = PyBytes_FromStringAndSize(at, after - at);
    PyObject *usage = raw == NULL ? NULL : PyObject_CallFunctionObjArgs(decode_usage, raw, NULL);
    Py_XDECREF(raw);
    if (usage == NULL)
        PyErr_Clear();
    else if (*at == '{' && after - at <= USAGE_BYTES) {
        PyObject *before = usages[next].decoded;
        memcpy(usages[next].bytes, at, (size_t)(after - at));
        usages[next].size = after - at;
        Py_INCREF(usage);
        usages[next].decoded = usage;
        next = (next + 1) % USAGES;
        Py_XDECREF(before);
    }
    return usage;
}

/* The value of a field: what follows it, or NULL. */
static const char *value_in(enum Kind kind, const char *at, const char *end, Said *said, Seen *seen)
{
    const char *after = kind != REFUSED && at < end && *at == 'n' ? literal(at, end, "null") : NULL;
    if (after != NULL) {
        seen->choices |= kind == CHOICES ? 2 : 0; /* as if there were none: events of other APIs */
        return after;
    }
    switch (kind) {
    case ANYTHING:
        return skipped(at, end, 0);
    case NO_CALLS:
        return literal(at, end, "[]");
    case EMPTY_TEXT:
        return literal(at, end, "\"\"");
    case CONTENT:
    case REASONING:
    case TEXT: {
        after = string(at, end, 1);
        char full = after != NULL && after - at > 2;
        *(kind == CONTENT ? &seen->content : kind == TEXT ? &seen->text : &seen->reasoning) |= full;
        return after;
    }
    case FINISH:
        after = string(at, end, 0);
        if (after != NULL && after - at > 2) {
            said->finish = at + 1;
            said->finish_size = after - at - 2;
        }
        return after;
    case DELTA:
        seen->delta = 1;
        return object(at, end, delta_fields, said, seen);
    case CHOICES:
        if (at >= end || *at != '[')
            return NULL;
        seen->choices |= 1;
        at = space(at + 1, end);
        if (at < end && *at == ']')
            return at + 1;
        at = object(at, end, choice_fields, said, seen);
        at = at == NULL ? NULL : space(at, end);
        return at != NULL && at < end && *at == ']' ? at + 1 : NULL;
    case USAGE:
        after = after_usage(at, end);
        return after == NULL || (said->usage = usage_of(at, after)) == NULL ? NULL : after;
    default: /* NOTHING is null alone; REFUSED: events of other APIs have it */
        return NULL;
    }
}

/* The same, and it is noted where another value says the same: any value that is skipped, any text in place of one. */
static const char *value_of(enum Kind kind, const char *at, const char *end, Said *said, Seen *seen)
{
    const char *after = value_in(kind, at, end, said, seen);
    int text = (kind == CONTENT || kind == REASONING || kind == TEXT) && after != NULL && *at == '"' && after - at > 2;
    if (text || (kind == ANYTHING && after != NULL && *at != 'n') || (kind == USAGE && said->usage != NULL)) {
        if (seen->holes < MOST_HOLES)
            seen->hole[seen->holes] = (Hole){at, after, kind};
        seen->holes++;
    }
    return after;
}

static const char *object(const char *at, const char *end, const Field *fields, Said *said, Seen *seen)
{
    unsigned known = 0;
    if (at >= end || *at != '{')
        return NULL;
    at = space(at + 1, end);
    if (at < end && *at == '}')
        return at + 1;
    for (;;) {
        const char *name = at + 1, *after = string(at, end, 0);
        if (after == NULL)
            return NULL;
        size_t size = (size_t)(after - 1 - name);
        int i = 0;
        while (fields[i].name != NULL && (fields[i].size != size || memcmp(fields[i].name, name, size) != 0))
            i++;
        if (fields[i].name != NULL) {
            if (known & 1u << i)
                return NULL;
            known |= 1u << i;
        }
        at = space(after, end);
        if (at >= end || *at != ':')
            return NULL;
        at = value_of(fields[i].kind, space(at + 1, end), end, said, seen);
        at = at == NULL ? NULL : space(at, end);
        if (at == NULL || at >= end)
            return NULL;
        if (*at == '}')
            return at + 1;
        if (*at != ',')
            return NULL;
        at = space(at + 1, end);
    }
}

/* Forms of events that were read lately: the bytes of one, the values in it that may differ, what it says. An event that
   has the same bytes around values of these kinds says the same, and is not read again. */
typedef struct {
    Py_ssize_t size, at[MOST_HOLES], after[MOST_HOLES];
    enum Kind kind[MOST_HOLES];
    int holes;
    Py_ssize_t finish, finish_size; /* 0: it does not finish */
    char output, answer;
    char bytes[FORM_BYTES];
} Form;
static Form forms[FORMS];
static int next_form;

/* Whether an event is of this form; if so, what it says. */
static int of_form(const Form *form, const char *at, const char *end, Said *said)
{
    Py_ssize_t from = 0, rest = form->size - (form->holes ? form->after[form->holes - 1] : 0);
    const char *usage = NULL, *usage_ends = NULL, *finish = NULL;
    if (form->size == 0 || end - at < rest || memcmp(end - rest, form->bytes + form->size - rest, (size_t)rest) != 0)
        return 0;
    for (int i = 0; i < form->holes; i++) {
        Py_ssize_t same = form->at[i] - from;
        if (end - at <= same || memcmp(at, form->bytes + from, (size_t)same) != 0)
            return 0;
        if (form->finish > from)
            finish = at + (form->finish - from);
        const char *value = at + same, *known = form->bytes + form->at[i];
        Py_ssize_t size = form->after[i] - form->at[i];
        if (*value == '"' && end - value > size && memcmp(value, known, (size_t)size) == 0)
            at = value + size;
        else if (form->kind[i] == USAGE) {
            if (*value == 'n' || (at = after_usage(value, end)) == NULL)
                return 0;
            usage = value;
            usage_ends = at;
        } else if (form->kind[i] == ANYTHING) {
            if (*value == 'n' || (at = skipped(value, end, 0)) == NULL)
                return 0;
        } else if (*value != '"' || (at = string(value, end, 1)) == NULL || at - value < 3)
            return 0;
        from = form->after[i];
    }
    if (end - at != rest)
        return 0;
    if (form->finish > from)
        finish = at + (form->finish - from);
    *said = (Said){.finish = finish, .finish_size = form->finish_size, .output = form->output, .answer = form->answer};
    return usage == NULL || (said->usage = usage_of(usage, usage_ends)) != NULL;
}

/* Keep the form of an event. */
static void keep_form(const char *at, const char *end, const Said *said, const Seen *seen)
{
    if (end - at > FORM_BYTES || seen->holes > MOST_HOLES)
        return;
    Form *form = &forms[next_form];
    next_form = (next_form + 1) % FORMS;
    form->size = end - at;
    memcpy(form->bytes, at, (size_t)form->size);
    form->holes = seen->holes;
    for (int i = 0; i < seen->holes; i++) {
        form->at[i] = seen->hole[i].at - at;
        form->after[i] = seen->hole[i].after - at;
        form->kind[i] = seen->hole[i].kind;
    }
    form->finish = said->finish == NULL ? 0 : said->finish - at;
    form->finish_size = said->finish_size;
    form->output = said->output;
    form->answer = said->answer;
}

/* Whether the payload of an event is usual; if so, what it says. */
static int usual_event(const char *at, const char *end, Said *said)
{
    Seen seen;
    const char *begin = at;
    seen.delta = seen.content = seen.reasoning = seen.text = seen.choices = 0;
    seen.holes = 0;
    *said = (Said){0};
    if (end - at == 6 && memcmp(at, "[DONE]", 6) == 0)
        return 1;
    for (int i = 0; i < FORMS; i++)
        if (of_form(&forms[i], at, end, said))
            return 1;
    *said = (Said){0};
    at = object(space(at, end), end, event_fields, said, &seen);
    if (at == NULL || space(at, end) != end || seen.choices != 1) {
        Py_CLEAR(said->usage);
        return 0;
    }
    said->answer = seen.delta ? seen.content : seen.text;
    said->output = said->answer || (seen.delta && seen.reasoning);
    keep_form(begin, end, said, &seen);
    return 1;
}

/* -- a usual read */

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

/* Reading.last_token_error */
static PyObject *reading_last_token_error(PyObject *self, void *Py_UNUSED(none))
{
    State *reading = (State *)self;
    int fits = 1;
    int64_t unsure_at = number_of(reading->field[R_unsure_at], &fits), last = number_of(reading->field[R_last_token], &fits);
    if (!fits) {
        PyErr_SetString(PyExc_TypeError, "instants are numbers");
        return NULL;
    }
    PyObject *error = unsure_at == last ? reading->field[R_unsure_error] : zero;
    Py_INCREF(error);
    return error;
}

static PyGetSetDef reading_computed[] = {{"last_token_error", reading_last_token_error, NULL, NULL, NULL}, {NULL}},
                   exchange_computed[] = {{NULL}}, response_computed[] = {{NULL}}, decoder_computed[] = {{NULL}};

#define F(name) MEMBER(#name, X_##name)
STATE_TYPE(exchange, X_COUNT, EXCHANGE_FIELDS(F))
#undef F
#define F(name) MEMBER(#name, P_##name)
STATE_TYPE(response, P_COUNT, RESPONSE_FIELDS(F))
#undef F
#define F(name) MEMBER(#name, D_##name)
STATE_TYPE(decoder, D_COUNT, DECODER_FIELDS(F))
#undef F
#define F(name) MEMBER(#name, R_##name)
STATE_TYPE(reading, R_COUNT, READING_FIELDS(F))
#undef F

/* What an answer is in Python: the classes with the fields above, the heads that are known, the decoder of a usage, the
   reasons to finish. */
static PyObject *answers(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *exchange, *response, *decoder, *reading, *heads, *usage, *ends;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!OO", &PyType_Type, &exchange, &PyType_Type, &response, &PyType_Type, &decoder, &PyType_Type, &reading,
                          &PyDict_Type, &heads, &usage, &ends))
        return NULL;
    PyObject *given[] = {exchange, response, decoder, reading, heads, usage, ends};
    PyObject **places[] = {(PyObject **)&exchange_class, (PyObject **)&response_class, (PyObject **)&decoder_class, (PyObject **)&reading_class,
                           &known_heads, &decode_usage, &endings};
    for (int i = 0; i < 7; i++) {
        Py_INCREF(given[i]);
        replace(places[i], given[i]);
    }
    for (int i = 0; i < USAGES; i++)
        Py_CLEAR(usages[i].decoded);
    Py_RETURN_NONE;
}

static int make_values(void)
{
    static const struct {
        PyObject **place;
        const char *text;
    } texts[] = {{&no_text, ""}, {&mode_head, "head"}, {&mode_chunked, "chunked"}, {&mode_end, "end"},
                 
                 {&name_prompt_tokens, "prompt_tokens"}, {&name_completion_tokens, "completion_tokens"},
                 {&event_stream, "text/event-stream"}, {&name_gaps, "gaps"}, {&name_instants, "instants"},
                 {&name_over, "over"},
                 {&name_number, "number"}, {&name_session, "session"}, {&name_stage, "stage"}, {&name_lane, "lane"},
                 {&name_lanes, "lanes"}, {&name_chains, "chains"}, {&name_first_chain, "first_chain"},
                 {&name_func, "func"}, {&name_args, "args"}, {&name_ok, "ok"}, {&name_sent, "sent"},
                 {&name_sent_this_tick, "_sent_this_tick"}, {&name_reuse_ns, "_reuse_ns"}, {&name_carried, "_carried"},
                 
                 {&name_pop, "pop"}, {&name_append, "append"}, 
                 {&name_prompt_details, "prompt_tokens_details"}, {&name_input_details, "input_tokens_details"},
                 {&name_completion_details, "completion_tokens_details"},
                 {&name_output_details, "output_tokens_details"}, {&name_created, "cache_creation_input_tokens"},
                 {&name_cache_write, "cache_write_tokens"}, {&name_cached, "cached_tokens"},
                 {&name_reasoning, "reasoning_tokens"}, {&name_tokens, "tokens"},
                 {&name_asked_output, "asked_output"}, {&name_errors, "errors"}, {&name_content_type, "content-type"},
                 {&name_content_encoding, "content-encoding"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if ((*texts[i].place = PyUnicode_InternFromString(texts[i].text)) == NULL)
            return -1;
    static const char *const names[GIVEN] = {"request", "head",         "payload",   "due",          "on_done", "flow",
                                             "stream",  "asked_output", "keep_text", "keep_headers", "sink",    "on_first"};
    for (int i = 0; i < GIVEN; i++)
        if ((given_names[i] = PyUnicode_InternFromString(names[i])) == NULL)
            return -1;
    never = PyLong_FromLong(-1);
    zero = PyLong_FromLong(0);
    enough = PyLong_FromLongLong(ENOUGH);
    no_bytes = PyBytes_FromStringAndSize(NULL, 0);
    return never == NULL || zero == NULL || enough == NULL || no_bytes == NULL ? -1 : 0;
}

/* -- the ends of a usual answer ------------------------------------------------------------------------------------ */

/* How a row of a run is written, as core/results/record.py says by `rows`: a letter of `struct` for each field, the codes
   of reasons to finish and of a server as a source, the header with which servers tell their times. */
enum { ROW_FIELDS = 53, ROW_PLACE = 8 };
static char row_letters[ROW_FIELDS];
static int row_bytes;
static PyObject *row_finish, *row_timing;
static long long row_other, row_server;

static int letter_bytes(char letter)
{
    return letter == 'q' ? 8 : letter == 'i' ? 4 : letter == 'h' ? 2 : letter == 'B' ? 1 : 0;
}

static PyObject *rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *letters;
    Py_ssize_t count;
    PyObject *finish, *timing;
    long long other, server;
    if (!PyArg_ParseTuple(args, "s#O!LLU", &letters, &count, &PyDict_Type, &finish, &other, &server, &timing))
        return NULL;
    int size = 0, known = count == ROW_FIELDS;
    for (int i = 0; known && i < ROW_FIELDS; i++) {
        known = letter_bytes(letters[i]);
        size += known;
    }
    if (!known) {
        PyErr_SetString(PyExc_ValueError, "a row with other fields than usual_row writes");
        return NULL;
    }
    memcpy(row_letters, letters, ROW_FIELDS);
    row_bytes = size;
    row_other = other;
    row_server = server;
    Py_INCREF(finish);
    Py_XDECREF(row_finish);
    row_finish = finish;
    Py_INCREF(timing);
    Py_XDECREF(row_timing);
    row_timing = timing;
    Py_RETURN_NONE;
}

/* An attribute that is a count of tokens; -1 where it is none. `*fits` becomes 0 where it is not there. */
static int64_t count_of(PyObject *owner, PyObject *name, int *fits)
{
    PyObject *value = PyObject_GetAttr(owner, name);
    int64_t count = -1;
    if (value == NULL)
        *fits = 0;
    else if (is_count(value))
        count = number_of(value, fits);
    Py_XDECREF(value);
    return count;
}

/* The first of two attributes that is not None, or None; a new reference, NULL with an exception. */
static PyObject *details(PyObject *usage, PyObject *name, PyObject *other)
{
    PyObject *found = PyObject_GetAttr(usage, name);
    if (found != Py_None)
        return found;
    Py_DECREF(found);
    return PyObject_GetAttr(usage, other);
}

/* UsageFields.usage, where prompt and output were told by their usual names: 1, 0 for another. -1: not told. */
typedef struct {
    int64_t input, output, cached, reasoning, written;
} Tokens;

static int usual_tokens(PyObject *usage, Tokens *tokens)
{
    int fits = 1;
    *tokens = (Tokens){.cached = -1, .reasoning = -1};
    tokens->input = count_of(usage, name_prompt_tokens, &fits);
    tokens->output = fits ? count_of(usage, name_completion_tokens, &fits) : -1;
    if (!fits || tokens->input < 0 || tokens->output < 0)
        return 0;
    PyObject *before = details(usage, name_prompt_details, name_input_details);
    PyObject *after = before == NULL ? NULL : details(usage, name_completion_details, name_output_details);
    PyObject *written = after == NULL ? NULL : PyObject_GetAttr(usage, name_created);
    if (written != NULL && before != Py_None) {
        PyObject *more = PyObject_GetAttr(before, name_cache_write);
        tokens->cached = count_of(before, name_cached, &fits);
        if (more != Py_None) {
            Py_DECREF(written);
            written = more;
        } else
            Py_DECREF(more);
    }
    if (written != NULL) {
        tokens->written = is_count(written) ? number_of(written, &fits) : -1;
        if (after != Py_None && fits)
            tokens->reasoning = count_of(after, name_reasoning, &fits);
    }
    fits = fits && written != NULL;
    Py_XDECREF(before);
    Py_XDECREF(after);
    Py_XDECREF(written);
    return fits;
}

/* What `row` of core/results/record.py makes of a Completion, from its exchange: the row, the time to the first token (-1
   without one), the end; from the start of the run. */
typedef struct {
    unsigned char bytes[8 * ROW_FIELDS];
    int64_t place[ROW_PLACE], ttft, ended;
} Row;

/* 0 where it failed, kept texts, or told what is not usual. */
static int write_row(Row *row, PyObject *of, int64_t start, PyObject *known)
{
    State *exchange = (State *)of;
    if (row_finish == NULL || exchange_class == NULL || Py_TYPE(of) != exchange_class)
        return 0;
    State *reading = (State *)exchange->field[X_reading], *response = (State *)exchange->field[X_response];
    if (exchange->field[X_failure] != Py_None || Py_TYPE((PyObject *)reading) != reading_class ||
        Py_TYPE((PyObject *)response) != response_class || reading->field[R_pieces] != Py_None ||
        reading->field[R_server_timing] != Py_None || reading->field[R_usage_counts] == Py_None ||
        !PyDict_Check(response->field[P_headers]) || PyDict_Contains(response->field[P_headers], row_timing) != 0)
        goto unusual;
    Tokens tokens;
    if (!usual_tokens(reading->field[R_usage_counts], &tokens))
        goto unusual;
    int fits = 1, at = 0;
    PyObject *code = PyDict_GetItemWithError(row_finish, reading->field[R_finish_reason]);
    if (code == NULL && PyErr_Occurred())
        goto unusual;
    int64_t due = number_of(exchange->field[X_due], &fits), value[ROW_FIELDS];
    int64_t built = count_of(known, name_tokens, &fits), asked = count_of(known, name_asked_output, &fits);
#define OF(state, name) number_of((state)->field[name], &fits)
    for (; at < ROW_PLACE; at++)
        value[at] = row->place[at];
    value[at++] = 0; /* ok */
    value[at++] = 0;
    value[at++] = OF(response, P_status);
    value[at++] = code == NULL ? row_other : number_of(code, &fits);
    value[at++] = due - start;
    const int64_t instants[] = {
        OF(exchange, X_ready), OF(exchange, X_sent), OF(exchange, X_first_byte), OF(reading, R_first_event),
        OF(reading, R_first_token), OF(reading, R_first_answer), OF(reading, R_last_token), OF(reading, R_end),
        OF(exchange, X_done)};
    for (size_t i = 0; i < sizeof instants / sizeof *instants; i++)
        value[at++] = instants[i] < 0 ? -1 : instants[i] - start;
    value[at++] = OF(exchange, X_client_lag);
    value[at++] = OF(reading, R_stamp_error);
    value[at++] = OF(reading, R_unsure_at) == OF(reading, R_last_token) ? OF(reading, R_unsure_error) : 0;
    value[at++] = OF(reading, R_max_gap);
    value[at++] = OF(reading, R_max_gap_error);
    value[at++] = tokens.input;
    value[at++] = tokens.output;
    value[at++] = tokens.cached;
    value[at++] = tokens.reasoning;
    value[at++] = built;
    value[at++] = asked;
    value[at++] = OF(reading, R_first_event_tokens);
    value[at++] = OF(reading, R_output_events);
    value[at++] = row_server;
    value[at++] = row_server;
    value[at++] = OF(exchange, X_bytes_sent);
    value[at++] = OF(exchange, X_bytes_received);
    value[at++] = OF(exchange, X_resent);
    value[at++] = OF(exchange, X_reused);
    value[at++] = OF(exchange, X_kernel_stamp);
    for (int i = 0; i < 8; i++) /* no text, no replica, no account of the server */
        value[at++] = -1;
    value[at++] = tokens.written;
    value[at++] = OF(exchange, X_tcp);
    value[at++] = OF(exchange, X_tls);
#undef OF
    unsigned char *to = row->bytes;
    for (int i = 0; i < ROW_FIELDS; i++) {
        int size = letter_bytes(row_letters[i]);
        int64_t most = size == 1 ? 255 : size == 8 ? INT64_MAX : ((int64_t)1 << (8 * size - 1)) - 1;
        fits = fits && value[i] <= most && value[i] >= (size == 1 ? 0 : -most - 1);
        for (int byte = 0; byte < size; byte++)
            *to++ = (unsigned char)((uint64_t)value[i] >> 8 * byte);
    }
    row->ttft = instants[4] < 0 ? -1 : instants[4] - due;
    row->ended = instants[8] - start;
    if (fits)
        return 1;
unusual:
    PyErr_Clear();
    return 0;
}

static PyObject *usual_row(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !PyTuple_Check(args[0]) || PyTuple_Size(args[0]) != ROW_PLACE) {
        PyErr_SetString(PyExc_TypeError, "usual_row(place, exchange, start_ns, built)");
        return NULL;
    }
    Row row;
    int fits = 1;
    int64_t start = number_of(args[2], &fits);
    for (int at = 0; at < ROW_PLACE; at++)
        row.place[at] = number_of(PyTuple_GetItem(args[0], at), &fits);
    if (!fits || !write_row(&row, args[1], start, args[3]))
        Py_RETURN_NONE;
    return Py_BuildValue("y#LL", (char *)row.bytes, (Py_ssize_t)row_bytes, (long long)row.ttft, (long long)row.ended);
}

/* -- from one request of a lane to the next ------------------------------------------------------------------------ */

/* Receiver.follow */
static PyObject *receiver_follow(PyObject *self, PyObject *value)
{
    if (value != Py_None && (!PyTuple_Check(value) || PyTuple_Size(value) != F_COUNT)) {
        PyErr_SetString(PyExc_TypeError, "what is followed is a tuple of what a pool and a Succession have");
        return NULL;
    }
    PyObject *before = ((Receiver *)self)->followed;
    Py_CLEAR(((Receiver *)self)->known);
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

/* Call with one argument, which is taken, and drop what it returns. -1 with an exception. */
static int tell(PyObject *whom, PyObject *what)
{
    PyObject *done = what == NULL ? NULL : PyObject_CallFunctionObjArgs(whom, what, NULL);
    Py_XDECREF(what);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
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
    PyObject *start, *built; /* of the request that ended; borrowed from `args` */
    PyObject *args;
    int64_t stage, lane, next;
    int counted; /* its stage has a number of requests */
    Row row;
} Lane;

/* Whether that is all: a request of a lane has ended well, and its next one is due at once, before all else. Nothing is
   changed. -1 with an exception. */
static int look_at_lane(Receiver *receiver, const Inbox *inbox, Lane *lane)
{
    PyObject *busy = inbox->busy, *with = receiver->followed;
#define WITH(name) PyTuple_GetItem(with, F_##name)
    State *exchange = (State *)busy;
    int fits = 1, usual = 0;
    lane->args = NULL;
    if (busy == NULL || exchange_class == NULL || Py_TYPE(busy) != exchange_class || is_true(exchange, X_over))
        goto over;
    PyObject *on_done = exchange->field[X_on_done];
    if ((PyObject *)Py_TYPE(on_done) != WITH(partial) || !is_same(on_done, name_func, WITH(ended)) ||
        (lane->args = PyObject_GetAttr(on_done, name_args)) == NULL || !PyTuple_Check(lane->args) ||
        PyTuple_Size(lane->args) != 3)
        goto over;
    PyObject *start = lane->start = PyTuple_GetItem(lane->args, 0), *spans = WITH(spans);
    lane->built = PyTuple_GetItem(lane->args, 2);
    int64_t number = number_in(start, name_number, &fits), session = number_in(start, name_session, &fits);
    int64_t stage = lane->stage = number_in(start, name_stage, &fits), at = lane->lane = number_in(start, name_lane, &fits);
    int64_t begin = number_of(WITH(start_ns), &fits), worker = number_of(WITH(worker), &fits);
    if (!fits || at < 0 || session >= 0 || stage < 0 || !PyTuple_Check(spans) || stage >= PyTuple_Size(spans) ||
        number_at(WITH(refusals), 0, &fits) != 0)
        goto over;
    PyObject *span = PyTuple_GetItem(spans, (Py_ssize_t)stage), *chains = PyObject_GetAttr(span, name_chains);
    if (chains == NULL)
        goto over;
    lane->next = number + number_in(span, name_lanes, &fits);
    lane->counted = chains != Py_None;
    int64_t behind = lane->counted ? number_of(chains, &fits) + number_in(span, name_first_chain, &fits) : INT64_MAX;
    Py_DECREF(chains);
    int64_t ends = number_at(WITH(ends), stage, &fits), left = lane->counted ? number_at(WITH(left), stage, &fits) : 2;
    const int64_t place[ROW_PLACE] = {number, number, stage, worker, 0, session, 0, at};
    memcpy(lane->row.place, place, sizeof place);
    if (!fits || lane->next >= behind || left < 2 || !write_row(&lane->row, busy, begin, lane->built))
        goto over;
    int64_t now = clock_ns(CLOCK_MONOTONIC), reuse = number_in(WITH(pool), name_reuse_ns, &fits);
    PyObject *key = PyLong_FromLongLong(number);
    usual = fits && key != NULL && lane->row.ended < ends && begin + lane->row.ended <= now && now < receiver->wake_at &&
            reuse > USUAL_REUSE_NS && PyDict_GetItemWithError(WITH(started), key) == start &&
            PyDict_Contains(WITH(exchanges), key) == 1;
    Py_XDECREF(key);
over:
    PyErr_Clear();
    if (!usual)
        Py_CLEAR(lane->args);
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
                 (lane->counted && add_at(WITH(left), lane->stage, -1) < 0);
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

/* Start the next request of a lane: Driver._send and Pool.send. -1 with an exception. */
static int next_of_lane(Receiver *receiver, PyObject *with, const Lane *lane)
{
    int failed = 1, fits = 1;
    int64_t due = lane->row.ended + number_of(WITH(start_ns), &fits);
    PyObject *flow = PyList_GetItem(WITH(flows), (Py_ssize_t)lane->stage);
    PyObject *number = PyLong_FromLongLong(lane->next), *stage = PyLong_FromLongLong(lane->stage), *head = NULL;
    PyObject *of_lane = PyLong_FromLongLong(lane->lane), *ended = PyLong_FromLongLong(lane->row.ended);
    PyObject *start = NULL, *built = NULL, *asked = NULL, *on_done = NULL, *due_at = NULL, *deadline = NULL, *pair = NULL;
    PyObject *body = NULL;
    State *exchange = NULL;
    if (number == NULL || stage == NULL || flow == NULL || of_lane == NULL || ended == NULL ||
        (start = PyObject_CallFunctionObjArgs(WITH(start), number, stage, never, zero, of_lane, ended, NULL)) == NULL)
        goto over;
    if ((body = body_of(receiver, with, lane->stage, lane->next, &built)) == NULL) {
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
        (due_at = PyLong_FromLongLong(due)) == NULL ||
        (deadline = PyLong_FromLongLong(due + number_of(WITH(timeout), &fits))) == NULL ||
        (exchange = made(exchange_class)) == NULL)
        goto over;
    PyObject *const given[GIVEN] = {Py_None,      head,  body,            due_at,             on_done, flow,
                                    WITH(stream), asked, WITH(keep_text), WITH(keep_headers), Py_None, Py_None};
    if (begin_exchange(exchange, given) < 0)
        goto over;
    put_same(exchange, X_deadline, deadline);
    if ((pair = Py_BuildValue("OO", zero, (PyObject *)exchange)) == NULL || PyDict_SetItem(WITH(started), number, start) < 0 ||
        PyDict_SetItem(WITH(exchanges), number, pair) < 0 ||
        PyDict_SetItem(WITH(in_flight), (PyObject *)exchange, Py_None) < 0 || add_at(WITH(sent), lane->stage, 1) < 0 ||
        add_in(WITH(counters), name_sent, 1) < 0 || add_in(WITH(pool), name_sent_this_tick, 1) < 0)
        goto over;
    PyObject *reuse = PyObject_GetAttr(WITH(pool), name_reuse_ns);
    PyObject *const args[] = {(PyObject *)exchange, WITH(idle), reuse, WITH(awaited)};
    PyObject *left = reuse == NULL ? NULL : receiver_carry((PyObject *)receiver, args, 4);
    PyObject *told = left;
    if (left != NULL && left != zero)
        told = PyObject_CallMethodObjArgs(WITH(pool), name_carried, (PyObject *)exchange, left, NULL);
    if (told != left)
        Py_XDECREF(told);
    failed = told == NULL;
    Py_XDECREF(left);
    Py_XDECREF(reuse);
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
    Py_XDECREF(due_at);
    Py_XDECREF(deadline);
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
    PyObject *const args[] = {connection, WITH(idle), WITH(in_flight), WITH(awaited)};
    Py_INCREF(with); /* who is called may end it */
    PyObject *freed = receiver_free((PyObject *)receiver, args, 4);
    int done = freed == NULL ? -1 : freed != Py_None;
    if (done > 0) {
        put_same((State *)freed, X_over, Py_True);
        if (end_of_lane(with, &lane) < 0 || next_of_lane(receiver, with, &lane) < 0)
            done = -1;
    }
    Py_XDECREF(freed);
    Py_DECREF(lane.args);
    Py_DECREF(with);
    return done;
}
#undef WITH

/* -- texts --------------------------------------------------------------------------------------------------------- */

/* The twin of `in_python` in loadgen/core/requests/words.py: `begin`, then a word for each two bytes of `bits`, least
   byte first. `spans`: for each word its place in `text`, shifted by 8, and its length. */
static PyObject *written(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *begin, *made;
    const char *bits, *spans, *text, *before;
    Py_ssize_t bits_size, spans_size, text_size, size;
    if (!PyArg_ParseTuple(args, "Uy#y#y#", &begin, &bits, &bits_size, &spans, &spans_size, &text, &text_size) ||
        (before = PyUnicode_AsUTF8AndSize(begin, &size)) == NULL)
        return NULL;
    Py_ssize_t words = spans_size / SPAN_BYTES;
    if (words == 0 || spans_size % SPAN_BYTES || bits_size % 2) {
        PyErr_SetString(PyExc_ValueError, "bits are pairs of bytes, and spans are words of four bytes");
        return NULL;
    }
    int even = (words & (words - 1)) == 0;
    const unsigned char *draws = (const unsigned char *)bits;
    Py_ssize_t usual = text_size / words < LONGEST_WORD ? text_size / words + 1 : LONGEST_WORD;
    Py_ssize_t room = size + bits_size / 2 * usual + WORD_ROOM; /* more where long words are drawn often */
    char *whole = PyMem_Malloc((size_t)room);
    if (whole == NULL)
        return PyErr_NoMemory();
    char *to = (char *)memcpy(whole, before, (size_t)size) + size;
    for (Py_ssize_t at = 0; at < bits_size; at += 2) {
        uint32_t draw = draws[at] | (uint32_t)draws[at + 1] << 8, span;
        uint32_t word = even ? draw & (uint32_t)(words - 1) : draw % (uint32_t)words;
        memcpy(&span, spans + SPAN_BYTES * word, SPAN_BYTES);
        Py_ssize_t place = span >> 8, length = span & LONGEST_WORD;
        if (place + length > text_size) {
            PyMem_Free(whole);
            PyErr_SetString(PyExc_ValueError, "a word ends behind the text");
            return NULL;
        }
        if (whole + room - to < WORD_ROOM) {
            Py_ssize_t done = to - whole;
            char *larger = PyMem_Realloc(whole, (size_t)(room += room / 4 + WORD_ROOM));
            if (larger == NULL) {
                PyMem_Free(whole);
                return PyErr_NoMemory();
            }
            to = (whole = larger) + done;
        }
        if (length <= SHORT_WORD && place + SHORT_WORD <= text_size)
            memcpy(to, text + place, SHORT_WORD); /* of a fixed size: no call */
        else
            memcpy(to, text + place, (size_t)length);
        to += length;
    }
    made = PyUnicode_DecodeUTF8(whole, to - whole, NULL);
    PyMem_Free(whole);
    return made;
}

typedef unsigned char Bytes __attribute__((vector_size(16)));

/* Beside the encoder that json_text.py takes: a text as JSON, or None where a character of it has to be written otherwise. */
static PyObject *quoted(PyObject *Py_UNUSED(module), PyObject *value)
{
    Py_ssize_t size, at = 0;
    const char *text = PyUnicode_AsUTF8AndSize(value, &size);
    if (text == NULL && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        PyErr_Clear(); /* the encoder says what is wrong */
        Py_RETURN_NONE;
    }
    PyObject *made = text == NULL ? NULL : PyBytes_FromStringAndSize(NULL, size + 2);
    if (made == NULL)
        return NULL;
    char *to = PyBytes_AsString(made);
    *to++ = '"';
    to[size] = '"';
    Bytes escaped = {0}, bytes;
    for (; at + (Py_ssize_t)sizeof bytes <= size; at += (Py_ssize_t)sizeof bytes) {
        memcpy(&bytes, text + at, sizeof bytes);
        memcpy(to + at, &bytes, sizeof bytes);
        escaped |= (Bytes)((bytes < ' ') | (bytes == '"') | (bytes == '\\'));
    }
    int escapes = 0;
    for (size_t byte = 0; byte < sizeof escaped; byte++)
        escapes |= escaped[byte];
    for (; at < size; at++) {
        to[at] = text[at];
        escapes |= (unsigned char)text[at] < ' ' || text[at] == '"' || text[at] == '\\';
    }
    if (!escapes)
        return made;
    Py_DECREF(made);
    Py_RETURN_NONE;
}

/* -- hashes -------------------------------------------------------------------------------------------------------- */

/* BLAKE2b (RFC 7693) of LANES texts at a time: each lane of a vector is one of them. A processor whose vectors hold only
   half of them takes one half after the other: with both at once its registers would not suffice. */

#define LANES 8
#define BLOCK_BYTES 128
#define HASH_BYTES 16

typedef uint64_t Lanes __attribute__((vector_size(8 * LANES)));
typedef uint64_t Half __attribute__((vector_size(4 * LANES)));

typedef struct {
    const char *at;
    Py_ssize_t left;
    uint64_t done;
    int busy;
    unsigned char end[BLOCK_BYTES];
} Text;

static const uint64_t blake2b_start[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static const unsigned char blake2b_order[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static uint64_t little(const unsigned char *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

#define TURNED(value, by) ((value) >> (by) | (value) << (64 - (by)))
#define MIX(a, b, c, d, x, y) \
    a += b + (x), d = TURNED(d ^ a, 32), c += d, b = TURNED(b ^ c, 24), \
    a += b + (y), d = TURNED(d ^ a, 16), c += d, b = TURNED(b ^ c, 63)

typedef void Compress(Lanes state[8], const unsigned char *const blocks[LANES], const Lanes *done, const Lanes *last);

#define COMPRESS(name, target, Vector) \
    target static void name(Lanes state[8], const unsigned char *const blocks[LANES], const Lanes *done, const Lanes *last) \
    { \
        enum { WIDTH = sizeof(Vector) / 8 }; \
        for (int first = 0; first < LANES; first += WIDTH) { \
            Vector words[16], v[16], more; \
            for (int word = 0; word < 16; word++) \
                for (int lane = 0; lane < WIDTH; lane++) \
                    words[word][lane] = little(blocks[first + lane] + 8 * word); \
            for (int word = 0; word < 8; word++) { \
                memcpy(&v[word], (const uint64_t *)&state[word] + first, sizeof more); \
                v[word + 8] = (Vector){0} + blake2b_start[word]; \
            } \
            memcpy(&more, (const uint64_t *)done + first, sizeof more); \
            v[12] ^= more; \
            memcpy(&more, (const uint64_t *)last + first, sizeof more); \
            v[14] ^= more; \
            for (int round = 0; round < 12; round++) { \
                const unsigned char *order = blake2b_order[round % 10]; \
                MIX(v[0], v[4], v[8], v[12], words[order[0]], words[order[1]]); \
                MIX(v[1], v[5], v[9], v[13], words[order[2]], words[order[3]]); \
                MIX(v[2], v[6], v[10], v[14], words[order[4]], words[order[5]]); \
                MIX(v[3], v[7], v[11], v[15], words[order[6]], words[order[7]]); \
                MIX(v[0], v[5], v[10], v[15], words[order[8]], words[order[9]]); \
                MIX(v[1], v[6], v[11], v[12], words[order[10]], words[order[11]]); \
                MIX(v[2], v[7], v[8], v[13], words[order[12]], words[order[13]]); \
                MIX(v[3], v[4], v[9], v[14], words[order[14]], words[order[15]]); \
            } \
            for (int word = 0; word < 8; word++) { \
                memcpy(&more, (const uint64_t *)&state[word] + first, sizeof more); \
                more ^= v[word] ^ v[word + 8]; \
                memcpy((uint64_t *)&state[word] + first, &more, sizeof more); \
            } \
        } \
    }

COMPRESS(compress_anywhere, , Half)
#if defined(__x86_64__)
COMPRESS(compress_avx2, __attribute__((target("avx2"))), Half)
COMPRESS(compress_avx512, __attribute__((target("avx512f"))), Lanes)
#endif

static Compress *best_compress(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f"))
        return compress_avx512;
    if (__builtin_cpu_supports("avx2"))
        return compress_avx2;
#endif
    return compress_anywhere;
}

/* The next of `kept`, tuples of a salt and a text, for a lane: 0 where there is none left, -1 for another thing. */
static int begin_text(PyObject *kept, Py_ssize_t at, Text *text, Lanes state[8], int lane)
{
    PyObject *pair, *number;
    if (at >= PyList_Size(kept))
        return 0;
    if (!PyTuple_Check(pair = PyList_GetItem(kept, at)) || PyTuple_Size(pair) != 2 ||
        !PyLong_Check(number = PyTuple_GetItem(pair, 0))) {
        PyErr_SetString(PyExc_TypeError, "texts are tuples with their salts");
        return -1;
    }
    char *begin;
    if (PyBytes_AsStringAndSize(PyTuple_GetItem(pair, 1), &begin, &text->left) < 0)
        return -1;
    text->at = begin;
    long long salt = PyLong_AsLongLong(number);
    if (salt == -1 && PyErr_Occurred())
        return -1;
    text->done = 0;
    for (int word = 0; word < 8; word++)
        state[word][lane] = blake2b_start[word];
    state[0][lane] ^= 0x01010000 ^ HASH_BYTES;
    state[4][lane] ^= (uint64_t)salt;
    return 1;
}

/* The twin of `in_python` in loadgen/core/requests/hashing.py. */
static PyObject *hashed(PyObject *Py_UNUSED(module), PyObject *kept)
{
    if (!PyList_Check(kept)) {
        PyErr_SetString(PyExc_TypeError, "texts are a list");
        return NULL;
    }
    Py_ssize_t next = 0;
    Compress *compress = best_compress();
    Text lanes[LANES] = {0};
    const unsigned char *blocks[LANES];
    Lanes state[8] = {{0}}, done = {0}, last = {0};
    uint64_t low = 0, high = 0;
    for (;;) {
        int busy = 0;
        for (int lane = 0; lane < LANES; lane++) {
            Text *text = &lanes[lane];
            if (!text->busy && (text->busy = begin_text(kept, next, text, state, lane)) < 0)
                return NULL;
            next += text->busy && !text->done;
            blocks[lane] = text->end; /* of a lane without a text: what comes of it is not used */
            if (!text->busy)
                continue;
            busy = 1;
            Py_ssize_t size = text->left < BLOCK_BYTES ? text->left : BLOCK_BYTES;
            if (size < BLOCK_BYTES) {
                memset(text->end, 0, BLOCK_BYTES);
                memcpy(text->end, text->at, (size_t)size);
            } else
                blocks[lane] = (const unsigned char *)text->at;
            text->at += size;
            text->left -= size;
            done[lane] = text->done += (uint64_t)size;
            last[lane] = text->left ? 0 : ~(uint64_t)0;
        }
        if (!busy)
            break;
        compress(state, blocks, &done, &last);
        for (int lane = 0; lane < LANES; lane++)
            if (lanes[lane].busy && last[lane]) {
                lanes[lane].busy = 0;
                low += state[0][lane];
                high += state[1][lane] + (low < state[0][lane]);
            }
    }
    unsigned char sum[HASH_BYTES];
    for (int byte = 0; byte < HASH_BYTES; byte++)
        sum[byte] = (unsigned char)((byte < 8 ? low : high) >> 8 * (byte % 8));
    return PyBytes_FromStringAndSize((const char *)sum, HASH_BYTES);
}

/* -- the module ---------------------------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"whole_chunks", whole_chunks, METH_VARARGS, NULL},
    {"plain_run", plain_run, METH_VARARGS, NULL},
    {"written", written, METH_VARARGS, NULL},
    {"answers", answers, METH_VARARGS, NULL},
    {"quoted", quoted, METH_O, NULL},
    {"hashed", hashed, METH_O, NULL},
    {"token_count", token_count, METH_O, NULL},
    {"rows", rows, METH_VARARGS, NULL},
    {"usual_row", (PyCFunction)(void (*)(void))usual_row, METH_FASTCALL, NULL},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "loadgen_sdk._compiled",
    .m_doc = "The parts of the client that run once per event, in C.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__compiled(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    static const struct {
        const char *name;
        PyType_Spec *spec;
    } types[] = {{"Inbox", &inbox_spec},       {"Receiver", &receiver_spec}, {"Exchange", &exchange_spec},
                 {"Response", &response_spec}, {"Decoder", &decoder_spec},   {"Reading", &reading_spec}};
    if (module == NULL || make_values() < 0 || PyModule_AddIntConstant(module, "VERSION", VERSION) < 0)
        goto failed;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        PyObject *type = PyType_FromSpec(types[i].spec);
        if (type == NULL || PyModule_AddObjectRef(module, types[i].name, type) < 0) {
            Py_XDECREF(type);
            goto failed;
        }
        if (types[i].spec == &inbox_spec)
            inbox_type = (PyTypeObject *)type; /* keeps the reference */
        else
            Py_DECREF(type);
    }
    return module;
failed:
    Py_XDECREF(module);
    return NULL;
}
