/* The activations of MLPs and gates, by number: glue.py has the same. */
#ifndef CONSTATE_ACTIVATIONS_H
#define CONSTATE_ACTIVATIONS_H

#include <math.h>

#include "vec.h"

enum { SILU, GELU, GELU_TANH, RELU, RELU2, SIGMOID, LOG_SIGMOID, IDENTITY, TANH };

ALWAYS vf veach(float (*f)(float), vf x) {
    for (int i = 0; i < LANES; i++) x[i] = f(x[i]);
    return x;
}

static inline vf activated(vf x, int64_t kind) {
    vf positive = vmax(vset(0), x);
    switch (kind) {
    case SILU: return vsilu(x);
    case GELU: return 0.5f * x * (1 + veach(erff, x * 0.70710678118654752f));
    case GELU_TANH: return 0.5f * x * (1 + veach(tanhf, 0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case RELU: return positive;
    case RELU2: return positive * positive;
    case SIGMOID: return vsigmoid(x);
    case LOG_SIGMOID: return -vsoftplus(-x);
    case TANH: return veach(tanhf, x);
    default: return x;
    }
}

#endif
