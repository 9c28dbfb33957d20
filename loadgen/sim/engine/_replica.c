/* SimRequest and Replica of replica.py in C.

   replica.py is the reference implementation and documents both classes. The tests in
   tests/sim/test_compiled_replica.py compare the two. Only the limited API of Python 3.11 is used.
   The file is compiled without contraction of a * b + c, so that durations equal those of Python to
   the last bit.

   Functions that can fail return -1 with a Python exception set, unless they say otherwise. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define VERSION 3 /* must equal VERSION in implementation.py, which else uses the Python classes */
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
    long long due_ns, replica_index, input_tokens, requested_tokens, output_tokens;
    long long prefill_tokens, prefill_left, remaining_tokens, private_blocks;
    long long admitted_ns, cached_tokens, first_iteration, resumed_iteration, last_iteration;
    long long failure, failed_ns;
    int state;
    int64_t *shared_blocks; /* indexes in BlockTable.blocks */
    Py_ssize_t shared_count, shared_capacity;
    /* Neighbours in the queue of waiting requests or, while it decodes, among the running ones.
       Both queues own their requests. */
    struct Request *previous, *next;
    struct Request *bucket_previous, *bucket_next;
} Request;

/* A doubly linked list. */
typedef struct {
    Request *head, *tail;
    Py_ssize_t count;
} RequestQueue;

typedef struct {
    Request **items;
    Py_ssize_t count, capacity;
} RequestArray;

typedef struct {
    int64_t *values;
    Py_ssize_t count, capacity;
} TimeArray;

/* A block that several prompts may share. A block without users is in the list of unused blocks,
   and an entry that holds no block is in the list of free entries, linked by `newer`. */
typedef struct {
    BlockHash hash;
    int64_t users;
    int64_t older, newer;
} Block;

/* All shared blocks, and a hash table with open addressing that finds them. */
typedef struct {
    uint64_t *slots; /* hash << 32 | index in `blocks` + 1; 0: the slot is empty */
    int64_t slots_mask;
    Block *blocks;
    int64_t capacity, first_free;
    int64_t oldest, newest; /* ends of the list of unused blocks */
    int64_t pinned_count;   /* blocks with users */
    int64_t unused_count;
} BlockTable;

typedef struct {
    PyObject_HEAD
    /* See Costs and ServerLimits in replica.py. */
    double overhead_ns, weights_ns, kv_token_ns, token_ns, attended_ns;
    int64_t max_batch_size, max_num_tokens, kv_blocks, tokens_per_block, max_seq_len;
    int chunked_prefill, guaranteed, block_reuse;

    RequestQueue waiting, running;
    /* Decoding requests by the iteration of their last token, modulo the number of buckets. */
    RequestQueue *buckets;
    int64_t bucket_mask;
    RequestArray ready;   /* their prefill ends with the current iteration */
    RequestArray started; /* got a first token in the last finished iteration */
    Request *partial;     /* prefilled in part; served before the queue */
    PyObject *paused;     /* list of (request, first iteration, last iteration) */
    /* Number of decoding requests that need a new block when iteration % tokens_per_block is the
       index. */
    int64_t *growing;
    BlockTable shared;
    int64_t private_used; /* blocks in use that are not shared */
    int64_t kv_tokens;    /* in the key-value cache, of decoding requests */

    long long active, decoding, decoded, iteration, end_ns, context_requests, context_tokens;
    long long pauses, hits, misses;
    int is_under_way;    /* between `begin` and `finish` */
    TimeArray end_times; /* of the iterations, in ns */
} Replica;

/* What an iteration computes and reads. */
typedef struct {
    int64_t decoding, context_requests, context_tokens;
    int64_t tokens_read; /* in the key-value cache */
    double attended;     /* sum over the computed tokens of the tokens that each attends to */
} Work;

static PyTypeObject *request_type, *replica_type;

/* -- arithmetic -------------------------------------------------------------------------------- */

static int64_t floor_divide(int64_t dividend, int64_t divisor)
{
    int64_t quotient = dividend / divisor;
    int is_rounded_up = dividend % divisor != 0 && (dividend < 0) != (divisor < 0);
    return quotient - is_rounded_up;
}

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

/* Double the capacity of an array and return the new array, or NULL with an exception if there is
   no memory. An empty array gets the capacity `initial`. */
static void *grow_array(void *items, Py_ssize_t *capacity, Py_ssize_t initial, size_t item_size)
{
    Py_ssize_t new_capacity = *capacity ? 2 * *capacity : initial;
    void *grown = PyMem_Realloc(items, new_capacity * item_size);
    if (grown == NULL)
        return PyErr_NoMemory();
    *capacity = new_capacity;
    return grown;
}

/* Append the end time of an iteration. */
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

/* Append a request. The array takes over the caller's reference. */
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

static void clear_requests(RequestArray *array)
{
    while (array->count > 0) {
        Request *request = array->items[--array->count];
        Py_DECREF(OBJECT(request));
    }
}

static PyObject *list_of_requests(const RequestArray *array)
{
    PyObject *list = PyList_New(array->count);
    for (Py_ssize_t i = 0; list != NULL && i < array->count; i++)
        PyList_SetItem(list, i, Py_NewRef(OBJECT(array->items[i])));
    return list;
}

/* Add a request at the end. The queue takes over the caller's reference. */
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

/* Add a request at the front. The queue takes over the caller's reference. */
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

/* Remove a request. The caller takes over the queue's reference. */
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

static void clear_queue(RequestQueue *queue)
{
    while (queue->head != NULL) {
        Request *request = queue->head;
        unlink_request(queue, request);
        Py_DECREF(OBJECT(request));
    }
}

static RequestQueue *bucket_of(Replica *self, int64_t iteration)
{
    return &self->buckets[iteration & self->bucket_mask];
}

/* Add a request to the bucket of its last iteration. */
static void add_to_bucket(Replica *self, Request *request)
{
    RequestQueue *bucket = bucket_of(self, request->last_iteration);
    request->bucket_previous = bucket->tail;
    request->bucket_next = NULL;
    if (bucket->tail != NULL)
        bucket->tail->bucket_next = request;
    else
        bucket->head = request;
    bucket->tail = request;
}

/* Remove a request from the bucket of its last iteration. */
static void remove_from_bucket(Replica *self, Request *request)
{
    RequestQueue *bucket = bucket_of(self, request->last_iteration);
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

static int as_int64(PyObject *object, int64_t *value)
{
    *value = PyLong_AsLongLong(object);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Convert an int or any hashable object. A large int is kept as an object. Most hashes are ints of
   at most 64 bits, which need no object and are compared at once. -1 is a value that the C API also
   returns for an error, so PyErr_Occurred decides. */
static int as_block_hash(PyObject *object, BlockHash *hash)
{
    if (PyLong_CheckExact(object)) {
        int overflow;
        hash->object = NULL;
        hash->value = PyLong_AsLongLongAndOverflow(object, &overflow);
        if (!overflow)
            return hash->value == -1 && PyErr_Occurred() ? -1 : 0;
    }
    hash->value = PyObject_Hash(object);
    if (hash->value == -1)
        return -1;
    hash->object = Py_NewRef(object);
    return 0;
}

/* Set the hashes of the full blocks of a prompt from a sequence.
   See SimRequest.blocks in replica.py. */
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
    /* The count grows with each hash, so that a failure frees those that exist. */
    for (; self->block_count < count; self->block_count++) {
        PyObject *object = PySequence_GetItem(blocks, self->block_count);
        if (object == NULL)
            return -1;
        int failed = as_block_hash(object, &self->block_hashes[self->block_count]) < 0;
        Py_DECREF(object);
        if (failed)
            return -1;
    }
    return 0;
}

/* SimRequest(key, due_ns, input_tokens, output_tokens, blocks=()) */
static PyObject *request_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *key, *due_object, *input_object, *output_object, *blocks = NULL;
    int64_t due_ns, input_tokens, output_tokens;
    if (!PyArg_UnpackTuple(args, "SimRequest", 4, 5, &key, &due_object, &input_object,
                           &output_object, &blocks))
        return NULL;
    if (as_int64(due_object, &due_ns) < 0 || as_int64(input_object, &input_tokens) < 0 ||
        as_int64(output_object, &output_tokens) < 0)
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(request_type, Py_tp_alloc);
    Request *self = (Request *)allocate(request_type, 0);
    if (self == NULL)
        return NULL;
    self->key = Py_NewRef(key);
    self->due_ns = due_ns;
    self->input_tokens = input_tokens;
    self->prefill_tokens = input_tokens;
    self->prefill_left = input_tokens;
    self->requested_tokens = output_tokens;
    self->output_tokens = output_tokens;
    self->remaining_tokens = output_tokens;
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

/* Free a request. The type object is alive as long as its instances. */
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
static Request *as_request(PyObject *object)
{
    if (!PyObject_TypeCheck(object, request_type)) {
        PyErr_SetString(PyExc_TypeError, "not a SimRequest");
        return NULL;
    }
    return (Request *)object;
}

/* Write the fields of a request in the order of replica.REQUEST_FIELDS. Its key must be an int. */
static int pack_request(PyObject *object, int64_t *row)
{
    Request *request = as_request(object);
    int64_t number;
    if (request == NULL || as_int64(request->key, &number) < 0)
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

/* SimRequest.pack(requests, rows): write the fields of requests into an array of int64. */
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
    {"remaining_tokens", T_LONGLONG, offsetof(Request, remaining_tokens), 0, NULL},
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

/* Multiplicative (Fibonacci) hashing: neighbouring numbers get distant slots. */
static uint32_t mix_hash(int64_t value)
{
    uint64_t mixed = (uint64_t)value * 0x9E3779B97F4A7C15u;
    return (uint32_t)(mixed ^ (mixed >> 29));
}

static uint32_t hash_in_slot(uint64_t slot)
{
    return (uint32_t)(slot >> 32);
}

static int64_t block_in_slot(uint64_t slot)
{
    return (int64_t)(uint32_t)slot - 1;
}

/* Fetch the slot of a block that is searched soon: neighbouring blocks have distant slots, which
   are rarely cached. */
static void prefetch_slot(const BlockTable *table, const Request *request, Py_ssize_t position)
{
    if (table->slots == NULL || position >= request->block_count)
        return;
    uint32_t hash = mix_hash(request->block_hashes[position].value);
    __builtin_prefetch(&table->slots[hash & table->slots_mask]);
}

/* 1 if two hashes are equal, else 0.
   Return -1 with an exception if objects cannot be compared. */
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

/* Return the index of a shared block, NOT_FOUND, or SEARCH_FAILED. The search begins at the slot of
   the hash and ends at the first empty slot (linear probing). The upper half of a slot has the
   hash, so that most other blocks are passed over without reading them. */
static int64_t find_block(const BlockTable *table, const BlockHash *block_hash)
{
    if (table->slots == NULL)
        return NOT_FOUND;
    uint32_t hash = mix_hash(block_hash->value);
    int64_t slot = hash & table->slots_mask;
    while (table->slots[slot]) {
        if (hash_in_slot(table->slots[slot]) == hash) {
            int64_t block = block_in_slot(table->slots[slot]);
            int is_same = is_same_hash(&table->blocks[block].hash, block_hash);
            if (is_same < 0)
                return SEARCH_FAILED;
            if (is_same)
                return block;
        }
        slot = (slot + 1) & table->slots_mask;
    }
    return NOT_FOUND;
}

/* Put an entry into the first empty slot from that of its hash on. */
static void insert_slot(BlockTable *table, uint64_t entry)
{
    int64_t slot = (int64_t)hash_in_slot(entry) & table->slots_mask;
    while (table->slots[slot])
        slot = (slot + 1) & table->slots_mask;
    table->slots[slot] = entry;
}

/* Double the slots of a table, and insert all blocks again.
   A new table gets INITIAL_SLOTS. */
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

/* Empty the slot of a block, and move the entries after it that would not be found any more. An
   empty slot ends a search. So an entry behind the hole moves into it, unless its search begins
   behind the hole (its home slot). Then the slot of the moved entry is the hole. Distances are
   taken modulo the number of slots, because the last slot is followed by the first. */
static void remove_slot(BlockTable *table, int64_t block)
{
    int64_t mask = table->slots_mask;
    int64_t hole = mix_hash(table->blocks[block].hash.value) & mask;
    while (block_in_slot(table->slots[hole]) != block)
        hole = (hole + 1) & mask;
    for (int64_t slot = (hole + 1) & mask; table->slots[slot]; slot = (slot + 1) & mask) {
        int64_t home = (int64_t)hash_in_slot(table->slots[slot]) & mask;
        if (((slot - home) & mask) >= ((slot - hole) & mask)) {
            table->slots[hole] = table->slots[slot];
            hole = slot;
        }
    }
    table->slots[hole] = 0;
}

/* Remove a block from the list of unused blocks. */
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

/* Double the entries for blocks and add the new ones to the free list.
   They are added in reverse order, so that the first of them is used first. */
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

/* Add a block with one user, and return its index. At most half of the slots are in use.
   A fuller table would make searches longer. */
static int64_t add_block(BlockTable *table, const BlockHash *block_hash)
{
    if (table->first_free == NO_BLOCK && double_blocks(table) < 0)
        return -1;
    int64_t block_count = table->pinned_count + table->unused_count;
    int is_half_full = table->slots == NULL || 2 * block_count > table->slots_mask;
    if (is_half_full && double_slots(table) < 0)
        return -1;
    int64_t index = table->first_free;
    table->first_free = table->blocks[index].newer;
    table->blocks[index] =
        (Block){.hash = *block_hash, .users = 1, .older = NO_BLOCK, .newer = NO_BLOCK};
    Py_XINCREF(block_hash->object);
    insert_slot(table, (uint64_t)mix_hash(block_hash->value) << 32 | (uint64_t)(index + 1));
    table->pinned_count++;
    return index;
}

/* Remove the least recently used blocks without users until at most `capacity` of them are left.
   A negative capacity counts as 0. The memory of the next block is fetched in advance. */
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

/* Count one more request that uses a block. */
static void use_block(BlockTable *table, int64_t index)
{
    if (table->blocks[index].users++ == 0) {
        remove_from_unused(table, index);
        table->pinned_count++;
    }
}

/* Count one request less that uses a block. Without users it stays in the table until it is
   evicted. */
static void stop_using_block(BlockTable *table, int64_t index)
{
    if (--table->blocks[index].users == 0) {
        table->pinned_count--;
        add_to_unused(table, index);
    }
}

/* -- blocks and tokens of a replica's requests ------------------------------------------------- */

/* The number of blocks that are free or could be evicted. */
static int64_t free_blocks(const Replica *self)
{
    return self->kv_blocks - self->private_used - self->shared.pinned_count;
}

/* Add a block to those that a request shares. */
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

/* Set `shared_blocks` to the blocks of a prompt that exist already, and return how many of them
   have no users. They are the first blocks of the prompt, up to the first that does not exist.
   Blocks without users would be taken from the free ones, so the caller has to know their number.
   */
static int64_t match_blocks(Replica *self, Request *request)
{
    int64_t unused_count = 0;
    request->shared_count = 0;
    if (!self->block_reuse)
        return 0;
    /* At least one token of a prompt is computed, even if all its blocks exist. */
    int64_t reusable = floor_divide(request->prefill_tokens - 1, self->tokens_per_block);
    reusable = minimum(reusable, request->block_count);
    for (int64_t i = 0; i < reusable; i++) {
        prefetch_slot(&self->shared, request, i + PREFETCH_DISTANCE);
        int64_t index = find_block(&self->shared, &request->block_hashes[i]);
        if (index == NOT_FOUND)
            break;
        if (index == SEARCH_FAILED || append_shared_block(request, index) < 0)
            return -1;
        unused_count += self->shared.blocks[index].users == 0;
    }
    return unused_count;
}

/* Note how much of a prompt was in the cache, at the first admission of a request.
   A request that is admitted again after a pause is not counted a second time. */
static void count_cached_tokens(Replica *self, Request *request)
{
    if (request->cached_tokens >= 0)
        return;
    request->cached_tokens = request->shared_count * self->tokens_per_block;
    if (self->block_reuse) {
        self->hits += request->shared_count;
        self->misses += request->block_count - request->shared_count;
    }
}

/* Take the blocks for a waiting request. Return 1, or 0 if there are not enough. The blocks at the
   beginning of the prompt that exist already are shared. The others are private: no other request
   uses them. With `guaranteed`, blocks for the whole output are taken now. */
static int admit(Replica *self, Request *request)
{
    int64_t tokens = request->prefill_tokens;
    if (self->guaranteed)
        tokens += request->remaining_tokens;
    int64_t unused_count = match_blocks(self, request);
    if (unused_count < 0)
        return -1;
    int64_t private_blocks = ceil_divide(tokens, self->tokens_per_block) - request->shared_count;
    if (private_blocks + unused_count > free_blocks(self)) {
        request->shared_count = 0;
        return 0;
    }
    for (Py_ssize_t i = 0; i < request->shared_count; i++)
        use_block(&self->shared, request->shared_blocks[i]);
    self->private_used += private_blocks;
    evict_blocks(&self->shared, free_blocks(self));
    request->private_blocks = private_blocks;
    request->prefill_left =
        request->prefill_tokens - request->shared_count * self->tokens_per_block;
    count_cached_tokens(self, request);
    request->state = PREFILLING;
    self->active++;
    return 1;
}

/* Share the computed blocks of a prompt with later requests, up to the first that another request
   has shared. */
static int share_prompt_blocks(Replica *self, Request *request)
{
    int64_t full_blocks = request->input_tokens / self->tokens_per_block;
    int64_t count = minimum(full_blocks, request->block_count);
    for (int64_t i = request->shared_count; i < count; i++) {
        const BlockHash *block_hash = &request->block_hashes[i];
        prefetch_slot(&self->shared, request, i + PREFETCH_DISTANCE);
        int64_t index = find_block(&self->shared, block_hash);
        if (index == SEARCH_FAILED)
            return -1;
        if (index != NOT_FOUND)
            return 0;
        index = add_block(&self->shared, block_hash);
        if (index < 0 || append_shared_block(request, index) < 0)
            return -1;
        request->private_blocks--;
        self->private_used--;
    }
    return 0;
}

/* Free the private blocks of a request and stop using its shared ones, the end of the prefix first.
   */
static void release_blocks(Replica *self, Request *request, int64_t private_blocks)
{
    self->private_used -= private_blocks;
    /* The block that becomes unused first is evicted first, and the beginning is more useful. */
    while (request->shared_count > 0)
        stop_using_block(&self->shared, request->shared_blocks[--request->shared_count]);
    request->private_blocks = 0;
}

/* In which iterations, modulo tokens_per_block, a decoding request needs a new block. In iteration
   `resumed_iteration + 1 + n` it has `prefill_tokens + n` tokens in the cache and adds one. It
   needs a new block if that number is a multiple of tokens_per_block. */
static int64_t growing_phase(const Replica *self, const Request *request)
{
    int64_t first_growth = request->resumed_iteration + 1 - request->prefill_tokens;
    return floor_modulo(first_growth, self->tokens_per_block);
}

/* The last finished iteration in which a decoding or finished request got a token. */
static int64_t last_token_iteration(const Replica *self, const Request *request)
{
    return minimum(self->iteration - 1, request->last_iteration);
}

/* Remove a decoding request before its end. The caller takes over the reference. The key and the
   value of its last token are not in the cache: they are computed together with the token after it.
   Without `guaranteed`, it has also taken blocks since its prefill, which are freed, too. */
static void remove_decoding(Replica *self, Request *request)
{
    int64_t decoded_tokens = last_token_iteration(self, request) - request->resumed_iteration;
    int64_t cached_tokens = request->prefill_tokens + decoded_tokens;
    remove_from_bucket(self, request);
    unlink_request(&self->running, request);
    self->decoding--;
    self->active--;
    self->kv_tokens -= cached_tokens;
    int64_t private_blocks = request->private_blocks;
    if (!self->guaranteed) {
        int64_t per_block = self->tokens_per_block;
        int64_t phase = growing_phase(self, request);
        self->growing[phase]--;
        private_blocks +=
            ceil_divide(cached_tokens, per_block) - ceil_divide(request->prefill_tokens, per_block);
        if (self->is_under_way && self->iteration % per_block == phase)
            private_blocks++; /* the current iteration has already taken a block for it */
    }
    release_blocks(self, request, private_blocks);
}

/* The tokens that a request has got by the end of the last finished iteration.
   Tokens are not counted one by one: since its admission it has got one in each iteration from
   `resumed_iteration` on, and after a pause `remaining_tokens` says how many it lacked then. */
static int64_t count_generated(const Replica *self, const Request *request)
{
    int64_t before_pause = request->output_tokens - request->remaining_tokens;
    int has_decoded =
        request->state == DECODING || (request->state == DONE && request->last_iteration >= 0);
    if (!has_decoded)
        return before_pause;
    int64_t since_resumed = last_token_iteration(self, request) - request->resumed_iteration + 1;
    return before_pause + (since_resumed > 0 ? since_resumed : 0);
}

/* Append (request, first iteration, last iteration) to the list of paused requests. */
static int record_pause(Replica *self, Request *request, int64_t first, int64_t last)
{
    PyObject *pause = Py_BuildValue("OLL", request, (long long)first, (long long)last);
    if (pause == NULL)
        return -1;
    int failed = PyList_Append(self->paused, pause);
    Py_DECREF(pause);
    return failed;
}

/* Pause the request admitted last: it waits first in the queue, and is computed again later. Its
   prompt and the tokens that it has got are prefilled again then. A request that is still in
   prefill is newer than all decoding ones, and has got no token (an empty range of iterations). */
static int pause_one(Replica *self)
{
    int64_t first_iteration = 0;
    int64_t last_iteration = -1;
    Request *request = self->partial;
    if (request != NULL) {
        self->partial = NULL;
        release_blocks(self, request, request->private_blocks);
        self->active--;
    } else {
        request = self->running.tail;
        int64_t generated = count_generated(self, request);
        first_iteration = request->resumed_iteration;
        last_iteration = self->iteration - 1;
        remove_decoding(self, request);
        request->prefill_tokens = request->input_tokens + generated;
        request->remaining_tokens = request->output_tokens - generated;
    }
    request->prefill_left = request->prefill_tokens;
    request->state = WAITING;
    push_front(&self->waiting, request);
    self->pauses++;
    return record_pause(self, request, first_iteration, last_iteration);
}

/* -- iterations -------------------------------------------------------------------------------- */

/* Replace the list of paused requests, which the caller may still hold, by an empty one. */
static int clear_paused(Replica *self)
{
    if (PyList_Size(self->paused) == 0)
        return 0;
    PyObject *empty = PyList_New(0);
    if (empty == NULL)
        return -1;
    Py_DECREF(self->paused);
    self->paused = empty;
    return 0;
}

/* Take the blocks that decoding requests need now. Pause some requests if there are too few.
   Each pause frees the blocks of one request, and may also lower the number of blocks needed. */
static int grow_decoding(Replica *self)
{
    int64_t phase = self->iteration % self->tokens_per_block;
    if (self->guaranteed || self->growing[phase] == 0)
        return 0;
    if (self->growing[phase] > free_blocks(self)) {
        while (self->growing[phase] > free_blocks(self))
            if (pause_one(self) < 0)
                return -1;
        evict_blocks(&self->shared, free_blocks(self) - self->growing[phase]);
    }
    self->private_used += self->growing[phase];
    return 0;
}

/* Admit the request that waits first, and set `admitted` to it, or to NULL if it has to wait. It
   waits if the batch is full, if it is not due yet, if its prompt exceeds the budget and cannot be
   prefilled in parts, or if too few blocks are free. No later request overtakes it. */
static int admit_next(Replica *self, int64_t budget, int64_t now_ns, Request **admitted)
{
    *admitted = NULL;
    Request *request = self->waiting.head;
    if (request == NULL || self->active >= self->max_batch_size || request->due_ns > now_ns)
        return 0;
    if (!self->chunked_prefill && request->prefill_left > budget)
        return 0;
    int is_admitted = admit(self, request);
    if (is_admitted <= 0)
        return is_admitted;
    unlink_request(&self->waiting, request);
    if (request->admitted_ns < 0)
        request->admitted_ns = now_ns;
    *admitted = request;
    return 0;
}

/* Add a part of a prompt that begins after `start` of its tokens. Each of its tokens attends to
   `start` tokens and, on average over the part, to half of the part. */
static void add_chunk(Work *work, int64_t start, int64_t tokens)
{
    work->tokens_read += start + tokens;
    work->attended += (double)tokens * ((double)start + 0.5 * (double)tokens);
    work->context_tokens += tokens;
    work->context_requests++;
}

/* Compute at most `budget` tokens of prompts, in order of arrival. A prompt that exceeds the rest
   of the budget is prefilled in part and continued in the next iteration. */
static int prefill(Replica *self, Work *work, int64_t budget, int64_t now_ns)
{
    while (budget > 0) {
        Request *request = self->partial;
        if (request == NULL && admit_next(self, budget, now_ns, &request) < 0)
            return -1;
        if (request == NULL)
            return 0;
        int64_t chunk = minimum(request->prefill_left, budget);
        add_chunk(work, request->prefill_tokens - request->prefill_left, chunk);
        budget -= chunk;
        request->prefill_left -= chunk;
        self->partial = request->prefill_left ? request : NULL;
        if (self->partial == NULL && append_request(&self->ready, request) < 0)
            return -1;
    }
    return 0;
}

/* The duration of an iteration in ns: the roofline model. */
static int64_t work_duration_ns(const Replica *self, const Work *work)
{
    double memory_ns = self->weights_ns + (double)work->tokens_read * self->kv_token_ns;
    int64_t tokens = work->decoding + work->context_tokens;
    double compute_ns = (double)tokens * self->token_ns + work->attended * self->attended_ns;
    double longer_ns = memory_ns > compute_ns ? memory_ns : compute_ns;
    return (int64_t)(self->overhead_ns + longer_ns) + 1;
}

/* Begin an iteration. Return 1, or 0 if there is nothing to do. */
static int begin_iteration(Replica *self, int64_t now_ns)
{
    if (clear_paused(self) < 0 || grow_decoding(self) < 0)
        return -1;
    Work work = {.decoding = self->decoding, .tokens_read = self->kv_tokens + self->decoding};
    work.attended = (double)work.tokens_read;
    /* A request that was just paused is not admitted again yet. */
    int has_paused = PyList_Size(self->paused) > 0;
    if (!has_paused && prefill(self, &work, self->max_num_tokens - work.decoding, now_ns) < 0)
        return -1;
    if (work.decoding == 0 && work.context_tokens == 0) {
        self->end_ns = NEVER;
        return 0;
    }
    self->context_tokens = work.context_tokens;
    self->context_requests = work.context_requests;
    self->end_ns = now_ns + work_duration_ns(self, &work);
    self->is_under_way = 1;
    return append_time(&self->end_times, self->end_ns) < 0 ? -1 : 1;
}

/* Append a request that is done to a list, which takes over the replica's reference to it. */
static int move_to_list(Request *request, PyObject *done)
{
    int failed = PyList_Append(done, OBJECT(request));
    Py_DECREF(OBJECT(request));
    return failed;
}

/* Remove the requests that got their last token in an iteration, and append them to `done`. */
static int remove_finished(Replica *self, int64_t iteration, PyObject *done)
{
    RequestQueue *bucket = bucket_of(self, iteration);
    Request *request = bucket->head;
    bucket->head = NULL;
    bucket->tail = NULL;
    while (request != NULL) {
        Request *next = request->bucket_next;
        request->bucket_previous = NULL;
        request->bucket_next = NULL;
        request->state = DONE;
        unlink_request(&self->running, request);
        /* The key and the value of the last token are never computed. */
        int64_t cached_tokens = request->prefill_tokens + request->remaining_tokens - 1;
        self->kv_tokens -= cached_tokens;
        int64_t private_blocks = request->private_blocks;
        if (!self->guaranteed) {
            self->growing[growing_phase(self, request)]--;
            private_blocks =
                ceil_divide(cached_tokens, self->tokens_per_block) - request->shared_count;
        }
        release_blocks(self, request, private_blocks);
        self->decoding--;
        self->active--;
        if (move_to_list(request, done) < 0)
            return -1;
        request = next;
    }
    return 0;
}

/* Start decoding after the prefill, which gave the first token. A request for one token is appended
   to `done`. */
static int start_decoding(Replica *self, Request *request, int64_t iteration, PyObject *done)
{
    if (request->first_iteration < 0)
        request->first_iteration = iteration;
    request->resumed_iteration = iteration;
    if (self->block_reuse && share_prompt_blocks(self, request) < 0)
        return -1;
    request->last_iteration = iteration + request->remaining_tokens - 1;
    if (request->remaining_tokens <= 1) {
        release_blocks(self, request, request->private_blocks);
        self->active--;
        request->state = DONE;
        return move_to_list(request, done);
    }
    request->state = DECODING;
    self->kv_tokens += request->prefill_tokens;
    if (!self->guaranteed)
        self->growing[growing_phase(self, request)]++;
    push_back(&self->running, request);
    add_to_bucket(self, request);
    self->decoding++;
    return 0;
}

/* End the current iteration and append the requests that are done to a list, which may be NULL if
   there are none. */
static int finish_iteration(Replica *self, PyObject *done)
{
    int64_t iteration = self->iteration++;
    self->is_under_way = 0;
    self->kv_tokens += self->decoding;
    self->decoded += self->decoding;
    if (remove_finished(self, iteration, done) < 0)
        return -1;
    clear_requests(&self->started);
    for (Py_ssize_t i = 0; i < self->ready.count; i++) {
        Request *request = self->ready.items[i];
        Py_INCREF(OBJECT(request));
        if (append_request(&self->started, request) < 0 ||
            start_decoding(self, request, iteration, done) < 0)
            return -1;
    }
    self->ready.count = 0;
    return 0;
}

/* Whether the caller need not see this iteration: it starts and ends no request, and the next one
   pauses none. */
static int is_quiet(const Replica *self)
{
    if (self->decoding == 0 && self->partial == NULL) /* all were cancelled: it becomes idle */
        return 0;
    if (self->ready.count > 0 || self->buckets[self->iteration & self->bucket_mask].head != NULL)
        return 0;
    if (self->guaranteed)
        return 1;
    return self->growing[(self->iteration + 1) % self->tokens_per_block] <= free_blocks(self);
}

/* -- cancellation ------------------------------------------------------------------------------ */

/* Remove a request from the queue. The caller takes over the reference. Only the first request of a
   queue has no predecessor, so another one without one is in no queue. */
static int remove_waiting(Replica *self, Request *request)
{
    if (request->previous == NULL && request != self->waiting.head) {
        PyErr_SetString(PyExc_ValueError, "a request that was not submitted");
        return -1;
    }
    unlink_request(&self->waiting, request);
    return 0;
}

/* Remove a request whose prompt is computed now. The caller takes over the reference. */
static int remove_prefilling(Replica *self, Request *request)
{
    if (request == self->partial) {
        self->partial = NULL;
    } else {
        Py_ssize_t index = 0;
        while (index < self->ready.count && self->ready.items[index] != request)
            index++;
        if (index == self->ready.count) {
            PyErr_SetString(PyExc_ValueError, "a request of another replica");
            return -1;
        }
        remove_at(&self->ready, index);
    }
    release_blocks(self, request, request->private_blocks);
    self->active--;
    return 0;
}

/* Stop a request, unless it is done. */
static int cancel_request(Replica *self, Request *request)
{
    int failed = 0;
    if (request->state == DONE)
        return 0;
    if (request->state == WAITING)
        failed = remove_waiting(self, request);
    else if (request->state == PREFILLING)
        failed = remove_prefilling(self, request);
    else
        remove_decoding(self, request);
    if (failed)
        return -1;
    request->state = DONE;
    Py_DECREF(OBJECT(request));
    return 0;
}

/* -- the methods of Replica -------------------------------------------------------------------- */

static int read_float(PyObject *object, const char *name, double *number)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    if (value == NULL)
        return -1;
    *number = PyFloat_AsDouble(value);
    Py_DECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

static int read_int(PyObject *object, const char *name, int64_t *number)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    if (value == NULL)
        return -1;
    int failed = as_int64(value, number);
    Py_DECREF(value);
    return failed;
}

static int read_bool(PyObject *object, const char *name, int *flag)
{
    int64_t number = 0;
    int failed = read_int(object, name, &number);
    *flag = number != 0;
    return failed;
}

/* Read the attributes of a Costs object. */
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

/* Read and check the attributes of a ServerLimits object. */
static int read_limits(Replica *self, PyObject *limits)
{
    if (read_int(limits, "max_batch_size", &self->max_batch_size) < 0 ||
        read_int(limits, "max_num_tokens", &self->max_num_tokens) < 0 ||
        read_int(limits, "kv_blocks", &self->kv_blocks) < 0 ||
        read_int(limits, "tokens_per_block", &self->tokens_per_block) < 0 ||
        read_int(limits, "max_seq_len", &self->max_seq_len) < 0 ||
        read_bool(limits, "chunked_prefill", &self->chunked_prefill) < 0 ||
        read_bool(limits, "guaranteed", &self->guaranteed) < 0 ||
        read_bool(limits, "block_reuse", &self->block_reuse) < 0)
        return -1;
    if (self->tokens_per_block < 1 || self->max_seq_len < 1 || self->max_seq_len > MAX_SEQ_LEN) {
        PyErr_SetString(PyExc_ValueError, "tokens_per_block and max_seq_len must be positive");
        return -1;
    }
    return 0;
}

/* Create the buckets: a power of two, and enough for the longest output. The bucket of an iteration
   is its number modulo their number. No request ends so late that its bucket would be that of an
   earlier iteration. */
static int create_buckets(Replica *self)
{
    int64_t bucket_count = 2;
    while (bucket_count < self->max_seq_len + 2)
        bucket_count *= 2;
    self->bucket_mask = bucket_count - 1;
    self->buckets = PyMem_Calloc(bucket_count, sizeof(RequestQueue));
    return self->buckets == NULL ? -1 : 0;
}

/* Replica(costs, limits) */
static int replica_init(Replica *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"costs", "limits", NULL};
    PyObject *costs, *limits;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO", names, &costs, &limits))
        return -1;
    if (self->paused != NULL) {
        PyErr_SetString(PyExc_TypeError, "a replica is made once");
        return -1;
    }
    if (read_costs(self, costs) < 0 || read_limits(self, limits) < 0)
        return -1;
    self->shared.first_free = NO_BLOCK;
    self->shared.oldest = NO_BLOCK;
    self->shared.newest = NO_BLOCK;
    self->end_ns = NEVER;
    self->growing = PyMem_Calloc(self->tokens_per_block, sizeof(int64_t));
    self->paused = PyList_New(0);
    if (create_buckets(self) < 0 || self->growing == NULL || self->paused == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static int visit_queue(const RequestQueue *queue, visitproc visit, void *arg)
{
    for (Request *request = queue->head; request != NULL; request = request->next)
        Py_VISIT(request);
    return 0;
}

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
        result = visit_array(&self->ready, visit, arg);
    if (result == 0)
        result = visit_array(&self->started, visit, arg);
    if (result != 0)
        return result;
    Py_VISIT(self->partial);
    Py_VISIT(self->paused);
    for (int64_t i = 0; i < self->shared.capacity; i++)
        Py_VISIT(self->shared.blocks[i].hash.object);
    return 0;
}

/* Release all objects that a replica owns. */
static int replica_clear(Replica *self)
{
    clear_queue(&self->waiting);
    clear_queue(&self->running);
    clear_requests(&self->ready);
    clear_requests(&self->started);
    Py_CLEAR(self->partial);
    Py_CLEAR(self->paused);
    for (int64_t i = 0; i < self->shared.capacity; i++)
        Py_CLEAR(self->shared.blocks[i].hash.object);
    return 0;
}

/* Free a replica and everything that it owns. */
static void replica_dealloc(Replica *self)
{
    PyTypeObject *type = Py_TYPE(OBJECT(self));
    PyObject_GC_UnTrack(self);
    replica_clear(self);
    PyMem_Free(self->buckets);
    PyMem_Free(self->growing);
    PyMem_Free(self->ready.items);
    PyMem_Free(self->started.items);
    PyMem_Free(self->end_times.values);
    PyMem_Free(self->shared.blocks);
    PyMem_Free(self->shared.slots);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(OBJECT(type));
}

/* Replica.admissible(input_tokens) -> bool */
static PyObject *replica_admissible(Replica *self, PyObject *tokens)
{
    int64_t input_tokens;
    if (as_int64(tokens, &input_tokens) < 0)
        return NULL;
    int fits_budget = self->chunked_prefill || input_tokens <= self->max_num_tokens;
    return PyBool_FromLong(input_tokens < self->max_seq_len && fits_budget);
}

/* Replica.submit(request). trtllm-serve reduces an output that does not fit, without an error. */
static PyObject *replica_submit(Replica *self, PyObject *object)
{
    Request *request = as_request(object);
    if (request == NULL)
        return NULL;
    int64_t max_output_tokens = self->max_seq_len - request->input_tokens;
    if (request->output_tokens > max_output_tokens) {
        request->output_tokens = max_output_tokens;
        request->remaining_tokens = max_output_tokens;
    }
    Py_INCREF(object);
    push_back(&self->waiting, request);
    Py_RETURN_NONE;
}

/* Replica.begin(now_ns) -> bool */
static PyObject *replica_begin(Replica *self, PyObject *now)
{
    int64_t now_ns;
    if (as_int64(now, &now_ns) < 0)
        return NULL;
    int has_begun = begin_iteration(self, now_ns);
    return has_begun < 0 ? NULL : PyBool_FromLong(has_begun);
}

/* Replica.finish() -> list of the requests that are done */
static PyObject *replica_finish(Replica *self, PyObject *none)
{
    PyObject *done = PyList_New(0);
    if (done != NULL && finish_iteration(self, done) < 0)
        Py_CLEAR(done);
    return done;
}

/* Return the replicas of a list as a new array of borrowed references, or NULL if it is empty or
   has other items. */
static Replica **replicas_of_list(PyObject *list, Py_ssize_t *count)
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

/* The index of the replica whose iteration ends first. */
static Py_ssize_t first_to_end(Replica **replicas, Py_ssize_t count)
{
    Py_ssize_t first = 0;
    for (Py_ssize_t i = 1; i < count; i++)
        if (replicas[i]->end_ns < replicas[first]->end_ns)
            first = i;
    return first;
}

/* Replica.next_iteration(replicas, before_ns) -> (end_ns, index) */
static PyObject *replica_next_iteration(PyObject *none, PyObject *args)
{
    PyObject *list, *before;
    int64_t before_ns;
    if (!PyArg_UnpackTuple(args, "next_iteration", 2, 2, &list, &before) ||
        as_int64(before, &before_ns) < 0)
        return NULL;
    Py_ssize_t count;
    Replica **replicas = replicas_of_list(list, &count);
    if (replicas == NULL)
        return NULL;
    PyObject *result = NULL;
    while (1) {
        Py_ssize_t index = first_to_end(replicas, count);
        Replica *replica = replicas[index];
        int64_t end_ns = replica->end_ns;
        if (end_ns >= before_ns || !is_quiet(replica)) {
            result = Py_BuildValue("Ln", (long long)end_ns, index);
            break;
        }
        if (finish_iteration(replica, NULL) < 0 || begin_iteration(replica, end_ns) < 0)
            break;
    }
    PyMem_Free(replicas);
    return result;
}

/* Replica.cancel(request) */
static PyObject *replica_cancel(Replica *self, PyObject *object)
{
    Request *request = as_request(object);
    if (request == NULL || cancel_request(self, request) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Replica.generated(request) -> int */
static PyObject *replica_generated(Replica *self, PyObject *object)
{
    Request *request = as_request(object);
    return request == NULL ? NULL : PyLong_FromLongLong(count_generated(self, request));
}

/* Replica.reset_cache() */
static PyObject *replica_reset_cache(Replica *self, PyObject *none)
{
    evict_blocks(&self->shared, 0);
    Py_RETURN_NONE;
}

/* Replica.forget(): forget all end times but the last. */
static PyObject *replica_forget(Replica *self, PyObject *none)
{
    TimeArray *end_times = &self->end_times;
    if (end_times->count > 1) {
        end_times->values[0] = end_times->values[end_times->count - 1];
        end_times->count = 1;
    }
    Py_RETURN_NONE;
}

/* Replica.end_of(iteration) -> int */
static PyObject *replica_end_of(Replica *self, PyObject *object)
{
    int64_t iteration;
    if (as_int64(object, &iteration) < 0)
        return NULL;
    if (iteration < 0 || iteration >= self->end_times.count) {
        PyErr_SetString(PyExc_IndexError, "no such iteration");
        return NULL;
    }
    return PyLong_FromLongLong(self->end_times.values[iteration]);
}

static PyObject *replica_started(Replica *self, void *none)
{
    return list_of_requests(&self->started);
}

/* Return the end times as an `array.array("q")`. */
static PyObject *replica_ends(Replica *self, void *none)
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

static PyObject *replica_queued(Replica *self, void *none)
{
    return PyLong_FromSsize_t(self->waiting.count);
}

static PyObject *replica_next_due_ns(Replica *self, void *none)
{
    Request *first = self->waiting.head;
    return PyLong_FromLongLong(first == NULL ? NEVER : first->due_ns);
}

static PyObject *replica_blocks_used(Replica *self, void *none)
{
    return PyLong_FromLongLong(self->private_used + self->shared.pinned_count);
}

static PyMethodDef replica_methods[] = {
    {"admissible", (PyCFunction)replica_admissible, METH_O, NULL},
    {"submit", (PyCFunction)replica_submit, METH_O, NULL},
    {"begin", (PyCFunction)replica_begin, METH_O, NULL},
    {"finish", (PyCFunction)replica_finish, METH_NOARGS, NULL},
    {"next_iteration", replica_next_iteration, METH_VARARGS | METH_STATIC, NULL},
    {"cancel", (PyCFunction)replica_cancel, METH_O, NULL},
    {"generated", (PyCFunction)replica_generated, METH_O, NULL},
    {"reset_cache", (PyCFunction)replica_reset_cache, METH_NOARGS, NULL},
    {"forget", (PyCFunction)replica_forget, METH_NOARGS, NULL},
    {"end_of", (PyCFunction)replica_end_of, METH_O, NULL},
    {NULL},
};

static PyMemberDef replica_members[] = {
    {"active", T_LONGLONG, offsetof(Replica, active), READONLY, NULL},
    {"decoding", T_LONGLONG, offsetof(Replica, decoding), READONLY, NULL},
    {"decoded", T_LONGLONG, offsetof(Replica, decoded), READONLY, NULL},
    {"iteration", T_LONGLONG, offsetof(Replica, iteration), READONLY, NULL},
    {"end_ns", T_LONGLONG, offsetof(Replica, end_ns), READONLY, NULL},
    {"context_requests", T_LONGLONG, offsetof(Replica, context_requests), READONLY, NULL},
    {"context_tokens", T_LONGLONG, offsetof(Replica, context_tokens), READONLY, NULL},
    {"pauses", T_LONGLONG, offsetof(Replica, pauses), READONLY, NULL},
    {"hits", T_LONGLONG, offsetof(Replica, hits), READONLY, NULL},
    {"misses", T_LONGLONG, offsetof(Replica, misses), READONLY, NULL},
    {"paused", T_OBJECT_EX, offsetof(Replica, paused), READONLY, NULL},
    {NULL},
};

static PyGetSetDef replica_values[] = {
    {"started", (getter)replica_started, NULL, NULL, NULL},
    {"ends", (getter)replica_ends, NULL, NULL, NULL},
    {"queued", (getter)replica_queued, NULL, NULL, NULL},
    {"next_due_ns", (getter)replica_next_due_ns, NULL, NULL, NULL},
    {"blocks_used", (getter)replica_blocks_used, NULL, NULL, NULL},
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

PyMODINIT_FUNC PyInit__replica(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    PyObject *request = PyType_FromSpec(&request_spec), *replica = PyType_FromSpec(&replica_spec);
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
