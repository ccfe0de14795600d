"""The decoding loop: from requests to commits. Knows tokens, rows and the model's decode interface; it
knows no text, and nothing of what is inside a model.

A decoder yields `Commit`s: tokens fixed at places of a row's output. Other kinds of decoding (masked
diffusion, speculation) are functions of the same signature, which an Architecture names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..spans import Spans
from .cache import Cache
from .sampling import Sampling, choose, generator

if TYPE_CHECKING:
    from .model import Model

PIECE = 512  # prompt tokens a row in one call: enough to keep matrix products busy, few enough for memory

Finished = Callable[[int, Sequence[int]], str | None]
"""`finished(row, tokens)`: given everything a row has written, a reason to end it, or None."""


@dataclass(frozen=True)
class Request:
    """What is to be written after `tokens`: up to `max_new` tokens, ending with the first id in `eos`.

    `n` samples share the prompt; sample j draws from seed + j. A continued request adds the ids that its
    starting state has read, `seen` (for the repetition penalty), and how many uniforms it has `drawn`.
    `after` (given text to the right of what is to be written) and `plan` (in which order) are for decoders
    that can heed them; others refuse them.
    """

    tokens: tuple[int, ...]
    max_new: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    eos: frozenset[int] = frozenset()
    n: int = 1
    seen: frozenset[int] = frozenset()
    drawn: int = 0
    after: tuple[int, ...] = ()
    plan: object = None

    def __post_init__(self) -> None:
        if self.max_new < 0 or self.n < 1:
            raise ValueError(f"max_new={self.max_new}, n={self.n}: at least 0 tokens and 1 sample are wanted")


@dataclass(frozen=True)
class Commit:
    """Tokens fixed in one row: `tokens[i]` at place `positions[i]` of the row's output, from 0.

    `row` counts samples, request by request. `logprobs` are of the raw distribution, in nats. `finish` is
    set in a row's last commit, which may carry no token: "stop" or "length". `calls` model calls and
    `seconds` of work (the reader's own time is left out) came before it. The last commit also has the
    bytes `held` for the row ("state", "conv", "kv", and of that "kv_used"), `how` it was decoded where that
    is a matter of choice, the row's `end` where places from there on were decided in vain, and, where it
    was asked for, the row's `cache`: it has absorbed every token but the last, which is still to be read.
    """

    row: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str | None = None
    calls: int = 0
    seconds: float = 0.0
    held: Mapping[str, int] = field(default_factory=dict)
    how: Mapping[str, str] = field(default_factory=dict)
    end: int | None = None
    cache: Cache | None = None


class Decode(Protocol):
    """A way of decoding: what `Architecture.decode` names and generation calls. What can be refused without
    a model call is refused by this call, not by the first commit asked for."""

    def __call__(
        self,
        model: Model,
        requests: Sequence[Request],
        finished: Finished,
        *,
        cache: Cache | None = None,
        keep: bool = False,
    ) -> Iterator[Commit]: ...


@dataclass
class _Row:
    """A live row of the cache: what it has still to read, and what it has written."""

    index: int
    request: Request
    todo: Sequence[int]
    source: Random
    seen: set[int]
    out: list[int] = field(default_factory=list)
    forks: int = 0

    @staticmethod
    def of(request: Request, index: int, sample: int, todo: Sequence[int]) -> _Row:
        source = generator(request.seed + sample, request.drawn)
        return _Row(index + sample, request, todo, source, {*request.seen, *request.tokens})

    def write(self, token: int) -> None:
        self.out.append(token)
        self.todo = (token,)
        self.seen.add(token)


def autoregressive(
    model: Model,
    requests: Sequence[Request],
    finished: Finished,
    *,
    cache: Cache | None = None,
    keep: bool = False,
    piece: int = PIECE,
) -> Iterator[Commit]:
    """Decode token by token, all rows in one model call a step.

    A call takes from each live row either the next piece of its prompt, `piece` tokens at most, or its one
    newest token; so a batch makes as many calls as its longest row would alone. A row that ends leaves the
    batch at once. A prompt with several samples is read once and then forked.

    `cache`: a starting state with a row for each request, in order; it is used up (clone it to keep it).
    `keep`: hand out each row's final cache in its last commit. Raises ValueError at once for a request
    without tokens or with a plan or text after it, and later for a cache with other rows and whatever the
    model refuses.
    """
    if piece < 1:
        raise ValueError(f"piece={piece}: a prefill piece has at least one token")
    for i, request in enumerate(requests):
        if not request.tokens:
            raise ValueError(f"prompt {i} is empty: a model writes after something, one token at the least")
        if request.plan is not None or request.after:
            raise ValueError(
                "this model writes one token after another: policy, steps, infill and their like are options "
                "of masked diffusion models, such as tiny/mdlm"
            )
    return _autoregressive(model, requests, finished, cache, keep, piece)


def _autoregressive(
    model: Model,
    requests: Sequence[Request],
    finished: Finished,
    cache: Cache | None,
    keep: bool,
    piece: int,
) -> Iterator[Commit]:
    since, worked, calls = perf_counter(), 0.0, 0
    rows = _rows(requests, keep)
    if rows and cache is None:
        cache = model.init_cache(len(rows))
    if cache is None or cache.rows != len(rows):
        given = f"a state of {cache.rows} rows" if cache else "no state"
        raise ValueError(f"{given} and {len(rows)} requests: one row for each request is wanted, in order")
    # Room for the prompts and a first stretch of output at once, so that a long prompt is not copied often.
    cache.reserve([len(row.todo) + max(0, min(row.request.max_new, piece) - 1) for row in rows])
    while rows:
        pieces = [row.todo[:piece] for row in rows]
        for row in rows:
            row.todo = row.todo[piece:]
        logits = None
        if any(pieces):
            logits, calls = _absorb(model, cache, pieces), calls + 1
        if any(row.forks and not row.todo for row in rows):
            order = _fork(rows)
            cache = cache.select(order)
            logits = None if logits is None else logits[order]
        commits, ended = [], []
        ready = [i for i, row in enumerate(rows) if not row.todo]
        chosen = _choose(logits, rows, [i for i in ready if rows[i].request.max_new], model.vocab)
        for i in ready:
            row = rows[i]
            tokens, logprobs = chosen.get(i, ((), ()))
            places = tuple(range(len(row.out), len(row.out) + len(tokens)))
            for token in tokens:
                row.write(token)
            finish = _finish(row, finished)
            seconds = worked + perf_counter() - since
            held = held_by(cache, i) if finish else {}
            own = cache.select([i]) if finish and keep else None
            commits.append(
                Commit(row.index, places, tokens, logprobs, finish, calls, seconds, held, cache=own)
            )
            if finish:
                ended.append(i)
        for i in reversed(ended):  # from the end, so that the row that moves into the hole is a live one
            cache.drop(i)
            rows[i] = rows[-1]
            rows.pop()
        worked += perf_counter() - since
        yield from commits
        since = perf_counter()


def _rows(requests: Sequence[Request], keep: bool) -> list[_Row]:
    """A row for each request, its first sample. One that writes nothing reads nothing, unless its state
    is wanted: then all but its last token, as after any other row."""
    rows, index = [], 0
    for request in requests:
        todo = request.tokens if request.max_new else request.tokens[:-1] if keep else ()
        row = _Row.of(request, index, 0, todo)
        row.forks = request.n - 1
        rows.append(row)
        index += request.n
    return rows


def _absorb(model: Model, cache: Cache, pieces: Sequence[Sequence[int]]) -> Tensor:
    """One model call; logits (rows, vocab) after each row's piece."""
    tokens = torch.tensor([t for p in pieces for t in p], dtype=torch.int64, device=cache.past.device)
    if all(len(p) == 1 for p in pieces):
        return model.step(tokens, cache)
    spans = Spans.of((len(p) for p in pieces), tokens.device)
    return model.forward(tokens, spans, cache, at="last")


def _fork(rows: list[_Row]) -> list[int]:
    """Append the other samples of every row whose prompt has been read; which row each one copies."""
    order = list(range(len(rows)))
    for i in range(len(rows)):
        row = rows[i]
        if row.forks and not row.todo:
            rows += [_Row.of(row.request, row.index, j, ()) for j in range(1, row.forks + 1)]
            order += [i] * row.forks
            row.forks = 0
    return order


def _choose(
    logits: Tensor | None, rows: Sequence[_Row], ready: Sequence[int], vocab: int
) -> dict[int, tuple[tuple[int, ...], tuple[float, ...]]]:
    """A token and its log-probability for each of these rows; ids beyond `vocab` are padding."""
    if logits is None or not ready:
        return {}
    picked = logits if len(ready) == len(rows) else logits[list(ready)]
    live = [rows[i] for i in ready]
    uniforms = [row.source.random() for row in live]
    rules, seen = [row.request.sampling for row in live], [row.seen for row in live]
    ids, logprobs = choose(picked[:, :vocab], rules, uniforms, seen)
    return {i: ((token,), (logprob,)) for i, token, logprob in zip(ready, ids, logprobs, strict=True)}


def _finish(row: _Row, finished: Finished) -> str | None:
    """Why the row ends here, if it does. An end-of-text id is never shown to `finished`."""
    if row.out and row.out[-1] in row.request.eos:
        return "stop"
    reason = finished(row.index, row.out) if row.out else None
    return reason or ("length" if len(row.out) >= row.request.max_new else None)


def held_by(cache: Cache, row: int) -> dict[str, int]:
    """Bytes that one row holds, by kind, and those of its keys and values that hold tokens."""
    own = cache.map(lambda _, t, __: t[row : row + 1])
    return {**own.bytes(), "kv_used": own.bytes(cache.lengths[row : row + 1])["kv"]}
