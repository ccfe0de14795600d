/* S <- exp(g) S + k v^T,  o = scale S^T q: the gated linear recurrence by blocks of tokens (lanes.h). */
#include "lanes.h"
#include "tape.h"

typedef struct {
    const float *q, *k, *v, *log_decay;
    float *state, *o;
    const float *v_scale, *skip; /* NULL, or (n, h): v is multiplied by it; NULL, or (h): o += skip v */
    const int64_t *offsets;
    int64_t rows, hk, h, dk, dv, q_stride, k_stride, v_stride, decay_stride, o_stride, v_scale_stride;
    int64_t decay_kind; /* 0 none, 1 a head, 2 a channel */
    float scale;
} GatedLinear;
const int64_t size_GatedLinear = sizeof(GatedLinear);

typedef struct {
    Between between;
    Row reads[BLOCK], writes[BLOCK];
    Pairs seen;
} Scratch;

ALWAYS void columns(const GatedLinear *a, const Scratch *m, int64_t t, int64_t head, int64_t lane,
                    const Columns *c, const int count, const int vectors, const int part) {
    vf u[BLOCK][2], y[BLOCK][2];
    const float *v = a->v + t * a->v_stride + head * a->dv + lane;
    float *o = a->o + t * a->o_stride + head * a->dv + lane;
    look(c, m->reads, y, count, vectors, part);
#pragma GCC unroll 4
    for (int r = 0; r < count; r++) {
        float rate = a->v_scale ? a->v_scale[(t + r) * a->v_scale_stride + head] : 1.0f;
        float skip = a->skip ? a->skip[head] : 0.0f;
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) {
            vf value = column_load(v + r * a->v_stride, j, c->width, vectors, part), sum = y[r][j];
            u[r][j] = value * rate;
#pragma GCC unroll 4
            for (int s = 0; s <= r; s++) sum += m->seen[r][s] * u[s][j];
            sum *= a->scale;
            if (a->skip) sum += skip * value;
            column_store(o + r * a->o_stride, sum, j, c->width, vectors, part);
        }
    }
    put(c, m->between.kept, m->writes, u, count, vectors, part);
}

ALWAYS void block(const GatedLinear *a, Scratch *m, int64_t t, const Unit *u, const int count) {
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
    queries(&m->between, q, a->q_stride, k, a->k_stride, m->reads, m->seen, 0, count);
    keys(&m->between, k, a->k_stride, m->writes, count);
    EACH_COLUMNS(u, TOGETHER(BLOCK), columns(a, m, t, u->head, lane, &c, count, vectors, part))
}

static void unit(const void *args, const Unit *u) {
    const GatedLinear *a = args;
    Scratch m;
    int64_t t = u->begin;
    for (; t + BLOCK <= u->end; t += BLOCK) block(a, &m, t, u, BLOCK);
    for (; t < u->end; t++) block(a, &m, t, u, 1);
}

void gated_linear(const void *args, int thread, int threads) {
    const GatedLinear *a = args;
    States s = {a->state, a->offsets, a->rows, a->h, a->dk, a->dv};
    units(&s, unit, args, thread, threads);
}
