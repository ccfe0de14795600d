/* y = x W^T: the products of linear layers, W (out, in) row-major in float32, bfloat16 or int8 with a float32
 * scale for each 64 weights of a row; x and y float32. Here for up to 16 rows of x; panels.c has more.
 *
 * Each thread walks its share of W's rows once, a few at a time beside all rows of x, lanes along `in`. One
 * accumulator a number, whatever the tile: a row's result depends neither on how many rows there are nor on
 * how many threads. A decode step reads every weight once: this is bound by memory, and weights are asked for
 * a tile ahead, since rows are too short for the processor to see a pattern. */
#include "walk.h"
#include "tape.h"

const int64_t size_Matrix = sizeof(Matrix);

enum { AHEAD = 8192, SUMS = LANES == 16 ? 16 : 8 }; /* sums: what fits into the registers */

/* The sums of the lanes of `count` vectors (a power of 2, at most LANES), v[i]'s in lane i LANES / count.
 * Two are zipped while there are two, then one with itself: upper halves are added to lower ones throughout,
 * so that a sum has the same order whatever `count`. */
ALWAYS vf totals(vf *v, const int count) {
#pragma GCC unroll 4
    for (int level = 1; level < 5; level++)
#pragma GCC unroll 8
        for (int i = 0; i < count >> level; i++)
            v[i] = ZIP(v[i], v[i + (count >> level)], LOW) + ZIP(v[i], v[i + (count >> level)], HIGH);
    vf sum = v[0];
#pragma GCC unroll 4
    for (int level = 0; level < 4; level++)
        if (LANES >> level > count) sum = ZIP(sum, sum, LOW) + ZIP(sum, sum, HIGH);
    return sum;
}

/* sum[j][i] += the products of `many` rows of W with `rows` rows of x over `left` columns from k on. */
ALWAYS void stretch(const Row *w, const int size, const int many, const int rows, int64_t k, int64_t left,
                    const float *x, int64_t stride, vf *sum) {
    vf part[4];
#pragma GCC unroll 4
    for (int i = 0; i < many; i++) part[i] = stored(w[i], size, k, left);
#pragma GCC unroll 8
    for (int j = 0; j < rows; j++) {
        vf beside = vload_part(x + j * stride + k, left);
#pragma GCC unroll 4
        for (int i = 0; i < many; i++) sum[j * many + i] += part[i] * beside;
    }
}

/* The products of `many` rows of W from n on with `rows` rows of x from m on. Those of int8 are added up as
 * they are over a group, and scaled once. */
ALWAYS void dots(const Matrix *a, const int size, const int many, const int rows, int64_t n, int64_t m,
                 const float *x, int64_t stride) {
    const int count = many * rows, set = count < LANES ? count : LANES;
    const int64_t in = a->in, block = many * in * size, ahead = block < AHEAD ? block : AHEAD;
    Row w[4]; /* of fixed sizes: GCC keeps no array of variable size in registers */
    vf sum[SUMS], group[SUMS];
#pragma GCC unroll 4
    for (int i = 0; i < many; i++) w[i] = row_of(a, size, n + i);
#pragma GCC unroll 16
    for (int i = 0; i < count; i++) sum[i] = (vf){0};
    x += m * stride;
    for (int64_t k = 0; k < in; k += GROUP) {
        vf *into = size == SIZE_INT8 ? group : sum;
#pragma GCC unroll 4
        for (int i = 0; i < many; i++)
#pragma GCC unroll 4
            for (int line = 0; line < size; line++)
                __builtin_prefetch(w[i].weight + k * size + line * 64 + ahead);
#pragma GCC unroll 16
        for (int i = 0; i < count; i++)
            if (size == SIZE_INT8) group[i] = (vf){0};
        if (__builtin_expect(in - k >= GROUP, 1)) {
#pragma GCC unroll 4
            for (int step = 0; step < GROUP; step += LANES)
                stretch(w, size, many, rows, k + step, LANES, x, stride, into);
        } else {
            for (int64_t at = k; at < in; at += LANES)
                stretch(w, size, many, rows, at, in - at, x, stride, into);
        }
#pragma GCC unroll 16
        for (int i = 0; i < count; i++)
            if (size == SIZE_INT8) sum[i] += group[i] * scale_at(w[i % many], k);
    }
    float dot[SUMS + LANES];
#pragma GCC unroll 4
    for (int i = 0; i < count; i += set) vstore(dot + i * (LANES / set), totals(sum + i, set));
    for (int j = 0; j < rows; j++) {
        float *y = a->y + (m + j) * a->y_stride + n;
#pragma GCC unroll 4
        for (int i = 0; i < many; i++) {
            float done = dot[(j * many + i) * (LANES / set)];
            if (a->bias) done += a->bias[n + i];
            y[i] = a->add ? y[i] + done : done;
        }
    }
}

/* One for each format and number of rows of x: rows [n, end) of W, as many at once as the registers hold. */
#define DOTS(size, many, rows)                                                                               \
    static void dots_##size##_##rows(const Matrix *a, int64_t n, int64_t end, int64_t m, const float *x,     \
                                     int64_t stride) {                                                       \
        for (; n + (many) <= end; n += (many)) dots(a, size, many, rows, n, m, x, stride);                   \
        for (; n < end; n++) dots(a, size, 1, rows, n, m, x, stride);                                        \
    }
#define EACH_ROWS(size) DOTS(size, 4, 1) DOTS(size, 4, 2) DOTS(size, SUMS / 4, 4) DOTS(size, SUMS / 8, 8)
EACH_ROWS(4)
EACH_ROWS(2)
EACH_ROWS(1)

typedef void Dots(const Matrix *, int64_t, int64_t, int64_t, const float *, int64_t);
static Dots *const DOTS_OF[3][4] = {
    [FLOAT32] = {dots_4_1, dots_4_2, dots_4_4, dots_4_8},
    [BFLOAT16] = {dots_2_1, dots_2_2, dots_2_4, dots_2_8},
    [INT8] = {dots_1_1, dots_1_2, dots_1_4, dots_1_8},
};

/* Rows of x in pieces of 8, 4, 2 and 1; where there are several, W in blocks that stay in the first cache. */
static void few(const Matrix *a, int64_t start, int64_t end) {
    int64_t stride, block = a->rows & (a->rows - 1) || a->rows > 8 ? 4 : end - start;
    const float *x = entering(a, &stride);
    for (int64_t n = start; n < end; n += block) {
        int64_t m = 0, stop = n + block < end ? n + block : end;
        for (int piece = 3; piece >= 0; piece--)
            for (; m + (1 << piece) <= a->rows; m += 1 << piece)
                DOTS_OF[a->format][piece](a, n, stop, m, x, stride);
    }
}

void matrix(const void *args, int thread, int threads) {
    const Matrix *a = args;
    if (a->rows > FEW) {
        constate_panels(a, thread, threads);
        return;
    }
    int64_t start, end;
    matrix_share(a->out, thread, threads, &start, &end);
    few(a, start, end);
}
