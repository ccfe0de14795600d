"""How a checkpoint's tensors become a model's parameters, as declared rules, each with its inverse.

A published architecture lists its rules once; `fill` reads a checkpoint with them and `export` writes one
back. Nothing is skipped in silence: a name that no rule takes, a parameter that no rule fills, or one
filled twice with different values is an error. Knows names and tensors; no model and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Size, Tensor

from .names import Binding, folded, match, write

Change = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Rule:
    """The tensors that `src` names, taken together, become the parameters that `dst` names.

    A mark such as `{i}` in a name stands for a whole number, the same on both sides; `*` for any text.
    `forth` maps the tensors of src to those of dst, `back` the other way. An `optional` rule reads its
    sources where a file has them; export uses it only for a parameter that no other rule writes. With a
    `count`, `{e}` in src is each number below it, and the rule takes all of their tensors together.
    """

    src: tuple[str, ...]
    dst: tuple[str, ...]
    forth: Change
    back: Change
    optional: bool = False
    count: int | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """`src`, with `{e}` written out where it is counted."""
        if self.count is None:
            return self.src
        return tuple(name.replace("{e}", str(e)) for e in range(self.count) for name in self.src)

    def slot(self, side: str, name: str) -> tuple[int, Binding] | None:
        """Which place of `sources` or `dst` this name takes, and what the other marks stand for."""
        for at, pattern in enumerate(self.src if side == "sources" else self.dst):
            if (binding := match(pattern, name)) is not None:
                if self.count is None or side == "dst":
                    return at, binding
                marks = dict(binding)
                e = int(marks.pop("e"))
                return (e * len(self.src) + at, tuple(marks.items())) if e < self.count else None
        return None


def same(src: str, dst: str, optional: bool = False) -> Rule:
    """The same tensor under another name. A tied head is an optional second source of the embedding."""
    return Rule((src,), (dst,), list, list, optional)


def head(src: str, tied: bool) -> Rule:
    """The output layer: the embedding once more where it is tied, which a file may then leave out."""
    return same(src, "embed.weight", optional=True) if tied else same(src, "head.weight")


def drop(src: str) -> Rule:
    """A tensor that carries nothing we need, such as a stored rotary table. Export does not write it."""
    return Rule((src,), (), lambda _: [], lambda _: [])


def everything() -> Rule:
    """Every name as it stands: our own format."""
    return same("*", "*")


def fuse(src: Sequence[str], dst: str, sizes: Sequence[int] | None = None, dim: int = 0) -> Rule:
    """Several tensors laid end to end along `dim`; `sizes` (None: equal parts) says how long each is."""
    count = len(src)
    return Rule(tuple(src), (dst,), lambda t: [_join(t, sizes, dim)], lambda t: _cut(t[0], count, sizes, dim))


def split(src: str, dst: Sequence[str], sizes: Sequence[int] | None = None, dim: int = 0) -> Rule:
    """One tensor cut along `dim` into pieces of `sizes` (None: equal parts)."""
    count = len(dst)
    return Rule((src,), tuple(dst), lambda t: _cut(t[0], count, sizes, dim), lambda t: [_join(t, sizes, dim)])


def reorder(
    src: Sequence[str], dst: Sequence[str], order: Tensor, src_sizes: Sequence[int], dst_sizes: Sequence[int]
) -> Rule:
    """Rows in another order: row n of the tensors of `dst` laid end to end is row order[n] of those of
    `src`. order (rows,) int64, each row once; the sizes say how many rows each tensor has."""
    inverse = order.argsort()

    def taken(t: list[Tensor], old: Sequence[int], order: Tensor, new: Sequence[int]) -> list[Tensor]:
        rows = _join(t, old, 0)
        return _cut(rows[order.to(rows.device)], len(new), new, 0)

    return Rule(
        tuple(src),
        tuple(dst),
        lambda t: taken(t, src_sizes, order, dst_sizes),
        lambda t: taken(t, dst_sizes, inverse, src_sizes),
    )


def stack(src: Sequence[str], dst: str, count: int) -> Rule:
    """`{e}` in `src` numbers `count` equal things, such as experts: row e of `dst` is its tensors laid end
    to end along their axis 0."""
    parts = len(src)

    def forth(t: list[Tensor]) -> list[Tensor]:
        if odd := [tuple(x.shape) for x in t if x.shape != t[0].shape]:
            raise ValueError(f"shapes {tuple(t[0].shape)} and {odd[0]} cannot be stacked")
        return [torch.cat(t).unflatten(0, (count, -1))]

    def back(t: list[Tensor]) -> list[Tensor]:
        return [part for row in t[0] for part in _cut(row, parts, None, 0)]

    return Rule(tuple(src), (dst,), forth, back, count=count)


def transpose(src: str, dst: str) -> Rule:
    """A matrix stored the other way round."""
    return Rule((src,), (dst,), lambda t: [t[0].mT], lambda t: [t[0].mT])


def reshape(src: str, dst: str, src_shape: Sequence[int], dst_shape: Sequence[int]) -> Rule:
    """The same numbers in another shape: a convolution's (c, 1, w) as (c, w). -1 stands for any length."""
    return Rule(
        (src,),
        (dst,),
        lambda t: [_reshape(t[0], src_shape, dst_shape)],
        lambda t: [_reshape(t[0], dst_shape, src_shape)],
    )


def fill(
    rules: Sequence[Rule],
    source: Mapping[str, Tensor],
    shapes: Mapping[str, Size],
    finish: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
) -> dict[str, Tensor]:
    """Every parameter of `shapes` out of the tensors of `source`.

    The first rule that knows a name takes it. `finish(parameter, tensor)` is applied to each as it is
    made (a cast, a copy), so that no second model is held; without it a parameter may share `source`'s
    memory. Raises ValueError that names every fault: first those of names, before any tensor is read,
    then those of shapes and values.
    """
    jobs, untaken = _plan(rules, source, "sources")
    made = {name: job for job in jobs for name in job.dst}
    _raise(
        {
            "no rule takes": untaken,
            "half of what a rule takes": [
                f"{j.came} without {_listed(j.absent, ', ')}" for j in jobs if j.absent
            ],
            "for a parameter that this model does not have": [
                f"{job.came} (for {name})" for name, job in made.items() if name not in shapes
            ],
            "missing": [_wanted(rules, name) for name in shapes if name not in made],
        }
    )
    filled: dict[str, Tensor] = {}
    origin: dict[str, _Job] = {}
    misshapen: list[str] = []
    clashing: list[str] = []

    def take(job: _Job) -> None:  # by itself, so that nothing of it is held while the next one is made
        try:
            tensors = job.forth(source)
        except ValueError as error:
            return misshapen.append(f"{job.came}: {error}")
        for name, tensor in tensors.items():
            if tensor.shape != shapes[name]:
                misshapen.append(f"{job.came} {tuple(tensor.shape)} for {name} {tuple(shapes[name])}")
            elif name not in filled:
                filled[name], origin[name] = finish(name, tensor), job
            elif not torch.equal(origin[name].forth(source)[name].to(tensor.dtype), tensor):
                clashing.append(f"{name} by {origin[name].came} and by {job.came}")

    for job in jobs:
        take(job)
    _raise({"wrong shape": misshapen, "filled twice with different values": clashing})
    return filled


def export(rules: Sequence[Rule], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `fill`: the checkpoint's tensors out of the parameters, whose memory they may share.
    Raises ValueError for a parameter that no rule writes."""
    jobs, unwritten = _plan(sorted(rules, key=lambda rule: rule.optional), params, "dst")
    partial = [f"{j.came} without {_listed(j.absent, ', ')}" for j in jobs if j.absent]
    _raise({"no rule writes": unwritten, "half of what a rule writes": partial})
    return {name: tensor for job in jobs for name, tensor in job.back(params).items()}


class _Job(NamedTuple):
    """A rule met by real names: `got` on the side that was searched, by slot."""

    rule: Rule
    binding: Binding
    got: Mapping[int, str]
    side: tuple[str, ...]

    @property
    def dst(self) -> list[str]:
        return write(self.rule.dst, self.binding)

    @property
    def came(self) -> str:
        return _listed(list(self.got.values()), " + ")

    @property
    def absent(self) -> list[str]:
        return [name for slot, name in enumerate(write(self.side, self.binding)) if slot not in self.got]

    def forth(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given = [tensors[self.got[slot]] for slot in range(len(self.rule.sources))]
        return dict(zip(self.dst, self.rule.forth(given), strict=True))

    def back(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given = [tensors[self.got[slot]] for slot in range(len(self.rule.dst))]
        return dict(zip(write(self.rule.sources, self.binding), self.rule.back(given), strict=True))


def _plan(rules: Sequence[Rule], names: Iterable[str], side: str) -> tuple[list[_Job], list[str]]:
    """Which rule takes which names of one side, in the rules' order; and the names that none takes."""
    jobs: dict[tuple[int, Binding], dict[int, str]] = {}
    untaken: list[str] = []
    for name in names:
        for at, rule in enumerate(rules):
            if hit := rule.slot(side, name):
                jobs.setdefault((at, hit[1]), {})[hit[0]] = name
                break
        else:
            untaken.append(name)
    ordered = sorted(jobs.items(), key=lambda item: item[0][0])
    return [_Job(rules[at], marks, got, getattr(rules[at], side)) for (at, marks), got in ordered], untaken


def _wanted(rules: Sequence[Rule], param: str) -> str:
    """A parameter with the names that would have filled it."""
    for rule in rules:
        for pattern in rule.dst:
            if (binding := match(pattern, param)) is not None:
                names = write(rule.src, (*binding, ("e", "*")))
                return param if names == [param] else f"{param} (from {', '.join(names)})"
    return f"{param} (no rule makes it)"


def _raise(faults: Mapping[str, Sequence[str]]) -> None:
    lines = [f"\n  {kind}: {'; '.join(folded(names))}" for kind, names in faults.items() if names]
    if lines:
        raise ValueError(
            "these tensors do not fit this model (another dialect, another config.json, or half a file?)"
            + "".join(lines)
        )


def _listed(names: Sequence[str], between: str) -> str:
    more = [f"{len(names) - 4} more"] if len(names) > 5 else []
    return between.join([*names[:4], *more] if more else names)


def _parts(total: int, count: int, sizes: Sequence[int] | None) -> list[int]:
    if sizes is None and total % count:
        raise ValueError(f"a length of {total} does not fall into {count} equal parts")
    return list(sizes) if sizes is not None else [total // count] * count


def _join(tensors: Sequence[Tensor], sizes: Sequence[int] | None, dim: int) -> Tensor:
    got = [t.shape[dim] for t in tensors]
    want = _parts(sum(got), len(tensors), sizes)
    if got != want or any(t.movedim(dim, 0)[0].shape != tensors[0].movedim(dim, 0)[0].shape for t in tensors):
        raise ValueError(
            f"shapes {[tuple(t.shape) for t in tensors]}, wanted lengths {want} along axis {dim}"
        )
    return torch.cat(list(tensors), dim)


def _cut(tensor: Tensor, count: int, sizes: Sequence[int] | None, dim: int) -> list[Tensor]:
    want = _parts(tensor.shape[dim], count, sizes)
    if sum(want) != tensor.shape[dim]:
        raise ValueError(f"a length of {tensor.shape[dim]} does not fall into parts of {want}")
    return list(tensor.split(want, dim))


def _reshape(tensor: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    if len(old) != tensor.ndim or any(w not in (-1, n) for w, n in zip(old, tensor.shape, strict=True)):
        raise ValueError(f"shape {tuple(tensor.shape)}, wanted {tuple(old)}")
    return tensor.reshape(tuple(new))
