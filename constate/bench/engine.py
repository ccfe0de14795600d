"""What can be timed, ours or a peer: from a batch of equally long prompts to greedy tokens.

Knows the calling convention and the clock; knows no model and no package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, stack

from ..core.model import Model
from .machine import timed


@dataclass(frozen=True)
class Run:
    """One generation: seconds until the first token of all rows, seconds of each further step, and what was
    written, (rows, 1 + steps) int64. An engine that does not tell its steps apart gives their mean, once."""

    ttft: float
    steps: Sequence[float]
    tokens: Tensor


class Absent(ValueError):
    """A peer that is not here. `install` says what to do about it."""

    def __init__(self, why: str, install: str):
        super().__init__(why)
        self.install = install


class Engine(ABC):
    """`priced` is the model whose cost says what must be read and computed. `dtype` is how weights are
    stored, `state_dtype` recurrent state (None: the engine does not tell)."""

    name: str
    backend: str
    dtype: str
    priced: Model
    state_dtype: str | None = None

    @property
    def graph(self) -> str:
        """How a step is called: "recorded" ahead of time onto a tape, "captured" as a CUDA graph, or "plain",
        operation by operation."""
        return "plain"

    @property
    def exact(self) -> Engine:
        """The same engine where it computes in float32 throughout, as far as it can."""
        return self

    @abstractmethod
    def write(self, tokens: Tensor, new: int) -> Run:
        """The prompts, tokens (rows, prompt) int64, from nothing to their first token, then `new` more."""


class Stepwise(Engine):
    """One that can be called a step at a time, and shows its logits."""

    @abstractmethod
    def prefill(self, tokens: Tensor) -> Tensor:
        """(rows, prompt) int64, from nothing, to logits (rows, vocab) of each row's last token."""

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """(rows,) int64 to logits (rows, vocab)."""

    def write(self, tokens: Tensor, new: int) -> Run:
        device = str(tokens.device)
        ttft, ids = timed(lambda: self.prefill(tokens).argmax(-1), device)
        steps, written = [], [ids]
        for _ in range(new):
            seconds, ids = timed(lambda ids=ids: self.step(ids).argmax(-1), device)
            steps.append(seconds)
            written.append(ids)
        return Run(ttft, steps, stack(written, 1))
