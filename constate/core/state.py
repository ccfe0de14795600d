"""What a sequence carries from token to token, as an explicit value.

A `State` is a record of tensors whose axis 0 is the row, one row a sequence. Everything one does with
rows (copy, pick, join, overwrite, remove, count, store) is written once here, by walking the record's
fields; a new kind of state is a dataclass with shapes in its docstring. Knows no mixer and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from torch import Tensor

Kind = Literal["state", "conv", "kv"]


@dataclass(frozen=True)
class Leaf:
    """What the walk must know of a tensor field.

    `kind` is the column its bytes are counted in (None: bookkeeping, not counted). A leaf that `grows`
    has tokens on axis 1, as many as the capacity. A `ring` has the last `shape[1]` tokens on axis 1, the
    one at position t in slot t mod shape[1].
    """

    kind: Kind | None
    grows: bool = False
    ring: bool = False

    def held(self, tensor: Tensor, length: int) -> int:
        """How many places of axis 1 `length` tokens fill."""
        return min(length, tensor.shape[1])

    def droppable(self, tensor: Tensor, length: int) -> bool:
        """Whether a row of `length` tokens can forget its last ones by a shorter length alone."""
        return self.kind is None or self.grows or (self.ring and length <= tensor.shape[1])


def leaf(kind: Kind | None, *, grows: bool = False, ring: bool = False) -> Any:
    """A dataclass field that holds one tensor, (rows, ...)."""
    return field(metadata={"leaf": Leaf(kind, grows, ring)})


@dataclass
class State:
    """A record whose fields are tensors (declared with `leaf`), States, or tuples of States."""

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Tensor, Leaf]]:
        """Every tensor with its dotted name, in declaration order."""
        for f in fields(self):
            value = getattr(self, f.name)
            if "leaf" in f.metadata:
                yield prefix + f.name, value, f.metadata["leaf"]
            elif isinstance(value, State):
                yield from value.leaves(f"{prefix}{f.name}.")
            elif isinstance(value, tuple):
                for i, child in enumerate(value):
                    if isinstance(child, State):
                        yield from child.leaves(f"{prefix}{f.name}.{i}.")

    def map(self, fn: Callable[[str, Tensor, Leaf], Tensor], prefix: str = "") -> Self:
        """A record of the same shape with `fn(name, tensor, leaf)` in place of every tensor."""
        changed: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if "leaf" in f.metadata:
                changed[f.name] = fn(prefix + f.name, value, f.metadata["leaf"])
            elif isinstance(value, State):
                changed[f.name] = value.map(fn, f"{prefix}{f.name}.")
            elif isinstance(value, tuple) and any(isinstance(child, State) for child in value):
                changed[f.name] = tuple(c.map(fn, f"{prefix}{f.name}.{i}.") for i, c in enumerate(value))
        return replace(self, **changed)

    def assign(self, other: State) -> None:
        """Take over every field of `other`, a record of the same shape; tensors are not copied."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, State):
                mine.assign(theirs)
            elif isinstance(mine, tuple) and any(isinstance(child, State) for child in mine):
                for a, b in zip(mine, theirs, strict=True):
                    a.assign(b)
            else:
                setattr(self, f.name, theirs)

    def clone(self) -> Self:
        """An independent copy: later steps of the one never change the other."""
        return self.map(lambda _, t, __: t.clone())

    def select(self, rows: Sequence[int]) -> Self:
        """A copy with these rows in this order; a row may come several times (a fork)."""
        return self.map(lambda _, t, __: t[list(rows)])

    def bytes(self, lengths: Sequence[int] | None = None) -> dict[Kind, int]:
        """Bytes by kind: as held, or, given the rows' lengths, what those tokens need."""
        count: dict[Kind, int] = {"state": 0, "conv": 0, "kv": 0}
        for _, t, of in self.leaves():
            if of.kind is None:
                continue
            if lengths is not None and (of.grows or of.ring):
                places = sum(of.held(t, n) for n in lengths)
                count[of.kind] += places * t.shape[2:].numel() * t.element_size()
            else:
                count[of.kind] += t.numel() * t.element_size()
        return count

    def can_drop(self, length: int) -> bool:
        """Whether a row of `length` tokens can forget its last ones exactly."""
        return all(of.droppable(t, length) for _, t, of in self.leaves())


@dataclass
class Nothing(State):
    """The state of a mixer that looks at one token only."""


@dataclass
class Conv(State):
    """conv (rows, w - 1, channels): the last inputs of a short convolution, oldest first."""

    conv: Tensor = leaf("conv")


@dataclass
class Matrix(State):
    """s (rows, h, dk, dv) float32: the state of a linear recurrence."""

    s: Tensor = leaf("state")


@dataclass
class ConvSSM(State):
    """conv (rows, w - 1, channels), oldest first; ssm, the recurrent state in the layout of its op:
    (rows, h, dk, dv) for linear and delta scans, (rows, channels, s) for the selective scan, (rows, channels)
    for the linear recurrence."""

    conv: Tensor = leaf("conv")
    ssm: Tensor = leaf("state")


@dataclass
class KV(State):
    """k (rows, capacity, hk, dk), v (rows, capacity, hk, dv): every token so far; the tail is unused."""

    k: Tensor = leaf("kv", grows=True)
    v: Tensor = leaf("kv", grows=True)


@dataclass
class Window(State):
    """k (rows, W, hk, dk), v (rows, W, hk, dv): the last W tokens, position t in slot t mod W."""

    k: Tensor = leaf("kv", ring=True)
    v: Tensor = leaf("kv", ring=True)


@dataclass
class Latent(State):
    """kv (rows, capacity, 1, rank + shared): for every token the normed latent that all heads' keys and
    values are made from, then the key that the heads share, rotated where it is."""

    kv: Tensor = leaf("kv", grows=True)


@dataclass
class Parts(State):
    """The states of a mixer that holds several, in its order."""

    parts: tuple[State, ...]


def zip_leaves(states: Sequence[State]) -> Iterator[tuple[str, list[Tensor], Leaf]]:
    """The leaves of several records side by side. Raises ValueError where they are not alike."""
    walks = [list(s.leaves()) for s in states]
    names = [[name for name, _, _ in walk] for walk in walks]
    if any(other != names[0] for other in names[1:]):
        raise ValueError(f"these states have different fields: {names[0][:4]}... and {names[-1][:4]}...")
    for parts in zip(*walks, strict=True):
        yield parts[0][0], [t for _, t, _ in parts], parts[0][2]


@contextmanager
def in_float32(stored: Tensor) -> Iterator[Tensor]:
    """What a step op updates in place: the state itself where it is stored as float32, else a float32 copy
    that is rounded back on leaving, so that the output never sees the rounding of its own token."""
    exact = stored.float()
    yield exact
    if exact is not stored:
        stored.copy_(exact)


def grown(tensor: Tensor, capacity: int) -> Tensor:
    """A copy of a growing leaf with room for `capacity` tokens, the new tail zero."""
    wide = tensor.new_zeros(tensor.shape[0], capacity, *tensor.shape[2:])
    wide[:, : tensor.shape[1]] = tensor
    return wide
