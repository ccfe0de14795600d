/* y = x W, a small matrix for each head: what projects within heads, as latent attention and block-diagonal
 * gates do. Lanes lie along the outputs where a matrix is stored inputs first, along the inputs where outputs
 * come first; the cut falls between outputs, so that no sum is split between threads. */
#include "tape.h"
#include "vec.h"

typedef struct {
    const float *x, *bias; /* bias (heads, out) or NULL */
    const void *weight;    /* a head's matrix weight_head numbers behind the last one's, its rows side by side */
    float *y;
    int64_t rows, heads, in, out, x_stride, x_head, weight_head, y_stride, y_head;
    int64_t outputs_first, bf16; /* stored (out, in), else (in, out); in bfloat16, else float32 */
} Heads;
const int64_t size_Heads = sizeof(Heads);

enum { MANY = 4, TILE = MANY * LANES };

ALWAYS vf number(const Heads *a, int64_t at, int64_t n, const int bf16) {
    return bf16 ? vload_bf16_part((const uint16_t *)a->weight + at, n) : vload_part((const float *)a->weight + at, n);
}

/* `count` outputs from j on of one head, stored inputs first. */
ALWAYS void inputs_first(const Heads *a, int64_t head, int64_t j, int64_t count, const int bf16) {
    for (int64_t row = 0; row < a->rows; row++) {
        const float *x = a->x + row * a->x_stride + head * a->x_head;
        float *y = a->y + row * a->y_stride + head * a->y_head + j;
        int64_t at = head * a->weight_head + j;
        vf sum[MANY];
#pragma GCC unroll 4
        for (int i = 0; i < MANY; i++)
            sum[i] = a->bias ? vload_part(a->bias + head * a->out + j + i * LANES, count - i * LANES) : vset(0);
        for (int64_t k = 0; k < a->in; k++, at += a->out) {
#pragma GCC unroll 4
            for (int i = 0; i < MANY; i++) sum[i] += x[k] * number(a, at + i * LANES, count - i * LANES, bf16);
        }
#pragma GCC unroll 4
        for (int i = 0; i < MANY; i++) vstore_part(y + i * LANES, sum[i], count - i * LANES);
    }
}

/* The same, stored outputs first. */
ALWAYS void outputs_first(const Heads *a, int64_t head, int64_t j, int64_t count, const int bf16) {
    for (int64_t row = 0; row < a->rows; row++) {
        const float *x = a->x + row * a->x_stride + head * a->x_head;
        float *y = a->y + row * a->y_stride + head * a->y_head + j;
        for (int64_t i = 0; i < count; i++) {
            int64_t at = head * a->weight_head + (j + i) * a->in;
            vf even = vset(0), odd = vset(0);
            for (int64_t k = 0; k < a->in; k += 2 * LANES) {
                even += vload_part(x + k, a->in - k) * number(a, at + k, a->in - k, bf16);
                odd += vload_part(x + k + LANES, a->in - k - LANES) * number(a, at + k + LANES, a->in - k - LANES, bf16);
            }
            y[i] = vsum(even + odd) + (a->bias ? a->bias[head * a->out + j + i] : 0);
        }
    }
}

void heads(const void *args, int thread, int threads) {
    const Heads *a = args;
    int64_t first, last, tiles = (a->out + TILE - 1) / TILE;
    share(a->heads * tiles, thread, threads, &first, &last);
    for (int64_t n = first; n < last; n++) {
        int64_t head = n / tiles, j = n % tiles * TILE, count = a->out - j < TILE ? a->out - j : TILE;
        switch (2 * a->outputs_first + a->bf16) { /* what the compiler knows it need not ask */
        case 0: inputs_first(a, head, j, count, 0); break;
        case 1: inputs_first(a, head, j, count, 1); break;
        case 2: outputs_first(a, head, j, count, 0); break;
        default: outputs_first(a, head, j, count, 1);
        }
    }
}
