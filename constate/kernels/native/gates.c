/* What single families make of their projections before a scan and after it: gates, features, operands. Each
 * is a few thousand numbers a row that PyTorch would take a dozen calls for. */
#include <math.h>

#include "activations.h"
#include "tape.h"
#include "vec.h"

ALWAYS vf vroot(vf x) {
    float lane[LANES];
    vstore(lane, x);
    for (int i = 0; i < LANES; i++) lane[i] = sqrtf(lane[i]);
    return vload(lane);
}

/* 1 - e^x for x <= 0, right to the last digits near 0. */
ALWAYS vf lost(vf x) {
    vf p = vset(1);
    for (int n = 9; n > 1; n--) p = 1 + p * x / (float)n;
    return vselect((vi)(x > -0.5f), -x * p, 1 - vexp(x));
}

/* RG-LRU: from its gates what a token adds, i x sqrt(1 - a^2), all of i x for a row's first, and log a. */
typedef struct {
    const float *gates, *x, *rate; /* gates (rows, heads, 2, block): inputs', recurrence's; rate (heads block) < 0 */
    const int64_t *past;
    float *fed, *log_a;
    int64_t rows, heads, block, gates_stride, x_stride, o_stride;
    float least;
} RealGate;
const int64_t size_RealGate = sizeof(RealGate);

void real_gate(const void *args, int thread, int threads) {
    const RealGate *a = args;
    int64_t first, last;
    share(a->rows * a->heads, thread, threads, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        int64_t row = unit / a->heads, head = unit % a->heads, from = head * a->block;
        const float *gates = a->gates + row * a->gates_stride + 2 * from, *x = a->x + row * a->x_stride + from;
        float *fed = a->fed + row * a->o_stride + from, *log_a = a->log_a + row * a->o_stride + from;
        for (int64_t i = 0; i < a->block; i += LANES) {
            int64_t left = a->block - i;
            vf g = vload_part(a->rate + from + i, left) * vsigmoid(vload_part(gates + a->block + i, left));
            vf kept = vload_part(x + i, left) * vsigmoid(vload_part(gates + i, left));
            if (a->past[row]) kept *= vroot(vmax(vset(a->least), lost(2 * g)));
            vstore_part(log_a + i, g, left);
            vstore_part(fed + i, kept, left);
        }
    }
}

/* A forget gate b + (1 - b) sigmoid(x): its logarithm, and what it leaves over. `bound` (width) or NULL for
 * b = 0, and its logarithm. */
typedef struct {
    const float *x, *bound, *log_bound;
    float *decay, *key;
    int64_t rows, width, x_stride, o_stride;
} Forget;
const int64_t size_Forget = sizeof(Forget);

void forget(const void *args, int thread, int threads) {
    const Forget *a = args;
    int64_t first, last, parts = (a->width + LANES - 1) / LANES;
    share(a->rows * parts, thread, threads, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        int64_t row = unit / parts, i = unit % parts * LANES, left = a->width - i, to = row * a->o_stride + i;
        vf x = vload_part(a->x + row * a->x_stride + i, left), decay = -vsoftplus(-x), key = vsigmoid(-x);
        if (a->bound) { /* log((1 + b e^-x) / (1 + e^-x)) */
            decay = vmin(vset(0), vsoftplus(vload_part(a->log_bound + i, left) - x) + decay);
            key *= 1 - vload_part(a->bound + i, left);
        }
        vstore_part(a->decay + to, decay, left);
        vstore_part(a->key + to, key, left);
    }
}

enum { ELU = 100, TAYLOR };             /* feature maps beside the activations */
enum { PLAIN, SUM, ABSOLUTE, LENGTH };  /* what a head's features are divided by */

/* Each head's features, normed, and behind them `ones` ones; a head of x serves `group` heads of the output. */
typedef struct {
    const float *x;
    float *o;
    int64_t rows, heads, size, group, ones, kind, norm, x_stride, o_stride; /* `heads` of x, `size` channels each */
    float eps;
} Features;
const int64_t size_Features = sizeof(Features);

static int64_t width_of(const Features *a) {
    return a->kind == TAYLOR ? 1 + a->size + a->size * (a->size + 1) / 2 : a->size;
}

static void taylor(const float *x, float *o, int64_t n) {
    float by = 1 / sqrtf(sqrtf((float)n));
    *o++ = 1;
    for (int64_t i = 0; i < n; i++) o[i] = by * x[i];
    const float *y = o;
    o += n;
    for (int64_t i = 0; i < n; i++) {
        *o++ = y[i] * y[i] * 0.70710678118654752f;
        for (int64_t j = i + 1; j < n; j++) *o++ = y[i] * y[j];
    }
}

static float total(const float *x, int64_t n, int64_t norm) {
    vf sum = vset(0);
    for (int64_t i = 0; i < n; i += LANES) {
        vf part = vload_part(x + i, n - i);
        sum += norm == SUM ? part : norm == ABSOLUTE ? vabs(part) : part * part;
    }
    return vsum(sum);
}

void features(const void *args, int thread, int threads) {
    const Features *a = args;
    int64_t first, last, width = width_of(a), whole = width + a->ones;
    share(a->rows * a->heads, thread, threads, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        int64_t row = unit / a->heads, head = unit % a->heads;
        const float *x = a->x + row * a->x_stride + head * a->size;
        float *o = a->o + row * a->o_stride + head * a->group * whole;
        if (a->kind == TAYLOR) taylor(x, o, a->size);
        for (int64_t i = 0; a->kind != TAYLOR && i < width; i += LANES) {
            vf part = vload_part(x + i, width - i);
            vf mapped = a->kind == ELU ? vselect((vi)(part > 0), part + 1, vexp(part)) : activated(part, a->kind);
            vstore_part(o + i, mapped, width - i);
        }
        if (a->norm) {
            float sum = total(o, width, a->norm);
            if (a->norm == SUM) sum += a->eps;
            if (a->norm == ABSOLUTE) sum = sum < a->eps ? a->eps : sum;
            if (a->norm == LENGTH) sum = sqrtf(sum + a->eps);
            for (int64_t i = 0; i < width; i++) o[i] /= sum;
        }
        for (int64_t i = width; i < whole; i++) o[i] = 1;
        for (int64_t copy = 1; copy < a->group; copy++) memcpy(o + copy * whole, o, (size_t)whole * sizeof(float));
    }
}

/* Each head's channels over the one behind them. */
typedef struct {
    const float *x;
    float *o;
    int64_t rows, heads, size, x_stride, o_stride;
    float eps;
} Divide;
const int64_t size_Divide = sizeof(Divide);

void divide(const void *args, int thread, int threads) {
    const Divide *a = args;
    for (int64_t unit = thread; unit < a->rows * a->heads; unit += threads) {
        int64_t row = unit / a->heads, head = unit % a->heads;
        const float *x = a->x + row * a->x_stride + head * (a->size + 1);
        float *o = a->o + row * a->o_stride + head * a->size;
        for (int64_t i = 0; i < a->size; i++) o[i] = x[i] / (x[a->size] + a->eps);
    }
}
