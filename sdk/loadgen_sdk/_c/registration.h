/* The types of the state of a response, and what Python registers for them. Part of _compiled.c.
 *
 * Each type is the base class of a class in Python. Its fields are members, so that Python reads
 * and writes them like any other attribute. */

/* Describe a field that Python can read and write: an object, a number or a flag. */
#define OBJECT_MEMBER(T, name) {#name, T_OBJECT_EX, offsetof(T, name), 0, NULL}
#define NUMBER_MEMBER(T, name) {#name, T_LONGLONG, offsetof(T, name), 0, NULL}
#define FLAG_MEMBER(T, name) {#name, T_BOOL, offsetof(T, name), 0, NULL}

/* -- ExchangeState ----------------------------------------------------------------------------- */

/* Visit the objects of this type for the garbage collector. */
static int exchange_traverse(PyObject *self, visitproc visit, void *arg)
{
    Exchange *exchange = (Exchange *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(exchange->request);
    Py_VISIT(exchange->head);
    Py_VISIT(exchange->body);
    Py_VISIT(exchange->timeline);
    Py_VISIT(exchange->on_output);
    Py_VISIT(exchange->on_first_output);
    Py_VISIT(exchange->on_done);
    Py_VISIT(exchange->connection);
    Py_VISIT(exchange->failure);
    Py_VISIT(exchange->response);
    Py_VISIT(exchange->decoder);
    Py_VISIT(exchange->reader);
    Py_VISIT(exchange->response_body_parts);
    Py_VISIT(exchange->template);
    Py_VISIT(exchange->incomplete_chunk);

    return 0;
}

/* Release the objects of this type. */
static int exchange_clear(PyObject *self)
{
    Exchange *exchange = (Exchange *)self;
    Py_CLEAR(exchange->request);
    Py_CLEAR(exchange->head);
    Py_CLEAR(exchange->body);
    Py_CLEAR(exchange->timeline);
    Py_CLEAR(exchange->on_output);
    Py_CLEAR(exchange->on_first_output);
    Py_CLEAR(exchange->on_done);
    Py_CLEAR(exchange->connection);
    Py_CLEAR(exchange->failure);
    Py_CLEAR(exchange->response);
    Py_CLEAR(exchange->decoder);
    Py_CLEAR(exchange->reader);
    Py_CLEAR(exchange->response_body_parts);
    Py_CLEAR(exchange->template);
    Py_CLEAR(exchange->incomplete_chunk);

    return 0;
}

static void exchange_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    exchange_clear(self);
    free_object(self);
}

static PyMethodDef exchange_methods[] = {
    {"reset_response", exchange_reset_response, METH_NOARGS, NULL},
    {"feed_reads", exchange_feed_reads, METH_O, NULL},
    {NULL},
};

static PyMemberDef exchange_members[] = {
    OBJECT_MEMBER(Exchange, request),
    OBJECT_MEMBER(Exchange, head),
    OBJECT_MEMBER(Exchange, body),
    OBJECT_MEMBER(Exchange, timeline),
    OBJECT_MEMBER(Exchange, on_output),
    OBJECT_MEMBER(Exchange, on_first_output),
    OBJECT_MEMBER(Exchange, on_done),
    OBJECT_MEMBER(Exchange, connection),
    OBJECT_MEMBER(Exchange, failure),
    OBJECT_MEMBER(Exchange, response),
    OBJECT_MEMBER(Exchange, decoder),
    OBJECT_MEMBER(Exchange, reader),
    OBJECT_MEMBER(Exchange, response_body_parts),
    OBJECT_MEMBER(Exchange, template),
    OBJECT_MEMBER(Exchange, incomplete_chunk),
    NUMBER_MEMBER(Exchange, due_at),
    NUMBER_MEMBER(Exchange, requested_output_tokens),
    NUMBER_MEMBER(Exchange, connect_attempts),
    NUMBER_MEMBER(Exchange, resend_count),
    NUMBER_MEMBER(Exchange, ready_at),
    NUMBER_MEMBER(Exchange, tcp_connect_ns),
    NUMBER_MEMBER(Exchange, tls_handshake_ns),
    NUMBER_MEMBER(Exchange, sent_at),
    NUMBER_MEMBER(Exchange, bytes_sent),
    NUMBER_MEMBER(Exchange, deadline),
    NUMBER_MEMBER(Exchange, done_at),
    NUMBER_MEMBER(Exchange, response_body_bytes),
    NUMBER_MEMBER(Exchange, bytes_received),
    NUMBER_MEMBER(Exchange, head_received_at),
    NUMBER_MEMBER(Exchange, last_event_read_at),
    NUMBER_MEMBER(Exchange, client_lag),
    FLAG_MEMBER(Exchange, is_stream_requested),
    FLAG_MEMBER(Exchange, keep_text),
    FLAG_MEMBER(Exchange, keep_headers),
    FLAG_MEMBER(Exchange, is_connection_reused),
    FLAG_MEMBER(Exchange, is_reported),
    FLAG_MEMBER(Exchange, is_event_stream),
    FLAG_MEMBER(Exchange, has_kernel_timestamp),
    FLAG_MEMBER(Exchange, can_batch_reads),
    FLAG_MEMBER(Exchange, is_at_chunk_start),
    FLAG_MEMBER(Exchange, has_split_chunks),
    {NULL},
};

static PyType_Slot exchange_slots[] = {
    {Py_tp_init, exchange_init},
    {Py_tp_dealloc, exchange_dealloc},
    {Py_tp_traverse, exchange_traverse},
    {Py_tp_clear, exchange_clear},
    {Py_tp_members, exchange_members},
    {Py_tp_methods, exchange_methods},
    {0, NULL},
};

static PyType_Spec exchange_spec = {
    .name = "loadgen_sdk._compiled.exchange_state",
    .basicsize = sizeof(Exchange),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = exchange_slots,
};

/* -- ResponseState ----------------------------------------------------------------------------- */

/* Visit the objects of this type for the garbage collector. */
static int response_traverse(PyObject *self, visitproc visit, void *arg)
{
    ResponseParser *response = (ResponseParser *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(response->_bytes_left);
    Py_VISIT(response->_mode);
    Py_VISIT(response->_unparsed);
    Py_VISIT(response->headers);
    Py_VISIT(response->idle_limit_s);
    Py_VISIT(response->surplus);
    Py_VISIT(response->uses_left);

    return 0;
}

/* Release the objects of this type. */
static int response_clear(PyObject *self)
{
    ResponseParser *response = (ResponseParser *)self;
    Py_CLEAR(response->_bytes_left);
    Py_CLEAR(response->_mode);
    Py_CLEAR(response->_unparsed);
    Py_CLEAR(response->headers);
    Py_CLEAR(response->idle_limit_s);
    Py_CLEAR(response->surplus);
    Py_CLEAR(response->uses_left);

    return 0;
}

static void response_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    response_clear(self);
    free_object(self);
}

static PyMemberDef response_members[] = {
    OBJECT_MEMBER(ResponseParser, _bytes_left),
    OBJECT_MEMBER(ResponseParser, _mode),
    OBJECT_MEMBER(ResponseParser, _unparsed),
    OBJECT_MEMBER(ResponseParser, headers),
    OBJECT_MEMBER(ResponseParser, idle_limit_s),
    OBJECT_MEMBER(ResponseParser, surplus),
    OBJECT_MEMBER(ResponseParser, uses_left),
    NUMBER_MEMBER(ResponseParser, status),
    FLAG_MEMBER(ResponseParser, is_chunked),
    FLAG_MEMBER(ResponseParser, is_complete),
    FLAG_MEMBER(ResponseParser, is_reusable),
    FLAG_MEMBER(ResponseParser, ends_with_connection),
    {NULL},
};

static PyType_Slot response_slots[] = {
    {Py_tp_init, response_init},         {Py_tp_dealloc, response_dealloc},
    {Py_tp_traverse, response_traverse}, {Py_tp_clear, response_clear},
    {Py_tp_members, response_members},   {0, NULL},
};

static PyType_Spec response_spec = {
    .name = "loadgen_sdk._compiled.response_state",
    .basicsize = sizeof(ResponseParser),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = response_slots,
};

/* -- DecoderState ------------------------------------------------------------------------------ */

/* Visit the objects of this type for the garbage collector. */
static int decoder_traverse(PyObject *self, visitproc visit, void *arg)
{
    SseDecoder *decoder = (SseDecoder *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(decoder->_earlier_reads);
    Py_VISIT(decoder->_earlier_bytes);
    Py_VISIT(decoder->_unparsed);
    return 0;
}

/* Release the objects of this type. */
static int decoder_clear(PyObject *self)
{
    SseDecoder *decoder = (SseDecoder *)self;
    Py_CLEAR(decoder->_earlier_reads);
    Py_CLEAR(decoder->_earlier_bytes);
    Py_CLEAR(decoder->_unparsed);
    return 0;
}

static void decoder_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    decoder_clear(self);
    free_object(self);
}

static PyMemberDef decoder_members[] = {
    OBJECT_MEMBER(SseDecoder, _earlier_reads), OBJECT_MEMBER(SseDecoder, _earlier_bytes),
    OBJECT_MEMBER(SseDecoder, _unparsed),      FLAG_MEMBER(SseDecoder, _is_after_cr),
    FLAG_MEMBER(SseDecoder, has_started),      {NULL},
};

static PyType_Slot decoder_slots[] = {
    {Py_tp_init, decoder_init},         {Py_tp_dealloc, decoder_dealloc},
    {Py_tp_traverse, decoder_traverse}, {Py_tp_clear, decoder_clear},
    {Py_tp_members, decoder_members},   {0, NULL},
};

static PyType_Spec decoder_spec = {
    .name = "loadgen_sdk._compiled.decoder_state",
    .basicsize = sizeof(SseDecoder),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = decoder_slots,
};

/* -- ResponseReaderState ----------------------------------------------------------------------- */

/* Visit the objects of this type for the garbage collector. */
static int reader_traverse(PyObject *self, visitproc visit, void *arg)
{
    ResponseReader *reader = (ResponseReader *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(reader->timeline);
    Py_VISIT(reader->on_output);
    Py_VISIT(reader->text_pieces);
    Py_VISIT(reader->reasoning_pieces);
    Py_VISIT(reader->tool_deltas);
    Py_VISIT(reader->usage_counts);
    Py_VISIT(reader->finish_reason);
    Py_VISIT(reader->error);
    Py_VISIT(reader->parse_error);
    Py_VISIT(reader->remark);
    Py_VISIT(reader->response_id);
    Py_VISIT(reader->server_timing);
    Py_VISIT(reader->template);

    return 0;
}

/* Release the objects of this type. */
static int reader_clear(PyObject *self)
{
    ResponseReader *reader = (ResponseReader *)self;
    Py_CLEAR(reader->timeline);
    Py_CLEAR(reader->on_output);
    Py_CLEAR(reader->text_pieces);
    Py_CLEAR(reader->reasoning_pieces);
    Py_CLEAR(reader->tool_deltas);
    Py_CLEAR(reader->usage_counts);
    Py_CLEAR(reader->finish_reason);
    Py_CLEAR(reader->error);
    Py_CLEAR(reader->parse_error);
    Py_CLEAR(reader->remark);
    Py_CLEAR(reader->response_id);
    Py_CLEAR(reader->server_timing);
    Py_CLEAR(reader->template);

    return 0;
}

static void reader_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    reader_clear(self);
    free_object(self);
}

/* ResponseReaderState.last_token_uncertainty: the uncertainty of the timestamp of the last output
 * event, in ns. The uncertain timestamp may be that of an earlier event. */
static PyObject *reader_last_token_uncertainty(PyObject *self, void *Py_UNUSED(closure))
{
    const ResponseReader *reader = (ResponseReader *)self;
    int is_last_token_uncertain = reader->uncertain_timestamp == reader->last_token;
    return PyLong_FromLongLong(is_last_token_uncertain ? reader->timestamp_uncertainty : 0);
}

static PyGetSetDef reader_properties[] = {
    {"last_token_uncertainty", reader_last_token_uncertainty, NULL, NULL, NULL},
    {NULL},
};

static PyMemberDef reader_members[] = {
    OBJECT_MEMBER(ResponseReader, timeline),
    OBJECT_MEMBER(ResponseReader, on_output),
    OBJECT_MEMBER(ResponseReader, text_pieces),
    OBJECT_MEMBER(ResponseReader, reasoning_pieces),
    OBJECT_MEMBER(ResponseReader, tool_deltas),
    OBJECT_MEMBER(ResponseReader, usage_counts),
    OBJECT_MEMBER(ResponseReader, finish_reason),
    OBJECT_MEMBER(ResponseReader, error),
    OBJECT_MEMBER(ResponseReader, parse_error),
    OBJECT_MEMBER(ResponseReader, remark),
    OBJECT_MEMBER(ResponseReader, response_id),
    OBJECT_MEMBER(ResponseReader, server_timing),
    OBJECT_MEMBER(ResponseReader, template),
    NUMBER_MEMBER(ResponseReader, first_event),
    NUMBER_MEMBER(ResponseReader, first_token),
    NUMBER_MEMBER(ResponseReader, first_token_uncertainty),
    NUMBER_MEMBER(ResponseReader, first_answer),
    NUMBER_MEMBER(ResponseReader, last_token),
    NUMBER_MEMBER(ResponseReader, end),
    NUMBER_MEMBER(ResponseReader, max_gap),
    NUMBER_MEMBER(ResponseReader, max_gap_uncertainty),
    NUMBER_MEMBER(ResponseReader, uncertain_timestamp),
    NUMBER_MEMBER(ResponseReader, timestamp_uncertainty),
    NUMBER_MEMBER(ResponseReader, output_events),
    NUMBER_MEMBER(ResponseReader, unknown_output_events),
    NUMBER_MEMBER(ResponseReader, first_event_tokens),
    NUMBER_MEMBER(ResponseReader, plain_events),
    NUMBER_MEMBER(ResponseReader, learned_templates),
    {NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_init, reader_init},
    {Py_tp_dealloc, reader_dealloc},
    {Py_tp_traverse, reader_traverse},
    {Py_tp_clear, reader_clear},
    {Py_tp_members, reader_members},
    {Py_tp_getset, reader_properties},
    {0, NULL},
};

static PyType_Spec reader_spec = {
    .name = "loadgen_sdk._compiled.reader_state",
    .basicsize = sizeof(ResponseReader),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = reader_slots,
};

/* -- what Python registers --------------------------------------------------------------------- */

/* Set a global class to one that Python has registered, with a new reference. */
static void set_class(PyTypeObject **global, PyObject *class)
{
    set_field((PyObject **)global, class);
}

/* The Python function register_classes(exchange, response, decoder, reader, known_heads,
 * decode_usage, normal_finish_reasons), which tells this module what it uses of Python.
 *
 * The first four are the classes in Python that are derived from the types above. `known_heads` is
 * the cache of parsed response heads, `decode_usage` a function that decodes the JSON of a token
 * usage, and `normal_finish_reasons` the set of those that end a response without an error. */
static PyObject *register_classes(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *exchange, *response, *decoder, *reader;
    PyObject *heads, *usage_decoder, *finish_reasons;

    /* "O!" is an object of the type before it: four classes and a dict. "O" is any object. */
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!OO", &PyType_Type, &exchange, &PyType_Type, &response,
                          &PyType_Type, &decoder, &PyType_Type, &reader, &PyDict_Type, &heads,
                          &usage_decoder, &finish_reasons))
        return NULL;

    set_class(&exchange_class, exchange);
    set_class(&response_class, response);
    set_class(&decoder_class, decoder);
    set_class(&reader_class, reader);
    set_field(&known_heads, heads);
    set_field(&decode_usage, usage_decoder);
    set_field(&normal_finish_reasons, finish_reasons);
    clear_usage_cache(); /* The usages in it were decoded by the previous function. */
    Py_RETURN_NONE;
}

/* Create the strings that are used as names of Python attributes and arguments, and as values. They
 * are interned, so that they are compared and looked up fast. Return 0, or -1 with an exception. */
static int create_strings(void)
{
    static const struct {
        PyObject **variable;
        const char *text;
    } strings[] = {
        {&no_text, ""},
        {&mode_head, "head"},
        {&mode_chunked, "chunked"},
        {&mode_end, "end"},
        {&event_stream, "text/event-stream"},
        {&name_prompt_tokens, "prompt_tokens"},
        {&name_completion_tokens, "completion_tokens"},
        {&name_gaps, "gaps"},
        {&name_timestamps, "timestamps"},
        {&name_uncertainties, "uncertainties"},
        {&name_response_completed, "response_completed"},
        {&name_pop, "pop"},
        {&name_append, "append"},
        {&name_content_type, "content-type"},
        {&name_content_encoding, "content-encoding"},
        {&argument_names[ARG_REQUEST], "request"},
        {&argument_names[ARG_HEAD], "head"},
        {&argument_names[ARG_BODY], "body"},
        {&argument_names[ARG_DUE_AT], "due_at"},
        {&argument_names[ARG_ON_DONE], "on_done"},
        {&argument_names[ARG_TIMELINE], "timeline"},
        {&argument_names[ARG_IS_STREAM_REQUESTED], "is_stream_requested"},
        {&argument_names[ARG_REQUESTED_OUTPUT_TOKENS], "requested_output_tokens"},
        {&argument_names[ARG_KEEP_TEXT], "keep_text"},
        {&argument_names[ARG_KEEP_HEADERS], "keep_headers"},
        {&argument_names[ARG_ON_OUTPUT], "on_output"},
        {&argument_names[ARG_ON_FIRST_OUTPUT], "on_first_output"},
    };
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++) {
        PyObject *string = PyUnicode_InternFromString(strings[i].text);
        if (string == NULL)
            return -1;
        *strings[i].variable = string;
    }

    return 0;
}

/* Create the Python objects that are used as constants: strings, 0, and b"". Return 0, or -1 with
 * an exception. */
static int create_constants(void)
{
    if (create_strings() < 0)
        return -1;
    zero = PyLong_FromLong(0);
    if (zero == NULL)
        return -1;
    no_bytes = PyBytes_FromStringAndSize("", 0);
    return no_bytes == NULL ? -1 : 0;
}
