/* y = x W^T for many rows of x: see matrix.c.
 *
 * A panel of 2 * LANES rows of W is brought to float32 and transposed once, PANEL_K of its columns at a time
 * (that lies in the second cache), then meets one tile of TILE rows of x after the other, lanes along `out`,
 * x broadcast: two loads of W and TILE broadcasts for 2 * TILE multiply-adds, which is what the processor can
 * do at most. Every number is added up along `in`, whatever its tile and thread. */
#include "walk.h"

enum { PANEL = 2 * LANES, PANEL_K = 768, TILE = LANES == 8 ? 6 : 12 }; /* a tile fills the registers */

/* LANES x LANES in the registers: zipping the halves log2(LANES) times is a transposition. */
ALWAYS void transpose(vf v[LANES]) {
    for (int done = 1; done < LANES; done *= 2) {
        vf zipped[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            zipped[2 * i] = ZIP(v[i], v[i + LANES / 2], LOW);
            zipped[2 * i + 1] = ZIP(v[i], v[i + LANES / 2], HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) v[i] = zipped[i];
    }
}

ALWAYS vf scaled(Row row, const int size, int64_t k, int64_t left) {
    vf part = stored(row, size, k, left);
    return size == SIZE_INT8 ? part * scale_at(row, k) : part;
}

/* Rows n.. of W, columns [k0, k0 + count), as panel[k][row]; zeros where W has no more rows. */
ALWAYS void fill(const Matrix *a, const int size, int64_t n, int64_t k0, int64_t count, float *panel) {
    for (int64_t k = 0; k < count; k += LANES)
        for (int half = 0; half < 2; half++) {
            vf v[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                int64_t row = n + half * LANES + i;
                v[i] = row < a->out ? scaled(row_of(a, size, row), size, k0 + k, a->in - k0 - k) : (vf){0};
            }
            transpose(v);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) vstore(panel + (k + i) * PANEL + half * LANES, v[i]);
        }
}

ALWAYS void leave(const Matrix *a, int64_t n, float *y, vf sum, const int first) {
    int64_t left = a->out - n;
    if (left <= 0) return;
    if (!first || a->add) sum += vload_part(y + n, left);
    if (first && a->bias) sum += vload_part(a->bias + n, left);
    vstore_part(y + n, sum, left);
}

/* `rows` rows of x from m on, columns [k0, k0 + count), beside a panel. */
ALWAYS void tile(const Matrix *a, const int rows, int64_t n, int64_t m, int64_t k0, int64_t count,
                 const float *panel, const float *x, int64_t stride) {
    vf sum[TILE][2];
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = (vf){0};
    x += m * stride + k0;
#pragma GCC unroll 2
    for (int64_t k = 0; k < count; k++) {
        vf low = vload(panel + k * PANEL), high = vload(panel + k * PANEL + LANES);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            float part = x[i * stride + k];
            sum[i][0] += low * part;
            sum[i][1] += high * part;
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        float *y = a->y + (m + i) * a->y_stride;
        leave(a, n, y, sum[i][0], k0 == 0);
        leave(a, n + LANES, y, sum[i][1], k0 == 0);
    }
}

static void tiles(const Matrix *a, int64_t n, int64_t start, int64_t end, int64_t k0, int64_t count,
                  const float *panel, const float *x, int64_t stride) {
    int64_t m = start;
    for (; m + TILE <= end; m += TILE) tile(a, TILE, n, m, k0, count, panel, x, stride);
    for (; m + 4 <= end; m += 4) tile(a, 4, n, m, k0, count, panel, x, stride);
    for (; m < end; m++) tile(a, 1, n, m, k0, count, panel, x, stride);
}

void constate_panels(const Matrix *a, int thread, int threads) {
    int64_t stride;
    const float *x = entering(a, &stride);
    int64_t count = (a->out + PANEL - 1) / PANEL, cuts = 1;
    while (count * cuts < 8 * threads && cuts * 4 * TILE < a->rows) cuts++; /* so that all have work */
    float *panel = scratch(1, PANEL_K * PANEL);
    for (int64_t job = count * cuts * thread / threads; job < count * cuts * (thread + 1) / threads; job++) {
        int64_t n = job / cuts * PANEL, cut = job % cuts;
        int64_t start = a->rows * cut / cuts, end = a->rows * (cut + 1) / cuts;
        for (int64_t k0 = 0; k0 < a->in; k0 += PANEL_K) {
            int64_t width = a->in - k0 < PANEL_K ? a->in - k0 : PANEL_K;
            if (a->format == FLOAT32) fill(a, SIZE_FLOAT32, n, k0, width, panel);
            if (a->format == BFLOAT16) fill(a, SIZE_BFLOAT16, n, k0, width, panel);
            if (a->format == INT8) fill(a, SIZE_INT8, n, k0, width, panel);
            tiles(a, n, start, end, k0, width, panel, x, stride);
        }
    }
}
