/* What a token leaves in the cache of latent attention, and the part of its queries that is only turned to its
 * position. Attention itself is attention.c's, with one key head. */
#include <math.h>

#include "tape.h"
#include "vec.h"

typedef struct {
    const float *q, *latent; /* q (rows, h, dk), its last `shared` channels turned; latent (rows, rank + shared) */
    float *query;            /* (rows, h, rank + shared) */
    const float *norm, *turns; /* norm (rank); turns (rows, 2, shared / 2): cos, sin; or NULL */
    void *kv;                  /* (rows, capacity, rank + shared), float32 or bfloat16 */
    const int64_t *past;
    int64_t rows, h, dk, rank, shared, capacity, q_stride, latent_stride, query_stride, kv_row, kv_place, bf16;
    float eps;
} EnterLatent;
const int64_t size_EnterLatent = sizeof(EnterLatent);

/* to = x turned by a row's cosines and sines, halves against each other. */
static void turned(const EnterLatent *a, int64_t row, const float *x, float *to) {
    int64_t half = a->shared / 2;
    const float *cosine = a->turns + row * a->shared, *sine = cosine + half;
    for (int64_t i = 0; i < half; i++) {
        to[i] = x[i] * cosine[i] - x[i + half] * sine[i];
        to[i + half] = x[i + half] * cosine[i] + x[i] * sine[i];
    }
}

static void put(const EnterLatent *a, int64_t row, int64_t at, const float *x, int64_t n) {
    at += row * a->kv_row + a->past[row] % a->capacity * a->kv_place;
    for (int64_t i = 0; i < n; i += LANES) {
        if (a->bf16)
            vstore_bf16_part((uint16_t *)a->kv + at + i, vload_part(x + i, n - i), n - i);
        else
            vstore_part((float *)a->kv + at + i, vload_part(x + i, n - i), n - i);
    }
}

static void leave(const EnterLatent *a, int64_t row) {
    const float *x = a->latent + row * a->latent_stride, *key = x + a->rank;
    float left[a->rank > a->shared ? a->rank : a->shared];
    vf squares = vset(0);
    for (int64_t i = 0; i < a->rank; i += LANES) {
        vf part = vload_part(x + i, a->rank - i);
        squares += part * part;
    }
    float by = 1 / sqrtf(vsum(squares) / (float)a->rank + a->eps);
    for (int64_t i = 0; i < a->rank; i++) left[i] = x[i] * by * a->norm[i];
    put(a, row, 0, left, a->rank);
    if (a->turns) turned(a, row, key, left);
    put(a, row, a->rank, a->turns ? left : key, a->shared);
}

void enter_latent(const void *args, int thread, int threads) {
    const EnterLatent *a = args;
    for (int64_t unit = thread; unit < a->rows * (a->h + 1); unit += threads) {
        int64_t row = unit / (a->h + 1), head = unit % (a->h + 1);
        if (head == a->h) {
            leave(a, row);
            continue;
        }
        const float *own = a->q + row * a->q_stride + (head + 1) * a->dk - a->shared;
        float *to = a->query + row * a->query_stride + (head + 1) * (a->rank + a->shared) - a->shared;
        if (a->turns)
            turned(a, row, own, to);
        else
            memcpy(to, own, (size_t)a->shared * sizeof(float));
    }
}
