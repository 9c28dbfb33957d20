/* The state of an answer, and how it begins. Part of _compiled.c. */

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
