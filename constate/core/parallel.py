"""Mixers side by side on one input, as one mixer. Knows them by their protocol alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .cost import Cost
from .mixer import Call, Mixer
from .state import Parts, State

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


class Parallel(Mixer):
    """The sum over the named (f, before, after) of after * f(before * x).

    Each f is a submodule under its name; the state is a record of theirs, in their order.
    """

    def __init__(self, **arms: tuple[Mixer, float, float]):
        super().__init__()
        for name, (mixer, _, _) in arms.items():
            self.add_module(name, mixer)
        self.arms = tuple(arms.values())

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        return Parts(tuple(mixer.init_state(rows, capacity, dtype) for mixer, _, _ in self.arms))

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        states = state.parts if isinstance(state, Parts) else (None,) * len(self.arms)
        return self._sum([f(_times(x, m), call, s) for (f, m, _), s in zip(self.arms, states, strict=True)])

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, Parts)
        arms = zip(self.arms, state.parts, strict=True)
        return self._sum([f.step(_times(x, m), call, s) for (f, m, _), s in arms])

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, Parts)
        total: Tensor | None = None
        for (mixer, before, after), part in zip(self.arms, state.parts, strict=True):
            own = x if before == 1.0 else tape.activate("identity", x, scale=before)
            said = mixer.written(tape, own, part)
            if total is None:
                total = said if after == 1.0 else tape.activate("identity", said, scale=after)
            else:
                tape.add(total, said, scale=after)
        assert total is not None
        return total

    def cost(self, new: int, past: int) -> Cost:
        return sum((mixer.cost(new, past) for mixer, _, _ in self.arms), Cost())

    def _sum(self, said: Sequence[Tensor]) -> Tensor:
        first, *others = (_times(y, m) for y, (_, _, m) in zip(said, self.arms, strict=True))
        return sum(others, first)


def _times(x: Tensor, by: float) -> Tensor:
    return x if by == 1.0 else x * by
