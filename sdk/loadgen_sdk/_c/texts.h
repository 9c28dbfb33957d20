/* Texts of words, and texts as JSON. Part of _compiled.c. */

/* What is written one after the other; all zero at first. Behind `size` there is room for what was asked for. */
typedef struct {
    char *begin;
    Py_ssize_t size, room;
} Buffer;

/* Room for so many bytes more: where they begin, or NULL with an exception. */
static char *more_room(Buffer *buffer, Py_ssize_t bytes)
{
    if (buffer->begin == NULL || buffer->room - buffer->size < bytes) {
        Py_ssize_t room = buffer->size + bytes + buffer->room;
        char *larger = PyMem_Realloc(buffer->begin, (size_t)room);
        if (larger == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        buffer->begin = larger;
        buffer->room = room;
    }
    return buffer->begin + buffer->size;
}

/* -1 with an exception. */
static int put_text(Buffer *buffer, const char *text, Py_ssize_t size)
{
    char *to = more_room(buffer, size);
    if (to == NULL)
        return -1;
    memcpy(to, text, (size_t)size);
    buffer->size += size;
    return 0;
}

/* Words: for each its place in `text`, shifted by 8, and its length. */
typedef struct {
    const char *text, *spans;
    Py_ssize_t text_size, spans_size;
} Words;

/* -1 with an exception. */
static int put_word(Buffer *buffer, const Words *words, Py_ssize_t word)
{
    uint32_t span;
    memcpy(&span, words->spans + SPAN_BYTES * word, SPAN_BYTES);
    Py_ssize_t place = span >> 8, length = span & LONGEST_WORD;
    if (place + length > words->text_size) {
        PyErr_SetString(PyExc_ValueError, "a word ends behind the text");
        return -1;
    }
    char *to = more_room(buffer, WORD_ROOM);
    if (to == NULL)
        return -1;
    if (length <= SHORT_WORD && place + SHORT_WORD <= words->text_size)
        memcpy(to, words->text + place, SHORT_WORD); /* of a fixed size: no call */
    else
        memcpy(to, words->text + place, (size_t)length);
    buffer->size += length;
    return 0;
}

/* A word for each two bytes of `bits`, least byte first. -1 with an exception. */
static int put_words(Buffer *buffer, const Words *words, const char *bits, Py_ssize_t bits_size)
{
    Py_ssize_t count = words->spans_size / SPAN_BYTES;
    if (count == 0 || words->spans_size % SPAN_BYTES || bits_size % 2) {
        PyErr_SetString(PyExc_ValueError, "bits are pairs of bytes, and spans are words of four bytes");
        return -1;
    }
    int even = (count & (count - 1)) == 0;
    const unsigned char *draws = (const unsigned char *)bits;
    Py_ssize_t usual = words->text_size / count < LONGEST_WORD ? words->text_size / count + 1 : LONGEST_WORD;
    if (more_room(buffer, bits_size / 2 * usual + WORD_ROOM) == NULL) /* more where long words are drawn often */
        return -1;
    for (Py_ssize_t at = 0; at < bits_size; at += 2) {
        uint32_t draw = draws[at] | (uint32_t)draws[at + 1] << 8;
        if (put_word(buffer, words, even ? draw & (uint32_t)(count - 1) : draw % (uint32_t)count) < 0)
            return -1;
    }
    return 0;
}

/* The twin of `in_python` in words.py: `begin`, then words. */
static PyObject *written(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *begin;
    const char *bits, *before;
    Py_ssize_t bits_size, size;
    Words words;
    if (!PyArg_ParseTuple(args, "Uy#y#y#", &begin, &bits, &bits_size, &words.spans, &words.spans_size, &words.text,
                          &words.text_size) ||
        (before = PyUnicode_AsUTF8AndSize(begin, &size)) == NULL)
        return NULL;
    Buffer whole = {0};
    PyObject *made = NULL;
    if (put_text(&whole, before, size) == 0 && put_words(&whole, &words, bits, bits_size) == 0)
        made = PyUnicode_DecodeUTF8(whole.begin, whole.size, NULL);
    PyMem_Free(whole.begin);
    return made;
}

/* The spans of words that stand one behind the other, of these lengths. */
static PyObject *spans(PyObject *Py_UNUSED(module), PyObject *value)
{
    char *lengths, *made;
    Py_ssize_t count;
    if (PyBytes_AsStringAndSize(value, &lengths, &count) < 0)
        return NULL;
    PyObject *whole = PyBytes_FromStringAndSize(NULL, count * SPAN_BYTES);
    if (whole == NULL)
        return NULL;
    made = PyBytes_AsString(whole);
    uint32_t place = 0;
    for (Py_ssize_t word = 0; word < count; word++) {
        uint32_t length = (unsigned char)lengths[word], span = place << 8 | length;
        memcpy(made + SPAN_BYTES * word, &span, SPAN_BYTES);
        place += length;
    }
    return whole;
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
