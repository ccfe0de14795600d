"""Fewer launches of the same: jobs are put behind the jobs and scans whose results they read, and side by
side with others. Knows works and drafts by what they read and write; knows no kernel and no model.

A job moves up the tape to the launch that it joins, past whatever neither reads what it writes nor writes
what it reads or writes. Nothing moves across a step that is Python's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .drafts import OUTPUTS, WIDEST, Draft, activation
from .works import Launched, Product, Python, Region, Scan, Work, meet, region

SIDE_BY_SIDE = 8
"""Jobs of one launch: more would make one kernel of all that a model does."""


class Readers:
    """Who reads what, of the works as they were recorded."""

    def __init__(self, works: Sequence[Work]):
        self.of: dict[int, list[tuple[int, Region]]] = {}
        self.place = {id(work): i for i, work in enumerate(works)}
        for i, work in enumerate(works):
            for part in work.regions()[0]:
                self.of.setdefault(part.storage, []).append((i, part))

    def beside(self, part: Region, reader: Work, since: int = -1, until: bool = False) -> bool:
        """Whether another than `reader` reads `part` after it was written `since`; `until`: and before the
        reader does."""
        own = self.place[id(reader)]
        found = (i for i, other in self.of.get(part.storage, []) if i > since and other.meets(part))
        return any(i < own if until else i != own for i in found)


def fused(works: Sequence[Work]) -> list[Work]:
    """The works in the order in which they run, joined where that is possible."""
    readers, done = Readers(works), []
    for i, work in enumerate(works):
        for draft in work.drafts:
            draft.since = i
    for work in works:
        if not (isinstance(work, Launched) and len(work.listed) == 1 and _joined(done, work, readers)):
            done.append(work)
    return done


def _joined(done: list[Work], work: Launched, readers: Readers) -> bool:
    """Whether the one job of `work` has become a part of an earlier launch."""
    (draft,) = work.listed
    reads, writes = work.regions()
    for before in reversed(done):
        if isinstance(before, Python):
            return False
        if isinstance(before, Scan) and _left(before, draft, work, readers):
            return True
        if isinstance(before, Launched) and _behind(before, draft, work, readers):
            return True
        read, written = before.regions()
        if meet(written, reads + writes) or meet(read, writes):
            return False
        if isinstance(before, Launched) and len(before.listed) < SIDE_BY_SIDE:
            before.listed.append(draft)
            return True
    return False


def _sole(draft: Draft, work: Work, readers: Readers, since: int) -> bool:
    """Whether nobody but this draft sees the x that was made `since`, which need then not be stored."""
    part = region(draft.x)
    in_place = any(region(t) == part for t in draft.written())
    return not readers.beside(part, work, since, until=in_place)


def _behind(before: Launched, draft: Draft, work: Work, readers: Readers) -> bool:
    """Puts the draft behind the job of `before` that writes what it reads."""
    part = region(draft.x)
    for i, first in enumerate(before.listed):
        result = first.result
        if result is None or not part.within(region(result)):
            continue
        stored = "sum" in first.tensors and "o" not in first.tensors
        if not stored and not _sole(draft, work, readers, first.since):
            return False
        begin = part.first - region(result).first
        end = begin + draft.x.shape[1]
        width = result.shape[1]
        if first.out != first.size and (begin, end) != (0, width):
            return False
        cuts = [(a, b) for a, b in ((0, begin), (begin, end), (end, width)) if a < b]
        if (begin, end) == (0, width):
            parts: list[Draft | None] = [first]
        else:
            parts = [first.columns(a, b) for a, b in cuts]
        mine = cuts.index((begin, end))
        own, chained = parts[mine], None
        others = [d for j, d in enumerate(before.listed) if j != i]
        kept = [p for j, p in enumerate(parts) if p is not None and j != mine]
        if own is not None and len(kept) == len(parts) - 1:
            chained = own.then(draft)
        if own is None or chained is None or len(others) + len(parts) > SIDE_BY_SIDE:
            return False
        if _needs(draft, [*others, *kept]) or _tangled(draft, own.read(), own.written()):
            return False
        before.listed[i : i + 1] = [*kept[:mine], chained, *kept[mine:]]
        return True
    return False


def _needs(draft: Draft, others: Sequence[Draft]) -> bool:
    """Whether the draft must run before or after one of these."""
    reads, writes = [region(t) for t in draft.read()], [region(t) for t in draft.written()]
    for other in others:
        written = [region(t) for t in other.written()]
        if meet(written, reads + writes) or meet([region(t) for t in other.read()], writes):
            return True
    return False


def _tangled(draft: Draft, read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    """Whether the draft, beside x, reads what those before it write, or writes elsewhere than in place over
    what they read: in one launch that would be a race."""
    more = [region(t) for name, t in draft.tensors.items() if name not in ("x", *OUTPUTS)]
    if meet(more, [region(t) for t in written]):
        return True
    over = [region(t) for t in draft.written()]
    return any(a.meets(b) and a != b for a in over for b in map(region, read))


def _left(scan: Scan, draft: Draft, work: Work, readers: Readers) -> bool:
    """Makes the draft a part of how the scan's programs leave."""
    last, (reads, writes) = scan.leaving, (scan.reads, scan.writes)
    result = scan.o if last is None else last.result
    if result is None or region(draft.x) != region(result):
        return False
    since = readers.place[id(scan)] if last is None else last.since
    over = meet(map(region, draft.written()), map(region, reads))  # which other programs may still read
    if over or not _sole(draft, work, readers, since) or _tangled(draft, [], writes):
        return False
    if last is not None:
        chained = last.then(draft) if scan.ends else None
        if chained is None:
            return False
        scan.leaving = chained
        return True
    head = scan.o.shape[1] // scan.heads
    size = draft.size or head
    if not scan.ends and not (scan.gates and draft.options == {"by": "sigmoid"} and not draft.size):
        return False
    if draft.raw or size % head or size > WIDEST or draft.slots:
        return False
    scan.leaving = Draft(draft.tensors, size, draft.options, since=draft.since)
    return True


def narrowed(works: list[Work]) -> list[Work]:
    """Gives every product its x in its matrix's dtype, written by whoever writes x where that can be."""
    twins: dict[tuple[Region, torch.dtype], Tensor] = {}
    readers, done = Readers(works), []
    for work in works:
        if isinstance(work, Product) and work.weight.dtype != torch.float32 and not work.exact:
            key = (region(work.x), work.weight.dtype)
            if key not in twins or _written_since(done, work.x, twins[key]):
                twins[key] = work.x.new_zeros(work.x.shape, dtype=work.weight.dtype)
                if not _twin(done, work, twins[key], readers):
                    done.append(Launched.of(activation(work.x, "identity", twins[key])))
            work.given = twins[key]
        done.append(work)
    return done


def _written_since(done: Sequence[Work], x: Tensor, twin: Tensor) -> bool:
    """Whether x has been written after its twin was."""
    for work in reversed(done):
        if any(t is twin for d in work.drafts for t in d.written()):
            return False
        if isinstance(work, Product) and work.left is twin:
            return False
        if isinstance(work, Python) or meet(work.regions()[1], [region(x)]):
            return True
    return True


def _twin(done: Sequence[Work], product: Product, twin: Tensor, readers: Readers) -> bool:
    """Whether the last writer of x writes the twin too."""
    part = region(product.x)
    for work in reversed(done):
        if isinstance(work, Python):
            return False
        if isinstance(work, Product) and part == region(work.y):
            alone = not work.added and not work.exact and work.weight.dtype == twin.dtype
            if not alone or work.left is not None or readers.beside(part, product):
                return False
            work.left = twin
            return True
        if isinstance(work, Scan) and not work.ends and region(work.result) == part:
            if readers.beside(part, product):
                return False
            work.left = twin
            return True
        if (i := next((i for i, y in enumerate(work.parts) if region(y) == part), None)) is not None:
            if readers.beside(part, product):
                return False
            work.parts[i] = twin
            return True
        if not meet(work.regions()[1], [part]):
            continue
        writers = [d for d in work.drafts if (r := d.tensors.get("o")) is not None and region(r).meets(part)]
        inside = [region(d.tensors["o"]) for d in writers]
        plain = all(d.options.get("copies", 1) == 1 and "ones" not in d.options for d in writers)
        whole = sum(r.last - r.first for r in inside) == product.x.shape[1]
        if not writers or not plain or not whole or not all(r.within(part) for r in inside):
            if isinstance(work, Scan) and work.leaving is None and region(work.o) == part:
                head = work.o.shape[1] // work.heads
                work.leaving = Draft({"x": work.o, "narrow": twin}, head)
                return True
            return False
        if any("narrow" in d.tensors for d in writers):
            return False
        for d, r in zip(writers, inside, strict=True):
            d.tensors["narrow"] = twin[:, r.first - part.first : r.last - part.first]
        return True
    return False
