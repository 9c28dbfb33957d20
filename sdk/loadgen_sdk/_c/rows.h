/* The end of a usual answer: its row. Part of _compiled.c. */

/* How a row of a run is written, as core/results/record.py says by `rows`: a letter of `struct` for each field, the codes
   of reasons to finish and of a server as a source, the header with which servers tell their times. */
enum { ROW_FIELDS = 53, ROW_PLACE = 8 };
static char row_letters[ROW_FIELDS];
static int row_bytes;
static PyObject *row_finish, *row_timing;
static long long row_other, row_server;

static int letter_bytes(char letter)
{
    return letter == 'q' ? 8 : letter == 'i' ? 4 : letter == 'h' ? 2 : letter == 'B' ? 1 : 0;
}

static PyObject *rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *letters;
    Py_ssize_t count;
    PyObject *finish, *timing;
    long long other, server;
    if (!PyArg_ParseTuple(args, "s#O!LLU", &letters, &count, &PyDict_Type, &finish, &other, &server, &timing))
        return NULL;
    int size = 0, known = count == ROW_FIELDS;
    for (int i = 0; known && i < ROW_FIELDS; i++) {
        known = letter_bytes(letters[i]);
        size += known;
    }
    if (!known) {
        PyErr_SetString(PyExc_ValueError, "a row with other fields than usual_row writes");
        return NULL;
    }
    memcpy(row_letters, letters, ROW_FIELDS);
    row_bytes = size;
    row_other = other;
    row_server = server;
    Py_INCREF(finish);
    Py_XDECREF(row_finish);
    row_finish = finish;
    Py_INCREF(timing);
    Py_XDECREF(row_timing);
    row_timing = timing;
    Py_RETURN_NONE;
}

/* An attribute that is a count of tokens; -1 where it is none. `*fits` becomes 0 where it is not there. */
static int64_t count_of(PyObject *owner, PyObject *name, int *fits)
{
    PyObject *value = PyObject_GetAttr(owner, name);
    int64_t count = -1;
    if (value == NULL)
        *fits = 0;
    else if (is_count(value))
        count = number_of(value, fits);
    Py_XDECREF(value);
    return count;
}

/* The first of two attributes that is not None, or None; a new reference, NULL with an exception. */
static PyObject *details(PyObject *usage, PyObject *name, PyObject *other)
{
    PyObject *found = PyObject_GetAttr(usage, name);
    if (found != Py_None)
        return found;
    Py_DECREF(found);
    return PyObject_GetAttr(usage, other);
}

/* UsageFields.usage, where prompt and output were told by their usual names: 1, 0 for another. -1: not told. */
typedef struct {
    int64_t input, output, cached, reasoning, written;
} Tokens;

static int usual_tokens(PyObject *usage, Tokens *tokens)
{
    int fits = 1;
    *tokens = (Tokens){.cached = -1, .reasoning = -1};
    tokens->input = count_of(usage, name_prompt_tokens, &fits);
    tokens->output = fits ? count_of(usage, name_completion_tokens, &fits) : -1;
    if (!fits || tokens->input < 0 || tokens->output < 0)
        return 0;
    PyObject *before = details(usage, name_prompt_details, name_input_details);
    PyObject *after = before == NULL ? NULL : details(usage, name_completion_details, name_output_details);
    PyObject *written = after == NULL ? NULL : PyObject_GetAttr(usage, name_created);
    if (written != NULL && before != Py_None) {
        PyObject *more = PyObject_GetAttr(before, name_cache_write);
        tokens->cached = count_of(before, name_cached, &fits);
        if (more != Py_None) {
            Py_DECREF(written);
            written = more;
        } else
            Py_DECREF(more);
    }
    if (written != NULL) {
        tokens->written = is_count(written) ? number_of(written, &fits) : -1;
        if (after != Py_None && fits)
            tokens->reasoning = count_of(after, name_reasoning, &fits);
    }
    fits = fits && written != NULL;
    Py_XDECREF(before);
    Py_XDECREF(after);
    Py_XDECREF(written);
    return fits;
}

/* What `row` of core/results/record.py makes of a Completion, from its exchange: the row, the time to the first token (-1
   without one), the end; from the start of the run. */
typedef struct {
    unsigned char bytes[8 * ROW_FIELDS];
    int64_t place[ROW_PLACE], ttft, ended;
} Row;

/* 0 where it failed, kept texts, or told what is not usual. */
static int write_row(Row *row, PyObject *of, int64_t start, PyObject *known)
{
    State *exchange = (State *)of;
    if (row_finish == NULL || exchange_class == NULL || Py_TYPE(of) != exchange_class)
        return 0;
    State *reading = (State *)exchange->field[X_reading], *response = (State *)exchange->field[X_response];
    if (exchange->field[X_failure] != Py_None || Py_TYPE((PyObject *)reading) != reading_class ||
        Py_TYPE((PyObject *)response) != response_class || reading->field[R_pieces] != Py_None ||
        reading->field[R_server_timing] != Py_None || reading->field[R_usage_counts] == Py_None ||
        !PyDict_Check(response->field[P_headers]) || PyDict_Contains(response->field[P_headers], row_timing) != 0)
        goto unusual;
    Tokens tokens;
    if (!usual_tokens(reading->field[R_usage_counts], &tokens))
        goto unusual;
    int fits = 1, at = 0;
    PyObject *code = PyDict_GetItemWithError(row_finish, reading->field[R_finish_reason]);
    if (code == NULL && PyErr_Occurred())
        goto unusual;
    int64_t due = number_of(exchange->field[X_due], &fits), value[ROW_FIELDS];
    int64_t built = count_of(known, name_tokens, &fits), asked = count_of(known, name_asked_output, &fits);
#define OF(state, name) number_of((state)->field[name], &fits)
    for (; at < ROW_PLACE; at++)
        value[at] = row->place[at];
    value[at++] = 0; /* ok */
    value[at++] = 0;
    value[at++] = OF(response, P_status);
    value[at++] = code == NULL ? row_other : number_of(code, &fits);
    value[at++] = due - start;
    const int64_t instants[] = {
        OF(exchange, X_ready), OF(exchange, X_sent), OF(exchange, X_first_byte), OF(reading, R_first_event),
        OF(reading, R_first_token), OF(reading, R_first_answer), OF(reading, R_last_token), OF(reading, R_end),
        OF(exchange, X_done)};
    for (size_t i = 0; i < sizeof instants / sizeof *instants; i++)
        value[at++] = instants[i] < 0 ? -1 : instants[i] - start;
    value[at++] = OF(exchange, X_client_lag);
    value[at++] = OF(reading, R_stamp_error);
    value[at++] = OF(reading, R_unsure_at) == OF(reading, R_last_token) ? OF(reading, R_unsure_error) : 0;
    value[at++] = OF(reading, R_max_gap);
    value[at++] = OF(reading, R_max_gap_error);
    value[at++] = tokens.input;
    value[at++] = tokens.output;
    value[at++] = tokens.cached;
    value[at++] = tokens.reasoning;
    value[at++] = built;
    value[at++] = asked;
    value[at++] = OF(reading, R_first_event_tokens);
    value[at++] = OF(reading, R_output_events);
    value[at++] = row_server;
    value[at++] = row_server;
    value[at++] = OF(exchange, X_bytes_sent);
    value[at++] = OF(exchange, X_bytes_received);
    value[at++] = OF(exchange, X_resent);
    value[at++] = OF(exchange, X_reused);
    value[at++] = OF(exchange, X_kernel_stamp);
    for (int i = 0; i < 8; i++) /* no text, no replica, no account of the server */
        value[at++] = -1;
    value[at++] = tokens.written;
    value[at++] = OF(exchange, X_tcp);
    value[at++] = OF(exchange, X_tls);
#undef OF
    unsigned char *to = row->bytes;
    for (int i = 0; i < ROW_FIELDS; i++) {
        int size = letter_bytes(row_letters[i]);
        int64_t most = size == 1 ? 255 : size == 8 ? INT64_MAX : ((int64_t)1 << (8 * size - 1)) - 1;
        fits = fits && value[i] <= most && value[i] >= (size == 1 ? 0 : -most - 1);
        for (int byte = 0; byte < size; byte++)
            *to++ = (unsigned char)((uint64_t)value[i] >> 8 * byte);
    }
    row->ttft = instants[4] < 0 ? -1 : instants[4] - due;
    row->ended = instants[8] - start;
    if (fits)
        return 1;
unusual:
    PyErr_Clear();
    return 0;
}

static PyObject *usual_row(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !PyTuple_Check(args[0]) || PyTuple_Size(args[0]) != ROW_PLACE) {
        PyErr_SetString(PyExc_TypeError, "usual_row(place, exchange, start_ns, built)");
        return NULL;
    }
    Row row;
    int fits = 1;
    int64_t start = number_of(args[2], &fits);
    for (int at = 0; at < ROW_PLACE; at++)
        row.place[at] = number_of(PyTuple_GetItem(args[0], at), &fits);
    if (!fits || !write_row(&row, args[1], start, args[3]))
        Py_RETURN_NONE;
    return Py_BuildValue("y#LL", (char *)row.bytes, (Py_ssize_t)row_bytes, (long long)row.ttft, (long long)row.ended);
}
