/* The parts of the client that run once per event, in C.
 *
 * These are `SocketBuffer` and `Receiver` of transport/receiver.py, the states of a response in
 * transport/response_state.py and wire_formats/reference.py, and the functions of
 * transport/plain_events.py and wire_formats/reference.py. Those modules are the reference: they
 * say what the functions do, and the tests compare both (tests/sdk/test_compiled.py and
 * test_compiled_responses.py). The module is built where there is a C compiler. It uses only the
 * limited API of Python 3.11, so that one build serves every later version. Its parts are the files
 * of _c. */

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

#define VERSION 18 /* of the interface: compiled.py expects the same number */

/* The constants of transport/receiver.py and transport/reactor.py, which explain them. */
enum {
    READ_BYTES = 32 << 10,
    MAX_WRITE_BYTES = 256 << 10,
    MAX_READY = 1024,
    MAX_DEFERRED_READY = 32,
    MAX_READY_BEFORE_SENDING = 32,
    MAX_CLOCK_READING_NS = 5000,
    POLL_EVERY_NS = 1000000,
    BUSY_POLL_EVERY_NS = 2000000,
    BUSY_READS = 4,
    PLAN_AHEAD_NS = POLL_EVERY_NS / 2,
    BACKLOG_LIMIT = 20000,
    DEFER_WAIT_MS = 1,
    DEFER_NS = 1000000,
    EARLY_DEFERRED_POLL_NS = DEFER_NS / 2,
    DECISION_PERIOD_NS = 100000000,
    DEFER_FROM_READS_PER_S = 4000,
    DEFER_DOWN_TO_READS_PER_S = 2000,
    READS_PER_MERGED_READ = 100,
    MAX_BATCHED_READS = 64,
    MAX_RUN_READS = 512,
    SMALL_READ_BYTES = 4,
    LARGE_READ_BYTES = 2048,
    DELIVERIES_PER_CLOCK_READING = 8,
    NO_TIMER = -1,
    WRITE_FAILED = -1,
};

#define NS_PER_S 1000000000LL
#define DEFER_PAUSE_NS 1000000000LL
#define FOREVER (1LL << 62) /* a time that never comes */
#define DEFERRED_EPOLL_EVENTS (EPOLLIN | EPOLLRDHUP | EPOLLET)

/* The largest count of tokens, which fits into the columns of the results. */
#define MAX_TOKEN_COUNT ((1LL << 31) - 1)

/* The token usages of so many responses are cached, unless their JSON is longer. */
enum { CACHED_USAGES = 4, MAX_CACHED_USAGE_BYTES = 256 };

/* Parts of event streams and chunked bodies. */
#define DATA_PREFIX "data: "
#define EVENT_END "\n\n"
#define CHUNK_END "\r\n"
#define CHUNKED_BODY_END "\r\n\r\n"
enum {
    DATA_PREFIX_BYTES = sizeof DATA_PREFIX - 1,
    EVENT_END_BYTES = sizeof EVENT_END - 1,
    CHUNK_END_BYTES = sizeof CHUNK_END - 1,
    CHUNKED_BODY_END_BYTES = sizeof CHUNKED_BODY_END - 1,
    MAX_SIZE_DIGITS = 8, /* of the size of a chunk */
};

/* The bytes below the first are control characters. UTF-8 encodes other characters than ASCII with
 * bytes from the second on. */
enum { FIRST_PRINTABLE_BYTE = 0x20, FIRST_NON_ASCII_BYTE = 0x80 };

#ifndef SO_TIMESTAMPNS
#define SO_TIMESTAMPNS 35
#endif

static int64_t min_int64(int64_t first, int64_t second)
{
    return first < second ? first : second;
}

static int64_t max_int64(int64_t first, int64_t second)
{
    return first > second ? first : second;
}

static int64_t timespec_ns(const struct timespec *time)
{
    return (int64_t)time->tv_sec * NS_PER_S + time->tv_nsec;
}

static int64_t clock_ns(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return timespec_ns(&time);
}

#include "_c/python_objects.h"
#include "_c/plain_events.h"
#include "_c/socket_buffer.h"
#include "_c/receiver.h"
#include "_c/response_state.h"
#include "_c/json_events.h"
#include "_c/fast_path.h"
#include "_c/delivery.h"
#include "_c/registration.h"

/* -- the module -------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"parse_whole_chunks", parse_whole_chunks, METH_VARARGS, NULL},
    {"count_leading_plain_events", count_leading_plain_events, METH_VARARGS, NULL},
    {"register_classes", register_classes, METH_VARARGS, NULL},
    {"token_count", token_count, METH_O, NULL},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "loadgen_sdk._compiled",
    .m_doc = "The parts of the client that run once per event, in C.",
    .m_size = -1,
    .m_methods = functions,
};

/* Create a type and add it to the module. Return a new reference to the type, or NULL with an
 * exception. */
static PyObject *add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL)
        return NULL;
    if (PyModule_AddObjectRef(module, name, type) < 0) {
        Py_DECREF(type);
        return NULL;
    }

    return type;
}

/* Add the types to the module. Return 0, or -1 with an exception. */
static int add_types(PyObject *module)
{
    static const struct {
        const char *name;
        PyType_Spec *spec;
    } types[] = {
        {"Receiver", &receiver_spec},          {"ExchangeState", &exchange_spec},
        {"ResponseState", &response_spec},     {"DecoderState", &decoder_spec},
        {"ResponseReaderState", &reader_spec},
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        /* The module has a reference of its own, so that this one is not needed. */
        if (discard_result(add_type(module, types[i].name, types[i].spec)) < 0)
            return -1;
    }

    /* The functions here check for this type, so that its reference is kept. */
    socket_buffer_type = (PyTypeObject *)add_type(module, "SocketBuffer", &socket_buffer_spec);
    return socket_buffer_type == NULL ? -1 : 0;
}

/* Create the module, when Python imports it. */
PyMODINIT_FUNC PyInit__compiled(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    if (create_constants() < 0 || add_types(module) < 0 ||
        PyModule_AddIntConstant(module, "VERSION", VERSION) < 0) {
        Py_DECREF(module);
        return NULL;
    }

    return module;
}
