"""From one row of logits to one token. Knows numbers alone: no model, no text, no batch.

Every row draws from its own generator, one uniform a token whether or not the token needed it, and turns
it into an id by inverting the cumulative distribution in float64 over ids in ascending order. So what a
seeded row draws depends on its logits, its seed and the token's number, and on nothing beside it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY = 1e-5  # at and below this temperature the arg-max is taken
DAMAGED = (
    "the model's logits hold NaN or infinity, so that no token can be chosen: the weights are damaged, or "
    "overflow in this dtype (float16 ends at 65,504; try bfloat16 or float32)"
)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Filters apply in this order, as in transformers.

    `repetition_penalty` divides the positive and multiplies the negative logits of ids already read or
    written (CTRL, Keskar et al. 2019); 1 is none. `temperature` divides the logits; 0 takes the arg-max,
    the lowest id of equals. `top_k` keeps the k likeliest ids, 0 all. `top_p` keeps the fewest of the
    likeliest whose mass reaches p; 0 keeps one, 1 all. `min_p` keeps ids at least that fraction as
    likely as the likeliest. Raises ValueError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        # Written so that NaN, for which every comparison is false, is refused too.
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature}: a finite number of at least 0 is wanted; 0 is greedy"
            )
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: a whole number of at least 0 is wanted; 0 keeps every id")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: a probability from 0 to 1 is wanted; 1 keeps every id")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: a fraction from 0 to 1 is wanted; 0 keeps every id")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty}: a finite number above 0 is wanted; "
                "1 is no penalty, above 1 discourages repeats"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY

    @property
    def plain(self) -> bool:
        """Whether the choice is the arg-max of the logits as they are."""
        return self.greedy and self.repetition_penalty == 1.0


def generator(seed: int, drawn: int = 0) -> random.Random:
    """A row's source of uniforms in [0, 1), after `drawn` of them. Any whole number is a seed."""
    source = random.Random(str(seed))  # of an integer, Random would forget the sign
    for _ in range(drawn):
        source.random()
    return source


def choose(
    logits: Tensor, rules: Sequence[Sampling], uniforms: Sequence[float], seen: Sequence[Collection[int]]
) -> tuple[list[int], list[float]]:
    """One token for each row, and its log-probability.

    logits (rows, vocab), real ids only; one rule, one uniform in [0, 1) and the ids read or written so far
    for each row. The log-probability (nats) is that of the raw distribution: before penalty, temperature
    and filters. Raises ValueError where logits hold NaN or +inf, or nothing above -inf.
    """
    ids = logits.argmax(-1)  # the first of equals
    for r, rule in enumerate(rules):
        if not rule.plain:
            ids[r] = pick(logits[r], rule, uniforms[r], seen[r])
    # Relative to the largest, and subtracted in float64: beside 1e4, float32 has no room for a logarithm.
    below = logits - logits.amax(-1, keepdim=True)
    pairs = torch.stack((below.gather(-1, ids[:, None])[:, 0], below.logsumexp(-1))).tolist()
    logprobs = [picked - whole for picked, whole in zip(*pairs, strict=True)]
    if not all(map(math.isfinite, logprobs)):
        raise ValueError(DAMAGED)
    return ids.tolist(), [min(0.0, p) for p in logprobs]


def pick(logits: Tensor, rule: Sampling, uniform: float, seen: Collection[int]) -> int:
    """The id that `rule` draws from logits (vocab,) with one uniform in [0, 1)."""
    if rule.greedy:
        return int(_penalised(logits, rule, seen).argmax())
    mass = masses(logits, rule, seen)
    below = mass.cumsum(0)
    # right=True: the first id whose cumulative mass exceeds the target, so never one without mass.
    drawn = int(torch.searchsorted(below, uniform * float(below[-1]), right=True))
    return min(drawn, int(mass.nonzero()[-1]))  # the product may round up to the whole mass


def masses(logits: Tensor, rule: Sampling, seen: Collection[int]) -> Tensor:
    """What a rule that is not greedy draws from: how likely each id is beside the likeliest, (vocab,)
    float64 on the host for logits (vocab,), 0 where the rule excludes it."""
    scores = _penalised(logits, rule, seen)
    return _filtered(((scores - scores.max()) / rule.temperature).exp(), rule)


def _penalised(logits: Tensor, rule: Sampling, seen: Collection[int]) -> Tensor:
    """logits (vocab,) in float64 on the host, those of ids in `seen` made less likely."""
    scores = logits.to("cpu", torch.float64)
    if rule.repetition_penalty == 1.0 or not seen:
        return scores
    ids = torch.tensor(sorted(seen))
    old = scores[ids]
    lower = torch.where(old < 0, old * rule.repetition_penalty, old / rule.repetition_penalty)
    return scores.index_put((ids,), lower)


def _filtered(mass: Tensor, rule: Sampling) -> Tensor:
    """mass (vocab,), not normalised, with the mass of ids that the rule excludes set to 0."""
    if not rule.top_k and rule.top_p == 1.0 and not rule.min_p:
        return mass
    ranked, ids = mass.sort(descending=True, stable=True)  # stable: of equals the lowest id is kept
    if rule.top_k:
        ranked[rule.top_k :] = 0
    if rule.top_p < 1:
        reached = ranked.cumsum(0)[:-1] >= rule.top_p * ranked.sum()  # before each id but the first
        ranked[1:][reached] = 0
    if rule.min_p:
        ranked[ranked < rule.min_p * ranked[0]] = 0
    return torch.zeros_like(mass).scatter(0, ids, ranked)
