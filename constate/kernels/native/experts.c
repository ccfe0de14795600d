/* A mixture of experts for the few rows of a decode step: choose, then ask.
 *
 * choose scores and weighs as a router's options say, and sorts what is asked by expert, so that the rows that
 * ask one lie side by side and its weights are read once for (up to 16 of) them; with several rows `gather`
 * lays their inputs so too. experts_up and experts_down are products of those pieces: every thread makes its
 * share of each expert's outputs, the same share of all, so that activation and the weighed sum, which runs in
 * the order in which the router chose, wait for nobody. */
#include <math.h>

#include "activations.h"
#include "matrix.h"
#include "tape.h"
#include "vec.h"

typedef struct {
    float *logits;           /* (rows, experts): scores, afterwards */
    const float *correction; /* (experts), a say in the choice only, or NULL */
    float *appeal, *weights; /* appeal (rows, experts); weights (rows, chosen) */
    int64_t *chosen, *order, *place, *starts; /* (rows, chosen) experts; pairs by expert; where a pair then is;
                                                 starts (experts + 1) */
    int64_t rows, experts, per_token, groups, kept_groups, sigmoid, normalise;
    float scale;
} Choose;
const int64_t size_Choose = sizeof(Choose);

/* The `count` largest of n, best first, the earlier of equals first; NaNs are found somewhere, never twice. */
static void best(const float *values, int64_t n, int64_t count, int64_t *found) {
    int64_t held = 0;
    for (int64_t i = 0; i < n; i++) {
        if (held == count && !(values[i] > values[found[held - 1]])) continue;
        int64_t at = held < count ? held++ : held - 1;
        for (; at > 0 && values[i] > values[found[at - 1]]; at--) found[at] = found[at - 1];
        found[at] = i;
    }
}

static void scores(const Choose *a, float *x) {
    float most = -INFINITY;
    for (int64_t i = 0; i < a->experts; i++) most = x[i] > most ? x[i] : most;
    vf sum = vset(0);
    for (int64_t i = 0; i < a->experts; i += LANES) {
        int64_t left = a->experts - i;
        vf part = vload_part(x + i, left);
        vstore_part(x + i, a->sigmoid ? vsigmoid(part) : vexp(part - most), left);
        sum += vload_part(x + i, left);
    }
    float all = vsum(sum);
    for (int64_t i = 0; !a->sigmoid && i < a->experts; i++) x[i] /= all;
}

/* Minus infinity outside the groups whose best two promise most. */
static void within_groups(const Choose *a, float *appeal) {
    int64_t size = a->experts / a->groups, two[2], kept[a->kept_groups];
    float promise[a->groups];
    for (int64_t g = 0; g < a->groups; g++) {
        best(appeal + g * size, size, 2, two);
        promise[g] = appeal[g * size + two[0]] + appeal[g * size + two[1]];
    }
    best(promise, a->groups, a->kept_groups, kept);
    for (int64_t g = 0; g < a->groups; g++) {
        int out = 1;
        for (int64_t i = 0; i < a->kept_groups; i++) out &= kept[i] != g;
        for (int64_t i = 0; out && i < size; i++) appeal[g * size + i] = -INFINITY;
    }
}

static void sorted(const Choose *a) {
    int64_t pairs = a->rows * a->per_token;
    for (int64_t e = 0; e <= a->experts; e++) a->starts[e] = 0;
    for (int64_t p = 0; p < pairs; p++) a->starts[a->chosen[p] + 1]++;
    for (int64_t e = 0; e < a->experts; e++) a->starts[e + 1] += a->starts[e];
    for (int64_t p = 0; p < pairs; p++) {
        int64_t at = a->starts[a->chosen[p]]++;
        a->order[at] = p;
        a->place[p] = at;
    }
}

void choose(const void *args, int thread, int threads) {
    const Choose *a = args;
    for (int64_t row = thread; row < a->rows; row += threads) {
        float *x = a->logits + row * a->experts, *appeal = a->appeal + row * a->experts, sum = 0;
        float *weights = a->weights + row * a->per_token;
        int64_t *chosen = a->chosen + row * a->per_token;
        scores(a, x);
        for (int64_t i = 0; i < a->experts; i++) appeal[i] = x[i] + (a->correction ? a->correction[i] : 0);
        if (a->groups > 1) within_groups(a, appeal);
        best(appeal, a->experts, a->per_token, chosen);
        for (int64_t i = 0; i < a->per_token; i++) sum += weights[i] = x[chosen[i]];
        float by = a->normalise ? a->scale / (sum + 1e-20f) : a->scale;
        for (int64_t i = 0; i < a->per_token; i++) weights[i] *= by;
    }
    if (a->rows == 1 && thread == 0) sorted(a);
}

/* After `choose` for several rows. */
void sort_chosen(const void *args, int thread, int threads) {
    (void)threads;
    if (thread == 0) sorted(args);
}

typedef struct {
    const float *x; /* up: (rows, in), or of several rows (pairs, in) as gathered; down: (pairs, in) */
    const void *weight;
    const int64_t *chosen, *order, *place;
    const float *weights;      /* down: of the chosen */
    const float *beside, *gate; /* down: (rows, out), and (rows, 1) whose sigmoid weighs it; or NULL */
    float *inner, *more, *y;   /* up: (pairs, width) each; down: `more` (pairs, out), y (rows, out) */
    int64_t rows, per_token, in, out, x_stride, beside_stride, y_stride, gated, act, format, bytes;
} Ask; /* up: `out` is the width of an expert; `bytes`, those of one expert's weights */
const int64_t size_Ask = sizeof(Ask);

/* gathered[p] = the input of the p-th pair in order. */
void gather(const void *args, int thread, int threads) {
    const Ask *a = args;
    for (int64_t p = thread; p < a->rows * a->per_token; p += threads)
        memcpy(a->inner + p * a->in, a->x + a->order[p] / a->per_token * a->x_stride, (size_t)a->in * sizeof(float));
}

/* The product of every piece of pairs that ask one expert, with its weights from row `from` on, to y. */
static void pieces(const Ask *a, int64_t from, float *y, int thread, int threads) {
    int64_t pairs = a->rows * a->per_token, end, size = a->format ? 2 : 4;
    for (int64_t p = 0; p < pairs; p = end) {
        int64_t expert = a->chosen[a->order[p]];
        for (end = p + 1; end < pairs && end < p + FEW && a->chosen[a->order[end]] == expert;) end++;
        Matrix m = {0};
        m.weight = (const char *)a->weight + expert * a->bytes + from * a->in * size;
        m.x = a->x + p * a->x_stride;
        m.y = y + p * a->out;
        m.rows = end - p;
        m.in = a->in;
        m.out = a->out;
        m.x_stride = a->x_stride;
        m.y_stride = a->out;
        m.format = a->format;
        matrix(&m, thread, threads);
    }
}

void experts_up(const void *args, int thread, int threads) {
    const Ask *a = args;
    int64_t start, end;
    pieces(a, 0, a->inner, thread, threads);
    if (a->gated) pieces(a, a->out, a->more, thread, threads);
    matrix_share(a->out, thread, threads, &start, &end);
    for (int64_t p = 0; p < a->rows * a->per_token; p++)
        for (int64_t i = start; i < end; i += LANES) {
            float *y = a->inner + p * a->out + i;
            vf part = activated(vload_part(y, end - i), a->act);
            vstore_part(y, a->gated ? part * vload_part(a->more + p * a->out + i, end - i) : part, end - i);
        }
}

void experts_down(const void *args, int thread, int threads) {
    const Ask *a = args;
    int64_t start, end;
    pieces(a, 0, a->more, thread, threads);
    matrix_share(a->out, thread, threads, &start, &end);
    for (int64_t row = 0; row < a->rows; row++) {
        float gate = a->gate ? 1 / (1 + expf(-a->gate[row])) : 1;
        for (int64_t i = start; i < end; i += LANES) {
            vf sum = vset(0);
            for (int64_t k = row * a->per_token; k < (row + 1) * a->per_token; k++)
                sum += a->weights[k] * vload_part(a->more + a->place[k] * a->out + i, end - i);
            if (a->beside) sum += gate * vload_part(a->beside + row * a->beside_stride + i, end - i);
            vstore_part(a->y + row * a->y_stride + i, sum, end - i);
        }
    }
}
