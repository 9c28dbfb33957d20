/* libFuzzer, called by Python: `run(arguments, function)` gives the function inputs that reach new code of the modules
 * built with -fsanitize=fuzzer-no-link, and does not return. An exception of the function is a finding.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

int LLVMFuzzerRunDriver(int *argc, char ***argv, int (*one)(const uint8_t *data, size_t size));

static PyObject *function;

static int one(const uint8_t *data, size_t size)
{
    PyObject *result = PyObject_CallFunction(function, "y#", (const char *)data, (Py_ssize_t)size);
    if (result == NULL) {
        PyErr_Print();
        abort();
    }
    Py_DECREF(result);
    return 0;
}

static PyObject *run(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *arguments;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &arguments, &function))
        return NULL;
    int count = (int)PyList_Size(arguments);
    char **words = calloc((size_t)count + 1, sizeof(char *));
    for (int i = 0; i < count; i++) {
        const char *text = PyUnicode_AsUTF8AndSize(PyList_GetItem(arguments, i), NULL);
        if (text == NULL)
            return NULL;
        words[i] = strdup(text);
    }
    return PyLong_FromLong(LLVMFuzzerRunDriver(&count, &words, one));
}

static PyMethodDef functions[] = {{"run", run, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_fuzz", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fuzz(void)
{
    return PyModule_Create(&definition);
}
