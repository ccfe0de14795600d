/* The product of a linear layer as other kernels call it: its record, and which outputs are whose. */
#ifndef CONSTATE_MATRIX_H
#define CONSTATE_MATRIX_H

#include "tape.h"

typedef struct {
    const void *weight;
    const float *scales, *bias, *x, *norm;
    float *y;
    int64_t rows, in, out, x_stride, y_stride, format, add;
    float eps;
} Matrix;

void matrix(const void *args, int thread, int threads);

enum { FEW = 16 /* rows, up to which a thread makes the outputs of its share alone */ };

/* Cut where no tile is. */
static inline void matrix_share(int64_t out, int thread, int threads, int64_t *start, int64_t *end) {
    int64_t blocks = (out + 3) / 4;
    *start = blocks * thread / threads * 4;
    *end = blocks * (thread + 1) / threads * 4;
    if (*end > out) *end = out;
}

#endif
