"""The protocol of everything that sits in a block: sequence mixers and, with no state, MLPs.

Glossary. b rows (sequences) · n packed tokens · t time · d model width · h heads (value heads where they
differ) · hk key heads · k key dim, v value dim (dk, dv where both stand side by side) · p head dim of an
SSM · s state size · c channels · w convolution width · W attention window.

Laws, for every causal mixer and model. The referee is the token-by-token float32 run.
1. `step` folded over the tokens equals `forward`, in output and in state.
2. `forward` over a sequence cut anywhere equals `forward` over the whole, pieces of no token included.
3. A row packed with any neighbours equals the row alone, from any initial state; nothing but the row's
   own tokens can change it.
4. A clone is never changed by later steps of the original; save then load continues bit for bit.
5. select, merge, write and drop commute with `step`.
6. The bytes of the state equal what `cost` says: constant in tokens for a recurrence, with the stated
   slope for attention.
7. Every backend equals the reference.
Equal means: logits within 1e-4 x max(1, largest logit), state within 5e-5 of its tensor's largest entry.

There are no pad tokens. `x` is packed, `(n, d)`: tokens of several rows laid end to end, and only mixers
that look along a sequence read `call.spans`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..kernels.dispatch import Ops
from ..spans import Spans, once
from .cost import Cost, read_weights
from .state import Nothing, State

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


@dataclass(frozen=True)
class Call:
    """What one forward or step carries besides x.

    `spans` packed lengths of the new tokens; `lengths` (host) and `past` (rows,) int64 (device) how many
    tokens each row has absorbed before them; `ops` the kernels that dispatch picked; `layers` the states
    of all invocations; `shared` what earlier layers leave for later ones of the same call: an embedding, a
    value, keys and values that are lent; `placed` (n,) where the new tokens stand, if that is not behind
    those before.
    """

    spans: Spans
    ops: Ops
    lengths: tuple[int, ...]
    past: Tensor
    layers: Sequence[State | None] = ()
    shared: dict[Any, Any] = field(default_factory=dict)
    placed: Tensor | None = None

    @once
    def positions(self) -> Tensor:
        """The place of each new token in its row, (n,) int64."""
        spans = self.spans
        if self.placed is not None:
            return self.placed
        if spans.rows == 1:
            start = self.lengths[0]
            return torch.arange(start, start + spans.total, device=self.past.device)
        if spans.total == spans.rows and spans.longest == 1:
            return self.past
        return self.past[spans.row] + spans.position

    @once
    def context(self) -> Spans:
        """Lengths of everything each row has read once the new tokens are in."""
        both = zip(self.lengths, self.spans.lengths, strict=True)
        return Spans.of((n + m for n, m in both), self.spans.device)


class Mixer(nn.Module):
    """One residual branch's function. Subclasses own weights and describe a state; none holds one.

    `float32` names the parameters (and buffers) that keep float32 whatever dtype the model is loaded in:
    decays, dt biases, skips, norms.
    """

    float32: ClassVar[frozenset[str]] = frozenset()

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        """The state before any token: zeros, `rows` rows, KV with room for `capacity` tokens. `dtype` is
        that of recurrent state; KV and convolution history take the activations'."""
        return Nothing()

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        """x (n, d) packed by call.spans to (n, d). With a state (under no_grad) it is read as the past
        and left holding the new tokens too; without one every row starts from nothing."""
        raise NotImplementedError(f"{type(self).__name__} declares no forward")

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        """x (rows, d), one token a row, to (rows, d); the state is advanced in place."""
        return self.forward(x, call, state)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor | None:
        """`step` written onto a tape: x (rows, d) float32 will hold the input, the result what to add. None:
        this mixer (with these options) has no such form, and has written nothing."""
        return None

    def written(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        """`record`, or where there is none the mixer's own step between two pieces of tape."""
        said = self.record(tape, x, state)
        if said is not None:
            return said
        said = tape.vector(x.shape[1])
        tape.between(lambda: said.copy_(self.step(x.to(self.dtype), tape.call, state)), x, said)
        return said

    def cost(self, new: int, past: int) -> Cost:
        """FLOPs and bytes of `new` tokens of one row after `past` ones."""
        raise NotImplementedError(f"{type(self).__name__} declares no cost")

    def reads(self, tokens: int) -> dict[int, int]:
        """Bytes of each weight, by identity, that a pass over `tokens` tokens of all rows together reads."""
        return read_weights(*self.parameters())

    @property
    def exact(self) -> Mapping[str, Sequence[slice]]:
        """Rows of its linear layers, by the layer's name, of which gates or decays of the state are made:
        they stay float32 where weights are stored in 8 bits."""
        return {}

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, KV and convolution history."""
        return self.like.dtype

    @property
    def like(self) -> Tensor:
        """A weight matrix, or the scales of one in int8: activations have its dtype and its device."""
        own = (p for n, p in self.named_parameters() if p.ndim > 1 and n.split(".")[-1] not in self.float32)
        return next(p for p in own if p.is_floating_point())
