"""What evaluation harnesses ask of a model: log-likelihoods of continuations and of whole texts, and text up
to a stop. For every family, by the interface that each has.

A masked diffusion model's log-likelihood is a bound from below (likelihood.nelbo), and nothing of it is
greedy, since it is not generated from left to right. What is asked beyond a model's positions is refused,
but for a whole text, which is then read in windows. Knows models; no harness.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ...core.model import Model
from ...diffusion_lm import likelihood
from ...diffusion_lm.denoiser import Masked
from ...generation import generate
from ...spans import Spans
from ...training.score import WINDOW
from ..predict.published import positions
from .reading import costs, first_id, fits

PACKED = 8192  # tokens of a forward: a bound on memory alone
SEED = 0  # of a denoiser's draws: the same for every row, whatever its neighbours are

Pair = tuple[list[int], list[int]]  # ids: a context, and what comes behind it


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
        Raises ValueError for an empty continuation, and for a pair beyond the model's positions."""
        for _, more in pairs:
            if not more:
                raise ValueError("an empty continuation has no likelihood: a choice of at least one token")
        told = [([*context] or [self.start], [*more]) for context, more in pairs]
        for context, more in told:
            fits(self.model, self.name, len(context) + len(more) - (not self.bound))
        if self.bound:
            for context, more in told:
                row = torch.tensor([*context, *more], device=self.model.device)
                yield -likelihood.nelbo(self.model, [row], [len(context)], seed=SEED)[0].value, False
            return
        for group in _groups(told):
            yield from self._group(group)

    def whole(self, text: str) -> float:
        """log p(text) in nats, every token given all before it: read once through the state, whatever its
        length. Where that is beyond the model's positions, in windows, with as much before each token as
        they hold. A masked diffusion model's is a bound, from windows too."""
        ids, places = self.ids(text), positions(vars(self.model.config))
        if not ids:
            return 0.0
        if self.bound:
            window = min(WINDOW, len(ids), WINDOW if places is None else places - 1)  # behind one id
            read = torch.tensor(ids, device=self.model.device)
            bits = likelihood.bits_per_byte(self.model, read, 1, window=window, start=self.start, seed=SEED)
            return -bits.value * math.log(2)
        if places is not None and len(ids) > places:
            return sum(value for value, _ in self.after(list(_windows([self.start, *ids], places))))
        pieces = costs(self.model, [torch.tensor(ids)], start=self.start)
        return -sum(float(piece.double().sum()) for piece in pieces)

    def until(self, prompts: Sequence[str], stops: Sequence[str], new: int) -> list[str]:
        """Greedy text behind each prompt, at most `new` tokens, up to and without the first of `stops`. An
        empty prompt is the start id. Raises ValueError for a prompt that leaves no room for `new` tokens."""
        read = [self.ids(prompt) or [self.start] for prompt in prompts]
        for ids in read:
            fits(self.model, self.name, len(ids) + new)
        results = generate(self.model, read, max_new_tokens=new, stop=list(stops))
        return [result.text for result in results]

    @torch.no_grad()
    def _group(self, pairs: Sequence[Pair]) -> Iterator[tuple[float, bool]]:
        rows = [[*context, *more[:-1]] for context, more in pairs]
        spans = Spans.of(map(len, rows), self.model.device)
        heard = torch.tensor([i for row in rows for i in row], device=self.model.device)
        logits = self.model.forward(heard, spans)
        for (_, more), end in zip(pairs, spans.offsets[1:], strict=True):
            asked, wanted = logits[end - len(more) : end].float().cpu(), torch.tensor(more)
            said = asked.log_softmax(-1)[torch.arange(len(more)), wanted]
            # Ids beyond the vocabulary are padding, which is never written.
            likeliest = asked[:, : self.model.vocab].argmax(-1)
            yield float(said.double().sum()), bool((likeliest == wanted).all())


def _windows(ids: list[int], places: int) -> Iterator[Pair]:
    """All ids but the first, each once, in pairs that are `places` read: each behind the id before it alone,
    and the last, which would be shorter, behind as many as there is room for."""
    for at in range(1, len(ids), places):
        end = min(at + places, len(ids))
        yield ids[max(end - places - 1, 0) : at], ids[at:end]


def _groups(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Runs of pairs of at most PACKED tokens together, or one pair."""
    group: list[Pair] = []
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
