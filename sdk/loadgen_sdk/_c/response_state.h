/* The state of an answer, and how it begins. Part of _compiled.c. */

/* The state of a response. The reference is transport/response_state.py and wire_formats/reference.py. The fields are members
   of these types, so that the methods in Python, of their subclasses, use them too. `arrived` processes a usual read itself
   (a head that was seen before, whole chunks of whole events of one choice, no template to learn) and leaves every other
   read to the methods in Python. It looks at a read before it takes anything of it, so that a read that is not usual is
   left as it came. */

#define EXCHANGE_OBJECTS(F, T)                                                                                         \
    F(T, body_parts) F(T, connection) F(T, decoder) F(T, failure) F(T, flow) F(T, head) F(T, incomplete_chunk) F(T, on_done) F(T, on_first)       \
    F(T, payload) F(T, reader) F(T, request) F(T, response) F(T, sink) F(T, template)
#define EXCHANGE_NUMBERS(F, T)                                                                                         \
    F(T, asked_output) F(T, body_bytes) F(T, bytes_received) F(T, bytes_sent) F(T, client_lag) F(T, deadline) F(T, done)   \
    F(T, due) F(T, first_byte) F(T, progress) F(T, ready) F(T, resent) F(T, sent) F(T, tcp) F(T, tls) F(T, tries)
#define EXCHANGE_FLAGS(F, T)                                                                                           \
    F(T, at_chunk_start) F(T, is_event_stream) F(T, keep_headers) F(T, keep_text) F(T, kernel_stamp) F(T, is_reported) F(T, may_batch)    \
    F(T, reused) F(T, splits_chunks) F(T, stream)
#define RESPONSE_PARSER_OBJECTS(F, T)                                                                                         \
    F(T, _bytes_left) F(T, _mode) F(T, _unparsed) F(T, headers) F(T, idle_limit_s) F(T, surplus) F(T, uses_left)
#define RESPONSE_PARSER_NUMBERS(F, T) F(T, status)
#define RESPONSE_PARSER_FLAGS(F, T) F(T, chunked) F(T, complete) F(T, reusable) F(T, until_close)
#define SSE_DECODER_OBJECTS(F, T) F(T, _earlier) F(T, _earlier_bytes) F(T, _unparsed)
#define SSE_DECODER_NUMBERS(F, T)
#define SSE_DECODER_FLAGS(F, T) F(T, _after_cr) F(T, started)
#define RESPONSE_READER_OBJECTS(F, T)                                                                                          \
    F(T, error) F(T, finish_reason) F(T, flow) F(T, malformed) F(T, pieces) F(T, reasoning_pieces) F(T, remark)            \
    F(T, response_id)                                                                                                  \
    F(T, server_timing) F(T, sink) F(T, template) F(T, tool_deltas) F(T, usage_counts)
#define RESPONSE_READER_NUMBERS(F, T)                                                                                          \
    F(T, end) F(T, first_answer) F(T, first_event) F(T, first_event_tokens) F(T, first_token) F(T, last_token)             \
    F(T, learned) F(T, max_gap) F(T, max_gap_error) F(T, output_events) F(T, plain_events) F(T, stamp_error)               \
    F(T, unknown_outputs) F(T, unsure_at) F(T, unsure_error)
#define RESPONSE_READER_FLAGS(F, T)

#define OBJECT(T, name) PyObject *name;
#define NUMBER(T, name) long long name;
#define FLAG(T, name) char name;
#define FIELDS(TABLE, T) PyObject_HEAD TABLE##_OBJECTS(OBJECT, T) TABLE##_NUMBERS(NUMBER, T) TABLE##_FLAGS(FLAG, T)
#define STATE(T, TABLE)                                                                                                \
    typedef struct {                                                                                                   \
        FIELDS(TABLE, T)                                                                                               \
    } T;
STATE(Exchange, EXCHANGE)
STATE(ResponseParser, RESPONSE_PARSER)
STATE(SseDecoder, SSE_DECODER)
STATE(ResponseReader, RESPONSE_READER)

enum { MAX_EVENTS = 16, MAX_DEPTH = 16, MAX_NUMBER_DIGITS = 17, LAST_EVENTS = 4, MAX_VARIABLES = 12, PATTERNS = 8, PATTERN_BYTES = 1024 };
#define NO_MORE_TEMPLATES (1LL << 60)
#define NEVER (-1)

/* What the functions need of Python; set by `register_classes`. */
static PyTypeObject *exchange_class, *response_class, *decoder_class, *reader_class;
static PyObject *known_heads, *decode_usage, *endings;
/* Values that the fields have at first, and names. */
static PyObject *never, *zero, *no_text, *no_bytes, *mode_head, *mode_chunked, *mode_end, *event_stream;
static PyObject *name_prompt_tokens, *name_completion_tokens;
static PyObject *name_response_completed;
static PyObject *name_pop, *name_append;
static PyObject *name_gaps, *name_instants, *name_errors, *name_content_type, *name_content_encoding;

/* Call with one argument, which is taken, and drop what it returns. -1 with an exception. */
static int call_with(PyObject *whom, PyObject *what)
{
    PyObject *done = what == NULL ? NULL : PyObject_CallFunctionObjArgs(whom, what, NULL);
    Py_XDECREF(what);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* A number of at most 62 bits; `*fits` becomes 0 where the field holds something else. */
static int64_t read_number(PyObject *value, int *fits)
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

#define VISIT(T, name) Py_VISIT(((T *)self)->name);
#define CLEAR(T, name) Py_CLEAR(((T *)self)->name);
#define OBJECT_MEMBER(T, name) {#name, T_OBJECT_EX, offsetof(T, name), 0, NULL},
#define NUMBER_MEMBER(T, name) {#name, T_LONGLONG, offsetof(T, name), 0, NULL},
#define FLAG_MEMBER(T, name) {#name, T_BOOL, offsetof(T, name), 0, NULL},
#define STATE_TYPE(kind, T, TABLE)                                                                                     \
    static int kind##_traverse(PyObject *self, visitproc visit, void *arg)                                             \
    {                                                                                                                  \
        Py_VISIT(Py_TYPE(self));                                                                                       \
        TABLE##_OBJECTS(VISIT, T) return 0;                                                                            \
    }                                                                                                                  \
    static int kind##_clear(PyObject *self)                                                                            \
    {                                                                                                                  \
        TABLE##_OBJECTS(CLEAR, T) return 0;                                                                            \
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
    static PyMemberDef kind##_members[] = {                                                                            \
        TABLE##_OBJECTS(OBJECT_MEMBER, T) TABLE##_NUMBERS(NUMBER_MEMBER, T) TABLE##_FLAGS(FLAG_MEMBER, T){NULL}};      \
    static PyType_Slot kind##_slots[] = {                                                                              \
        {Py_tp_init, kind##_init},       {Py_tp_dealloc, kind##_dealloc}, {Py_tp_traverse, kind##_traverse},           \
        {Py_tp_clear, kind##_clear},     {Py_tp_members, kind##_members}, {Py_tp_methods, kind##_methods},             \
        {Py_tp_getset, kind##_computed}, {0, NULL},                                                                    \
    };                                                                                                                 \
    static PyType_Spec kind##_spec = {                                                                                 \
        .name = "loadgen_sdk._compiled." #kind "_state",                                                               \
        .basicsize = sizeof(T),                                                                                        \
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,                                        \
        .slots = kind##_slots,                                                                                         \
    };

/* -- their beginnings */

/* `headers` and the lists are made where they are needed alone: -1 with an exception. */
static int init_response(ResponseParser *response)
{
    PyObject *headers = PyDict_New();
    if (headers == NULL)
        return -1;
    set_stolen(&response->headers, headers);
    set_object(&response->_bytes_left, zero);
    set_object(&response->_mode, mode_head);
    set_object(&response->_unparsed, no_bytes);
    set_object(&response->surplus, no_bytes);
    set_object(&response->idle_limit_s, Py_None);
    set_object(&response->uses_left, Py_None);
    response->chunked = response->complete = response->until_close = 0;
    response->reusable = 1;
    response->status = 0;
    return 0;
}

static int init_decoder(SseDecoder *decoder)
{
    PyObject *earlier = PyList_New(0);
    if (earlier == NULL)
        return -1;
    set_stolen(&decoder->_earlier, earlier);
    set_object(&decoder->_earlier_bytes, zero);
    set_object(&decoder->_unparsed, no_bytes);
    decoder->_after_cr = decoder->started = 0;
    return 0;
}

static int init_reader(ResponseReader *reader, PyObject *flow, int keep_text, PyObject *sink, int few)
{
    PyObject **texts[] = {&reader->error, &reader->finish_reason, &reader->malformed, &reader->remark,
                          &reader->response_id};
    PyObject **lists[] = {&reader->tool_deltas, &reader->pieces, &reader->reasoning_pieces};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        set_object(texts[i], no_text);
    for (int i = 0; i < 3; i++) {
        PyObject *list = i == 0 || keep_text ? PyList_New(0) : Py_None;
        if (list == NULL)
            return -1;
        if (list == Py_None)
            Py_INCREF(list);
        set_stolen(lists[i], list);
    }
    set_object(&reader->flow, flow);
    set_object(&reader->server_timing, Py_None);
    set_object(&reader->sink, sink);
    set_object(&reader->template, Py_None);
    set_object(&reader->usage_counts, Py_None);
    reader->end = reader->first_answer = reader->first_event = reader->first_token = reader->last_token = NEVER;
    reader->unsure_at = NEVER;
    reader->first_event_tokens = reader->max_gap = reader->max_gap_error = reader->output_events = 0;
    reader->plain_events = reader->stamp_error = reader->unknown_outputs = reader->unsure_error = 0;
    reader->learned = few ? NO_MORE_TEMPLATES : 0;
    return 0;
}

static int response_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    return PyArg_ParseTuple(args, "") ? init_response((ResponseParser *)self) : -1;
}

static int decoder_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    return PyArg_ParseTuple(args, "") ? init_decoder((SseDecoder *)self) : -1;
}

static int reader_init(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"flow", "keep_text", "sink", "few", NULL};
    PyObject *flow, *sink = Py_None;
    int keep_text = 0, few = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|pO$p", names, &flow, &keep_text, &sink, &few))
        return -1;
    return init_reader((ResponseReader *)self, flow, keep_text, sink, few);
}

static PyObject *allocate(PyTypeObject *class)
{
    if (class == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "what is an answer was not said");
        return NULL;
    }
    return PyType_GenericAlloc(class, 0);
}

/* What is known of the answer, before a request is sent, or sent again: see Exchange.reset_response. -1 with an exception. */
static int init_response_state(Exchange *exchange)
{
    PyObject *parts, *response, *decoder, *reader;
    exchange->sent = exchange->first_byte = NEVER;
    exchange->client_lag = exchange->progress = exchange->body_bytes = 0;
    exchange->kernel_stamp = exchange->may_batch = exchange->at_chunk_start = exchange->splits_chunks = exchange->is_event_stream = 0;
    set_object(&exchange->template, Py_None);
    set_object(&exchange->incomplete_chunk, no_bytes);
    if ((parts = PyList_New(0)) == NULL)
        return -1;
    set_stolen(&exchange->body_parts, parts);
    if ((response = allocate(response_class)) == NULL)
        return -1;
    set_stolen(&exchange->response, response);
    if ((decoder = allocate(decoder_class)) == NULL)
        return -1;
    set_stolen(&exchange->decoder, decoder);
    if ((reader = allocate(reader_class)) == NULL)
        return -1;
    set_stolen(&exchange->reader, reader);
    int few = exchange->asked_output > 0 && exchange->asked_output <= LAST_EVENTS;
    return init_response((ResponseParser *)response) < 0 || init_decoder((SseDecoder *)decoder) < 0
               ? -1
               : init_reader((ResponseReader *)reader, exchange->flow, exchange->keep_text, exchange->sink, few);
}

/* What an exchange is given: see Exchange. -1 with an exception. */
typedef struct {
    PyObject *request, *head, *payload, *on_done, *flow, *sink, *on_first;
    int64_t due, asked_output;
    int stream, keep_text, keep_headers;
} ExchangeArguments;

static int init_exchange(Exchange *exchange, const ExchangeArguments *given)
{
    set_object(&exchange->request, given->request);
    set_object(&exchange->head, given->head);
    set_object(&exchange->payload, given->payload);
    set_object(&exchange->on_done, given->on_done);
    set_object(&exchange->flow, given->flow);
    set_object(&exchange->sink, given->sink);
    set_object(&exchange->on_first, given->on_first);
    set_object(&exchange->connection, Py_None);
    set_object(&exchange->failure, Py_None);
    exchange->due = given->due;
    exchange->asked_output = given->asked_output;
    exchange->stream = (char)given->stream;
    exchange->keep_text = (char)given->keep_text;
    exchange->keep_headers = (char)given->keep_headers;
    exchange->done = exchange->ready = exchange->tcp = exchange->tls = NEVER;
    exchange->resent = exchange->tries = exchange->deadline = exchange->bytes_sent = exchange->bytes_received = 0;
    exchange->is_reported = exchange->reused = 0;
    return init_response_state(exchange);
}

/* The names are looked up as they are: to parse them makes a new text of each. */
enum { POSITIONAL_ARGUMENTS = 6, ARGUMENTS = 12 };
static PyObject *argument_names[ARGUMENTS]; /* in their order: those by place first */

static int exchange_init(PyObject *self, PyObject *args, PyObject *keywords)
{
    PyObject *given[ARGUMENTS] = {[7] = zero, Py_False, Py_False, Py_None, Py_None};
    Py_ssize_t places = PyTuple_Size(args), named = 0;
    for (int i = 0; i < ARGUMENTS; i++) {
        PyObject *value = i < POSITIONAL_ARGUMENTS && i < places ? PyTuple_GetItem(args, i) : NULL;
        if (value == NULL && keywords != NULL) {
            value = PyDict_GetItemWithError(keywords, argument_names[i]);
            named += value != NULL;
        }
        if (value != NULL)
            given[i] = value;
    }
    int fits = places <= POSITIONAL_ARGUMENTS && (keywords == NULL || PyDict_Size(keywords) == named), of_64_bits = 0;
    for (int i = 0; i < ARGUMENTS; i++)
        fits = fits && given[i] != NULL;
    if (!fits || !PyLong_Check(given[7]) || !PyBool_Check(given[8]) || !PyBool_Check(given[9])) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "Exchange() takes what its namesake in Python does");
        return -1;
    }
    const ExchangeArguments values = {
        .request = given[0], .head = given[1], .payload = given[2], .on_done = given[4], .flow = given[5],
        .sink = given[10], .on_first = given[11], .due = PyLong_AsLongLong(given[3]),
        .asked_output = PyLong_AsLongLongAndOverflow(given[7], &of_64_bits), .stream = PyObject_IsTrue(given[6]),
        .keep_text = given[8] == Py_True, .keep_headers = given[9] == Py_True};
    if (values.stream < 0 || (values.due == -1 && PyErr_Occurred()))
        return -1;
    return init_exchange((Exchange *)self, &values);
}

static PyObject *exchange_reset_response(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (init_response_state((Exchange *)self) < 0)
        return NULL;
    Py_RETURN_NONE;
}
