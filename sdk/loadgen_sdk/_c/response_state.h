/* The state of a response: the fields of `Exchange`, `ResponseParser`, `SseDecoder` and
 * `ResponseReader`, and their initial values. Part of _compiled.c.
 *
 * The reference implementation is transport/response_state.py and wire_formats/reference.py, which
 * describe the fields. Each struct is the base class of a class in Python, whose methods use the
 * same fields. */

/* A request and its response. */
typedef struct {
    PyObject_HEAD

    /* What is sent, and what the caller wants to know of the response */
    PyObject *request;
    PyObject *head;
    PyObject *body;
    PyObject *timeline;
    PyObject *on_output;
    PyObject *on_first_output;
    PyObject *on_done;
    long long due_at;
    long long requested_output_tokens;
    char is_stream_requested;
    char keep_text;
    char keep_headers;

    /* Connecting and sending */
    PyObject *connection;
    long long connect_attempts;
    long long resend_count;
    long long ready_at;
    long long tcp_connect_ns;
    long long tls_handshake_ns;
    long long sent_at;
    long long bytes_sent;
    long long deadline;
    char is_connection_reused;

    /* The end of the exchange */
    PyObject *failure;
    long long done_at;
    char is_reported;

    /* The parsers of the response, and what has arrived */
    PyObject *response;
    PyObject *decoder;
    PyObject *reader;
    PyObject *response_body_parts;
    long long response_body_bytes;
    long long bytes_received;
    long long head_received_at;
    long long last_event_read_at;
    long long client_lag;
    char is_event_stream;
    char has_kernel_timestamp;

    /* How the next read may be treated */
    PyObject *template;
    PyObject *incomplete_chunk;
    char can_batch_reads;
    char is_at_chunk_start;
    char has_split_chunks;
} Exchange;

/* Parses an HTTP response. */
typedef struct {
    PyObject_HEAD
    PyObject *_bytes_left;
    PyObject *_mode;
    PyObject *_unparsed;
    PyObject *headers;
    PyObject *idle_limit_s;
    PyObject *surplus;
    PyObject *uses_left;
    long long status;
    char is_chunked;
    char is_complete;
    char is_reusable;
    char ends_with_connection;
} ResponseParser;

/* Decodes server-sent events (SSE). */
typedef struct {
    PyObject_HEAD
    PyObject *_earlier_reads;
    PyObject *_earlier_bytes;
    PyObject *_unparsed;
    char _is_after_cr;
    char has_started;
} SseDecoder;

/* Reads what the events of a response say. */
typedef struct {
    PyObject_HEAD

    /* Where output is passed on or kept */
    PyObject *timeline;
    PyObject *on_output;
    PyObject *text_pieces;
    PyObject *reasoning_pieces;
    PyObject *tool_deltas;

    /* Timestamps and their uncertainties */
    long long first_event;
    long long first_token;
    long long first_token_uncertainty;
    long long first_answer;
    long long last_token;
    long long end;
    long long max_gap;
    long long max_gap_uncertainty;
    long long uncertain_timestamp;
    long long timestamp_uncertainty;

    /* What the response says */
    PyObject *usage_counts;
    PyObject *finish_reason;
    PyObject *error;
    PyObject *parse_error;
    PyObject *remark;
    PyObject *response_id;
    PyObject *server_timing;
    long long output_events;
    long long unknown_output_events;
    long long first_event_tokens;

    /* The recognition of plain events */
    PyObject *template;
    long long plain_events;
    long long learned_templates;
} ResponseReader;

/* -- constants --------------------------------------------------------------------------------- */

/* A response that is expected to have at most this many events learns no template of plain events,
 * because learning it would cost more than it saves. */
enum { LAST_EVENTS = 4 };

/* A value of `ResponseReader.learned_templates` with which no template is learned. */
#define NO_MORE_TEMPLATES (1LL << 60)

/* A time that has not come yet. */
#define NEVER (-1)

/* What `register_classes` has received from Python. */
static PyTypeObject *exchange_class;
static PyTypeObject *response_class;
static PyTypeObject *decoder_class;
static PyTypeObject *reader_class;
static PyObject *known_heads;           /* a dict: the lines of a head, and the parsed head */
static PyObject *decode_usage;          /* a function that decodes the JSON of a usage */
static PyObject *normal_finish_reasons; /* a set */

/* Initial values of fields. */
static PyObject *zero;
static PyObject *no_text;
static PyObject *no_bytes;

/* Interned strings: values that are compared, and the names of attributes and methods. */
static PyObject *mode_head;
static PyObject *mode_chunked;
static PyObject *mode_end;
static PyObject *event_stream;
static PyObject *name_prompt_tokens;
static PyObject *name_completion_tokens;
static PyObject *name_response_completed;
static PyObject *name_pop;
static PyObject *name_append;
static PyObject *name_gaps;
static PyObject *name_timestamps;
static PyObject *name_uncertainties;
static PyObject *name_content_type;
static PyObject *name_content_encoding;

/* -- initial values ---------------------------------------------------------------------------- */

/* Set the fields of a parser that expects the head of a response. Return 0, or -1 with an
 * exception. */
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

/* Set the fields of a decoder that expects the first event. Return 0, or -1 with an exception. */
static int init_decoder(SseDecoder *decoder)
{
    if (set_new_list(&decoder->_earlier_reads) < 0)
        return -1;
    set_field(&decoder->_earlier_bytes, zero);
    set_field(&decoder->_unparsed, no_bytes);
    decoder->_is_after_cr = 0;
    decoder->has_started = 0;
    return 0;
}

/* Set the lists of a reader in which texts are kept. `text_pieces` and `reasoning_pieces` are None
 * if the text is not kept. Return 0, or -1 with an exception. */
static int init_text_lists(ResponseReader *reader, int keep_text)
{
    if (set_new_list(&reader->tool_deltas) < 0)
        return -1;
    if (!keep_text) {
        set_field(&reader->text_pieces, Py_None);
        set_field(&reader->reasoning_pieces, Py_None);
        return 0;
    }
    if (set_new_list(&reader->text_pieces) < 0)
        return -1;

    return set_new_list(&reader->reasoning_pieces);
}

/* Set the timestamps of a reader to those of a response without events. */
static void init_timestamps(ResponseReader *reader)
{
    reader->first_event = NEVER;
    reader->first_token = NEVER;
    reader->first_token_uncertainty = 0;
    reader->first_answer = NEVER;
    reader->last_token = NEVER;
    reader->end = NEVER;
    reader->max_gap = 0;
    reader->max_gap_uncertainty = 0;
    reader->uncertain_timestamp = NEVER;
    reader->timestamp_uncertainty = 0;
}

/* Set what a reader has learned from a response without events. */
static void init_content(ResponseReader *reader)
{
    set_field(&reader->error, no_text);
    set_field(&reader->finish_reason, no_text);
    set_field(&reader->parse_error, no_text);
    set_field(&reader->remark, no_text);
    set_field(&reader->response_id, no_text);
    set_field(&reader->server_timing, Py_None);
    set_field(&reader->usage_counts, Py_None);
    reader->output_events = 0;
    reader->unknown_output_events = 0;
    reader->first_event_tokens = 0;
}

/* Set the fields of a reader that expects the first event of a response.
 *
 * `timeline` gets the time of each output event. `on_output` is called with each output, or is
 * None. With `expects_few_events`, the reader does not learn a template to recognise similar
 * events, because that would cost more than it saves. Return 0, or -1 with an exception. */
static int init_reader(ResponseReader *reader, PyObject *timeline, int keep_text,
                       PyObject *on_output, int expects_few_events)
{
    if (init_text_lists(reader, keep_text) < 0)
        return -1;

    set_field(&reader->timeline, timeline);
    set_field(&reader->on_output, on_output);
    init_timestamps(reader);
    init_content(reader);
    set_field(&reader->template, Py_None);
    reader->plain_events = 0;
    reader->learned_templates = expects_few_events ? NO_MORE_TEMPLATES : 0;

    return 0;
}

/* Set a field to a new instance of a class, of which all bytes of the fields are 0. Return 0, or -1
 * with an exception. */
static int set_new_instance(PyObject **field, PyTypeObject *class)
{
    if (class == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the classes of a response were not registered");
        return -1;
    }

    PyObject *instance = PyType_GenericAlloc(class, 0);
    if (instance == NULL)
        return -1;

    set_field_stealing(field, instance);
    return 0;
}

/* Create the parser, the decoder and the reader of the response to a request. Return 0, or -1 with
 * an exception. */
static int create_response_parsers(Exchange *exchange)
{
    if (set_new_instance(&exchange->response, response_class) < 0 ||
        set_new_instance(&exchange->decoder, decoder_class) < 0 ||
        set_new_instance(&exchange->reader, reader_class) < 0)
        return -1;
    if (init_response((ResponseParser *)exchange->response) < 0 ||
        init_decoder((SseDecoder *)exchange->decoder) < 0)
        return -1;

    long long expected_events = exchange->requested_output_tokens; /* or 0 if unknown */
    int expects_few_events = expected_events > 0 && expected_events <= LAST_EVENTS;
    return init_reader((ResponseReader *)exchange->reader, exchange->timeline, exchange->keep_text,
                       exchange->on_output, expects_few_events);
}

/* Start with an empty response, before the request is sent or sent again. Return 0, or -1 with an
 * exception. */
static int reset_response(Exchange *exchange)
{
    /* What has arrived */
    exchange->sent_at = NEVER;
    exchange->head_received_at = NEVER;
    exchange->client_lag = 0;
    exchange->last_event_read_at = 0;
    exchange->response_body_bytes = 0;
    exchange->has_kernel_timestamp = 0;
    exchange->is_event_stream = 0;
    if (set_new_list(&exchange->response_body_parts) < 0)
        return -1;

    /* How the next read may be treated */
    set_field(&exchange->template, Py_None);
    set_field(&exchange->incomplete_chunk, no_bytes);
    exchange->can_batch_reads = 0;
    exchange->is_at_chunk_start = 0;
    exchange->has_split_chunks = 0;

    return create_response_parsers(exchange);
}

/* -- the constructors -------------------------------------------------------------------------- */

static int response_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    return PyArg_ParseTuple(args, "") ? init_response((ResponseParser *)self) : -1;
}

static int decoder_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    return PyArg_ParseTuple(args, "") ? init_decoder((SseDecoder *)self) : -1;
}

/* ResponseReader(timeline, keep_text=False, on_output=None, *, expects_few_events=False) */
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

/* The arguments of Exchange(), in their order. */
enum ExchangeArgument {
    ARG_REQUEST,
    ARG_HEAD,
    ARG_BODY,
    ARG_DUE_AT,
    ARG_ON_DONE,
    ARG_TIMELINE,
    POSITIONAL_ARGUMENTS, /* The following ones must be passed by name. */
    ARG_IS_STREAM_REQUESTED = POSITIONAL_ARGUMENTS,
    ARG_REQUESTED_OUTPUT_TOKENS,
    ARG_KEEP_TEXT,
    ARG_KEEP_HEADERS,
    ARG_ON_OUTPUT,
    ARG_ON_FIRST_OUTPUT,
    ARGUMENTS,
};

/* The names of the arguments as interned Python strings, with which they are looked up faster than
 * by PyArg_ParseTupleAndKeywords, which creates a string for each look-up. */
static PyObject *argument_names[ARGUMENTS];

/* Copy the positional arguments of a call to `values` (borrowed). Return whether there are not too
 * many of them. */
static int collect_positional_arguments(PyObject *args, PyObject **values)
{
    Py_ssize_t count = PyTuple_Size(args);
    if (count > POSITIONAL_ARGUMENTS)
        return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        values[i] = PyTuple_GetItem(args, i);
    return 1;
}

/* Copy the keyword arguments of a call to `values` (borrowed), if they are not passed by position.
 *
 * `keywords` is a dict, or NULL without such arguments. An argument that is not in it keeps its
 * default value. Return whether all names in the dict are those of such arguments. */
static int collect_keyword_arguments(PyObject *keywords, Py_ssize_t positional_count,
                                     PyObject **values)
{
    if (keywords == NULL)
        return 1;

    Py_ssize_t known_count = 0;
    for (Py_ssize_t i = positional_count; i < ARGUMENTS; i++) {
        PyObject *value = PyDict_GetItemWithError(keywords, argument_names[i]);
        if (value == NULL)
            continue;
        values[i] = value;
        known_count++;
    }

    return known_count == PyDict_Size(keywords);
}

/* Return whether the arguments of an exchange are complete and those that are read as C values have
 * the right types. */
static int are_valid_arguments(PyObject *const *values)
{
    for (int i = 0; i < ARGUMENTS; i++) {
        if (values[i] == NULL)
            return 0;
    }
    return PyLong_Check(values[ARG_REQUESTED_OUTPUT_TOKENS]) &&
           PyBool_Check(values[ARG_KEEP_TEXT]) && PyBool_Check(values[ARG_KEEP_HEADERS]);
}

/* Set the fields of an exchange that are arguments of its constructor.
 *
 * `values` has the checked arguments in the order of `enum ExchangeArgument`. Return 0, or -1 with
 * an exception if `due_at` is no int of 64 bits or `is_stream_requested` has no truth value. */
static int set_exchange_arguments(Exchange *exchange, PyObject *const *values)
{
    int is_stream_requested = PyObject_IsTrue(values[ARG_IS_STREAM_REQUESTED]);
    if (is_stream_requested < 0)
        return -1;

    exchange->is_stream_requested = (char)is_stream_requested;
    exchange->due_at = PyLong_AsLongLong(values[ARG_DUE_AT]);
    if (exchange->due_at == -1 && PyErr_Occurred())
        return -1;

    /* A number of tokens beyond 64 bits is no error. It becomes -1, like an unknown number. */
    int overflow;
    exchange->requested_output_tokens =
        PyLong_AsLongLongAndOverflow(values[ARG_REQUESTED_OUTPUT_TOKENS], &overflow);
    exchange->keep_text = values[ARG_KEEP_TEXT] == Py_True;
    exchange->keep_headers = values[ARG_KEEP_HEADERS] == Py_True;
    set_field(&exchange->request, values[ARG_REQUEST]);
    set_field(&exchange->head, values[ARG_HEAD]);
    set_field(&exchange->body, values[ARG_BODY]);
    set_field(&exchange->on_done, values[ARG_ON_DONE]);
    set_field(&exchange->timeline, values[ARG_TIMELINE]);
    set_field(&exchange->on_output, values[ARG_ON_OUTPUT]);
    set_field(&exchange->on_first_output, values[ARG_ON_FIRST_OUTPUT]);

    return 0;
}

/* Set the fields in which the pool records how a request was sent and how it ended. It has no
 * connection yet. */
static void init_connection_fields(Exchange *exchange)
{
    set_field(&exchange->connection, Py_None);
    exchange->connect_attempts = 0;
    exchange->resend_count = 0;
    exchange->is_connection_reused = 0;
    exchange->ready_at = NEVER;
    exchange->tcp_connect_ns = NEVER;
    exchange->tls_handshake_ns = NEVER;
    exchange->bytes_sent = 0;
    exchange->bytes_received = 0;
    exchange->deadline = 0;

    set_field(&exchange->failure, Py_None);
    exchange->done_at = NEVER;
    exchange->is_reported = 0;
}

/* Collect the arguments of Exchange() into `values`, which has the default values of the optional
 * ones. Return 0, or -1 with an exception if an argument is missing, unknown or of a wrong type. */
static int collect_arguments(PyObject *args, PyObject *keywords, PyObject **values)
{
    if (collect_positional_arguments(args, values) &&
        collect_keyword_arguments(keywords, PyTuple_Size(args), values) &&
        are_valid_arguments(values))
        return 0;

    int has_raised = PyErr_Occurred() != NULL; /* when a keyword was looked up */
    if (!has_raised)
        PyErr_SetString(PyExc_TypeError,
                        "Exchange() was called with missing, unknown or invalid arguments");

    return -1;
}

/* Exchange(request, head, body, due_at, on_done, timeline, *, is_stream_requested, ...): a request
 * that was not sent yet. The other arguments are optional, with the default values below. */
static int exchange_init(PyObject *self, PyObject *args, PyObject *keywords)
{
    Exchange *exchange = (Exchange *)self;
    PyObject *values[ARGUMENTS] = {
        [ARG_REQUESTED_OUTPUT_TOKENS] = zero, [ARG_KEEP_TEXT] = Py_False,
        [ARG_KEEP_HEADERS] = Py_False,        [ARG_ON_OUTPUT] = Py_None,
        [ARG_ON_FIRST_OUTPUT] = Py_None,
    };
    if (collect_arguments(args, keywords, values) < 0)
        return -1;
    if (set_exchange_arguments(exchange, values) < 0)
        return -1;

    init_connection_fields(exchange);
    return reset_response(exchange);
}

/* ExchangeState.reset_response(): start with an empty response, before the request is sent
 * again. */
static PyObject *exchange_reset_response(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (reset_response((Exchange *)self) < 0)
        return NULL;
    Py_RETURN_NONE;
}
