"""What evaluation harnesses ask of a model: log-likelihoods of continuations and of whole texts, and text up
to a stop. For every family, by the interface that each has.

A masked diffusion model's log-likelihood is a bound from below (likelihood.nelbo), and nothing of it is
greedy, since it is not generated from left to right. Knows models; no harness.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.model import Model
from ...diffusion_lm import likelihood
from ...diffusion_lm.denoiser import Masked
from ...generation import generate
from ...spans import Spans
from ...training.score import WINDOW
from .reading import costs, first_id

PACKED = 8192  # tokens of a forward: a bound on memory alone


@dataclass(frozen=True)
class Scorer:
    """One loaded model, with a tokenizer."""

    model: Model
    name: str

    def __post_init__(self) -> None:
        if self.model.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer, and harnesses ask in text: add tokenizer.json")

    @property
    def bound(self) -> bool:
        """Whether log-likelihoods are bounds from below."""
        return isinstance(self.model.config, Masked)

    @property
    def start(self) -> int:
        """The id that a text without context is read behind."""
        return first_id(self.model)

    def ids(self, text: str) -> list[int]:
        assert self.model.tokenizer is not None
        return self.model.tokenizer.encode(text, add_special_tokens=False).ids

    def after(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[tuple[float, bool]]:
        """For each (context, continuation) of ids, nats: log p(continuation | context), and whether every id
        of it is the likeliest. Pairs of any lengths are read packed; an empty context is the start id.
        Raises ValueError for an empty continuation."""
        for _, more in pairs:
            if not more:
                raise ValueError("an empty continuation has no likelihood: a choice of at least one token")
        told = [([*context] or [self.start], [*more]) for context, more in pairs]
        if self.bound:
            rows = [torch.tensor([*c, *m], device=self.model.device) for c, m in told]
            for bound in likelihood.nelbo(self.model, rows, [len(c) for c, _ in told]):
                yield -bound.value, False
            return
        for group in _groups(told):
            yield from self._group(group)

    def whole(self, text: str) -> float:
        """log p(text) in nats, every token given all before it: read once through the state, whatever its
        length. A masked diffusion model's is a bound, from windows."""
        ids = torch.tensor(self.ids(text))
        if self.bound:
            options: dict[str, Any] = {"window": min(WINDOW, max(1, len(ids))), "start": self.start}
            bits = likelihood.bits_per_byte(self.model, ids.to(self.model.device), 1, **options)
            return -bits.value * math.log(2)
        return -sum(float(piece.double().sum()) for piece in costs(self.model, [ids], start=self.start))

    def until(self, prompts: Sequence[str], stops: Sequence[str], new: int) -> list[str]:
        """Greedy text behind each prompt, at most `new` tokens, up to and without the first of `stops`."""
        results = generate(self.model, list(prompts), max_new_tokens=new, stop=list(stops))
        return [result.text for result in results]

    @torch.no_grad()
    def _group(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        rows = [[*context, *more[:-1]] for context, more in pairs]
        spans = Spans.of(map(len, rows), self.model.device)
        heard = torch.tensor([i for row in rows for i in row], device=self.model.device)
        logits = self.model.forward(heard, spans)
        for (_, more), end in zip(pairs, spans.offsets[1:], strict=True):
            said = logits[end - len(more) : end].float().log_softmax(-1).cpu()
            wanted = torch.tensor(more)
            yield (
                float(said[torch.arange(len(more)), wanted].double().sum()),
                bool((said.argmax(-1) == wanted).all()),
            )


def _groups(pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Runs of pairs of at most PACKED tokens together, or one pair."""
    group: list[tuple[list[int], list[int]]] = []
    held = 0
    for pair in pairs:
        size = len(pair[0]) + len(pair[1])
        if group and held + size > PACKED:
            yield group
            group, held = [], 0
        group.append(pair)
        held += size
    if group:
        yield group
