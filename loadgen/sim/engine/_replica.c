/* SimRequest and Replica of replica.py in C.
 *
 * replica.py is the reference implementation and documents both classes. The tests in
 * tests/sim/test_compiled_replica.py compare the two. Only the limited API of Python 3.11 is used.
 * The file is compiled without contraction of a * b + c, so that durations equal those of Python to
 * the last bit.
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

/* Results of a search for a block. */
#define NOT_FOUND (-1)
#define SEARCH_FAILED (-2) /* with an exception */

#define NO_BLOCK (-1) /* the end of a list of blocks */

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
    /* Neighbours in `Replica.waiting` or, while the request decodes, in `Replica.running`. Both
     * queues own their requests. */
    struct Request *previous, *next;
    /* Neighbours in a bucket of `Replica.buckets`. */
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

/* A block that several prompts may share. A block without users is in the list of unused blocks,
 * and an entry that holds no block is in the list of free entries, linked by `newer`. */
typedef struct {
    BlockHash hash;
    int64_t user_count;
    int64_t older, newer;
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

    RequestQueue waiting, running;
    /* Decoding requests by the iteration of their last token, modulo the number of buckets. */
    RequestQueue *buckets;
    int64_t bucket_mask;
    RequestArray finishing_prefill;    /* their prefill ends with the current iteration */
    RequestArray first_token_requests; /* got a first token in the last finished iteration */
    Request *partly_prefilled;         /* served before the waiting requests */
    PyObject *recent_pauses;           /* list of (request, first iteration, last iteration) */
    /* The number of decoding requests that need a new block in an iteration, by its phase:
     * iteration % tokens_per_block. See Replica._block_demand_by_phase in replica.py. */
    int64_t *block_demand;
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

/* The quotient rounded down, as in Python. C rounds towards 0. */
static int64_t floor_divide(int64_t dividend, int64_t divisor)
{
    int64_t quotient = dividend / divisor;
    int is_rounded_up = dividend % divisor != 0 && (dividend < 0) != (divisor < 0);
    return quotient - is_rounded_up;
}

/* The quotient rounded up. */
static int64_t ceil_divide(int64_t dividend, int64_t divisor)
{
    return -floor_divide(-dividend, divisor);
}

/* The remainder with the sign of the divisor, as in Python. */
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

/* Append the end time of an iteration. Return -1 if there is no memory. */
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

/* Append a request. The array takes over the caller's reference, unless there is no memory: then
 * the result is -1. */
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

/* The bucket for the requests that get their last token in an iteration. */
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

/* Convert a Python int. -1 is also a valid number, so PyErr_Occurred tells an error from it. */
static int convert_int64(PyObject *object, int64_t *value)
{
    *value = PyLong_AsLongLong(object);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Convert the hash of a block from Python: an int or any other hashable object.
 *
 * Most are ints of at most 64 bits, which are stored as numbers without an object and are
 * therefore compared quickly. Of all others, larger ints included, the object and its hash are
 * stored. -1 is also a valid number, so PyErr_Occurred tells an error from it. */
static int convert_block_hash(PyObject *object, BlockHash *hash)
{
    if (PyLong_CheckExact(object)) {
        int has_overflow;
        hash->object = NULL;
        hash->value = PyLong_AsLongLongAndOverflow(object, &has_overflow);
        if (!has_overflow)
            return hash->value == -1 && PyErr_Occurred() ? -1 : 0;
    }
    hash->value = PyObject_Hash(object);
    if (hash->value == -1)
        return -1;
    hash->object = Py_NewRef(object);
    return 0;
}

/* Set the hashes of the full blocks of a prompt from a Python sequence (SimRequest.blocks in
 * replica.py). After a failure, `block_count` is the number of hashes that have to be released. */
static int set_block_hashes(Request *self, PyObject *blocks)
{
    Py_ssize_t count = PySequence_Size(blocks);
    if (count <= 0)
        return (int)count;
    self->block_hashes = PyMem_Calloc(count, sizeof(BlockHash));
    if (self->block_hashes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; self->block_count < count; self->block_count++) {
        PyObject *object = PySequence_GetItem(blocks, self->block_count);
        if (object == NULL)
            return -1;
        int failed = convert_block_hash(object, &self->block_hashes[self->block_count]) < 0;
        Py_DECREF(object);
        if (failed)
            return -1;
    }
    return 0;
}

/* SimRequest(key, due_ns, input_tokens, output_tokens, blocks=()): create a request that waits.
 * The allocator sets all fields to 0, and -1 stands for a value that is not known yet. */
static PyObject *request_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *key, *due_object, *input_object, *output_object, *blocks = NULL;
    int64_t due_ns, input_tokens, output_tokens;
    if (!PyArg_UnpackTuple(args, "SimRequest", 4, 5, &key, &due_object, &input_object,
                           &output_object, &blocks))
        return NULL;
    if (convert_int64(due_object, &due_ns) < 0 || convert_int64(input_object, &input_tokens) < 0 ||
        convert_int64(output_object, &output_tokens) < 0)
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(request_type, Py_tp_alloc);
    Request *self = (Request *)allocate(request_type, 0);
    if (self == NULL)
        return NULL;
    self->key = Py_NewRef(key);
    self->due_ns = due_ns;
    self->input_tokens = input_tokens;
    self->prefill_tokens = input_tokens;
    self->prefill_tokens_left = input_tokens;
    self->requested_tokens = output_tokens;
    self->output_tokens = output_tokens;
    self->remaining_output_tokens = output_tokens;
    self->admitted_ns = -1;
    self->cached_tokens = -1;
    self->first_iteration = -1;
    self->resumed_iteration = -1;
    self->last_iteration = -1;
    self->failed_ns = -1;
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

/* Write the fields of a request to a row of numbers, in the order of replica.REQUEST_FIELDS. Its
 * key must be an int. */
static int pack_request(PyObject *object, int64_t *row)
{
    Request *request = check_request(object);
    int64_t number;
    if (request == NULL || convert_int64(request->key, &number) < 0)
        return -1;
    int64_t fields[PACKED_FIELDS] = {
        number,
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

/* SimRequest.pack(requests, rows): write the fields of each request of a list into a row of a
 * two-dimensional int64 array. One call for many requests is much faster than reading each field
 * in Python. */
static PyObject *request_pack(PyObject *none, PyObject *args)
{
    PyObject *requests, *rows;
    Py_buffer view;
    if (!PyArg_UnpackTuple(args, "pack", 2, 2, &requests, &rows))
        return NULL;
    Py_ssize_t count = PyList_Size(requests);
    if (count < 0 || PyObject_GetBuffer(rows, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    int failed = view.len != count * (Py_ssize_t)sizeof(int64_t) * PACKED_FIELDS;
    if (failed)
        PyErr_SetString(PyExc_ValueError, "the array does not have the size of the requests");
    int64_t *row = view.buf;
    for (Py_ssize_t i = 0; !failed && i < count; i++) {
        failed = pack_request(PyList_GetItem(requests, i), row) < 0;
        row += PACKED_FIELDS;
    }
    PyBuffer_Release(&view);
    return failed ? NULL : Py_NewRef(Py_None);
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

/* Multiplicative (Fibonacci) hashing: neighbouring numbers get distant slots. The factor is 2^64
 * divided by the golden ratio (Knuth, The Art of Computer Programming, volume 3, section 6.4). */
static uint32_t mix_hash(int64_t value)
{
    uint64_t mixed = (uint64_t)value * 0x9E3779B97F4A7C15u;
    return (uint32_t)(mixed ^ (mixed >> 29));
}

/* An entry of a slot has the mixed hash of a block in its upper 32 bits, and its index + 1 in
 * its lower ones, so that no entry is 0, which is the empty slot. */
static uint64_t make_slot_entry(const BlockHash *block_hash, int64_t index)
{
    return (uint64_t)mix_hash(block_hash->value) << 32 | (uint64_t)(index + 1);
}

/* The mixed hash of a block from the entry of its slot. */
static uint32_t get_slot_hash(uint64_t slot)
{
    return (uint32_t)(slot >> 32);
}

/* The index of a block from the entry of its slot. */
static int64_t get_slot_block(uint64_t slot)
{
    return (int64_t)(uint32_t)slot - 1;
}

/* Fetch the slot of a block of a prompt into the cache of the processor, because it will be
 * searched soon. Neighbouring blocks have distant slots, so their slots are rarely cached. */
static void prefetch_slot(const BlockTable *table, const Request *request, Py_ssize_t position)
{
    if (table->slots == NULL || position >= request->block_count)
        return;
    uint32_t hash = mix_hash(request->block_hashes[position].value);
    __builtin_prefetch(&table->slots[hash & table->slots_mask]);
}

/* Return 1 if two hashes are equal, 0 if not, and -1 with an exception if their objects cannot
 * be compared. A hash without an object is a number, which equals no object. */
static int is_same_hash(const BlockHash *first, const BlockHash *second)
{
    if (first->value != second->value)
        return 0;
    if (first->object == second->object)
        return 1;
    if (first->object == NULL || second->object == NULL)
        return 0;
    return PyObject_RichCompareBool(first->object, second->object, Py_EQ);
}

/* Return the index of the shared block with this hash, NOT_FOUND, or SEARCH_FAILED.
 *
 * The search begins at the slot of the hash and ends at the first empty slot (linear probing).
 * The upper half of an entry has the hash, so that most other blocks are passed over without
 * reading them. */
static int64_t find_block(const BlockTable *table, const BlockHash *block_hash)
{
    if (table->slots == NULL)
        return NOT_FOUND;
    uint32_t hash = mix_hash(block_hash->value);
    int64_t slot = hash & table->slots_mask;
    while (table->slots[slot]) {
        if (get_slot_hash(table->slots[slot]) == hash) {
            int64_t index = get_slot_block(table->slots[slot]);
            int is_same = is_same_hash(&table->blocks[index].hash, block_hash);
            if (is_same < 0)
                return SEARCH_FAILED;
            if (is_same)
                return index;
        }
        slot = (slot + 1) & table->slots_mask;
    }
    return NOT_FOUND;
}

/* Put an entry into the slot of its hash, or into the first empty slot after it. */
static void insert_slot(BlockTable *table, uint64_t entry)
{
    int64_t slot = (int64_t)get_slot_hash(entry) & table->slots_mask;
    while (table->slots[slot])
        slot = (slot + 1) & table->slots_mask;
    table->slots[slot] = entry;
}

/* Double the slots of a table, and insert all entries again, because the slot of a hash depends
 * on the number of slots. A new table gets INITIAL_SLOTS. Return -1 if there is no memory. */
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

/* Remove the entry of a block from the slots by backward-shift deletion, the standard way for
 * linear probing without markers of deleted entries.
 *
 * A search ends at the first empty slot. So an empty slot (the hole) must not lie between an
 * entry and its home, the slot of its hash at which a search for it begins. Each entry behind
 * the hole whose home is not behind the hole moves into the hole and leaves a new hole.
 * Distances are taken modulo the number of slots, because the first slot follows the last one. */
static void remove_slot(BlockTable *table, int64_t block_index)
{
    int64_t mask = table->slots_mask;
    int64_t hole = mix_hash(table->blocks[block_index].hash.value) & mask;
    while (get_slot_block(table->slots[hole]) != block_index)
        hole = (hole + 1) & mask;
    for (int64_t slot = (hole + 1) & mask; table->slots[slot]; slot = (slot + 1) & mask) {
        int64_t home = (int64_t)get_slot_hash(table->slots[slot]) & mask;
        int64_t distance_from_home = (slot - home) & mask;
        int64_t distance_from_hole = (slot - hole) & mask;
        if (distance_from_home >= distance_from_hole) {
            table->slots[hole] = table->slots[slot];
            hole = slot;
        }
    }
    table->slots[hole] = 0;
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

/* Double the array of blocks and add the new entries to the list of free entries.
 *
 * They are added in reverse order, so that the first of them is used first. Return -1 if there
 * is no memory. */
static int double_blocks(BlockTable *table)
{
    int64_t capacity = table->capacity ? 2 * table->capacity : INITIAL_BLOCKS;
    Block *blocks = PyMem_Realloc(table->blocks, capacity * sizeof(Block));
    if (blocks == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int64_t i = capacity - 1; i >= table->capacity; i--) {
        blocks[i] = (Block){.newer = table->first_free};
        table->first_free = i;
    }
    table->blocks = blocks;
    table->capacity = capacity;
    return 0;
}

/* Add a block with one user, and return its index, or -1 if there is no memory.
 *
 * At most half of the slots are in use, because searches take longer in a fuller table. */
static int64_t add_block(BlockTable *table, const BlockHash *block_hash)
{
    if (table->first_free == NO_BLOCK && double_blocks(table) < 0)
        return -1;
    int64_t block_count = table->used_count + table->unused_count;
    int is_half_full = table->slots == NULL || 2 * block_count > table->slots_mask;
    if (is_half_full && double_slots(table) < 0)
        return -1;
    int64_t index = table->first_free;
    table->first_free = table->blocks[index].newer;
    table->blocks[index] =
        (Block){.hash = *block_hash, .user_count = 1, .older = NO_BLOCK, .newer = NO_BLOCK};
    Py_XINCREF(block_hash->object);
    insert_slot(table, make_slot_entry(block_hash, index));
    table->used_count++;
    return index;
}

/* Remove blocks without users until at most `capacity` of them are left, the least recently used
 * ones first. A negative capacity counts as 0.
 *
 * The next block is fetched into the cache of the processor in advance. A hash object is
 * released last, because that may run Python code. */
static void evict_blocks(BlockTable *table, int64_t capacity)
{
    while (table->unused_count > 0 && table->unused_count > capacity) {
        int64_t index = table->oldest;
        Block *block = &table->blocks[index];
        if (block->newer != NO_BLOCK)
            __builtin_prefetch(&table->blocks[block->newer]);
        remove_from_unused(table, index);
        remove_slot(table, index);
        PyObject *object = block->hash.object;
        block->hash.object = NULL;
        block->newer = table->first_free;
        table->first_free = index;
        Py_XDECREF(object);
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
 * others. Return -1 if there is no memory. */
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

/* Set `shared_blocks` of a request to the blocks at the beginning of its prompt that are in the
 * cache, and return how many of them have no users.
 *
 * Blocks without users count as free, but not any more once this request uses them. So the
 * caller has to know their number before it decides. */
static int64_t match_cached_prefix(Replica *self, Request *request)
{
    int64_t unused_count = 0;
    request->shared_count = 0;
    if (!self->block_reuse)
        return 0;
    /* At least one token of a prompt is computed, even if all its blocks are in the cache: the
     * first output token follows from it. */
    int64_t reusable_blocks = floor_divide(request->prefill_tokens - 1, self->tokens_per_block);
    reusable_blocks = minimum(reusable_blocks, request->block_count);
    for (int64_t i = 0; i < reusable_blocks; i++) {
        prefetch_slot(&self->block_table, request, i + PREFETCH_DISTANCE);
        int64_t index = find_block(&self->block_table, &request->block_hashes[i]);
        if (index == NOT_FOUND)
            break;
        if (index == SEARCH_FAILED || append_shared_block(request, index) < 0)
            return -1;
        unused_count += self->block_table.blocks[index].user_count == 0;
    }
    return unused_count;
}

/* Count the blocks of an admitted request that were in the cache, and those that were not. Only
 * the first admission counts, not the admission after a pause. */
static void count_cache_hits(Replica *self, Request *request)
{
    if (request->cached_tokens >= 0)
        return;
    request->cached_tokens = request->shared_count * self->tokens_per_block;
    if (self->block_reuse) {
        self->cache_hits += request->shared_count;
        self->cache_misses += request->block_count - request->shared_count;
    }
}

/* Allocate cache blocks to a waiting request, which is then admitted to the batch. Return 1, or 0
 * if too few blocks are free.
 *
 * The blocks of its prompt prefix that are in the cache are shared with other requests. The rest
 * are private. With `reserves_output_blocks`, they include blocks for the whole output. */
static int allocate_blocks(Replica *self, Request *request)
{
    int64_t tokens = request->prefill_tokens;
    if (self->reserves_output_blocks)
        tokens += request->remaining_output_tokens;
    int64_t unused_count = match_cached_prefix(self, request);
    if (unused_count < 0)
        return -1;
    int64_t private_blocks = ceil_divide(tokens, self->tokens_per_block) - request->shared_count;
    if (private_blocks + unused_count > count_free_blocks(self)) {
        request->shared_count = 0;
        return 0;
    }
    for (Py_ssize_t i = 0; i < request->shared_count; i++)
        use_block(&self->block_table, request->shared_blocks[i]);
    self->private_block_count += private_blocks;
    evict_blocks(&self->block_table, count_free_blocks(self));
    request->private_block_count = private_blocks;
    request->prefill_tokens_left =
        request->prefill_tokens - request->shared_count * self->tokens_per_block;
    count_cache_hits(self, request);
    request->state = PREFILLING;
    self->active_count++;
    return 1;
}

/* Share the full blocks of a computed prompt, so that later requests can reuse them. This stops
 * at the first block that another request has shared in the meantime. That block exists twice,
 * and the copy of this request stays private. */
static int share_prompt_blocks(Replica *self, Request *request)
{
    int64_t full_blocks = request->input_tokens / self->tokens_per_block;
    int64_t count = minimum(full_blocks, request->block_count);
    for (int64_t i = request->shared_count; i < count; i++) {
        const BlockHash *block_hash = &request->block_hashes[i];
        prefetch_slot(&self->block_table, request, i + PREFETCH_DISTANCE);
        int64_t index = find_block(&self->block_table, block_hash);
        if (index == SEARCH_FAILED)
            return -1;
        if (index != NOT_FOUND)
            return 0;
        index = add_block(&self->block_table, block_hash);
        if (index < 0 || append_shared_block(request, index) < 0)
            return -1;
        request->private_block_count--;
        self->private_block_count--;
    }
    return 0;
}

/* Free the private blocks of a request, and stop using its shared ones.
 *
 * The block that becomes unused first is evicted first. So the last blocks of the prefix are
 * released first: fewer prompts share them, and they are useless without the blocks before them. */
static void release_blocks(Replica *self, Request *request, int64_t private_blocks)
{
    self->private_block_count -= private_blocks;
    while (request->shared_count > 0)
        stop_using_block(&self->block_table, request->shared_blocks[--request->shared_count]);
    request->private_block_count = 0;
}

/* Return in which iterations, modulo tokens_per_block, a decoding request needs a new block.
 *
 * In iteration `resumed_iteration + 1 + n` it has `prefill_tokens + n` tokens in the cache and
 * adds one. It needs a new block if the cached tokens fill their blocks exactly, so if
 * `prefill_tokens + n` is a multiple of tokens_per_block. */
static int64_t block_demand_phase(const Replica *self, const Request *request)
{
    int64_t iteration_minus_cached_tokens =
        request->resumed_iteration + 1 - request->prefill_tokens;
    return floor_modulo(iteration_minus_cached_tokens, self->tokens_per_block);
}

/* Return the last finished iteration in which a decoding or finished request got a token. */
static int64_t last_token_iteration(const Replica *self, const Request *request)
{
    return minimum(self->iteration - 1, request->last_iteration);
}

/* Return how many private blocks a decoding request has, if blocks are taken as they are needed.
 *
 * The blocks for its prefill were taken at admission. The current iteration may already have
 * taken a block for a token that it has not added yet. */
static int64_t count_private_blocks(const Replica *self, const Request *request,
                                    int64_t cached_tokens)
{
    int64_t per_block = self->tokens_per_block;
    int64_t prefill_blocks = ceil_divide(request->prefill_tokens, per_block);
    int64_t output_blocks = ceil_divide(cached_tokens, per_block) - prefill_blocks;
    int is_in_phase = self->iteration % per_block == block_demand_phase(self, request);
    int has_new_block = self->is_computing && is_in_phase;
    return request->private_block_count + output_blocks + has_new_block;
}

/* Remove a decoding request from the batch before its end, and free its blocks. The caller takes
 * over the reference.
 *
 * The key and the value of a token enter the cache when the token after it is computed. So the
 * newest token is not in the cache. */
static void remove_decoding_request(Replica *self, Request *request)
{
    int64_t decoded_tokens_in_cache =
        last_token_iteration(self, request) - request->resumed_iteration;
    int64_t cached_tokens = request->prefill_tokens + decoded_tokens_in_cache;
    remove_from_bucket(self, request);
    unlink_request(&self->running, request);
    self->decoding_count--;
    self->active_count--;
    self->kv_tokens -= cached_tokens;
    int64_t private_blocks = request->private_block_count;
    if (!self->reserves_output_blocks) {
        private_blocks = count_private_blocks(self, request, cached_tokens);
        self->block_demand[block_demand_phase(self, request)]--;
    }
    release_blocks(self, request, private_blocks);
}

/* Return how many tokens a request has by the end of the last finished iteration.
 *
 * Tokens are not counted one by one, but follow from the iterations: since its last admission, a
 * request gets one token in each iteration from `resumed_iteration` to `last_iteration`. The
 * tokens from before a pause are those that no longer remain. */
static int64_t count_generated_tokens(const Replica *self, const Request *request)
{
    int64_t tokens_before_pause = request->output_tokens - request->remaining_output_tokens;
    int is_done_after_decoding = request->state == DONE && request->last_iteration >= 0;
    if (request->state != DECODING && !is_done_after_decoding)
        return tokens_before_pause;
    int64_t tokens_since_admission =
        last_token_iteration(self, request) - request->resumed_iteration + 1;
    if (tokens_since_admission < 0)
        return tokens_before_pause;
    return tokens_before_pause + tokens_since_admission;
}

/* Append (request, first iteration, last iteration) to the list of recent pauses, which Python
 * reads. These are the iterations in which the request got tokens since its last admission. */
static int record_pause(Replica *self, Request *request, int64_t first, int64_t last)
{
    PyObject *pause = Py_BuildValue("OLL", request, (long long)first, (long long)last);
    if (pause == NULL)
        return -1;
    int failed = PyList_Append(self->recent_pauses, pause);
    Py_DECREF(pause);
    return failed;
}

/* Pause (preempt) the request admitted last, which frees its blocks.
 *
 * It returns to the front of the queue. When it is admitted again, its prompt and the tokens
 * generated so far are prefilled again, because their keys and values are lost. A request in
 * prefill is newer than all decoding ones. It has no token yet, which the empty range of
 * iterations 0 to -1 says. */
static int pause_newest_request(Replica *self)
{
    int64_t first_iteration = 0;
    int64_t last_iteration = -1;
    Request *request = self->partly_prefilled;
    if (request != NULL) {
        self->partly_prefilled = NULL;
        release_blocks(self, request, request->private_block_count);
        self->active_count--;
    } else {
        request = self->running.tail;
        int64_t generated_tokens = count_generated_tokens(self, request);
        first_iteration = request->resumed_iteration;
        last_iteration = self->iteration - 1;
        remove_decoding_request(self, request);
        request->prefill_tokens = request->input_tokens + generated_tokens;
        request->remaining_output_tokens = request->output_tokens - generated_tokens;
    }
    request->prefill_tokens_left = request->prefill_tokens;
    request->state = WAITING;
    push_front(&self->waiting, request);
    self->pause_count++;
    return record_pause(self, request, first_iteration, last_iteration);
}

/* -- iterations -------------------------------------------------------------------------------- */

/* Replace the list of recent pauses by an empty one. It is not emptied, because the caller may
 * still use it. */
static int clear_paused(Replica *self)
{
    if (PyList_Size(self->recent_pauses) == 0)
        return 0;
    PyObject *empty = PyList_New(0);
    if (empty == NULL)
        return -1;
    Py_DECREF(self->recent_pauses);
    self->recent_pauses = empty;
    return 0;
}

/* Take the blocks that decoding requests need in this iteration.
 *
 * If too few blocks are free, the newest requests are paused. Each pause frees the blocks of one
 * request, and may also lower the number of blocks needed (`block_demand`). */
static int take_decoding_blocks(Replica *self)
{
    int64_t phase = self->iteration % self->tokens_per_block;
    if (self->reserves_output_blocks || self->block_demand[phase] == 0)
        return 0;
    if (self->block_demand[phase] > count_free_blocks(self)) {
        while (self->block_demand[phase] > count_free_blocks(self))
            if (pause_newest_request(self) < 0)
                return -1;
        evict_blocks(&self->block_table, count_free_blocks(self) - self->block_demand[phase]);
    }
    self->private_block_count += self->block_demand[phase];
    return 0;
}

/* Admit the first waiting request, and set `admitted` to it, or to NULL if there is none to admit.
 *
 * The first request goes on waiting if the batch is full, if it is not due yet, if its prompt
 * exceeds the budget and cannot be prefilled in parts, or if too few blocks are free. No later
 * request overtakes it. */
static int admit_first_waiting(Replica *self, int64_t budget, int64_t now_ns, Request **admitted)
{
    *admitted = NULL;
    Request *request = self->waiting.head;
    if (request == NULL || self->active_count >= self->max_batch_size || request->due_ns > now_ns)
        return 0;
    if (!self->chunked_prefill && request->prefill_tokens_left > budget)
        return 0;
    int is_admitted = allocate_blocks(self, request);
    if (is_admitted <= 0)
        return is_admitted;
    unlink_request(&self->waiting, request);
    if (request->admitted_ns < 0)
        request->admitted_ns = now_ns;
    *admitted = request;
    return 0;
}

/* Add the computation of `tokens` tokens of a prompt, after its first `start` tokens.
 *
 * With causal attention, each token attends to all tokens before it. These are the first `start`
 * tokens and, on average over the chunk, half of the chunk. */
static void add_prompt_chunk(IterationWork *work, int64_t start, int64_t tokens)
{
    work->tokens_read += start + tokens;
    work->attended_tokens += (double)tokens * ((double)start + 0.5 * (double)tokens);
    work->context_tokens += tokens;
    work->context_requests++;
}

/* Add the prefill of at most `budget` prompt tokens to the work of an iteration.
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
        int64_t chunk = minimum(request->prefill_tokens_left, budget);
        add_prompt_chunk(work, request->prefill_tokens - request->prefill_tokens_left, chunk);
        budget -= chunk;
        request->prefill_tokens_left -= chunk;
        self->partly_prefilled = request->prefill_tokens_left ? request : NULL;
        if (self->partly_prefilled == NULL && append_request(&self->finishing_prefill, request) < 0)
            return -1;
    }
    return 0;
}

/* Return the duration of an iteration in ns by the roofline model: the longer of memory traffic
 * and computation counts. */
static int64_t iteration_duration_ns(const Replica *self, const IterationWork *work)
{
    double memory_ns = self->weights_ns + (double)work->tokens_read * self->kv_token_ns;
    int64_t tokens = work->decoding_count + work->context_tokens;
    double compute_ns = (double)tokens * self->token_ns + work->attended_tokens * self->attended_ns;
    double longer_ns = memory_ns > compute_ns ? memory_ns : compute_ns;
    return (int64_t)(self->overhead_ns + longer_ns) + 1;
}

/* Begin an iteration, which ends at `end_ns`. Return 1, or 0 if there is nothing to do.
 *
 * The iteration computes one token of each decoding request, and prompts as far as the limit of
 * tokens allows. If blocks are missing, some requests are paused first. Without anything to
 * compute, the replica becomes idle. */
static int begin_iteration(Replica *self, int64_t now_ns)
{
    if (clear_paused(self) < 0 || take_decoding_blocks(self) < 0)
        return -1;
    IterationWork work = {.decoding_count = self->decoding_count};
    /* Decoding requests read their whole cache, and the token that is computed now. */
    work.tokens_read = self->kv_tokens + self->decoding_count;
    work.attended_tokens = (double)work.tokens_read;
    /* A request that was just paused is not admitted again yet. */
    int has_paused = PyList_Size(self->recent_pauses) > 0;
    int64_t prompt_budget = self->max_num_tokens - work.decoding_count;
    if (!has_paused && schedule_prefill(self, &work, prompt_budget, now_ns) < 0)
        return -1;
    if (work.decoding_count == 0 && work.context_tokens == 0) {
        self->end_ns = NEVER;
        return 0;
    }
    self->context_tokens = work.context_tokens;
    self->context_requests = work.context_requests;
    self->end_ns = now_ns + iteration_duration_ns(self, &work);
    self->is_computing = 1;
    return append_time(&self->end_times, self->end_ns) < 0 ? -1 : 1;
}

/* Append a request to the list of those that are done, which takes over the replica's reference. */
static int move_to_done(Request *request, PyObject *done)
{
    int failed = PyList_Append(done, OBJECT(request));
    Py_DECREF(OBJECT(request));
    return failed;
}

/* Remove the requests that get their last token in an iteration, free their blocks, and append
 * them to the list `done`. The bucket of the iteration has all of them. */
static int remove_finished(Replica *self, int64_t iteration, PyObject *done)
{
    RequestQueue *bucket = get_bucket(self, iteration);
    Request *request = bucket->head;
    bucket->head = NULL;
    bucket->tail = NULL;
    while (request != NULL) {
        Request *next = request->bucket_next;
        request->bucket_previous = NULL;
        request->bucket_next = NULL;
        request->state = DONE;
        unlink_request(&self->running, request);
        /* The key and the value of the last token never enter the cache, because no token
         * follows. */
        int64_t cached_tokens = request->prefill_tokens + request->remaining_output_tokens - 1;
        self->kv_tokens -= cached_tokens;
        int64_t private_blocks = request->private_block_count;
        if (!self->reserves_output_blocks) {
            self->block_demand[block_demand_phase(self, request)]--;
            private_blocks =
                ceil_divide(cached_tokens, self->tokens_per_block) - request->shared_count;
        }
        release_blocks(self, request, private_blocks);
        self->decoding_count--;
        self->active_count--;
        if (move_to_done(request, done) < 0)
            return -1;
        request = next;
    }
    return 0;
}

/* Begin to decode a request whose prefill has ended with this iteration.
 *
 * The prefill has given it its first token. A request that needs no other token is done and is
 * appended to the list `done`. */
static int start_decoding(Replica *self, Request *request, int64_t iteration, PyObject *done)
{
    if (request->first_iteration < 0)
        request->first_iteration = iteration;
    request->resumed_iteration = iteration;
    if (self->block_reuse && share_prompt_blocks(self, request) < 0)
        return -1;
    request->last_iteration = iteration + request->remaining_output_tokens - 1;
    if (request->remaining_output_tokens <= 1) {
        release_blocks(self, request, request->private_block_count);
        self->active_count--;
        request->state = DONE;
        return move_to_done(request, done);
    }
    request->state = DECODING;
    self->kv_tokens += request->prefill_tokens;
    if (!self->reserves_output_blocks)
        self->block_demand[block_demand_phase(self, request)]++;
    push_back(&self->running, request);
    add_to_bucket(self, request);
    self->decoding_count++;
    return 0;
}

/* End the current iteration, and append the requests that are done with it to the list `done`,
 * which may be NULL if there are none.
 *
 * Every decoding request gets one token, and so does every request whose prefill ends with this
 * iteration. The latter begin to decode. */
static int end_iteration(Replica *self, PyObject *done)
{
    int64_t iteration = self->iteration++;
    self->is_computing = 0;
    self->kv_tokens += self->decoding_count;
    self->decoded_tokens += self->decoding_count;
    if (remove_finished(self, iteration, done) < 0)
        return -1;
    clear_requests(&self->first_token_requests);
    for (Py_ssize_t i = 0; i < self->finishing_prefill.count; i++) {
        Request *request = self->finishing_prefill.items[i];
        Py_INCREF(OBJECT(request));
        if (append_request(&self->first_token_requests, request) < 0 ||
            start_decoding(self, request, iteration, done) < 0)
            return -1;
    }
    self->finishing_prefill.count = 0;
    return 0;
}

/* Return whether the owner need not know of the end of the current iteration.
 *
 * In an uneventful iteration no request gets its first or last token, and the next iteration
 * pauses none. */
static int is_uneventful(const Replica *self)
{
    const RequestQueue *ending_now = &self->buckets[self->iteration & self->bucket_mask];
    if (self->decoding_count == 0 && self->partly_prefilled == NULL)
        return 0; /* all requests were cancelled: the replica becomes idle */
    if (self->finishing_prefill.count > 0)
        return 0; /* a request gets its first token */
    if (ending_now->head != NULL)
        return 0; /* a request gets its last token */
    if (self->reserves_output_blocks)
        return 1; /* no request is ever paused */
    int64_t next_phase = (self->iteration + 1) % self->tokens_per_block;
    return self->block_demand[next_phase] <= count_free_blocks(self);
}

/* -- cancellation ------------------------------------------------------------------------------ */

/* Remove a waiting request from the queue. The caller takes over the reference.
 *
 * Only the first request of a queue has no predecessor. Any other request without one was never
 * submitted, which is an error of the caller. */
static int remove_waiting_request(Replica *self, Request *request)
{
    if (request->previous == NULL && request != self->waiting.head) {
        PyErr_SetString(PyExc_ValueError, "a request that was not submitted");
        return -1;
    }
    unlink_request(&self->waiting, request);
    return 0;
}

/* Remove a request in prefill from the batch, and free its blocks. The caller takes over the
 * reference. */
static int remove_prefilling_request(Replica *self, Request *request)
{
    if (request == self->partly_prefilled) {
        self->partly_prefilled = NULL;
    } else {
        RequestArray *array = &self->finishing_prefill;
        Py_ssize_t index = 0;
        while (index < array->count && array->items[index] != request)
            index++;
        if (index == array->count) {
            PyErr_SetString(PyExc_ValueError, "a request of another replica");
            return -1;
        }
        remove_at(array, index);
    }
    release_blocks(self, request, request->private_block_count);
    self->active_count--;
    return 0;
}

/* Stop a request unless it is done. It leaves the place that its state names: the queue, the
 * prefill or the batch of decoding requests. */
static int cancel_request(Replica *self, Request *request)
{
    int failed = 0;
    if (request->state == DONE)
        return 0;
    if (request->state == WAITING)
        failed = remove_waiting_request(self, request);
    else if (request->state == PREFILLING)
        failed = remove_prefilling_request(self, request);
    else
        remove_decoding_request(self, request);
    if (failed)
        return -1;
    request->state = DONE;
    Py_DECREF(OBJECT(request));
    return 0;
}

/* -- the methods of Replica -------------------------------------------------------------------- */

/* Read an attribute of a Python object as a float. */
static int read_float(PyObject *object, const char *name, double *number)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    if (value == NULL)
        return -1;
    *number = PyFloat_AsDouble(value);
    Py_DECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

/* Read an attribute of a Python object as an integer. */
static int read_int(PyObject *object, const char *name, int64_t *number)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    if (value == NULL)
        return -1;
    int failed = convert_int64(value, number);
    Py_DECREF(value);
    return failed;
}

/* Read an attribute of a Python object as 0 or 1. */
static int read_bool(PyObject *object, const char *name, int *flag)
{
    int64_t number = 0;
    int failed = read_int(object, name, &number);
    *flag = number != 0;
    return failed;
}

/* Copy the costs of an iteration from a Costs object (replica.py) to the replica. */
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

/* Copy the limits of the server from a ServerLimits object (replica.py) to the replica.
 *
 * Raises ValueError for limits with which the arrays of a replica could not be created. */
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

/* Create the buckets of requests by their last iteration, a ring that is used again and again.
 *
 * The bucket of an iteration is its number modulo the number of buckets. That is a power of two,
 * and enough for the longest output, so that two requests of one bucket always end together. */
static int create_buckets(Replica *self)
{
    int64_t bucket_count = 2;
    while (bucket_count < self->max_seq_len + 2)
        bucket_count *= 2;
    self->bucket_mask = bucket_count - 1;
    self->buckets = PyMem_Calloc(bucket_count, sizeof(RequestQueue));
    return self->buckets == NULL ? -1 : 0;
}

/* Replica(costs, limits): create an idle replica. The allocator has set all fields to 0. */
static int replica_init(Replica *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"costs", "limits", NULL};
    PyObject *costs, *limits;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO", names, &costs, &limits))
        return -1;
    if (self->recent_pauses != NULL) {
        PyErr_SetString(PyExc_TypeError, "a replica is made once");
        return -1;
    }
    if (read_costs(self, costs) < 0 || read_limits(self, limits) < 0)
        return -1;
    self->block_table.first_free = NO_BLOCK;
    self->block_table.oldest = NO_BLOCK;
    self->block_table.newest = NO_BLOCK;
    self->end_ns = NEVER;
    self->block_demand = PyMem_Calloc(self->tokens_per_block, sizeof(int64_t));
    self->recent_pauses = PyList_New(0);
    if (create_buckets(self) < 0 || self->block_demand == NULL || self->recent_pauses == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
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
    int result = visit_queue(&self->waiting, visit, arg);
    if (result == 0)
        result = visit_queue(&self->running, visit, arg);
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
    clear_queue(&self->waiting);
    clear_queue(&self->running);
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
    PyMem_Free(self->block_demand);
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
    push_back(&self->waiting, request);
    Py_RETURN_NONE;
}

/* Replica.begin_iteration(now_ns) -> bool */
static PyObject *replica_begin_iteration(Replica *self, PyObject *now)
{
    int64_t now_ns;
    if (convert_int64(now, &now_ns) < 0)
        return NULL;
    int has_begun = begin_iteration(self, now_ns);
    return has_begun < 0 ? NULL : PyBool_FromLong(has_begun);
}

/* Replica.end_iteration() -> list of the requests that are done */
static PyObject *replica_end_iteration(Replica *self, PyObject *none)
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

/* Return the index of the replica whose iteration ends first. */
static Py_ssize_t find_first_to_end(Replica **replicas, Py_ssize_t count)
{
    Py_ssize_t first = 0;
    for (Py_ssize_t i = 1; i < count; i++)
        if (replicas[i]->end_ns < replicas[first]->end_ns)
            first = i;
    return first;
}

/* Replica.advance_to_next_event(replicas, before_ns) -> (end_ns, index)
 *
 * Advance the replicas to the next iteration that the caller has to handle. Uneventful
 * iterations that end before `before_ns` are ended here, in order of time, without a call from
 * Python for each. Return the end of the next iteration and the index of its replica. */
static PyObject *replica_advance_to_next_event(PyObject *none, PyObject *args)
{
    PyObject *list, *before;
    int64_t before_ns;
    if (!PyArg_UnpackTuple(args, "advance_to_next_event", 2, 2, &list, &before) ||
        convert_int64(before, &before_ns) < 0)
        return NULL;
    Py_ssize_t count;
    Replica **replicas = get_replicas(list, &count);
    if (replicas == NULL)
        return NULL;
    PyObject *result = NULL;
    while (1) {
        Py_ssize_t index = find_first_to_end(replicas, count);
        Replica *replica = replicas[index];
        int64_t end_ns = replica->end_ns;
        if (end_ns >= before_ns || !is_uneventful(replica)) {
            result = Py_BuildValue("Ln", (long long)end_ns, index);
            break;
        }
        if (end_iteration(replica, NULL) < 0 || begin_iteration(replica, end_ns) < 0)
            break;
    }
    PyMem_Free(replicas);
    return result;
}

/* Replica.cancel(request): stop a request. */
static PyObject *replica_cancel(Replica *self, PyObject *object)
{
    Request *request = check_request(object);
    if (request == NULL || cancel_request(self, request) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Replica.count_generated_tokens(request) -> int */
static PyObject *replica_count_generated_tokens(Replica *self, PyObject *object)
{
    Request *request = check_request(object);
    return request == NULL ? NULL : PyLong_FromLongLong(count_generated_tokens(self, request));
}

/* Replica.reset_cache(): remove all blocks without users. */
static PyObject *replica_reset_cache(Replica *self, PyObject *none)
{
    evict_blocks(&self->block_table, 0);
    Py_RETURN_NONE;
}

/* Replica.discard_iteration_ends(): discard the end times of all iterations but the last, to
 * limit the memory of a server. */
static PyObject *replica_discard_iteration_ends(Replica *self, PyObject *none)
{
    TimeArray *end_times = &self->end_times;
    if (end_times->count > 1) {
        end_times->values[0] = end_times->values[end_times->count - 1];
        end_times->count = 1;
    }
    Py_RETURN_NONE;
}

/* Replica.iteration_end_ns(iteration) -> int: when an iteration ended. */
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

static PyObject *replica_first_token_requests(Replica *self, void *none)
{
    return list_of_requests(&self->first_token_requests);
}

/* Replica.iteration_ends_ns: a copy of the end times as an `array.array("q")`, the type for
 * int64. In the format of the call, "s" is the type code, and "y#" the bytes with their length. */
static PyObject *replica_iteration_ends_ns(Replica *self, void *none)
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

static PyObject *replica_queued_count(Replica *self, void *none)
{
    return PyLong_FromSsize_t(self->waiting.count);
}

static PyObject *replica_next_due_ns(Replica *self, void *none)
{
    Request *first = self->waiting.head;
    return PyLong_FromLongLong(first == NULL ? NEVER : first->due_ns);
}

static PyObject *replica_used_block_count(Replica *self, void *none)
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

/* Create the module with both classes, and remember the classes for type checks. */
PyMODINIT_FUNC PyInit__replica(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    PyObject *request = PyType_FromSpec(&request_spec);
    PyObject *replica = PyType_FromSpec(&replica_spec);
    if (request == NULL || replica == NULL ||
        PyModule_AddObjectRef(module, "SimRequest", request) < 0 ||
        PyModule_AddObjectRef(module, "Replica", replica) < 0 ||
        PyObject_SetAttrString(replica, "Request", request) < 0 ||
        PyModule_AddIntConstant(module, "VERSION", VERSION) < 0) {
        Py_XDECREF(request);
        Py_XDECREF(replica);
        Py_DECREF(module);
        return NULL;
    }
    request_type = (PyTypeObject *)request;
    replica_type = (PyTypeObject *)replica;
    return module;
}
