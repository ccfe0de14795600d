"""What must hold of every model that sees ahead: what each place sees, law 3, law 7, and exact caches.

The other laws are about a state that each token moves on. Models are those of tests/denoisers.py, the
referee is a plain float64 loop (tests/loops.py, tests/dit.py), the tolerance that of the laws.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from constate.core.attention import Attention
from constate.core.cache import Cache
from constate.core.experts import Experts
from constate.core.model import Model
from constate.core.weights import export
from constate.diffusion_lm.denoiser import Masked, denoiser
from constate.kernels.dispatch import available
from constate.loading import architectures
from constate.spans import Spans
from tests import dit, loops
from tests.denoisers import DENOISERS, MASK, make
from tests.models import VOCAB, with_ops
from tests.referee import same_logits, same_state

BACKENDS = tuple(row.backend for row in available("cpu") if row.here)
IN_BLOCKS = tuple(name for name in DENOISERS if denoiser(make(name)).exact_cache)
LENGTHS = (1, 3, 4, 5, 12, 17)


def tokens(n: int, seed: int = 0) -> Tensor:
    """Ids and, at about every third place, the mask."""
    g = torch.Generator().manual_seed(2000 + seed)
    ids = torch.randint(0, VOCAB, (n,), generator=g)
    return torch.where(torch.rand(n, generator=g) < 0.3, MASK, ids)


@cache
def model_of(name: str, backend: str = "torch") -> Model:
    return make(name, backend)


@cache
def judged(name: str, n: int, seed: int = 0) -> Tensor:
    """The float64 logits of a row of `tokens`."""
    return judge(model_of(name), tokens(n, seed), name)


def judge(model: Model, row: Tensor, name: str) -> Tensor:
    raw = DENOISERS[name]
    if raw["model_type"] in ("mdlm", "bd3lm"):
        assert model.architecture is not None
        rules = model.architecture.weights(model.config)
        return dit.logits(export(rules, dict(model.named_parameters())), row, raw)
    return loops.model(model, row, raw)


def sees(model: Model, n: int) -> Tensor:
    """Whether place i sees place j, (n, n)."""
    block = denoiser(model).block
    place = torch.arange(n)
    return torch.ones(n, n, dtype=torch.bool) if block is None else place // block <= place[:, None] // block


def test_every_denoiser_is_here() -> None:
    here = {raw["model_type"] for raw in DENOISERS.values()}
    known = {name for name, found in architectures().items() if issubclass(found.architecture.Config, Masked)}
    assert known == here, "add the others to DENOISERS in tests/denoisers.py, and to loops.py or dit.py"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", DENOISERS)
def test_law_7_every_backend_equals_the_loop(name: str, backend: str) -> None:
    model = model_of(name, backend)
    for n in LENGTHS:
        same_logits(model(tokens(n), Spans.of([n])), judged(name, n).float(), f"{n} places")


@pytest.mark.parametrize("name", DENOISERS)
def test_each_place_sees_what_it_should_and_nothing_else(name: str) -> None:
    """By changing one place at a time. The share of masks is kept, since all may hear it."""
    model, n = model_of(name), 14
    row = tokens(n)
    before = model(row, Spans.of([n]))
    moved = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        other = row.clone()
        other[j] = (row[j] + 1) % MASK if row[j] != MASK else MASK
        if row[j] == MASK:
            continue
        moved[:, j] = (model(other, Spans.of([n])) - before).abs().amax(1) > 1e-5
    visible = sees(model, n) & (row != MASK)
    assert torch.equal(moved, visible), f"{name}: {(moved != visible).nonzero().tolist()}"


PACK = (1, 3, 0, 12, 17)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", DENOISERS)
def test_law_3_packed_equals_alone(name: str, backend: str) -> None:
    """Also where a neighbour is all masks, or holds what others use to pad (case J7): lengths alone tell rows
    apart, ids never do."""
    model, spans = model_of(name, backend), Spans.of(PACK)
    rows = [tokens(n) for n in PACK]
    logits = model(torch.cat(rows), spans)
    for part, n in zip(spans.slices(), PACK, strict=True):
        same_logits(logits[part], judged(name, n).float() if n else logits[part], f"the row of {n}")
    last = model(torch.cat(rows), spans, at="last")
    assert bool(last[2].isnan().all()), "an empty row has no last logits"
    for filler in (MASK, 0):
        for r in (1, 3):
            others = [row if i == r else torch.full_like(row, filler) for i, row in enumerate(rows)]
            part = spans.slices()[r]
            again = model(torch.cat(others), spans)[part]
            if any(isinstance(mixer, Experts) for mixer in model.mixers()):  # grouped with its neighbours
                same_logits(again, logits[part], f"row {r} beside {filler}")
            else:
                assert torch.equal(again, logits[part]), f"row {r} changed with its neighbours"


@pytest.mark.parametrize("name", DENOISERS)
def test_law_3_from_any_cache(name: str) -> None:
    """Rows that have read whole blocks before, packed and alone; reading without keeping leaves no trace."""
    model = model_of(name)
    block = denoiser(model).block or 4
    past, new = (0, block, 3 * block), (5, 9, 2)
    rows = [tokens(p + n, seed=r) for r, (p, n) in enumerate(zip(past, new, strict=True))]

    def alone(r: int) -> Cache:
        own = model.init_cache(1)
        model(rows[r][: past[r]], Spans.of([past[r]]), own)
        return own

    spans, caches = Spans.of(new), [alone(r) for r in range(3)]
    both = Cache.merge([c.clone() for c in caches])
    kept = both.clone()
    flat = torch.cat([row[p:] for row, p in zip(rows, past, strict=True)])
    read = model(flat, spans, both, keep=False)
    same_state(both, kept, "after keep=False")
    for r, part in enumerate(spans.slices()):
        same_logits(read[part], model(flat[part], Spans.of([new[r]]), caches[r]), f"row {r}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_a_cache_of_whole_blocks_is_exact(name: str, backend: str) -> None:
    """What is read in pieces that end between blocks, or with keep=[...] that does, equals the whole: the
    law 2 of block-causal models. A piece that ends within a block does not, which is why."""
    model, block = model_of(name, backend), denoiser(model_of(name)).block
    assert block is not None
    n = 17
    row, want = tokens(n), judged(name, n).float()
    for cuts in ((0, block, n), (0, 2 * block, n), (0, 0, block, 2 * block, n)):
        cache = model.init_cache(1)
        got = [model(row[a:b], Spans.of([b - a]), cache) for a, b in pairwise(cuts)]
        same_logits(torch.cat(got), want, f"cut at {cuts}")
    cache, done = model.init_cache(1), 0
    while done < n:  # each forward reads a finished block and the next, and keeps the finished one
        piece = row[done : done + 2 * block]
        got = model(piece, Spans.of([len(piece)]), cache, keep=[min(block, len(piece))])
        same_logits(got, want[done : done + len(piece)], f"keep from {done}")
        done += block
    if block > 1:
        cache = model.init_cache(1)
        got = [model(part, Spans.of([len(part)]), cache) for part in row.split([block + 1, n - block - 1])]
        assert float((torch.cat(got) - want).abs().max()) > 1e-2, "a block cut in two has lost its half"


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_the_last_token_of_a_block_may_be_read_again(name: str) -> None:
    """A shifted decoder keeps all but the last token of what is finished and reads it with every step."""
    model, block = model_of(name), denoiser(model_of(name)).block
    assert block is not None
    row = tokens(3 * block)
    want = judged(name, 3 * block).float()
    cache = model.init_cache(1)
    model(row[: 2 * block], Spans.of([2 * block]), cache, keep=[2 * block - 1])
    for _step in range(2):
        got = model(row[2 * block - 1 :], Spans.of([block + 1]), cache, keep=False)
        same_logits(got, want[2 * block - 1 :], "the last token again")


@pytest.mark.parametrize("name", DENOISERS)
def test_a_step_is_a_forward_of_one_token(name: str) -> None:
    model = model_of(name)
    caches = [model.init_cache(2) for _ in range(2)]
    for each in caches:
        model(tokens(9), Spans.of([4, 5]), each)
    stepped = model.step(torch.tensor([3, MASK]), caches[0])
    same_logits(stepped, model(torch.tensor([3, MASK]), Spans.of([1, 1]), caches[1]))
    same_state(caches[0], caches[1])


@pytest.mark.parametrize("name", DENOISERS)
def test_flops_and_weights_are_what_is_said(name: str) -> None:
    """The reference attention computes exactly the pairs that are seen."""
    model = make(name, "reference")
    cache = model.init_cache(1)
    for past in (0, 12):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(tokens(12), Spans.of([12]), cache, at="last")
        said = model.cost(12, past)
        assert said.total_flops == pytest.approx(counter.get_total_flops(), rel=0.02), f"after {past}"
    rows = model.embed.weight.nbytes - 5 * model.embed.weight[0].nbytes
    idle = sum(  # experts that nobody asks, if all are asked as often
        round((1 - mixer.spec.per_token / mixer.spec.experts) ** 5 * stack.nbytes)
        for mixer in model.mixers()
        if isinstance(mixer, Experts)
        for stack in (mixer.up, mixer.down)
    )
    assert model.cost(5, 0).weight_bytes == model.weight_bytes - rows - idle


# -- the checks bite ------------------------------------------------------------------------------


def _sight(block: Callable[[int | None], int | None]) -> Callable[[Model], None]:
    def plant(model: Model) -> None:
        for mixer in model.modules():
            if isinstance(mixer, Attention):
                mixer.block = block(mixer.block)

    return plant


def _one_span(model: Model) -> None:
    attention = model.ops.attention

    def whole(q: Tensor, k: Tensor, v: Tensor, spans: Spans, context: Spans, **options: object) -> Tensor:
        return attention(q, k, v, Spans.of([spans.total]), Spans.of([context.total]), **options)

    with_ops(model, attention=whole)


def _no_noise(model: Model) -> None:
    noise = getattr(model, "noise", None)
    if noise is not None:
        noise[2].weight.zero_()


FAULTS: dict[str, tuple[Callable[[Model], None], str, str]] = {
    "causal all the same": (_sight(lambda _: 1), "both sides", "7"),
    "blocks one too long": (_sight(lambda b: (b or 0) + 1), "blocks", "7"),
    "sees the whole row": (_sight(lambda _: None), "blocks", "cache"),
    "spans ignored": (_one_span, "both sides", "3"),
    "noise unheard": (_no_noise, "mdlm, timed", "7"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name, law = FAULTS[fault]
    want = {n: judged(name, n) for n in (*LENGTHS, *PACK) if n}  # before the fault
    broken = make(name)
    plant(broken)
    monkeypatch.setattr(f"{__name__}.model_of", lambda name, backend="torch": broken)
    monkeypatch.setattr(f"{__name__}.judged", lambda name, n, seed=0: want[n])
    check = {
        "3": test_law_3_packed_equals_alone,
        "7": test_law_7_every_backend_equals_the_loop,
        "cache": test_a_cache_of_whole_blocks_is_exact,
    }[law]
    with pytest.raises(AssertionError):
        check(name, "torch")
