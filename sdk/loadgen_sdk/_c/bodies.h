/* Bodies whose prompts are words alone, many at once. Part of _compiled.c. */

#if defined(__SIZEOF_INT128__)
__extension__ typedef unsigned __int128 Wide;

enum { HEAD_WORDS = 4, ROW_NUMBERS = 5, MOST_DIGITS = 20 };

/* The words of prompts, and how the first ones follow from a number: SyntheticPrompts._unique_head. */
typedef struct {
    Words words; /* behind the spans of these are those of the words that a text begins with */
    Py_ssize_t count, starts;
    unsigned long long step, offset, combinations;
} Drawn;

/* What is around the prompt of a request, as dialects/plain_bodies.py says it. */
typedef struct {
    PyObject *of;
    int64_t asked;
    char *told, *before, *after;
    Py_ssize_t told_size, before_size, after_size;
} Around;

/* -1 with an exception. */
static int read_drawn(PyObject *value, Drawn *drawn)
{
    Words *words = &drawn->words;
    if (!PyArg_ParseTuple(value, "y#y#nKKK", &words->text, &words->text_size, &words->spans, &words->spans_size,
                          &drawn->starts, &drawn->step, &drawn->offset, &drawn->combinations))
        return -1;
    drawn->count = words->spans_size / SPAN_BYTES - drawn->starts;
    if (words->spans_size % SPAN_BYTES || drawn->starts < 1 || drawn->count < 1 || !drawn->combinations) {
        PyErr_SetString(PyExc_ValueError, "spans are those of words, and then of words that a text begins with");
        return -1;
    }
    words->spans_size = drawn->count * SPAN_BYTES;
    return 0;
}

/* Of the next request, which often is as that before it. -1 with an exception. */
static int read_around(PyObject *value, Around *around)
{
    int fits = 1;
    if (value == around->of)
        return 0;
    if (!PyTuple_Check(value) || PyTuple_Size(value) != 4)
        fits = 0;
    else
        around->asked = number_of(PyTuple_GetItem(value, 0), &fits);
    if (!fits) {
        PyErr_SetString(PyExc_TypeError, "what is around a prompt is a number and three texts");
        return -1;
    }
    around->of = value;
    return PyBytes_AsStringAndSize(PyTuple_GetItem(value, 1), &around->told, &around->told_size) < 0 ||
                   PyBytes_AsStringAndSize(PyTuple_GetItem(value, 2), &around->before, &around->before_size) < 0 ||
                   PyBytes_AsStringAndSize(PyTuple_GetItem(value, 3), &around->after, &around->after_size) < 0
               ? -1
               : 0;
}

/* -1 with an exception. */
static int put_digits(Buffer *buffer, int64_t number)
{
    char digits[MOST_DIGITS], *at = digits + sizeof digits;
    do
        *--at = (char)('0' + number % 10);
    while (number /= 10);
    return put_text(buffer, at, digits + sizeof digits - at);
}

/* The prompt of a request. -1 with an exception. */
static int put_prompt(Buffer *buffer, const Drawn *drawn, int64_t number, int64_t tokens, PyObject *bits)
{
    char *drawn_bits;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(bits, &drawn_bits, &size) < 0)
        return -1;
    uint64_t rest = (uint64_t)(((Wide)drawn->step * (uint64_t)number + drawn->offset) % drawn->combinations);
    Py_ssize_t word = drawn->count + (Py_ssize_t)(rest % (uint64_t)drawn->starts);
    rest /= (uint64_t)drawn->starts;
    for (int64_t at = 0; at < tokens && at < HEAD_WORDS; at++) {
        if (put_word(buffer, &drawn->words, word) < 0)
            return -1;
        word = (Py_ssize_t)(rest % (uint64_t)drawn->count);
        rest /= (uint64_t)drawn->count;
    }
    return put_words(buffer, &drawn->words, drawn_bits, size);
}

/* A request: what its digest is of into `told`, its body into `bodies`, `row` as the array of execution/bodies.py has it.
   -1 with an exception. */
static int put_request(Buffer *told, Buffer *bodies, const Drawn *drawn, const Around *around, PyObject *bits,
                       int64_t row[ROW_NUMBERS])
{
    int64_t number = row[0], tokens = row[3];
    Py_ssize_t begin, from = bodies->size;
    if (put_text(told, "[", 1) < 0 || put_digits(told, number) < 0 || put_text(told, around->told, around->told_size) < 0)
        return -1;
    begin = told->size;
    if (put_text(told, "\"", 1) < 0 || put_prompt(told, drawn, number, tokens, bits) < 0 || put_text(told, "\"", 1) < 0)
        return -1;
    if (put_text(bodies, around->before, around->before_size) < 0 ||
        put_text(bodies, told->begin + begin, told->size - begin) < 0 ||
        put_text(bodies, around->after, around->after_size) < 0 || put_text(told, ",{}]", 4) < 0)
        return -1;
    row[2] = bodies->size - from;
    row[4] = around->asked;
    return 0;
}

/* What dialects/plain_bodies.py calls; core/execution/bodies.py makes the same of requests one by one: their bodies, joined; the row of each, its body standing in the
   file from `at` on; the sums of the hashes of what their digests are of, and of their bodies. */
static PyObject *bodies(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *given, *numbers, *tokens, *bits, *ends, *made = NULL;
    long long at;
    Drawn drawn;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!L", &PyTuple_Type, &given, &PyList_Type, &numbers, &PyList_Type, &tokens,
                          &PyList_Type, &bits, &PyList_Type, &ends, &at) ||
        read_drawn(given, &drawn) < 0)
        return NULL;
    Py_ssize_t count = PyList_Size(numbers);
    if (PyList_Size(tokens) != count || PyList_Size(bits) != count || PyList_Size(ends) != count) {
        PyErr_SetString(PyExc_ValueError, "lists are of one length");
        return NULL;
    }
    Buffer told = {0}, whole = {0};
    Around around = {0};
    int64_t(*rows)[ROW_NUMBERS] = PyMem_Calloc((size_t)count, sizeof *rows);
    Salted *texts = PyMem_Calloc((size_t)count, 2 * sizeof *texts);
    if (rows == NULL || texts == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t one = 0; one < count; one++) {
        int fits = 1;
        int64_t *row = rows[one];
        row[0] = number_of(PyList_GetItem(numbers, one), &fits);
        row[1] = at + whole.size;
        row[3] = number_of(PyList_GetItem(tokens, one), &fits);
        if (!fits || row[0] < 0) {
            PyErr_SetString(PyExc_ValueError, "a request has a number from 0, and so many tokens");
            goto done;
        }
        Py_ssize_t before = told.size;
        if (read_around(PyList_GetItem(ends, one), &around) < 0 ||
            put_request(&told, &whole, &drawn, &around, PyList_GetItem(bits, one), row) < 0)
            goto done;
        texts[one].size = told.size - before;
        texts[count + one] = (Salted){.salt = (uint64_t)row[0], .size = (Py_ssize_t)row[2]};
    }
    const char *of_told = told.begin, *of_whole = whole.begin;
    for (Py_ssize_t one = 0; one < count; one++) {
        texts[one].at = of_told;
        of_told += texts[one].size;
        texts[count + one].at = of_whole;
        of_whole += texts[count + one].size;
    }
    unsigned char prompts_sum[HASH_BYTES], bodies_sum[HASH_BYTES];
    sum_hashes(texts, count, prompts_sum);
    sum_hashes(texts + count, count, bodies_sum);
    made = Py_BuildValue("(y#y#y#y#)", count ? whole.begin : "", whole.size, (const char *)rows,
                         count * (Py_ssize_t)sizeof *rows, prompts_sum, (Py_ssize_t)HASH_BYTES, bodies_sum,
                         (Py_ssize_t)HASH_BYTES);
done:
    PyMem_Free(told.begin);
    PyMem_Free(whole.begin);
    PyMem_Free(rows);
    PyMem_Free(texts);
    return made;
}
#endif
