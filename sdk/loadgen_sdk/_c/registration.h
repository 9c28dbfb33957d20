/* The types of the state of a response, and what Python registers for them. Part of _compiled.c. */

/* ResponseReaderState.last_token_uncertainty */
static PyObject *reader_last_token_uncertainty(PyObject *self, void *Py_UNUSED(closure))
{
    const ResponseReader *reader = (ResponseReader *)self;
    return PyLong_FromLongLong(
        reader->uncertain_timestamp == reader->last_token ? reader->timestamp_uncertainty : 0);
}

static PyGetSetDef exchange_computed[] = {{NULL}};
static PyGetSetDef response_computed[] = {{NULL}};
static PyGetSetDef decoder_computed[] = {{NULL}};
static PyGetSetDef reader_computed[] = {
    {"last_token_uncertainty", reader_last_token_uncertainty, NULL, NULL, NULL},
    {NULL},
};

STATE_TYPE(exchange, Exchange, EXCHANGE)
STATE_TYPE(response, ResponseParser, RESPONSE_PARSER)
STATE_TYPE(decoder, SseDecoder, SSE_DECODER)
STATE_TYPE(reader, ResponseReader, RESPONSE_READER)

/* register_classes(exchange, response, decoder, reader, known_heads, decode_usage, endings): the
 * subclasses in Python of the types above, the cache of parsed heads, the function that decodes a
 * usage, and the finish reasons that end a response normally. */
static PyObject *register_classes(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *exchange, *response, *decoder, *reader, *heads, *usage_decoder, *finish_reasons;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!OO", &PyType_Type, &exchange, &PyType_Type, &response,
                          &PyType_Type, &decoder, &PyType_Type, &reader, &PyDict_Type, &heads,
                          &usage_decoder, &finish_reasons))
        return NULL;
    set_field((PyObject **)&exchange_class, exchange);
    set_field((PyObject **)&response_class, response);
    set_field((PyObject **)&decoder_class, decoder);
    set_field((PyObject **)&reader_class, reader);
    set_field(&known_heads, heads);
    set_field(&decode_usage, usage_decoder);
    set_field(&endings, finish_reasons);
    for (int i = 0; i < CACHED_USAGES; i++)
        Py_CLEAR(usages[i].decoded);
    Py_RETURN_NONE;
}

/* Create the constants. Return -1 with an exception. */
static int create_constants(void)
{
    static const struct {
        PyObject **place;
        const char *text;
    } texts[] = {
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
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        *texts[i].place = PyUnicode_InternFromString(texts[i].text);
        if (*texts[i].place == NULL)
            return -1;
    }
    zero = PyLong_FromLong(0);
    no_bytes = PyBytes_FromStringAndSize(NULL, 0);
    return zero == NULL || no_bytes == NULL ? -1 : 0;
}
