/* S <- diag(exp(g)) S + b (a^T S)^T + k v^T,  o = scale S^T q, where a reads the state before its decay:
 * diagonal plus low rank, RWKV-7's recurrence, by blocks of tokens (lanes.h). What a token's `a` reads it
 * writes at b: that is a second value u beside v, which depends on what the block's tokens before wrote. */
#include "lanes.h"
#include "tape.h"

typedef struct {
    const float *q, *k, *v, *log_decay, *a, *b;
    float *state, *o;
    const int64_t *offsets;
    int64_t rows, hk, h, dk, dv, q_stride, k_stride, v_stride, decay_stride, a_stride, b_stride, o_stride;
    int64_t decay_kind; /* 0 none, 1 a head, 2 a channel */
    float scale;
} DplrDelta;
const int64_t size_DplrDelta = sizeof(DplrDelta);

typedef struct {
    Between between;
    Row reads[2 * BLOCK], writes[2 * BLOCK]; /* reads of a, then of q; writes at b, then at k */
    Pairs ab, ak, qb, qk;
} Scratch;

ALWAYS void columns(const DplrDelta *a, const Scratch *m, int64_t t, int64_t head, int64_t lane,
                    const Columns *c, const int count, const int vectors, const int part) {
    vf x[2 * BLOCK][2], y[2 * BLOCK][2];
    const float *v = a->v + t * a->v_stride + head * a->dv + lane;
    float *o = a->o + t * a->o_stride + head * a->dv + lane;
    look(c, m->reads, y, 2 * count, vectors, part);
#pragma GCC unroll 4
    for (int r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) {
            vf u = y[r][j], sum = y[count + r][j];
#pragma GCC unroll 4
            for (int s = 0; s < r; s++) u += m->ab[r][s] * x[s][j] + m->ak[r][s] * x[count + s][j];
            x[r][j] = u;
            x[count + r][j] = column_load(v + r * a->v_stride, j, c->width, vectors, part);
#pragma GCC unroll 4
            for (int s = 0; s <= r; s++) sum += m->qb[r][s] * x[s][j] + m->qk[r][s] * x[count + s][j];
            column_store(o + r * a->o_stride, sum * a->scale, j, c->width, vectors, part);
        }
    put(c, m->between.kept, m->writes, x, 2 * count, vectors, part);
}

ALWAYS void block(const DplrDelta *p, Scratch *m, int64_t t, const Unit *u, const int count) {
    int64_t key = u->head / (p->h / p->hk) * p->dk, own = u->head * p->dk, wide = p->decay_kind == 2;
    const float *q = p->q + t * p->q_stride + key, *k = p->k + t * p->k_stride + key;
    const float *a = p->a + t * p->a_stride + own, *b = p->b + t * p->b_stride + own;
    const float *g = p->log_decay ? p->log_decay + t * p->decay_stride + (wide ? own : u->head) : 0;
    if (count == BLOCK) {
        ahead(q, p->q_stride, p->dk);
        ahead(k, p->k_stride, p->dk);
        ahead(a, p->a_stride, p->dk);
        ahead(b, p->b_stride, p->dk);
        if (wide) ahead(g, p->decay_stride, p->dk);
        ahead(p->v + t * p->v_stride + u->head * p->dv + u->from, p->v_stride, u->to - u->from);
        ahead(p->o + t * p->o_stride + u->head * p->dv + u->from, p->o_stride, u->to - u->from);
    }
    between(&m->between, g, p->decay_stride, (int)wide, p->dk, count);
    queries(&m->between, a, p->a_stride, b, p->b_stride, m->reads, m->ab, 1, count);
    queries(&m->between, a, p->a_stride, k, p->k_stride, m->reads, m->ak, 1, count);
    queries(&m->between, q, p->q_stride, b, p->b_stride, m->reads + count, m->qb, 0, count);
    queries(&m->between, q, p->q_stride, k, p->k_stride, m->reads + count, m->qk, 0, count);
    keys(&m->between, b, p->b_stride, m->writes, count);
    keys(&m->between, k, p->k_stride, m->writes + count, count);
    EACH_COLUMNS(u, TOGETHER(2 * BLOCK), columns(p, m, t, u->head, lane, &c, count, vectors, part))
}

static void unit(const void *args, const Unit *u) {
    const DplrDelta *a = args;
    Scratch m;
    int64_t t = u->begin;
    for (; t + BLOCK <= u->end; t += BLOCK) block(a, &m, t, u, BLOCK);
    for (; t < u->end; t++) block(a, &m, t, u, 1);
}

void dplr_delta(const void *args, int thread, int threads) {
    const DplrDelta *a = args;
    States s = {a->state, a->offsets, a->rows, a->h, a->dk, a->dv};
    units(&s, unit, args, thread, threads);
}
