"""Which places of a row a call reads again, and which its cache holds from before. Knows places alone.

A place that is *settled* is read once and its keys and values kept; all others are read at every call. Which
are settled is all that the ways differ in:

- `none`: no place ever.
- `exact`, for block-causal models: all before the block that is being written. They see nothing of it, so
  that what is kept stays right. A finished block is read for the last time in the next block's first call,
  which absorbs it.
- `prefix`, for models that see both sides: all before the current block (Fast-dLLM, Wu et al., 2505.22618).
- `dual`: all outside the current block, masked places after it included (the same paper's DualCache).
- `delayed`: every place that is not masked, wherever it stands, from the call after it was filled
  (dKV-Cache, Ma et al., 2505.15781).

The last three are approximations: in a model that sees both sides, keys and values of settled places would
change with every place that is filled. They are made anew every `refresh` calls, prefix and dual also with
each block. Keys of one row then stand in the order in which they were settled, each turned to its own place.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from .plan import Plan


@dataclass(frozen=True)
class Read:
    """One row's part of a call: `places` in this order, the first `keep` of which are absorbed; `anew` if
    what the cache holds of the row is forgotten before."""

    places: list[int]
    keep: int
    anew: bool


@dataclass
class Reading:
    """What the cache holds of one row. With `lead` 1 the logits for a place come from the place before it,
    which is therefore read again wherever its successor is masked."""

    way: str
    lead: int
    refresh: int | None = None
    held: set[int] = field(default_factory=set)
    age: int = 0
    block: range = range(0)

    def next(self, block: range, visible: int, masked: Collection[int]) -> Read:
        """The next call's part, when places of `block` are being filled, the row has `visible` places and
        those in `masked` are not filled yet."""
        anew = self.way == "none" or self.age in (0, self.refresh)
        if self.way in ("prefix", "dual"):
            anew = anew or block != self.block
        if anew:
            self.held, self.age = set(), 0
        settled = self._settled(block, visible, masked)
        fresh = [p for p in settled if p not in self.held]
        again = sorted(set(range(visible)).difference(settled))
        self.held.update(fresh)
        self.age, self.block = self.age + 1, block
        return Read(fresh + again, len(fresh), anew)

    def _settled(self, block: range, visible: int, masked: Collection[int]) -> list[int]:
        first = max(block.start - self.lead, 0)
        if self.way in ("exact", "prefix"):
            return list(range(first))
        if self.way == "dual":
            return [*range(first), *range(block.stop, visible)]
        if self.way == "delayed":
            return [p for p in range(visible) if p not in masked and not (self.lead and p + 1 in masked)]
        return []


def told(plan: Plan, way: str) -> str:
    """The way in words: an approximation is called one."""
    if plan.refresh == 1:
        return f"none ({plan.cache}, anew at every call)"
    if way in ("none", "exact"):
        return way
    often = [] if way == "delayed" else ["with each block"]
    often += [f"every {plan.refresh} calls"] if plan.refresh else []
    return f"approximate ({way}, {'anew ' + ' and '.join(often) if often else 'never anew'})"
