/* `SimRequest` and `Replica` of replica.py in C. replica.py is the reference and documents them; the tests in
   tests/sim/test_compiled_replica.py compare the two. Only the limited API of Python 3.11 is used. The file is compiled
   without contraction of a * b + c, so that durations equal those of Python to the last bit. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define VERSION 3 /* must equal VERSION in implementation.py, which else uses the Python classes */
#define NEVER ((int64_t)1 << 62)
#define OBJECT(of) ((PyObject *)(of))
#define FIELDS 13 /* number of replica.REQUEST_FIELDS */
#define AHEAD 8 /* blocks: so far ahead of the search are their slots fetched */

enum { WAITING, PREFILLING, DECODING, DONE };

typedef struct { /* the hash of a block of a prompt, as the caller names it */
    int64_t value;    /* the number itself, or the hash of the object */
    PyObject *object; /* NULL: a number of 64 bits */
} Key;

typedef struct Request {
    PyObject_HEAD
    PyObject *key;
    Key *keys; /* of the full blocks of its prompt */
    Py_ssize_t keys_count;
    long long due_ns, at, input_tokens, asked, output_tokens, total, left, todo, held, admitted_ns, cached, first,
        from_iteration, last, failure, failed_ns;
    int state;
    int64_t *pinned; /* places in `Replica.blocks` */
    Py_ssize_t pinned_count, pinned_room;
    struct Request *before, *after; /* in the queue or, while it decodes, among the running ones; both own it */
    struct Request *bucket_before, *bucket_after;
} Request;

typedef struct {
    Request *head, *tail;
    Py_ssize_t count;
} Line;

typedef struct {
    Key key;
    int64_t uses;  /* 0: in no prompt now, and in the line of those that may be forgotten */
    int64_t older, newer;
} Block;

typedef struct {
    char *data;
    size_t used, room;
} Bytes;

typedef struct {
    PyObject_HEAD
    double overhead_ns, weights_ns, kv_token_ns, token_ns, attended_ns;
    int64_t max_batch_size, max_num_tokens, kv_blocks, per_block, max_seq_len;
    int chunked_prefill, guaranteed, block_reuse;
    Line waiting, running;
    Request **bucket_heads, **bucket_tails; /* by the iteration of the last token, modulo their number */
    int64_t bucket_mask;
    Request **ready;
    Py_ssize_t ready_count, ready_room;
    Request **started;
    Py_ssize_t started_count, started_room;
    Request *partial;
    PyObject *paused;
    int64_t *phase;
    long long active, decoding, decoded, iteration, end_ns, context_requests, context_tokens, pauses, hits, misses;
    int64_t kv, used_blocks, pinned_blocks, cached_blocks;
    int under_way;
    Bytes ends;
    uint64_t *slots; /* a hash table of the shared blocks: hash << 32 | place in `blocks` + 1, 0 where nothing is */
    int64_t slots_mask;
    Block *blocks;
    int64_t blocks_room, free_block, oldest, newest;
} Replica;

static PyTypeObject *request_type, *replica_type;

static int64_t floor_div(int64_t a, int64_t b)
{
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

static int64_t modulo(int64_t a, int64_t b)
{
    int64_t rest = a % b;
    return rest < 0 ? rest + b : rest;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return -floor_div(-a, b);
}

static int append(Bytes *to, const void *data, size_t size)
{
    if (to->used + size > to->room) {
        size_t room = to->room ? 2 * to->room : 4096;
        while (room < to->used + size)
            room *= 2;
        char *grown = PyMem_Realloc(to->data, room);
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        to->data = grown, to->room = room;
    }
    memcpy(to->data + to->used, data, size);
    to->used += size;
    return 0;
}

static int64_t end_at(Replica *self, int64_t iteration)
{
    int64_t end;
    memcpy(&end, self->ends.data + 8 * iteration, 8);
    return end;
}

/* -- lines and arrays of requests --------------------------------------------------------------------------------- */

static void add_last(Line *line, Request *one)
{
    one->before = line->tail, one->after = NULL;
    *(line->tail ? &line->tail->after : &line->head) = one;
    line->tail = one;
    line->count++;
}

static void add_first(Line *line, Request *one)
{
    one->before = NULL, one->after = line->head;
    *(line->head ? &line->head->before : &line->tail) = one;
    line->head = one;
    line->count++;
}

static void take_out(Line *line, Request *one)
{
    *(one->before ? &one->before->after : &line->head) = one->after;
    *(one->after ? &one->after->before : &line->tail) = one->before;
    one->before = one->after = NULL;
    line->count--;
}

static int push(Request ***array, Py_ssize_t *count, Py_ssize_t *room, Request *one)
{
    if (*count == *room) {
        Py_ssize_t more = *room ? 2 * *room : 16;
        Request **grown = PyMem_Realloc(*array, more * sizeof(Request *));
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        *array = grown, *room = more;
    }
    (*array)[(*count)++] = one;
    return 0;
}

static void add_to_bucket(Replica *self, Request *one)
{
    int64_t place = one->last & self->bucket_mask;
    one->bucket_before = self->bucket_tails[place], one->bucket_after = NULL;
    *(one->bucket_before ? &one->bucket_before->bucket_after : &self->bucket_heads[place]) = one;
    self->bucket_tails[place] = one;
}

static void take_from_bucket(Replica *self, Request *one)
{
    int64_t place = one->last & self->bucket_mask;
    *(one->bucket_before ? &one->bucket_before->bucket_after : &self->bucket_heads[place]) = one->bucket_after;
    *(one->bucket_after ? &one->bucket_after->bucket_before : &self->bucket_tails[place]) = one->bucket_before;
    one->bucket_before = one->bucket_after = NULL;
}

/* -- SimRequest --------------------------------------------------------------------------------------------------- */

static int as_key(PyObject *given, Key *key)
{
    if (PyLong_CheckExact(given)) {
        int overflow;
        key->object = NULL;
        key->value = PyLong_AsLongLongAndOverflow(given, &overflow);
        if (!overflow)
            return key->value == -1 && PyErr_Occurred() ? -1 : 0;
    }
    key->value = PyObject_Hash(given);
    if (key->value == -1)
        return -1;
    key->object = Py_NewRef(given);
    return 0;
}

static int take_keys(Request *self, PyObject *blocks)
{
    Py_ssize_t count = PySequence_Size(blocks);
    if (count <= 0)
        return (int)count;
    self->keys = PyMem_Calloc(count, sizeof(Key));
    if (self->keys == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; self->keys_count < count; self->keys_count++) {
        PyObject *given = PySequence_GetItem(blocks, self->keys_count);
        int failed = given == NULL || as_key(given, &self->keys[self->keys_count]) < 0;
        Py_XDECREF(given);
        if (failed)
            return -1;
    }
    return 0;
}

static Request *new_request(PyObject *key, PyObject *blocks, int64_t due_ns, int64_t input, int64_t output)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(request_type, Py_tp_alloc);
    Request *self = (Request *)alloc(request_type, 0);
    if (self == NULL)
        return NULL;
    self->key = Py_XNewRef(key);
    self->due_ns = due_ns;
    self->input_tokens = self->total = self->left = input;
    self->asked = self->output_tokens = self->todo = output;
    self->admitted_ns = self->cached = self->first = self->from_iteration = self->last = self->failed_ns = -1;
    if (blocks != NULL && take_keys(self, blocks) < 0) {
        Py_DECREF(OBJECT(self));
        return NULL;
    }
    return self;
}

static int as_int64(PyObject *given, int64_t *value)
{
    *value = PyLong_AsLongLong(given);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

/* SimRequest(key, due_ns, input_tokens, output_tokens, blocks=()) */
static PyObject *request_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *key, *due, *input, *output, *blocks = NULL;
    int64_t due_ns, input_tokens, output_tokens;
    if (!PyArg_UnpackTuple(args, "SimRequest", 4, 5, &key, &due, &input, &output, &blocks))
        return NULL;
    if (as_int64(due, &due_ns) < 0 || as_int64(input, &input_tokens) < 0 || as_int64(output, &output_tokens) < 0)
        return NULL;
    return (PyObject *)new_request(key, blocks, due_ns, input_tokens, output_tokens);
}

static int request_traverse(Request *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(OBJECT(self)));
    Py_VISIT(self->key);
    for (Py_ssize_t i = 0; i < self->keys_count; i++)
        Py_VISIT(self->keys[i].object);
    return 0;
}

static int request_clear(Request *self)
{
    Py_CLEAR(self->key);
    while (self->keys_count > 0)
        Py_XDECREF(self->keys[--self->keys_count].object);
    return 0;
}

static void request_dealloc(Request *self)
{
    PyTypeObject *type = Py_TYPE(OBJECT(self));
    PyObject_GC_UnTrack(self);
    request_clear(self);
    PyMem_Free(self->keys);
    PyMem_Free(self->pinned);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(OBJECT(type));
}

static Request *as_request(PyObject *given)
{
    if (!PyObject_TypeCheck(given, request_type)) {
        PyErr_SetString(PyExc_TypeError, "not a SimRequest");
        return NULL;
    }
    return (Request *)given;
}

/* SimRequest.pack(requests, rows): write the fields of requests into an array of int64, in the order of
   replica.REQUEST_FIELDS. */
static PyObject *request_pack(PyObject *none, PyObject *args)
{
    PyObject *requests, *rows;
    Py_buffer view;
    if (!PyArg_UnpackTuple(args, "pack", 2, 2, &requests, &rows))
        return NULL;
    if (PyObject_GetBuffer(rows, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    Py_ssize_t count = PyList_Size(requests);
    int failed = count < 0;
    if (!failed && view.len != count * (Py_ssize_t)sizeof(int64_t) * FIELDS) {
        PyErr_SetString(PyExc_ValueError, "the array does not have the size of the requests");
        failed = 1;
    }
    int64_t *row = view.buf;
    for (Py_ssize_t i = 0; !failed && i < count; i++, row += FIELDS) {
        Request *one = as_request(PyList_GetItem(requests, i));
        int64_t number;
        if (one == NULL || as_int64(one->key, &number) < 0) {
            failed = 1;
            break;
        }
        int64_t fields[FIELDS] = {number,       one->due_ns,       one->at,     one->first,         one->from_iteration,
                                  one->last,    one->input_tokens, one->asked,  one->output_tokens, one->cached,
                                  one->failure, one->failed_ns,    one->admitted_ns};
        memcpy(row, fields, sizeof fields);
    }
    PyBuffer_Release(&view);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef request_methods[] = {{"pack", request_pack, METH_VARARGS | METH_STATIC, NULL}, {NULL}};

static PyMemberDef request_members[] = {
    {"key", T_OBJECT_EX, offsetof(Request, key), 0, NULL},
    {"due_ns", T_LONGLONG, offsetof(Request, due_ns), 0, NULL},
    {"replica_index", T_LONGLONG, offsetof(Request, at), 0, NULL},
    {"input_tokens", T_LONGLONG, offsetof(Request, input_tokens), 0, NULL},
    {"requested_tokens", T_LONGLONG, offsetof(Request, asked), 0, NULL},
    {"output_tokens", T_LONGLONG, offsetof(Request, output_tokens), 0, NULL},
    {"prefill_tokens", T_LONGLONG, offsetof(Request, total), READONLY, NULL},
    {"remaining_tokens", T_LONGLONG, offsetof(Request, todo), 0, NULL},
    {"admitted_ns", T_LONGLONG, offsetof(Request, admitted_ns), 0, NULL},
    {"cached_tokens", T_LONGLONG, offsetof(Request, cached), 0, NULL},
    {"first_iteration", T_LONGLONG, offsetof(Request, first), 0, NULL},
    {"resumed_iteration", T_LONGLONG, offsetof(Request, from_iteration), 0, NULL},
    {"last_iteration", T_LONGLONG, offsetof(Request, last), 0, NULL},
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

/* -- blocks ------------------------------------------------------------------------------------------------------- */

static uint32_t hash_of(int64_t value)
{
    uint64_t mixed = (uint64_t)value * 0x9E3779B97F4A7C15u;
    return (uint32_t)(mixed ^ (mixed >> 29));
}

static int64_t place_in(uint64_t slot)
{
    return (int64_t)(uint32_t)slot - 1;
}

/* A block is looked for soon: its slot is far from those of its neighbours, and rarely in a cache of the processor. */
static void expect(Replica *self, const Key *keys, Py_ssize_t at, Py_ssize_t count)
{
    if (self->slots != NULL && at < count)
        __builtin_prefetch(&self->slots[hash_of(keys[at].value) & self->slots_mask]);
}

/* Whether they are the same block; -1: an exception. */
static int same(const Key *one, const Key *other)
{
    if (one->value != other->value)
        return 0;
    if (one->object == other->object)
        return 1;
    if (one->object == NULL || other->object == NULL)
        return 0;
    return PyObject_RichCompareBool(one->object, other->object, Py_EQ);
}

/* The place of a shared block; -1: nobody has it; -2: an exception. */
static int64_t find_block(Replica *self, const Key *key)
{
    if (self->slots == NULL)
        return -1;
    uint32_t hash = hash_of(key->value);
    for (int64_t slot = hash & self->slots_mask; self->slots[slot]; slot = (slot + 1) & self->slots_mask) {
        if (self->slots[slot] >> 32 != hash)
            continue;
        int64_t place = place_in(self->slots[slot]);
        int found = same(&self->blocks[place].key, key);
        if (found)
            return found < 0 ? -2 : place;
    }
    return -1;
}

static void into_slot(Replica *self, uint64_t entry)
{
    int64_t slot = (int64_t)(entry >> 32) & self->slots_mask;
    while (self->slots[slot])
        slot = (slot + 1) & self->slots_mask;
    self->slots[slot] = entry;
}

/* Twice as many slots. */
static int grow_slots(Replica *self)
{
    int64_t count = self->slots ? 2 * (self->slots_mask + 1) : 512, before = self->slots_mask;
    uint64_t *old = self->slots, *slots = PyMem_Calloc(count, sizeof(uint64_t));
    if (slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->slots = slots, self->slots_mask = count - 1;
    for (int64_t i = 0; old != NULL && i <= before; i++)
        if (old[i])
            into_slot(self, old[i]);
    PyMem_Free(old);
    return 0;
}

static void out_of_slot(Replica *self, int64_t place)
{
    int64_t mask = self->slots_mask, hole = hash_of(self->blocks[place].key.value) & mask;
    while (place_in(self->slots[hole]) != place)
        hole = (hole + 1) & mask;
    for (int64_t slot = (hole + 1) & mask; self->slots[slot]; slot = (slot + 1) & mask) { /* close the gap */
        int64_t home = (int64_t)(self->slots[slot] >> 32) & mask;
        if (((slot - home) & mask) >= ((slot - hole) & mask)) {
            self->slots[hole] = self->slots[slot];
            hole = slot;
        }
    }
    self->slots[hole] = 0;
}

static void leave_line(Replica *self, int64_t place)
{
    Block *block = &self->blocks[place];
    *(block->older >= 0 ? &self->blocks[block->older].newer : &self->oldest) = block->newer;
    *(block->newer >= 0 ? &self->blocks[block->newer].older : &self->newest) = block->older;
    self->cached_blocks--;
}

static void join_line(Replica *self, int64_t place)
{
    Block *block = &self->blocks[place];
    block->older = self->newest, block->newer = -1;
    *(self->newest >= 0 ? &self->blocks[self->newest].newer : &self->oldest) = place;
    self->newest = place;
    self->cached_blocks++;
}

static int64_t add_block(Replica *self, const Key *key)
{
    int64_t place = self->free_block;
    if (place < 0) {
        int64_t room = self->blocks_room ? 2 * self->blocks_room : 256;
        Block *grown = PyMem_Realloc(self->blocks, room * sizeof(Block));
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->blocks = grown;
        for (int64_t i = room - 1; i >= self->blocks_room; i--)
            grown[i] = (Block){.newer = self->free_block}, self->free_block = i;
        self->blocks_room = room;
        place = self->free_block;
    }
    int64_t known = self->pinned_blocks + self->cached_blocks;
    if ((self->slots == NULL || 2 * known > self->slots_mask) && grow_slots(self) < 0)
        return -1;
    self->free_block = self->blocks[place].newer;
    self->blocks[place] = (Block){*key, 1, -1, -1};
    Py_XINCREF(key->object);
    into_slot(self, (uint64_t)hash_of(key->value) << 32 | (uint64_t)(place + 1));
    self->pinned_blocks++;
    return place;
}

static void evict(Replica *self, int64_t capacity)
{
    while (self->cached_blocks > 0 && self->cached_blocks > capacity) {
        int64_t place = self->oldest, next = self->blocks[place].newer;
        if (next >= 0)
            __builtin_prefetch(&self->blocks[next]);
        leave_line(self, place);
        out_of_slot(self, place);
        PyObject *object = self->blocks[place].key.object;
        self->blocks[place].key.object = NULL;
        self->blocks[place].newer = self->free_block;
        self->free_block = place;
        Py_XDECREF(object);
    }
}

static int pin(Request *one, int64_t place)
{
    if (one->pinned_count == one->pinned_room) {
        Py_ssize_t room = one->pinned_room ? 2 * one->pinned_room : 16;
        int64_t *grown = PyMem_Realloc(one->pinned, room * sizeof(int64_t));
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        one->pinned = grown, one->pinned_room = room;
    }
    one->pinned[one->pinned_count++] = place;
    return 0;
}

static int64_t room(Replica *self)
{
    return self->kv_blocks - self->used_blocks - self->pinned_blocks;
}

/* Take the blocks for a waiting request. 0: there are not enough; -1: an exception. */
static int admit(Replica *self, Request *one)
{
    int64_t per = self->per_block, tokens = one->total + (self->guaranteed ? one->todo : 0);
    Py_ssize_t given = one->keys_count;
    int64_t usable = self->block_reuse ? floor_div(one->total - 1, per) : 0;
    if (usable > given)
        usable = given;
    int64_t unpinned = 0;
    one->pinned_count = 0;
    for (int64_t i = 0; i < usable; i++) {
        expect(self, one->keys, i + AHEAD, one->keys_count);
        int64_t place = find_block(self, &one->keys[i]);
        if (place == -2 || (place >= 0 && pin(one, place) < 0))
            return -1;
        if (place < 0)
            break;
        unpinned += self->blocks[place].uses == 0;
    }
    int64_t matched = one->pinned_count, own = ceil_div(tokens, per) - matched;
    if (own + unpinned > room(self)) {
        one->pinned_count = 0;
        return 0;
    }
    for (int64_t i = 0; i < matched; i++) {
        int64_t place = one->pinned[i];
        if (self->blocks[place].uses++ == 0) {
            leave_line(self, place);
            self->pinned_blocks++;
        }
    }
    self->used_blocks += own;
    evict(self, room(self));
    one->held = own;
    one->left = one->total - matched * per;
    if (one->cached < 0) {
        one->cached = matched * per;
        if (self->block_reuse) {
            self->hits += matched;
            self->misses += given - matched;
        }
    }
    one->state = PREFILLING;
    self->active++;
    return 1;
}

static int share_prompt_blocks(Replica *self, Request *one)
{
    int64_t full = one->input_tokens / self->per_block;
    for (Py_ssize_t i = one->pinned_count; i < one->keys_count && i < full; i++) {
        expect(self, one->keys, i + AHEAD, one->keys_count);
        int64_t place = find_block(self, &one->keys[i]);
        if (place != -1)
            return place == -2 ? -1 : 0;
        place = add_block(self, &one->keys[i]);
        if (place < 0 || pin(one, place) < 0)
            return -1;
        one->held--;
        self->used_blocks--;
    }
    return 0;
}

static void release_blocks(Replica *self, Request *one, int64_t own)
{
    self->used_blocks -= own;
    while (one->pinned_count) { /* the end of a prefix first: its beginning is more useful */
        int64_t place = one->pinned[--one->pinned_count];
        if (--self->blocks[place].uses == 0) {
            self->pinned_blocks--;
            join_line(self, place);
        }
    }
    one->held = 0;
}

static int64_t phase_of(Replica *self, Request *one)
{
    return modulo(one->from_iteration + 1 - one->total, self->per_block);
}

/* Remove a decoding sequence before its end. The caller takes over the reference. */
static void remove_decoding(Replica *self, Request *one)
{
    int64_t end = self->iteration - 1 < one->last ? self->iteration - 1 : one->last, steps = end - one->from_iteration;
    take_from_bucket(self, one);
    take_out(&self->running, one);
    self->decoding--;
    self->active--;
    self->kv -= one->total + steps;
    int64_t own = one->held, per = self->per_block;
    if (!self->guaranteed) {
        int64_t phase = phase_of(self, one);
        self->phase[phase]--;
        own += ceil_div(one->total + steps, per) - ceil_div(one->total, per);
        if (self->under_way && self->iteration % per == phase)
            own++; /* cancelled during an iteration for which it had been given a block */
    }
    release_blocks(self, one, own);
}

static int64_t generated_of(Replica *self, Request *one)
{
    int64_t before = one->output_tokens - one->todo;
    if (one->state == DECODING || (one->state == DONE && one->last >= 0)) {
        int64_t end = self->iteration - 1 < one->last ? self->iteration - 1 : one->last;
        int64_t more = end - one->from_iteration + 1;
        return before + (more > 0 ? more : 0);
    }
    return before;
}

/* Pause the sequences admitted last until the others can grow. -1: an exception. */
static int make_room(Replica *self, int64_t phase)
{
    while (self->phase[phase] > room(self)) {
        int64_t first = 0, last = -1;
        Request *one = self->partial;
        if (one != NULL) {
            self->partial = NULL;
            release_blocks(self, one, one->held);
            self->active--;
        } else {
            one = self->running.tail;
            int64_t generated = generated_of(self, one);
            first = one->from_iteration, last = self->iteration - 1;
            remove_decoding(self, one);
            one->total = one->input_tokens + generated;
            one->todo = one->output_tokens - generated;
        }
        one->left = one->total;
        one->state = WAITING;
        add_first(&self->waiting, one);
        self->pauses++;
        PyObject *span = Py_BuildValue("OLL", one, (long long)first, (long long)last);
        int failed = span == NULL || PyList_Append(self->paused, span) < 0;
        Py_XDECREF(span);
        if (failed)
            return -1;
    }
    evict(self, room(self) - self->phase[phase]);
    return 0;
}

/* -- an iteration ------------------------------------------------------------------------------------------------- */

/* 1: an iteration has begun; 0: there is nothing to do; -1: an exception. */
static int begin_at(Replica *self, int64_t now_ns)
{
    if (PyList_Size(self->paused) > 0) {
        PyObject *none = PyList_New(0);
        if (none == NULL)
            return -1;
        Py_DECREF(self->paused);
        self->paused = none;
    }
    int paused = 0;
    if (!self->guaranteed) {
        int64_t phase = self->iteration % self->per_block;
        if (self->phase[phase]) {
            if (self->phase[phase] > room(self)) {
                if (make_room(self, phase) < 0)
                    return -1;
                paused = PyList_Size(self->paused) > 0;
            }
            self->used_blocks += self->phase[phase];
        }
    }
    int64_t decoding = self->decoding, budget = paused ? 0 : self->max_num_tokens - decoding;
    int64_t context_tokens = 0, context_requests = 0, tokens_read = self->kv + decoding;
    double attended = (double)tokens_read;
    while (budget > 0) {
        Request *one = self->partial;
        if (one == NULL) {
            one = self->waiting.head;
            if (one == NULL || self->active >= self->max_batch_size || one->due_ns > now_ns)
                break;
            if (!self->chunked_prefill && one->left > budget)
                break;
            int admitted = admit(self, one);
            if (admitted < 0)
                return -1;
            if (!admitted)
                break;
            take_out(&self->waiting, one);
            if (one->admitted_ns < 0)
                one->admitted_ns = now_ns;
        }
        int64_t left = one->left, chunk = left <= budget ? left : budget, start = one->total - left;
        tokens_read += start + chunk;
        attended += (double)chunk * ((double)start + 0.5 * (double)chunk);
        budget -= chunk;
        context_tokens += chunk;
        context_requests++;
        one->left = left - chunk;
        if (chunk == left) {
            self->partial = NULL;
            if (push(&self->ready, &self->ready_count, &self->ready_room, one) < 0)
                return -1;
        } else {
            self->partial = one;
        }
    }
    if (!decoding && !context_tokens) {
        self->end_ns = NEVER;
        return 0;
    }
    self->context_tokens = context_tokens, self->context_requests = context_requests;
    double memory_ns = self->weights_ns + (double)tokens_read * self->kv_token_ns;
    double compute_ns = (double)(decoding + context_tokens) * self->token_ns + attended * self->attended_ns;
    self->end_ns = now_ns + (int64_t)(self->overhead_ns + (memory_ns > compute_ns ? memory_ns : compute_ns)) + 1;
    self->under_way = 1;
    int64_t end = self->end_ns;
    return append(&self->ends, &end, sizeof end) < 0 ? -1 : 1;
}

/* Append a request that is done to a list, which takes over the replica's reference to it. */
static int move_to_list(Request *one, PyObject *done)
{
    int failed = PyList_Append(done, OBJECT(one));
    Py_DECREF(OBJECT(one));
    return failed;
}

/* End the current iteration and append the requests that are done to a list. -1: an exception. */
static int finish_now(Replica *self, PyObject *done)
{
    int64_t k = self->iteration++, per = self->per_block, place = k & self->bucket_mask;
    self->under_way = 0;
    self->kv += self->decoding;
    self->decoded += self->decoding;
    Request *one = self->bucket_heads[place], *next;
    self->bucket_heads[place] = self->bucket_tails[place] = NULL;
    for (; one != NULL; one = next) {
        next = one->bucket_after;
        one->bucket_before = one->bucket_after = NULL;
        one->state = DONE;
        take_out(&self->running, one);
        int64_t cached = one->total + one->todo - 1; /* the last token's key and value are never computed */
        self->kv -= cached;
        int64_t own = one->held;
        if (!self->guaranteed) {
            self->phase[phase_of(self, one)]--;
            own = ceil_div(cached, per) - one->pinned_count;
        }
        release_blocks(self, one, own);
        self->decoding--;
        self->active--;
        if (move_to_list(one, done) < 0)
            return -1;
    }
    for (Py_ssize_t i = 0; i < self->started_count; i++)
        Py_DECREF(OBJECT(self->started[i]));
    self->started_count = 0;
    for (Py_ssize_t i = 0; i < self->ready_count; i++) {
        one = self->ready[i];
        Py_INCREF(OBJECT(one));
        if (push(&self->started, &self->started_count, &self->started_room, one) < 0)
            return -1;
        if (one->first < 0)
            one->first = k;
        one->from_iteration = k;
        if (self->block_reuse && share_prompt_blocks(self, one) < 0)
            return -1;
        one->last = k + one->todo - 1;
        if (one->todo <= 1) {
            release_blocks(self, one, one->held);
            self->active--;
            one->state = DONE;
            if (move_to_list(one, done) < 0)
                return -1;
            continue;
        }
        one->state = DECODING;
        self->kv += one->total;
        if (!self->guaranteed)
            self->phase[modulo(k + 1 - one->total, per)]++;
        add_last(&self->running, one);
        add_to_bucket(self, one);
        self->decoding++;
    }
    self->ready_count = 0;
    return 0;
}

/* -- the methods of Replica --------------------------------------------------------------------------------------- */

static int number_of(PyObject *from, const char *name, int64_t *whole, double *real)
{
    PyObject *value = PyObject_GetAttrString(from, name);
    if (value == NULL)
        return -1;
    if (real != NULL)
        *real = PyFloat_AsDouble(value);
    else
        *whole = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

static int replica_init(Replica *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"costs", "limits", NULL};
    PyObject *costs, *limits;
    int64_t chunked, guaranteed, reuse;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO", names, &costs, &limits))
        return -1;
    if (self->paused != NULL) {
        PyErr_SetString(PyExc_TypeError, "a replica is made once");
        return -1;
    }
    if (number_of(costs, "overhead_ns", NULL, &self->overhead_ns) || number_of(costs, "weights_ns", NULL, &self->weights_ns) ||
        number_of(costs, "kv_token_ns", NULL, &self->kv_token_ns) || number_of(costs, "token_ns", NULL, &self->token_ns) ||
        number_of(costs, "attended_ns", NULL, &self->attended_ns) ||
        number_of(limits, "max_batch_size", &self->max_batch_size, NULL) ||
        number_of(limits, "max_num_tokens", &self->max_num_tokens, NULL) ||
        number_of(limits, "kv_blocks", &self->kv_blocks, NULL) ||
        number_of(limits, "tokens_per_block", &self->per_block, NULL) ||
        number_of(limits, "max_seq_len", &self->max_seq_len, NULL) ||
        number_of(limits, "chunked_prefill", &chunked, NULL) || number_of(limits, "guaranteed", &guaranteed, NULL) ||
        number_of(limits, "block_reuse", &reuse, NULL))
        return -1;
    self->chunked_prefill = chunked != 0, self->guaranteed = guaranteed != 0, self->block_reuse = reuse != 0;
    if (self->per_block < 1 || self->max_seq_len < 1 || self->max_seq_len > 1 << 28) {
        PyErr_SetString(PyExc_ValueError, "tokens_per_block and max_seq_len must be positive");
        return -1;
    }
    int64_t buckets = 2;
    while (buckets < self->max_seq_len + 2)
        buckets *= 2;
    self->bucket_mask = buckets - 1;
    self->bucket_heads = PyMem_Calloc(buckets, sizeof(Request *));
    self->bucket_tails = PyMem_Calloc(buckets, sizeof(Request *));
    self->phase = PyMem_Calloc(self->per_block, sizeof(int64_t));
    self->free_block = self->oldest = self->newest = -1;
    self->end_ns = NEVER;
    self->paused = PyList_New(0);
    if (!self->bucket_heads || !self->bucket_tails || !self->phase || !self->paused) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static int replica_traverse(Replica *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(OBJECT(self)));
    for (Request *one = self->waiting.head; one != NULL; one = one->after)
        Py_VISIT(one);
    for (Request *one = self->running.head; one != NULL; one = one->after)
        Py_VISIT(one);
    for (Py_ssize_t i = 0; i < self->ready_count; i++)
        Py_VISIT(self->ready[i]);
    for (Py_ssize_t i = 0; i < self->started_count; i++)
        Py_VISIT(self->started[i]);
    Py_VISIT(self->partial);
    Py_VISIT(self->paused);
    for (int64_t i = 0; i < self->blocks_room; i++)
        Py_VISIT(self->blocks[i].key.object);
    return 0;
}

static void drop_line(Line *line)
{
    while (line->head != NULL) {
        Request *one = line->head;
        take_out(line, one);
        Py_DECREF(OBJECT(one));
    }
}

static int replica_clear(Replica *self)
{
    drop_line(&self->waiting);
    drop_line(&self->running);
    while (self->ready_count) {
        Request *one = self->ready[--self->ready_count];
        Py_DECREF(OBJECT(one));
    }
    while (self->started_count) {
        Request *one = self->started[--self->started_count];
        Py_DECREF(OBJECT(one));
    }
    Py_CLEAR(self->partial);
    Py_CLEAR(self->paused);
    for (int64_t i = 0; i < self->blocks_room; i++)
        Py_CLEAR(self->blocks[i].key.object);
    return 0;
}

static void replica_dealloc(Replica *self)
{
    PyTypeObject *type = Py_TYPE(OBJECT(self));
    PyObject_GC_UnTrack(self);
    replica_clear(self);
    PyMem_Free(self->bucket_heads);
    PyMem_Free(self->bucket_tails);
    PyMem_Free(self->phase);
    PyMem_Free(self->ready);
    PyMem_Free(self->started);
    PyMem_Free(self->ends.data);
    PyMem_Free(self->blocks);
    PyMem_Free(self->slots);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(OBJECT(type));
}

static int can_serve(Replica *self, int64_t input)
{
    return input < self->max_seq_len && (self->chunked_prefill || input <= self->max_num_tokens);
}

static PyObject *replica_admissible(Replica *self, PyObject *tokens)
{
    long long input = PyLong_AsLongLong(tokens);
    if (input == -1 && PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(can_serve(self, input));
}

/* Takes over the reference. */
static void submit_one(Replica *self, Request *one)
{
    int64_t longest = self->max_seq_len - one->input_tokens;
    if (one->output_tokens > longest) /* trtllm-serve clamps without an error */
        one->output_tokens = one->todo = longest;
    add_last(&self->waiting, one);
}

static PyObject *replica_submit(Replica *self, PyObject *given)
{
    Request *one = as_request(given);
    if (one == NULL)
        return NULL;
    submit_one(self, (Request *)Py_NewRef(OBJECT(one)));
    Py_RETURN_NONE;
}

static PyObject *replica_begin(Replica *self, PyObject *now)
{
    long long now_ns = PyLong_AsLongLong(now);
    if (now_ns == -1 && PyErr_Occurred())
        return NULL;
    int begun = begin_at(self, now_ns);
    return begun < 0 ? NULL : PyBool_FromLong(begun);
}

static PyObject *replica_finish(Replica *self, PyObject *none)
{
    PyObject *done = PyList_New(0);
    if (done != NULL && finish_now(self, done) < 0)
        Py_CLEAR(done);
    return done;
}

/* End a request, where it is not done. -1 with an exception, for one that was not submitted to this replica. */
static int cancel_one(Replica *self, Request *one)
{
    if (one->state == WAITING) {
        if (one->before == NULL && one != self->waiting.head) {
            PyErr_SetString(PyExc_ValueError, "a request that was not submitted");
            return -1;
        }
        take_out(&self->waiting, one);
    } else if (one->state == DECODING) {
        remove_decoding(self, one);
    } else if (one->state == PREFILLING) {
        if (one == self->partial) {
            self->partial = NULL;
        } else {
            Py_ssize_t i = 0;
            while (i < self->ready_count && self->ready[i] != one)
                i++;
            if (i == self->ready_count) {
                PyErr_SetString(PyExc_ValueError, "a request of another replica");
                return -1;
            }
            memmove(&self->ready[i], &self->ready[i + 1], (self->ready_count - i - 1) * sizeof(Request *));
            self->ready_count--;
        }
        release_blocks(self, one, one->held);
        self->active--;
    } else {
        return 0;
    }
    one->state = DONE;
    Py_DECREF(OBJECT(one));
    return 0;
}

/* Whether the current iteration starts and ends no request, and is followed by one that pauses none. */
static int is_quiet(Replica *self)
{
    if (!self->decoding && self->partial == NULL) /* all were cancelled: the replica becomes idle */
        return 0;
    if (self->ready_count || self->bucket_heads[self->iteration & self->bucket_mask] != NULL)
        return 0;
    return self->guaranteed || self->phase[(self->iteration + 1) % self->per_block] <= room(self);
}

/* Replica.next_iteration(replicas, before_ns) -> (end_ns, index) */
static PyObject *replica_next_iteration(PyObject *none, PyObject *args)
{
    PyObject *list, *before;
    int64_t before_ns;
    if (!PyArg_UnpackTuple(args, "next_iteration", 2, 2, &list, &before) || as_int64(before, &before_ns) < 0)
        return NULL;
    Py_ssize_t count = PyList_Size(list), index = 0;
    if (count < 1) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "no replicas");
        return NULL;
    }
    Replica **replicas = PyMem_Malloc(count * sizeof(Replica *));
    if (replicas == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        replicas[i] = (Replica *)PyList_GetItem(list, i);
        if (!PyObject_TypeCheck(OBJECT(replicas[i]), replica_type)) {
            PyErr_SetString(PyExc_TypeError, "not a Replica");
            PyMem_Free(replicas);
            return NULL;
        }
    }
    int failed = 0;
    while (1) {
        index = 0;
        for (Py_ssize_t i = 1; i < count; i++)
            if (replicas[i]->end_ns < replicas[index]->end_ns)
                index = i;
        Replica *first = replicas[index];
        int64_t end_ns = first->end_ns;
        if (end_ns >= before_ns || !is_quiet(first))
            break;
        failed = finish_now(first, NULL) < 0 || begin_at(first, end_ns) < 0;
        if (failed)
            break;
    }
    PyObject *result = failed ? NULL : Py_BuildValue("Ln", (long long)replicas[index]->end_ns, index);
    PyMem_Free(replicas);
    return result;
}

static PyObject *replica_cancel(Replica *self, PyObject *given)
{
    Request *one = as_request(given);
    if (one == NULL || cancel_one(self, one) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *replica_generated(Replica *self, PyObject *given)
{
    Request *one = as_request(given);
    return one == NULL ? NULL : PyLong_FromLongLong(generated_of(self, one));
}

static PyObject *replica_reset_cache(Replica *self, PyObject *none)
{
    evict(self, 0);
    Py_RETURN_NONE;
}

static PyObject *replica_forget(Replica *self, PyObject *none)
{
    if (self->ends.used > 8) {
        memmove(self->ends.data, self->ends.data + self->ends.used - 8, 8);
        self->ends.used = 8;
    }
    Py_RETURN_NONE;
}

static PyObject *replica_end_of(Replica *self, PyObject *given)
{
    long long iteration = PyLong_AsLongLong(given);
    if (iteration == -1 && PyErr_Occurred())
        return NULL;
    if (iteration < 0 || 8 * (size_t)iteration >= self->ends.used) {
        PyErr_SetString(PyExc_IndexError, "no such iteration");
        return NULL;
    }
    return PyLong_FromLongLong(end_at(self, iteration));
}

static PyObject *list_of(Request **array, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++)
        PyList_SetItem(list, i, Py_NewRef(OBJECT(array[i])));
    return list;
}

static PyObject *replica_started(Replica *self, void *none)
{
    return list_of(self->started, self->started_count);
}

static PyObject *replica_ends(Replica *self, void *none)
{
    PyObject *module = PyImport_ImportModule("array"), *made = NULL;
    const char *data = self->ends.used ? (const char *)self->ends.data : "";
    if (module != NULL)
        made = PyObject_CallMethod(module, "array", "sy#", "q", data, (Py_ssize_t)self->ends.used);
    Py_XDECREF(module);
    return made;
}

static PyObject *replica_queued(Replica *self, void *none)
{
    return PyLong_FromSsize_t(self->waiting.count);
}

static PyObject *replica_next_due_ns(Replica *self, void *none)
{
    return PyLong_FromLongLong(self->waiting.head == NULL ? NEVER : self->waiting.head->due_ns);
}

static PyObject *replica_blocks_used(Replica *self, void *none)
{
    return PyLong_FromLongLong(self->used_blocks + self->pinned_blocks);
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
    {Py_tp_init, replica_init},
    {Py_tp_dealloc, replica_dealloc},
    {Py_tp_traverse, replica_traverse},
    {Py_tp_clear, replica_clear},
    {Py_tp_methods, replica_methods},
    {Py_tp_members, replica_members},
    {Py_tp_getset, replica_values},
    {0, NULL},
};

static PyType_Spec replica_spec = {
    .name = "loadgen.sim.engine._replica.Replica",
    .basicsize = sizeof(Replica),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = replica_slots,
};

/* -- the module --------------------------------------------------------------------------------------------------- */

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
    if (request == NULL || replica == NULL || PyModule_AddObjectRef(module, "SimRequest", request) < 0 ||
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
