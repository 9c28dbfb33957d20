/* What an answer is in Python: the types of its state, the values and names that the functions need. Part of _compiled.c. */

/* Reading.last_token_error */
static PyObject *reader_last_token_error(PyObject *self, void *Py_UNUSED(none))
{
    const ResponseReader *reader = (ResponseReader *)self;
    return PyLong_FromLongLong(reader->unsure_at == reader->last_token ? reader->unsure_error : 0);
}

static PyGetSetDef reader_computed[] = {{"last_token_error", reader_last_token_error, NULL, NULL, NULL}, {NULL}},
                   exchange_computed[] = {{NULL}}, response_computed[] = {{NULL}}, decoder_computed[] = {{NULL}};

STATE_TYPE(exchange, Exchange, EXCHANGE)
STATE_TYPE(response, ResponseParser, RESPONSE_PARSER)
STATE_TYPE(decoder, SseDecoder, SSE_DECODER)
STATE_TYPE(reader, ResponseReader, RESPONSE_READER)

/* What an answer is in Python: the classes with the fields above, the heads that are known, the decoder of a usage, the
   reasons to finish. */
static PyObject *register_classes(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *exchange, *response, *decoder, *reader, *heads, *usage, *ends;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!OO", &PyType_Type, &exchange, &PyType_Type, &response, &PyType_Type, &decoder, &PyType_Type, &reader,
                          &PyDict_Type, &heads, &usage, &ends))
        return NULL;
    PyObject *given[] = {exchange, response, decoder, reader, heads, usage, ends};
    PyObject **places[] = {(PyObject **)&exchange_class, (PyObject **)&response_class, (PyObject **)&decoder_class, (PyObject **)&reader_class,
                           &known_heads, &decode_usage, &endings};
    for (int i = 0; i < 7; i++) {
        Py_INCREF(given[i]);
        set_stolen(places[i], given[i]);
    }
    for (int i = 0; i < CACHED_USAGES; i++)
        Py_CLEAR(usages[i].decoded);
    Py_RETURN_NONE;
}

static int create_constants(void)
{
    static const struct {
        PyObject **place;
        const char *text;
    } texts[] = {{&no_text, ""}, {&mode_head, "head"}, {&mode_chunked, "chunked"}, {&mode_end, "end"},
                 
                 {&name_prompt_tokens, "prompt_tokens"}, {&name_completion_tokens, "completion_tokens"},
                 {&event_stream, "text/event-stream"}, {&name_gaps, "gaps"}, {&name_instants, "instants"},
                 {&name_response_completed, "response_completed"},
                 
                 {&name_pop, "pop"}, {&name_append, "append"}, 
                 {&name_errors, "errors"}, {&name_content_type, "content-type"},
                 {&name_content_encoding, "content-encoding"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if ((*texts[i].place = PyUnicode_InternFromString(texts[i].text)) == NULL)
            return -1;
    static const char *const names[ARGUMENTS] = {"request", "head",         "payload",   "due",          "on_done", "flow",
                                             "stream",  "asked_output", "keep_text", "keep_headers", "sink",    "on_first"};
    for (int i = 0; i < ARGUMENTS; i++)
        if ((argument_names[i] = PyUnicode_InternFromString(names[i])) == NULL)
            return -1;
    never = PyLong_FromLong(-1);
    zero = PyLong_FromLong(0);
    no_bytes = PyBytes_FromStringAndSize(NULL, 0);
    return never == NULL || zero == NULL || no_bytes == NULL ? -1 : 0;
}
