/* delta = softplus(dt + dt_bias),  h <- exp(delta a) h + delta b x,  o = (h c + d x) silu(z): the selective
 * scan, token by token; every number of the state has a decay of its own, and its exponential is the work.
 *
 * A row of several tokens is walked a vector of channels at a time, lanes along the channels: what is summed
 * over the states is then summed within a lane, and states and rates stay close by, a row of LANES for each.
 * A single token would spend its time on turning the state round: there the lanes lie along the states, as
 * these lie in memory, and each channel ends in one sum across lanes. */
#include "tape.h"
#include "vec.h"

typedef struct {
    const float *x, *dt, *a, *b, *c, *d, *z, *dt_bias; /* a (channels, states); d, z, dt_bias may be NULL */
    float *state, *o;                                  /* state (rows, channels, states) */
    const int64_t *offsets;
    int64_t rows, channels, states, x_stride, dt_stride, b_stride, c_stride, z_stride, o_stride;
} Selective;
const int64_t size_Selective = sizeof(Selective);

enum { STATES = 256 /* the most states */ };

/* A vector of channels, `count` of which are real. */
typedef struct {
    int64_t row, channel, count;
    vf d, bias;
} Part;

ALWAYS vf delta_of(const Selective *a, const Part *p, int64_t t) {
    return vsoftplus(vload_part(a->dt + t * a->dt_stride + p->channel, p->count) + p->bias);
}

/* The skip and the gate, then to memory. */
ALWAYS void leave(const Selective *a, const Part *p, int64_t t, vf x, vf y) {
    y += p->d * x;
    if (a->z) y *= vsilu(vload_part(a->z + t * a->z_stride + p->channel, p->count));
    vstore_part(a->o + t * a->o_stride + p->channel, y, p->count);
}

ALWAYS void many(const Selective *a, const Part *p, const int states) {
    float h[STATES][LANES] __attribute__((aligned(64))), rate[STATES][LANES] __attribute__((aligned(64)));
    float *home = a->state + (p->row * a->channels + p->channel) * states;
    const float *rates = a->a + p->channel * states;
    for (int n = 0; n < states; n++)
        for (int64_t i = 0; i < LANES; i++) {
            h[n][i] = i < p->count ? home[i * states + n] : 0.0f;
            rate[n][i] = i < p->count ? rates[i * states + n] * 1.44269504f : 0.0f; /* for powers of two */
        }
    for (int64_t t = a->offsets[p->row]; t < a->offsets[p->row + 1]; t++) {
        const float *b = a->b + t * a->b_stride, *c = a->c + t * a->c_stride;
        vf x = vload_part(a->x + t * a->x_stride + p->channel, p->count), delta = delta_of(a, p, t);
        vf fed = delta * x, even = vset(0), odd = vset(0);
        __builtin_prefetch(a->x + (t + 4) * a->x_stride + p->channel);
        __builtin_prefetch(a->dt + (t + 4) * a->dt_stride + p->channel);
        if (a->z) __builtin_prefetch(a->z + (t + 4) * a->z_stride + p->channel);
        int n = 0;
#pragma GCC unroll 8
        for (; n + 2 <= states; n += 2) {
            vf one = vexp2(delta * vload(rate[n])) * vload(h[n]) + fed * b[n];
            vf two = vexp2(delta * vload(rate[n + 1])) * vload(h[n + 1]) + fed * b[n + 1];
            even += one * c[n];
            odd += two * c[n + 1];
            vstore(h[n], one);
            vstore(h[n + 1], two);
        }
        if (n < states) {
            vf one = vexp2(delta * vload(rate[n])) * vload(h[n]) + fed * b[n];
            even += one * c[n];
            vstore(h[n], one);
        }
        leave(a, p, t, x, even + odd);
    }
    for (int64_t i = 0; i < p->count; i++)
        for (int n = 0; n < states; n++) home[i * states + n] = h[n][i];
}

static void many_16(const Selective *a, const Part *p) { many(a, p, 16); }
static void many_any(const Selective *a, const Part *p) { many(a, p, (int)a->states); }

static void single(const Selective *a, const Part *p) {
    int64_t t = a->offsets[p->row], states = a->states;
    const float *b = a->b + t * a->b_stride, *c = a->c + t * a->c_stride, *rate = a->a + p->channel * states;
    float *h = a->state + (p->row * a->channels + p->channel) * states, y[LANES] = {0};
    vf x = vload_part(a->x + t * a->x_stride + p->channel, p->count), delta = delta_of(a, p, t);
    vf fed = delta * x;
    for (int64_t i = 0; i < p->count; i++, h += states, rate += states) {
        vf sum = vset(0);
        for (int64_t n = 0; n < states; n += LANES) {
            vf decay = vexp2(vload_part(rate + n, states - n) * (delta[i] * 1.44269504f));
            vf one = decay * vload_part(h + n, states - n) + vload_part(b + n, states - n) * fed[i];
            sum += one * vload_part(c + n, states - n);
            vstore_part(h + n, one, states - n);
        }
        y[i] = vsum(sum);
    }
    leave(a, p, t, x, vload(y));
}

void selective(const void *args, int thread, int threads) {
    const Selective *a = args;
    int64_t first, last, parts = (a->channels + LANES - 1) / LANES;
    share(parts * a->rows, thread, threads, &first, &last);
    for (int64_t n = first; n < last; n++) { /* rows innermost: a long one falls to all threads alike */
        Part p = {n % a->rows, n / a->rows * LANES, 0, {0}, {0}};
        int64_t tokens = a->offsets[p.row + 1] - a->offsets[p.row];
        p.count = a->channels - p.channel < LANES ? a->channels - p.channel : LANES;
        if (a->d) p.d = vload_part(a->d + p.channel, p.count);
        if (a->dt_bias) p.bias = vload_part(a->dt_bias + p.channel, p.count);
        if (tokens == 1)
            single(a, &p);
        else if (tokens && a->states == 16)
            many_16(a, &p);
        else if (tokens)
            many_any(a, &p);
    }
}
