"""What the numbers say, in sentences: each computed from them, and left out where they do not tell.

Knows standings; knows no charts and no files. A difference that chance could explain is not made much
of: times within a factor of EVEN are as good as equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from ..units import listed, seconds, size
from .front import front
from .standing import Standing, peak, remarks
from .workload import Workload

EVEN = 1.1  # a busy machine's medians differ by as much from one minute to the next


def findings(standings: Sequence[Standing], workload: Workload, limit: int | None) -> list[str]:
    """Sentences on one machine's standings: memory, time, quality, what to choose."""
    return [
        *_held(standings, workload),
        *_growing(standings),
        *_fitting(standings, workload, limit),
        *_timed(standings, workload),
        *_scored(standings),
        *_chosen(standings),
        *_flagged(standings),
    ]


def _held(standings: Sequence[Standing], workload: Workload) -> Iterator[str]:
    told = sorted((s.held, s.series) for s in standings if s.held)
    if len(told) < 2:
        return
    (least, small), (most, large) = told[0], told[-1]
    yield (
        f"After {workload.tokens:,} tokens one sequence of {large} holds {size(most)}, one of {small} "
        f"{size(least)}: {most / least:,.1f} times less."
    )


def _growing(standings: Sequence[Standing]) -> Iterator[str]:
    told = [(s.grows, s) for s in standings if s.grows is not None and s.held]
    flat = [s for grows, s in told if not grows]
    growing = sorted(((grows, s) for grows, s in told if grows), key=lambda pair: -pair[0])
    if growing:
        each = listed([f"{s.series} {size(grows)}" for grows, s in growing])
        rest = f"; {listed([s.series for s in flat])} nothing" if flat else ""
        yield f"Each further token adds to a sequence's memory: {each}{rest}."
    for _, s in growing:
        passed = [(s.line.reaches(f.held or 0), f.series) for f in flat] if s.line else []
        when = sorted((ceil(round(n, 6)), name) for n, name in passed if n is not None)
        if when:
            each = listed([f"{name} from {f'{n:,}' if n else 'the start'}" for n, name in when])
            yield f"A sequence of {s.series} holds at least as much as one of {each} tokens on."


def _fitting(standings: Sequence[Standing], workload: Workload, limit: int | None) -> Iterator[str]:
    told = [(s.sequences, s) for s in standings if s.sequences is not None]
    if limit is None or not told:
        return
    told.sort(key=lambda pair: -pair[0])
    each = listed([f"{count:,} of {s.series}" for count, s in told])
    yield f"In {size(limit)} there is room for so many sequences of {workload.tokens:,} tokens: {each}."
    if short := [f"{s.series} ({count:,})" for count, s in told if s.fits is False]:
        yield f"The {workload.concurrency:,} sequences asked for do not fit with {listed(short)}."


def _timed(standings: Sequence[Standing], workload: Workload) -> Iterator[str]:
    told = sorted(((s.seconds, s) for s in standings if s.seconds is not None), key=lambda pair: pair[0])
    if not told:
        return
    best, first = told[0]
    asked = (
        f"{workload.concurrency:,} prompts of {workload.prompt:,} tokens and {workload.new:,} more for each"
    )
    even = [s.series for time, s in told[1:] if time < best * EVEN]
    slower = [f"{s.series} {time / best:.1f}" for time, s in told if time >= best * EVEN]
    yield (
        f"{asked} take {first.series} {seconds(best)}, which is {first.rate:,.0f} new tokens a second"
        + (f"; {listed(even)} {'is' if len(even) == 1 else 'are'} as fast within 10%" if even else "")
        + (f". Times as long: {listed(slower)}." if slower else ".")
    )


def _scored(standings: Sequence[Standing]) -> Iterator[str]:
    told = sorted((s.bits, s.model) for s in standings if s.bits is not None and not s.bound)
    bounds = sorted((s.bits, s.model) for s in standings if s.bits is not None and s.bound)
    models = list(dict.fromkeys(told))
    if len(models) > 1:
        (best, name), *others = models
        each = listed([f"{n} {bits:.3f}" for bits, n in others])
        yield (
            f"On the unseen book {name} needs the fewest bits a byte, {best:.3f}; {each}. One checkpoint "
            "each: what another training seed would change is not known."
        )
    if bounds:
        each = listed([f"{name} {bits:.3f}" for bits, name in dict.fromkeys(bounds)])
        yield f"Known from above alone, as bits a byte at most: {each}."
    if other := sorted({s.scored_in for s in standings if s.scored_in and s.scored_in != s.dtype}):
        yield f"The scores are those of {listed(other)} weights: --score measures them as they are here."
    if missing := list(dict.fromkeys(s.model for s in standings if s.bits is None)):
        yield f"No score came with {listed(missing)}: --score measures it where the model has a tokenizer."


def _chosen(standings: Sequence[Standing]) -> Iterator[str]:
    able = [s for s in standings if s.bits is not None and s.fits is not False]
    small, fast = [s for s in able if s.held], [s for s in able if s.rate]
    if len(small) > 1:
        names = listed([s.series for s in front(small, lambda s: (s.held or 0.0, s.bits or 0.0))])
        yield f"Nothing here both holds less and predicts better than {names}."
    if len(fast) > 1:
        names = listed([s.series for s in front(fast, lambda s: (-(s.rate or 0.0), s.bits or 0.0))])
        yield f"Nothing here is both faster for this workload and predicts better than {names}."


def _flagged(standings: Sequence[Standing]) -> Iterator[str]:
    points = sum(s.points for s in standings)
    told = [(abs(peak(row) / row["predicted_peak_bytes"] - 1), s, row) for s in standings for row in s.off]
    if points and not told:
        yield f"At all {points:,} points the measured peak is within a tenth of its prediction."
    if told:
        _, s, row = max(told, key=lambda one: one[0])
        sequences = f" in {row['rows']:,} sequences" if row["rows"] > 1 else ""
        yield (
            f"At {len(told):,} of {points:,} points the measured peak is more than a tenth off its "
            f"prediction, most of all with {s.series} at {row['length']:,} tokens{sequences}: {remarks(row)}."
        )
