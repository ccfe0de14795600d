"""The decoder of masked diffusion models: all rows in one model call a step, each at its own pace.

Knows the model's decode interface and its Denoiser, packs what rows ask to read and hands them logits.
Which rows there are is decided in admit.py, what one does in row.py, which places it reads in cache.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.cache import Cache
from ..core.decode import Commit, Finished, Request, held_by
from ..spans import Spans
from .admit import admit
from .cache import Read
from .denoiser import Denoiser, denoiser
from .row import Row

if TYPE_CHECKING:
    from ..core.model import Model

NOTHING = {"state": 0, "conv": 0, "kv": 0, "kv_used": 0}
Lane = tuple[Row, bool]
"""A row of a model call: a row of the batch, as it is or with all given text masked (for guidance)."""


def masked_diffusion(
    model: Model,
    requests: Sequence[Request],
    finished: Finished,
    *,
    cache: Cache | None = None,
    keep: bool = False,
) -> Iterator[Commit]:
    """Fill each request's `max_new` places, in the order of its plan; see core.decode.Decode.

    A batch makes as many calls as its longest row would alone; a row ends as soon as everything up to an
    end-of-text token or a stop string is fixed, and leaves the batch. Samples of one prompt are rows of
    their own. Logits are made of the places of a row's current block alone. An empty prompt is legal.
    Raises ValueError at once for what this model or plan does not allow, a state to go on from included.
    """
    if cache is not None or keep:
        raise ValueError(
            "a masked diffusion model writes its places in any order and has no state to go on from: "
            "load_state and save_state are for models that write one token after another"
        )
    about, ending = denoiser(model), frozenset(model.eos_ids)
    rows: list[Row] = []
    for prompt, request in enumerate(requests):
        for sample in range(request.n):
            rows.append(admit(about, ending, request, prompt, len(rows), sample))
    return _decode(model, about, rows, finished)


def _decode(model: Model, about: Denoiser, rows: Sequence[Row], finished: Finished) -> Iterator[Commit]:
    for r in rows:
        if not r.blocks:  # nothing is to be written, so nothing is read
            yield Commit(r.index, (), (), (), "length", held=NOTHING, how=r.how, end=0)
    since, worked, calls = perf_counter(), 0.0, 0
    lanes = [(r, blind) for r in rows if r.blocks for blind in (False, True)[: 1 + bool(r.plan.guidance)]]
    cache = None
    if any(r.reading.way != "none" for r, _ in lanes):
        cache = model.init_cache(len(lanes))
        cache.reserve([len(r.canvas) for r, _ in lanes])
    while lanes:
        logits, calls = _call(model, about, lanes, cache), calls + 1
        commits, ended = [], []
        for r in [r for r, blind in lanes if not blind]:
            fixed = sorted(r.unmask(logits[r.index]))
            finish = r.proceed(finished)
            last: dict[str, Any] = {}
            if finish:
                own = [i for i, (other, _) in enumerate(lanes) if other is r]
                last = {"held": _held(cache, own), "how": r.how, "end": len(r.out)}
                ended += own
            if fixed:
                places = tuple(p - r.first for p in fixed)
                tokens = tuple(r.canvas[p] for p in fixed)
                logprobs = tuple(r.logprobs[p] for p in fixed)
                seconds = worked + perf_counter() - since
                commits.append(Commit(r.index, places, tokens, logprobs, finish, calls, seconds, **last))
        for i in sorted(ended, reverse=True):  # so that the lane that moves into the hole is a live one
            if cache is not None:
                cache.drop(i)
            lanes[i] = lanes[-1]
            lanes.pop()
        worked += perf_counter() - since
        yield from commits
        since = perf_counter()


@torch.no_grad()
def _call(model: Model, about: Denoiser, lanes: Sequence[Lane], cache: Cache | None) -> dict[int, Tensor]:
    """One model call: by row, logits (m, vocab) of the masked places of its block, over real ids, guided
    where the row asks for it."""
    reads: dict[int, Read] = {}
    ids: list[int] = []
    wanted: list[int] = []
    for r, blind in lanes:
        if r.index not in reads:  # both lanes of a guided row read alike
            reads[r.index] = r.reading.next(r.current, r.visible, r.unwritten)
        places = reads[r.index].places
        at = {place: len(ids) + i for i, place in enumerate(places)}
        wanted += [at[max(place - about.shift, 0)] for place in r.masked]
        ids += [about.mask_id if blind and r.given(p) else r.canvas[p] for p in places]
    each = [reads[r.index] for r, _ in lanes]
    device = model.device
    tokens, index = torch.tensor(ids, device=device), torch.tensor(wanted, device=device)
    spans = Spans.of((len(read.places) for read in each), device)
    if cache is None:
        logits = model.forward(tokens, spans, at=index)
    else:
        for i, read in enumerate(each):
            if read.anew:
                cache.truncate(i, 0)
        positions = torch.tensor([p for read in each for p in read.places], device=device)
        keep = [read.keep for read in each]
        logits = model.forward(tokens, spans, cache, at=index, keep=keep, positions=positions)
    parts = logits[:, : model.vocab].split([len(r.masked) for r, _ in lanes])
    plain = {r.index: part for (r, blind), part in zip(lanes, parts, strict=True) if not blind}
    for (r, blind), part in zip(lanes, parts, strict=True):
        if blind:
            plain[r.index].sub_(part).mul_(1 + r.plan.guidance).add_(part)
    for part in plain.values():
        part[:, about.mask_id : about.mask_id + 1] = -torch.inf  # none, where it is beyond the real ids
    return plain


def _held(cache: Cache | None, lanes: Sequence[int]) -> dict[str, int]:
    """Bytes that these lanes hold together, by kind."""
    each = [held_by(cache, lane) for lane in lanes] if cache is not None else []
    return {kind: sum(held[kind] for held in each) for kind in NOTHING}
