/* Helpers for Python objects and their references. Part of _compiled.c.
 *
 * Every function of these files that can raise returns NULL or a negative number after it has set
 * an exception. An argument is borrowed, so that the caller still has to release its own reference.
 * Only a function whose name ends in `_stealing` takes over the reference of the caller. */

/* Set a field to a value, and release the previous one. The caller's reference becomes that of the
 * field. */
static void set_field_stealing(PyObject **field, PyObject *value)
{
    PyObject *previous = *field;
    *field = value;
    Py_XDECREF(previous);
}

/* Set a field to a value with a new reference, and release the previous one. */
static void set_field(PyObject **field, PyObject *value)
{
    Py_INCREF(value);
    set_field_stealing(field, value);
}

/* Set a field to a new empty list. Return 0, or -1 with an exception. */
static int set_new_list(PyObject **field)
{
    PyObject *list = PyList_New(0);
    if (list == NULL)
        return -1;
    set_field_stealing(field, list);
    return 0;
}

/* Set a field to an attribute of an object. Return 0, or -1 with an exception. */
static int set_field_to_attribute(PyObject **field, PyObject *owner, const char *name)
{
    PyObject *attribute = PyObject_GetAttrString(owner, name);
    if (attribute == NULL)
        return -1;
    set_field_stealing(field, attribute);
    return 0;
}

/* Append a new item to a list, and release the caller's reference to it.
 *
 * `item` may be NULL with an exception, because it could not be created. Return 0, or -1 with an
 * exception. */
static int append_stealing(PyObject *list, PyObject *item)
{
    if (item == NULL)
        return -1;
    int status = PyList_Append(list, item);
    Py_DECREF(item);
    return status;
}

/* Release the result of a call of which only the success matters.
 *
 * Return 0, or -1 if the result is NULL, because the call has failed with an exception. */
static int discard_result(PyObject *result)
{
    if (result == NULL)
        return -1;
    Py_DECREF(result);
    return 0;
}

/* The largest number that is read from a Python object. A sum of two such numbers does not
 * overflow. */
#define MAX_NUMBER (1LL << 62)

/* Read a Python int into `*number`, without raising.
 *
 * Return 1, or 0 if the value is NULL, no int, or an int beyond +-MAX_NUMBER. `*number` is 0
 * then. */
static int read_int64(PyObject *value, int64_t *number)
{
    *number = 0;
    if (value == NULL || !PyLong_Check(value))
        return 0;

    int overflow = 0;
    int64_t result = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow || result > MAX_NUMBER || result < -MAX_NUMBER)
        return 0;

    *number = result;
    return 1;
}

/* Release the memory of an object whose fields were cleared before, as every `tp_dealloc` of these
 * types ends. */
static void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc free_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_memory(self);
    Py_DECREF(type); /* An object of a heap type has a reference to its type. */
}
