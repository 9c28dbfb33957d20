/* The end of a usual answer: its row. Part of _compiled.c. */

/* How a row of a run is written, as core/results/record.py says by `rows`: a letter of `struct` for each field, the codes
   of reasons to finish and of a server as a source, the header with which servers tell their times. */
enum { ROW_FIELDS = 53, ROW_PLACE = 8 };
static char row_sizes[ROW_FIELDS];
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
    for (int i = 0; i < ROW_FIELDS; i++)
        row_sizes[i] = (char)letter_bytes(letters[i]);
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

/* What `row` of core/results/record.py makes of a Completion, from its exchange: the row, the time to the first token (-1
   without one), the end; from the start of the run. */
typedef struct {
    unsigned char bytes[8 * ROW_FIELDS];
    int64_t place[ROW_PLACE], ttft, ended;
} Row;

/* What was known of a request before it was sent: many requests have the same, which nobody changes. */
static int known_counts(PyObject *known, int64_t *tokens, int64_t *asked)
{
    static PyObject *last;
    static int64_t last_tokens, last_asked;
    int fits = 1;
    if (known != last) {
        *tokens = count_of(known, name_tokens, &fits);
        *asked = fits ? count_of(known, name_asked_output, &fits) : -1;
        if (!fits)
            return 0;
        last_tokens = *tokens;
        last_asked = *asked;
        put_same(&last, known);
    }
    *tokens = last_tokens;
    *asked = last_asked;
    return 1;
}

/* 0 where it failed, kept texts, or told what is not usual. */
static int write_row(Row *row, PyObject *of, int64_t start, PyObject *known)
{
    const Exchange *exchange = (Exchange *)of;
    if (row_finish == NULL || exchange_class == NULL || Py_TYPE(of) != exchange_class)
        return 0;
    const Reading *reading = (Reading *)exchange->reading;
    const Response *response = (Response *)exchange->response;
    if (exchange->failure != Py_None || Py_TYPE((PyObject *)reading) != reading_class ||
        Py_TYPE((PyObject *)response) != response_class || reading->pieces != Py_None ||
        reading->server_timing != Py_None || reading->usage_counts == Py_None ||
        !PyDict_Check(response->headers) || PyDict_Contains(response->headers, row_timing) != 0)
        goto unusual;
    Tokens tokens;
    if (!tokens_of(reading->usage_counts, &tokens))
        goto unusual;
    int fits = 1, at = 0;
    PyObject *code = PyDict_GetItemWithError(row_finish, reading->finish_reason);
    if (code == NULL && PyErr_Occurred())
        goto unusual;
    int64_t due = exchange->due, value[ROW_FIELDS], built, asked;
    if (!known_counts(known, &built, &asked))
        goto unusual;
    for (; at < ROW_PLACE; at++)
        value[at] = row->place[at];
    value[at++] = 0; /* ok */
    value[at++] = 0;
    value[at++] = response->status;
    value[at++] = code == NULL ? row_other : number_of(code, &fits);
    value[at++] = due - start;
    const int64_t instants[] = {
        exchange->ready, exchange->sent, exchange->first_byte, reading->first_event,
        reading->first_token, reading->first_answer, reading->last_token, reading->end,
        exchange->done};
    for (size_t i = 0; i < sizeof instants / sizeof *instants; i++)
        value[at++] = instants[i] < 0 ? -1 : instants[i] - start;
    value[at++] = exchange->client_lag;
    value[at++] = reading->stamp_error;
    value[at++] = reading->unsure_at == reading->last_token ? reading->unsure_error : 0;
    value[at++] = reading->max_gap;
    value[at++] = reading->max_gap_error;
    value[at++] = tokens.input;
    value[at++] = tokens.output;
    value[at++] = tokens.cached;
    value[at++] = tokens.reasoning;
    value[at++] = built;
    value[at++] = asked;
    value[at++] = reading->first_event_tokens;
    value[at++] = reading->output_events;
    value[at++] = row_server;
    value[at++] = row_server;
    value[at++] = exchange->bytes_sent;
    value[at++] = exchange->bytes_received;
    value[at++] = exchange->resent;
    value[at++] = exchange->reused;
    value[at++] = exchange->kernel_stamp;
    for (int i = 0; i < 8; i++) /* no text, no replica, no account of the server */
        value[at++] = -1;
    value[at++] = tokens.written;
    value[at++] = exchange->tcp;
    value[at++] = exchange->tls;
    unsigned char *to = row->bytes;
    for (int i = 0; i < ROW_FIELDS; i++) {
        int size = row_sizes[i];
        uint64_t half = size == 1 ? 0 : (uint64_t)1 << (8 * size - 1), bytes = little((const unsigned char *)&value[i]);
        fits &= size == 8 || (uint64_t)value[i] + half <= (size == 1 ? 255 : 2 * half - 1);
        memcpy(to, &bytes, sizeof bytes); /* the next value is written over what is too much */
        to += size;
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
