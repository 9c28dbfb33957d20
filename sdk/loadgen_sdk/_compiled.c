/* The parts of the client that run once per event, in C: the twins of `Inbox` and `Receiver` in transport/receiver.py
   and of the functions in transport/plain.py and dialects/reader.py, which say what they do. tests/sdk/test_compiled.py holds the two against
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

#define VERSION 4 /* of these functions: compiled.py asks for the same, else it takes Python's */

enum {
    READ_BYTES = 32 << 10,
    MOST_READY = 1024,
    MAPPING_NS = 5000,
    POLL_EVERY_NS = 1000000,
    BUSY_POLL_EVERY_NS = 2000000,
    BUSY_READS = 4,
    READ_FIRST = 32,
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
};

#define PAUSE_NS 1000000000LL
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
    int fd;
    int error;
    char filled, open, patient, queued, held;
} Inbox;

static PyTypeObject *inbox_type;

static int inbox_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    Inbox *inbox = (Inbox *)self;
    if (!PyArg_ParseTuple(args, "iL", &inbox->fd, &inbox->emptied_at))
        return -1;
    PyObject *reads = PyList_New(0);
    if (reads == NULL)
        return -1;
    Py_XDECREF(inbox->reads);
    inbox->reads = reads;
    Py_INCREF(Py_None);
    Py_XDECREF(inbox->template);
    inbox->template = Py_None;
    return 0;
}

static void inbox_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Inbox *inbox = (Inbox *)self;
    Py_XDECREF(inbox->reads);
    Py_XDECREF(inbox->template);
    PyMem_Free(inbox->run);
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
    {NULL},
};

static PyType_Slot inbox_slots[] = {
    {Py_tp_init, inbox_init},
    {Py_tp_dealloc, inbox_dealloc},
    {Py_tp_members, inbox_members},
    {0, NULL},
};

static PyType_Spec inbox_spec = {
    .name = "loadgen_sdk._compiled.Inbox",
    .basicsize = sizeof(Inbox),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
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

typedef struct {
    PyObject_HEAD
    PyObject *queue;
    PyObject *queue_append;
    Inbox **inboxes; /* by descriptor; NULL where there is none */
    int inboxes_size;
    int epoll, held, timer;
    long long now, last_poll, poll_started, to_monotonic, poll_at, armed_for, reads_at_poll;
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
    Py_XDECREF(receiver->queue_append);
    receiver->queue_append = append;
    Py_INCREF(queue);
    Py_XDECREF(receiver->queue);
    receiver->queue = queue;
    receiver->now = receiver->last_poll = receiver->poll_started = clock_ns(CLOCK_MONOTONIC);
    receiver->last_held_poll = receiver->look_began = receiver->now;
    receiver->pause_ns = PAUSE_NS;
    receiver->to_monotonic = receiver->now - clock_ns(CLOCK_REALTIME);
    return watch(receiver->epoll, EPOLL_CTL_ADD, receiver->held, EPOLLIN);
}

static int receiver_traverse(PyObject *self, visitproc visit, void *arg)
{
    Receiver *receiver = (Receiver *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(receiver->queue);
    Py_VISIT(receiver->queue_append);
    for (int fd = 0; fd < receiver->inboxes_size; fd++)
        Py_VISIT((PyObject *)receiver->inboxes[fd]);
    return 0;
}

static int receiver_clear(PyObject *self)
{
    Receiver *receiver = (Receiver *)self;
    Py_CLEAR(receiver->queue);
    Py_CLEAR(receiver->queue_append);
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

/* Plan the next poll, and arm the timer for it, or for what is due before. */
static int move_poll(Receiver *receiver, int64_t now, int64_t due_at)
{
    int busy = receiver->reads - receiver->reads_at_poll > BUSY_READS;
    receiver->poll_at = now + (busy ? BUSY_POLL_EVERY_NS : POLL_EVERY_NS);
    receiver->reads_at_poll = receiver->reads;
    if (due_at < 0)
        return 0;
    int64_t at = receiver->armed_for = receiver->poll_at < due_at ? receiver->poll_at : due_at;
    if (at <= 0)
        at = 1; /* 0 would disarm it */
    struct itimerspec armed = {.it_value = {.tv_sec = at / 1000000000, .tv_nsec = at % 1000000000}};
    if (timerfd_settime(receiver->timer, TFD_TIMER_ABSTIME, &armed, NULL) == 0)
        return 0;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
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

static PyObject *receiver_receive(PyObject *self, PyObject *args)
{
    Receiver *receiver = (Receiver *)self;
    int wait_ms;
    long long until, wake_at, due_at;
    if (!PyArg_ParseTuple(args, "iLLL", &wait_ms, &until, &wake_at, &due_at))
        return NULL;
    PyObject *others = PyList_New(0);
    if (others == NULL)
        return NULL;
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
            return others;
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
                int bad = other == NULL || PyList_Append(others, other) < 0;
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
            move_poll(receiver, now, PyList_Size(others) ? -1 : due_at) < 0)
            goto failed;
        int nothing_came = receiver->ready == 0 && !(holding && wait_ms < 0);
        if (nothing_came || now >= until || PyList_Size(others) || PyObject_Size(receiver->queue))
            return others;
    }
failed:
    Py_DECREF(others);
    return NULL;
}

static PyMethodDef receiver_methods[] = {
    {"add", receiver_add, METH_O, NULL},
    {"remove", receiver_remove, METH_O, NULL},
    {"hold", receiver_hold, METH_VARARGS, NULL},
    {"release", receiver_release, METH_O, NULL},
    {"take", receiver_take, METH_O, NULL},
    {"receive", receiver_receive, METH_VARARGS, NULL},
    {NULL},
};

static PyMemberDef receiver_members[] = {
    {"now", T_LONGLONG, offsetof(Receiver, now), 0, NULL},
    {"last_poll", T_LONGLONG, offsetof(Receiver, last_poll), 0, NULL},
    {"poll_at", T_LONGLONG, offsetof(Receiver, poll_at), 0, NULL},
    {"armed_for", T_LONGLONG, offsetof(Receiver, armed_for), 0, NULL},
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
    char *whole = NULL, *to = NULL;
    for (int writes = 0; writes < 2; writes++) { /* first how long it is */
        Py_ssize_t needed = size;
        for (Py_ssize_t at = 0; at < bits_size; at += 2) {
            uint32_t draw = draws[at] | (uint32_t)draws[at + 1] << 8, span;
            uint32_t word = even ? draw & (uint32_t)(words - 1) : draw % (uint32_t)words;
            memcpy(&span, spans + SPAN_BYTES * word, SPAN_BYTES);
            Py_ssize_t place = span >> 8, length = span & LONGEST_WORD;
            needed += length;
            if (place + length > text_size) {
                PyErr_SetString(PyExc_ValueError, "a word ends behind the text");
                return NULL;
            }
            if (!writes)
                continue;
            if (length <= SHORT_WORD && place + SHORT_WORD <= text_size)
                memcpy(to, text + place, SHORT_WORD); /* of a fixed size: no call */
            else
                memcpy(to, text + place, (size_t)length);
            to += length;
        }
        if (!writes && (whole = PyMem_Malloc((size_t)needed + SHORT_WORD)) == NULL)
            return PyErr_NoMemory();
        if (!writes)
            to = (char *)memcpy(whole, before, (size_t)size) + size;
    }
    made = PyUnicode_DecodeUTF8(whole, to - whole, NULL);
    PyMem_Free(whole);
    return made;
}

/* -- the module ---------------------------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"whole_chunks", whole_chunks, METH_VARARGS, NULL},
    {"plain_run", plain_run, METH_VARARGS, NULL},
    {"written", written, METH_VARARGS, NULL},
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
    PyObject *inbox = PyType_FromSpec(&inbox_spec), *receiver = PyType_FromSpec(&receiver_spec);
    if (inbox == NULL || receiver == NULL || PyModule_AddObjectRef(module, "Inbox", inbox) < 0 ||
        PyModule_AddObjectRef(module, "Receiver", receiver) < 0 ||
        PyModule_AddIntConstant(module, "VERSION", VERSION) < 0) {
        Py_XDECREF(inbox);
        Py_XDECREF(receiver);
        Py_DECREF(module);
        return NULL;
    }
    inbox_type = (PyTypeObject *)inbox;
    Py_DECREF(receiver);
    return module;
}
