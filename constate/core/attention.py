"""Softmax attention as a mixer: full or windowed, with grouped key/value heads.

The cache holds keys already rotated. Full attention keeps every token (`KV`), a window the last W of
them in a ring (`Window`). Knows rotary and the attention ops; masks are never built here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..spans import Spans
from .cost import Cost, matmul, read_weights, seen_pairs
from .linear import Linear
from .mixer import Call, Mixer
from .norms import RMSNorm
from .rotary import Rotary
from .state import KV, State, Window

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


@dataclass(frozen=True)
class AttentionSpec:
    """heads query heads share kv_heads key/value heads of head_dim channels; `window` W lets a token see
    itself and the W - 1 before it; `block` B the rest of its block of B tokens too, counted from the row's
    start, and None the whole row; `rope` is a rope_parameters mapping, None for no position at all;
    `qk_norm` norms each head's query and key before they are rotated, as Qwen3 does; `scale` multiplies
    the products of queries and keys (None: head_dim ** -0.5); `norm_offset` is that of q's and k's norm.
    `gate` lets a sigmoid of x weigh each channel of the output before it is projected, as Qwen3-Next does.
    `kv_from` names the layer whose keys and values are read in place of own ones (core/cross_layer.py)."""

    heads: int
    head_dim: int
    kv_heads: int | None = None
    window: int | None = None
    rope: Mapping[str, Any] | None = None
    max_positions: int | None = None
    bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    block: int | None = 1
    norm_eps: float = 1e-5
    scale: float | None = None
    norm_offset: float = 0.0
    gate: bool = False
    kv_from: int | None = None


class Attention(Mixer):
    """Multi-head attention with grouped key/value heads (Ainslie et al., 2305.13245). It reads d channels
    and leaves `d_out` of them (None: as many). With `lends`, a layer's number, it leaves its keys and values
    in call.shared["kv", lends] for layers that read them: packed, with their spans, or in a step as held."""

    lends: int | None = None

    def __init__(self, d: int, spec: AttentionSpec, d_out: int | None = None):
        super().__init__()
        self.h, self.hk, self.dim = spec.heads, spec.kv_heads or spec.heads, spec.head_dim
        self.window, self.block, self.scale = spec.window, spec.block, spec.scale
        if self.h % self.hk:
            raise ValueError(f"{self.h} query heads cannot share {self.hk} key/value heads evenly")
        if spec.window is not None and spec.window < 1:
            raise ValueError(f"window {spec.window}: at least 1 is wanted, or none for full attention")
        if spec.block is not None and spec.block < 1:
            raise ValueError(f"block {spec.block}: at least 1 is wanted, or none for the whole row")
        if spec.window is not None and spec.block != 1:
            raise ValueError(f"window {spec.window} with block {spec.block}: a window looks back alone")
        self.rotary = None
        if spec.rope is not None:
            self.rotary = Rotary.of(spec.rope, spec.head_dim, spec.max_positions)
        self.qkv = Linear(d, (self.h + 2 * self.hk) * self.dim, bias=spec.bias)
        self.out = Linear(self.h * self.dim, d_out or d, bias=spec.out_bias)
        self.gate = Linear(d, self.h * self.dim, bias=spec.bias) if spec.gate else None
        self.q_norm = RMSNorm(self.dim, spec.norm_eps, offset=spec.norm_offset) if spec.qk_norm else None
        self.k_norm = RMSNorm(self.dim, spec.norm_eps, offset=spec.norm_offset) if spec.qk_norm else None

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        held = (rows, self.window or capacity, self.hk, self.dim)
        k, v = (self.like.new_zeros(held, requires_grad=False) for _ in "kv")
        return KV(k, v) if self.window is None else Window(k, v)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        q, k, v = self._enter(x, call)
        context = call.spans
        if isinstance(state, KV):
            k, v, context = absorb(state, k, v, call)
        elif isinstance(state, Window):
            k, v, context = absorb_window(state, k, v, call)
        if self.lends is not None:
            call.shared["kv", self.lends] = k, v, context
        sight = {"window": self.window, "causal": self.block is not None, "block": self.block or 1}
        o = call.ops.attention(q, k, v, call.spans, context, **sight, scale=self.scale)
        return self._leave(o, x)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, KV | Window)
        q, k, v = self._enter(x, call)
        place, lengths, longest = places(call, state.k.shape[1])
        state.k.view(-1, *k.shape[1:]).index_copy_(0, place, k)
        state.v.view(-1, *v.shape[1:]).index_copy_(0, place, v)
        if self.lends is not None:
            call.shared["kv", self.lends] = state.k, state.v, call.context
        o = call.ops.attention_step(q, state.k, state.v, lengths, longest, scale=self.scale)
        return self._leave(o, x)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, KV | Window)
        qkv, turns, norms = self.qkv.record(tape, x), None, {}
        if self.rotary is not None:
            turns = tape.turns(self.rotary.frequencies, self.rotary.factor)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (tape.constant(norm.whole) for norm in (self.q_norm, self.k_norm))
            norms = {"q_norm": q, "k_norm": k, "eps": self.q_norm.eps}
        gate = None if self.gate is None else self.gate.record(tape, x)
        tape.enter(qkv, state.k, state.v, self.h, turns=turns, **norms)
        if self.lends is not None:
            tape.shared["kv", self.lends] = state.k, state.v
        o = tape.attend(qkv, state.k, state.v, self.h, scale=self.scale)
        return self.out.record(tape, o if gate is None else tape.activate("sigmoid", gate, o))

    def cost(self, new: int, past: int) -> Cost:
        pairs = seen_pairs(new, past, self.window, self.block)
        token = 2 * self.hk * self.dim * self.like.element_size()
        limit = self.window or past + new
        flops = {
            "projection": matmul(new, *(m for m in (self.qkv, self.out, self.gate) if m is not None)),
            "attention": 4 * pairs * self.h * self.dim,
        }
        written, held = token * min(new, limit), token * min(past + new, limit)
        read = held if new else 0
        return Cost(flops, read_weights(*self.parameters()), {"kv": read}, {"kv": written}, {"kv": held})

    @property
    def like(self) -> Tensor:
        return self.qkv.like

    def _enter(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv(x).unflatten(-1, (-1, self.dim))
        qk, v = qkv.split([self.h + self.hk, self.hk], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([self.h, self.hk], dim=1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        if self.rotary is not None:
            qk = self.rotary.rotate(qk, call)
        q, k = qk.split([self.h, self.hk], dim=1)
        return q, k, v

    def _leave(self, o: Tensor, x: Tensor) -> Tensor:
        """o (n, h, dim), what attention says of x (n, d)."""
        o = o.flatten(1)
        return self.out(o if self.gate is None else o * self.gate(x).sigmoid())


def places(call: Call, width: int) -> tuple[Tensor, Tensor, int]:
    """For one new token a row in buffers of `width` places: where each goes in the flattened buffer,
    (rows,); how many places then hold tokens, (rows,), and the most on the host. A full buffer is a ring
    that never comes round. Made once a call for all layers of one width."""
    key = ("places", width)
    if key not in call.shared:
        rows = torch.arange(len(call.lengths), device=call.past.device)
        held = (call.past + 1).clamp(max=width)
        call.shared[key] = (rows * width + call.past % width, held, min(max(call.lengths) + 1, width))
    return call.shared[key]


def absorb(state: KV, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Spans]:
    """Write new keys and values behind the old; return all of them, packed, and their spans."""
    context = call.context
    rows = zip(call.spans.slices(), call.lengths, context.lengths, strict=True)
    for row, (span, start, end) in enumerate(rows):
        state.k[row, start:end] = k[span]
        state.v[row, start:end] = v[span]
    if not any(call.lengths):
        return k, v, context
    return _pack(state.k, context.lengths), _pack(state.v, context.lengths), context


def absorb_window(state: Window, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Spans]:
    """The same for a ring: the up to W - 1 tokens that the new ones still see, then the new ones."""
    width, device = state.k.shape[1], k.device
    keys, values, lengths = [], [], []
    for row, (span, past) in enumerate(zip(call.spans.slices(), call.lengths, strict=True)):
        new = span.stop - span.start
        seen = min(past, width - 1) if new else 0
        old = torch.arange(past - seen, past, device=device) % width
        keys += [state.k[row, old], k[span]]  # copies, made before the ring is overwritten
        values += [state.v[row, old], v[span]]
        lengths.append(seen + new)
        kept = min(new, width)
        slot = torch.arange(past + new - kept, past + new, device=device) % width
        state.k[row, slot] = k[span.stop - kept : span.stop]
        state.v[row, slot] = v[span.stop - kept : span.stop]
    return torch.cat(keys), torch.cat(values), Spans.of(lengths, device)


def _pack(buffer: Tensor, lengths: tuple[int, ...]) -> Tensor:
    if len(lengths) == 1:
        return buffer[0, : lengths[0]]
    return torch.cat([buffer[row, :n] for row, n in enumerate(lengths)])
