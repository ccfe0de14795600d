"""In which order and how fast one request's places are unmasked: its options, checked.

Knows the names of policies and caches and which options go together; no model, no tensor. A model's own
limits (what its attention sees) are checked where the two meet, in admit.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import index
from typing import Any

POLICIES = (
    *("confidence", "margin", "entropy", "random", "ancestral"),
    *("threshold", "entropy_bound", "remask"),
)
SCORED = ("confidence", "margin", "entropy")  # whose scores may be blurred
APPROXIMATE = ("prefix", "dual", "delayed")
CACHES = ("auto", "none", "exact", *APPROXIMATE)
THRESHOLD, BOUND = 0.9, 0.5


@dataclass(frozen=True)
class Plan:
    """How the masked places of one request are filled. Raises ValueError for values that make no sense.

    `policy`: which places are unmasked at a step (see policies.py). `steps`: model calls for the whole
    output, shared among its blocks by their sizes; None is one a place. With the policies "threshold" and
    "entropy_bound", which unmask as many as they trust, it is an upper bound. `block`: places are filled
    in stretches of so many, left to right; None is the model's own block, or 32, and a number beyond the
    output is the whole of it.
    `threshold`: a place is trusted from this probability on (0.9). `entropy_bound`: nats that the places
    unmasked together may sum to (0.5). `confidence`: "clean" measures certainty on the model's own
    probabilities; "tempered" on those that tokens are drawn from, after temperature, top-k and top-p, so
    that a low temperature makes every place look certain and the order left to right. `order_noise` blurs
    the order of confidence, margin and entropy: so many times Gumbel noise is added to their scores.
    `cache`: "auto" is "exact" where the model allows it (block-causal attention) and else "none".
    "prefix", "dual" and "delayed" are approximations for models that see both sides (see cache.py),
    computed anew every `refresh` calls; None is once a block (prefix, dual) or never (delayed).
    `guidance` w: logits l become u + (1 + w)(l - u), where u is what the model says with all given text
    masked (classifier-free guidance as in Nie et al., 2502.09992); 0 is none.
    `eos`: "late" unmasks places whose likeliest token ends the text after all others of the block, "never"
    excludes those tokens. `min_new_tokens` places from the first on do not hold them either.
    """

    policy: str = "confidence"
    steps: int | None = None
    block: int | None = None
    threshold: float | None = None
    entropy_bound: float | None = None
    confidence: str = "clean"
    order_noise: float = 0.0
    cache: str = "auto"
    refresh: int | None = None
    guidance: float = 0.0
    eos: str = "any"
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        _one_of("policy", self.policy, POLICIES)
        _one_of("cache", self.cache, CACHES)
        _one_of("confidence", self.confidence, ("clean", "tempered"))
        _one_of("eos", self.eos, ("any", "late", "never"))
        for name in ("steps", "block", "refresh"):
            if getattr(self, name) is not None:
                _count(self, name, 1)
        _count(self, "min_new_tokens", 0)
        # Written so that NaN, for which every comparison is false, is refused too.
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold}: a probability from 0 to 1 is wanted")
        if self.entropy_bound is not None and not 0 <= self.entropy_bound < math.inf:
            raise ValueError(f"entropy_bound={self.entropy_bound}: a finite number of nats from 0 is wanted")
        if not 0 <= self.order_noise < math.inf:
            raise ValueError(f"order_noise={self.order_noise}: a finite number of at least 0 is wanted")
        if not 0 <= self.guidance < math.inf:
            raise ValueError(f"guidance={self.guidance}: a finite number of at least 0 is wanted; 0 is none")
        for name in ("threshold", "entropy_bound"):
            if getattr(self, name) is not None and self.policy != name:
                raise ValueError(f"{name} is the policy {name!r}'s, and this one is {self.policy!r}")
        if self.order_noise and self.policy not in SCORED:
            raise ValueError(f"order_noise blurs {', '.join(SCORED)}; the policy is {self.policy!r}")
        if self.refresh is not None and self.cache not in APPROXIMATE:
            raise ValueError(
                f"refresh is for an approximate cache, {', '.join(APPROXIMATE)}; the cache is {self.cache!r}"
            )
        if self.policy == "remask" and self.cache == "delayed":
            raise ValueError(
                "a delayed cache keeps what is unmasked for good; the policy 'remask' needs another"
            )

    @property
    def told(self) -> str:
        """The policy in words, with what else decides the order."""
        parts = [self.policy]
        if self.policy == "threshold":
            parts.append(f"{self.trusted}")
        if self.policy == "entropy_bound":
            parts.append(f"{self.nats} nats")
        if self.policy not in ("random", "ancestral"):
            parts.append(self.confidence)
        if self.order_noise:
            parts.append(f"order noise {self.order_noise}")
        if self.eos == "late":
            parts.append("end of text late")
        return ", ".join(parts)

    @property
    def trusted(self) -> float:
        return THRESHOLD if self.threshold is None else self.threshold

    @property
    def nats(self) -> float:
        return BOUND if self.entropy_bound is None else self.entropy_bound


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known; one of {', '.join(known)} is wanted")


def _count(plan: Plan, name: str, least: int) -> None:
    value = getattr(plan, name)
    try:
        whole = index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r}: a whole number is wanted") from None
    if whole < least:
        raise ValueError(f"{name}={value}: at least {least} is wanted")
    object.__setattr__(plan, name, whole)


def counts(masks: int, steps: int) -> list[int]:
    """How many places of `masks` each of `steps` steps unmasks: as even as it goes, the larger first."""
    return [masks // steps + (step < masks % steps) for step in range(steps)]


def shares(sizes: list[int], steps: int) -> list[int]:
    """`steps` shared among blocks of these sizes in proportion, at least one each and all of them used.
    Raises ValueError for fewer steps than blocks."""
    if steps < len(sizes):
        raise ValueError(
            f"steps={steps} for {len(sizes)} blocks of places: each takes one at the least. "
            "Ask for more steps, or for longer blocks"
        )
    given, places = [], sum(sizes)
    for i, size in enumerate(sizes):
        later = len(sizes) - i - 1
        share = max(1, min(round(steps * size / places), steps - later))
        given.append(share)
        steps, places = steps - share, places - size
    return given
