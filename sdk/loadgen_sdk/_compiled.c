/* The parts of the client that run once per event, in C: `SocketBuffer` and `Receiver` of transport/receiver.py, the states of
   transport/response_state.py and wire_formats/reference.py with `ExchangeState.arrived`, and the functions of
   transport/plain_events.py and wire_formats/reference.py. Those modules are the reference and say what the functions do.
   tests/sdk/test_compiled.py and tests/sdk/test_compiled_responses.py compare the two. Built where a C compiler is found.
   Only the limited API of Python 3.11 is used, so that one build serves every later version. This is one module, whose
   parts are the files of _c. */

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

#define VERSION 15 /* of the interface: compiled.py expects the same number */

enum {
    READ_BYTES = 32 << 10,
    MAX_WRITE_BYTES = 256 << 10,
    MAX_READY = 1024,
    MAX_CLOCK_READING_NS = 5000,
    POLL_EVERY_NS = 1000000,
    BUSY_POLL_EVERY_NS = 2000000,
    BUSY_READS = 4,
    MANY_READY = 32,
    BACKLOG_LIMIT = 20000,
    DEFER_WAIT_MS = 1,
    DEFER_NS = 1000000,
    DECISION_PERIOD_NS = 100000000,
    DEFER_FROM_READS_PER_S = 4000,
    DEFER_DOWN_TO_READS_PER_S = 2000,
    READS_PER_SHARED_READ = 100,
    MAX_BATCHED_READS = 64,
    MAX_RUN_READS = 512,
    SMALL_READ_BYTES = 4,
    LARGE_READ_BYTES = 2048,
    MAX_SIZE_DIGITS = 8,
    DATA_PREFIX_BYTES = 6, /* "data: " */
    EVENT_END_BYTES = 2,   /* a blank line */
};

#define NS_PER_S 1000000000LL
#define DEFER_PAUSE_NS 1000000000LL
#define FOREVER (1LL << 62)
#define DEFERRED_EPOLL_EVENTS (EPOLLIN | EPOLLRDHUP | EPOLLET)

#ifndef SO_TIMESTAMPNS
#define SO_TIMESTAMPNS 35
#endif

static int64_t clock_ns(clockid_t clock)
{
    struct timespec at;
    clock_gettime(clock, &at);
    return (int64_t)at.tv_sec * NS_PER_S + at.tv_nsec;
}

#include "_c/plain_events.h"
#include "_c/socket_buffer.h"
#include "_c/receiver.h"
#include "_c/response_state.h"
#include "_c/json_events.h"
#include "_c/usual_reads.h"
#include "_c/delivery.h"
#include "_c/registration.h"

/* -- the module ---------------------------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"parse_whole_chunks", parse_whole_chunks, METH_VARARGS, NULL},
    {"plain_run", plain_run, METH_VARARGS, NULL},
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

PyMODINIT_FUNC PyInit__compiled(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    static const struct {
        const char *name;
        PyType_Spec *spec;
    } types[] = {{"SocketBuffer", &socket_buffer_spec},       {"Receiver", &receiver_spec}, {"ExchangeState", &exchange_spec},
                 {"ResponseState", &response_spec}, {"DecoderState", &decoder_spec},   {"ReadingState", &reader_spec}};
    if (module == NULL || create_constants() < 0 || PyModule_AddIntConstant(module, "VERSION", VERSION) < 0)
        goto failed;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        PyObject *type = PyType_FromSpec(types[i].spec);
        if (type == NULL || PyModule_AddObjectRef(module, types[i].name, type) < 0) {
            Py_XDECREF(type);
            goto failed;
        }
        if (types[i].spec == &socket_buffer_spec)
            socket_buffer_type = (PyTypeObject *)type; /* keeps the reference */
        else
            Py_DECREF(type);
    }
    return module;
failed:
    Py_XDECREF(module);
    return NULL;
}
