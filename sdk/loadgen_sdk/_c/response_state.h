/* The state of a response: the fields of `Exchange`, `ResponseParser`, `SseDecoder` and
 * `ResponseReader`, and their initial values. Part of _compiled.c.
 *
 * The reference is transport/response_state.py and wire_formats/reference.py, which describe the
 * fields. The fields are members of these types, so that the methods of their subclasses in Python
 * use them too. */

/* Each table lists the fields of a type: objects, numbers and flags. `F` is a macro that is applied
 * to each of them, with the type `T`. */
#define EXCHANGE_OBJECTS(F, T)                                                                     \
    F(T, response_body_parts)                                                                      \
    F(T, connection)                                                                               \
    F(T, decoder)                                                                                  \
    F(T, failure)                                                                                  \
    F(T, head) F(T, incomplete_chunk) F(T, on_done) F(T, on_first_output) F(T, body) F(T, reader)  \
        F(T, request) F(T, response) F(T, on_output) F(T, template) F(T, timeline)
#define EXCHANGE_NUMBERS(F, T)                                                                     \
    F(T, response_body_bytes)                                                                      \
    F(T, bytes_received)                                                                           \
    F(T, bytes_sent)                                                                               \
    F(T, client_lag)                                                                               \
    F(T, deadline) F(T, done_at) F(T, due_at) F(T, head_received_at) F(T, last_event_read_at)      \
        F(T, ready_at) F(T, requested_output_tokens) F(T, resend_count) F(T, sent_at)              \
            F(T, tcp_connect_ns) F(T, tls_handshake_ns) F(T, connect_attempts)
#define EXCHANGE_FLAGS(F, T)                                                                       \
    F(T, is_at_chunk_start)                                                                        \
    F(T, is_event_stream)                                                                          \
    F(T, is_reported)                                                                              \
    F(T, keep_headers)                                                                             \
    F(T, keep_text) F(T, has_kernel_timestamp) F(T, can_batch_reads) F(T, is_connection_reused)    \
        F(T, has_split_chunks) F(T, is_stream_requested)
#define RESPONSE_PARSER_OBJECTS(F, T)                                                              \
    F(T, _bytes_left)                                                                              \
    F(T, _mode) F(T, _unparsed) F(T, headers) F(T, idle_limit_s) F(T, surplus) F(T, uses_left)
#define RESPONSE_PARSER_NUMBERS(F, T) F(T, status)
#define RESPONSE_PARSER_FLAGS(F, T)                                                                \
    F(T, is_chunked) F(T, is_complete) F(T, is_reusable) F(T, ends_with_connection)
#define SSE_DECODER_OBJECTS(F, T) F(T, _earlier_reads) F(T, _earlier_bytes) F(T, _unparsed)
#define SSE_DECODER_NUMBERS(F, T)
#define SSE_DECODER_FLAGS(F, T) F(T, _is_after_cr) F(T, has_started)
#define RESPONSE_READER_OBJECTS(F, T)                                                              \
    F(T, error)                                                                                    \
    F(T, finish_reason)                                                                            \
    F(T, parse_error)                                                                              \
    F(T, text_pieces)                                                                              \
    F(T, reasoning_pieces) F(T, remark) F(T, response_id) F(T, server_timing) F(T, on_output)      \
        F(T, template) F(T, timeline) F(T, tool_deltas) F(T, usage_counts)
#define RESPONSE_READER_NUMBERS(F, T)                                                              \
    F(T, end)                                                                                      \
    F(T, first_answer)                                                                             \
    F(T, first_event)                                                                              \
    F(T, first_event_tokens)                                                                       \
    F(T, first_token) F(T, last_token) F(T, learned_templates) F(T, max_gap)                       \
        F(T, max_gap_uncertainty) F(T, output_events) F(T, plain_events)                           \
            F(T, first_token_uncertainty) F(T, unknown_output_events) F(T, uncertain_timestamp)    \
                F(T, timestamp_uncertainty)
#define RESPONSE_READER_FLAGS(F, T)

#define OBJECT(T, name) PyObject *name;
#define NUMBER(T, name) long long name;
#define FLAG(T, name) char name;
#define FIELDS(TABLE, T)                                                                           \
    PyObject_HEAD                                                                                  \
    TABLE##_OBJECTS(OBJECT, T) TABLE##_NUMBERS(NUMBER, T) TABLE##_FLAGS(FLAG, T)
#define STATE(T, TABLE)                                                                            \
    typedef struct {                                                                               \
        FIELDS(TABLE, T)                                                                           \
    } T;
STATE(Exchange, EXCHANGE)
STATE(ResponseParser, RESPONSE_PARSER)
STATE(SseDecoder, SSE_DECODER)
STATE(ResponseReader, RESPONSE_READER)

/* Limits of what is understood here. A response with more is left to Python. */
enum {
    MAX_EVENTS = 16,
    MAX_DEPTH = 16,
    MAX_NUMBER_DIGITS = 17,
    LAST_EVENTS = 4,
    MAX_VARIABLES = 12,
    PATTERNS = 8,
    PATTERN_BYTES = 1024
};
#define NO_MORE_TEMPLATES (1LL << 60)
#define NEVER (-1)

/* What `register_classes` was given. */
static PyTypeObject *exchange_class, *response_class, *decoder_class, *reader_class;
static PyObject *known_heads, *decode_usage, *endings;
/* Constants: initial values of fields and names of attributes. */
static PyObject *zero, *no_text, *no_bytes, *mode_head, *mode_chunked, *mode_end, *event_stream;
static PyObject *name_prompt_tokens, *name_completion_tokens;
static PyObject *name_response_completed;
static PyObject *name_pop, *name_append;
static PyObject *name_gaps, *name_timestamps, *name_uncertainties, *name_content_type,
    *name_content_encoding;

/* Call a function with one argument, whose reference is taken over, and drop the result. The
 * argument may be NULL with an exception. Return -1 with an exception. */
static int call_with(PyObject *function, PyObject *argument)
{
    PyObject *result =
        argument == NULL ? NULL : PyObject_CallFunctionObjArgs(function, argument, NULL);
    Py_XDECREF(argument);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

#define MAX_NUMBER (1LL << 62)

/* Return the value of an int of at most 62 bits. `*is_valid` becomes 0 if it is something else. */
static int64_t read_number(PyObject *value, int *is_valid)
{
    if (value == NULL || !PyLong_Check(value)) {
        *is_valid = 0;
        return 0;
    }
    int overflow = 0;
    int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow || number > MAX_NUMBER || number < -MAX_NUMBER) {
        *is_valid = 0;
        return 0;
    }
    return number;
}

/* -- the types of the state -------------------------------------------------------------------- */

#define VISIT(T, name) Py_VISIT(((T *)self)->name);
#define CLEAR(T, name) Py_CLEAR(((T *)self)->name);
#define OBJECT_MEMBER(T, name) {#name, T_OBJECT_EX, offsetof(T, name), 0, NULL},
#define NUMBER_MEMBER(T, name) {#name, T_LONGLONG, offsetof(T, name), 0, NULL},
#define FLAG_MEMBER(T, name) {#name, T_BOOL, offsetof(T, name), 0, NULL},
#define STATE_TYPE(kind, T, TABLE)                                                                 \
    static int kind##_traverse(PyObject *self, visitproc visit, void *arg)                         \
    {                                                                                              \
        Py_VISIT(Py_TYPE(self));                                                                   \
        TABLE##_OBJECTS(VISIT, T) return 0;                                                        \
    }                                                                                              \
    static int kind##_clear(PyObject *self)                                                        \
    {                                                                                              \
        TABLE##_OBJECTS(CLEAR, T) return 0;                                                        \
    }                                                                                              \
    static void kind##_dealloc(PyObject *self)                                                     \
    {                                                                                              \
        PyTypeObject *type = Py_TYPE(self);                                                        \
        PyObject_GC_UnTrack(self);                                                                 \
        kind##_clear(self);                                                                        \
        freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);                             \
        release(self);                                                                             \
        Py_DECREF(type);                                                                           \
    }                                                                                              \
    static PyMemberDef kind##_members[] = {TABLE##_OBJECTS(OBJECT_MEMBER, T) TABLE##_NUMBERS(      \
        NUMBER_MEMBER, T) TABLE##_FLAGS(FLAG_MEMBER, T){NULL}};                                    \
    static PyType_Slot kind##_slots[] = {                                                          \
        {Py_tp_init, kind##_init},         {Py_tp_dealloc, kind##_dealloc},                        \
        {Py_tp_traverse, kind##_traverse}, {Py_tp_clear, kind##_clear},                            \
        {Py_tp_members, kind##_members},   {Py_tp_methods, kind##_methods},                        \
        {Py_tp_getset, kind##_computed},   {0, NULL},                                              \
    };                                                                                             \
    static PyType_Spec kind##_spec = {                                                             \
        .name = "loadgen_sdk._compiled." #kind "_state",                                           \
        .basicsize = sizeof(T),                                                                    \
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,                    \
        .slots = kind##_slots,                                                                     \
    };

/* -- initial values ---------------------------------------------------------------------------- */

/* Initialise a response. Return -1 with an exception. */
static int init_response(ResponseParser *response)
{
    PyObject *headers = PyDict_New();
    if (headers == NULL)
        return -1;
    set_field_stealing(&response->headers, headers);
    set_field(&response->_bytes_left, zero);
    set_field(&response->_mode, mode_head);
    set_field(&response->_unparsed, no_bytes);
    set_field(&response->surplus, no_bytes);
    set_field(&response->idle_limit_s, Py_None);
    set_field(&response->uses_left, Py_None);
    response->is_chunked = 0;
    response->is_complete = 0;
    response->ends_with_connection = 0;
    response->is_reusable = 1;
    response->status = 0;
    return 0;
}

/* Initialise a decoder. Return -1 with an exception. */
static int init_decoder(SseDecoder *decoder)
{
    PyObject *earlier = PyList_New(0);
    if (earlier == NULL)
        return -1;
    set_field_stealing(&decoder->_earlier_reads, earlier);
    set_field(&decoder->_earlier_bytes, zero);
    set_field(&decoder->_unparsed, no_bytes);
    decoder->_is_after_cr = 0;
    decoder->has_started = 0;
    return 0;
}

/* Set a field to an empty list, or to None. Return -1 with an exception. */
static int set_list_or_none(PyObject **place, int is_list)
{
    if (!is_list) {
        set_field(place, Py_None);
        return 0;
    }
    PyObject *list = PyList_New(0);
    if (list == NULL)
        return -1;
    set_field_stealing(place, list);
    return 0;
}

/* Initialise a reader. `expects_few_events`: so few events will come that learning a template costs
 * more than it saves. Return -1 with an exception. */
static int init_reader(ResponseReader *reader, PyObject *timeline, int keep_text,
                       PyObject *on_output, int expects_few_events)
{
    if (set_list_or_none(&reader->tool_deltas, 1) < 0 ||
        set_list_or_none(&reader->text_pieces, keep_text) < 0 ||
        set_list_or_none(&reader->reasoning_pieces, keep_text) < 0)
        return -1;
    set_field(&reader->timeline, timeline);
    set_field(&reader->on_output, on_output);
    set_field(&reader->error, no_text);
    set_field(&reader->finish_reason, no_text);
    set_field(&reader->parse_error, no_text);
    set_field(&reader->remark, no_text);
    set_field(&reader->response_id, no_text);
    set_field(&reader->server_timing, Py_None);
    set_field(&reader->template, Py_None);
    set_field(&reader->usage_counts, Py_None);
    reader->first_event = NEVER;
    reader->first_token = NEVER;
    reader->first_answer = NEVER;
    reader->last_token = NEVER;
    reader->end = NEVER;
    reader->uncertain_timestamp = NEVER;
    reader->timestamp_uncertainty = 0;
    reader->output_events = 0;
    reader->plain_events = 0;
    reader->first_event_tokens = 0;
    reader->max_gap = 0;
    reader->max_gap_uncertainty = 0;
    reader->first_token_uncertainty = 0;
    reader->unknown_output_events = 0;
    reader->learned_templates = expects_few_events ? NO_MORE_TEMPLATES : 0;
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
    static char *names[] = {"timeline", "keep_text", "on_output", "expects_few_events", NULL};
    PyObject *timeline;
    PyObject *on_output = Py_None;
    int keep_text = 0;
    int expects_few_events = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|pO$p", names, &timeline, &keep_text,
                                     &on_output, &expects_few_events))
        return -1;
    return init_reader((ResponseReader *)self, timeline, keep_text, on_output, expects_few_events);
}

/* Set a field to a new instance of a class whose fields are not initialised. Return -1 with an
 * exception. */
static int set_new_instance(PyObject **place, PyTypeObject *class)
{
    if (class == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the classes of a response were not registered");
        return -1;
    }
    PyObject *instance = PyType_GenericAlloc(class, 0);
    if (instance == NULL)
        return -1;
    set_field_stealing(place, instance);
    return 0;
}

/* ExchangeState.reset_response. Return -1 with an exception. */
static int init_response_state(Exchange *exchange)
{
    exchange->sent_at = NEVER;
    exchange->head_received_at = NEVER;
    exchange->client_lag = 0;
    exchange->last_event_read_at = 0;
    exchange->response_body_bytes = 0;
    exchange->has_kernel_timestamp = 0;
    exchange->can_batch_reads = 0;
    exchange->is_at_chunk_start = 0;
    exchange->has_split_chunks = 0;
    exchange->is_event_stream = 0;
    set_field(&exchange->template, Py_None);
    set_field(&exchange->incomplete_chunk, no_bytes);
    if (set_list_or_none(&exchange->response_body_parts, 1) < 0 ||
        set_new_instance(&exchange->response, response_class) < 0 ||
        set_new_instance(&exchange->decoder, decoder_class) < 0 ||
        set_new_instance(&exchange->reader, reader_class) < 0)
        return -1;
    int expects_few_events =
        exchange->requested_output_tokens > 0 && exchange->requested_output_tokens <= LAST_EVENTS;
    if (init_response((ResponseParser *)exchange->response) < 0 ||
        init_decoder((SseDecoder *)exchange->decoder) < 0)
        return -1;
    return init_reader((ResponseReader *)exchange->reader, exchange->timeline, exchange->keep_text,
                       exchange->on_output, expects_few_events);
}

static PyObject *exchange_reset_response(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (init_response_state((Exchange *)self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* -- making an exchange ------------------------------------------------------------------------ */

/* The arguments of Exchange(), in their order. */
enum ExchangeArgument {
    ARG_REQUEST,
    ARG_HEAD,
    ARG_BODY,
    ARG_DUE_AT,
    ARG_ON_DONE,
    ARG_TIMELINE,
    POSITIONAL_ARGUMENTS, /* The following ones are given by name. */
    ARG_IS_STREAM_REQUESTED = POSITIONAL_ARGUMENTS,
    ARG_REQUESTED_OUTPUT_TOKENS,
    ARG_KEEP_TEXT,
    ARG_KEEP_HEADERS,
    ARG_ON_OUTPUT,
    ARG_ON_FIRST_OUTPUT,
    ARGUMENTS,
};

/* Interned, so that they are looked up as they are. PyArg_ParseTupleAndKeywords would make a new
 * text of each. */
static PyObject *argument_names[ARGUMENTS];

/* Collect the arguments of a call, borrowed. Those that are missing keep their values. Return
 * whether the call has no others. */
static int collect_arguments(PyObject *args, PyObject *keywords, PyObject **values)
{
    Py_ssize_t positional = PyTuple_Size(args);
    Py_ssize_t by_name = 0;
    for (int i = 0; i < ARGUMENTS; i++) {
        PyObject *value =
            i < POSITIONAL_ARGUMENTS && i < positional ? PyTuple_GetItem(args, i) : NULL;
        if (value == NULL && keywords != NULL) {
            value = PyDict_GetItemWithError(keywords, argument_names[i]);
            by_name += value != NULL;
        }
        if (value != NULL)
            values[i] = value;
    }
    return positional <= POSITIONAL_ARGUMENTS &&
           (keywords == NULL || PyDict_Size(keywords) == by_name);
}

/* Return whether the arguments of an exchange are complete and of the right types. */
static int are_valid_arguments(PyObject *const *values)
{
    for (int i = 0; i < ARGUMENTS; i++)
        if (values[i] == NULL)
            return 0;
    return PyLong_Check(values[ARG_REQUESTED_OUTPUT_TOKENS]) &&
           PyBool_Check(values[ARG_KEEP_TEXT]) && PyBool_Check(values[ARG_KEEP_HEADERS]);
}

/* Initialise an exchange. Return -1 with an exception. */
static int init_exchange(Exchange *exchange, PyObject *const *values)
{
    int overflow = 0;
    int is_stream = PyObject_IsTrue(values[ARG_IS_STREAM_REQUESTED]);
    exchange->due_at = PyLong_AsLongLong(values[ARG_DUE_AT]);
    if (is_stream < 0 || (exchange->due_at == -1 && PyErr_Occurred()))
        return -1;
    exchange->requested_output_tokens =
        PyLong_AsLongLongAndOverflow(values[ARG_REQUESTED_OUTPUT_TOKENS], &overflow);
    exchange->is_stream_requested = (char)is_stream;
    exchange->keep_text = values[ARG_KEEP_TEXT] == Py_True;
    exchange->keep_headers = values[ARG_KEEP_HEADERS] == Py_True;
    set_field(&exchange->request, values[ARG_REQUEST]);
    set_field(&exchange->head, values[ARG_HEAD]);
    set_field(&exchange->body, values[ARG_BODY]);
    set_field(&exchange->on_done, values[ARG_ON_DONE]);
    set_field(&exchange->timeline, values[ARG_TIMELINE]);
    set_field(&exchange->on_output, values[ARG_ON_OUTPUT]);
    set_field(&exchange->on_first_output, values[ARG_ON_FIRST_OUTPUT]);
    set_field(&exchange->connection, Py_None);
    set_field(&exchange->failure, Py_None);
    exchange->done_at = NEVER;
    exchange->ready_at = NEVER;
    exchange->tcp_connect_ns = NEVER;
    exchange->tls_handshake_ns = NEVER;
    exchange->resend_count = 0;
    exchange->connect_attempts = 0;
    exchange->deadline = 0;
    exchange->bytes_sent = 0;
    exchange->bytes_received = 0;
    exchange->is_reported = 0;
    exchange->is_connection_reused = 0;
    return init_response_state(exchange);
}

static int exchange_init(PyObject *self, PyObject *args, PyObject *keywords)
{
    PyObject *values[ARGUMENTS] = {
        [ARG_REQUESTED_OUTPUT_TOKENS] = zero, [ARG_KEEP_TEXT] = Py_False,
        [ARG_KEEP_HEADERS] = Py_False,        [ARG_ON_OUTPUT] = Py_None,
        [ARG_ON_FIRST_OUTPUT] = Py_None,
    };
    if (!collect_arguments(args, keywords, values) || !are_valid_arguments(values)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "the arguments are not those of Exchange()");
        return -1;
    }
    return init_exchange((Exchange *)self, values);
}
