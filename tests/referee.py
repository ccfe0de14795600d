"""The judge of the laws: the token-by-token float32 run, and what "equal" means beside it.

The run folds `Model.step` by the reference backend over the tokens, one row, from an empty cache. It
remembers what it has read, so that a fault planted later cannot reach it. Where a model's own rounding is as
large as what is allowed, on one CPU or another, it runs in float64 and is rounded to float32 at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from constate.core.cache import Cache
from constate.core.model import Model
from constate.core.state import Leaf, zip_leaves
from tests.models import make

EXACT = (
    "zamba2",
)  # whose float32 run is off by 4.7e-5 of a state's largest entry on a CPU with other kernels
DECIDED = 1e-3
"""Where the best two logits lie further apart than this, the best token must be the same."""


@dataclass(frozen=True)
class Reading:
    """logits (n, vocab) of all tokens read, and the one-row cache after them: clone before use."""

    logits: Tensor
    cache: Cache


class Referee:
    """Reads token sequences one token at a time, each once; `exact` in float64."""

    def __init__(self, model: Model, exact: bool = False):
        assert model.ops.backend == "reference"
        self.model = copy.deepcopy(model).double() if exact else model
        if exact:
            self.model.state_dtype = torch.float64
        empty = torch.empty(0, model.embed.num_embeddings)
        self.read_so_far: dict[tuple[int, ...], Reading] = {(): Reading(empty, self.model.init_cache(1))}
        self.rounded: dict[tuple[int, ...], Reading] | None = {} if exact else None

    def read(self, tokens: Tensor | Sequence[int]) -> Reading:
        ids = tuple(int(t) for t in tokens)
        if self.rounded is None:
            return self._read(ids)
        if ids not in self.rounded:
            found = self._read(ids)
            self.rounded[ids] = Reading(found.logits.float(), found.cache.map(_rounded))
        return self.rounded[ids]

    def _read(self, ids: tuple[int, ...]) -> Reading:
        known = next(n for n in range(len(ids), -1, -1) if ids[:n] in self.read_so_far)
        before = self.read_so_far[ids[:known]]
        if known == len(ids):
            return before
        cache = before.cache.clone()
        new = [self.model.step(torch.tensor([t]), cache) for t in ids[known:]]
        self.read_so_far[ids] = Reading(torch.cat([before.logits, *new]), cache)
        return self.read_so_far[ids]


def _rounded(_: str, tensor: Tensor, leaf: Leaf) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor.clone()


@cache
def referee(name: str) -> Referee:
    return Referee(make(name, "reference"), exact=name in EXACT)


def same_logits(got: Tensor, want: Tensor, what: str = "logits") -> None:
    """Within 1e-4 of max(1, largest logit); the same greedy token wherever it is decided."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    if not want.numel():
        return
    bound = 1e-4 * max(1.0, float(want.abs().max()))
    worst = float((got.double() - want.double()).abs().max())  # NaN fails the comparison too
    assert worst <= bound, f"{what}: off by {worst:.3e}, allowed {bound:.3e}"
    best = want.topk(2, dim=-1).values
    decided = best[:, 0] - best[:, 1] > DECIDED
    greedy = got.argmax(-1) == want.argmax(-1)
    assert bool(greedy[decided].all()), f"{what}: another greedy token"


def same_state(got: Cache, want: Cache, what: str = "state") -> None:
    """Every tensor within 5e-5 of its largest entry, row by row, where the row's tokens put something."""
    assert got.lengths == want.lengths, f"{what}: lengths {got.lengths}, wanted {want.lengths}"
    for name, (a, b), leaf in zip_leaves([got, want]):
        if leaf.kind is None:
            assert torch.equal(a, b), f"{what}: {name} is {a.tolist()}, wanted {b.tolist()}"
            continue
        for row, length in enumerate(want.lengths):
            mine, theirs = (_filled(t[row], leaf, length) for t in (a, b))
            assert mine.shape == theirs.shape, f"{what}: {name} {tuple(mine.shape)}, {tuple(theirs.shape)}"
            if theirs.numel():
                bound = 5e-5 * float(theirs.abs().max())
                worst = float((mine.double() - theirs.double()).abs().max())
                assert worst <= bound, f"{what}: {name} of row {row} off by {worst:.3e}, allowed {bound:.3e}"


def _filled(row: Tensor, leaf: Leaf, length: int) -> Tensor:
    return row[:length] if leaf.grows or leaf.ring else row
