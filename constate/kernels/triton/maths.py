"""Functions of numbers that several kernels share, as device functions on float32 tensors. Knows no op."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x) to the last digits wherever it lies, e^x for very negative x.

    With u = e^-|x| in (0, 1] it is max(x, 0) + log(1 + u), and log(1 + u) = 2 artanh(u / (2 + u)), a series
    in a square of at most 1/9: a hardware logarithm near 1 keeps an absolute error only, which a rate of
    1e6 behind a step of 1e-9 would show.
    """
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    q = s * s
    series = 1 / 11 + q * (1 / 13)
    series = 1 / 9 + q * series
    series = 1 / 7 + q * series
    series = 1 / 5 + q * series
    series = 1 / 3 + q * series
    return tl.maximum(x, 0.0) + 2.0 * s * (1.0 + q * series)


@triton.jit
def compose(decay, added, later_decay, later_added):
    """Two steps of h -> decay h + added as one: what an associative scan of a recurrence combines."""
    return decay * later_decay, later_decay * added + later_added


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """The activations of MLPs, gates and feature maps, on float32."""
    if KIND == "silu":
        x = silu(x)
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_pytorch_tanh":
        x = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu":
        x = tl.maximum(x, 0.0)
    elif KIND == "relu2":
        x = tl.maximum(x, 0.0)
        x = x * x
    elif KIND == "sigmoid":
        x = sigmoid(x)
    elif KIND == "logsigmoid":
        x = -softplus(-x)
    elif KIND == "tanh":
        x = tanh(x)
    elif KIND == "elu":
        x = tl.where(x > 0.0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    return x
