/* S' = exp(g) S,  S <- S' + k (beta (v - S'^T k))^T,  o = scale S^T q: the gated delta rule by blocks of
 * tokens (lanes.h). What a block's tokens write depends on what those before them wrote: a triangle of at
 * most BLOCK steps, each on whole vectors of columns (Yang et al. 2024, arXiv 2406.06484, at the size of
 * registers). */
#include "lanes.h"
#include "tape.h"

typedef struct {
    const float *q, *k, *v, *log_decay, *beta;
    float *state, *o;
    const int64_t *offsets;
    int64_t rows, hk, h, dk, dv, q_stride, k_stride, v_stride, decay_stride, beta_stride, o_stride;
    int64_t decay_kind; /* 0 none, 1 a head, 2 a channel */
    float scale;
} GatedDelta;
const int64_t size_GatedDelta = sizeof(GatedDelta);

typedef struct {
    Between between;
    Row reads[2 * BLOCK], writes[BLOCK]; /* reads: the keys' before the queries' */
    Pairs keys, queries;
} Scratch;

ALWAYS void columns(const GatedDelta *a, const Scratch *m, int64_t t, int64_t head, int64_t lane,
                    const Columns *c, const int count, const int vectors, const int part) {
    vf d[BLOCK][2], y[2 * BLOCK][2];
    const float *v = a->v + t * a->v_stride + head * a->dv + lane;
    const float *beta = a->beta + t * a->beta_stride + head;
    float *o = a->o + t * a->o_stride + head * a->dv + lane;
    look(c, m->reads, y, 2 * count, vectors, part);
#pragma GCC unroll 4
    for (int r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) {
            vf held = y[r][j], sum = y[count + r][j];
#pragma GCC unroll 4
            for (int s = 0; s < r; s++) held += m->keys[r][s] * d[s][j];
            held = column_load(v + r * a->v_stride, j, c->width, vectors, part) - held;
            d[r][j] = held * beta[r * a->beta_stride];
#pragma GCC unroll 4
            for (int s = 0; s <= r; s++) sum += m->queries[r][s] * d[s][j];
            column_store(o + r * a->o_stride, sum * a->scale, j, c->width, vectors, part);
        }
    put(c, m->between.kept, m->writes, d, count, vectors, part);
}

ALWAYS void block(const GatedDelta *a, Scratch *m, int64_t t, const Unit *u, const int count) {
    int64_t key = u->head / (a->h / a->hk) * a->dk, wide = a->decay_kind == 2;
    const float *q = a->q + t * a->q_stride + key, *k = a->k + t * a->k_stride + key;
    const float *g = a->log_decay ? a->log_decay + t * a->decay_stride + u->head * (wide ? a->dk : 1) : 0;
    if (count == BLOCK) {
        ahead(q, a->q_stride, a->dk);
        ahead(k, a->k_stride, a->dk);
        ahead(a->v + t * a->v_stride + u->head * a->dv + u->from, a->v_stride, u->to - u->from);
        ahead(a->o + t * a->o_stride + u->head * a->dv + u->from, a->o_stride, u->to - u->from);
        if (wide) ahead(g, a->decay_stride, a->dk);
    }
    between(&m->between, g, a->decay_stride, (int)wide, a->dk, count);
    queries(&m->between, k, a->k_stride, k, a->k_stride, m->reads, m->keys, 0, count);
    queries(&m->between, q, a->q_stride, k, a->k_stride, m->reads + count, m->queries, 0, count);
    keys(&m->between, k, a->k_stride, m->writes, count);
    EACH_COLUMNS(u, TOGETHER(2 * BLOCK), columns(a, m, t, u->head, lane, &c, count, vectors, part))
}

static void unit(const void *args, const Unit *u) {
    const GatedDelta *a = args;
    Scratch m;
    int64_t t = u->begin;
    for (; t + BLOCK <= u->end; t += BLOCK) block(a, &m, t, u, BLOCK);
    for (; t < u->end; t++) block(a, &m, t, u, 1);
}

void gated_delta(const void *args, int thread, int threads) {
    const GatedDelta *a = args;
    States s = {a->state, a->offsets, a->rows, a->h, a->dk, a->dv};
    units(&s, unit, args, thread, threads);
}
