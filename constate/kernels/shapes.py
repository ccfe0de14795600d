"""The checks that every op shares: tokens against spans, grouped heads, the state's shape, the decay's sign.

Knows shapes, dtypes and what a likely mistake looks like; computes nothing. Shape checks read no device
value and always run; checks of values cost a read of the tensor and run only where `checked=True` asks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..spans import Spans

GROUP = 64  # as many weights of a row share a scale, where they are int8


def tokens(spans: Spans, **tensors: Tensor | None) -> None:
    """Every named tensor holds `spans.total` packed tokens on axis 0; None is skipped."""
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.ndim < 2 or tensor.shape[0] != spans.total):
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}, but the spans hold {spans.total} tokens in {spans.rows} "
                f"rows: {name} is packed, ({spans.total}, ...); flatten(0, 1) packs (batch, time, ...)"
            )


def exactly(name: str, tensor: Tensor, *shape: int) -> None:
    """The tensor's shape, to the letter."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)}; {shape} is wanted")


def heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """`(hk, h)` of q, k (n, hk, dk) and v (n, h, dv), where value head j reads key head j // (h // hk)."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 3:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; (tokens, heads, dim) is wanted")
    if q.shape != k.shape:
        raise ValueError(f"q is {tuple(q.shape)} and k {tuple(k.shape)}: equal shapes are wanted")
    if q.shape[0] != v.shape[0]:
        raise ValueError(f"q holds {q.shape[0]} tokens and v {v.shape[0]}")
    hk, h = k.shape[1], v.shape[1]
    groups(hk, h, "value")
    return hk, h


def groups(hk: int, h: int, what: str) -> int:
    """How many of the `h` heads share one of the `hk` key heads."""
    if hk < 1 or h % hk:
        raise ValueError(f"{h} {what} heads cannot share {hk} key heads: {h} is not a multiple of {hk}")
    return h // hk


def state(name: str, tensor: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A scan's initial state as float32, zeros for None; axis 0 is the row. Never a copy of a float32 one."""
    if tensor is None:
        return torch.zeros(shape, dtype=torch.float32, device=like.device)
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)}; {shape} is wanted: axis 0 is the row, one a span"
            + (" (the last two axes are swapped)" if tuple(tensor.mT.shape) == shape else "")
        )
    return tensor.float()


def step_state(tensor: Tensor, shape: tuple[int, ...]) -> None:
    """The state that a step updates in place: its shape, and float32, since less drifts over many tokens."""
    exactly("state", tensor, *shape)
    if tensor.dtype != torch.float32:
        raise ValueError(f"state is {tensor.dtype}; a step updates a float32 state in place")


def log_decay(g: Tensor | None, n: int, h: int, dk: int | None = None, *, checked: bool = False) -> bool:
    """Whether the decay is a vector: g is (n, h), or where `dk` is given (n, h, dk); None is no decay.

    Raises ValueError for another shape and, checked, for a positive or NaN entry.
    """
    if g is None:
        return False
    vector = dk is not None and g.ndim == 3
    if tuple(g.shape) != ((n, h, dk) if vector else (n, h)):
        wanted = f"({n}, {h})" + (f" or ({n}, {h}, {dk})" if dk is not None else "")
        raise ValueError(f"log_decay is {tuple(g.shape)}; {wanted} is wanted, with the value heads on axis 1")
    if checked:
        _never_positive("log_decay", g)
    return vector


def _never_positive(name: str, g: Tensor) -> None:
    if g.numel() and not bool((g <= 0).all()):
        raise ValueError(
            f"{name} holds {float(g.max())}: the log of a decay in [0, 1] is never positive, never NaN. "
            "A decay itself (0.9) was perhaps given where its log (-0.105) is wanted"
        )


def recurrence(x: Tensor, log_a: Tensor, n: int, *, checked: bool = False) -> int:
    """The channels of a linear recurrence over n tokens: x and log_a are both (n, channels); checked, a
    positive or NaN entry of log_a raises."""
    if x.ndim != 2 or x.shape[0] != n or x.shape != log_a.shape:
        raise ValueError(
            f"x is {tuple(x.shape)} and log_a {tuple(log_a.shape)}; both are wanted as ({n}, channels): "
            "heads are laid side by side, flatten(1) does it"
        )
    if checked:
        _never_positive("log_a", log_a)
    return x.shape[1]


def selective(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    spans: Spans,
    *,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    checked: bool = False,
) -> tuple[int, int]:
    """`(channels, s)` of a selective scan's arguments; checked, a positive entry of `a` raises."""
    tokens(spans, x=x)
    if x.ndim != 2 or a.ndim != 2:
        raise ValueError(
            f"x is {tuple(x.shape)} and a {tuple(a.shape)}; (n, channels), (channels, s) are wanted"
        )
    (n, channels), s = x.shape, a.shape[1]
    exactly("a", a, channels, s)
    for name, tensor, shape in (
        ("dt", dt, (n, channels)),
        ("b", b, (n, s)),
        ("c", c, (n, s)),
        ("d", d, (channels,)),
        ("z", z, (n, channels)),
        ("dt_bias", dt_bias, (channels,)),
    ):
        if tensor is not None:
            exactly(name, tensor, *shape)
    if checked and not bool((a <= 0).all()):
        raise ValueError(f"a holds {float(a.max())}: exp(delta a) is a decay, so a is never positive")
    return channels, s


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    spans: Spans,
    activation: str | None,
) -> Tensor:
    """A short convolution's arguments; returns its history (rows, w - 1, c), zeros in x's dtype for None."""
    tokens(spans, x=x)
    _conv_weights(x, weight, bias, activation)
    if initial is None:
        return x.new_zeros(spans.rows, weight.shape[1] - 1, weight.shape[0])
    exactly("initial", initial, spans.rows, weight.shape[1] - 1, weight.shape[0])
    return initial


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, activation: str | None
) -> None:
    """The same for one token a row."""
    _conv_weights(x, weight, bias, activation)
    exactly("history", history, x.shape[0], weight.shape[1] - 1, weight.shape[0])


def _conv_weights(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    if activation not in ("silu", None):
        raise ValueError(f"activation is {activation!r}; 'silu' or None is wanted")
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 1:
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}: (n, c) and (c, w) are wanted, w >= 1. "
            "A depthwise Conv1d's weight is (c, 1, w): squeeze its middle axis"
        )
    if bias is not None:
        exactly("bias", bias, weight.shape[0])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans,
    context: Spans,
    window: int | None,
    causal: bool,
    block: int,
) -> None:
    """Attention's arguments: heads, packing, and queries that are the last places of their context."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 3:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; (tokens, heads, dim) is wanted")
    tokens(spans, q=q)
    tokens(context, k=k, v=v)
    if k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise ValueError(f"q, k, v are {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}: dk or hk differ")
    groups(k.shape[1], q.shape[1], "query")
    if len(spans.lengths) != len(context.lengths):
        raise ValueError(f"{spans.rows} rows of queries, but {context.rows} of context")
    for row, (new, held) in enumerate(zip(spans.lengths, context.lengths, strict=True)):
        if new > held:
            raise ValueError(
                f"row {row} has {new} queries and {held} places of context: a context counts new tokens too"
            )
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window is {window} with causal={causal}: a window is causal and at least 1 wide")
    if block < 1 or (block > 1 and not (causal and window is None)):
        raise ValueError(
            f"block is {block} with causal={causal} and window={window}: a block has at least 1 place, and "
            "more than 1 only where attention is causal and has no window"
        )


def attention_step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, longest: int) -> None:
    """One query a row beside (rows, capacity, hk, dim) buffers."""
    rows, h, dk = q.shape
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or k.shape[0] != rows or k.shape[3] != dk:
        raise ValueError(
            f"q, k, v are {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}: (rows, h, dk), "
            "(rows, capacity, hk, dk) and (rows, capacity, hk, dv) are wanted"
        )
    groups(k.shape[2], h, "query")
    exactly("lengths", lengths, rows)
    if not 1 <= longest <= k.shape[1]:
        raise ValueError(f"longest is {longest}; the buffer holds 1 to {k.shape[1]} tokens")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, out: Tensor | None) -> None:
    """A product's arguments: widths, and scales beside int8 weights alone."""
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        swapped = weight.ndim == 2 and x.ndim > 0 and x.shape[-1] == weight.shape[0]
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}: (..., in) and (out, in) are wanted"
            + (" (the weight is transposed)" if swapped else "")
        )
    if bias is not None:
        exactly("bias", bias, weight.shape[0])
    if (weight.dtype == torch.int8) != (scales is not None):
        given = "no scales" if scales is None else "scales"
        raise ValueError(f"weight is {weight.dtype} with {given}: int8 weights have scales, and no others do")
    if scales is not None:
        exactly("scales", scales, weight.shape[0], -(-weight.shape[1] // GROUP))
    if out is not None:
        exactly("out", out, *x.shape[:-1], weight.shape[0])


def rms_norm(x: Tensor, weight: Tensor, gate: Tensor | None, groups: int) -> None:
    """A norm's arguments: one weight a channel, a gate of x's shape, slices of equal width."""
    if x.ndim < 2:
        raise ValueError(f"x is {tuple(x.shape)}: (..., width) with at least one axis before it is wanted")
    width = x.shape[-1]
    exactly("weight", weight, width)
    if gate is not None and gate.shape != x.shape:
        raise ValueError(f"gate is {tuple(gate.shape)} and x {tuple(x.shape)}: the same shape is wanted")
    if groups < 1 or width % groups:
        raise ValueError(f"{groups} groups of {width} channels: a number that divides them is wanted")
