"""The laws of constate/core/mixer.py, one function a law, for any causal model and any backend.

Each takes the model under test and the referee of the same weights, and raises AssertionError where the
law is broken. Plain functions, so that tests/test_faults.py can watch them go red.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from constate.core.cache import Cache
from constate.core.experts import Experts
from constate.core.model import Model
from constate.spans import Spans
from tests.models import VOCAB, tokens
from tests.referee import Referee, same_logits, same_state

LENGTH = 130
AT_ONE_POINT = tuple((n, LENGTH - n) for n in (1, 2, 3, 4, 63, 64, 65, 128, 129))  # case B1
IN_PIECES = (
    (50, 50, 30),
    (
        0,
        1,
        2,
        3,
        4,
        0,
        15,
        16,
        17,
        31,
        32,
        9,
        0,
    ),  # convolution widths 2 to 4 and less by one; tiles of 16, 32
    (33, 63, 0, 33, 1),
    (64, 65, 1),
)
PREFIXES = (0, 5, 17, 2, 33, 9)  # what the rows of a pack have read before
PACK = (1, 3, 7, 64, 65, 0)  # cases A1 and B3: rows of unequal lengths, an empty one


def law_1(model: Model, referee: Referee) -> None:
    """step folded over the tokens == forward, in logits and in state (case B3)."""
    prompt = tokens(LENGTH)
    want = referee.read(prompt)
    stepped = model.init_cache(1)
    folded = torch.cat([model.step(t[None], stepped) for t in prompt])
    same_logits(folded, want.logits, "step folded")
    same_state(stepped, want.cache, "step folded")
    whole, cache = _read(model, prompt, (LENGTH,))
    same_logits(whole, want.logits, "forward")
    same_state(cache, want.cache, "forward")
    same_logits(model(prompt, Spans.of([LENGTH])), want.logits, "forward without a cache")


def law_2(
    model: Model, referee: Referee, cuts: Sequence[Sequence[int]] = (*AT_ONE_POINT, *IN_PIECES)
) -> None:
    """forward over a sequence cut anywhere == forward over the whole (case B1)."""
    for pieces in cuts:
        prompt = tokens(sum(pieces))
        want = referee.read(prompt)
        logits, cache = _read(model, prompt, pieces)
        same_logits(logits, want.logits, f"pieces {tuple(pieces)}")
        same_state(cache, want.cache, f"pieces {tuple(pieces)}")


def law_3(model: Model, referee: Referee) -> None:
    """Packed with any neighbours == alone, from any initial states (cases A1, A3, A5)."""
    rows = [tokens(p + n + 8, seed=10 + r) for r, (p, n) in enumerate(zip(PREFIXES, PACK, strict=True))]
    want = [referee.read(row) for row in rows]
    spans, new = Spans.of(PACK), [r[p : p + n] for r, p, n in zip(rows, PREFIXES, PACK, strict=True)]

    def initial() -> Cache:
        return Cache.merge([referee.read(row[:p]).cache for row, p in zip(rows, PREFIXES, strict=True)])

    cache = initial()
    logits = model(torch.cat(new), spans, cache)
    for r, (part, p, n) in enumerate(zip(spans.slices(), PREFIXES, PACK, strict=True)):
        same_logits(logits[part], want[r].logits[p : p + n], f"row {r} of the pack")
        same_state(cache.select([r]), referee.read(rows[r][: p + n]).cache, f"row {r} of the pack")
    last = model(torch.cat(new), spans, initial(), at="last")
    same_logits(last[:5], logits[spans.last[:5]], 'at="last"')
    assert bool(last[5].isnan().all()), "an empty span has no last logits"
    for i in range(8):  # case A5: decoding, not only the first token
        ends = [p + n + i for p, n in zip(PREFIXES, PACK, strict=True)]
        stepped = model.step(torch.stack([row[end] for row, end in zip(rows, ends, strict=True)]), cache)
        for r, end in enumerate(ends):
            same_logits(stepped[r : r + 1], want[r].logits[end : end + 1], f"row {r}, step {i}")

    for r in (1, 3):  # nothing but the row's own tokens and state can change it, by one bit, where no
        # expert's group has another size then
        others = [t if i == r else (t + 1 + i) % VOCAB for i, t in enumerate(new)]
        neighbours = [cache.select([(i + 1) % 6]) for i in range(6)]
        neighbours[r] = referee.read(rows[r][: PREFIXES[r]]).cache
        mixed = Cache.merge(neighbours)
        again = model(torch.cat(others), spans, mixed)
        part = spans.slices()[r]
        if regroups(model):
            same_logits(again[part], logits[part], f"row {r} beside other neighbours")
        else:
            assert torch.equal(again[part], logits[part]), f"row {r} changed with its neighbours"

    short = [tokens(n, seed=20 + n) for n in (1, 3, 7, 13)]  # case A3: pieces of 4, rows end one by one
    cache = model.init_cache(4)
    for start in range(0, 16, 4):
        pieces = [row[start : start + 4] for row in short]
        model(torch.cat(pieces), Spans.of(map(len, pieces)), cache)
    for r, row in enumerate(short):
        same_state(cache.select([r]), referee.read(row).cache, f"row {r} in pieces of 4")
    fresh = model(torch.cat(short), Spans.of(map(len, short)))
    alone = torch.cat([referee.read(row).logits for row in short])
    same_logits(fresh, alone, "packed without a cache")


def law_4(model: Model, referee: Referee) -> None:
    """A clone is never changed by later steps; save then load continues bit for bit (case D6)."""
    prompts = [tokens(n, seed=30 + n) for n in (3, 40, 17)]
    cache = model.init_cache(3)
    model(torch.cat(prompts), Spans.of(map(len, prompts)), cache)
    kept, before = cache.clone(), [t.clone() for _, t, _ in cache.leaves()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        cache.save(path)
        first = _continue(model, cache)
        assert kept.lengths == (3, 40, 17), "the clone's lengths moved with the original"
        for (name, t, _), was in zip(kept.leaves(), before, strict=True):
            assert torch.equal(t, was), f"the clone's {name} moved with the original"
        assert torch.equal(_continue(model, kept), first), "a clone continues differently"
        loaded = Cache.load(path, model)
        assert torch.equal(_continue(model, loaded), first), "a loaded state continues differently"
        stranger = model.init_cache(1)
        stranger.model = "another"
        stranger.save(path)
        with pytest.raises(ValueError, match="another model"):
            Cache.load(path, model)
    for r, prompt in enumerate(prompts):
        more = torch.cat([prompt, *_more(3)[:, r].split(1), _more(3)[:, r]])
        same_logits(first[r :: len(prompts)][-1:], referee.read(more).logits[-1:], f"row {r} continued")


def law_5(model: Model, referee: Referee) -> None:
    """select, merge, write and drop commute with step."""
    histories = [tokens(n, seed=40 + n).tolist() for n in (6, 33, 1, 12)]

    def cache_of(*rows: int) -> Cache:
        return Cache.merge([referee.read(histories[r]).cache for r in rows])

    def check(cache: Cache, rows: Sequence[int], what: str) -> None:
        new = [(7 * i + 3) % VOCAB for i in range(len(rows))]
        logits = model.step(torch.tensor(new), cache)
        for at, (row, token) in enumerate(zip(rows, new, strict=True)):
            want = referee.read([*histories[row], token])
            same_logits(logits[at : at + 1], want.logits[-1:], f"{what}: row {at}")
            same_state(cache.select([at]), want.cache, f"{what}: row {at}")

    check(cache_of(0, 1, 2).select([2, 0, 0]), (2, 0, 0), "select")
    check(Cache.merge([cache_of(1, 2), cache_of(3, 0)]), (1, 2, 3, 0), "merge")
    written = cache_of(0, 1, 2)
    written.write(1, cache_of(3))
    check(written, (0, 3, 2), "write")
    longer = cache_of(0, 2, 3)
    longer.write(2, cache_of(1))  # needs more room than any row had
    check(longer, (0, 2, 1), "write a longer row")
    for row, left in ((0, (2, 1)), (1, (0, 2)), (2, (0, 1))):
        dropped = cache_of(0, 1, 2)
        dropped.drop(row)
        assert dropped.rows == 2, f"drop({row}) left {dropped.rows} rows"
        check(dropped, left, f"drop({row})")
    source = cache_of(3)
    written = cache_of(0, 1, 2)
    written.write(0, source)
    check(written, (3, 1, 2), "write, then step")
    check(source, (3,), "the source of a write")


def law_6(model: Model, referee: Referee) -> None:
    """The bytes of the state == what cost says, and what is allocated."""
    cache = model.init_cache(2)
    absorbed = 0
    for n in (0, 1, 4, 7, 52, 66):
        model(tokens(2 * n), Spans.of([n, n]), cache)
        absorbed += n
        said = model.cost(0, absorbed, rows=2).held
        for kind, nbytes in cache.bytes(cache.lengths).items():
            assert nbytes == said.get(kind, 0), f"{kind}: {nbytes} bytes at {absorbed} tokens, said {said}"
        assert cache.nbytes(used=True) == sum(said.values())
        allocated = sum(t.untyped_storage().nbytes() for _, t, leaf in cache.leaves() if leaf.kind)
        assert cache.nbytes() == allocated, f"nbytes {cache.nbytes()}, allocated {allocated}"
        assert cache.nbytes() >= cache.nbytes(used=True)
    exact = model.init_cache(2, capacity=absorbed)
    assert exact.nbytes() == cache.nbytes(used=True), "a cache made for n tokens holds what n tokens need"
    assert referee.read(tokens(absorbed)).cache.nbytes(used=True) * 2 == cache.nbytes(used=True)


def law_7(model: Model, referee: Referee) -> None:
    """Every backend == the reference: forward by this backend beside steps by the reference."""
    for n in (1, 15, 16, 17, 63, 64, 65, LENGTH):
        want = referee.read(tokens(LENGTH)[:n])
        logits, cache = _read(model, tokens(n), (n,))
        same_logits(logits, want.logits, f"{n} tokens")
        same_state(cache, want.cache, f"{n} tokens")


LAWS: Mapping[int, Callable[[Model, Referee], None]] = {
    1: law_1,
    2: law_2,
    3: law_3,
    4: law_4,
    5: law_5,
    6: law_6,
    7: law_7,
}


def regroups(model: Model) -> bool:
    """Whether a router groups tokens of all rows by expert, so that sizes of products follow neighbours."""
    return any(isinstance(mixer, Experts) for mixer in model.mixers())


def _read(model: Model, prompt: Tensor, pieces: Sequence[int]) -> tuple[Tensor, Cache]:
    cache = model.init_cache(1)
    parts = [model(piece, Spans.of([len(piece)]), cache) for piece in prompt.split(list(pieces))]
    return torch.cat(parts), cache


def _more(rows: int) -> Tensor:
    return tokens(4 * rows, seed=50).view(4, rows)


def _continue(model: Model, cache: Cache) -> Tensor:
    """Four steps and then a packed forward of four tokens a row; the logits of both."""
    more = _more(cache.rows)
    steps = [model.step(t, cache) for t in more]
    packed = model(more.T.flatten(), Spans.of([4] * cache.rows), cache, at="last")
    return torch.cat([*steps, packed])
