/* h <- exp(log_a) h + x, o = h: the elementwise recurrence. Channels know nothing of one another: lanes lie
 * along them, a few vectors of them walk through all tokens of a row with their states in the registers. */
#include "tape.h"
#include "vec.h"

typedef struct {
    const float *x, *log_a;
    float *state, *o; /* state (rows, channels) */
    const int64_t *offsets;
    int64_t rows, channels, x_stride, decay_stride, o_stride;
} LinearRecurrence;
const int64_t size_LinearRecurrence = sizeof(LinearRecurrence);

enum { MANY = 4, TILE = MANY * LANES /* channels of a unit: a cache line of each in flight */ };

ALWAYS void walk(const LinearRecurrence *a, int64_t row, int64_t channel, int64_t count, const int whole) {
    float *home = a->state + row * a->channels + channel;
    vf h[MANY];
#pragma GCC unroll 4
    for (int i = 0; i < MANY; i++)
        h[i] = whole ? vload(home + i * LANES) : vload_part(home + i * LANES, count - i * LANES);
    for (int64_t t = a->offsets[row]; t < a->offsets[row + 1]; t++) {
        const float *x = a->x + t * a->x_stride + channel, *g = a->log_a + t * a->decay_stride + channel;
        float *o = a->o + t * a->o_stride + channel;
#pragma GCC unroll 4
        for (int i = 0; i < MANY; i++) {
            int64_t left = whole ? LANES : count - i * LANES;
            if (!whole && left <= 0) break;
            vf add = whole ? vload(x + i * LANES) : vload_part(x + i * LANES, left);
            h[i] = vexp(whole ? vload(g + i * LANES) : vload_part(g + i * LANES, left)) * h[i] + add;
            if (whole)
                vstore(o + i * LANES, h[i]);
            else
                vstore_part(o + i * LANES, h[i], left);
        }
        __builtin_prefetch(x + 4 * a->x_stride);
        __builtin_prefetch(g + 4 * a->decay_stride);
    }
    for (int i = 0; i < MANY; i++)
        if (count > i * LANES) vstore_part(home + i * LANES, h[i], count - i * LANES);
}

void linear_recurrence(const void *args, int thread, int threads) {
    const LinearRecurrence *a = args;
    int64_t first, last;
    share((a->channels + TILE - 1) / TILE * a->rows, thread, threads, &first, &last);
    for (int64_t n = first; n < last; n++) { /* rows innermost: a long one falls to all threads alike */
        int64_t channel = n / a->rows * TILE, left = a->channels - channel;
        if (left >= TILE)
            walk(a, n % a->rows, channel, TILE, 1);
        else
            walk(a, n % a->rows, channel, left, 0);
    }
}
