"""A denoiser whose answers are a function written in the test, and runs of the decoder over it or any other.

It has the interface that decoding uses and no weights, and it answers for the masked places it is asked about
alone. Knows no policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from constate.core.decode import Commit, Request
from constate.diffusion_lm.decode import masked_diffusion
from constate.diffusion_lm.denoiser import Denoiser, Masked
from constate.spans import Spans

Rule = Callable[[tuple[int, ...], int], Sequence[float]]
"""`rule(canvas, place)`: logits for what stands at a place of this row."""


@dataclass(frozen=True)
class Config(Masked):
    mask_token_id: int | None
    shift: bool = False
    block: int | None = None
    time_conditioned: bool = False

    def asked(self, mask_id: int) -> Denoiser:
        return Denoiser(mask_id, self.shift, self.block, self.time_conditioned)


class Oracle:
    """`rule` answers; the mask id is `vocab`, one beyond the real ids. `calls` records the span lengths of
    each call, `asked` how many places it was asked about."""

    def __init__(
        self,
        rule: Rule,
        vocab: int,
        tokenizer: Tokenizer | None = None,
        eos: Sequence[int] = (),
        mask: int | None = -1,
        **config: Any,
    ):
        self.rule, self.vocab, self.tokenizer, self.eos_ids = rule, vocab, tokenizer, frozenset(eos)
        self.config = Config(vocab if mask == -1 else mask, **config)
        self.embed = SimpleNamespace(num_embeddings=vocab + 1)
        self.device, self.dtype, self.weight_dtype = torch.device("cpu"), torch.float32, "float32"
        self.calls: list[tuple[int, ...]] = []
        self.asked: list[int] = []
        self.architecture = SimpleNamespace(decode=masked_diffusion, model_type="oracle")
        self.chat_template: str | None = None
        self.special_tokens: dict[str, str] = {}
        self.weight_bytes = 1234
        self.ops = SimpleNamespace(backend="scripted")

    def forward(self, tokens: Tensor, spans: Spans, *, at: Tensor) -> Tensor:
        self.calls.append(spans.lengths)
        self.asked.append(len(at))
        rows = [tuple(tokens[part].tolist()) for part in spans.slices()]
        logits = []
        for index in at.tolist():
            row = next(r for r, end in enumerate(spans.offsets[1:]) if index < end)
            place = index - spans.offsets[row] + self.config.shift
            logits.append(list(self.rule(rows[row], place)))
        return torch.tensor(logits, dtype=torch.float32)

    @property
    def any(self) -> Any:
        """Itself, where a Model is asked for."""
        return self


def odds(vocab: int, token: int, probability: float) -> list[float]:
    """Logits in which one token has this probability and the others share the rest evenly."""
    rest = math.log((1 - probability) / (vocab - 1)) if probability < 1 else -math.inf
    return [math.log(probability) if i == token else rest for i in range(vocab)]


def never(row: int, tokens: Sequence[int]) -> str | None:
    return None


def run(model: Any, requests: Sequence[Request], finished: Any = never) -> list[list[Commit]]:
    """The commits of each row. Checks what every decoder owes: each place once, the last commit alone with
    a reason, calls and seconds that only grow."""
    rows: list[list[Commit]] = [[] for request in requests for _ in range(request.n)]
    for commit in masked_diffusion(model, requests, finished):
        rows[commit.row].append(commit)
    for commits in rows:
        places = [p for c in commits for p in c.positions]
        assert len(set(places)) == len(places), "a place was fixed twice"
        assert [c.finish is not None for c in commits] == [False] * (len(commits) - 1) + [True]
        for before, after in pairwise(commits):
            assert (before.calls, before.seconds) < (after.calls, after.seconds)
    return rows


def written(commits: Sequence[Commit]) -> list[int]:
    """The row's output, as far as it counts."""
    placed = {p: t for c in commits for p, t in zip(c.positions, c.tokens, strict=True)}
    end = commits[-1].end
    assert end is not None
    return [placed[p] for p in range(end)]


def order(commits: Sequence[Commit]) -> list[tuple[int, ...]]:
    """The places that each commit fixed."""
    return [c.positions for c in commits]
