/* Texts of words, and texts as JSON. Part of _compiled.c. */

/* The twin of `in_python` in loadgen/core/requests/words.py: `begin`, then a word for each two bytes of `bits`, least
   byte first. `spans`: for each word its place in `text`, shifted by 8, and its length. */
static PyObject *written(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *begin, *made;
    const char *bits, *spans, *text, *before;
    Py_ssize_t bits_size, spans_size, text_size, size;
    if (!PyArg_ParseTuple(args, "Uy#y#y#", &begin, &bits, &bits_size, &spans, &spans_size, &text, &text_size) ||
        (before = PyUnicode_AsUTF8AndSize(begin, &size)) == NULL)
        return NULL;
    Py_ssize_t words = spans_size / SPAN_BYTES;
    if (words == 0 || spans_size % SPAN_BYTES || bits_size % 2) {
        PyErr_SetString(PyExc_ValueError, "bits are pairs of bytes, and spans are words of four bytes");
        return NULL;
    }
    int even = (words & (words - 1)) == 0;
    const unsigned char *draws = (const unsigned char *)bits;
    Py_ssize_t usual = text_size / words < LONGEST_WORD ? text_size / words + 1 : LONGEST_WORD;
    Py_ssize_t room = size + bits_size / 2 * usual + WORD_ROOM; /* more where long words are drawn often */
    char *whole = PyMem_Malloc((size_t)room);
    if (whole == NULL)
        return PyErr_NoMemory();
    char *to = (char *)memcpy(whole, before, (size_t)size) + size;
    for (Py_ssize_t at = 0; at < bits_size; at += 2) {
        uint32_t draw = draws[at] | (uint32_t)draws[at + 1] << 8, span;
        uint32_t word = even ? draw & (uint32_t)(words - 1) : draw % (uint32_t)words;
        memcpy(&span, spans + SPAN_BYTES * word, SPAN_BYTES);
        Py_ssize_t place = span >> 8, length = span & LONGEST_WORD;
        if (place + length > text_size) {
            PyMem_Free(whole);
            PyErr_SetString(PyExc_ValueError, "a word ends behind the text");
            return NULL;
        }
        if (whole + room - to < WORD_ROOM) {
            Py_ssize_t done = to - whole;
            char *larger = PyMem_Realloc(whole, (size_t)(room += room / 4 + WORD_ROOM));
            if (larger == NULL) {
                PyMem_Free(whole);
                return PyErr_NoMemory();
            }
            to = (whole = larger) + done;
        }
        if (length <= SHORT_WORD && place + SHORT_WORD <= text_size)
            memcpy(to, text + place, SHORT_WORD); /* of a fixed size: no call */
        else
            memcpy(to, text + place, (size_t)length);
        to += length;
    }
    made = PyUnicode_DecodeUTF8(whole, to - whole, NULL);
    PyMem_Free(whole);
    return made;
}

typedef unsigned char Bytes __attribute__((vector_size(16)));

/* Beside the encoder that json_text.py takes: a text as JSON, or None where a character of it has to be written otherwise. */
static PyObject *quoted(PyObject *Py_UNUSED(module), PyObject *value)
{
    Py_ssize_t size, at = 0;
    const char *text = PyUnicode_AsUTF8AndSize(value, &size);
    if (text == NULL && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        PyErr_Clear(); /* the encoder says what is wrong */
        Py_RETURN_NONE;
    }
    PyObject *made = text == NULL ? NULL : PyBytes_FromStringAndSize(NULL, size + 2);
    if (made == NULL)
        return NULL;
    char *to = PyBytes_AsString(made);
    *to++ = '"';
    to[size] = '"';
    Bytes escaped = {0}, bytes;
    for (; at + (Py_ssize_t)sizeof bytes <= size; at += (Py_ssize_t)sizeof bytes) {
        memcpy(&bytes, text + at, sizeof bytes);
        memcpy(to + at, &bytes, sizeof bytes);
        escaped |= (Bytes)((bytes < ' ') | (bytes == '"') | (bytes == '\\'));
    }
    int escapes = 0;
    for (size_t byte = 0; byte < sizeof escaped; byte++)
        escapes |= escaped[byte];
    for (; at < size; at++) {
        to[at] = text[at];
        escapes |= (unsigned char)text[at] < ' ' || text[at] == '"' || text[at] == '\\';
    }
    if (!escapes)
        return made;
    Py_DECREF(made);
    Py_RETURN_NONE;
}
