/* o_t = act(bias + sum_j weight[:, j] x_{t-w+1+j}): a causal depthwise convolution of few taps, lanes along
 * the channels, a few vectors of them at a time through all tokens of a row. Taps that reach before a row's
 * first token are read from its history, which is then replaced by its last inputs. */
#include "tape.h"
#include "vec.h"

typedef struct {
    const float *x, *weight, *bias; /* weight (channels, width), bias NULL or (channels) */
    void *history;                  /* (rows, width - 1, channels), oldest first, float32 or bfloat16 */
    float *o;
    const int64_t *offsets;
    int64_t rows, channels, width, x_stride, o_stride, silu, history_bf16;
} ShortConv;
const int64_t size_ShortConv = sizeof(ShortConv);

enum { WIDTH = 32 /* the most taps */, MANY = 4, TILE = MANY * LANES /* channels of a unit */ };

typedef struct {
    float weight[WIDTH][TILE], bias[TILE]; /* taps apart */
    float edge[2 * WIDTH][TILE];           /* the history, then the first tokens */
    int64_t channel, count;                /* the unit's channels; behind count lie zeros */
} Part;

static void history_load(const ShortConv *a, int64_t row, int64_t j, const Part *p, float *to) {
    int64_t at = (row * (a->width - 1) + j) * a->channels + p->channel;
    for (int64_t i = 0; i < p->count; i += LANES)
        vstore(to + i, a->history_bf16 ? vload_bf16_part((const uint16_t *)a->history + at + i, p->count - i)
                                       : vload_part((const float *)a->history + at + i, p->count - i));
}

static void history_store(const ShortConv *a, int64_t row, int64_t j, const Part *p, const float *from) {
    int64_t at = (row * (a->width - 1) + j) * a->channels + p->channel;
    for (int64_t i = 0; i < p->count; i += LANES) {
        vf x = vload_part(from + i, p->count - i);
        if (a->history_bf16)
            vstore_bf16_part((uint16_t *)a->history + at + i, x, p->count - i);
        else
            vstore_part((float *)a->history + at + i, x, p->count - i);
    }
}

/* One token: `x` is its oldest tap, `stride` numbers from one tap to the next. */
ALWAYS void taps(const Part *p, const float *x, int64_t stride, float *o, const int width, int silu,
                 const int whole) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < TILE; i += LANES) {
        int64_t left = p->count - i;
        if (!whole && left <= 0) break;
        vf sum = vload(p->bias + i);
#pragma GCC unroll 4
        for (int j = 0; j < width; j++) {
            const float *tap = x + j * stride + i;
            sum += vload(p->weight[j] + i) * (whole ? vload(tap) : vload_part(tap, left));
        }
        if (silu) sum = vsilu(sum);
        if (whole)
            vstore(o + i, sum);
        else
            vstore_part(o + i, sum, left);
    }
}

ALWAYS void row_of(const ShortConv *a, Part *p, int64_t row, const int width) {
    int64_t begin = a->offsets[row], tokens = a->offsets[row + 1] - begin, held = width - 1;
    int64_t first = tokens < held ? tokens : held, wide = p->count == TILE;
    const float *x = a->x + begin * a->x_stride + p->channel;
    float *o = a->o + begin * a->o_stride + p->channel;
    if (!tokens) return;
    for (int64_t j = 0; j < held; j++) history_load(a, row, j, p, p->edge[j]);
    for (int64_t t = 0; t < first; t++)
        for (int64_t i = 0; i < p->count; i += LANES)
            vstore(p->edge[held + t] + i, vload_part(x + t * a->x_stride + i, p->count - i));
    for (int64_t t = 0; t < first; t++)
        taps(p, p->edge[t], TILE, o + t * a->o_stride, width, (int)a->silu, 0);
    for (int64_t t = first; t < tokens; t++) {
        const float *oldest = x + (t - held) * a->x_stride;
        __builtin_prefetch(oldest + (held + 6) * a->x_stride);
        if (wide)
            taps(p, oldest, a->x_stride, o + t * a->o_stride, width, (int)a->silu, 1);
        else
            taps(p, oldest, a->x_stride, o + t * a->o_stride, width, (int)a->silu, 0);
    }
    for (int64_t j = 0; j < held; j++) {
        int64_t token = tokens + j - held;
        history_store(a, row, j, p, token < 0 ? p->edge[tokens + j] : x + token * a->x_stride);
    }
}

ALWAYS void tile(const ShortConv *a, int64_t channel, int64_t first, int64_t last, const int width) {
    Part p;
    p.channel = channel;
    p.count = a->channels - channel < TILE ? a->channels - channel : TILE;
    for (int j = 0; j < width; j++)
        for (int64_t i = 0; i < TILE; i++)
            p.weight[j][i] = i < p.count ? a->weight[(channel + i) * width + j] : 0.0f;
    for (int64_t i = 0; i < TILE; i++) p.bias[i] = a->bias && i < p.count ? a->bias[channel + i] : 0.0f;
    for (int64_t row = first; row < last; row++) row_of(a, &p, row, width);
}

void short_conv(const void *args, int thread, int threads) {
    const ShortConv *a = args;
    int64_t first, last, rows = a->rows, tiles = (a->channels + TILE - 1) / TILE;
    share(tiles * rows, thread, threads, &first, &last);
    while (first < last) { /* the rows of one tile at a time */
        int64_t at = first / rows, from = first % rows, to = from + last - first;
        if (to > rows) to = rows;
        if (a->width == 4)
            tile(a, at * TILE, from, to, 4);
        else
            tile(a, at * TILE, from, to, (int)a->width);
        first += to - from;
    }
}
