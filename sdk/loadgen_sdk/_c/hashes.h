/* Hashes of many texts at a time. Part of _compiled.c. */

/* BLAKE2b (RFC 7693) of LANES texts at a time: each lane of a vector is one of them. A processor whose vectors hold only
   half of them takes one half after the other: with both at once its registers would not suffice. */

#define LANES 8
#define BLOCK_BYTES 128
#define HASH_BYTES 16

typedef uint64_t Lanes __attribute__((vector_size(8 * LANES)));
typedef uint64_t Half __attribute__((vector_size(4 * LANES)));

typedef struct {
    uint64_t salt;
    const char *at;
    Py_ssize_t size;
} Salted;

typedef struct {
    const char *at;
    Py_ssize_t left;
    uint64_t done;
    int busy;
    unsigned char end[BLOCK_BYTES];
} Text;

static const uint64_t blake2b_start[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static const unsigned char blake2b_order[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

#define TURNED(value, by) ((value) >> (by) | (value) << (64 - (by)))
#define MIX(a, b, c, d, x, y) \
    a += b + (x), d = TURNED(d ^ a, 32), c += d, b = TURNED(b ^ c, 24), \
    a += b + (y), d = TURNED(d ^ a, 16), c += d, b = TURNED(b ^ c, 63)

typedef void Compress(Lanes state[8], const unsigned char *const blocks[LANES], const Lanes *done, const Lanes *last);

#define COMPRESS(name, target, Vector) \
    target static void name(Lanes state[8], const unsigned char *const blocks[LANES], const Lanes *done, const Lanes *last) \
    { \
        enum { WIDTH = sizeof(Vector) / 8 }; \
        for (int first = 0; first < LANES; first += WIDTH) { \
            Vector words[16], v[16], more; \
            for (int word = 0; word < 16; word++) \
                for (int lane = 0; lane < WIDTH; lane++) \
                    words[word][lane] = little(blocks[first + lane] + 8 * word); \
            for (int word = 0; word < 8; word++) { \
                memcpy(&v[word], (const uint64_t *)&state[word] + first, sizeof more); \
                v[word + 8] = (Vector){0} + blake2b_start[word]; \
            } \
            memcpy(&more, (const uint64_t *)done + first, sizeof more); \
            v[12] ^= more; \
            memcpy(&more, (const uint64_t *)last + first, sizeof more); \
            v[14] ^= more; \
            for (int round = 0; round < 12; round++) { \
                const unsigned char *order = blake2b_order[round % 10]; \
                MIX(v[0], v[4], v[8], v[12], words[order[0]], words[order[1]]); \
                MIX(v[1], v[5], v[9], v[13], words[order[2]], words[order[3]]); \
                MIX(v[2], v[6], v[10], v[14], words[order[4]], words[order[5]]); \
                MIX(v[3], v[7], v[11], v[15], words[order[6]], words[order[7]]); \
                MIX(v[0], v[5], v[10], v[15], words[order[8]], words[order[9]]); \
                MIX(v[1], v[6], v[11], v[12], words[order[10]], words[order[11]]); \
                MIX(v[2], v[7], v[8], v[13], words[order[12]], words[order[13]]); \
                MIX(v[3], v[4], v[9], v[14], words[order[14]], words[order[15]]); \
            } \
            for (int word = 0; word < 8; word++) { \
                memcpy(&more, (const uint64_t *)&state[word] + first, sizeof more); \
                more ^= v[word] ^ v[word + 8]; \
                memcpy((uint64_t *)&state[word] + first, &more, sizeof more); \
            } \
        } \
    }

COMPRESS(compress_anywhere, , Half)
#if defined(__x86_64__)
COMPRESS(compress_avx2, __attribute__((target("avx2"))), Half)
COMPRESS(compress_avx512, __attribute__((target("avx512f"))), Lanes)
#endif

static Compress *best_compress(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f"))
        return compress_avx512;
    if (__builtin_cpu_supports("avx2"))
        return compress_avx2;
#endif
    return compress_anywhere;
}

/* The sum of the hashes of texts, least byte first, without what it has above these bytes. */
static void sum_hashes(const Salted *texts, Py_ssize_t count, unsigned char sum[HASH_BYTES])
{
    Py_ssize_t next = 0;
    Compress *compress = best_compress();
    Text lanes[LANES] = {0};
    const unsigned char *blocks[LANES];
    Lanes state[8] = {{0}}, done = {0}, last = {0};
    uint64_t low = 0, high = 0;
    for (;;) {
        int busy = 0;
        for (int lane = 0; lane < LANES; lane++) {
            Text *text = &lanes[lane];
            if (!text->busy && next < count) {
                text->at = texts[next].at;
                text->left = texts[next].size;
                text->done = 0;
                text->busy = 1;
                for (int word = 0; word < 8; word++)
                    state[word][lane] = blake2b_start[word];
                state[0][lane] ^= 0x01010000 ^ HASH_BYTES;
                state[4][lane] ^= texts[next++].salt;
            }
            blocks[lane] = text->end; /* of a lane without a text: what comes of it is not used */
            if (!text->busy)
                continue;
            busy = 1;
            Py_ssize_t size = text->left < BLOCK_BYTES ? text->left : BLOCK_BYTES;
            if (size < BLOCK_BYTES) {
                memset(text->end, 0, BLOCK_BYTES);
                memcpy(text->end, text->at, (size_t)size);
            } else
                blocks[lane] = (const unsigned char *)text->at;
            text->at += size;
            text->left -= size;
            done[lane] = text->done += (uint64_t)size;
            last[lane] = text->left ? 0 : ~(uint64_t)0;
        }
        if (!busy)
            break;
        compress(state, blocks, &done, &last);
        for (int lane = 0; lane < LANES; lane++)
            if (lanes[lane].busy && last[lane]) {
                lanes[lane].busy = 0;
                low += state[0][lane];
                high += state[1][lane] + (low < state[0][lane]);
            }
    }
    for (int byte = 0; byte < HASH_BYTES; byte++)
        sum[byte] = (unsigned char)((byte < 8 ? low : high) >> 8 * (byte % 8));
}

/* A tuple of a salt and a text. -1 with an exception. */
static int salted(PyObject *pair, Salted *text)
{
    PyObject *number;
    if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2 || !PyLong_Check(number = PyTuple_GetItem(pair, 0))) {
        PyErr_SetString(PyExc_TypeError, "texts are tuples with their salts");
        return -1;
    }
    char *begin;
    if (PyBytes_AsStringAndSize(PyTuple_GetItem(pair, 1), &begin, &text->size) < 0)
        return -1;
    text->at = begin;
    long long salt = PyLong_AsLongLong(number);
    text->salt = (uint64_t)salt;
    return salt == -1 && PyErr_Occurred() ? -1 : 0;
}

/* The twin of `in_python` in hashing.py. */
static PyObject *hashed(PyObject *Py_UNUSED(module), PyObject *kept)
{
    if (!PyList_Check(kept)) {
        PyErr_SetString(PyExc_TypeError, "texts are a list");
        return NULL;
    }
    Py_ssize_t count = PyList_Size(kept), at = 0;
    Salted *texts = PyMem_Malloc((size_t)count * sizeof *texts);
    if (texts == NULL)
        return PyErr_NoMemory();
    while (at < count && salted(PyList_GetItem(kept, at), &texts[at]) == 0)
        at++;
    unsigned char sum[HASH_BYTES];
    if (at == count)
        sum_hashes(texts, count, sum);
    PyMem_Free(texts);
    return at < count ? NULL : PyBytes_FromStringAndSize((const char *)sum, HASH_BYTES);
}
