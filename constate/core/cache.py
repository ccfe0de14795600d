"""The state of a whole model: one State an invocation of a mixer, and how many tokens each row has read.

The lengths live here and nowhere else, on host and device. Knows how a model's state is stored in a
file; of the model it knows only `init_cache` and `fingerprint`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .checkpoint import whole
from .state import State, grown, leaf, zip_leaves

if TYPE_CHECKING:
    from .recording import Recording

FORMAT = "constate.cache.1"
GRAIN = 64  # a cache that may grow does so in multiples of this many tokens


class CacheModel(Protocol):
    """What loading a cache needs of a model."""

    @property
    def fingerprint(self) -> str: ...
    def init_cache(self, rows: int, capacity: int | None = None) -> Cache: ...


@dataclass
class Cache(State):
    """States of all mixers, in the order in which a forward meets them, and the rows' lengths.

    `lengths[r]` tokens of row r have been absorbed (host); `past` (rows,) int64 is the same on the
    device. `capacity` is how many tokens the growing leaves have room for; `fixed` says that it may not
    change. `model` is the fingerprint of the model that made it. `recording` is a decode step prepared for
    these very tensors, where the backend prepares one; no copy has it.
    """

    states: tuple[State, ...]
    lengths: tuple[int, ...]
    capacity: int
    fixed: bool
    model: str
    past: Tensor = leaf(None)
    recording: Recording | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def nbytes(self, used: bool = False) -> int:
        """Bytes of weights-independent memory: as held, or with `used` what the tokens so far need."""
        return sum(self.bytes(self.lengths if used else None).values())

    # -- rows -----------------------------------------------------------------------------------

    def select(self, rows: Sequence[int]) -> Self:
        rows = [self._row(r) for r in rows]
        picked = super().select(rows)
        picked.lengths = tuple(self.lengths[r] for r in rows)
        return picked

    @staticmethod
    def merge(caches: Sequence[Cache]) -> Cache:
        """A cache with the rows of all of these, in order; a copy. Shorter capacities are padded."""
        if not caches:
            raise ValueError("Cache.merge([]): at least one cache is wanted")
        first = caches[0]
        for other in caches[1:]:
            first._same_model(other)
        capacity = max(c.capacity for c in caches)
        joined = {}
        for name, parts, of in zip_leaves(caches):
            joined[name] = torch.cat([grown(t, capacity) if of.grows else t for t in parts])
        merged = first.map(lambda name, _, __: joined[name])
        merged.lengths = tuple(n for c in caches for n in c.lengths)
        merged.capacity, merged.fixed = capacity, any(c.fixed for c in caches)
        return merged

    def write(self, row: int, other: Cache) -> None:
        """Overwrite one row with the single row of `other`, at the cost of one row's bytes."""
        row = self._row(row)
        self._same_model(other)
        if other.rows != 1:
            raise ValueError(f"write(row, other): other has {other.rows} rows; select([r]) the one you mean")
        if other.lengths[0] > self.capacity:
            self._grow(other.lengths[0])
        for _, (mine, theirs), of in zip_leaves([self, other]):
            if of.grows:
                n = min(mine.shape[1], theirs.shape[1])
                mine[row, :n].copy_(theirs[0, :n])
                mine[row, n:].zero_()
            else:
                mine[row].copy_(theirs[0])
        self.lengths = (*self.lengths[:row], other.lengths[0], *self.lengths[row + 1 :])

    def drop(self, row: int) -> None:
        """Remove one row: the last row moves into the hole, at the cost of one row's bytes."""
        row, last = self._row(row), self.rows - 1
        lengths = list(self.lengths)
        if row != last:
            lengths[row] = lengths[last]
            for _, t, _ in self.leaves():
                t[row].copy_(t[last])
        self.assign(self.map(lambda _, t, __: t[:last]))
        self.lengths = tuple(lengths[:last])

    # -- tokens ---------------------------------------------------------------------------------

    def reserve(self, new: Sequence[int]) -> None:
        """Make room for `new[r]` more tokens in each row. Raises ValueError past a fixed capacity."""
        need = max([0, *(n + m for n, m in zip(self.lengths, new, strict=True))])
        if need > self.capacity:
            self._grow(need)

    def advance(self, new: Sequence[int]) -> None:
        """Count `new[r]` more tokens as absorbed."""
        self.lengths = tuple(n + m for n, m in zip(self.lengths, new, strict=True))
        if len(set(new)) == 1:
            self.past.add_(new[0])
        else:
            self.past.add_(torch.tensor(new, device=self.past.device))

    def truncate(self, row: int, n: int) -> None:
        """Forget all but the first n tokens of a row. Raises ValueError where a state cannot: a
        recurrent state has no earlier value to go back to, and an overwritten window has lost it."""
        row, length = self._row(row), self.lengths[row]
        if not 0 <= n <= length:
            raise ValueError(f"truncate({row}, {n}): the row holds {length} tokens")
        if n < length and not self.can_drop(length):
            raise ValueError(
                f"truncate({row}, {n}): this cache holds a recurrent state or an overwritten window, which "
                "cannot be shortened. Keep a clone() from before, or prefill the first tokens again"
            )
        self.lengths = (*self.lengths[:row], n, *self.lengths[row + 1 :])
        self.past[row] = n

    # -- files ----------------------------------------------------------------------------------

    def save(self, path: str | Path, note: Mapping[str, Any] | None = None) -> None:
        """Store every state, the lengths and a small JSON `note` as one safetensors file. Raises OSError
        where it cannot be written; a file that was there before is then untouched."""
        longest = max(self.lengths, default=0)
        tensors = {
            name: (t[:, :longest] if of.grows else t).detach().cpu().contiguous().clone()
            for name, t, of in self.leaves()
        }
        header = {"lengths": self.lengths, "model": self.model, "note": dict(note or {})}
        metadata = {"format": FORMAT, "header": json.dumps(header)}
        try:
            whole(Path(path), lambda new: save_file(tensors, new, metadata))
        except SafetensorError as error:
            raise OSError(f"{path}: the state could not be stored ({error})") from error

    @staticmethod
    def load(path: str | Path, model: CacheModel) -> Cache:
        """Read a saved cache into fresh memory of `model`. Raises ValueError for another model's file,
        a missing or misshapen tensor, or a file that is no cache."""
        header = read_header(path)
        if header["model"] != model.fingerprint:
            raise ValueError(
                f"{path} holds the state of another model ({header['model']}; this one is "
                f"{model.fingerprint}). A state means nothing to other weights: load the model it came from"
            )
        lengths = tuple(header["lengths"])
        cache = model.init_cache(len(lengths), max(lengths, default=0))
        cache.lengths, cache.fixed = lengths, False
        with safe_open(path, "pt") as file:
            names = {name for name, _, _ in cache.leaves()}
            if names != set(file.keys()):
                odd = sorted(names ^ set(file.keys()))
                raise ValueError(f"{path}: tensors missing or not known to this model: {odd}")

            def fresh(name: str, empty: Tensor, _: Any) -> Tensor:
                stored = file.get_tensor(name)
                if stored.shape != empty.shape:
                    raise ValueError(f"{path}: {name} is {tuple(stored.shape)}, not {tuple(empty.shape)}")
                # Copied: a mapped tensor may be misaligned, and other vector loops round differently.
                # In this model's dtypes: a file may come from the same weights loaded in another.
                return torch.empty_like(empty).copy_(stored)

            return cache.map(fresh)

    # -- inside ---------------------------------------------------------------------------------

    def _grow(self, need: int) -> None:
        if self.fixed:
            raise ValueError(
                f"the cache was made for {self.capacity} tokens a row and {need} are wanted: "
                "give init_cache a larger capacity, or none to let it grow"
            )
        capacity = -(-max(need, self.capacity * 3 // 2) // GRAIN) * GRAIN
        self.assign(self.map(lambda _, t, of: grown(t, capacity) if of.grows else t))
        self.capacity = capacity

    def _row(self, row: int) -> int:
        row = int(index(row))  # a tensor's element or a bool would index otherwise than the number it is
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row}: the cache has rows 0 to {self.rows - 1}")
        return row

    def _same_model(self, other: Cache) -> None:
        if other.model != self.model:
            raise ValueError(f"these caches belong to different models: {self.model} and {other.model}")


def read_header(path: str | Path) -> dict[str, Any]:
    """`lengths`, `model` and `note` of a saved cache. Raises ValueError where the file is no cache."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; a state is written by --save-state or Cache.save") from None
    except (SafetensorError, OSError) as error:  # a folder is an OSError that does not name it
        raise ValueError(f"{path} is not a saved state: {error}") from None
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is a safetensors file, but no state saved by --save-state or Cache.save")
    return json.loads(metadata["header"])
