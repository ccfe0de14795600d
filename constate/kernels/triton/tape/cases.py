"""What the tape's kernels become, for the compile table: the launches of layers that are taped here at a
published size. Knows no model, only the calls that one makes of a tape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..launch import Compiled, as_launched
from . import Tape

ROWS, WIDTH = 8, 256
"""Rows of a step, and the width of its matrices' inputs, which no kernel is compiled for."""


def compiled() -> Iterator[Compiled]:
    """One step of each kind of layer; what several launch is one case."""
    seen = set()
    for layer in (
        mamba2,
        gated_deltanet,
        gla,
        mamba,
        attention,
        latent,
        real,
        rwkv7,
        experts,
        linear_attention,
    ):
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            about = {"dtype": name, "note": f"step of {layer.__name__}", "default": name == "bf16"}
            for case in as_launched("step", taped(layer, dtype), **about):
                same = repr((case.kernel.__name__, case.signature, case.constants))
                if same not in seen:
                    seen.add(same)
                    yield case


def taped(layer: Callable[[Tape, Tensor, torch.dtype], Tensor], dtype: torch.dtype) -> Callable[[], None]:
    """A tape's first run: norm, the layer, and the product behind it."""
    tape = Tape(ROWS, torch.zeros(ROWS, dtype=torch.int64))
    x = tape.vector(WIDTH)
    said = layer(tape, tape.add_norm(x, None, torch.ones(WIDTH), 1e-5), dtype)
    product(tape, tape.add_norm(x, product(tape, said, WIDTH, dtype), torch.ones(WIDTH), 1e-5), 16, dtype)
    return tape.run


def product(tape: Tape, x: Tensor, out: int, dtype: torch.dtype) -> Tensor:
    y = tape.vector(out)
    tape.matrix(torch.zeros(out, x.shape[1], dtype=dtype), x, y)
    return y


def convolved(tape: Tape, x: Tensor, dtype: torch.dtype) -> Tensor:
    channels = x.shape[1]
    history = torch.zeros(ROWS, 3, channels, dtype=dtype)
    return tape.short_conv(x, torch.zeros(channels, 4), torch.zeros(channels), history, silu=True)


def mamba2(tape: Tape, x: Tensor, dtype: torch.dtype) -> Tensor:
    h, p, s = 32, 64, 128
    z, xbc, dt = product(tape, x, 2 * h * p + 2 * s + h, dtype).split([h * p, h * p + 2 * s, h], dim=1)
    dt, decay = tape.decays(dt, torch.zeros(h), torch.ones(h))
    v, b, c = convolved(tape, xbc, dtype).split([h * p, s, s], dim=1)
    state = torch.zeros(ROWS, h, s, p)
    o = tape.gated_linear(c, b, v, decay, state, heads=1, v_scale=dt, skip=torch.ones(h))
    return tape.gated_norm(o, z, torch.ones(h * p), 1e-5, gate_first=True)


def gated_deltanet(tape: Tape, x: Tensor, dtype: torch.dtype) -> Tensor:
    h, dk, dv = 8, 128, 128
    sizes = [2 * h * dk + h * dv, h * dv, h, h]
    qkv, gate, b, a = product(tape, x, sum(sizes), dtype).split(sizes, dim=1)
    qkv = convolved(tape, qkv, dtype)
    q, k, v = qkv.split([h * dk, h * dk, h * dv], dim=1)
    tape.unit(qkv[:, : 2 * h * dk], 2 * h)
    beta, (_, decay) = tape.activate("sigmoid", b), tape.decays(a, torch.zeros(h), torch.ones(h))
    o = tape.gated_delta(q, k, v, decay, beta, torch.zeros(ROWS, h, dk, dv), heads=h, scale=dk**-0.5)
    return tape.gated_norm(o, gate, torch.ones(dv), 1e-5, groups=h)


def gla(tape: Tape, x: Tensor, dtype: torch.dtype) -> Tensor:
    h, dk, dv = 4, 128, 256
    sizes = [h * dk, h * dk, h * dv, h * dv, h * dk]
    q, k, v, gate, low = product(tape, x, sum(sizes), dtype).split(sizes, dim=1)
    decay = tape.activate("logsigmoid", low, scale=1 / 16)
    o = tape.gated_linear(q, k, v, decay, torch.zeros(ROWS, h, dk, dv), heads=h, scale=dk**-0.5)
    return tape.gated_norm(o, gate, torch.ones(dv), 1e-5, groups=h)


def mamba(tape: Tape, x: Tensor, dtype: torch.dtype) -> Tensor:
    channels, s = 1536, 16
    x, z = product(tape, x, 2 * channels, dtype).chunk(2, dim=1)
    x = convolved(tape, x, dtype)
    low, b, c = product(tape, x, 48 + 2 * s, dtype).split([48, s, s], dim=1)
    dt, a, skip = product(tape, low, channels, dtype), torch.zeros(channels, s), torch.ones(channels)
    return tape.selective(x, dt, a, b, c, torch.zeros(ROWS, channels, s), d=skip, z=z, dt_bias=skip)


def attention(tape: Tape, x: Tensor, dtype: torch.dtype) -> Tensor:
    h, hk, d = 16, 4, 128
    qkv, gate = product(tape, x, (h + 2 * hk) * d, dtype), product(tape, x, h * d, dtype)
    k, v = (torch.zeros(ROWS, 4096, hk, d, dtype=dtype) for _ in "kv")
    turns, norm = tape.turns((1.0,) * (d // 2), 1.0), torch.ones(d)
    tape.enter(qkv, k, v, h, turns=turns, q_norm=norm, k_norm=norm, eps=1e-6)
    o = tape.activate("sigmoid", gate, tape.attend(qkv, k, v, h))
    gate, up = product(tape, o, 2 * WIDTH, dtype).chunk(2, dim=1)
    return tape.activate("silu", gate, up)


def latent(tape: Tape, x: Tensor, dtype: torch.dtype) -> Tensor:
    h, rank, own, shared = 16, 512, 128, 64
    q, low = product(tape, x, h * (own + shared) + rank + shared, dtype).tensor_split([h * (own + shared)], 1)
    kv, query = torch.zeros(ROWS, 4096, 1, rank + shared, dtype=dtype), tape.vector(h * (rank + shared))
    tape.heads(torch.zeros(h, own, rank, dtype=dtype), q, own + shared, query, rank + shared)
    turns = tape.turns((1.0,) * (shared // 2), 1.0)
    tape.enter_latent(q, low, query, kv, h, norm=torch.ones(rank), eps=1e-6, turns=turns)
    o, mixed = tape.attend(query, kv, kv[..., :rank], h, scale=0.07), tape.vector(h * own)
    values = torch.zeros(h, own, rank, dtype=dtype)
    tape.heads(values, o, rank, mixed, own, outputs_first=True)
    return mixed


def real(tape: Tape, x: Tensor, dtype: torch.dtype) -> Tensor:
    width, heads = 2560, 10
    y, x = product(tape, x, 2 * width, dtype).chunk(2, dim=1)
    x, gates, block = convolved(tape, x, dtype), tape.vector(2 * width), width // heads
    tape.heads(torch.zeros(heads, block, 2 * block, dtype=dtype), x, block, gates, 2 * block)
    fed, log_a = tape.real_gate(gates, x, -torch.ones(width), heads, 1e-12)
    return tape.activate("gelu_pytorch_tanh", y, tape.linear_recurrence(fed, log_a, torch.zeros(ROWS, width)))


def rwkv7(tape: Tape, x: Tensor, dtype: torch.dtype) -> Tensor:
    h, d = WIDTH // 64, WIDTH
    mixed = tape.mixtures(x, torch.zeros(ROWS, 1, d, dtype=dtype), torch.zeros(6, d))
    r, decay, k, v, rate, gate = (product(tape, t, d, dtype) for t in mixed)
    low = tape.activate("tanh", decay), tape.activate("sigmoid", gate)
    decay, gate = (product(tape, t, d, dtype) for t in low)
    given = {"kappa_scale": torch.ones(d), "rate_share": torch.ones(d), "strongest": -0.6, "eps": 1e-12}
    reads = tape.delta_operands(decay, rate, k, v, h, mixed=(r, r), **given)
    o = tape.dplr_delta(r, k, v, decay, reads, rate, torch.zeros(ROWS, h, 64, 64))
    norm = {"weight": torch.ones(d), "bias": torch.ones(d), "bonus": torch.ones(h, 64), "eps": 1e-5}
    tape.delta_leave(o, r, k, v, gate, h, **norm)
    return o


def experts(tape: Tape, x: Tensor, dtype: torch.dtype) -> Tensor:
    count, asked, width = 64, 8, 96
    logits = product(tape, x, count, torch.float32)
    options = {"groups": 8, "kept_groups": 4, "sigmoid": True, "normalise": True, "scale": 2.5}
    choice = tape.choose(logits, asked, correction=torch.zeros(count), **options)
    up = torch.zeros(count, 2 * width, WIDTH, dtype=dtype)
    down = torch.zeros(count, WIDTH, width, dtype=dtype)
    beside, gate = product(tape, x, WIDTH, dtype), product(tape, x, 1, dtype)
    return tape.experts(x, choice, up, down, "silu", beside=beside, gate=gate)


def linear_attention(tape: Tape, x: Tensor, dtype: torch.dtype) -> Tensor:
    h, d, dv = 4, 16, 64
    q, k, v = product(tape, x, h * (2 * d + dv), dtype).split([h * d, h * d, h * dv], dim=1)
    q, k = tape.features("taylor", q, h), tape.features("taylor", k, h)
    v, width = tape.features("identity", v, h, ones=1), q.shape[1] // h
    o = tape.gated_linear(q, k, v, None, torch.zeros(ROWS, h, width, dv + 1), heads=h)
    return tape.gated_norm(tape.divide(o, h, 1e-6), None, torch.ones(dv), 1e-5, groups=h)
