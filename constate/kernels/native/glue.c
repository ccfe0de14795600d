/* What lies between the products and the scans of a decode step: residual additions, norms, gates. Each is a
 * few hundred numbers a row; a call of PyTorch's costs more than the arithmetic. Rows are cut by rows or by
 * heads, so that no sum is split between threads. */
#include <math.h>

#include "activations.h"
#include "tape.h"
#include "vec.h"

static float squares(const float *x, int64_t n) {
    vf sum = vset(0);
    for (int64_t i = 0; i < n; i += LANES) {
        vf part = vload_part(x + i, n - i);
        sum += part * part;
    }
    return vsum(sum);
}

/* o = x silu(gate), or x sigmoid(gate); o may be x. */
static void gated(const float *x, const float *gate, float *o, int64_t n, int64_t sigmoid) {
    for (int64_t i = 0; i < n; i += LANES) {
        vf by = vload_part(gate + i, n - i);
        by = sigmoid ? vsigmoid(by) : vsilu(by);
        vstore_part(o + i, vload_part(x + i, n - i) * by, n - i);
    }
}

/* x = keep kept + scale y, then o = norm(x) weight + bias. `kept` may be x itself. y NULL: x stays as it is;
 * o NULL: nothing is normed. */
typedef struct {
    float *x, *o;
    const float *kept, *y, *weight, *bias;
    int64_t rows, width, x_stride, kept_stride, y_stride, o_stride;
    int64_t centred; /* a layer norm, else an RMS norm */
    float keep, scale, eps;
} AddNorm;
const int64_t size_AddNorm = sizeof(AddNorm);

void add_norm(const void *args, int thread, int threads) {
    const AddNorm *a = args;
    for (int64_t row = thread; row < a->rows; row += threads) {
        float *x = a->x + row * a->x_stride, *o = a->o + row * a->o_stride;
        if (a->y) {
            const float *y = a->y + row * a->y_stride, *kept = a->kept + row * a->kept_stride;
            for (int64_t i = 0; i < a->width; i++) x[i] = a->keep * kept[i] + a->scale * y[i];
        }
        if (!a->o) continue;
        float mean = 0;
        if (a->centred) {
            for (int64_t i = 0; i < a->width; i++) mean += x[i];
            mean /= (float)a->width;
            for (int64_t i = 0; i < a->width; i++) o[i] = x[i] - mean;
        }
        const float *from = a->centred ? o : x;
        float by = 1 / sqrtf(squares(from, a->width) / (float)a->width + a->eps);
        for (int64_t i = 0; i < a->width; i++)
            o[i] = from[i] * by * (a->weight ? a->weight[i] : 1) + (a->bias ? a->bias[i] : 0);
    }
}

/* RMS norm of each of `groups` slices of x, gated by silu(gate) or a sigmoid, before or after it; gate NULL: no gate. The
 * weight is as wide as a slice (`shared`) or as all of them; NULL is 1. */
typedef struct {
    const float *x, *gate, *weight;
    float *o;
    int64_t rows, groups, size, x_stride, gate_stride, o_stride, shared, gate_first, sigmoid;
    float eps;
} GatedNorm;
const int64_t size_GatedNorm = sizeof(GatedNorm);

void gated_norm(const void *args, int thread, int threads) {
    const GatedNorm *a = args;
    int64_t first, last;
    share(a->rows * a->groups, thread, threads, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        int64_t row = unit / a->groups, from = unit % a->groups * a->size, n = a->size;
        const float *x = a->x + row * a->x_stride + from;
        const float *gate = a->gate ? a->gate + row * a->gate_stride + from : 0;
        const float *weight = a->weight ? a->weight + (a->shared ? 0 : from) : 0;
        float *o = a->o + row * a->o_stride + from;
        if (gate && a->gate_first) {
            gated(x, gate, o, n, a->sigmoid);
            x = o;
        }
        float by = 1 / sqrtf(squares(x, n) / (float)n + a->eps);
        for (int64_t i = 0; i < n; i++) o[i] = x[i] * by * (weight ? weight[i] : 1);
        if (gate && !a->gate_first) gated(o, gate, o, n, a->sigmoid);
    }
}

/* Each of `heads` slices of x divided, in place, by its length (the root of the sum of squares + eps). */
typedef struct {
    float *x;
    int64_t rows, heads, size, stride;
    float eps;
} Unit;
const int64_t size_Unit = sizeof(Unit);

void unit(const void *args, int thread, int threads) {
    const Unit *a = args;
    for (int64_t unit = thread; unit < a->rows * a->heads; unit += threads) {
        float *x = a->x + unit / a->heads * a->stride + unit % a->heads * a->size;
        float by = 1 / sqrtf(squares(x, a->size) + a->eps);
        for (int64_t i = 0; i < a->size; i++) x[i] *= by;
    }
}

/* dt = softplus(x + bias) within [low, high]; decay = -rate dt. One a head; either may be NULL. With a `bound`
 * below 0 the decay is bound sigmoid(rate (x + bias)), and nothing is dt. */
typedef struct {
    const float *x, *bias, *rate;
    float *dt, *decay;
    int64_t rows, heads, x_stride, o_stride;
    float low, high, bound;
} Decays;
const int64_t size_Decays = sizeof(Decays);

void decays(const void *args, int thread, int threads) {
    const Decays *a = args;
    int64_t first, last, parts = (a->heads + LANES - 1) / LANES;
    share(a->rows * parts, thread, threads, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        int64_t row = unit / parts, h = unit % parts * LANES, left = a->heads - h, to = row * a->o_stride + h;
        vf x = vload_part(a->x + row * a->x_stride + h, left) + vload_part(a->bias + h, left);
        vf rate = vload_part(a->rate + h, left);
        if (a->bound < 0) {
            vstore_part(a->decay + to, a->bound * vsigmoid(rate * x), left);
            continue;
        }
        vf dt = vmin(vset(a->high), vmax(vset(a->low), vsoftplus(x)));
        if (a->dt) vstore_part(a->dt + to, dt, left);
        if (a->decay) vstore_part(a->decay + to, -rate * dt, left);
    }
}

/* o = scale act(x), at least `low`, times, where there is one, y. */
typedef struct {
    const float *x, *y;
    float *o;
    int64_t rows, width, x_stride, y_stride, o_stride, kind;
    float scale, low;
} Activate;
const int64_t size_Activate = sizeof(Activate);

void activate(const void *args, int thread, int threads) {
    const Activate *a = args;
    int64_t share = ((a->width + LANES - 1) / LANES + threads - 1) / threads * LANES; /* whole vectors */
    int64_t from = share * thread, to = from + share < a->width ? from + share : a->width;
    for (int64_t row = 0; row < a->rows; row++) {
        const float *x = a->x + row * a->x_stride, *y = a->y ? a->y + row * a->y_stride : 0;
        float *o = a->o + row * a->o_stride;
        for (int64_t i = from; i < to; i += LANES) {
            vf value = vmax(vset(a->low), a->scale * activated(vload_part(x + i, to - i), a->kind));
            vstore_part(o + i, y ? value * vload_part(y + i, to - i) : value, to - i);
        }
    }
}
