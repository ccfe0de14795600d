/* What the two walks over a matrix share: how weights of each format are read, and what is done to x on the
 * way in. */
#ifndef CONSTATE_WALK_H
#define CONSTATE_WALK_H

#include <math.h>
#include <stdlib.h>

#include "matrix.h"
#include "vec.h"
/* The walk for many rows of x. */
void constate_panels(const Matrix *a, int thread, int threads);

enum { FLOAT32, BFLOAT16, INT8 };
enum { GROUP = 64 }; /* as many weights of a row share a scale */

typedef int16_t vs __attribute__((vector_size(2 * LANES)));
typedef int8_t vb_any __attribute__((vector_size(LANES), aligned(1), may_alias));

ALWAYS vf load_int8(const int8_t *p) {
#if defined(__AVX512F__) /* GCC 12 widens number by number */
    vi wide = (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    vi wide = (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vi wide = __builtin_convertvector(__builtin_convertvector(*(const vb_any *)p, vs), vi);
#endif
    return __builtin_convertvector(wide, vf);
}

enum { SIZE_FLOAT32 = 4, SIZE_BFLOAT16 = 2, SIZE_INT8 = 1 };

/* A row of W. */
typedef struct {
    const char *weight;
    const float *scales;
} Row;

ALWAYS Row row_of(const Matrix *a, const int size, int64_t n) {
    int64_t groups = (a->in + GROUP - 1) / GROUP;
    return (Row){(const char *)a->weight + n * a->in * size, a->scales + n * groups};
}

ALWAYS float scale_at(Row row, int64_t k) { return row.scales[k / GROUP]; }

/* LANES of its numbers from column k on, those of int8 not yet scaled; zeros behind `left` of them. */
ALWAYS vf stored(Row row, const int size, int64_t k, int64_t left) {
    if (size == SIZE_FLOAT32) return vload_part((const float *)row.weight + k, left);
    if (size == SIZE_BFLOAT16) return vload_bf16_part((const uint16_t *)row.weight + k, left);
    if (__builtin_expect(left >= LANES, 1)) return load_int8((const int8_t *)row.weight + k);
    int8_t part[LANES] = {0};
    memcpy(part, row.weight + k, (size_t)left);
    return load_int8(part);
}

/* Memory of this thread's own, kept for its next call. */
static inline float *scratch(int which, int64_t floats) {
    static _Thread_local float *memory[2];
    static _Thread_local int64_t room[2];
    if (room[which] < floats) {
        free(memory[which]);
        room[which] = (floats + 15) / 16 * 16;
        memory[which] = aligned_alloc(64, (size_t)room[which] * sizeof(float));
        if (!memory[which]) abort();
    }
    return memory[which];
}

/* x as it is, or RMS-normed: each thread does that for itself, which is cheaper than to meet for it. */
static inline const float *entering(const Matrix *a, int64_t *stride) {
    *stride = a->x_stride;
    if (!a->norm) return a->x;
    *stride = (a->in + LANES - 1) / LANES * LANES;
    float *normed = scratch(0, a->rows * *stride);
    for (int64_t m = 0; m < a->rows; m++) {
        const float *x = a->x + m * a->x_stride;
        vf squares = {0};
        for (int64_t k = 0; k < a->in; k += LANES) {
            vf part = vload_part(x + k, a->in - k);
            squares += part * part;
        }
        float factor = 1 / sqrtf(vsum(squares) / (float)a->in + a->eps);
        for (int64_t k = 0; k < a->in; k += LANES) {
            vf scaled = vload_part(x + k, a->in - k) * factor * vload_part(a->norm + k, a->in - k);
            vstore(normed + m * *stride + k, scaled);
        }
    }
    return normed;
}

#if LANES == 16
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif
/* The lower, or the upper, halves of two vectors, lane by lane in turn. */
#if defined(__clang__)
#define ZIP(a, b, order) __builtin_shufflevector(a, b, order)
#else
#define ZIP(a, b, order) __builtin_shuffle(a, b, (vi){order})
#endif

#endif
