"""The specification: every op as a plain loop over rows and tokens, float32, shapes asserted.

Slow on purpose; each body is the equation of its op, and every other backend is held to it. Knows
nothing of tiles or speed. Scans are pure and differentiable; steps update the state in place.
Layouts and letters: packed tokens `(n, h, dim)`, `spans` says whose they are, states `(rows, ...)` float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from ..spans import Spans
from . import shapes


def _spread(x: Tensor, h: int) -> Tensor:
    """(..., hk, d) to (..., h, d) float32: value head j reads key head j // (h // hk)."""
    return x.float().repeat_interleave(h // x.shape[-2], dim=-2)


def _stack(outputs: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(outputs).to(like.dtype) if outputs else torch.zeros_like(like)


def _decay(g: Tensor | None, v: Tensor) -> Tensor:
    """exp(log_decay) shaped to multiply a (..., h, dk, dv) state: (..., h, 1 or dk, 1)."""
    if g is None:
        return v.new_ones((*v.shape[:-1], 1, 1), dtype=torch.float32)
    decay = g.float().exp()
    return decay[..., None] if g.ndim == v.ndim else decay[..., None, None]


def gated_linear_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial: Tensor | None,
    spans: Spans,
    *,
    scale: float = 1.0,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T,  o_t = scale S_t^T q_t.

    q, k (n, hk, dk), v (n, h, dv), log_decay (n, h) or (n, h, dk) or None, initial (rows, h, dk, dv).
    Returns o (n, h, dv) in v's dtype and final (rows, h, dk, dv) float32.
    """
    _, h = shapes.heads(q, k, v)
    n, dk, dv = v.shape[0], q.shape[2], v.shape[2]
    shapes.tokens(spans, q=q, k=k, v=v, log_decay=log_decay)
    shapes.log_decay(log_decay, n, h, dk, checked=checked)
    initial = shapes.state("initial", initial, (spans.rows, h, dk, dv), v)
    query, key, value, decay = _spread(q, h), _spread(k, h), v.float(), _decay(log_decay, v)
    outputs, finals = [], []
    for row, part in enumerate(spans.slices()):
        state = initial[row]
        for t in range(part.start, part.stop):
            state = decay[t] * state + key[t, :, :, None] * value[t, :, None, :]
            outputs.append(scale * (state * query[t, :, :, None]).sum(-2))
        finals.append(state)
    return _stack(outputs, v), torch.stack(finals)


def gated_linear_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor, *, scale: float = 1.0
) -> Tensor:
    """One token a row of `gated_linear_scan`: q, k (rows, hk, dk), v (rows, h, dv); state in place."""
    o, final = gated_linear_scan(q, k, v, log_decay, state, Spans.ones(v.shape[0], v.device), scale=scale)
    state.copy_(final)
    return o


def gated_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    initial: Tensor | None,
    spans: Spans,
    *,
    scale: float = 1.0,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """S' = exp(g_t) S_{t-1},  S_t = S' + k_t (beta_t (v_t - S'^T k_t))^T,  o_t = scale S_t^T q_t.

    Decays, then erases, then writes: Gated DeltaNet (Yang et al. 2024, eq. 10), and with a decay a channel
    Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692, eq. 1). log_decay (n, h), or (n, h, dk) on the key
    axis, or None; beta (n, h); the rest as in `gated_linear_scan`.
    """
    _, h = shapes.heads(q, k, v)
    n, dk, dv = v.shape[0], q.shape[2], v.shape[2]
    shapes.tokens(spans, q=q, k=k, v=v, log_decay=log_decay, beta=beta)
    shapes.log_decay(log_decay, n, h, dk, checked=checked)
    shapes.exactly("beta", beta, n, h)
    initial = shapes.state("initial", initial, (spans.rows, h, dk, dv), v)
    query, key, value, decay = _spread(q, h), _spread(k, h), v.float(), _decay(log_decay, v)
    write = beta.float()
    outputs, finals = [], []
    for row, part in enumerate(spans.slices()):
        state = initial[row]
        for t in range(part.start, part.stop):
            state = decay[t] * state
            seen = (state * key[t, :, :, None]).sum(-2)
            state = state + key[t, :, :, None] * (write[t, :, None] * (value[t] - seen))[:, None, :]
            outputs.append(scale * (state * query[t, :, :, None]).sum(-2))
        finals.append(state)
    return _stack(outputs, v), torch.stack(finals)


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
) -> Tensor:
    """One token a row of `gated_delta_scan`; state (rows, h, dk, dv) in place."""
    spans = Spans.ones(v.shape[0], v.device)
    o, final = gated_delta_scan(q, k, v, log_decay, beta, state, spans, scale=scale)
    state.copy_(final)
    return o


def dplr_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    a: Tensor,
    b: Tensor,
    initial: Tensor | None,
    spans: Spans,
    *,
    scale: float = 1.0,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp(g_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T,  o_t = scale S_t^T q_t.

    Diagonal plus low rank: `a` reads the state as it was before the decay. RWKV-7 (Peng et al. 2025, eq. 17)
    is q = r, a = -kappa, b = kappa * rate. A delta step with a decay a channel (decays, then erases, then
    writes) is a = exp(g) * k, b = -beta k, with beta k in the place of k. a, b, log_decay (n, h, dk), or
    log_decay (n, h) or None; the rest as in `gated_linear_scan`.
    """
    _, h = shapes.heads(q, k, v)
    n, dk, dv = v.shape[0], q.shape[2], v.shape[2]
    shapes.tokens(spans, q=q, k=k, v=v, log_decay=log_decay, a=a, b=b)
    shapes.log_decay(log_decay, n, h, dk, checked=checked)
    shapes.exactly("a", a, n, h, dk)
    shapes.exactly("b", b, n, h, dk)
    initial = shapes.state("initial", initial, (spans.rows, h, dk, dv), v)
    query, key, value, decay = _spread(q, h), _spread(k, h), v.float(), _decay(log_decay, v)
    read, write = a.float(), b.float()
    outputs, finals = [], []
    for row, part in enumerate(spans.slices()):
        state = initial[row]
        for t in range(part.start, part.stop):
            seen = (state * read[t, :, :, None]).sum(-2)
            state = decay[t] * state + write[t, :, :, None] * seen[:, None, :]
            state = state + key[t, :, :, None] * value[t, :, None, :]
            outputs.append(scale * (state * query[t, :, :, None]).sum(-2))
        finals.append(state)
    return _stack(outputs, v), torch.stack(finals)


def dplr_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
) -> Tensor:
    """One token a row of `dplr_delta_scan`; state (rows, h, dk, dv) in place."""
    spans = Spans.ones(v.shape[0], v.device)
    o, final = dplr_delta_scan(q, k, v, log_decay, a, b, state, spans, scale=scale)
    state.copy_(final)
    return o


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    initial: Tensor | None,
    spans: Spans,
    *,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """delta = softplus(dt + dt_bias),  h_t = exp(delta a) h_{t-1} + delta b x,  o = (h c + d x) silu(z).

    Mamba, Gu & Dao 2023, algorithm 2. x, dt, z (n, channels), a (channels, s) negative, b, c (n, s),
    d, dt_bias (channels,), initial (rows, channels, s). Returns o (n, channels) in x's dtype and final.
    """
    channels, s = shapes.selective(x, dt, a, b, c, spans, d=d, z=z, dt_bias=dt_bias, checked=checked)
    initial = shapes.state("initial", initial, (spans.rows, channels, s), x)
    fed, read, write = x.float(), c.float(), b.float()
    delta = softplus(dt.float() if dt_bias is None else dt.float() + dt_bias.float())
    outputs, finals = [], []
    for row, part in enumerate(spans.slices()):
        state = initial[row]
        for t in range(part.start, part.stop):
            decay = (delta[t, :, None] * a.float()).exp()
            state = decay * state + (delta[t] * fed[t])[:, None] * write[t]
            o = (state * read[t]).sum(-1)
            if d is not None:
                o = o + d.float() * fed[t]
            outputs.append(o if z is None else o * silu(z[t].float()))
        finals.append(state)
    return _stack(outputs, x), torch.stack(finals)


def selective_step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    *,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> Tensor:
    """One token a row of `selective_scan`; state (rows, channels, s) in place."""
    spans = Spans.ones(x.shape[0], x.device)
    o, final = selective_scan(x, dt, a, b, c, state, spans, d=d, z=z, dt_bias=dt_bias)
    state.copy_(final)
    return o


def linear_recurrence_scan(
    x: Tensor, log_a: Tensor, initial: Tensor | None, spans: Spans, *, checked: bool = False
) -> tuple[Tensor, Tensor]:
    """h_t = exp(log_a_t) h_{t-1} + x_t, every channel by itself; o is h.

    The recurrence of RG-LRU (De et al. 2024, Griffin, arXiv 2402.19427, eq. 4), whose gates are the caller's.
    x, log_a (n, channels), initial (rows, channels). Returns o (n, channels) in x's dtype, made of the
    float32 state before any rounding, and final (rows, channels) float32.
    """
    shapes.tokens(spans, x=x, log_a=log_a)
    channels = shapes.recurrence(x, log_a, spans.total, checked=checked)
    initial = shapes.state("initial", initial, (spans.rows, channels), x)
    fed, decay = x.float(), log_a.float().exp()
    outputs, finals = [], []
    for row, part in enumerate(spans.slices()):
        state = initial[row]
        for t in range(part.start, part.stop):
            state = decay[t] * state + fed[t]
            outputs.append(state)
        finals.append(state)
    return _stack(outputs, x), torch.stack(finals)


def linear_recurrence_step(x: Tensor, log_a: Tensor, state: Tensor) -> Tensor:
    """One token a row of `linear_recurrence_scan`; state (rows, channels) in place."""
    o, final = linear_recurrence_scan(x, log_a, state, Spans.ones(x.shape[0], x.device))
    state.copy_(final)
    return o


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    spans: Spans,
    *,
    activation: str | None = "silu",
) -> tuple[Tensor, Tensor]:
    """o_t = act(bias + sum_j weight[:, j] x_{t-w+1+j}), a causal depthwise convolution with its history.

    x (n, c), weight (c, w), bias (c,) or None, initial (rows, w - 1, c) oldest first in any dtype, None
    for zeros. Returns o (n, c) in x's dtype and final, the last w - 1 inputs, in initial's dtype.
    """
    initial = shapes.conv(x, weight, bias, initial, spans, activation)
    history = weight.shape[1] - 1
    outputs, finals = [], []
    for row, part in enumerate(spans.slices()):
        seen = list(initial[row])
        for t in range(part.start, part.stop):
            seen.append(x[t].to(initial.dtype))
            o = torch.zeros_like(x[t], dtype=torch.float32) if bias is None else bias.float()
            for j in range(history + 1):
                # The current token is read as it came, not through a history of another dtype.
                tap = x[t - history + j] if t - history + j >= part.start else seen[t - part.start + j]
                o = o + weight[:, j].float() * tap.float()
            outputs.append(silu(o) if activation == "silu" else o)
        finals.append(torch.stack(seen[len(seen) - history :]) if history else initial[row])
    return _stack(outputs, x), torch.stack(finals)


def short_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, *, activation: str | None = "silu"
) -> Tensor:
    """One token a row of `short_conv`; history (rows, w - 1, c) is shifted in place."""
    o, final = short_conv(x, weight, bias, history, Spans.ones(x.shape[0], x.device), activation=activation)
    history.copy_(final)
    return o


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans,
    context: Spans,
    *,
    window: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    block: int = 1,
) -> Tensor:
    """softmax(scale q k^T) v within each row; a row's queries are the last places of its context.

    q (n, h, dk) packed by spans, k (m, hk, dk) and v (m, hk, dv) by context. Causal: a query sees its
    own place and all before it, with `window` only its own and the window - 1 before; with `block` the
    rest of its block too, blocks of so many places being counted from the context's start. Returns
    (n, h, dv).
    """
    shapes.attention(q, k, v, spans, context, window, causal, block)
    h = q.shape[1]
    factor = q.shape[2] ** -0.5 if scale is None else scale
    key, value = _spread(k, h), _spread(v, h)
    outputs = []
    for part, held in zip(spans.slices(), context.slices(), strict=True):
        for t in range(part.start, part.stop):
            place = held.stop - part.stop + t
            end = held.stop
            if causal:
                end = min(end, held.start + ((place - held.start) // block + 1) * block)
            start = held.start if window is None else max(held.start, end - window)
            scores = factor * torch.einsum("hd,mhd->hm", q[t].float(), key[start:end])
            outputs.append(torch.einsum("hm,mhd->hd", scores.softmax(-1), value[start:end]))
    return _stack(outputs, q) if outputs else q.new_zeros((0, h, v.shape[2]))


def attention_step(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, longest: int, *, scale: float | None = None
) -> Tensor:
    """One query a row over the first `lengths[r]` places of its buffer, in any order.

    q (rows, h, dk), k (rows, capacity, hk, dk), v (rows, capacity, hk, dv), both already holding the new
    token; lengths (rows,) int64, longest their maximum on the host. Returns (rows, h, dv).
    """
    shapes.attention_step(q, k, v, lengths, longest)
    outputs = []
    for row, length in enumerate(lengths.tolist()):
        one, held = Spans.ones(1, q.device), Spans.of([length], q.device)
        outputs.append(attention(q[row : row + 1], k[row, :length], v[row, :length], one, held, scale=scale))
    return torch.cat(outputs)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = x W^T + b in float32, W = weight, or weight * scales where it is int8.

    x (..., in) and bias (out,) of any float dtype; weight (out, in) float, or int8 with scales (out,
    ceil(in / 64)) float32, one for each 64 weights of a row, the last group shorter where in is no multiple.
    Returns (..., out) in x's dtype; written to `out` where that is given, which may be a slice.
    """
    shapes.linear(x, weight, bias, scales, out)
    matrix = weight.float()
    if scales is not None:
        groups = torch.arange(weight.shape[1], device=weight.device) // shapes.GROUP
        matrix = matrix * scales[:, groups]
    y = x.float() @ matrix.mT
    y = y if bias is None else y + bias.float()
    return y.to(x.dtype) if out is None else out.copy_(y)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    gate: Tensor | None = None,
    groups: int = 1,
    gate_first: bool = False,
    sigmoid: bool = False,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over each of `groups` slices of the last axis, in float32.

    x and gate (..., width), weight (width,). A gate multiplies by silu(gate), or with `sigmoid` by its
    sigmoid: after the norm, or with `gate_first` before it (Zhang & Sennrich, 1910.07467; gated as in
    Mamba-2, Gated DeltaNet and KDA). Returns x's shape and dtype.
    """
    shapes.rms_norm(x, weight, gate, groups)
    factor = torch.ones_like(x, dtype=torch.float32)
    if gate is not None:
        factor = gate.float().sigmoid() * (1 if sigmoid else gate.float())
    y = x.float() * factor if gate_first else x.float()
    normed = [part / (part.square().mean(-1, keepdim=True) + eps).sqrt() for part in y.chunk(groups, dim=-1)]
    y = torch.cat(normed, dim=-1) * weight.float()
    return (y if gate_first else y * factor).to(x.dtype)
