"""Cross-layer attention (Brandon et al., 2405.12981): a layer that reads an earlier one's keys and values.

It has queries and an output of its own and holds nothing: a token's keys and values are made, rotated and
kept once, by the layer that lends them. What is lent lies in `call.shared`, whole where a ring would have
lost what the first of several new tokens still sees. Which layer reads whose is the model's matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .attention import AttentionSpec, places
from .cost import Cost, matmul, read_weights, seen_pairs
from .linear import Linear
from .mixer import Call, Mixer
from .norms import RMSNorm
from .rotary import Rotary
from .state import Nothing, State

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


class CrossLayerAttention(Mixer):
    """Attention over what layer `spec.kv_from` lends. What shapes keys (head_dim, kv_heads, window, rope) is
    that layer's; `qk_norm` norms this one's queries."""

    def __init__(self, d: int, spec: AttentionSpec):
        super().__init__()
        if spec.kv_from is None:
            raise ValueError("kv_from: the layer whose keys and values are read is wanted")
        self.h, self.hk, self.dim = spec.heads, spec.kv_heads or spec.heads, spec.head_dim
        self.kv_from, self.window, self.scale = spec.kv_from, spec.window, spec.scale
        if self.h % self.hk:
            raise ValueError(f"{self.h} query heads cannot share {self.hk} key/value heads evenly")
        self.rotary = None
        if spec.rope is not None:
            self.rotary = Rotary.of(spec.rope, spec.head_dim, spec.max_positions)
        self.q = Linear(d, self.h * self.dim, bias=spec.bias)
        self.out = Linear(self.h * self.dim, d, bias=spec.out_bias)
        self.gate = Linear(d, self.h * self.dim, bias=spec.bias) if spec.gate else None
        self.q_norm = RMSNorm(self.dim, spec.norm_eps, offset=spec.norm_offset) if spec.qk_norm else None

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        return Nothing()

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        k, v, context = call.shared["kv", self.kv_from]
        q = self._enter(x, call)
        o = call.ops.attention(q, k, v, call.spans, context, window=self.window, scale=self.scale)
        return self._leave(o, x)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        k, v, _ = call.shared["kv", self.kv_from]
        _, lengths, longest = places(call, k.shape[1])
        o = call.ops.attention_step(self._enter(x, call), k, v, lengths, longest, scale=self.scale)
        return self._leave(o, x)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        k, v = tape.shared["kv", self.kv_from]
        q, norm, turns = self.q.record(tape, x), self.q_norm, None
        gate = None if self.gate is None else self.gate.record(tape, x)
        if self.rotary is not None:
            turns = tape.turns(self.rotary.frequencies, self.rotary.factor)
        if turns is not None or norm is not None:
            given = {} if norm is None else {"norm": tape.constant(norm.whole), "eps": norm.eps}
            tape.rotate(q, self.h, turns, **given)
        o = tape.attend(q, k, v, self.h, scale=self.scale)
        return self.out.record(tape, o if gate is None else tape.activate("sigmoid", gate, o))

    def cost(self, new: int, past: int) -> Cost:
        read = 2 * self.hk * self.dim * self.like.element_size() * min(past + new, self.window or past + new)
        flops = {
            "projection": matmul(new, *(m for m in (self.q, self.out, self.gate) if m is not None)),
            "attention": 4 * seen_pairs(new, past, self.window) * self.h * self.dim,
        }
        return Cost(flops, read_weights(*self.parameters()), {"kv": read if new else 0})

    @property
    def like(self) -> Tensor:
        return self.q.like

    def _enter(self, x: Tensor, call: Call) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.dim))
        q = q if self.q_norm is None else self.q_norm(q)
        return q if self.rotary is None else self.rotary.rotate(q, call)

    def _leave(self, o: Tensor, x: Tensor) -> Tensor:
        o = o.flatten(1)
        return self.out(o if self.gate is None else o * self.gate(x).sigmoid())
