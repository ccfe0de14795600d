"""What a forward costs on paper: FLOPs and bytes by component. Knows arithmetic, no tensors' values.

FLOPs count a multiply and an add as two and take in matrix products, attention (causal: only the pairs
that are seen), convolutions and recurrences in their token-by-token form; norms, activations and other
work of one operation an element are left out. Bytes are what must cross the memory bus at least once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn


@dataclass(frozen=True)
class Cost:
    """Cost of `new` tokens after `past` ones, in one row unless scaled by `times`.

    `flops` by component; `weights` maps a weight's identity to the bytes of it that are read, so that a
    shared weight counts once; `read` and `written` are bytes of "state", "conv" and "kv"; `held` is what
    the row keeps afterwards, by the same kinds.
    """

    flops: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[int, int] = field(default_factory=dict)
    read: Mapping[str, int] = field(default_factory=dict)
    written: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            _sum(self.flops, other.flops),
            {**self.weights, **other.weights},
            _sum(self.read, other.read),
            _sum(self.written, other.written),
            _sum(self.held, other.held),
        )

    def times(self, rows: int) -> Cost:
        """The same for `rows` rows at once: everything but the weights is paid by each row."""
        by = {name: {k: n * rows for k, n in getattr(self, name).items()} for name in _PER_ROW}
        return replace(self, **by)

    def stored_in(self, itemsize: int) -> Cost:
        """The same where recurrent state, which mixers price as float32, takes `itemsize` bytes a number."""
        by = {name: dict(getattr(self, name)) for name in ("read", "written", "held")}
        for entries in by.values():
            if "state" in entries:
                entries["state"] = entries["state"] * itemsize // 4
        return replace(self, **by)

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def traffic(self) -> int:
        """Bytes over the memory bus: weights once, state, history and KV read and written."""
        return self.weight_bytes + sum(self.read.values()) + sum(self.written.values())


_PER_ROW = ("flops", "read", "written", "held")


def _sum(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {k: a.get(k, 0) + b.get(k, 0) for k in {**a, **b}}


def read_weights(*weights: Tensor | None) -> dict[int, int]:
    """Each weight once, whole, by identity."""
    return {id(w): w.numel() * w.element_size() for w in weights if w is not None}


def matmul(new: int, *matrices: nn.Linear | Tensor) -> int:
    """FLOPs of `new` rows through each of these layers, or matrices of whatever shape."""
    sizes = (m.numel() if isinstance(m, Tensor) else m.in_features * m.out_features for m in matrices)
    return sum(2 * new * size for size in sizes)


def carried(kind: str, nbytes: int, new: int) -> Cost:
    """A state of fixed size: read and written once by a pass over any number of new tokens, and held."""
    moved = {kind: nbytes if new else 0}
    return Cost(read=moved, written=moved, held={kind: nbytes})


def linear_scan(new: int, h: int, dk: int, dv: int) -> int:
    """Decay 1, write 2, read 2 FLOPs an element of state, token by token."""
    return 5 * new * h * dk * dv


def delta_scan(new: int, h: int, dk: int, dv: int) -> int:
    """Decay 1, recall 2, write 2, read 2 FLOPs an element of state, token by token."""
    return 7 * new * h * dk * dv


def dplr_scan(new: int, h: int, dk: int, dv: int) -> int:
    """Recall 2, decay 1, write twice 2, read 2 FLOPs an element of state, token by token."""
    return 9 * new * h * dk * dv


def selective_scan(new: int, c: int, s: int) -> int:
    """Discretise 1, decay 1, write 2, read 2 FLOPs an element of state, token by token."""
    return 6 * new * c * s


def recurrence_scan(new: int, c: int) -> int:
    """Decay 1, write 1 FLOPs a channel of state, token by token."""
    return 2 * new * c


def seen_pairs(new: int, past: int, window: int | None = None, block: int | None = 1) -> int:
    """How many (query, key) pairs `new` tokens after `past` ones see: each its own place and those before,
    `window` of them at most, and the rest of its block of `block` places; with None the whole row."""
    total = past + new
    if block is None:
        return new * total
    if block > 1:
        beyond = -total % block  # places of the last block that are not there
        seeing = total - max(past, total - 1 - (total - 1) % block) if new else 0
        return _blockwise(total, block) - _blockwise(past, block) - seeing * beyond
    growing = new if window is None else max(0, min(new, window - past))  # those that see all before them
    return growing * past + growing * (growing + 1) // 2 + (new - growing) * (window or 0)


def _blockwise(places: int, block: int) -> int:
    """What `places` places from the first see together if each sees to the end of its block."""
    full, rest = divmod(places, block)
    return block * (block * full * (full + 1) // 2 + rest * (full + 1))
