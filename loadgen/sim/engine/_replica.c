/* SimRequest and Replica of replica.py in C.
 *
 * replica.py is the reference implementation and documents both classes. The tests in
 * tests/sim/test_compiled_replica.py compare the two. Only the limited API of Python 3.11 is used.
 * The file is compiled without contraction of a * b + c, so that durations equal those of Python to
 * the last bit.
 *
 * Words used below:
 *
 * - A replica serves a batch of requests in iterations. Each iteration computes one token per
 *   request.
 * - A block is a part of the key-value cache, for some tokens of a sequence. Requests with the same
 *   beginning of the prompt can share blocks. All other blocks are private.
 * - A bucket is a list of the requests that get their last token in the same iteration.
 * - A request in prefill has its prompt computed. Then it decodes: it gets one token per iteration.
 *
 * Functions that can fail return -1 with a Python exception set, unless they say otherwise. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define VERSION 4 /* must equal VERSION in implementation.py, which else uses the Python classes */
#define NEVER ((int64_t)1 << 62)
#define MAX_SEQ_LEN ((int64_t)1 << 28)
#define OBJECT(pointer) ((PyObject *)(pointer))

#define PACKED_FIELDS 13    /* number of replica.REQUEST_FIELDS */
#define PREFETCH_DISTANCE 8 /* blocks: so far ahead of a search their slots are fetched */
#define INITIAL_SLOTS 512   /* of a block table; a power of two */
#define INITIAL_BLOCKS 256
#define INITIAL_REQUESTS 16 /* of an array of requests, or of the blocks of a request */
#define INITIAL_END_TIMES 512

#define NO_ITERATION (-1)     /* there is no such iteration, or it is not known yet */
#define BLOCK_HASH_ERROR (-1) /* of PyObject_Hash, which returns it for no hash */

/* Results of a search for a block. */
#define NOT_FOUND (-1)
#define SEARCH_FAILED (-2) /* with an exception */

/* Results of the allocation of blocks to a request. */
#define ALLOCATED 1
#define TOO_FEW_FREE_BLOCKS 0
#define ALLOCATION_FAILED (-1) /* with an exception */

/* Results of a comparison of two hashes of blocks. */
#define DIFFERENT 0
#define EQUAL 1
#define COMPARISON_FAILED (-1) /* with an exception */

#define GOLDEN_RATIO_MULTIPLIER 0x9E3779B97F4A7C15u /* 2^64 divided by the golden ratio */
#define HASH_SHIFT 29 /* near half of the 64 bits of a product; its exact value does not matter */

#define NO_BLOCK (-1) /* the end of a list of blocks */
#define EMPTY_SLOT 0  /* an entry of the slots of a block table */

enum { WAITING, PREFILLING, DECODING, DONE };

/* The hash of a block of a prompt, as the caller passes it. */
typedef struct {
    int64_t value;    /* the number itself, or the hash of the object */
    PyObject *object; /* NULL: the hash is a number of at most 64 bits */
} BlockHash;

typedef struct Request {
    PyObject_HEAD
    PyObject *key;
    BlockHash *block_hashes; /* of the full blocks of the prompt */
    Py_ssize_t block_count;
    /* For these fields, see the class SimRequest in replica.py. */
    long long due_ns, replica_index, input_tokens, requested_tokens, output_tokens;
    long long prefill_tokens, prefill_tokens_left, remaining_output_tokens, private_block_count;
    long long admitted_ns, cached_tokens, first_iteration, resumed_iteration, last_iteration;
    long long failure, failed_ns;
    int state;
    int64_t *shared_blocks; /* indexes in BlockTable.blocks */
    Py_ssize_t shared_count, shared_capacity;
    /* Neighbors in `Replica.waiting_queue` or, while the request decodes, in
     * `Replica.decoding_queue`. Both queues own their requests. */
    struct Request *previous, *next;
    /* Neighbors in a bucket of `Replica.buckets`. */
    struct Request *bucket_previous, *bucket_next;
} Request;

/* A doubly linked list of requests. */
typedef struct {
    Request *head, *tail;
    Py_ssize_t count;
} RequestQueue;

/* A growing array of requests, which it owns. */
typedef struct {
    Request **items;
    Py_ssize_t count, capacity;
} RequestArray;

/* A growing array of times in ns. */
typedef struct {
    int64_t *values;
    Py_ssize_t count, capacity;
} TimeArray;

/* An entry of the array of blocks that several prompts may share. A block without users is in the
 * list of unused blocks. An entry that holds no block is in the list of free entries. */
typedef struct {
    BlockHash hash;
    int64_t user_count;
    int64_t older; /* the neighbors in the list of unused blocks, or NO_BLOCK */
    union {
        int64_t newer;
        int64_t next_free; /* the next entry in the list of free entries, or NO_BLOCK */
    };
} Block;

/* All shared blocks, and a hash table with open addressing that finds them. */
typedef struct {
    uint64_t *slots; /* see `make_slot_entry`; 0: the slot is empty */
    int64_t slots_mask;
    Block *blocks;
    int64_t capacity, first_free;
    int64_t oldest, newest; /* ends of the list of unused blocks */
    int64_t used_count;     /* blocks with users */
    int64_t unused_count;
} BlockTable;

typedef struct {
    PyObject_HEAD
    /* See Costs and ServerLimits in replica.py. */
    double overhead_ns, weights_ns, kv_token_ns, token_ns, attended_ns;
    int64_t max_batch_size, max_num_tokens, kv_blocks, tokens_per_block, max_seq_len;
    int chunked_prefill, reserves_output_blocks, block_reuse;

    RequestQueue waiting_queue, decoding_queue;
    /* Decoding requests by the iteration of their last token, modulo the number of buckets. */
    RequestQueue *buckets;
    int64_t bucket_mask;
    RequestArray finishing_prefill;    /* their prefill ends with the current iteration */
    RequestArray first_token_requests; /* got a first token in the last finished iteration */
    Request *partly_prefilled;         /* served before the waiting requests */
    PyObject *recent_pauses;           /* list of (request, first iteration, last iteration) */
    /* The number of decoding requests that need a new block in an iteration, by the phase of the
     * iteration: its number modulo tokens_per_block. See _BlockDemand in replica.py. */
    int64_t *block_demand_by_phase;
    BlockTable block_table;
    int64_t private_block_count; /* blocks in use that are not shared */
    int64_t kv_tokens;           /* in the key-value cache, of decoding requests */

    long long active_count, decoding_count, decoded_tokens, iteration, end_ns;
    long long context_requests, context_tokens;
    long long pause_count, cache_hits, cache_misses;
    int is_computing;    /* between `begin_iteration` and `end_iteration` */
    TimeArray end_times; /* of the iterations, in ns */
} Replica;

/* What an iteration computes and reads. */
typedef struct {
    int64_t decoding_count, context_requests, context_tokens;
    int64_t tokens_read;    /* in the key-value cache */
    double attended_tokens; /* sum over the computed tokens of the tokens that each attends to */
} IterationWork;

static PyTypeObject *request_type, *replica_type;

/* -- arithmetic -------------------------------------------------------------------------------- */

/* Return the quotient rounded down, as in Python. C rounds towards 0: -7 / 2 is -3, not -4. */
static int64_t floor_divide(int64_t dividend, int64_t divisor)
{
    int64_t quotient = dividend / divisor;
    int is_rounded_up = dividend % divisor != 0 && (dividend < 0) != (divisor < 0);
    return quotient - is_rounded_up;
}

/* Return the quotient rounded up. */
static int64_t ceil_divide(int64_t dividend, int64_t divisor)
{
    return -floor_divide(-dividend, divisor);
}

/* Return the remainder with the sign of the divisor, as in Python. In C it has that of the
 * dividend: -7 % 4 is -3, and here it is 1. */
static int64_t floor_modulo(int64_t dividend, int64_t divisor)
{
    int64_t remainder = dividend % divisor;
    return remainder < 0 ? remainder + divisor : remainder;
}

static int64_t minimum(int64_t first, int64_t second)
{
    return first < second ? first : second;
}

/* -- arrays and queues ------------------------------------------------------------------------- */

/* Double the capacity of an array and return the new array, or NULL with an exception if there
 * is no memory. An empty array gets the capacity `initial`. */
static void *grow_array(void *items, Py_ssize_t *capacity, Py_ssize_t initial, size_t item_size)
{
    Py_ssize_t new_capacity = *capacity ? 2 * *capacity : initial;
    void *grown = PyMem_Realloc(items, new_capacity * item_size);
    if (grown == NULL)
        return PyErr_NoMemory();
    *capacity = new_capacity;
    return grown;
}

/* Append the end time of an iteration in ns. Return 0, or -1 with a MemoryError. */
static int append_time(TimeArray *array, int64_t value)
{
    if (array->count == array->capacity) {
        int64_t *values =
            grow_array(array->values, &array->capacity, INITIAL_END_TIMES, sizeof(int64_t));
        if (values == NULL)
            return -1;
        array->values = values;
    }

    array->values[array->count++] = value;
    return 0;
}

/* Append a request to an array, which takes over the caller's reference. Return 0, or -1 with a
 * MemoryError. Then the caller keeps its reference. */
static int append_request(RequestArray *array, Request *request)
{
    if (array->count == array->capacity) {
        Request **items =
            grow_array(array->items, &array->capacity, INITIAL_REQUESTS, sizeof(Request *));
        if (items == NULL)
            return -1;
        array->items = items;
    }

    array->items[array->count++] = request;
    return 0;
}

/* Remove the request at an index. The caller takes over the array's reference. */
static void remove_at(RequestArray *array, Py_ssize_t index)
{
    Request **item = &array->items[index];
    memmove(item, item + 1, (array->count - index - 1) * sizeof(Request *));
    array->count--;
}

/* Release all requests of an array and empty it. */
static void clear_requests(RequestArray *array)
{
    while (array->count > 0) {
        Request *request = array->items[--array->count];
        Py_DECREF(OBJECT(request));
    }
}

/* Return a new Python list of the requests in an array. */
static PyObject *list_of_requests(const RequestArray *array)
{
    PyObject *list = PyList_New(array->count);
    for (Py_ssize_t i = 0; list != NULL && i < array->count; i++)
        PyList_SetItem(list, i, Py_NewRef(OBJECT(array->items[i])));
    return list;
}

/* Add a request at the end of a queue. The queue takes over the caller's reference. */
static void push_back(RequestQueue *queue, Request *request)
{
    request->previous = queue->tail;
    request->next = NULL;

    if (queue->tail != NULL)
        queue->tail->next = request;
    else
        queue->head = request;

    queue->tail = request;
    queue->count++;
}

/* Add a request at the front of a queue. The queue takes over the caller's reference. */
static void push_front(RequestQueue *queue, Request *request)
{
    request->previous = NULL;
    request->next = queue->head;

    if (queue->head != NULL)
        queue->head->previous = request;
    else
        queue->tail = request;

    queue->head = request;
    queue->count++;
}

/* Remove a request from a queue. The caller takes over the queue's reference. */
static void unlink_request(RequestQueue *queue, Request *request)
{
    if (request->previous != NULL)
        request->previous->next = request->next;
    else
        queue->head = request->next;

    if (request->next != NULL)
        request->next->previous = request->previous;
    else
        queue->tail = request->previous;

    request->previous = NULL;
    request->next = NULL;
    queue->count--;
}

/* Release all requests of a queue and empty it. */
static void clear_queue(RequestQueue *queue)
{
    while (queue->head != NULL) {
        Request *request = queue->head;
        unlink_request(queue, request);
        Py_DECREF(OBJECT(request));
    }
}

/* Return the bucket of the requests that get their last token in an iteration. Buckets are used
 * again and again: the mask takes the number of the iteration modulo the number of buckets. */
static RequestQueue *get_bucket(Replica *self, int64_t iteration)
{
    return &self->buckets[iteration & self->bucket_mask];
}

/* Add a decoding request to the bucket of its last iteration, so that `remove_finished` finds
 * all requests that end together. Buckets do not own their requests. */
static void add_to_bucket(Replica *self, Request *request)
{
    RequestQueue *bucket = get_bucket(self, request->last_iteration);
    request->bucket_previous = bucket->tail;
    request->bucket_next = NULL;

    if (bucket->tail != NULL)
        bucket->tail->bucket_next = request;
    else
        bucket->head = request;

    bucket->tail = request;
}

/* Remove a decoding request from the bucket of its last iteration, because it ends earlier. */
static void remove_from_bucket(Replica *self, Request *request)
{
    RequestQueue *bucket = get_bucket(self, request->last_iteration);
    if (request->bucket_previous != NULL)
        request->bucket_previous->bucket_next = request->bucket_next;
    else
        bucket->head = request->bucket_next;

    if (request->bucket_next != NULL)
        request->bucket_next->bucket_previous = request->bucket_previous;
    else
        bucket->tail = request->bucket_previous;

    request->bucket_previous = NULL;
    request->bucket_next = NULL;
}

/* -- SimRequest -------------------------------------------------------------------------------- */

/* Set `value` to the number of a Python int. Return 0, or -1 with a TypeError for another object
 * and with an OverflowError for a number of more than 64 bits. */
static int convert_int64(PyObject *object, int64_t *value)
{
    *value = PyLong_AsLongLong(object);
    /* -1 is the result for an error, but also a valid number. */
    int has_failed = *value == -1 && PyErr_Occurred() != NULL;
    return has_failed ? -1 : 0;
}

/* Return 1 and set `number` if an object is a Python int of at most 64 bits. Return 0 for all other
 * objects, without an exception. */
static int get_small_int(PyObject *object, int64_t *number)
{
    if (!PyLong_CheckExact(object))
        return 0;
    int has_overflow;
    *number = PyLong_AsLongLongAndOverflow(object, &has_overflow);
    return !has_overflow;
}

/* Set `block_hash` to the hash of a block that Python passes as `object`: an int or any other
 * hashable object. Return 0, or -1 with an exception if the object is not hashable.
 *
 * Most are ints of at most 64 bits. They are stored as numbers, because numbers are compared
 * quickly. Any other object is stored itself, with a new reference, together with its Python hash.
 */
static int convert_block_hash(PyObject *object, BlockHash *block_hash)
{
    int64_t number;

    if (get_small_int(object, &number)) {
        *block_hash = (BlockHash){.value = number, .object = NULL};
        return 0;
    }

    Py_hash_t python_hash = PyObject_Hash(object);
    if (python_hash == BLOCK_HASH_ERROR)
        return -1;

    *block_hash = (BlockHash){.value = python_hash, .object = Py_NewRef(object)};
    return 0;
}

/* Set the hashes of the full blocks of a prompt from a Python sequence (SimRequest.blocks in
 * replica.py). Return 0, or -1 with an exception.
 *
 * `block_count` is the number of hashes that have been converted so far, also after a failure. So
 * `request_clear` releases exactly these. */
static int set_block_hashes(Request *self, PyObject *blocks)
{
    Py_ssize_t count = PySequence_Size(blocks);
    if (count < 0)
        return -1;
    if (count == 0)
        return 0;

    self->block_hashes = PyMem_Calloc(count, sizeof(BlockHash));
    if (self->block_hashes == NULL) {
        PyErr_NoMemory();
        return -1;
    }

    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *object = PySequence_GetItem(blocks, i);
        if (object == NULL)
            return -1;

        int result = convert_block_hash(object, &self->block_hashes[i]);
        Py_DECREF(object);
        if (result < 0)
            return -1;

        self->block_count = i + 1;
    }

    return 0;
}

/* Return a new request whose fields are 0, or NULL with a MemoryError. The limited API has no
 * direct access to the allocator of a type, so it is read from the type's slot. */
static Request *allocate_request(void)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(request_type, Py_tp_alloc);
    return (Request *)allocate(request_type, 0);
}

/* Set the fields of a new request that waits. The allocator has set all others to 0. */
static void init_request(Request *self, PyObject *key, int64_t due_ns, int64_t input_tokens,
                         int64_t output_tokens)
{
    self->key = Py_NewRef(key);
    self->due_ns = due_ns;
    self->state = WAITING;

    /* The prompt as submitted, and what has to be prefilled. After a pause, that includes the
     * tokens generated before it. */
    self->input_tokens = input_tokens;
    self->prefill_tokens = input_tokens;
    self->prefill_tokens_left = input_tokens;

    /* The output as requested, as limited by the longest sequence, and what is still to come. */
    self->requested_tokens = output_tokens;
    self->output_tokens = output_tokens;
    self->remaining_output_tokens = output_tokens;

    /* Not known yet. */
    self->admitted_ns = -1;
    self->cached_tokens = -1;
    self->failed_ns = -1;
    self->first_iteration = NO_ITERATION;
    self->resumed_iteration = NO_ITERATION;
    self->last_iteration = NO_ITERATION;
}

/* SimRequest(key, due_ns, input_tokens, output_tokens, blocks=()): create a request that waits.
 * Return a new reference, or NULL with an exception if an argument has the wrong type.
 *
 * The class cannot be subclassed, so `type` is always `request_type`. Keyword arguments are
 * ignored. */
static PyObject *request_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *key, *due_object, *input_object, *output_object, *blocks = NULL;
    int64_t due_ns, input_tokens, output_tokens;

    if (!PyArg_UnpackTuple(args, "SimRequest", 4, 5, &key, &due_object, &input_object,
                           &output_object, &blocks))
        return NULL;
    if (convert_int64(due_object, &due_ns) < 0)
        return NULL;
    if (convert_int64(input_object, &input_tokens) < 0)
        return NULL;
    if (convert_int64(output_object, &output_tokens) < 0)
        return NULL;

    Request *self = allocate_request();
    if (self == NULL)
        return NULL;

    init_request(self, key, due_ns, input_tokens, output_tokens);
    if (blocks != NULL && set_block_hashes(self, blocks) < 0) {
        Py_DECREF(OBJECT(self));
        return NULL;
    }

    return OBJECT(self);
}

/* Visit all objects that a request owns, for the garbage collector. */
static int request_traverse(Request *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(OBJECT(self)));
    Py_VISIT(self->key);
    for (Py_ssize_t i = 0; i < self->block_count; i++)
        Py_VISIT(self->block_hashes[i].object);
    return 0;
}

/* Release all objects that a request owns. */
static int request_clear(Request *self)
{
    Py_CLEAR(self->key);
    while (self->block_count > 0)
        Py_XDECREF(self->block_hashes[--self->block_count].object);
    return 0;
}

/* Free a request. An instance of a heap type owns a reference to its type, which is released
 * last. */
static void request_dealloc(Request *self)
{
    PyTypeObject *type = Py_TYPE(OBJECT(self));
    PyObject_GC_UnTrack(self);
    request_clear(self);
    PyMem_Free(self->block_hashes);
    PyMem_Free(self->shared_blocks);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(OBJECT(type));
}

/* Return an object as a request, or NULL with a TypeError. */
static Request *check_request(PyObject *object)
{
    if (!PyObject_TypeCheck(object, request_type)) {
        PyErr_SetString(PyExc_TypeError, "not a SimRequest");
        return NULL;
    }
    return (Request *)object;
}

/* Write the fields of a SimRequest to a row of numbers, in the order of replica.REQUEST_FIELDS.
 * Return 0, or -1 with a TypeError if the object is no request or its key is no int. */
static int write_request_row(PyObject *object, int64_t *row)
{
    Request *request = check_request(object);
    int64_t key;

    if (request == NULL || convert_int64(request->key, &key) < 0)
        return -1;

    int64_t fields[PACKED_FIELDS] = {
        key,
        request->due_ns,
        request->replica_index,
        request->first_iteration,
        request->resumed_iteration,
        request->last_iteration,
        request->input_tokens,
        request->requested_tokens,
        request->output_tokens,
        request->cached_tokens,
        request->failure,
        request->failed_ns,
        request->admitted_ns,
    };
    memcpy(row, fields, sizeof fields);
    return 0;
}

/* Write each request of a Python list into a row of a buffer of int64 numbers. Return 0, or -1
 * with an exception if the buffer has another size or an item cannot be written. */
static int write_request_rows(PyObject *requests, Py_buffer *buffer)
{
    Py_ssize_t count = PyList_Size(requests);
    if (count < 0)
        return -1;

    Py_ssize_t row_size = PACKED_FIELDS * (Py_ssize_t)sizeof(int64_t);
    if (buffer->len != count * row_size) {
        PyErr_SetString(PyExc_ValueError, "the array does not have the size of the requests");
        return -1;
    }

    int64_t *rows = buffer->buf;
    for (Py_ssize_t i = 0; i < count; i++)
        if (write_request_row(PyList_GetItem(requests, i), rows + i * PACKED_FIELDS) < 0)
            return -1;

    return 0;
}

/* SimRequest.pack(requests, rows): write the fields of each request of a list into a row of a
 * two-dimensional int64 array, in the order of replica.REQUEST_FIELDS. Return None, or NULL with
 * an exception.
 *
 * One call for many requests is much faster than reading each field in Python. */
static PyObject *request_pack(PyObject *unused, PyObject *args)
{
    PyObject *requests, *rows;
    Py_buffer buffer;

    if (!PyArg_UnpackTuple(args, "pack", 2, 2, &requests, &rows))
        return NULL;
    if (PyObject_GetBuffer(rows, &buffer, PyBUF_WRITABLE) < 0)
        return NULL;

    int result = write_request_rows(requests, &buffer);
    PyBuffer_Release(&buffer);
    if (result < 0)
        return NULL;

    Py_RETURN_NONE;
}

static PyMethodDef request_methods[] = {{"pack", request_pack, METH_VARARGS | METH_STATIC, NULL},
                                        {NULL}};

static PyMemberDef request_members[] = {
    {"key", T_OBJECT_EX, offsetof(Request, key), 0, NULL},
    {"due_ns", T_LONGLONG, offsetof(Request, due_ns), 0, NULL},
    {"replica_index", T_LONGLONG, offsetof(Request, replica_index), 0, NULL},
    {"input_tokens", T_LONGLONG, offsetof(Request, input_tokens), 0, NULL},
    {"requested_tokens", T_LONGLONG, offsetof(Request, requested_tokens), 0, NULL},
    {"output_tokens", T_LONGLONG, offsetof(Request, output_tokens), 0, NULL},
    {"prefill_tokens", T_LONGLONG, offsetof(Request, prefill_tokens), READONLY, NULL},
    {"remaining_output_tokens", T_LONGLONG, offsetof(Request, remaining_output_tokens), 0, NULL},
    {"admitted_ns", T_LONGLONG, offsetof(Request, admitted_ns), 0, NULL},
    {"cached_tokens", T_LONGLONG, offsetof(Request, cached_tokens), 0, NULL},
    {"first_iteration", T_LONGLONG, offsetof(Request, first_iteration), 0, NULL},
    {"resumed_iteration", T_LONGLONG, offsetof(Request, resumed_iteration), 0, NULL},
    {"last_iteration", T_LONGLONG, offsetof(Request, last_iteration), 0, NULL},
    {"failure", T_LONGLONG, offsetof(Request, failure), 0, NULL},
    {"failed_ns", T_LONGLONG, offsetof(Request, failed_ns), 0, NULL},
    {"state", T_INT, offsetof(Request, state), 0, NULL},
    {NULL},
};

static PyType_Slot request_slots[] = {
    {Py_tp_new, request_new},
    {Py_tp_dealloc, request_dealloc},
    {Py_tp_traverse, request_traverse},
    {Py_tp_clear, request_clear},
    {Py_tp_methods, request_methods},
    {Py_tp_members, request_members},
    {0, NULL},
};

static PyType_Spec request_spec = {
    .name = "loadgen.sim.engine._replica.SimRequest",
    .basicsize = sizeof(Request),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = request_slots,
};

/* -- the table of shared blocks ---------------------------------------------------------------- */

/* Return a 32-bit hash of a number, whose lower bits choose the slot of a hash table.
 *
 * This is Fibonacci hashing: the number is multiplied by 2^64 divided by the golden ratio, so that
 * neighboring numbers get distant slots (Knuth, The Art of Computer Programming, volume 3, section
 * 6.4). The upper bits of a product depend on all bits of the number, but its lower bits only on
 * the lower bits of the number. So the upper bits are combined with the lower ones. */
static uint32_t mix_hash(int64_t value)
{
    uint64_t product = (uint64_t)value * GOLDEN_RATIO_MULTIPLIER;
    uint64_t upper_bits = product >> HASH_SHIFT;
    return (uint32_t)(product ^ upper_bits);
}

/* Return the entry of a slot for a block: the mixed hash of the block in the upper 32 bits, and its
 * index + 1 in the lower ones. So no entry is 0, which is the empty slot. */
static uint64_t make_slot_entry(const BlockHash *block_hash, int64_t index)
{
    uint64_t upper_half = (uint64_t)mix_hash(block_hash->value) << 32;
    uint64_t lower_half = (uint64_t)(index + 1);
    return upper_half | lower_half;
}

/* Return the mixed hash of a block from the entry of its slot. */
static uint32_t get_slot_hash(uint64_t entry)
{
    return (uint32_t)(entry >> 32);
}

/* Return the index of a block from the entry of its slot. */
static int64_t get_slot_block(uint64_t entry)
{
    uint32_t lower_half = (uint32_t)entry;
    return (int64_t)lower_half - 1;
}

/* Return the home of a hash: the slot where a search for it begins. The number of slots is a power
 * of two, so the mask takes the hash modulo this number. */
static int64_t home_slot(const BlockTable *table, uint32_t mixed_hash)
{
    return (int64_t)mixed_hash & table->slots_mask;
}

/* Return the slot after a slot. Slot 0 follows the last one. */
static int64_t next_slot(const BlockTable *table, int64_t slot)
{
    return (slot + 1) & table->slots_mask;
}

/* Return how many times `next_slot` leads from one slot to the next until it reaches `end`. */
static int64_t count_steps(const BlockTable *table, int64_t start, int64_t end)
{
    return (end - start) & table->slots_mask;
}

/* Load the slot of one of the next blocks of a prompt into the cache of the processor, because it
 * will be searched soon. Consecutive blocks have distant slots, which are rarely in that cache.
 * This only saves time: __builtin_prefetch changes nothing that a program can see. */
static void prefetch_slot(const BlockTable *table, const Request *request, Py_ssize_t position)
{
    if (table->slots == NULL || position >= request->block_count)
        return;
    uint32_t mixed_hash = mix_hash(request->block_hashes[position].value);
    __builtin_prefetch(&table->slots[home_slot(table, mixed_hash)]);
}

/* Return EQUAL or DIFFERENT for two hashes, or COMPARISON_FAILED with an exception if their objects
 * cannot be compared.
 *
 * A hash is either a number, without an object, or an object with its Python hash. A number and an
 * object are always different. */
static int compare_hashes(const BlockHash *first, const BlockHash *second)
{
    if (first->value != second->value)
        return DIFFERENT;

    int is_same_object = first->object == second->object; /* also if both are numbers */
    if (is_same_object)
        return EQUAL;
    if (first->object == NULL || second->object == NULL)
        return DIFFERENT;

    return PyObject_RichCompareBool(first->object, second->object, Py_EQ);
}

/* Return the index of the shared block with this hash. Return NOT_FOUND if there is none, or
 * SEARCH_FAILED with an exception if hashes cannot be compared.
 *
 * The table uses linear probing: a search begins at the home slot of the hash and ends at the first
 * empty slot. The entry of a slot has the mixed hash of its block. If this differs, the block
 * itself, which is elsewhere in memory, need not be read. */
static int64_t find_block(const BlockTable *table, const BlockHash *block_hash)
{
    if (table->slots == NULL)
        return NOT_FOUND;

    uint32_t mixed_hash = mix_hash(block_hash->value);
    int64_t slot = home_slot(table, mixed_hash);
    while (table->slots[slot] != EMPTY_SLOT) {
        uint64_t entry = table->slots[slot];
        if (get_slot_hash(entry) == mixed_hash) {
            int64_t index = get_slot_block(entry);
            int result = compare_hashes(&table->blocks[index].hash, block_hash);
            if (result == COMPARISON_FAILED)
                return SEARCH_FAILED;
            if (result == EQUAL)
                return index;
        }

        slot = next_slot(table, slot);
    }

    return NOT_FOUND;
}

/* Put an entry into the slot of its hash, or into the first empty slot after it. */
static void insert_slot(BlockTable *table, uint64_t entry)
{
    int64_t slot = home_slot(table, get_slot_hash(entry));
    while (table->slots[slot] != EMPTY_SLOT)
        slot = next_slot(table, slot);
    table->slots[slot] = entry;
}

/* Double the slots of a table, and insert all entries again, because the slot of a hash depends
 * on the number of slots. A new table gets INITIAL_SLOTS. Return 0, or -1 with a MemoryError. */
static int double_slots(BlockTable *table)
{
    uint64_t *old_slots = table->slots;
    int64_t old_count = old_slots ? table->slots_mask + 1 : 0;
    int64_t count = old_slots ? 2 * old_count : INITIAL_SLOTS;
    uint64_t *slots = PyMem_Calloc(count, sizeof(uint64_t));
    if (slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }

    table->slots = slots;
    table->slots_mask = count - 1;

    for (int64_t i = 0; i < old_count; i++)
        if (old_slots[i])
            insert_slot(table, old_slots[i]);

    PyMem_Free(old_slots);
    return 0;
}

/* Return the slot that holds a block, which is in the table. */
static int64_t find_slot(const BlockTable *table, int64_t block_index)
{
    int64_t slot = home_slot(table, mix_hash(table->blocks[block_index].hash.value));
    while (get_slot_block(table->slots[slot]) != block_index)
        slot = next_slot(table, slot);
    return slot;
}

/* Return whether a search would no longer find the entry in a slot, because of an empty slot (the
 * hole) before it.
 *
 * A search for the entry walks from its home slot to its slot and stops at the first empty one. So
 * it stops at the hole if the hole is not farther from the slot than the home is. For example, an
 * entry in slot 7 whose home is slot 5 is cut off by a hole in slot 5 or 6, but not in slot 4. */
static int is_cut_off_by_hole(const BlockTable *table, int64_t slot, int64_t hole)
{
    int64_t home = home_slot(table, get_slot_hash(table->slots[slot]));
    int64_t steps_from_home = count_steps(table, home, slot);
    int64_t steps_from_hole = count_steps(table, hole, slot);
    return steps_from_hole <= steps_from_home;
}

/* Remove the entry of a block from the slots.
 *
 * This is backward-shift deletion, the standard way for linear probing without markers of deleted
 * entries: each later entry that the hole would cut off is moved into it, which leaves a new hole.
 * For example, slots 3, 4 and 5 hold A, B and C with the homes 3, 3 and 5. When A is removed, B
 * moves from slot 4 to slot 3. Now slot 4 is the hole. C stays, because its home is after it. */
static void remove_slot(BlockTable *table, int64_t block_index)
{
    int64_t hole = find_slot(table, block_index);
    int64_t slot = next_slot(table, hole);
    while (table->slots[slot] != EMPTY_SLOT) {
        if (is_cut_off_by_hole(table, slot, hole)) {
            table->slots[hole] = table->slots[slot];
            hole = slot;
        }
        slot = next_slot(table, slot);
    }

    table->slots[hole] = EMPTY_SLOT;
}

/* Remove a block from the list of unused blocks, which is ordered by the time of the last use. */
static void remove_from_unused(BlockTable *table, int64_t index)
{
    Block *block = &table->blocks[index];
    if (block->older != NO_BLOCK)
        table->blocks[block->older].newer = block->newer;
    else
        table->oldest = block->newer;

    if (block->newer != NO_BLOCK)
        table->blocks[block->newer].older = block->older;
    else
        table->newest = block->older;

    table->unused_count--;
}

/* Add a block to the list of unused blocks, as the one used most recently. */
static void add_to_unused(BlockTable *table, int64_t index)
{
    Block *block = &table->blocks[index];
    block->older = table->newest;
    block->newer = NO_BLOCK;

    if (table->newest != NO_BLOCK)
        table->blocks[table->newest].newer = index;
    else
        table->oldest = index;

    table->newest = index;
    table->unused_count++;
}

/* Add an entry of the array of blocks to the list of free entries, as the first one. */
static void push_free_entry(BlockTable *table, int64_t index)
{
    table->blocks[index].next_free = table->first_free;
    table->first_free = index;
}

/* Double the array of blocks, and add the new entries to the list of free entries.
 *
 * They are added in reverse order, so that the one with the lowest index is used first. Return 0,
 * or -1 with a MemoryError if there is no memory. */
static int double_blocks(BlockTable *table)
{
    int64_t old_capacity = table->capacity;
    int64_t capacity = old_capacity ? 2 * old_capacity : INITIAL_BLOCKS;
    Block *blocks = PyMem_Realloc(table->blocks, capacity * sizeof(Block));
    if (blocks == NULL) {
        PyErr_NoMemory();
        return -1;
    }

    table->blocks = blocks;
    table->capacity = capacity;

    for (int64_t index = capacity - 1; index >= old_capacity; index--) {
        blocks[index] = (Block){0};
        push_free_entry(table, index);
    }

    return 0;
}

/* Remove the first entry from the list of free entries, and return its index. If there is none,
 * the array of blocks grows. Return NO_BLOCK with a MemoryError if there is no memory for that. */
static int64_t pop_free_entry(BlockTable *table)
{
    if (table->first_free == NO_BLOCK && double_blocks(table) < 0)
        return NO_BLOCK;
    int64_t index = table->first_free;
    table->first_free = table->blocks[index].next_free;
    return index;
}

/* Make sure that at most half of the slots are in use after one more block is added, because
 * searches take longer in a fuller table. Return 0, or -1 with a MemoryError. */
static int reserve_slot(BlockTable *table)
{
    if (table->slots == NULL)
        return double_slots(table);
    int64_t slot_count = table->slots_mask + 1;
    int64_t new_block_count = table->used_count + table->unused_count + 1;
    return 2 * new_block_count > slot_count ? double_slots(table) : 0;
}

/* Add a block with one user, and return its index, or NO_BLOCK with a MemoryError if there is no
 * memory. The table takes its own reference to the object of the hash. */
static int64_t add_block(BlockTable *table, const BlockHash *block_hash)
{
    if (reserve_slot(table) < 0)
        return NO_BLOCK;

    int64_t index = pop_free_entry(table);
    if (index == NO_BLOCK)
        return NO_BLOCK;

    table->blocks[index] =
        (Block){.hash = *block_hash, .user_count = 1, .older = NO_BLOCK, .newer = NO_BLOCK};
    Py_XINCREF(block_hash->object);
    insert_slot(table, make_slot_entry(block_hash, index));
    table->used_count++;

    return index;
}

/* Remove one unused block from the table, and add its entry to the free ones. The object of its
 * hash is released at the very end, because that may run Python code, which may use the table. */
static void remove_block(BlockTable *table, int64_t index)
{
    remove_from_unused(table, index);
    remove_slot(table, index);
    PyObject *hash_object = table->blocks[index].hash.object;
    table->blocks[index].hash.object = NULL;
    push_free_entry(table, index);
    Py_XDECREF(hash_object);
}

/* Remove the least recently used blocks until at most `capacity` unused ones are left. A negative
 * capacity counts as 0. */
static void evict_blocks(BlockTable *table, int64_t capacity)
{
    while (table->unused_count > 0 && table->unused_count > capacity) {
        int64_t oldest = table->oldest;
        int64_t next_oldest = table->blocks[oldest].newer;
        /* Load the next block into the cache of the processor in advance, to save time. */
        if (next_oldest != NO_BLOCK)
            __builtin_prefetch(&table->blocks[next_oldest]);
        remove_block(table, oldest);
    }
}

/* Add a user to a block. A block with users cannot be evicted. */
static void use_block(BlockTable *table, int64_t index)
{
    if (table->blocks[index].user_count++ == 0) {
        remove_from_unused(table, index);
        table->used_count++;
    }
}

/* Remove a user from a block. A block without users stays in the table until it is evicted. */
static void stop_using_block(BlockTable *table, int64_t index)
{
    if (--table->blocks[index].user_count == 0) {
        table->used_count--;
        add_to_unused(table, index);
    }
}

/* -- blocks and tokens of a replica's requests ------------------------------------------------- */

/* Return the number of blocks that are free or could be evicted. */
static int64_t count_free_blocks(const Replica *self)
{
    return self->kv_blocks - self->private_block_count - self->block_table.used_count;
}

/* Append a block, by its index in the table, to the list of blocks that a request shares with
 * others. Return 0, or -1 with a MemoryError. */
static int append_shared_block(Request *request, int64_t index)
{
    if (request->shared_count == request->shared_capacity) {
        int64_t *blocks = grow_array(request->shared_blocks, &request->shared_capacity,
                                     INITIAL_REQUESTS, sizeof(int64_t));
        if (blocks == NULL)
            return -1;
        request->shared_blocks = blocks;
    }

    request->shared_blocks[request->shared_count++] = index;
    return 0;
}

/* Set the shared blocks of a request to the blocks at the beginning of its prompt that are in the
 * cache. Return 0, or -1 with an exception. The blocks do not count the request as a user yet.
 *
 * At least one token of a prompt is computed, even if all its blocks are in the cache: the first
 * output token follows from it. */
static int match_cached_prefix(Replica *self, Request *request)
{
    request->shared_count = 0;
    if (!self->block_reuse)
        return 0;

    int64_t reusable_blocks = floor_divide(request->prefill_tokens - 1, self->tokens_per_block);
    reusable_blocks = minimum(reusable_blocks, request->block_count);
    for (int64_t i = 0; i < reusable_blocks; i++) {
        prefetch_slot(&self->block_table, request, i + PREFETCH_DISTANCE);
        int64_t index = find_block(&self->block_table, &request->block_hashes[i]);
        if (index == NOT_FOUND)
            return 0;
        if (index == SEARCH_FAILED || append_shared_block(request, index) < 0)
            return -1;
    }

    return 0;
}

/* Return how many shared blocks of a request have no user yet. */
static int64_t count_unused_blocks(const Replica *self, const Request *request)
{
    int64_t unused_count = 0;
    for (Py_ssize_t i = 0; i < request->shared_count; i++)
        if (self->block_table.blocks[request->shared_blocks[i]].user_count == 0)
            unused_count++;
    return unused_count;
}

/* Record how many blocks of an admitted request were in the cache, and how many were not. Only the
 * first admission counts, not the admission after a pause. */
static void record_cache_hits(Replica *self, Request *request)
{
    int is_first_admission = request->cached_tokens < 0;
    if (!is_first_admission)
        return;

    request->cached_tokens = request->shared_count * self->tokens_per_block;
    if (self->block_reuse) {
        self->cache_hits += request->shared_count;
        self->cache_misses += request->block_count - request->shared_count;
    }
}

/* Return how many cache blocks a waiting request has to have for its admission: those of all tokens
 * to be prefilled and, with `reserves_output_blocks`, those of the output. */
static int64_t count_blocks_to_admit(const Replica *self, const Request *request)
{
    int64_t tokens = request->prefill_tokens;
    if (self->reserves_output_blocks)
        tokens += request->remaining_output_tokens;
    return ceil_divide(tokens, self->tokens_per_block);
}

/* Count the blocks of an admitted request as used, and evict unused blocks to make room for them.
 *
 * Unused blocks stay in the cache as long as there is free memory for them. The shared blocks of
 * the request have to be counted as used before the eviction, so that it spares them. */
static void take_blocks_to_admit(Replica *self, const Request *request, int64_t private_count)
{
    for (Py_ssize_t i = 0; i < request->shared_count; i++)
        use_block(&self->block_table, request->shared_blocks[i]);
    self->private_block_count += private_count;
    evict_blocks(&self->block_table, count_free_blocks(self));
}

/* Allocate cache blocks to a waiting request. Return ALLOCATED or TOO_FEW_FREE_BLOCKS, or
 * ALLOCATION_FAILED with an exception.
 *
 * The blocks of its prompt prefix that are in the cache are shared with other requests, and need
 * not be computed. The rest are private. Cached blocks that no request uses count as free. */
static int allocate_blocks(Replica *self, Request *request)
{
    if (match_cached_prefix(self, request) < 0)
        return ALLOCATION_FAILED;

    int64_t private_count = count_blocks_to_admit(self, request) - request->shared_count;

    /* Shared blocks without users are free now, but not once this request uses them. */
    int64_t needed_count = private_count + count_unused_blocks(self, request);
    if (needed_count > count_free_blocks(self)) {
        request->shared_count = 0; /* a later attempt searches the cache again */
        return TOO_FEW_FREE_BLOCKS;
    }

    take_blocks_to_admit(self, request, private_count);
    int64_t cached_tokens = request->shared_count * self->tokens_per_block;
    request->private_block_count = private_count;
    request->prefill_tokens_left = request->prefill_tokens - cached_tokens;
    record_cache_hits(self, request);

    return ALLOCATED;
}

/* Share one private block of a request. Return 1, or 0 if another request has shared this block in
 * the meantime, or -1 with an exception. */
static int share_block(Replica *self, Request *request, const BlockHash *block_hash)
{
    int64_t existing_block = find_block(&self->block_table, block_hash);
    if (existing_block == SEARCH_FAILED)
        return -1;
    if (existing_block != NOT_FOUND)
        return 0;

    int64_t new_block = add_block(&self->block_table, block_hash);
    if (new_block == NO_BLOCK || append_shared_block(request, new_block) < 0)
        return -1;

    request->private_block_count--;
    self->private_block_count--;
    return 1;
}

/* Share the full blocks of a computed prompt, so that later requests can reuse them. Return 0, or
 * -1 with an exception.
 *
 * The first blocks of the prompt may be shared since the admission, because they were in the cache.
 * The request has computed the blocks after them, which are private until now.
 *
 * Another request with the same prompt may have shared one of these blocks in the meantime. Then
 * this block and those after it stay private, and exist twice in memory. */
static int share_prompt_blocks(Replica *self, Request *request)
{
    int64_t full_block_count = request->input_tokens / self->tokens_per_block;
    int64_t end = minimum(full_block_count, request->block_count);
    for (int64_t i = request->shared_count; i < end; i++) {
        prefetch_slot(&self->block_table, request, i + PREFETCH_DISTANCE);
        int is_shared = share_block(self, request, &request->block_hashes[i]);
        if (is_shared < 0)
            return -1;
        if (!is_shared)
            break;
    }

    return 0;
}

/* Free all private blocks of a request, and stop using its shared ones.
 *
 * `current_private_count` is how many private blocks the request has now. This can be more than
 * its field `private_block_count`, the number at admission, because decoding takes more blocks.
 *
 * The block that becomes unused first is evicted first. So the last blocks of the prefix are
 * released first: fewer prompts share them, and they are useless without the blocks before them. */
static void release_blocks(Replica *self, Request *request, int64_t current_private_count)
{
    self->private_block_count -= current_private_count;
    request->private_block_count = 0;
    for (Py_ssize_t i = request->shared_count - 1; i >= 0; i--)
        stop_using_block(&self->block_table, request->shared_blocks[i]);
    request->shared_count = 0;
}

/* Return the phase of a decoding request, which tells in which iterations it needs a new block of
 * the cache. These are the iterations whose number modulo tokens_per_block is the phase.
 *
 * A decoding request stores one token per iteration in the cache: token number t in iteration
 * t + offset. The first of these tokens has the number `prefill_tokens`, and is stored in the
 * iteration after `resumed_iteration`. A new block begins with each token whose number is a
 * multiple of tokens_per_block.
 *
 * For example, with 32 tokens per block, a prompt of 40 tokens and the first output token in
 * iteration 100, token 40 is stored in iteration 101. The offset is 101 - 40 = 61, and the phase is
 * 61 % 32 = 29. The next block begins with token 64 in iteration 64 + 61 = 125, and 125 % 32 is 29.
 * The offset is negative for a prompt that is longer than the number of iterations so far. */
static int64_t find_block_phase(const Replica *self, const Request *request)
{
    int64_t first_storing_iteration = request->resumed_iteration + 1;
    int64_t offset = first_storing_iteration - request->prefill_tokens;
    return floor_modulo(offset, self->tokens_per_block);
}

/* Return how many new blocks the decoding requests need in an iteration.
 *
 * A request needs one every tokens_per_block iterations, so the requests are counted by the
 * remainder of these iterations (their phase). Not used with `reserves_output_blocks`, where all
 * blocks are taken at admission. */
static int64_t count_demanded_blocks(const Replica *self, int64_t iteration)
{
    return self->block_demand_by_phase[iteration % self->tokens_per_block];
}

/* Return whether a decoding request needs a new block in the current iteration. */
static int needs_block_now(const Replica *self, const Request *request)
{
    return self->iteration % self->tokens_per_block == find_block_phase(self, request);
}

/* Return the last finished iteration in which a decoding or done request got a token. */
static int64_t find_newest_token_iteration(const Replica *self, const Request *request)
{
    int64_t last_finished_iteration = self->iteration - 1;
    return minimum(last_finished_iteration, request->last_iteration);
}

/* Return how many tokens of a decoding or done request are in the key-value cache.
 *
 * These are the prefilled tokens and the output tokens since the prefill, without the newest one. A
 * token enters the cache in the iteration that computes the token after it.
 *
 * For example, a request that got output tokens in iterations 10 (`resumed_iteration`), 11 and 12
 * has three, and 12 - 10 = 2 of them are in the cache. */
static int64_t count_cached_tokens(const Replica *self, const Request *request)
{
    int64_t newest_token_iteration = find_newest_token_iteration(self, request);
    int64_t cached_output_tokens = newest_token_iteration - request->resumed_iteration;
    return request->prefill_tokens + cached_output_tokens;
}

/* Return how many private blocks a decoding request has: those it does not share with others.
 * `cached_tokens` is how many of its tokens are in the cache.
 *
 * If the blocks of the output were reserved at admission, their number does not change. Otherwise a
 * request takes a new block whenever its last one is full. For example, with 32 tokens per block, a
 * request with 64 cached tokens has 2 blocks. It takes a third one at the beginning of the next
 * iteration, and has 3 blocks while this iteration is computed. */
static int64_t count_private_blocks(const Replica *self, const Request *request,
                                    int64_t cached_tokens)
{
    if (self->reserves_output_blocks)
        return request->private_block_count;
    int64_t filled_block_count = ceil_divide(cached_tokens, self->tokens_per_block);
    int has_taken_empty_block = self->is_computing && needs_block_now(self, request);
    int64_t block_count = has_taken_empty_block ? filled_block_count + 1 : filled_block_count;
    return block_count - request->shared_count;
}

/* Remove a decoding request from the batch, because it is done, paused or cancelled, and free its
 * blocks.
 *
 * The reference that the batch (`decoding_queue`) owned passes to the caller. The caller also has
 * to remove the request from its bucket. */
static void remove_from_batch(Replica *self, Request *request)
{
    /* The tokens and blocks that the request has now, before it leaves the batch. */
    int64_t cached_tokens = count_cached_tokens(self, request);
    int64_t private_count = count_private_blocks(self, request, cached_tokens);

    /* Remove the request from the batch. */
    unlink_request(&self->decoding_queue, request);
    if (!self->reserves_output_blocks)
        self->block_demand_by_phase[find_block_phase(self, request)]--;

    /* Subtract its share from the totals of the replica. */
    self->decoding_count--;
    self->active_count--;
    self->kv_tokens -= cached_tokens;
    release_blocks(self, request, private_count);
}

/* Remove a decoding request from the batch before it gets its last token. The reference that the
 * batch owned passes to the caller. */
static void remove_unfinished(Replica *self, Request *request)
{
    remove_from_bucket(self, request);
    remove_from_batch(self, request);
}

/* Return whether a request has got a token since its last admission to the batch.
 *
 * A prefill gives the first token when it ends, and sets `last_iteration` then. So a request that
 * was cancelled before the end of its prefill has no `last_iteration`. */
static int has_decoded(const Request *request)
{
    if (request->state == DONE)
        return request->last_iteration != NO_ITERATION;
    return request->state == DECODING;
}

/* Return how many tokens a request has by the end of the last finished iteration.
 *
 * Tokens are not counted one by one. A request that was paused keeps the tokens it had, and is
 * admitted again for the `remaining_output_tokens`. From the iteration `resumed_iteration` on, it
 * gets one token per iteration. For example, a request for 10 tokens was paused after 4, and 6
 * remain. After iterations 20 (`resumed_iteration`) to 22 it has 4 + 3 = 7 tokens. */
static int64_t count_generated_tokens(const Replica *self, const Request *request)
{
    int64_t tokens_before_admission = request->output_tokens - request->remaining_output_tokens;
    if (!has_decoded(request))
        return tokens_before_admission;

    int64_t newest_token_iteration = find_newest_token_iteration(self, request);
    int64_t tokens_since_admission = newest_token_iteration - request->resumed_iteration + 1;

    /* The number can only be negative for a request for less than one output token. */
    if (tokens_since_admission < 0)
        return tokens_before_admission;

    return tokens_before_admission + tokens_since_admission;
}

/* Append (request, first iteration, last iteration) to the list of recent pauses, which Python
 * reads. These are the iterations in which the request got tokens since its last admission. Return
 * 0, or -1 with an exception. The list holds its own reference to the request. */
static int record_pause(Replica *self, Request *request, int64_t first_iteration,
                        int64_t last_iteration)
{
    PyObject *pause =
        Py_BuildValue("OLL", request, (long long)first_iteration, (long long)last_iteration);
    if (pause == NULL)
        return -1;
    int result = PyList_Append(self->recent_pauses, pause);
    Py_DECREF(pause);
    return result;
}

/* Remove the partly prefilled request from the batch, because it is paused. Return 0, or -1 with an
 * exception. The reference that the batch owned passes to the caller in both cases. */
static int pause_prefill(Replica *self, Request *request)
{
    self->partly_prefilled = NULL;
    release_blocks(self, request, request->private_block_count);
    self->active_count--;
    /* It has no token yet. The range of iterations from 0 to -1 is empty. */
    int64_t first_iteration = 0;
    int64_t last_iteration = -1;
    return record_pause(self, request, first_iteration, last_iteration);
}

/* Remove a decoding request from the batch, because it is paused. Return 0, or -1 with an
 * exception. The reference that the batch owned passes to the caller in both cases.
 *
 * The tokens generated so far have to be prefilled again, after the prompt. */
static int pause_decoding(Replica *self, Request *request)
{
    int64_t generated_tokens = count_generated_tokens(self, request);
    remove_unfinished(self, request);
    request->prefill_tokens = request->input_tokens + generated_tokens;
    request->remaining_output_tokens = request->output_tokens - generated_tokens;
    int64_t last_finished_iteration = self->iteration - 1;
    return record_pause(self, request, request->resumed_iteration, last_finished_iteration);
}

/* Pause (preempt) the request admitted last, which frees its blocks. Return 0, or -1 with an
 * exception if the pause cannot be recorded. The request is paused in both cases.
 *
 * It returns to the front of the queue. When it is admitted again, its prompt and the tokens
 * generated so far are prefilled again, because their keys and values are lost. */
static int pause_newest_request(Replica *self)
{
    /* Prompts are prefilled in order of admission. So a request in prefill is newer than all
     * decoding ones. */
    Request *request = self->partly_prefilled;
    int result;

    if (request != NULL) {
        result = pause_prefill(self, request);
    } else {
        request = self->decoding_queue.tail;
        result = pause_decoding(self, request);
    }

    request->prefill_tokens_left = request->prefill_tokens;
    request->state = WAITING;
    push_front(&self->waiting_queue, request); /* it takes over the reference of the batch */
    self->pause_count++;

    return result;
}

/* -- iterations -------------------------------------------------------------------------------- */

/* Replace the list of recent pauses by an empty one. It is not emptied, because the caller may
 * still use it. Return 0, or -1 with an exception. */
static int clear_pauses(Replica *self)
{
    if (PyList_Size(self->recent_pauses) == 0)
        return 0;

    PyObject *empty_list = PyList_New(0);
    if (empty_list == NULL)
        return -1;

    Py_DECREF(self->recent_pauses);
    self->recent_pauses = empty_list;
    return 0;
}

/* Take the new cache blocks that decoding requests need in this iteration. Return 0, or -1 with an
 * exception.
 *
 * If too few blocks are free, the newest requests are paused until the rest have enough. Each pause
 * frees the blocks of one request, and may also lower the number of blocks needed. */
static int take_decoding_blocks(Replica *self)
{
    if (self->reserves_output_blocks)
        return 0; /* all blocks are taken at admission */

    int has_paused = 0;
    int64_t needed_count = count_demanded_blocks(self, self->iteration);
    while (needed_count > count_free_blocks(self)) {
        if (pause_newest_request(self) < 0)
            return -1;
        has_paused = 1;
        needed_count = count_demanded_blocks(self, self->iteration);
    }

    if (has_paused) {
        /* A block that no request uses counts as free, although it stays in the cache. The new
         * blocks take the place of some of these. The others may stay, as far as there is room. */
        int64_t room_for_unused_blocks = count_free_blocks(self) - needed_count;
        evict_blocks(&self->block_table, room_for_unused_blocks);
    }

    self->private_block_count += needed_count;
    return 0;
}

/* Return whether the first waiting request can be admitted now, as far as memory does not matter.
 *
 * It cannot if there is none, if the batch is full, if the request is not due yet, or if its
 * prompt exceeds the budget (in tokens) and cannot be prefilled in parts. */
static int can_admit_first_waiting(const Replica *self, int64_t budget, int64_t now_ns)
{
    const Request *request = self->waiting_queue.head;
    if (request == NULL || request->due_ns > now_ns)
        return 0;
    if (self->active_count >= self->max_batch_size)
        return 0;
    return self->chunked_prefill || request->prefill_tokens_left <= budget;
}

/* Admit the first waiting request to the batch, unless it cannot be admitted now or too few blocks
 * are free. Return 0, or -1 with an exception.
 *
 * `admitted` is set to the admitted request, and gets the reference of the queue. It is set to NULL
 * if none is admitted. The first request then stays the first, and no later one overtakes it. */
static int admit_first_waiting(Replica *self, int64_t budget, int64_t now_ns, Request **admitted)
{
    *admitted = NULL;
    if (!can_admit_first_waiting(self, budget, now_ns))
        return 0;

    Request *request = self->waiting_queue.head;
    int result = allocate_blocks(self, request);
    if (result == ALLOCATION_FAILED)
        return -1;
    if (result == TOO_FEW_FREE_BLOCKS)
        return 0;

    unlink_request(&self->waiting_queue, request);
    request->state = PREFILLING;
    self->active_count++;

    if (request->admitted_ns < 0)
        request->admitted_ns = now_ns;

    *admitted = request;
    return 0;
}

/* Add a part of a prompt to what an iteration computes. The part has `tokens` tokens, and the
 * `tokens_before` tokens of the prompt before it are in the cache.
 *
 * With causal attention, each token attends to all tokens before it. These are the tokens before
 * the chunk and, on average over the chunk, half of the chunk. */
static void add_prompt_chunk(IterationWork *work, int64_t tokens_before, int64_t tokens)
{
    work->tokens_read += tokens_before + tokens;
    work->attended_tokens += (double)tokens * ((double)tokens_before + 0.5 * (double)tokens);
    work->context_tokens += tokens;
    work->context_requests++;
}

/* Add the prefill of the next part of a prompt to the work of an iteration. Return the number of
 * tokens of this part, which is from 1 to `budget`, or -1 with an exception.
 *
 * The replica takes over the caller's reference to the request: it stays the partly prefilled
 * request, or joins those whose prefill ends with the iteration. */
static int64_t prefill_chunk(Replica *self, Request *request, IterationWork *work, int64_t budget)
{
    int64_t computed_tokens = request->prefill_tokens - request->prefill_tokens_left;
    int64_t chunk_tokens = minimum(request->prefill_tokens_left, budget);
    add_prompt_chunk(work, computed_tokens, chunk_tokens);
    request->prefill_tokens_left -= chunk_tokens;
    if (request->prefill_tokens_left > 0) {
        self->partly_prefilled = request;
        return chunk_tokens;
    }

    self->partly_prefilled = NULL;
    if (append_request(&self->finishing_prefill, request) < 0)
        return -1;

    return chunk_tokens;
}

/* Add the prefill of at most `budget` prompt tokens to the work of an iteration. Return 0, or -1
 * with an exception.
 *
 * Requests are admitted in order of arrival. A prompt that exceeds the rest of the budget is
 * prefilled in part and continued in the next iteration (chunked prefill). */
static int schedule_prefill(Replica *self, IterationWork *work, int64_t budget, int64_t now_ns)
{
    while (budget > 0) {
        Request *request = self->partly_prefilled;
        if (request == NULL && admit_first_waiting(self, budget, now_ns, &request) < 0)
            return -1;
        if (request == NULL)
            return 0;

        int64_t chunk_tokens = prefill_chunk(self, request, work, budget);
        if (chunk_tokens < 0)
            return -1;

        budget -= chunk_tokens;
    }

    return 0;
}

/* Return the duration of an iteration in ns by the roofline model. It takes as long as its memory
 * traffic or its computation, whichever is longer, plus a constant overhead. See Costs in
 * replica.py for the costs.
 *
 * Memory traffic is that of the weights and of the tokens read from the key-value cache. Each
 * computed token costs `token_ns`, and `attended_ns` for each token that it attends to. The result
 * is rounded up to a full ns, so that an iteration always takes some time. */
static int64_t iteration_duration_ns(const Replica *self, const IterationWork *work)
{
    double memory_ns = self->weights_ns + (double)work->tokens_read * self->kv_token_ns;
    int64_t computed_tokens = work->decoding_count + work->context_tokens;
    double compute_ns =
        (double)computed_tokens * self->token_ns + work->attended_tokens * self->attended_ns;
    double longer_ns = memory_ns > compute_ns ? memory_ns : compute_ns;
    return (int64_t)(self->overhead_ns + longer_ns) + 1;
}

/* Set `work` to what the next iteration computes: one token of each decoding request, and prompts.
 * Return 0, or -1 with an exception.
 *
 * If requests were paused just now, because memory is short, no prompts are computed. A paused
 * request is the first one in the queue. If it were admitted in this iteration, it would take back
 * the memory that its pause has freed. */
static int schedule_work(Replica *self, int64_t now_ns, IterationWork *work)
{
    *work = (IterationWork){.decoding_count = self->decoding_count};

    /* Decoding requests read their whole cache, and the token that is computed now. */
    work->tokens_read = self->kv_tokens + self->decoding_count;
    work->attended_tokens = (double)work->tokens_read;
    int has_paused = PyList_Size(self->recent_pauses) > 0;
    if (has_paused)
        return 0;

    int64_t prompt_budget = self->max_num_tokens - self->decoding_count;
    return schedule_prefill(self, work, prompt_budget, now_ns);
}

/* Begin an iteration, which ends at `end_ns`. Return 1, or 0 if there is nothing to do, or -1 with
 * an exception. After an exception the replica must not be used any more.
 *
 * The iteration computes one token of each decoding request. The rest of `max_num_tokens` is used
 * to prefill prompts. If cache blocks are missing, some requests are paused first. The replica
 * becomes idle if there is nothing to compute. */
static int begin_iteration(Replica *self, int64_t now_ns)
{
    IterationWork work;

    if (clear_pauses(self) < 0)
        return -1;
    if (take_decoding_blocks(self) < 0)
        return -1;
    if (schedule_work(self, now_ns, &work) < 0)
        return -1;

    int has_work = work.decoding_count > 0 || work.context_tokens > 0;
    if (!has_work) {
        self->end_ns = NEVER;
        return 0;
    }

    self->context_tokens = work.context_tokens;
    self->context_requests = work.context_requests;
    self->end_ns = now_ns + iteration_duration_ns(self, &work);
    self->is_computing = 1;
    if (append_time(&self->end_times, self->end_ns) < 0)
        return -1;

    return 1;
}

/* Append a request to a Python list of those that are done. Return 0, or -1 with an exception. The
 * replica's reference to the request is given up in both cases. */
static int move_to_done(Request *request, PyObject *done)
{
    int result = PyList_Append(done, OBJECT(request));
    Py_DECREF(OBJECT(request));
    return result;
}

/* Remove the requests that get their last token in an iteration, free their blocks, and append
 * them to the Python list `done`. Return 0, or -1 with an exception.
 *
 * A bucket is the list of the requests that get their last token in the same iteration. */
static int remove_finished(Replica *self, int64_t iteration, PyObject *done)
{
    RequestQueue *bucket = get_bucket(self, iteration);
    while (bucket->head != NULL) {
        Request *request = bucket->head;
        remove_from_bucket(self, request);
        request->state = DONE;
        remove_from_batch(self, request);
        if (move_to_done(request, done) < 0)
            return -1;
    }

    return 0;
}

/* Add a request to those that decode. It has been in the batch since its admission.
 *
 * The queue of decoding requests takes over the caller's reference. The request is also added to
 * the bucket of all requests with the same last iteration, which owns no references. */
static void start_decoding(Replica *self, Request *request)
{
    request->state = DECODING;
    self->kv_tokens += request->prefill_tokens;
    if (!self->reserves_output_blocks)
        self->block_demand_by_phase[find_block_phase(self, request)]++;
    push_back(&self->decoding_queue, request);
    add_to_bucket(self, request);
    self->decoding_count++;
}

/* Record that the prefill of a request ends with an iteration, which gives it a token.
 *
 * It is the first token of the request, or the first one after a pause. From now on the request
 * gets one token per iteration, so the iteration of its last token is known. With one token, it is
 * this iteration. */
static void record_first_token(Request *request, int64_t iteration)
{
    int had_tokens_before_pause = request->first_iteration != NO_ITERATION;
    if (!had_tokens_before_pause)
        request->first_iteration = iteration;
    request->resumed_iteration = iteration;
    request->last_iteration = iteration + request->remaining_output_tokens - 1;
}

/* Give a request the token that it gets with the end of its prefill. Then the request begins to
 * decode or, if it needs no other token, is done and appended to the Python list `done`. Return 0,
 * or -1 with an exception.
 *
 * In either case this function takes over one reference to the request from the caller. */
static int end_prefill(Replica *self, Request *request, int64_t iteration, PyObject *done)
{
    record_first_token(request, iteration);
    if (self->block_reuse && share_prompt_blocks(self, request) < 0) {
        Py_DECREF(OBJECT(request));
        return -1;
    }

    int needs_more_tokens = request->remaining_output_tokens > 1;
    if (needs_more_tokens) {
        start_decoding(self, request);
        return 0;
    }

    release_blocks(self, request, request->private_block_count);
    self->active_count--;
    request->state = DONE;

    return move_to_done(request, done);
}

/* Give the first token to the requests whose prefill ends with an iteration. Return 0, or -1 with
 * an exception. Requests that need no other token are appended to the Python list `done`.
 *
 * These requests are in the array `finishing_prefill`, and are moved to `first_token_requests`,
 * from which Python reads them. That array then owns a reference to each request. A second one
 * belongs to the queue of decoding requests, or to `done`. */
static int end_prefills(Replica *self, int64_t iteration, PyObject *done)
{
    clear_requests(&self->first_token_requests);

    /* Exchange both arrays, so that the memory of the empty one is used again. */
    RequestArray empty_array = self->first_token_requests;
    self->first_token_requests = self->finishing_prefill;
    self->finishing_prefill = empty_array;

    for (Py_ssize_t i = 0; i < self->first_token_requests.count; i++) {
        Request *request = self->first_token_requests.items[i];
        Py_INCREF(OBJECT(request)); /* the reference that `end_prefill` takes over */
        if (end_prefill(self, request, iteration, done) < 0)
            return -1;
    }

    return 0;
}

/* End the current iteration, and append the requests that are done with it to the Python list
 * `done`. Return 0, or -1 with an exception. In an uneventful iteration (see `is_uneventful`), no
 * request is done, and `done` may be NULL.
 *
 * Every decoding request gets one token. So does every request whose prefill ends with this
 * iteration, which then begins to decode. */
static int end_iteration(Replica *self, PyObject *done)
{
    int64_t finished_iteration = self->iteration;
    self->iteration++;
    self->is_computing = 0;

    /* Each decoding request has got a token. To compute it, the token before it was stored in the
     * cache. The requests that are done count here, too, and are removed next. */
    self->kv_tokens += self->decoding_count;
    self->decoded_tokens += self->decoding_count;
    if (remove_finished(self, finished_iteration, done) < 0)
        return -1;

    return end_prefills(self, finished_iteration, done);
}

/* Return 1 if the current iteration may end without notice to the owner of the replica, else 0.
 *
 * In an uneventful iteration no request gets its first or last token, and the next iteration
 * pauses none. */
static int is_uneventful(Replica *self)
{
    if (self->decoding_count == 0 && self->partly_prefilled == NULL)
        return 0; /* all requests were cancelled: the replica becomes idle */
    if (self->finishing_prefill.count > 0)
        return 0; /* a request gets its first token */
    if (get_bucket(self, self->iteration)->head != NULL)
        return 0; /* a request gets its last token */
    if (self->reserves_output_blocks)
        return 1; /* no request is ever paused */

    return count_demanded_blocks(self, self->iteration + 1) <= count_free_blocks(self);
}

/* -- cancellation ------------------------------------------------------------------------------ */

/* Remove a waiting request from the queue, whose reference passes to the caller. Return 0, or -1
 * with a ValueError for a request that was never submitted. */
static int remove_waiting_request(Replica *self, Request *request)
{
    int is_first = request == self->waiting_queue.head;
    int is_in_queue = is_first || request->previous != NULL;
    if (!is_in_queue) {
        PyErr_SetString(PyExc_ValueError, "a request that was not submitted");
        return -1;
    }

    unlink_request(&self->waiting_queue, request);
    return 0;
}

/* Return the index of a request in an array, or -1 without an exception if it is not there. */
static Py_ssize_t find_request(const RequestArray *array, const Request *request)
{
    for (Py_ssize_t i = 0; i < array->count; i++)
        if (array->items[i] == request)
            return i;
    return -1;
}

/* Remove a request in prefill from the batch, and free its blocks. Return 0, or -1 with a
 * ValueError for a request of another replica. The caller takes over the reference. */
static int remove_prefilling_request(Replica *self, Request *request)
{
    if (request == self->partly_prefilled) {
        self->partly_prefilled = NULL;
    } else {
        Py_ssize_t index = find_request(&self->finishing_prefill, request);
        if (index < 0) {
            PyErr_SetString(PyExc_ValueError, "a request of another replica");
            return -1;
        }
        remove_at(&self->finishing_prefill, index);
    }

    release_blocks(self, request, request->private_block_count);
    self->active_count--;
    return 0;
}

/* Stop a request unless it is done. Return 0, or -1 with a ValueError for a request of another
 * replica.
 *
 * The state of a request says which part of the replica owns it: the queue, the prefill or the
 * batch of decoding requests. The request is removed from there, and that reference is released. */
static int cancel_request(Replica *self, Request *request)
{
    int result = 0;
    switch (request->state) {
    case DONE:
        return 0;
    case WAITING:
        result = remove_waiting_request(self, request);
        break;
    case PREFILLING:
        result = remove_prefilling_request(self, request);
        break;
    case DECODING:
        remove_unfinished(self, request);
        break;
    }
    if (result < 0)
        return -1;

    request->state = DONE;
    Py_DECREF(OBJECT(request));
    return 0;
}

/* -- the methods of Replica -------------------------------------------------------------------- */

/* Set `number` to an attribute of a Python object, a float. Return 0, or -1 with an exception. */
static int read_float(PyObject *object, const char *name, double *number)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    if (value == NULL)
        return -1;
    *number = PyFloat_AsDouble(value);
    Py_DECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

/* Set `number` to an attribute of a Python object, an int. Return 0, or -1 with an exception. */
static int read_int(PyObject *object, const char *name, int64_t *number)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    if (value == NULL)
        return -1;
    int failed = convert_int64(value, number);
    Py_DECREF(value);
    return failed;
}

/* Set `flag` to 1 if an attribute of a Python object, a bool or int, is true, and to 0 otherwise.
 * Return 0, or -1 with an exception. */
static int read_bool(PyObject *object, const char *name, int *flag)
{
    int64_t number = 0;
    int failed = read_int(object, name, &number);
    *flag = number != 0;
    return failed;
}

/* Copy the costs of an iteration from a Costs object (replica.py) to the replica. Return 0, or -1
 * with an exception. */
static int read_costs(Replica *self, PyObject *costs)
{
    if (read_float(costs, "overhead_ns", &self->overhead_ns) < 0 ||
        read_float(costs, "weights_ns", &self->weights_ns) < 0 ||
        read_float(costs, "kv_token_ns", &self->kv_token_ns) < 0 ||
        read_float(costs, "token_ns", &self->token_ns) < 0 ||
        read_float(costs, "attended_ns", &self->attended_ns) < 0)
        return -1;
    return 0;
}

/* Copy the limits of the server from a ServerLimits object (replica.py) to the replica. Return 0,
 * or -1 with an exception.
 *
 * `tokens_per_block` and `max_seq_len` are the lengths of arrays. A ValueError is raised if one of
 * them is not positive, or if `max_seq_len` is larger than MAX_SEQ_LEN. */
static int read_limits(Replica *self, PyObject *limits)
{
    if (read_int(limits, "max_batch_size", &self->max_batch_size) < 0 ||
        read_int(limits, "max_num_tokens", &self->max_num_tokens) < 0 ||
        read_int(limits, "kv_blocks", &self->kv_blocks) < 0 ||
        read_int(limits, "tokens_per_block", &self->tokens_per_block) < 0 ||
        read_int(limits, "max_seq_len", &self->max_seq_len) < 0 ||
        read_bool(limits, "chunked_prefill", &self->chunked_prefill) < 0 ||
        read_bool(limits, "reserves_output_blocks", &self->reserves_output_blocks) < 0 ||
        read_bool(limits, "block_reuse", &self->block_reuse) < 0)
        return -1;

    if (self->tokens_per_block < 1 || self->max_seq_len < 1 || self->max_seq_len > MAX_SEQ_LEN) {
        PyErr_SetString(PyExc_ValueError, "tokens_per_block and max_seq_len must be positive");
        return -1;
    }

    return 0;
}

/* Create the buckets. A bucket is the list of the requests that get their last token in the same
 * iteration. Return 0, or -1 without an exception if there is no memory.
 *
 * Buckets are used in turn: with 8 buckets, iterations 3, 11 and 19 have bucket 3. So a request
 * must not end 8 or more iterations after the current one. It ends at most `max_seq_len` iterations
 * later, because it has at most that many tokens and gets one per iteration. The number of buckets
 * is a power of two, so that a bit mask replaces the division. */
static int create_buckets(Replica *self)
{
    /* The current iteration, the `max_seq_len` iterations after it, and one to spare. */
    int64_t min_bucket_count = 1 + self->max_seq_len + 1;
    int64_t bucket_count = 1;
    while (bucket_count < min_bucket_count)
        bucket_count *= 2;

    self->bucket_mask = bucket_count - 1;
    self->buckets = PyMem_Calloc(bucket_count, sizeof(RequestQueue));
    return self->buckets == NULL ? -1 : 0;
}

/* Create the arrays and the list of an idle replica. Return 0, or -1 with a MemoryError. What was
 * created before the error is freed with the replica. */
static int create_arrays(Replica *self)
{
    self->block_demand_by_phase = PyMem_Calloc(self->tokens_per_block, sizeof(int64_t));
    self->recent_pauses = PyList_New(0);
    int has_buckets = create_buckets(self) == 0;
    if (!has_buckets || self->block_demand_by_phase == NULL || self->recent_pauses == NULL) {
        PyErr_NoMemory();
        return -1;
    }

    return 0;
}

/* Replica(costs, limits): create an idle replica. The allocator has set all fields to 0. Return 0,
 * or -1 with an exception. A second call for the same replica is an error. */
static int replica_init(Replica *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"costs", "limits", NULL};
    PyObject *costs, *limits;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO", names, &costs, &limits))
        return -1;

    int is_second_call = self->recent_pauses != NULL;
    if (is_second_call) {
        PyErr_SetString(PyExc_TypeError, "a replica is made once");
        return -1;
    }
    if (read_costs(self, costs) < 0 || read_limits(self, limits) < 0)
        return -1;

    self->block_table.first_free = NO_BLOCK;
    self->block_table.oldest = NO_BLOCK;
    self->block_table.newest = NO_BLOCK;
    self->end_ns = NEVER;

    return create_arrays(self);
}

/* Visit the requests of a queue, for the garbage collector. */
static int visit_queue(const RequestQueue *queue, visitproc visit, void *arg)
{
    for (Request *request = queue->head; request != NULL; request = request->next)
        Py_VISIT(request);
    return 0;
}

/* Visit the requests of an array, for the garbage collector. */
static int visit_array(const RequestArray *array, visitproc visit, void *arg)
{
    for (Py_ssize_t i = 0; i < array->count; i++)
        Py_VISIT(array->items[i]);
    return 0;
}

/* Visit all objects that a replica owns, for the garbage collector. */
static int replica_traverse(Replica *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(OBJECT(self)));
    int result = visit_queue(&self->waiting_queue, visit, arg);
    if (result == 0)
        result = visit_queue(&self->decoding_queue, visit, arg);

    if (result == 0)
        result = visit_array(&self->finishing_prefill, visit, arg);

    if (result == 0)
        result = visit_array(&self->first_token_requests, visit, arg);

    if (result != 0)
        return result;

    Py_VISIT(self->partly_prefilled);
    Py_VISIT(self->recent_pauses);

    for (int64_t i = 0; i < self->block_table.capacity; i++)
        Py_VISIT(self->block_table.blocks[i].hash.object);

    return 0;
}

/* Release all objects that a replica owns. */
static int replica_clear(Replica *self)
{
    clear_queue(&self->waiting_queue);
    clear_queue(&self->decoding_queue);
    clear_requests(&self->finishing_prefill);
    clear_requests(&self->first_token_requests);
    Py_CLEAR(self->partly_prefilled);
    Py_CLEAR(self->recent_pauses);

    for (int64_t i = 0; i < self->block_table.capacity; i++)
        Py_CLEAR(self->block_table.blocks[i].hash.object);

    return 0;
}

/* Free a replica and everything that it owns. */
static void replica_dealloc(Replica *self)
{
    PyTypeObject *type = Py_TYPE(OBJECT(self));
    PyObject_GC_UnTrack(self);
    replica_clear(self);
    PyMem_Free(self->buckets);
    PyMem_Free(self->block_demand_by_phase);
    PyMem_Free(self->finishing_prefill.items);
    PyMem_Free(self->first_token_requests.items);
    PyMem_Free(self->end_times.values);
    PyMem_Free(self->block_table.blocks);
    PyMem_Free(self->block_table.slots);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(OBJECT(type));
}

/* Replica.can_serve(input_tokens) -> bool: whether a prompt of this length can be served at all. */
static PyObject *replica_can_serve(Replica *self, PyObject *tokens)
{
    int64_t input_tokens;
    if (convert_int64(tokens, &input_tokens) < 0)
        return NULL;
    int fits_budget = self->chunked_prefill || input_tokens <= self->max_num_tokens;
    return PyBool_FromLong(input_tokens < self->max_seq_len && fits_budget);
}

/* Replica.submit(request): queue a request. An output that does not fit is shortened without an
 * error, as in trtllm-serve. */
static PyObject *replica_submit(Replica *self, PyObject *object)
{
    Request *request = check_request(object);
    if (request == NULL)
        return NULL;

    int64_t max_output_tokens = self->max_seq_len - request->input_tokens;
    if (request->output_tokens > max_output_tokens) {
        request->output_tokens = max_output_tokens;
        request->remaining_output_tokens = max_output_tokens;
    }

    Py_INCREF(object);
    push_back(&self->waiting_queue, request);
    Py_RETURN_NONE;
}

/* Replica.begin_iteration(now_ns) -> bool: begin an iteration. Return False if there is nothing to
 * do, or NULL with an exception. */
static PyObject *replica_begin_iteration(Replica *self, PyObject *now)
{
    int64_t now_ns;
    if (convert_int64(now, &now_ns) < 0)
        return NULL;
    int has_begun = begin_iteration(self, now_ns);
    return has_begun < 0 ? NULL : PyBool_FromLong(has_begun);
}

/* Replica.end_iteration() -> list: end the current iteration, and return a new list of the requests
 * that are done with it, or NULL with an exception. */
static PyObject *replica_end_iteration(Replica *self, PyObject *unused)
{
    PyObject *done = PyList_New(0);
    if (done != NULL && end_iteration(self, done) < 0)
        Py_CLEAR(done);
    return done;
}

/* Return the replicas of a Python list as a new array of borrowed references, which the caller
 * frees. Return NULL with an exception if the list is empty or has other items. */
static Replica **get_replicas(PyObject *list, Py_ssize_t *count)
{
    *count = PyList_Size(list);
    if (*count < 1) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "no replicas");
        return NULL;
    }

    Replica **replicas = PyMem_Malloc(*count * sizeof(Replica *));
    if (replicas == NULL) {
        PyErr_NoMemory();
        return NULL;
    }

    for (Py_ssize_t i = 0; i < *count; i++) {
        PyObject *item = PyList_GetItem(list, i);
        if (!PyObject_TypeCheck(item, replica_type)) {
            PyErr_SetString(PyExc_TypeError, "not a Replica");
            PyMem_Free(replicas);
            return NULL;
        }
        replicas[i] = (Replica *)item;
    }

    return replicas;
}

/* Return the index of the replica whose iteration ends first. The first of several counts. */
static Py_ssize_t find_first_to_end(Replica **replicas, Py_ssize_t count)
{
    Py_ssize_t first = 0;
    for (Py_ssize_t i = 1; i < count; i++)
        if (replicas[i]->end_ns < replicas[first]->end_ns)
            first = i;
    return first;
}

/* Advance the replicas to the next iteration that the caller has to handle, and return the index of
 * its replica, or -1 with an exception. Uneventful iterations that end before `before_ns` are ended
 * here, in order of time. */
static Py_ssize_t skip_uneventful_iterations(Replica **replicas, Py_ssize_t count,
                                             int64_t before_ns)
{
    while (1) {
        Py_ssize_t index = find_first_to_end(replicas, count);
        Replica *replica = replicas[index];
        int64_t end_ns = replica->end_ns;
        if (end_ns >= before_ns || !is_uneventful(replica))
            return index;
        if (end_iteration(replica, NULL) < 0 || begin_iteration(replica, end_ns) < 0)
            return -1;
    }
}

/* Replica.advance_to_next_event(replicas, before_ns) -> (end_ns, index): advance the replicas to
 * the next iteration that the caller has to handle.
 *
 * Most iterations are uneventful, and are ended here without a call from Python. Return a new
 * tuple with the end of the first other iteration and the index of its replica, or NULL with an
 * exception. `unused` is NULL, because the method is static. */
static PyObject *replica_advance_to_next_event(PyObject *unused, PyObject *args)
{
    PyObject *replica_list, *before;
    int64_t before_ns;

    if (!PyArg_UnpackTuple(args, "advance_to_next_event", 2, 2, &replica_list, &before))
        return NULL;
    if (convert_int64(before, &before_ns) < 0)
        return NULL;

    Py_ssize_t count;
    Replica **replicas = get_replicas(replica_list, &count);
    if (replicas == NULL)
        return NULL;

    PyObject *result = NULL;
    Py_ssize_t index = skip_uneventful_iterations(replicas, count, before_ns);
    if (index >= 0) {
        /* The format is a tuple of a long long and a Py_ssize_t. */
        result = Py_BuildValue("(Ln)", (long long)replicas[index]->end_ns, index);
    }

    PyMem_Free(replicas);
    return result;
}

/* Replica.cancel(request): stop a request unless it is done. Return None, or NULL with an exception
 * if the request is not one of this replica. */
static PyObject *replica_cancel(Replica *self, PyObject *object)
{
    Request *request = check_request(object);
    if (request == NULL || cancel_request(self, request) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Replica.count_generated_tokens(request) -> int: how many tokens a request has by the end of the
 * last finished iteration. Return NULL with a TypeError for an object that is no request. */
static PyObject *replica_count_generated_tokens(Replica *self, PyObject *object)
{
    Request *request = check_request(object);
    return request == NULL ? NULL : PyLong_FromLongLong(count_generated_tokens(self, request));
}

/* Replica.reset_cache(): remove all blocks without users. */
static PyObject *replica_reset_cache(Replica *self, PyObject *unused)
{
    evict_blocks(&self->block_table, 0);
    Py_RETURN_NONE;
}

/* Replica.discard_iteration_ends(): discard the end times of all iterations but the last, to
 * limit the memory of a server. */
static PyObject *replica_discard_iteration_ends(Replica *self, PyObject *unused)
{
    TimeArray *end_times = &self->end_times;
    if (end_times->count > 1) {
        end_times->values[0] = end_times->values[end_times->count - 1];
        end_times->count = 1;
    }
    Py_RETURN_NONE;
}

/* Replica.iteration_end_ns(iteration) -> int: when an iteration ended. Return NULL with an
 * IndexError if it has not begun. */
static PyObject *replica_iteration_end_ns(Replica *self, PyObject *object)
{
    int64_t iteration;
    if (convert_int64(object, &iteration) < 0)
        return NULL;
    if (iteration < 0 || iteration >= self->end_times.count) {
        PyErr_SetString(PyExc_IndexError, "no such iteration");
        return NULL;
    }

    return PyLong_FromLongLong(self->end_times.values[iteration]);
}

/* Replica.first_token_requests: a new list of the requests that got a first token in the iteration
 * that ended last. */
static PyObject *replica_first_token_requests(Replica *self, void *unused)
{
    return list_of_requests(&self->first_token_requests);
}

/* Replica.iteration_ends_ns: a copy of the end times as an `array.array("q")`, the type for
 * int64. In the format of the call, "s" is the type code, and "y#" the bytes with their length. */
static PyObject *replica_iteration_ends_ns(Replica *self, void *unused)
{
    PyObject *module = PyImport_ImportModule("array");
    if (module == NULL)
        return NULL;

    const char *data = self->end_times.count ? (const char *)self->end_times.values : "";
    Py_ssize_t size = self->end_times.count * (Py_ssize_t)sizeof(int64_t);
    PyObject *array = PyObject_CallMethod(module, "array", "sy#", "q", data, size);
    Py_DECREF(module);

    return array;
}

/* Replica.queued_count: the number of requests that wait for admission. */
static PyObject *replica_queued_count(Replica *self, void *unused)
{
    return PyLong_FromSsize_t(self->waiting_queue.count);
}

/* Replica.next_due_ns: the due time of the first request that waits, or NEVER if none waits. */
static PyObject *replica_next_due_ns(Replica *self, void *unused)
{
    Request *first = self->waiting_queue.head;
    return PyLong_FromLongLong(first == NULL ? NEVER : first->due_ns);
}

/* Replica.used_block_count: the number of blocks that cannot be used for another request now. */
static PyObject *replica_used_block_count(Replica *self, void *unused)
{
    return PyLong_FromLongLong(self->private_block_count + self->block_table.used_count);
}

static PyMethodDef replica_methods[] = {
    {"can_serve", (PyCFunction)replica_can_serve, METH_O, NULL},
    {"submit", (PyCFunction)replica_submit, METH_O, NULL},
    {"begin_iteration", (PyCFunction)replica_begin_iteration, METH_O, NULL},
    {"end_iteration", (PyCFunction)replica_end_iteration, METH_NOARGS, NULL},
    {"advance_to_next_event", replica_advance_to_next_event, METH_VARARGS | METH_STATIC, NULL},
    {"cancel", (PyCFunction)replica_cancel, METH_O, NULL},
    {"count_generated_tokens", (PyCFunction)replica_count_generated_tokens, METH_O, NULL},
    {"reset_cache", (PyCFunction)replica_reset_cache, METH_NOARGS, NULL},
    {"discard_iteration_ends", (PyCFunction)replica_discard_iteration_ends, METH_NOARGS, NULL},
    {"iteration_end_ns", (PyCFunction)replica_iteration_end_ns, METH_O, NULL},
    {NULL},
};

static PyMemberDef replica_members[] = {
    {"active_count", T_LONGLONG, offsetof(Replica, active_count), READONLY, NULL},
    {"decoding_count", T_LONGLONG, offsetof(Replica, decoding_count), READONLY, NULL},
    {"decoded_tokens", T_LONGLONG, offsetof(Replica, decoded_tokens), READONLY, NULL},
    {"iteration", T_LONGLONG, offsetof(Replica, iteration), READONLY, NULL},
    {"end_ns", T_LONGLONG, offsetof(Replica, end_ns), READONLY, NULL},
    {"context_requests", T_LONGLONG, offsetof(Replica, context_requests), READONLY, NULL},
    {"context_tokens", T_LONGLONG, offsetof(Replica, context_tokens), READONLY, NULL},
    {"pause_count", T_LONGLONG, offsetof(Replica, pause_count), READONLY, NULL},
    {"cache_hits", T_LONGLONG, offsetof(Replica, cache_hits), READONLY, NULL},
    {"cache_misses", T_LONGLONG, offsetof(Replica, cache_misses), READONLY, NULL},
    {"recent_pauses", T_OBJECT_EX, offsetof(Replica, recent_pauses), READONLY, NULL},
    {NULL},
};

static PyGetSetDef replica_values[] = {
    {"first_token_requests", (getter)replica_first_token_requests, NULL, NULL, NULL},
    {"iteration_ends_ns", (getter)replica_iteration_ends_ns, NULL, NULL, NULL},
    {"queued_count", (getter)replica_queued_count, NULL, NULL, NULL},
    {"next_due_ns", (getter)replica_next_due_ns, NULL, NULL, NULL},
    {"used_block_count", (getter)replica_used_block_count, NULL, NULL, NULL},
    {NULL},
};

static PyType_Slot replica_slots[] = {
    {Py_tp_init, replica_init},         {Py_tp_dealloc, replica_dealloc},
    {Py_tp_traverse, replica_traverse}, {Py_tp_clear, replica_clear},
    {Py_tp_methods, replica_methods},   {Py_tp_members, replica_members},
    {Py_tp_getset, replica_values},     {0, NULL},
};

static PyType_Spec replica_spec = {
    .name = "loadgen.sim.engine._replica.Replica",
    .basicsize = sizeof(Replica),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = replica_slots,
};

/* -- the module -------------------------------------------------------------------------------- */

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "loadgen.sim.engine._replica",
    .m_doc = "A replica of a simulated server, in C.",
    .m_size = -1,
};

/* Add the classes and the version to a new module. Return 0, or -1 with an exception. The module
 * gets its own references to the classes. */
static int add_module_contents(PyObject *module, PyObject *request_class, PyObject *replica_class)
{
    if (PyModule_AddObjectRef(module, "SimRequest", request_class) < 0)
        return -1;
    if (PyModule_AddObjectRef(module, "Replica", replica_class) < 0)
        return -1;

    /* `Replica.Request` is the class of its requests, as in replica.py. */
    if (PyObject_SetAttrString(replica_class, "Request", request_class) < 0)
        return -1;

    /* implementation.py uses the module only if the version is the one that it expects. */
    return PyModule_AddIntConstant(module, "VERSION", VERSION);
}

/* Create the module with both classes. Return NULL with an exception if that fails.
 *
 * `request_type` and `replica_type` keep the references to the classes for type checks. They are
 * never released, because the module exists until the process ends. */
PyMODINIT_FUNC PyInit__replica(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;

    PyObject *request_class = PyType_FromSpec(&request_spec);
    PyObject *replica_class = PyType_FromSpec(&replica_spec);
    if (request_class == NULL || replica_class == NULL ||
        add_module_contents(module, request_class, replica_class) < 0) {
        Py_XDECREF(request_class);
        Py_XDECREF(replica_class);
        Py_DECREF(module);
        return NULL;
    }

    request_type = (PyTypeObject *)request_class;
    replica_type = (PyTypeObject *)replica_class;
    return module;
}
