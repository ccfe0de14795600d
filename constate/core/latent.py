"""Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1): the cache holds what keys and values
are made from, once for all heads.

Each token leaves a normed latent of `rank` channels and one key of `rope_dim` channels that all heads share,
the only one that is rotated. Two forms of the same sum. Expanded: keys and values of every head are made from
the latents (equations 10 to 16). Absorbed: W^UK stands on the query's side, W^UV on the output's, and the
latent itself is key and value, as for one head of rank + rope_dim channels. A step is absorbed; a forward
takes the form with fewer operations. Departures: the first products of the queries and of the latents are
one; rotary in halves, to which an architecture that interleaves sorts its weights. Knows the attention ops
and no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..spans import Spans
from .attention import places
from .cost import Cost, matmul, read_weights, seen_pairs
from .linear import Linear
from .mixer import Call, Mixer
from .norms import RMSNorm
from .rotary import Rotary
from .state import Latent, State

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


@dataclass(frozen=True)
class LatentSpec:
    """heads query heads of key_dim own and rope_dim shared channels, values of value_dim, made from latents
    of `rank`; `q_rank` is that of the queries' own latent, None for queries straight from x. `rope` is a
    rope_parameters mapping over the shared channels, None where they are not rotated (Kimi Linear); `scale`
    of the scores is (key_dim + rope_dim) ** -0.5 by default. `bias` is on the first product and the last."""

    heads: int
    rank: int
    key_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None
    rope: Mapping[str, Any] | None = None
    max_positions: int | None = None
    scale: float | None = None
    bias: bool = False
    norm_eps: float = 1e-6


class LatentAttention(Mixer):
    """One product to the queries (or their latent), the latent and the shared key; norm; attention; out."""

    def __init__(self, d: int, spec: LatentSpec):
        super().__init__()
        self.h, self.rank, self.shared = spec.heads, spec.rank, spec.rope_dim
        self.dk, self.dv = spec.key_dim, spec.value_dim
        query = self.h * (self.dk + self.shared)
        if spec.bias and spec.q_rank is None:
            raise ValueError("bias without q_rank: no published model has it, and half of a product would")
        self.rotary = None
        if spec.rope is not None:
            self.rotary = Rotary.of(spec.rope, self.shared, spec.max_positions)
        self.scale = (self.dk + self.shared) ** -0.5 if spec.scale is None else spec.scale
        self.sizes = [spec.q_rank or query, self.rank, self.shared]
        self.in_proj = Linear(d, sum(self.sizes), bias=spec.bias)
        self.q_norm = RMSNorm(spec.q_rank, spec.norm_eps) if spec.q_rank is not None else None
        self.q_proj = Linear(spec.q_rank, query, bias=False) if spec.q_rank is not None else None
        self.norm = RMSNorm(self.rank, spec.norm_eps)
        self.kv_proj = Linear(self.rank, self.h * (self.dk + self.dv), bias=False)
        self.out = Linear(self.h * self.dv, d, bias=spec.bias)

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        return Latent(self.like.new_zeros(rows, capacity, 1, self.rank + self.shared, requires_grad=False))

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        q, kv = self._enter(x, call)
        if isinstance(state, Latent):
            for row, (span, past) in enumerate(zip(call.spans.slices(), call.lengths, strict=True)):
                state.kv[row, past : past + span.stop - span.start] = kv[span]
        if not any(call.lengths):
            return self._leave(self._expanded(q, kv, call, call.spans, call.spans))
        # Row by row: what a row's neighbours hold is no reason to treat it otherwise, to the last bit.
        outputs = [q.new_zeros(0, self.h, self.dv)]
        for row, (span, past) in enumerate(zip(call.spans.slices(), call.lengths, strict=True)):
            new = span.stop - span.start
            if new:
                form = self._expanded if self._expands(new, past) else self._absorbed
                seen = state.kv[row, : past + new] if isinstance(state, Latent) else kv[span]
                own, held = (Spans.of([n], x.device) for n in (new, past + new))
                outputs.append(form(q[span], seen, call, own, held))
        return self._leave(torch.cat(outputs))

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, Latent)
        q, kv = self._enter(x, call)
        place, lengths, longest = places(call, state.kv.shape[1])
        state.kv.view(-1, *kv.shape[1:]).index_copy_(0, place, kv)
        values = state.kv[..., : self.rank]
        o = call.ops.attention_step(self._absorb(q), state.kv, values, lengths, longest, scale=self.scale)
        return self._leave(self._values(o))

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor | None:
        assert isinstance(state, Latent)
        turns, width = None, self.rank + self.shared
        if self.rotary is not None:
            if self.rotary.dim != self.shared:
                return None  # a part of the shared channels turned: in no published model
            turns = tape.turns(self.rotary.frequencies, self.rotary.factor)
        q, latent = self.in_proj.record(tape, x).tensor_split([self.sizes[0]], dim=-1)
        if self.q_norm is not None and self.q_proj is not None:
            q = self.q_proj.record(tape, self.q_norm.record(tape, q))
        query, (keys, values) = tape.vector(self.h * width), self._heads()
        with tape.side_by_side():
            tape.heads(keys, q, self.dk + self.shared, query, width)
            given = {"norm": tape.constant(self.norm.whole), "eps": self.norm.eps, "turns": turns}
            tape.enter_latent(q, latent, query, state.kv, self.h, **given)
        o = tape.attend(query, state.kv, state.kv[..., : self.rank], self.h, scale=self.scale)
        mixed = tape.vector(self.h * self.dv)
        tape.heads(values, o, self.rank, mixed, self.dv, outputs_first=True)
        return self.out.record(tape, mixed)

    @property
    def exact(self) -> Mapping[str, Sequence[slice]]:
        return {"kv_proj": [slice(None)]}  # taken apart into what queries and outputs absorb

    def cost(self, new: int, past: int) -> Cost:
        expands, pairs = self._expands(new, past), seen_pairs(new, past)
        channels = self.dk + self.shared + self.dv if expands else 2 * self.rank + self.shared
        first = [m for m in (self.in_proj, self.q_proj, self.out) if m is not None]
        flops = {
            "projection": matmul(new, *first),
            "latent": matmul(past + new if expands else new, self.kv_proj),
            "attention": 2 * pairs * self.h * channels,
        }
        token = (self.rank + self.shared) * self.like.element_size()
        held = {"kv": token * (past + new)}
        read = held if new else {"kv": 0}
        return Cost(flops, read_weights(*self.parameters()), read, {"kv": token * new}, held)

    @property
    def like(self) -> Tensor:
        return self.in_proj.like

    def _enter(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Queries (n, h, dk + shared), their last channels rotated, and what a token leaves (n, 1, rank +
        shared)."""
        q, latent, key = self.in_proj(x).split(self.sizes, dim=-1)
        if self.q_norm is not None and self.q_proj is not None:
            q = self.q_proj(self.q_norm(q))
        q, key = q.unflatten(-1, (self.h, -1)), key[:, None]
        if self.rotary is not None:
            q, turned = q.split([self.dk, self.shared], dim=-1)
            turned = self.rotary.rotate(torch.cat([turned, key], dim=1), call)
            turned, key = turned.split([self.h, 1], dim=1)
            q = torch.cat([q, turned], dim=-1)
        return q, torch.cat([self.norm(latent)[:, None], key], dim=-1)

    def _expands(self, new: int, past: int) -> bool:
        """Whether keys and values are worth making. From nothing they are: making a token's costs as much as
        absorbing its query. Over a past only for as many new tokens as pay for making the past's again."""
        made, saved = self.rank * (self.dk + self.dv), 2 * self.rank - self.dk - self.dv
        return past == 0 or new * saved > made

    def _expanded(self, q: Tensor, kv: Tensor, call: Call, spans: Spans, context: Spans) -> Tensor:
        latent, key = kv.squeeze(1).split([self.rank, self.shared], dim=-1)
        k, v = self.kv_proj(latent).unflatten(-1, (self.h, -1)).split([self.dk, self.dv], dim=-1)
        k = torch.cat([k, key[:, None].expand(-1, self.h, -1)], dim=-1)
        return call.ops.attention(q, k, v, spans, context, scale=self.scale)

    def _absorbed(self, q: Tensor, kv: Tensor, call: Call, spans: Spans, context: Spans) -> Tensor:
        values = kv[..., : self.rank]
        o = call.ops.attention(self._absorb(q), kv, values, spans, context, scale=self.scale)
        return self._values(o)

    def _heads(self) -> tuple[Tensor, Tensor]:
        """W^UK (h, dk, rank) and W^UV (h, dv, rank)."""
        k, v = self.kv_proj.weight.unflatten(0, (self.h, -1)).split([self.dk, self.dv], dim=1)
        return k, v

    def _absorb(self, q: Tensor) -> Tensor:
        """q (n, h, dk + shared) as queries of the latent and the shared key, (n, h, rank + shared)."""
        own, turned = q.split([self.dk, self.shared], dim=-1)
        own = torch.bmm(own.transpose(0, 1), self._heads()[0]).transpose(0, 1)
        return torch.cat([own, turned], dim=-1)

    def _values(self, o: Tensor) -> Tensor:
        """Mixed latents (n, h, rank) to mixed values (n, h, dv)."""
        return torch.bmm(o.transpose(0, 1), self._heads()[1].mT).transpose(0, 1)

    def _leave(self, o: Tensor) -> Tensor:
        return self.out(o.flatten(1))
