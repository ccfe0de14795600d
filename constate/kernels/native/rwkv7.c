/* What RWKV-7 makes of a token around its products and its scan: the mixtures with the token before, the
 * operands of the delta rule, the norm, bonus and gate of what it reads. */
#include <math.h>

#include "tape.h"
#include "vec.h"

/* o[i] = x + (before - x) mix[i]; x is then what was before. */
typedef struct {
    const float *x, *mix; /* mix (count, width) */
    void *before;         /* (rows, width), float32 or bfloat16 */
    float *o;             /* (count, rows, width) */
    int64_t rows, width, count, x_stride, bf16;
} Mixtures;
const int64_t size_Mixtures = sizeof(Mixtures);

void mixtures(const void *args, int thread, int threads) {
    const Mixtures *a = args;
    int64_t first, last, parts = (a->width + LANES - 1) / LANES;
    share(a->rows * parts, thread, threads, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        int64_t row = unit / parts, i = unit % parts * LANES, left = a->width - i, at = row * a->width + i;
        uint16_t *half = (uint16_t *)a->before + at;
        float *whole = (float *)a->before + at;
        vf x = vload_part(a->x + row * a->x_stride + i, left);
        vf apart = (a->bf16 ? vload_bf16_part(half, left) : vload_part(whole, left)) - x;
        for (int64_t n = 0; n < a->count; n++)
            vstore_part(a->o + n * a->rows * a->width + at, x + apart * vload_part(a->mix + n * a->width + i, left), left);
        if (a->bf16)
            vstore_bf16_part(half, x, left);
        else
            vstore_part(whole, x, left);
    }
}

/* In place: `decay`'s and `rate`'s projections become the log-decay and what removal writes, kappa rate; k
 * becomes the key, v its mixture with the first layer's by sigmoid(share); `reads` is -kappa. */
typedef struct {
    float *decay, *rate, *k, *v, *reads;
    const float *share, *first, *kappa_scale, *rate_share; /* share and first (rows, h dv), or NULL */
    int64_t rows, h, dk, dv, key_stride, value_stride;
    float strongest, eps;
} DeltaOperands;
const int64_t size_DeltaOperands = sizeof(DeltaOperands);

void delta_operands(const void *args, int thread, int threads) {
    const DeltaOperands *a = args;
    for (int64_t unit = thread; unit < a->rows * a->h; unit += threads) {
        int64_t row = unit / a->h, own = unit % a->h * a->dk, at = row * a->key_stride + own;
        int64_t value = row * a->value_stride + unit % a->h * a->dv;
        float *decay = a->decay + at, *rate = a->rate + at, *k = a->k + at, *reads = a->reads + at;
        vf squares = vset(0);
        for (int64_t i = 0; i < a->dk; i += LANES) {
            vf kappa = vload_part(k + i, a->dk - i) * vload_part(a->kappa_scale + own + i, a->dk - i);
            squares += kappa * kappa;
        }
        float by = 1 / sqrtf(vsum(squares) + a->eps);
        for (int64_t i = 0; i < a->dk; i += LANES) {
            int64_t left = a->dk - i;
            vf key = vload_part(k + i, left), share = vsigmoid(vload_part(rate + i, left));
            vf kappa = key * vload_part(a->kappa_scale + own + i, left) * by;
            vstore_part(decay + i, a->strongest * vsigmoid(vload_part(decay + i, left)), left);
            vstore_part(reads + i, -kappa, left);
            vstore_part(rate + i, kappa * share, left);
            vstore_part(k + i, key * (1 + (share - 1) * vload_part(a->rate_share + own + i, left)), left);
        }
        for (int64_t i = 0; a->share && i < a->dv; i += LANES) {
            vf v = vload_part(a->v + value + i, a->dv - i), by = vsigmoid(vload_part(a->share + value + i, a->dv - i));
            vstore_part(a->v + value + i, v + by * (vload_part(a->first + value + i, a->dv - i) - v), a->dv - i);
        }
    }
}

/* o = (groupnorm(o) + bonus v) gate, the bonus of a head its sum of r k bonus; in place. */
typedef struct {
    float *o;
    const float *r, *k, *v, *gate, *weight, *bias, *bonus; /* bonus (h, dk) */
    int64_t rows, h, dk, dv, key_stride, value_stride;
    float eps;
} DeltaLeave;
const int64_t size_DeltaLeave = sizeof(DeltaLeave);

void delta_leave(const void *args, int thread, int threads) {
    const DeltaLeave *a = args;
    for (int64_t unit = thread; unit < a->rows * a->h; unit += threads) {
        int64_t row = unit / a->h, head = unit % a->h, key = row * a->key_stride + head * a->dk, own = head * a->dv;
        const float *r = a->r + key, *k = a->k + key, *bonus = a->bonus + head * a->dk;
        float *o = a->o + row * a->value_stride + own, mean;
        vf said = vset(0), sum = vset(0), squares = vset(0);
        for (int64_t i = 0; i < a->dk; i += LANES)
            said += vload_part(r + i, a->dk - i) * vload_part(k + i, a->dk - i) * vload_part(bonus + i, a->dk - i);
        for (int64_t i = 0; i < a->dv; i += LANES) sum += vload_part(o + i, a->dv - i);
        mean = vsum(sum) / (float)a->dv;
        for (int64_t i = 0; i < a->dv; i += LANES) {
            vstore_part(o + i, vload_part(o + i, a->dv - i) - mean, a->dv - i);
            vf part = vload_part(o + i, a->dv - i);
            squares += part * part;
        }
        float by = 1 / sqrtf(vsum(squares) / (float)a->dv + a->eps), more = vsum(said);
        for (int64_t i = 0; i < a->dv; i += LANES) {
            int64_t left = a->dv - i, at = row * a->value_stride + own + i;
            vf y = vload_part(o + i, left) * by * vload_part(a->weight + own + i, left) + vload_part(a->bias + own + i, left);
            vstore_part(o + i, (y + more * vload_part(a->v + at, left)) * vload_part(a->gate + at, left), left);
        }
    }
}
