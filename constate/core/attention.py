"""Softmax attention as a mixer: full or windowed, with grouped key/value heads.

The cache holds keys already rotated. Full attention keeps every token (`KV`), a window the last W of
them in a ring (`Window`). Knows rotary and the attention ops; masks are never built here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..spans import Spans
from .cost import Cost, causal_pairs, matmul, read_weights
from .mixer import Call, Mixer
from .norms import RMSNorm
from .rotary import Rotary
from .state import KV, State, Window


@dataclass(frozen=True)
class AttentionSpec:
    """heads query heads share kv_heads key/value heads of head_dim channels; `window` W lets a token see
    itself and the W - 1 before it; `rope` is a rope_parameters mapping, None for no position at all;
    `qk_norm` norms each head's query and key before they are rotated, as Qwen3 does."""

    heads: int
    head_dim: int
    kv_heads: int | None = None
    window: int | None = None
    rope: Mapping[str, Any] | None = None
    max_positions: int | None = None
    bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-5


class Attention(Mixer):
    """Multi-head attention with grouped key/value heads (Ainslie et al., 2305.13245)."""

    def __init__(self, d: int, spec: AttentionSpec):
        super().__init__()
        self.h, self.hk, self.dim = spec.heads, spec.kv_heads or spec.heads, spec.head_dim
        self.window = spec.window
        if self.h % self.hk:
            raise ValueError(f"{self.h} query heads cannot share {self.hk} key/value heads evenly")
        if spec.window is not None and spec.window < 1:
            raise ValueError(f"window {spec.window}: at least 1 is wanted, or none for full attention")
        self.rotary = None
        if spec.rope is not None:
            self.rotary = Rotary.of(spec.rope, spec.head_dim, spec.max_positions)
        self.qkv = nn.Linear(d, (self.h + 2 * self.hk) * self.dim, bias=spec.bias)
        self.out = nn.Linear(self.h * self.dim, d, bias=spec.out_bias)
        self.q_norm = RMSNorm(self.dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(self.dim, spec.norm_eps) if spec.qk_norm else None

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        held = (rows, self.window or capacity, self.hk, self.dim)
        k, v = (self.qkv.weight.new_zeros(held, requires_grad=False) for _ in "kv")
        return KV(k, v) if self.window is None else Window(k, v)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        q, k, v = self._enter(x, call)
        context = call.spans
        if isinstance(state, KV):
            k, v, context = absorb(state, k, v, call)
        elif isinstance(state, Window):
            k, v, context = absorb_window(state, k, v, call)
        o = call.ops.attention(q, k, v, call.spans, context, window=self.window)
        return self.out(o.flatten(1))

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, KV | Window)
        q, k, v = self._enter(x, call)
        place, lengths, longest = places(call, state.k.shape[1])
        state.k.view(-1, *k.shape[1:]).index_copy_(0, place, k)
        state.v.view(-1, *v.shape[1:]).index_copy_(0, place, v)
        o = call.ops.attention_step(q, state.k, state.v, lengths, longest)
        return self.out(o.flatten(1))

    def cost(self, new: int, past: int) -> Cost:
        pairs = causal_pairs(new, past, self.window)
        token = 2 * self.hk * self.dim * self.qkv.weight.element_size()
        limit = self.window or past + new
        flops = {
            "projection": matmul(new, self.qkv.weight, self.out.weight),
            "attention": 4 * pairs * self.h * self.dim,
        }
        written, held = token * min(new, limit), token * min(past + new, limit)
        read = held if new else 0
        return Cost(flops, read_weights(*self.parameters()), {"kv": read}, {"kv": written}, {"kv": held})

    @property
    def like(self) -> Tensor:
        return self.qkv.weight

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
