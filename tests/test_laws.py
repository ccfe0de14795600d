"""The laws over every architecture and every backend that is here, with weights that hide no fault.

The laws themselves are in tests/laws.py, the judge in tests/referee.py, the models in tests/models.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from constate.core.architecture import autoregressive
from constate.core.cache import Cache
from constate.core.mixer import Mixer
from constate.core.model import Model
from constate.kernels.dispatch import Ops
from constate.loading import architectures
from constate.spans import Spans
from tests.backends import BACKENDS
from tests.laws import LAWS, LENGTH, law_2
from tests.models import FULL_ATTENTION, MODELS, RECURRENT, VOCAB, WINDOW, make, tokens, with_ops
from tests.referee import referee, same_logits, same_state

CUT = 20  # where a test asks what the past is worth


@cache
def model_of(name: str, backend: str) -> Model:
    return make(name, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("law", LAWS)
def test_law(law: int, name: str, backend: str) -> None:
    LAWS[law](model_of(name, backend), referee(name))


def test_every_architecture_is_here() -> None:
    here = {entry.raw["model_type"] for entry in MODELS.values()}
    causal = {name for name, of in architectures().items() if of.architecture.decode is autoregressive}
    missing = sorted(causal - here)  # what sees ahead has laws of its own, in diffusion_lm/
    assert not missing, (
        f"no law has seen {', '.join(missing)}: add an Entry to MODELS in tests/models.py, which is a tiny "
        "config.json with sizes that differ (dk != dv, several groups, an odd convolution width) and the "
        "bytes that its cache grows by; and say in tests/loops.py what its layers are"
    )


# -- the weights hide nothing ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in RECURRENT if MODELS[name].decays])
def test_decays_are_spread(name: str) -> None:
    model, decays = make(name), []
    least, most = MODELS[name].decays or (0, 1)
    ops = model.ops

    def linear(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *rest: Any, **options: Any) -> Any:
        decays.append(log_decay.flatten())
        return ops.gated_linear_scan(q, k, v, log_decay, *rest, **options)

    def delta(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *rest: Any, **options: Any) -> Any:
        decays.append(log_decay.flatten())
        return ops.gated_delta_scan(q, k, v, log_decay, *rest, **options)

    def selective(x: Tensor, dt: Tensor, a: Tensor, *rest: Any, dt_bias: Tensor, **options: Any) -> Any:
        decays.append((F.softplus(dt + dt_bias)[..., None] * a).flatten())
        return ops.selective_scan(x, dt, a, *rest, dt_bias=dt_bias, **options)

    def dplr(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *rest: Any, **options: Any) -> Any:
        decays.append(log_decay.flatten())
        return ops.dplr_delta_scan(q, k, v, log_decay, *rest, **options)

    def recurrence(x: Tensor, log_a: Tensor, *rest: Any, **options: Any) -> Any:
        decays.append(log_a.flatten())
        return ops.linear_recurrence_scan(x, log_a, *rest, **options)

    scans = {"gated_linear_scan": linear, "gated_delta_scan": delta, "dplr_delta_scan": dplr}
    with_ops(model, **scans, selective_scan=selective, linear_recurrence_scan=recurrence)
    model(tokens(LENGTH), Spans.of([LENGTH]))
    assert decays, f"{name}: no op was given a decay"
    for i, layer in enumerate(decays):
        decay = layer.exp()
        low, high = float(decay.min()), float(decay.max())
        assert low < least, f"{name}, scan {i}: no decay below {least}, the least is {low}"
        assert high > most, f"{name}, scan {i}: no decay above {most}, the most is {high}"


@pytest.mark.parametrize("name", MODELS)
def test_the_past_matters(name: str) -> None:
    """Zeroing any one tensor of the state at a cut moves logits by more than 1e-2."""
    model = model_of(name, "torch")
    cache = model.init_cache(1)
    model(tokens(CUT), Spans.of([CUT]), cache)
    more = tokens(8, seed=1)
    kept = model(more, Spans.of([8]), cache.clone())
    for name_of, t, leaf in cache.leaves():
        if leaf.kind is None or not t.numel():
            continue
        lost = cache.clone()
        next(x for n, x, _ in lost.leaves() if n == name_of).zero_()
        moved = float((model(more, Spans.of([8]), lost) - kept).abs().max())
        assert moved > 1e-2, f"{name}: without {name_of} logits move by {moved:.1e} only"


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_decided(name: str) -> None:
    best = referee(name).read(tokens(LENGTH)).logits.topk(2, dim=-1).values
    decided = (best[:, 0] - best[:, 1] > 1e-3).float().mean()
    assert decided > 0.95, f"{name}: only {float(decided):.0%} of greedy tokens are decided"


# -- cuts and rows at random ----------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=5)
@given(cuts=st.lists(st.integers(0, LENGTH), max_size=6))
def test_law_2_at_random_cuts(name: str, cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), LENGTH]
    pieces = [b - a for a, b in pairwise(ends)]
    law_2(model_of(name, "torch"), referee(name), [pieces])


@pytest.mark.parametrize("name", ["composed", "composed gla"])
@settings(max_examples=12)
@given(moves=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100)), min_size=3, max_size=10))
def test_rows_that_join_and_leave_at_random_equal_lone_runs(name: str, moves: list[tuple[int, int]]) -> None:
    """Case C5: streams of unequal length join, fork, leave and read pieces; each equals its lone run."""
    model, judge = model_of(name, "torch"), referee(name)
    histories = [tokens(4, seed=60).tolist()]
    cache = judge.read(histories[0]).cache.clone()
    for kind, seed in moves:
        rows = cache.rows
        r = seed % rows
        new = tokens(1 + seed % 9, seed=seed).tolist()
        match kind:
            case 0:  # a new row joins
                cache = Cache.merge([cache, judge.read(new).cache])
                histories.append(new)
            case 1:  # a row forks
                picked = [*range(rows), r]
                cache, histories = cache.select(picked), [histories[i] for i in picked]
            case 2 if rows > 1:  # a row leaves, the last takes its place
                cache.drop(r)
                last = histories.pop()
                if r < len(histories):
                    histories[r] = last
            case 3:  # a row's place is taken by a new one
                cache.write(r, judge.read(new).cache)
                histories[r] = new
            case 4:  # one row reads a piece, the others nothing
                lengths = [len(new) if i == r else 0 for i in range(rows)]
                model(torch.tensor(new), Spans.of(lengths), cache)
                histories[r] = [*histories[r], *new]
            case _:  # everyone takes a step
                step = tokens(rows, seed=seed + 1)
                model.step(step, cache)
                histories = [[*h, int(t)] for h, t in zip(histories, step, strict=True)]
    for r, history in enumerate(histories):
        same_state(cache.select([r]), judge.read(history).cache, f"row {r} after {moves}")


# -- reading without absorbing, forgetting --------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_what_is_not_kept_was_never_read(name: str, backend: str) -> None:
    model, judge = model_of(name, backend), referee(name)
    rows = [tokens(n, seed=70 + n) for n in (9, 30)]
    spans, new = Spans.of([6, 4]), [tokens(6, seed=80), tokens(4, seed=81)]
    for keep in (False, [0, 0], [2, 0], [6, 1], True):
        cache = Cache.merge([judge.read(row).cache for row in rows])
        logits = model(torch.cat(new), spans, cache, keep=keep)
        kept = {False: [0, 0], True: [6, 4]}[keep] if isinstance(keep, bool) else keep
        for r, (row, piece, part) in enumerate(zip(rows, new, spans.slices(), strict=True)):
            whole = judge.read(torch.cat([row, piece]))
            same_logits(logits[part], whole.logits[len(row) :], f"keep={keep}, row {r}")
            short = judge.read(torch.cat([row, piece[: kept[r]]]))
            same_state(cache.select([r]), short.cache, f"keep={keep}, row {r}")
        stepped = model.step(torch.tensor([1, 2]), cache)
        for r, (row, piece) in enumerate(zip(rows, new, strict=True)):
            want = judge.read([*row.tolist(), *piece[: kept[r]].tolist(), r + 1])
            same_logits(stepped[r : r + 1], want.logits[-1:], f"keep={keep}, row {r} later")


@pytest.mark.parametrize("name", MODELS)
def test_a_state_that_cannot_forget_says_so(name: str) -> None:
    """Case E2: truncation works for KV and raises for a recurrent state; so does keep."""
    model, judge = model_of(name, "torch"), referee(name)
    prompt = tokens(LENGTH)[:30]
    cache = judge.read(prompt).cache.clone()
    if name in FULL_ATTENTION:
        cache.truncate(0, 11)
        assert cache.lengths == (11,)
        rest = model(prompt[11:], Spans.of([19]), cache)
        same_logits(rest, judge.read(prompt).logits[11:], "after truncate")
        same_state(cache, judge.read(prompt).cache, "after truncate")
        with pytest.raises(ValueError, match="30 tokens"):
            cache.truncate(0, 31)
        return
    for read in (False, [3]):
        with pytest.raises(ValueError, match="cannot read tokens without absorbing"):
            model(tokens(5), Spans.of([5]), cache, keep=read)
    with pytest.raises(ValueError, match="cannot be shortened"):
        cache.truncate(0, 29)
    cache.truncate(0, 30)
    same_state(cache, judge.read(prompt).cache, "a refused truncate changes nothing")


def test_a_window_can_forget_until_it_is_overwritten() -> None:
    name = "composed window"
    model, judge = model_of(name, "torch"), referee(name)
    prompt = tokens(LENGTH)[:12]
    cache = judge.read(prompt[:WINDOW]).cache.clone()
    cache.truncate(0, 2)
    same_logits(model(prompt[2:], Spans.of([10]), cache), judge.read(prompt).logits[2:], "after truncate")
    with pytest.raises(ValueError, match="overwritten window"):
        cache.truncate(0, 11)
    cache = judge.read(prompt[:2]).cache.clone()
    model(prompt[2:WINDOW], Spans.of([3]), cache, keep=[1])
    same_logits(model(prompt[3:], Spans.of([9]), cache), judge.read(prompt).logits[3:], "after keep")


# -- no state on the model, no loop of steps ------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_model_remembers_nothing(name: str) -> None:
    """Case C4: an unrelated run in between changes no bit of the next."""
    model = model_of(name, "torch")
    a, b = tokens(40, seed=90), tokens(70, seed=91)

    def run(prompt: Tensor) -> Tensor:
        cache = model.init_cache(1)
        first = model(prompt, Spans.of([len(prompt)]), cache)
        return torch.cat([first, model.step(prompt[:1], cache)])

    first = run(a)
    run(b)
    assert torch.equal(run(a), first)


@pytest.mark.parametrize("name", MODELS)
def test_forward_is_no_loop_of_steps(name: str) -> None:
    def calls(n: int) -> Counter[str]:
        model, count = make(name), Counter()

        def counted(op: str, fn: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                count[op] += 1
                return fn(*args, **options)

            return call

        along = (f.name for f in fields(Ops) if f.name not in ("linear", "rms_norm"))  # they look along a row
        ops = [op for op in along if callable(getattr(model.ops, op))]
        with_ops(model, **{op: counted(op, getattr(model.ops, op)) for op in ops})
        model(tokens(n), Spans.of([n]), model.init_cache(1))
        return count

    short, long = calls(32), calls(512)
    assert short == long, f"{name}: op calls grow with the tokens, {short} and {long}"
    assert not any(op.endswith("_step") for op in long)
    mixers = [m for m in make(name).modules() if isinstance(m, Mixer)]  # those inside another too
    assert 0 < sum(long.values()) <= 2 * len(mixers)


def test_ids_outside_the_vocabulary_and_rows_that_do_not_fit_raise() -> None:
    model = model_of("composed", "torch")
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model(torch.tensor([0, VOCAB]), Spans.of([2]))
    with pytest.raises(ValueError, match="3 rows"):
        model(tokens(2), Spans.of([1, 1]), model.init_cache(3))
    with pytest.raises(ValueError, match="one flat"):
        model(tokens(4), Spans.of([3]))
    with pytest.raises(ValueError, match="another model"):
        model(tokens(2), Spans.of([2]), model_of("llama", "torch").init_cache(1))
