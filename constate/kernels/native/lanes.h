/* What the recurrences of matrix states share. A state (rows, h, dk, dv) is float32, and each of its columns,
 * one place v of the values, goes its own way: so lanes lie along v, and all sums over k run within a lane.
 *
 * Tokens are taken up to BLOCK at a time. What they read of the state is read of the one before the block,
 * what they write is added at its end, and what they see of each other are a few numbers that do not know the
 * state at all: the products of their queries and keys, times the decays between them. A state is then
 * loaded and stored once a block, with 2 to 4 multiply-adds a number and token. A decay is only ever
 * multiplied by decays, so that 0 (log-decay -inf) is an ordinary one.
 *
 * Knows states, blocks, and which thread takes which columns; knows no recurrence. */
#ifndef CONSTATE_LANES_H
#define CONSTATE_LANES_H

#include <math.h>

#include "vec.h"

/* WIDEST is the largest dk that callers may ask for. Rows of scratch are a cache line longer than a power of
 * two, else all of them would lie in the same few places of the cache. */
enum { BLOCK = 4, WIDEST = 1024, ROW = WIDEST + 16 };

#if defined(__AVX512F__) || defined(__aarch64__)
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
/* Vectors of columns taken together by a block of so many sums: as many as leave half the registers free. */
#define TOGETHER(sums) ((sums) * 4 <= REGISTERS ? 2 : 1)

typedef float Row[ROW] __attribute__((aligned(64)));
typedef float Pairs[BLOCK][BLOCK];

/* Asks for `numbers` of each token of the next block while this one is computed: tokens lie pages apart,
 * where no processor foresees them. */
ALWAYS void ahead(const float *p, int64_t stride, int64_t numbers) {
    p += BLOCK * stride;
    for (int t = 0; t < BLOCK; t++, p += stride)
        for (int64_t i = 0; i < numbers; i += 16) __builtin_prefetch(p + i);
}

typedef struct {
    int64_t dk;
    float head[BLOCK]; /* where a decay is a number */
    Row decay[BLOCK];  /* where it is dk of them */
    Row kept;          /* what is left, at the block's end, of the state before it */
    int wide;
} Between;

/* From the log-decays of `count` tokens, a number each or (wide) dk of them, NULL for none. */
ALWAYS void between(Between *b, const float *log, int64_t stride, int wide, int64_t dk, const int count) {
    b->dk = dk;
    b->wide = wide;
    for (int t = 0; t < count && !wide; t++) b->head[t] = log ? expf(log[t * stride]) : 1.0f;
    for (int64_t i = 0; i < dk; i += LANES) {
        vf all = vset(1.0f);
        for (int t = 0; t < count; t++) {
            vf own = wide ? vexp(vload_part(log + t * stride + i, dk - i)) : vset(b->head[t]);
            if (wide) vstore(b->decay[t] + i, own);
            all *= own;
        }
        vstore(b->kept + i, all);
    }
}

ALWAYS vf decay_of(const Between *b, int t, int64_t i) {
    return b->wide ? vload(b->decay[t] + i) : vset(b->head[t]);
}

/* reads[t] = query t times all decays up to its own, for the state before the block; with `before`, up to
 * the one before its own. seen[t][s] is what it sees of an earlier token's key: their product times the
 * decays between. Without `before`, its own token's is among them. */
ALWAYS void queries(const Between *b, const float *q, int64_t q_stride, const float *k, int64_t k_stride,
                    Row *reads, Pairs seen, const int before, const int count) {
    vf sum[BLOCK][BLOCK];
#pragma GCC unroll 4
    for (int t = 0; t < count; t++)
#pragma GCC unroll 4
        for (int s = 0; s <= t; s++) sum[t][s] = vset(0);
    for (int64_t i = 0; i < b->dk; i += LANES) {
        vf key[BLOCK], decay[BLOCK];
#pragma GCC unroll 4
        for (int t = 0; t < count; t++) {
            key[t] = vload_part(k + t * k_stride + i, b->dk - i);
            decay[t] = decay_of(b, t, i);
        }
#pragma GCC unroll 4
        for (int t = 0; t < count; t++) {
            vf run = vload_part(q + t * q_stride + i, b->dk - i);
#pragma GCC unroll 4
            for (int s = t; s >= 0; s--) {
                if (s == t && before) continue;
                sum[t][s] += run * key[s];
                run *= decay[s];
            }
            vstore(reads[t] + i, run);
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < count; t++)
#pragma GCC unroll 4
        for (int s = 0; s <= t; s++) seen[t][s] = vsum(sum[t][s]);
}

/* writes[t] = key t times all decays after it within the block. */
ALWAYS void keys(const Between *b, const float *k, int64_t stride, Row *writes, const int count) {
    for (int64_t i = 0; i < b->dk; i += LANES) {
        vf run = vset(1.0f);
#pragma GCC unroll 4
        for (int t = count - 1; t >= 0; t--) {
            vstore(writes[t] + i, vload_part(k + t * stride + i, b->dk - i) * run);
            run *= decay_of(b, t, i);
        }
    }
}

/* Some columns of a state, `stride` numbers from one k to the next; of the last vector, `width` lanes. */
typedef struct {
    float *at;
    int64_t dk, stride, width;
} Columns;

ALWAYS vf column_load(const float *p, int j, int64_t width, const int vectors, const int part) {
    return part && j == vectors - 1 ? vload_part(p + j * LANES, width) : vload(p + j * LANES);
}

ALWAYS void column_store(float *p, vf x, int j, int64_t width, const int vectors, const int part) {
    if (part && j == vectors - 1)
        vstore_part(p + j * LANES, x, width);
    else
        vstore(p + j * LANES, x);
}

/* y[r] = sum over i of rows[r][i] S[i]. */
ALWAYS void look(const Columns *c, const Row *rows, vf (*y)[2], const int count, const int vectors,
                 const int part) {
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
        for (int j = 0; j < vectors; j++) y[r][j] = vset(0);
    const float *s = c->at;
    for (int64_t i = 0; i < c->dk; i++, s += c->stride) {
        vf x[2];
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) x[j] = column_load(s, j, c->width, vectors, part);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            vf w = vset(rows[r][i]);
#pragma GCC unroll 2
            for (int j = 0; j < vectors; j++) y[r][j] += w * x[j];
        }
    }
}

/* S[i] = kept[i] S[i] + sum over r of rows[r][i] x[r]. */
ALWAYS void put(const Columns *c, const float *kept, const Row *rows, vf (*x)[2], const int count,
                const int vectors, const int part) {
    float *s = c->at;
    for (int64_t i = 0; i < c->dk; i++, s += c->stride) {
        vf e = vset(kept[i]), y[2];
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) y[j] = column_load(s, j, c->width, vectors, part) * e;
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            vf w = vset(rows[r][i]);
#pragma GCC unroll 2
            for (int j = 0; j < vectors; j++) y[j] += w * x[r][j];
        }
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) column_store(s, y[j], j, c->width, vectors, part);
    }
}

/* Some columns [from, to) of one head of one row, whose tokens are [begin, end); `state` is that head's. */
typedef struct {
    int64_t row, head, begin, end, from, to, dk, dv;
    float *state;
} Unit;

/* Does `what` for all columns of a unit, `most` vectors of them together, then one by one; it finds the columns
 * in `c`, the first of them in `lane`, and the constants `vectors` and `part`. */
#define EACH_COLUMNS(u, most, what)                                                                         \
    {                                                                                                       \
        int64_t lane = (u)->from;                                                                           \
        Columns c = {0, (u)->dk, (u)->dv, 0};                                                               \
        for (; lane + (most) * LANES <= (u)->to; lane += (most) * LANES) {                                  \
            enum { vectors = (most), part = 0 };                                                            \
            c.at = (u)->state + lane;                                                                       \
            what;                                                                                           \
        }                                                                                                   \
        for (; lane < (u)->to; lane += LANES) {                                                             \
            enum { vectors = 1, part = 1 };                                                                 \
            c.at = (u)->state + lane;                                                                       \
            c.width = (u)->to - lane;                                                                       \
            what;                                                                                           \
        }                                                                                                   \
    }

typedef struct {
    float *state;
    const int64_t *offsets;
    int64_t rows, h, dk, dv;
} States;

/* This thread's share of all heads of all rows. Rows are innermost, so that a long one among short ones falls
 * to all threads alike; where there are few heads, a head's columns are shared out too. */
static inline void units(const States *s, void (*walk)(const void *, const Unit *), const void *args,
                         int thread, int threads) {
    int64_t whole = 2 * LANES, most = (s->dv + whole - 1) / whole, pieces = 1, first, last;
    while (pieces < most && s->h * s->rows * pieces < 2 * threads) pieces++;
    share(s->h * pieces * s->rows, thread, threads, &first, &last);
    for (int64_t n = first; n < last; n++) {
        int64_t row = n % s->rows, piece = n / s->rows % pieces, head = n / s->rows / pieces;
        int64_t from = most * piece / pieces * whole, to = most * (piece + 1) / pieces * whole;
        Unit u = {row, head, s->offsets[row], s->offsets[row + 1], from, to, s->dk, s->dv, s->state};
        if (u.to > s->dv) u.to = s->dv;
        u.state += (row * s->h + head) * s->dk * s->dv;
        if (u.begin < u.end) walk(args, &u);
    }
}

#endif
