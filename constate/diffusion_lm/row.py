"""One row of a masked diffusion batch: what is given, what is masked, what is fixed, and where it ends.

A row is a canvas of ids: the prompt, `max_new` masked places, the text to their right if any. It is filled
block by block. Knows one request and the model's Denoiser; the model itself, and other rows, are not its
business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.decode import Finished, Request
from ..core.sampling import DAMAGED
from .cache import Reading, told
from .denoiser import Denoiser
from .draw import draw, tempered
from .plan import Plan, counts
from .policies import PLACES, POLICIES, Look, late


@dataclass
class Row:
    """`canvas` holds the mask id where nothing is written; the output is `canvas[first:end]`, and its `end`
    moves forward to a token that ends the text. `blocks`, of `size` places at most, are filled in order, each
    in at most as many steps as `steps` says. `fixed` places are decided for good; `out` are those that can
    be read from the first on. `ending` are the ids that end a text, whether or not this row heeds them."""

    index: int
    request: Request
    plan: Plan
    about: Denoiser
    ending: frozenset[int]
    canvas: list[int]
    first: int
    end: int
    size: int
    blocks: list[range]
    steps: list[int]
    reading: Reading
    noise: torch.Generator
    seen: set[int]
    logprobs: dict[int, float] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)
    out: list[int] = field(default_factory=list)

    @property
    def masked(self) -> list[int]:
        """Places of the current block that are still to be filled."""
        if not self.blocks:
            return []
        return [p for p in self.blocks[0] if p < self.end and self.canvas[p] == self.about.mask_id]

    @property
    def unwritten(self) -> set[int]:
        """Masked places of all blocks."""
        return {p for p, token in enumerate(self.canvas) if token == self.about.mask_id}

    @property
    def visible(self) -> int:
        """How many places take part: all, or up to the end of the model's block that is being written."""
        if self.about.block is None:
            return len(self.canvas)
        return min(len(self.canvas), (self.blocks[0].start // self.about.block + 1) * self.about.block)

    @property
    def current(self) -> range:
        """The block that caches go by: the model's own, or the one being filled."""
        if self.about.block is None:
            return self.blocks[0]
        return range(self.blocks[0].start // self.about.block * self.about.block, self.visible)

    @property
    def how(self) -> dict[str, str]:
        told_cache = told(self.plan, self.reading.way)
        return {"policy": self.plan.told, "block": str(self.size), "cache": told_cache}

    def given(self, place: int) -> bool:
        return not self.first <= place < self.first + self.request.max_new

    def unmask(self, logits: Tensor) -> list[int]:
        """Fill places of the current block, given logits (m, vocab) float32 for its m masked ones, some of
        which are overwritten. Returns the places that are now fixed. Raises ValueError where they hold NaN
        or infinity."""
        masked, plan, rule = self.masked, self.plan, self.request.sampling
        # Relative to the largest: beside 1e4, float32 has no room for a logarithm.
        most = logits.amax(-1)
        parts = zip(logits.split(PLACES), most.split(PLACES), strict=True)
        whole = torch.cat([(some - peak[:, None]).logsumexp(-1) for some, peak in parts])
        if not bool(whole.isfinite().all()):
            raise ValueError(DAMAGED)
        self._suppress(logits, masked)
        filled = [p for p in self.blocks[0] if p in self.logprobs and p not in self.fixed]
        look = Look(
            tempered(logits, rule) if plan.confidence == "tempered" else logits,
            counts(len(masked), min(self.steps[0], len(masked)))[0],  # more steps than places: one each
            self.steps[0],
            self.noise,
            torch.tensor([self.logprobs[p] for p in filled]),
            plan.trusted,
            plan.nats,
            plan.order_noise,
        )
        policy = POLICIES[plan.policy]
        choice = late(policy, look, self.ending) if plan.eos == "late" else policy(look)
        tokens = draw(logits, choice.fill, rule, self.noise, self.seen)
        scores = (logits[choice.fill, tokens] - most[choice.fill] - whole[choice.fill]).clamp(max=0).tolist()
        for i, token, score in zip(choice.fill, tokens, scores, strict=True):
            self.canvas[masked[i]], self.logprobs[masked[i]] = token, score
            self.seen.add(token)
        for i in choice.clear:
            self.canvas[filled[i]] = self.about.mask_id
            del self.logprobs[filled[i]]
        self.steps[0] = max(1, self.steps[0] - 1)
        if plan.policy != "remask":
            return self._fix([masked[i] for i in choice.fill])
        return [] if self.masked else self._fix(list(self.blocks[0]))

    def proceed(self, finished: Finished) -> str | None:
        """Read on from the start as far as places are fixed: why the row ends there, if it does. Otherwise
        go to the next block where this one is full."""
        while (place := self.first + len(self.out)) < self.end and place in self.fixed:
            self.out.append(self.canvas[place])
            if self.out[-1] in self.request.eos:
                return "stop"  # such an id is never shown to `finished`
            if reason := finished(self.index, self.out):
                return reason
        if len(self.out) == self.request.max_new:
            return "length"
        if not self.masked:
            del self.blocks[0], self.steps[0]
        return None

    def _suppress(self, logits: Tensor, masked: Sequence[int]) -> None:
        """Exclude tokens that end the text where they may not stand: nowhere before given text."""
        never = self.plan.eos == "never" or bool(self.request.after)
        early = self.first + self.plan.min_new_tokens
        places = [i for i, p in enumerate(masked) if never or p < early]
        if places and self.ending:
            logits[torch.tensor(places)[:, None], torch.tensor(sorted(self.ending))] = -torch.inf

    def _fix(self, places: list[int]) -> list[int]:
        self.fixed.update(places)
        self.end = min([self.end, *(p + 1 for p in places if self.canvas[p] in self.request.eos)])
        return places
