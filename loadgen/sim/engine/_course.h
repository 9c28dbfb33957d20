/* A whole course in C: the twin of `Course.step_by_step` in sim/course.py with the `Dispatcher` of core/schedule, which
   say what is done and why; tests/sim/test_compiled_course.py holds them against each other. Part of _replica.c.

   Not here: a load that is steered, and one share of several. Chains and lengths come in blocks of chains, as columns. */

enum { AT_ONCE = 64, SIGNALS = 1 << 12 };                                /* starts returned together; turns between looks for Ctrl-C */
enum { STARTS, SESSION, WAITS, FOLLOWS, FOLLOWERS, PAUSES, LEAVES, AFTER, INPUT, OUTPUT, FIRSTS, COUNTS, BLOCK_COLUMNS };
enum { IN_FLIGHT_CAP, PREFILL_CAP, PREVIOUS, ABANDONED, INTERRUPTED, UNFINISHED, TIMEOUT, RESET, REFUSED, KINDS };
enum { STARTED = -1, UNKNOWN = -1 };

typedef struct { /* of core/schedule/chains.py; the columns of its slots lie in a block */
    int64_t slots, is_session, leaves, after; /* leaves: the turn in whose answer its user goes away, `after` so many tokens */
    const int64_t *waits, *follows, *followers, *pauses;
} Chain;

typedef struct Task { /* `_OpenChain`: a conversation or task that has begun */
    struct Task *before, *after;
    Chain chain;
    int64_t session, pending, *latest_ns;
    int is_over;
    int64_t waits[];
} Task;

typedef struct { /* `Start.number` is not here: `key` is chain * turns + turn */
    int64_t due_ns, key, stage, turn, lane;
    Task *task;
} Waiting;

typedef struct Flight {
    struct Flight *before, *after;
    int64_t number, due_ns, stage, turn, lane, left, input; /* left: sequences that are not done; input: of them all */
    Task *task;                                             /* NULL: a single request */
    int in_prefill;
    Request *one, **all;
    Py_ssize_t count;
} Flight;

typedef struct {
    int64_t start_ns, length_ns, first_chain, chains, lanes, taken_over; /* UNKNOWN where Python says None */
    int64_t ends_ns, chains_left, at_work;
    Column times; /* offsets of an open loop, or when each lane begins */
} Stage;

typedef struct {
    int64_t id;
    Column columns[BLOCK_COLUMNS];
} Drawn;

typedef struct { /* records one after the other, taken from the front */
    Bytes bytes;
    size_t taken;
} Queue;

typedef struct {
    Flight *flight; /* NULL: dropped */
    int64_t number, due_ns, kind;
} Begun;

typedef struct {
    PyObject *draw, *sizes, *route, *look;
    Replica **replicas;
    int64_t *ends, replicas_count, serving, idle;
    Stage *stages;
    int64_t stages_count, current, turns, together, caps[2], kinds[KINDS];
    int64_t timeout_ns, next_due_ns, next_stage_ns, stage_start_ns, next_index, freed_ns;
    int64_t flights_count, prefill_count;
    int is_stopped;
    Flight *first_flight, *last_flight;
    Task *first_task, *last_task;
    Drawn **blocks, *last_block; /* a hash table by number */
    int64_t blocks_mask, blocks_count;
    Bytes heap, done, leaving, lanes_stopped, sent, unsent, stretches;
    Queue held, dropped, lanes, in_flight;
    size_t seen;
} Course;

typedef struct {
    Request *one;
    int64_t tokens;
} Leaver;

typedef struct {
    int64_t stage, lane, due_ns;
} WaitingLane;

#define COUNT(bytes, type) ((bytes).used / sizeof(type))
#define AT(bytes, type, i) (((type *)(bytes).data)[i])

/* -- queues and the heap, as Python's heapq has it: `unsent` shows its order ---------------------------------------- */

static size_t queued(const Queue *queue)
{
    return queue->bytes.used - queue->taken;
}

static int enqueue(Queue *queue, const void *data, size_t size)
{
    if (queue->taken > 4096 && 2 * queue->taken > queue->bytes.used) {
        memmove(queue->bytes.data, queue->bytes.data + queue->taken, queued(queue));
        queue->bytes.used -= queue->taken, queue->taken = 0;
    }
    return append(&queue->bytes, data, size);
}

static void *front(const Queue *queue)
{
    return queue->bytes.data == NULL ? NULL : queue->bytes.data + queue->taken;
}

static int is_sooner(const Waiting *one, const Waiting *other)
{
    return one->due_ns < other->due_ns || (one->due_ns == other->due_ns && one->key < other->key);
}

static void sift_down(Waiting *heap, Py_ssize_t start, Py_ssize_t at)
{
    Waiting item = heap[at];
    while (at > start) {
        Py_ssize_t parent = (at - 1) >> 1;
        if (!is_sooner(&item, &heap[parent]))
            break;
        heap[at] = heap[parent];
        at = parent;
    }
    heap[at] = item;
}

static void sift_up(Waiting *heap, Py_ssize_t count, Py_ssize_t at)
{
    Py_ssize_t start = at, child;
    Waiting item = heap[at];
    while ((child = 2 * at + 1) < count) {
        if (child + 1 < count && !is_sooner(&heap[child], &heap[child + 1]))
            child++;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = item;
    sift_down(heap, start, at);
}

static int heap_push(Course *self, Waiting entry)
{
    if (append(&self->heap, &entry, sizeof entry) < 0)
        return -1;
    sift_down((Waiting *)self->heap.data, 0, COUNT(self->heap, Waiting) - 1);
    return 0;
}

static Waiting heap_pop(Course *self)
{
    Waiting *heap = (Waiting *)self->heap.data, found = heap[0];
    self->heap.used -= sizeof(Waiting);
    Py_ssize_t count = COUNT(self->heap, Waiting);
    if (count) {
        heap[0] = heap[count];
        sift_up(heap, count, 0);
    }
    return found;
}

/* -- what chains and requests are made of --------------------------------------------------------------------------- */

static void release_block(Drawn *block)
{
    for (int i = 0; i < BLOCK_COLUMNS; i++)
        if (block->columns[i].view.obj != NULL)
            PyBuffer_Release(&block->columns[i].view);
    PyMem_Free(block);
}

static int64_t known(const Drawn *block, int column)
{
    return block->columns[column].at == NULL ? -1 : block->columns[column].count;
}

static int fits_together(const Course *self, const Drawn *block)
{
    int64_t chains = self->together, slots = known(block, WAITS), numbers = chains * self->turns;
    if (self->turns > 1 && (known(block, STARTS) != chains + 1 || known(block, SESSION) != chains ||
                            known(block, LEAVES) != chains || known(block, AFTER) != chains ||
                            block->columns[STARTS].at[chains] != slots || known(block, PAUSES) != slots ||
                            known(block, FOLLOWS) != slots + 1 || known(block, FOLLOWERS) < 0))
        return 0;
    return known(block, INPUT) < 0 || (known(block, INPUT) == numbers && known(block, OUTPUT) == numbers &&
                                       known(block, FIRSTS) == known(block, COUNTS) && known(block, FIRSTS) % numbers == 0);
}

static Drawn *drawn_block(Course *self, int64_t id)
{
    Drawn *block = PyMem_Calloc(1, sizeof(Drawn));
    PyObject *made = block == NULL ? PyErr_NoMemory()
                                   : PyObject_CallFunction(self->draw, "LL", (long long)(id * self->together),
                                                           (long long)self->together);
    int failed = made == NULL || !PyTuple_Check(made) || PyTuple_Size(made) != BLOCK_COLUMNS;
    for (int i = 0; !failed && i < BLOCK_COLUMNS; i++) {
        PyObject *given = PyTuple_GetItem(made, i);
        failed = given != Py_None && as_column(given, &block->columns[i]) < 0;
    }
    if (!failed && !fits_together(self, block))
        failed = 1;
    Py_XDECREF(made);
    if (!failed) {
        block->id = id;
        return block;
    }
    if (block != NULL)
        release_block(block);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "columns of different lengths");
    return NULL;
}

static Drawn **slot_of_block(Course *self, int64_t id)
{
    int64_t slot = hash_of(id) & self->blocks_mask;
    while (self->blocks[slot] != NULL && self->blocks[slot]->id != id)
        slot = (slot + 1) & self->blocks_mask;
    return &self->blocks[slot];
}

static Drawn *block_of(Course *self, int64_t chain)
{
    int64_t id = chain / self->together;
    if (self->last_block != NULL && self->last_block->id == id)
        return self->last_block;
    if (2 * self->blocks_count >= self->blocks_mask) {
        int64_t before = self->blocks == NULL ? 0 : self->blocks_mask + 1, count = before ? 2 * before : 64;
        Drawn **old = self->blocks, **grown = PyMem_Calloc(count, sizeof(Drawn *));
        if (grown == NULL)
            return (Drawn *)PyErr_NoMemory();
        self->blocks = grown, self->blocks_mask = count - 1;
        for (int64_t i = 0; i < before; i++)
            if (old[i] != NULL)
                *slot_of_block(self, old[i]->id) = old[i];
        PyMem_Free(old);
    }
    Drawn **slot = slot_of_block(self, id);
    if (*slot == NULL) {
        *slot = drawn_block(self, id);
        self->blocks_count += *slot != NULL;
    }
    self->last_block = *slot;
    return *slot;
}

static int chain_of(Course *self, int64_t chain, Chain *found)
{
    static const int64_t none[2] = {0, 0};
    if (self->turns == 1) {
        *found = (Chain){1, 0, UNKNOWN, 0, none, none, none, none};
        return 0;
    }
    Drawn *block = block_of(self, chain);
    if (block == NULL)
        return -1;
    Column *of = block->columns;
    int64_t i = chain - block->id * self->together, start = of[STARTS].at[i], slots = of[STARTS].at[i + 1] - start;
    if (start < 0 || slots < 1 || slots > self->turns || start + slots > of[WAITS].count) {
        PyErr_SetString(PyExc_ValueError, "a chain of more slots than there are places");
        return -1;
    }
    *found = (Chain){slots, of[SESSION].at[i], of[LEAVES].at[i], of[AFTER].at[i], of[WAITS].at + start,
                     of[FOLLOWS].at + start, of[FOLLOWERS].at, of[PAUSES].at + start};
    return 0;
}

static int64_t number_of_slot(Course *self, int64_t chain, int64_t turn, const Chain *made)
{
    return chain * self->turns + (made->is_session && turn + 1 == made->slots ? self->turns - 1 : turn);
}

static Task *new_task(const Chain *made, int64_t session)
{
    Task *task = PyMem_Calloc(1, sizeof(Task) + 2 * made->slots * sizeof(int64_t));
    if (task == NULL)
        return (Task *)PyErr_NoMemory();
    task->chain = *made;
    task->session = session, task->pending = 1;
    memcpy(task->waits, made->waits, made->slots * sizeof(int64_t));
    task->waits[0] = STARTED;
    task->latest_ns = task->waits + made->slots;
    return task;
}

static void open_task(Course *self, Task *task)
{
    task->before = self->last_task;
    *(task->before ? &task->before->after : &self->first_task) = task;
    self->last_task = task;
}

static void close_task(Course *self, Task *task)
{
    *(task->before ? &task->before->after : &self->first_task) = task->after;
    *(task->after ? &task->after->before : &self->last_task) = task->before;
    PyMem_Free(task);
}

/* -- the dispatcher: its methods, by their names in dispatcher.py --------------------------------------------------- */

static void advance(Course *self)
{
    Stage *span = &self->stages[self->current];
    self->next_index++;
    self->next_due_ns = self->next_index < span->times.count ? self->stage_start_ns + span->times.at[self->next_index] : NEVER;
}

static void end_stage_at(Course *self, int64_t at_ns)
{
    if (self->current + 1 < self->stages_count && at_ns < self->next_stage_ns)
        self->next_stage_ns = at_ns;
}

static int begin_stage(Course *self, int64_t index, int64_t start_ns)
{
    Stage *span = &self->stages[index];
    self->current = index, self->stage_start_ns = start_ns;
    self->next_stage_ns = self->next_due_ns = NEVER;
    span->ends_ns = span->lanes && span->length_ns != UNKNOWN ? start_ns + span->length_ns : NEVER;
    span->chains_left = span->lanes && span->chains != UNKNOWN ? span->chains : 0;
    span->at_work = 0;
    if (span->lanes) {
        int64_t last = span->times.count, places = span->lanes - (int64_t)(queued(&self->lanes) / sizeof(WaitingLane));
        for (int64_t i = 0; i < index; i++)
            places -= self->stages[i].at_work;
        int64_t new = span->taken_over < last ? span->taken_over : last; /* lanes from here on take over from none */
        for (int64_t i = 0; i < last; i++) {
            int64_t lane = i < last - new ? new + i : i - (last - new), due = start_ns + span->times.at[lane];
            if (places > 0) {
                places--;
                span->at_work++;
                if (heap_push(self, (Waiting){due, (span->first_chain + lane) * self->turns, index, 0, lane, NULL}) < 0)
                    return -1;
            } else if (enqueue(&self->lanes, &(WaitingLane){index, lane, due}, sizeof(WaitingLane)) < 0) {
                return -1;
            }
        }
    } else {
        self->next_index = -1;
        advance(self);
    }
    if (span->length_ns != UNKNOWN)
        end_stage_at(self, start_ns + span->length_ns);
    if (span->lanes && span->chains != UNKNOWN && !span->chains_left)
        end_stage_at(self, start_ns);
    return 0;
}

static int leave(Course *self, int64_t stage, int64_t now_ns)
{
    self->stages[stage].at_work--;
    while (queued(&self->lanes) && !self->is_stopped) {
        WaitingLane first = *(WaitingLane *)front(&self->lanes);
        Stage *span = &self->stages[first.stage];
        int64_t due = first.due_ns > now_ns ? first.due_ns : now_ns, at_work = 0;
        if (due < span->ends_ns) {
            for (int64_t i = 0; i <= first.stage; i++)
                at_work += self->stages[i].at_work;
            if (at_work >= span->lanes)
                return 0;
            span->at_work++;
            if (heap_push(self, (Waiting){due, (span->first_chain + first.lane) * self->turns, first.stage, 0, first.lane, NULL}) < 0)
                return -1;
        }
        self->lanes.taken += sizeof(WaitingLane);
    }
    return 0;
}

static int64_t kept_of_others(Course *self, Waiting *entries, int64_t count, int64_t chain, int64_t *is_due)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        if (entries[i].key / self->turns == chain)
            is_due[entries[i].turn] = 1;
        else
            entries[kept++] = entries[i];
    }
    return kept;
}

static int drop_rest(Course *self, Task *task, int64_t now_ns, int64_t why)
{
    int64_t slots = task->chain.slots, *is_due = task->latest_ns; /* nothing of it starts any more */
    memset(is_due, 0, slots * sizeof(int64_t));
    if (task->pending) {
        int64_t before = COUNT(self->heap, Waiting), held = queued(&self->held) / sizeof(Waiting);
        int64_t kept = kept_of_others(self, (Waiting *)self->heap.data, before, task->session, is_due);
        int64_t kept_held = kept_of_others(self, front(&self->held), held, task->session, is_due);
        if (kept + kept_held < before + held) { /* of a branch beside the one that failed */
            self->heap.used = kept * sizeof(Waiting);
            for (int64_t i = kept / 2 - 1; i >= 0; i--)
                sift_up((Waiting *)self->heap.data, kept, i);
            self->held.bytes.used = self->held.taken + kept_held * sizeof(Waiting);
            task->pending -= before + held - kept - kept_held;
        }
    }
    for (int64_t turn = 0; turn < slots; turn++) {
        if (task->waits[turn] == STARTED && !is_due[turn])
            continue;
        task->waits[turn] = STARTED;
        Begun dropped = {NULL, number_of_slot(self, task->session, turn, &task->chain), now_ns, why};
        if (enqueue(&self->dropped, &dropped, sizeof dropped) < 0)
            return -1;
    }
    return 0;
}

static int end_held(Course *self, const Waiting *entry, int64_t now_ns)
{
    Task *task = entry->task;
    if (task != NULL) {
        task->is_over = 1;
        if (--task->pending)
            return 0;
        close_task(self, task);
    }
    return leave(self, entry->stage, now_ns);
}

static int end_at_cap(Course *self, const Waiting *entry, const Chain *made, int64_t due_ns)
{
    Task *task = entry->task;
    if (task == NULL) {
        task = new_task(made, entry->key / self->turns);
        if (task == NULL)
            return -1;
        task->pending = 0;
        int failed = drop_rest(self, task, due_ns, PREVIOUS);
        PyMem_Free(task);
        return failed;
    }
    task->pending--;
    task->is_over = 1;
    if (drop_rest(self, task, due_ns, PREVIOUS) < 0)
        return -1;
    if (task->pending)
        return 0;
    close_task(self, task);
    return leave(self, entry->stage, due_ns);
}

static int is_capped(const Course *self)
{
    return self->flights_count >= self->caps[0] || self->prefill_count >= self->caps[1];
}

static int has_place_for_held(const Course *self)
{
    return queued(&self->held) && self->prefill_count < self->caps[1];
}

/* NEVER where Python says None. */
static int64_t next_ns(const Course *self)
{
    if (self->is_stopped)
        return NEVER;
    if (queued(&self->dropped))
        return ((Begun *)front(&self->dropped))->due_ns;
    if (has_place_for_held(self))
        return self->freed_ns;
    int64_t due = self->next_due_ns < self->next_stage_ns ? self->next_due_ns : self->next_stage_ns;
    return self->heap.used && AT(self->heap, Waiting, 0).due_ns < due ? AT(self->heap, Waiting, 0).due_ns : due;
}

/* A slot is due: what `ready` returns of it. */
static int start_slot(Course *self, Waiting *entry, int64_t due_ns, Begun *begun)
{
    Chain made;
    int64_t chain = entry->key / self->turns;
    if (entry->task != NULL)
        made = entry->task->chain;
    else if (chain_of(self, chain, &made) < 0)
        return -1;
    *begun = (Begun){NULL, number_of_slot(self, chain, entry->turn, &made), due_ns, 0};
    if (entry->lane < 0 && is_capped(self)) {
        begun->kind = self->flights_count >= self->caps[0] ? IN_FLIGHT_CAP : PREFILL_CAP;
        return made.is_session ? end_at_cap(self, entry, &made, due_ns) : 0;
    }
    Flight *flight = PyMem_Calloc(1, sizeof(Flight));
    if (flight == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *flight = (Flight){.before = self->last_flight, .number = begun->number, .due_ns = due_ns, .stage = entry->stage,
                       .turn = entry->turn, .lane = entry->lane, .task = entry->task};
    *(flight->before ? &flight->before->after : &self->first_flight) = flight;
    self->last_flight = begun->flight = flight;
    self->flights_count++;
    if (self->caps[1] < NEVER) {
        flight->in_prefill = 1;
        self->prefill_count++;
    }
    if (made.is_session && entry->task == NULL) {
        flight->task = new_task(&made, chain);
        if (flight->task == NULL)
            return -1;
        open_task(self, flight->task);
    }
    return 0;
}

/* The number of slots in `out`; -1: an exception. */
static int ready(Course *self, int64_t now_ns, Begun *out)
{
    int count = 0;
    while (!self->is_stopped && count < AT_ONCE) {
        if (queued(&self->dropped)) {
            out[count++] = *(Begun *)front(&self->dropped);
            self->dropped.taken += sizeof(Begun);
            continue;
        }
        int64_t due = self->next_due_ns, heap_due = self->heap.used ? AT(self->heap, Waiting, 0).due_ns : NEVER;
        Waiting entry;
        if (has_place_for_held(self)) {
            entry = *(Waiting *)front(&self->held);
            self->held.taken += sizeof(Waiting);
            due = entry.due_ns > self->freed_ns ? entry.due_ns : self->freed_ns;
            if (due >= self->stages[entry.stage].ends_ns) {
                if (end_held(self, &entry, due) < 0)
                    return -1;
                continue;
            }
        } else if (self->next_stage_ns <= now_ns && self->next_stage_ns < due && self->next_stage_ns <= heap_due) {
            if (begin_stage(self, self->current + 1, self->next_stage_ns) < 0)
                return -1;
            continue;
        } else if (due <= heap_due) {
            if (due > now_ns)
                break;
            Stage *span = &self->stages[self->current];
            entry = (Waiting){due, (span->first_chain + self->next_index) * self->turns, self->current, 0, -1, NULL};
            advance(self);
            if (!is_capped(self))
                span->at_work++;
        } else {
            if (heap_due > now_ns)
                break;
            entry = heap_pop(self);
            due = entry.due_ns;
            if (entry.lane >= 0 && self->prefill_count >= self->caps[1]) {
                if (enqueue(&self->held, &entry, sizeof entry) < 0)
                    return -1;
                continue;
            }
        }
        if (start_slot(self, &entry, due, &out[count]) < 0)
            return -1;
        count++;
    }
    return count;
}

static void first_output(Course *self, Flight *flight, int64_t now_ns)
{
    if (flight != NULL && flight->in_prefill) {
        flight->in_prefill = 0;
        self->prefill_count--;
        self->freed_ns = now_ns;
    }
}

/* 1: the conversation or task goes on, or its lane has left; 0: it was the last slot. */
static int goes_on(Course *self, const Flight *flight, int64_t now_ns, int ok, int64_t why)
{
    Task *task = flight->task;
    int64_t end = self->stages[flight->stage].ends_ns;
    int is_cut = 0;
    task->pending--;
    if (ok && !task->is_over) {
        const Chain *chain = &task->chain;
        for (int64_t i = chain->follows[flight->turn]; i < chain->follows[flight->turn + 1]; i++) {
            int64_t turn = chain->followers[i], latest_ns = now_ns;
            if (turn < 1 || turn >= chain->slots) {
                PyErr_SetString(PyExc_ValueError, "a chain has no such slot");
                return -1;
            }
            task->waits[turn]--;
            if (chain->waits[turn] > 1) {
                if (task->latest_ns[turn] > latest_ns)
                    latest_ns = task->latest_ns[turn];
                task->latest_ns[turn] = latest_ns;
            }
            int64_t due = latest_ns + chain->pauses[turn];
            if (task->waits[turn] == 0 && due < end) {
                task->waits[turn] = STARTED;
                task->pending++;
                if (heap_push(self, (Waiting){due, task->session * self->turns + turn, flight->stage, turn, flight->lane, task}) < 0)
                    return -1;
            } else if (task->waits[turn] == 0) {
                is_cut = task->is_over = 1;
            }
        }
    } else if (!ok && !task->is_over) {
        task->is_over = 1;
        if (now_ns < end && drop_rest(self, task, now_ns, why) < 0)
            return -1;
    }
    if (task->pending)
        return 1;
    close_task(self, task);
    if (is_cut && leave(self, flight->stage, now_ns) < 0)
        return -1;
    return is_cut;
}

static int has_ended(Course *self, const Flight *flight, int64_t now_ns, int ok, int64_t why)
{
    if (self->is_stopped)
        return 0;
    int64_t stage = flight->stage;
    if (flight->task != NULL) {
        int on = goes_on(self, flight, now_ns, ok, why);
        if (on)
            return on < 0 ? -1 : 0;
    }
    if (flight->lane < 0)
        return leave(self, stage, now_ns);
    Stage *span = &self->stages[stage];
    int64_t chain = flight->number / self->turns + span->lanes;
    int next = now_ns < span->ends_ns && (span->chains == UNKNOWN || chain < span->first_chain + span->chains);
    if (next && heap_push(self, (Waiting){now_ns, chain * self->turns, stage, 0, flight->lane, NULL}) < 0)
        return -1;
    if (span->chains != UNKNOWN) {
        span->chains_left--;
        int hands_over = stage + 1 < self->stages_count && self->stages[stage + 1].lanes > 0;
        if (stage == self->current && (!span->chains_left || (!next && hands_over)))
            end_stage_at(self, now_ns);
    }
    return next ? 0 : leave(self, stage, now_ns);
}

static void forget_flight(Course *self, Flight *flight)
{
    *(flight->before ? &flight->before->after : &self->first_flight) = flight->after;
    *(flight->after ? &flight->after->before : &self->last_flight) = flight->before;
    self->flights_count--;
    for (Py_ssize_t i = 0; i < flight->count; i++) {
        flight->all[i]->flight = NULL;
        Py_DECREF(OBJECT(flight->all[i]));
    }
    if (flight->all != &flight->one)
        PyMem_Free(flight->all);
    PyMem_Free(flight);
}

static int finished(Course *self, Flight *flight, int64_t now_ns, int ok, int64_t why)
{
    first_output(self, flight, now_ns);
    Flight ended = *flight;
    forget_flight(self, flight);
    return has_ended(self, &ended, now_ns, ok, why);
}

static int stop(Course *self)
{
    if (self->is_stopped)
        return 0;
    self->is_stopped = 1;
    for (Flight *one = self->first_flight; one != NULL; one = one->after) {
        int64_t lane[3] = {one->stage, one->lane, one->number / self->turns};
        if (one->lane >= 0 && one->task == NULL && append(&self->lanes_stopped, lane, sizeof lane) < 0)
            return -1;
    }
    return 0;
}

/* -- what was never sent: `Dispatcher.unsent` ----------------------------------------------------------------------- */

static int log_unsent(Course *self, int64_t number, int64_t due_ns, int64_t kind)
{
    int64_t row[3] = {number, due_ns, self->kinds[kind]};
    return append(&self->unsent, row, sizeof row);
}

static int sends_all(const Stage *span)
{
    return span->length_ns == UNKNOWN && span->chains != UNKNOWN;
}

static int unsent_chain(Course *self, int64_t chain, int64_t due_ns, int64_t cut)
{
    Chain made;
    if (chain_of(self, chain, &made) < 0)
        return -1;
    for (int64_t turn = 0; turn < made.slots; turn++)
        if (log_unsent(self, number_of_slot(self, chain, turn, &made), turn ? UNKNOWN : due_ns, cut) < 0)
            return -1;
    return 0;
}

static int unsent_of_lane(Course *self, const Stage *span, int64_t first_chain, int64_t due_ns, int64_t cut)
{
    for (int64_t chain = first_chain; sends_all(span) && chain < span->first_chain + span->chains; chain += span->lanes) {
        if (unsent_chain(self, chain, due_ns, cut) < 0)
            return -1;
        due_ns = UNKNOWN;
    }
    return 0;
}

static int unsent_of_stage(Course *self, const Stage *span, int64_t start_ns, Py_ssize_t first, int64_t cut)
{
    for (Py_ssize_t i = first; i < span->times.count; i++)
        if (unsent_chain(self, span->first_chain + i, start_ns == UNKNOWN ? UNKNOWN : start_ns + span->times.at[i], cut) < 0)
            return -1;
    return 0;
}

static int unsent_waiting(Course *self, const Waiting *entries, size_t count, int64_t cut)
{
    for (size_t i = 0; i < count; i++) {
        const Waiting *one = &entries[i];
        Stage *span = &self->stages[one->stage];
        int64_t chain = one->key / self->turns;
        int failed = 0;
        if (one->turn == 0)
            failed = unsent_of_lane(self, span, chain, one->due_ns, cut);
        else if (one->lane < 0 || sends_all(span))
            failed = log_unsent(self, number_of_slot(self, chain, one->turn, &one->task->chain), one->due_ns, cut);
        if (failed)
            return -1;
    }
    return 0;
}

static int unsent_of_tasks(Course *self, int64_t cut)
{
    for (Task *task = self->first_task; task != NULL; task = task->after) {
        int64_t index = self->stages_count - 1;
        while (index > 0 && self->stages[index].first_chain > task->session)
            index--;
        Stage *span = &self->stages[index];
        for (int64_t turn = 0; (!span->lanes || sends_all(span)) && turn < task->chain.slots; turn++)
            if (task->waits[turn] != STARTED &&
                log_unsent(self, number_of_slot(self, task->session, turn, &task->chain), UNKNOWN, cut) < 0)
                return -1;
        if (span->lanes && unsent_of_lane(self, span, task->session + span->lanes, UNKNOWN, cut) < 0)
            return -1;
    }
    return 0;
}

static int unsent(Course *self, int64_t cut)
{
    for (; queued(&self->dropped); self->dropped.taken += sizeof(Begun)) {
        Begun *one = front(&self->dropped);
        if (log_unsent(self, one->number, one->due_ns, one->kind) < 0)
            return -1;
    }
    if (unsent_waiting(self, (Waiting *)self->heap.data, COUNT(self->heap, Waiting), cut) < 0 ||
        unsent_waiting(self, front(&self->held), queued(&self->held) / sizeof(Waiting), cut) < 0 ||
        unsent_of_tasks(self, cut) < 0)
        return -1;
    for (size_t i = 0; i < self->lanes_stopped.used / 24; i++) {
        int64_t *lane = &AT(self->lanes_stopped, int64_t, 3 * i);
        Stage *span = &self->stages[lane[0]];
        if (unsent_of_lane(self, span, lane[2] + span->lanes, UNKNOWN, cut) < 0)
            return -1;
    }
    for (; queued(&self->lanes); self->lanes.taken += sizeof(WaitingLane)) {
        WaitingLane *one = front(&self->lanes);
        Stage *span = &self->stages[one->stage];
        if (unsent_of_lane(self, span, span->first_chain + one->lane, UNKNOWN, cut) < 0)
            return -1;
    }
    if (self->next_due_ns != NEVER &&
        unsent_of_stage(self, &self->stages[self->current], self->stage_start_ns, self->next_index, cut) < 0)
        return -1;
    for (int64_t i = self->current + 1; i < self->stages_count; i++) {
        Stage *span = &self->stages[i];
        if (!span->lanes && unsent_of_stage(self, span, span->start_ns, 0, cut) < 0)
            return -1;
        for (int64_t lane = 0; lane < span->lanes; lane++)
            if (unsent_of_lane(self, span, span->first_chain + lane, UNKNOWN, cut) < 0)
                return -1;
    }
    return 0;
}

/* -- the requests --------------------------------------------------------------------------------------------------- */

static int log_sent(Course *self, Request *one, int64_t start, int64_t last, int64_t got, int64_t kind, int64_t end_ns)
{
    int64_t row[COLUMNS] = {one->number, one->due_ns, one->at,     one->first, start,  last,            one->input_tokens,
                            one->asked,  got,         one->cached, kind,       end_ns, one->admitted_ns};
    return append(&self->sent, row, sizeof row);
}

static int give_up(Course *self, Request *one, int64_t now_ns, int64_t kind)
{
    Replica *replica = self->replicas[one->at];
    Flight *flight = one->flight;
    int64_t got = generated_of(replica, one), start = one->from_iteration, last = -1;
    if (cancel_one(replica, one) < 0)
        return -1;
    if (!one->asked) {
        for (Py_ssize_t i = 0; i < flight->count; i++)
            if (cancel_one(replica, flight->all[i]) < 0)
                return -1;
        one->input_tokens = flight->input;
    }
    if (start >= 0) /* the last stretch of a paused request is recorded already */
        last = start + got - (one->output_tokens - one->todo) - 1;
    if (log_sent(self, one, last < start ? -1 : start, last, got, self->kinds[kind], now_ns) < 0)
        return -1;
    return finished(self, flight, now_ns, 0, kind == ABANDONED ? ABANDONED : PREVIOUS);
}

typedef struct {
    int64_t input, output;
    PyObject *made, *blocks; /* of `sizes`; NULL: from a block */
    const int64_t *firsts, *counts;
    Py_ssize_t ranges;
} Lengths;

static int lengths_of(Course *self, int64_t number, Lengths *found)
{
    Drawn *block = block_of(self, number / self->turns);
    if (block == NULL)
        return -1;
    *found = (Lengths){0};
    int64_t numbers = self->together * self->turns, i = number - block->id * numbers;
    if (known(block, INPUT) >= 0) {
        found->input = block->columns[INPUT].at[i], found->output = block->columns[OUTPUT].at[i];
        found->ranges = block->columns[FIRSTS].count / numbers;
        found->firsts = block->columns[FIRSTS].at + i * found->ranges;
        found->counts = block->columns[COUNTS].at + i * found->ranges;
        return 0;
    }
    found->made = PyObject_CallFunction(self->sizes, "L", (long long)number);
    long long input, output;
    if (found->made == NULL || !PyArg_ParseTuple(found->made, "LLO", &input, &output, &found->blocks)) {
        Py_CLEAR(found->made);
        return -1;
    }
    found->input = input, found->output = output;
    return 0;
}

static int take_ranges(Request *one, const Lengths *of)
{
    Py_ssize_t count = 0, place = 0;
    for (Py_ssize_t i = 0; i < of->ranges; i++)
        count += of->counts[i] > 0 ? of->counts[i] : 0;
    if (!count)
        return 0;
    one->keys = PyMem_Malloc(count * sizeof(Key));
    if (one->keys == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < of->ranges; i++)
        for (int64_t j = 0; j < of->counts[i]; j++)
            one->keys[place++] = (Key){of->firsts[i] + j, NULL};
    one->keys_count = count;
    return 0;
}

static int send(Course *self, Flight *flight, int64_t at, int64_t input, int64_t output, const Lengths *of)
{
    Request *one = new_request(Py_None, output ? of->blocks : NULL, flight->due_ns, input, output);
    if (one == NULL)
        return -1;
    if (output && take_ranges(one, of) < 0) {
        Py_DECREF(OBJECT(one));
        return -1;
    }
    one->number = flight->number, one->at = at;
    one->flight = flight;
    flight->all[flight->count++] = (Request *)Py_NewRef(OBJECT(one));
    submit_one(self->replicas[at], (Request *)Py_NewRef(OBJECT(one)));
    if (enqueue(&self->in_flight, &one, sizeof one) < 0) {
        Py_DECREF(OBJECT(one));
        return -1;
    }
    return 0;
}

static int64_t routed(Course *self)
{
    long long at;
    do {
        PyObject *given = PyObject_CallNoArgs(self->route);
        at = given == NULL ? -1 : PyLong_AsLongLong(given);
        Py_XDECREF(given);
        if (at < 0 || at >= self->replicas_count) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "there is no such replica");
            return -1;
        }
    } while (at >= self->serving);
    return at;
}

/* The sequences of a request for values are given as their lengths. 0: not all can be served. */
static int send_all(Course *self, Flight *flight, int64_t at, Lengths *of)
{
    Replica *replica = self->replicas[at];
    if (of->output > 0) {
        if (!can_serve(replica, of->input))
            return 0;
        return send(self, flight, at, of->input, of->output, of) < 0 ? -1 : 1;
    }
    Py_ssize_t count = of->blocks == NULL ? 0 : PySequence_Size(of->blocks);
    if (count < 0)
        return -1;
    for (int sends = 0; sends < 2; sends++) {
        if (sends && count > 1) {
            flight->all = PyMem_Calloc(count, sizeof(Request *));
            if (flight->all == NULL) {
                flight->all = &flight->one;
                PyErr_NoMemory();
                return -1;
            }
        }
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject *given = PySequence_GetItem(of->blocks, i);
            long long input = given == NULL ? -1 : PyLong_AsLongLong(given);
            Py_XDECREF(given);
            if (PyErr_Occurred())
                return -1;
            if (!sends && !can_serve(replica, input))
                return 0;
            if (sends && send(self, flight, at, input, 0, of) < 0)
                return -1;
        }
    }
    flight->left = count, flight->input = of->input;
    return 1;
}

/* `Course._start` of one slot. */
static int start_flight(Course *self, Flight *flight)
{
    Lengths of;
    int64_t due_ns = flight->due_ns, at;
    flight->all = &flight->one;
    if (lengths_of(self, flight->number, &of) < 0)
        return -1;
    int sent = (at = routed(self)) < 0 ? -1 : send_all(self, flight, at, &of);
    Py_XDECREF(of.made);
    if (sent < 0)
        return -1;
    if (!sent) {
        int64_t row[COLUMNS] = {flight->number, due_ns, at, -1, -1, -1, of.input, of.output, 0, -1, self->kinds[REFUSED], due_ns, -1};
        return append(&self->sent, row, sizeof row) < 0 ? -1 : finished(self, flight, due_ns, 0, PREVIOUS);
    }
    if (flight->task != NULL && flight->task->chain.leaves == flight->turn && flight->count) {
        Request *last = flight->all[flight->count - 1];
        if (append(&self->leaving, &(Leaver){last, flight->task->chain.after}, sizeof(Leaver)) < 0)
            return -1;
        Py_INCREF(OBJECT(last));
    }
    Replica *replica = self->replicas[at];
    if (replica->end_ns != NEVER)
        return 0;
    int begun = begin_at(replica, due_ns);
    if (begun <= 0)
        return begun;
    self->ends[at] = replica->end_ns;
    self->idle--;
    return 0;
}

static int start_until(Course *self, int64_t until_ns)
{
    Begun begun[AT_ONCE];
    int count = ready(self, until_ns, begun);
    for (int i = 0; i < count; i++)
        if ((begun[i].flight == NULL ? log_unsent(self, begun[i].number, begun[i].due_ns, begun[i].kind)
                                     : start_flight(self, begun[i].flight)) < 0)
            return -1;
    return count < 0 ? -1 : 0;
}

/* `Course._let_go`. */
static int let_go(Course *self, int64_t index, int64_t now_ns)
{
    Leaver *leaving = (Leaver *)self->leaving.data;
    size_t kept = 0, count = COUNT(self->leaving, Leaver);
    for (size_t i = 0; i < count; i++) {
        if (leaving[i].one->state != DONE)
            leaving[kept++] = leaving[i];
        else
            Py_DECREF(OBJECT(leaving[i].one));
    }
    self->leaving.used = kept * sizeof(Leaver);
    for (size_t i = 0; i < kept; i++) {
        Request *one = leaving[i].one;
        if (one->at != index || one->state == DONE || generated_of(self->replicas[index], one) < leaving[i].tokens)
            continue;
        int64_t number = one->number;
        if (give_up(self, one, now_ns, ABANDONED) < 0)
            return -1;
        Request **in_flight = front(&self->in_flight);
        for (size_t j = 0; j < queued(&self->in_flight) / sizeof(Request *); j++) {
            Request *other = in_flight[j];
            if (other->state != DONE && other->number != number && other->number / self->turns == number / self->turns &&
                give_up(self, other, now_ns, ABANDONED) < 0)
                return -1;
        }
    }
    return 0;
}

static int give_up_first(Course *self, int64_t now_ns)
{
    Request *late = *(Request **)front(&self->in_flight);
    self->in_flight.taken += sizeof late;
    int failed = late->state == DONE ? 0 : give_up(self, late, now_ns, TIMEOUT);
    Py_DECREF(OBJECT(late));
    return failed;
}

static int give_up_all(Course *self, int64_t now_ns, int64_t kind, int64_t from_replica)
{
    Request **in_flight = front(&self->in_flight);
    for (size_t i = 0; i < queued(&self->in_flight) / sizeof(Request *); i++)
        if (in_flight[i]->state != DONE && in_flight[i]->at >= from_replica && give_up(self, in_flight[i], now_ns, kind) < 0)
            return -1;
    return 0;
}

static int into_course(Replica *self, Request *one, void *done)
{
    return append(done, &one, sizeof one);
}

/* The iteration of this replica has ended. */
static int step(Course *self, int64_t index)
{
    Replica *replica = self->replicas[index];
    int64_t end = replica->end_ns;
    self->done.used = 0;
    int failed = finish_now(replica, into_course, &self->done) < 0;
    for (Py_ssize_t i = 0; self->caps[1] < NEVER && i < replica->started_count; i++)
        first_output(self, replica->started[i]->flight, end);
    for (size_t i = 0; i < COUNT(self->done, Request *); i++) {
        Request *one = AT(self->done, Request *, i);
        Flight *flight = one->flight;
        int is_last = !failed && (one->asked || --flight->left == 0);
        if (is_last && !one->asked)
            one->input_tokens = flight->input;
        if (is_last && (log_sent(self, one, one->from_iteration, one->last, one->output_tokens, 0, -1) < 0 ||
                        finished(self, flight, end, 1, PREVIOUS) < 0))
            failed = 1;
        Py_DECREF(OBJECT(one));
    }
    if (failed || (self->leaving.used && let_go(self, index, end) < 0))
        return -1;
    while (queued(&self->in_flight)) {
        Request *first = *(Request **)front(&self->in_flight);
        if (first->state != DONE && first->due_ns + self->timeout_ns > end)
            break;
        if (give_up_first(self, end) < 0)
            return -1;
    }
    int begun = begin_at(replica, end);
    self->ends[index] = begun > 0 ? replica->end_ns : NEVER;
    self->idle += begun == 0;
    return begun < 0 ? -1 : 0;
}

/* -- the loop ------------------------------------------------------------------------------------------------------- */

/* Whether `look` says that all is decided; it is shown the rows since the last one, and when each had its first and its
   last token. -1: an exception. */
static int look_at(Course *self, int64_t now_ns)
{
    Bytes news = {0};
    int failed = 0;
    for (; !failed && self->seen < self->sent.used; self->seen += COLUMNS * 8) {
        const int64_t *row = &AT(self->sent, int64_t, self->seen / 8);
        Replica *replica = self->replicas[row[2]];
        int64_t instants[2] = {row[3] < 0 ? -1 : end_at(replica, row[3]), row[5] < 0 ? -1 : end_at(replica, row[5])};
        failed = append(&news, row, COLUMNS * 8) < 0 || append(&news, instants, sizeof instants) < 0;
    }
    PyObject *said = failed ? NULL
                            : PyObject_CallFunction(self->look, "Ly#", (long long)now_ns, news.used ? news.data : "",
                                                    (Py_ssize_t)news.used);
    int decided = said == NULL ? -1 : PyObject_IsTrue(said);
    Py_XDECREF(said);
    PyMem_Free(news.data);
    return decided;
}

static int64_t least(int64_t one, int64_t other)
{
    return one < other ? one : other;
}

typedef struct {
    long long end_of_run_ns, stop_ns, after_stop_ns, every_ns;
    Column changes; /* pairs: from when on so many replicas serve */
    int is_decided;
} Span;

static int run_course(Course *self, Span *span)
{
    int64_t look_ns = span->every_ns ? span->every_ns : NEVER, cut = UNFINISHED, turn = 0;
    Py_ssize_t changed = 0;
    while (1) {
        if (++turn % SIGNALS == 0 && PyErr_CheckSignals() < 0)
            return -1;
        int64_t due = next_ns(self), index = 0;
        for (int64_t i = 1; i < self->replicas_count; i++)
            if (self->ends[i] < self->ends[index])
                index = i;
        int64_t end = self->ends[index], change_ns = 2 * changed < span->changes.count ? span->changes.at[2 * changed] : NEVER;
        int64_t next = least(least(due, end), least(look_ns, least(span->stop_ns, span->end_of_run_ns)));
        if (change_ns < NEVER && change_ns <= next) {
            int64_t before = self->serving;
            self->serving = span->changes.at[2 * changed++ + 1];
            for (int64_t i = before; i < self->serving; i++)
                evict(self->replicas[i], 0);
            if (give_up_all(self, change_ns, RESET, self->serving) < 0)
                return -1;
            continue;
        }
        if (look_ns < end && look_ns < span->stop_ns && due > look_ns) {
            int decided = end >= NEVER && due == NEVER ? 0 : look_at(self, look_ns);
            if (decided < 0)
                return -1;
            if (decided)
                span->is_decided = 1, span->stop_ns = look_ns;
            look_ns = decided || (end >= NEVER && due == NEVER) ? NEVER : look_ns + span->every_ns;
            continue;
        }
        if (end > span->stop_ns && due > span->stop_ns) {
            if (stop(self) < 0)
                return -1;
            span->end_of_run_ns = least(span->end_of_run_ns, span->stop_ns + span->after_stop_ns);
            due = span->stop_ns = NEVER;
            cut = INTERRUPTED;
        }
        if (due < NEVER && due <= end && due <= span->end_of_run_ns) {
            int64_t until = least(least(end, change_ns), least(look_ns, least(span->stop_ns, span->end_of_run_ns)));
            if (start_until(self, self->idle ? due : until) < 0)
                return -1;
            continue;
        }
        if (end >= NEVER || end > span->end_of_run_ns)
            break;
        if (step(self, index) < 0)
            return -1;
    }
    if (span->end_of_run_ns < NEVER) {
        while (queued(&self->in_flight) &&
               (*(Request **)front(&self->in_flight))->due_ns + self->timeout_ns <= span->end_of_run_ns)
            if (give_up_first(self, span->end_of_run_ns) < 0)
                return -1;
        if (stop(self) < 0 || give_up_all(self, span->end_of_run_ns, cut, 0) < 0)
            return -1;
    }
    return stop(self) < 0 ? -1 : unsent(self, cut);
}

static int take_stages(Course *self, PyObject *stages)
{
    Py_ssize_t count = PySequence_Size(stages);
    if (count < 1)
        return -1;
    self->stages = PyMem_Calloc(count, sizeof(Stage));
    if (self->stages == NULL)
        return -1;
    for (; self->stages_count < count; self->stages_count++) {
        PyObject *given = PySequence_GetItem(stages, self->stages_count), *times;
        long long start, length, first, chains, lanes, taken_over;
        if (given == NULL || !PyArg_ParseTuple(given, "LLLLLLO", &start, &length, &first, &chains, &lanes, &taken_over, &times)) {
            Py_XDECREF(given);
            return -1;
        }
        Stage *span = &self->stages[self->stages_count];
        *span = (Stage){start, length, first, chains, lanes, taken_over};
        int failed = as_column(times, &span->times) < 0;
        Py_DECREF(given);
        if (failed)
            return -1;
    }
    return 0;
}

static int take_replicas(Course *self, PyObject *replicas)
{
    Py_ssize_t count = PySequence_Size(replicas);
    if (count < 1)
        return -1;
    self->replicas = PyMem_Calloc(count, sizeof(Replica *));
    self->ends = PyMem_Calloc(count, sizeof(int64_t));
    if (self->replicas == NULL || self->ends == NULL)
        return -1;
    for (; self->replicas_count < count; self->replicas_count++) {
        PyObject *given = PySequence_GetItem(replicas, self->replicas_count);
        if (given == NULL || !PyObject_TypeCheck(given, replica_type)) {
            Py_XDECREF(given);
            return -1;
        }
        self->replicas[self->replicas_count] = (Replica *)given;
        ((Replica *)given)->stretches = &self->stretches;
        self->ends[self->replicas_count] = NEVER;
    }
    self->serving = self->idle = count;
    return 0;
}

static void drop_course(Course *self)
{
    for (; queued(&self->in_flight); self->in_flight.taken += sizeof(Request *)) {
        Request *one = *(Request **)front(&self->in_flight);
        Py_DECREF(OBJECT(one));
    }
    for (size_t i = 0; i < COUNT(self->leaving, Leaver); i++)
        Py_DECREF(OBJECT(AT(self->leaving, Leaver, i).one));
    while (self->first_flight != NULL)
        forget_flight(self, self->first_flight);
    while (self->first_task != NULL)
        close_task(self, self->first_task);
    while (self->replicas_count > 0) {
        Replica *one = self->replicas[--self->replicas_count];
        one->stretches = NULL;
        Py_DECREF(OBJECT(one));
    }
    while (self->stages_count > 0)
        PyBuffer_Release(&self->stages[--self->stages_count].times.view);
    for (int64_t i = 0; self->blocks != NULL && i <= self->blocks_mask; i++)
        if (self->blocks[i] != NULL)
            release_block(self->blocks[i]);
    Bytes *all[] = {&self->heap, &self->done, &self->leaving, &self->lanes_stopped, &self->sent, &self->unsent,
                    &self->stretches, &self->held.bytes, &self->dropped.bytes, &self->lanes.bytes, &self->in_flight.bytes};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        PyMem_Free(all[i]->data);
    PyMem_Free(self->blocks);
    PyMem_Free(self->stages);
    PyMem_Free(self->replicas);
    PyMem_Free(self->ends);
}

/* course((stages, turns, together, draw, sizes), (replicas, route, changes), (caps ...), (instants ...), look, kinds):
   what was sent, what was not, stretches, and whether a look has ended it. */
static PyObject *course(PyObject *module, PyObject *args)
{
    Course self = {0};
    Span span = {0};
    PyObject *stages, *replicas, *changes, *kinds, *result = NULL;
    long long turns, together, caps[2], timeout_ns;
    if (!PyArg_ParseTuple(args, "(OLLOO)(OOO)(LL)(LLLL)(OL)O", &stages, &turns, &together, &self.draw, &self.sizes, &replicas,
                          &self.route, &changes, &caps[0], &caps[1], &timeout_ns, &span.end_of_run_ns, &span.stop_ns,
                          &span.after_stop_ns, &self.look, &span.every_ns, &kinds))
        return NULL;
    self.turns = turns, self.together = together, self.timeout_ns = timeout_ns;
    self.caps[0] = caps[0], self.caps[1] = caps[1];
    int failed = turns < 1 || together < 1 || PySequence_Size(kinds) != KINDS || as_column(changes, &span.changes) < 0;
    for (Py_ssize_t i = 0; !failed && i < KINDS; i++) {
        PyObject *kind = PySequence_GetItem(kinds, i);
        self.kinds[i] = kind == NULL ? -1 : PyLong_AsLongLong(kind);
        Py_XDECREF(kind);
        failed = PyErr_Occurred() != NULL;
    }
    failed = failed || take_stages(&self, stages) < 0 || take_replicas(&self, replicas) < 0;
    for (Py_ssize_t i = 1; !failed && i < span.changes.count; i += 2)
        failed = span.changes.at[i] < 1 || span.changes.at[i] > self.replicas_count;
    if (failed && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "no such course");
    if (!failed && begin_stage(&self, 0, 0) == 0 && run_course(&self, &span) == 0)
        result = Py_BuildValue("y#y#y#i", self.sent.used ? self.sent.data : "", (Py_ssize_t)self.sent.used,
                               self.unsent.used ? self.unsent.data : "", (Py_ssize_t)self.unsent.used,
                               self.stretches.used ? self.stretches.data : "", (Py_ssize_t)self.stretches.used,
                               span.is_decided);
    if (span.changes.view.obj != NULL)
        PyBuffer_Release(&span.changes.view);
    drop_course(&self);
    return result;
}
