"""How many sequences fit: a sum, made before any weight is loaded. Pure functions of models on paper.

A sequence takes one slot, its recurrent state and histories, however long it is, and a block of keys and
values for each GRAIN tokens begun: what `init_cache` allocates for it. A windowed layer's keys and values
are a ring of fixed size and so part of the slot. Knows sizes; allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.cache import GRAIN
from .predict.paper import Paper
from .units import size


@dataclass(frozen=True)
class Capacity:
    """Room for `slots` sequences that together keep `blocks` blocks of GRAIN tokens; `slot_bytes` and
    `block_bytes` are those of one, `nbytes` of all. `warning` says so where less was given than asked."""

    slots: int
    blocks: int
    slot_bytes: int
    block_bytes: int
    warning: str | None = None

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes + self.blocks * self.block_bytes


def charge(tokens: int) -> tuple[int, int]:
    """What one sequence of so many tokens takes: (slots, blocks)."""
    return 1, -(-tokens // GRAIN)


def sizes(about: Paper) -> tuple[int, int]:
    """Bytes of a slot and of a block."""
    slot = block = 0
    with torch.device("meta"):
        states = [mixer.init_state(1, GRAIN, about.model.state_dtype) for mixer in about.model.mixers()]
    for state in states:
        for _, tensor, of in state.leaves():
            if of.kind is not None and of.grows:
                block += tensor.nbytes
            elif of.kind is not None:
                slot += tensor.nbytes
    return slot, block


def capacity(about: Paper, rows: int, tokens: int, memory: int) -> Capacity:
    """Room for `rows` sequences of `tokens` tokens in `memory` bytes, the weights among them; for fewer, with
    a warning, where not all fit. Raises ValueError where not one does, with the longest that would."""
    slot, block = sizes(about)
    own, blocks = charge(tokens)
    each, free = own * slot + blocks * block, memory - about.weight_bytes
    fit = rows if not each else min(rows, max(0, free) // each)
    if fit < 1 or free < 0:
        left = (free - slot) // block * GRAIN if block and free >= slot else 0
        hint = f"one of {left:,} tokens would fit" if left > 0 else "not even an empty one would fit"
        raise ValueError(
            f"{size(memory)} for weights of {size(about.weight_bytes)} and a sequence of {tokens:,} tokens, "
            f"which takes {size(each)}: {hint}"
        )
    warning = None
    if fit < rows:
        wanted = size(rows * each)
        warning = f"{rows} sequences of {tokens:,} tokens want {wanted} and {size(free)} is there: {fit} fit"
    return Capacity(fit, fit * blocks, slot, block, warning)
