/* One new token a row against the keys and values that a cache holds, (rows, capacity, hk, d), in float32 or
 * bfloat16.
 *
 * attend: CHUNK places at a time, the queries of one key head together, so that keys and values are read once
 * for all of them; exponents are taken below the chunk's largest score. combine: the chunks of each head, in
 * their order. A chunk is the same places however many threads there are, and so is every sum (flash-decoding,
 * Dao et al. 2023).
 * enter comes before both in a decode step: norm each head's query and key where asked, rotate them to their
 * position, write key and value to their place (t mod capacity: a buffer as wide as the window is a ring, one
 * that never fills is none). */
#include <math.h>

#include "tape.h"
#include "vec.h"

enum { CHUNK = 256, TOGETHER = 4 /* queries that share one read of a value */ };

typedef struct {
    const float *q;
    const void *k, *v;
    float *o, *partial; /* partial (rows, h, chunks, 2 + dv): largest score, sum, weighted values */
    const int64_t *lengths;
    int64_t rows, hk, h, dk, dv, capacity, chunks, q_stride, o_stride, k_row, k_place, v_row, v_place, bf16;
    int64_t more; /* lengths count the tokens before this many new ones */
    float scale;
} Attend;
const int64_t size_Attend = sizeof(Attend);

static int64_t held(const Attend *a, int64_t row) {
    int64_t length = a->lengths[row] + a->more;
    return length < a->capacity ? length : a->capacity;
}

ALWAYS vf read(const void *from, int64_t at, int64_t n, int bf16) {
    return bf16 ? vload_bf16_part((const uint16_t *)from + at, n) : vload_part((const float *)from + at, n);
}

ALWAYS float dot(const float *q, const void *k, int64_t at, int64_t d, int bf16) {
    vf sum = vset(0), other = vset(0);
    int64_t i = 0;
    for (; i + 2 * LANES <= d; i += 2 * LANES) {
        sum += vload(q + i) * read(k, at + i, LANES, bf16);
        other += vload(q + i + LANES) * read(k, at + i + LANES, LANES, bf16);
    }
    for (; i < d; i += LANES) sum += vload_part(q + i, d - i) * read(k, at + i, d - i, bf16);
    return vsum(sum + other);
}

/* out[j] = sum over places of p[j][place] v[place], for `many` queries, LANES channels (`n` of them real). */
ALWAYS void gather(const void *v, int64_t at, int64_t step, int64_t places, int64_t n, float p[][CHUNK],
                   int many, int bf16, float **out) {
    vf acc[TOGETHER];
    for (int j = 0; j < many; j++) acc[j] = vset(0);
    for (int64_t t = 0; t < places; t++) {
        vf value = read(v, at + t * step, n, bf16);
        for (int j = 0; j < many; j++) acc[j] += p[j][t] * value;
    }
    for (int j = 0; j < many; j++) vstore_part(out[j], acc[j], n);
}

/* Scores of `many` queries on `places` places into p, as exponentials below the largest, which goes to
 * out[j][0] and their sum to out[j][1]; the values that they weigh behind it. */
ALWAYS void together(const Attend *a, const float *q, int64_t k, int64_t v, int64_t places, int many, int bf16,
                     float **out) {
    float p[TOGETHER][CHUNK], *to[TOGETHER];
    for (int64_t t = 0; t < places; t++)
        for (int j = 0; j < many; j++)
            p[j][t] = a->scale * dot(q + j * a->dk, a->k, k + t * a->k_place, a->dk, bf16);
    for (int j = 0; j < many; j++) {
        float most = -INFINITY;
        for (int64_t t = 0; t < places; t++) most = p[j][t] > most ? p[j][t] : most;
        vf sum = vset(0);
        for (int64_t t = 0; t < places; t += LANES) {
            vf e = vexp(vload_part(p[j] + t, places - t) - most);
            vstore_part(p[j] + t, e, places - t);
            sum += vload_part(p[j] + t, places - t);
        }
        out[j][0] = most;
        out[j][1] = vsum(sum);
    }
    for (int64_t c = 0; c < a->dv; c += LANES) {
        for (int j = 0; j < many; j++) to[j] = out[j] + 2 + c;
        gather(a->v, v + c, a->v_place, places, a->dv - c, p, many, bf16, to);
    }
}

/* One chunk for the `cut`-th of `cuts` shares of a key head's queries. */
static void chunk(const Attend *a, int64_t row, int64_t head, int64_t index, int64_t cut, int64_t cuts) {
    int64_t group = a->h / a->hk, first = index * CHUNK, places = held(a, row) - first;
    if (places > CHUNK) places = CHUNK;
    int64_t k = row * a->k_row + first * a->k_place + head * a->dk;
    int64_t v = row * a->v_row + first * a->v_place + head * a->dv;
    for (int64_t g = cut * TOGETHER; g < group; g += cuts * TOGETHER) {
        int many = group - g < TOGETHER ? (int)(group - g) : TOGETHER;
        const float *q = a->q + row * a->q_stride + (head * group + g) * a->dk;
        float *out[TOGETHER];
        for (int j = 0; j < many; j++)
            out[j] = a->partial + ((row * a->h + head * group + g + j) * a->chunks + index) * (2 + a->dv);
        switch (many + (a->bf16 ? TOGETHER : 0)) { /* counts that the compiler knows keep sums in registers */
        case 1: together(a, q, k, v, places, 1, 0, out); break;
        case 2: together(a, q, k, v, places, 2, 0, out); break;
        case 3: together(a, q, k, v, places, 3, 0, out); break;
        case 4: together(a, q, k, v, places, 4, 0, out); break;
        case 5: together(a, q, k, v, places, 1, 1, out); break;
        case 6: together(a, q, k, v, places, 2, 1, out); break;
        case 7: together(a, q, k, v, places, 3, 1, out); break;
        default: together(a, q, k, v, places, 4, 1, out);
        }
    }
}

void attend(const void *args, int thread, int threads) {
    const Attend *a = args;
    int64_t unit = 0, parts = (a->h / a->hk + TOGETHER - 1) / TOGETHER;
    for (int64_t row = 0; row < a->rows; row++) {
        int64_t chunks = (held(a, row) + CHUNK - 1) / CHUNK;
        int64_t cuts = chunks * a->hk * a->rows < 4 * threads ? parts : 1; /* few: all have work */
        for (int64_t i = 0; i < chunks * a->hk * cuts; i++, unit++)
            if (unit % threads == thread) chunk(a, row, i / cuts % a->hk, i / cuts / a->hk, i % cuts, cuts);
    }
}

void combine(const void *args, int thread, int threads) {
    const Attend *a = args;
    for (int64_t unit = thread; unit < a->rows * a->h; unit += threads) {
        int64_t row = unit / a->h, chunks = (held(a, row) + CHUNK - 1) / CHUNK, width = 2 + a->dv;
        const float *part = a->partial + unit * a->chunks * width;
        float *o = a->o + row * a->o_stride + unit % a->h * a->dv;
        float most = -INFINITY, sum = 0;
        for (int64_t c = 0; c < chunks; c++) most = part[c * width] > most ? part[c * width] : most;
        for (int64_t i = 0; i < a->dv; i++) o[i] = 0;
        for (int64_t c = 0; c < chunks; c++, part += width) {
            float weight = chunks == 1 ? 1 : expf(part[0] - most);
            sum += weight * part[1];
            for (int64_t i = 0; i < a->dv; i++) o[i] += weight * part[2 + i];
        }
        for (int64_t i = 0; i < a->dv; i++) o[i] /= sum;
    }
}

typedef struct {
    float *qkv; /* (rows, (h + 2 hk) d): queries, keys, values; queries are left rotated in place */
    const float *q_norm, *k_norm, *turns; /* norms (d) or NULL; turns (rows, 2, rotated / 2): cos, sin; or NULL */
    void *k, *v;
    const int64_t *past;
    int64_t rows, hk, h, dk, dv, capacity, stride, rotated, k_row, k_place, v_row, v_place, bf16;
    float eps;
} Enter;
const int64_t size_Enter = sizeof(Enter);

static void normed(float *x, const float *weight, int64_t d, float eps) {
    float square = 0;
    for (int64_t i = 0; i < d; i++) square += x[i] * x[i];
    float by = 1 / sqrtf(square / (float)d + eps);
    for (int64_t i = 0; i < d; i++) x[i] *= by * weight[i];
}

static void turned(float *x, const float *cosine, const float *sine, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

static void put(void *to, int64_t at, const float *x, int64_t d, int bf16) {
    for (int64_t i = 0; i < d; i += LANES)
        if (bf16) vstore_bf16_part((uint16_t *)to + at + i, vload_part(x + i, d - i), d - i);
        else vstore_part((float *)to + at + i, vload_part(x + i, d - i), d - i);
}

void enter(const void *args, int thread, int threads) {
    const Enter *a = args;
    int64_t heads = a->h + 2 * a->hk, half = a->rotated / 2;
    for (int64_t unit = thread; unit < a->rows * heads; unit += threads) {
        int64_t row = unit / heads, head = unit % heads, place = a->past[row] % a->capacity;
        float *at = a->qkv + row * a->stride;
        if (head >= a->h + a->hk) {
            int64_t j = head - a->h - a->hk;
            const float *value = at + (a->h + a->hk) * a->dk + j * a->dv;
            put(a->v, row * a->v_row + place * a->v_place + j * a->dv, value, a->dv, (int)a->bf16);
            continue;
        }
        float *x = at + head * a->dk;
        const float *norm = head < a->h ? a->q_norm : a->k_norm;
        if (norm) normed(x, norm, a->dk, a->eps);
        if (a->turns) turned(x, a->turns + row * a->rotated, a->turns + row * a->rotated + half, half);
        if (head >= a->h) {
            int64_t j = head - a->h;
            put(a->k, row * a->k_row + place * a->k_place + j * a->dk, x, a->dk, (int)a->bf16);
        }
    }
}

typedef struct {
    const float *frequencies; /* (half) radians a position */
    float *turns;             /* (rows, 2, half) */
    const int64_t *past;
    int64_t rows, half;
    float factor;
} Turns;
const int64_t size_Turns = sizeof(Turns);

void turns(const void *args, int thread, int threads) {
    const Turns *a = args;
    for (int64_t unit = thread; unit < a->rows * a->half; unit += threads) {
        int64_t row = unit / a->half, i = unit % a->half;
        float angle = (float)a->past[row] * a->frequencies[i], *to = a->turns + row * 2 * a->half + i;
        to[0] = cosf(angle) * a->factor;
        to[a->half] = sinf(angle) * a->factor;
    }
}
