"""The bound on a code length: against closed forms on two symbols, against every subset, and against itself.

The toys are models in nothing but the calls that scoring makes: their conditional probabilities are tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, permutations, product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from constate.core.model import Model
from constate.diffusion_lm import likelihood
from constate.diffusion_lm.denoiser import Denoiser, Masked
from constate.diffusion_lm.likelihood import Bound, bits_per_byte, draw, nelbo
from constate.diffusion_lm.schedules import LOG_LINEAR, SCHEDULES, Schedule
from constate.spans import Spans
from tests.denoisers import MASK, make
from tests.models import VOCAB
from tests.models import make as make_causal

TOY_MASK = 2
Conditional = Callable[[int, Sequence[int]], float]  # p(place i holds 1 | what is seen, 2 for a mask)


@dataclass
class Toy(Masked):
    """Two symbols and a mask; also its own config."""

    one: Conditional
    embed: Any = field(default_factory=lambda: SimpleNamespace(num_embeddings=3))
    head: Any = field(default_factory=lambda: SimpleNamespace(out_features=3))
    mask_token_id: int | None = TOY_MASK

    @property
    def config(self) -> Toy:
        return self

    def asked(self, mask_id: int) -> Denoiser:
        return Denoiser(mask_id)

    def __call__(self, tokens: Tensor, spans: Spans, *, at: Tensor) -> Tensor:
        rows = []
        for part in spans.slices():
            seen = tokens[part].tolist()
            ones = torch.tensor([self.one(i, seen) for i in range(len(seen))]).double()
            # The third logit is the mask's, which scoring must not believe.
            rows.append(torch.stack([(1 - ones).log(), ones.log(), torch.full_like(ones, 5.0)], 1))
        return torch.cat(rows)[at]


def toy(one: Conditional) -> Model:
    return cast(Model, Toy(one))


def crooked(i: int, seen: Sequence[int]) -> float:
    """Conditionals that no distribution has: a bound must be above the truth, and has a value of its own."""
    known = [s for s in seen if s != TOY_MASK]
    return (1 + i + 2 * sum(known)) / (4 + i + 2 * len(known))


def chain(i: int, seen: Sequence[int]) -> float:
    """The exact conditionals of a Markov chain: starts with 1 at odds 0.7, repeats itself at odds 0.8."""

    def p(x: Sequence[int]) -> float:
        first = 0.7 if x[0] else 0.3
        return first * math.prod(0.8 if a == b else 0.2 for a, b in pairwise(x))

    fits = [
        x
        for x in product((0, 1), repeat=len(seen))
        if all(s in (TOY_MASK, v) for s, v in zip(seen, x, strict=True))
    ]
    return sum(p(x) for x in fits if x[i]) / sum(p(x) for x in fits)


def nats(one: Conditional, x: Sequence[int], masked: Sequence[int], i: int) -> float:
    """-log p(x[i] | x without the masked places)."""
    seen = [TOY_MASK if j in masked else v for j, v in enumerate(x)]
    return -math.log(one(i, seen) if x[i] else 1 - one(i, seen))


def exactly(one: Conditional, x: Sequence[int], given: int) -> float:
    """The bound, by summing over every number of masks and every subset."""
    n = len(x) - given
    total = 0.0
    for k in range(1, n + 1):
        subsets = list(combinations(range(given, len(x)), k))
        total += sum(nats(one, x, s, i) for s in subsets for i in s) / len(subsets) / k
    return total


def near(bound: Bound, want: float) -> None:
    assert abs(bound.value - want) < 4 * bound.error, f"{bound}, wanted {want}"
    assert 0 < bound.error < 0.1 * want


def test_two_symbols_in_closed_form() -> None:
    """One mask and two masks are equally likely, and a lone mask counts twice: half of four terms' sum."""
    for x in product((0, 1), repeat=2):
        lone = nats(crooked, x, [0], 0) + nats(crooked, x, [1], 1)
        both = nats(crooked, x, [0, 1], 0) + nats(crooked, x, [0, 1], 1)
        assert exactly(crooked, x, 0) == pytest.approx((lone + both) / 2, rel=1e-12)
        near(nelbo(toy(crooked), [torch.tensor(x)], [0], samples=2000)[0], (lone + both) / 2)


@pytest.mark.parametrize("given", [0, 2])
def test_every_subset(given: int) -> None:
    x = [1, 0, 0, 1, 1]
    near(nelbo(toy(crooked), [torch.tensor(x)], [given], samples=1000)[0], exactly(crooked, x, given))


def test_a_perfect_denoiser_has_no_gap() -> None:
    x = [1, 1, 0, 0]
    truth = -math.log(0.7 * 0.8 * 0.2 * 0.8)
    assert exactly(chain, x, 0) == pytest.approx(truth, rel=1e-12)
    assert exactly(chain, x, 1) == pytest.approx(truth + math.log(0.7), rel=1e-12)
    near(nelbo(toy(chain), [torch.tensor(x)], [0], samples=1000)[0], truth)


def test_it_is_the_mean_over_all_orders() -> None:
    """Of the chain rule's code length, place by place in that order (Uria et al., 1310.1757)."""
    x = [1, 1, 0, 0]
    orders = list(permutations(range(4)))
    total = sum(nats(crooked, x, order[step:], order[step]) for order in orders for step in range(4))
    assert exactly(crooked, x, 0) == pytest.approx(total / len(orders), rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_schedule_has_the_same_bound(schedule: Schedule) -> None:
    """The continuous-time bound of two symbols, integrated over t by the midpoint rule."""
    x, steps = (1, 0), 20_000
    t = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    m, weight = schedule.masked(t), schedule.weight(t)
    lone = nats(crooked, x, [0], 0) + nats(crooked, x, [1], 1)
    both = nats(crooked, x, [0, 1], 0) + nats(crooked, x, [0, 1], 1)
    value = float((weight * (m * (1 - m) * lone + m**2 * both)).mean())
    # The log-linear schedule leaves one place in a thousand open at t = 1.
    assert value == pytest.approx(exactly(crooked, x, 0), rel=2e-3 if schedule is LOG_LINEAR else 1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_rises_and_its_weight_is_its_slope(schedule: Schedule) -> None:
    t = torch.linspace(1e-3, 1, 500, dtype=torch.float64, requires_grad=True)
    m = schedule.masked(t)
    (slope,) = torch.autograd.grad(m.sum(), t)
    t, m = t.detach(), m.detach()
    assert torch.allclose(slope / m, schedule.weight(t), rtol=1e-9)
    assert bool((slope > 0).all()) and float(m[0]) < 2e-3 and float(m[-1]) >= 0.999
    assert torch.allclose(1 - torch.exp(-schedule.sigma(t)), m.clamp(max=0.999), rtol=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_times_give_the_same_bound_as_counts(schedule: Schedule) -> None:
    """In the mean: on the toy, and the weights of a place on their own, which are 1. The log-linear schedule
    leaves out a thousandth."""
    x = [1, 0, 0, 1, 1]
    near(
        nelbo(toy(crooked), [torch.tensor(x)], [1], samples=4000, schedule=schedule)[0],
        exactly(crooked, x, 1),
    )
    for block in (None, 4):
        weights = draw(9, 3, block, 40_000, 7, schedule)
        assert bool((weights[:, :3] == 0).all())
        means, errors = weights[:, 3:].mean(0), weights[:, 3:].std(0) / 200
        assert bool(((means - 1).abs() < 4 * errors + 2e-3).all()), (means, errors)


def test_the_standard_error_is_one() -> None:
    """Over many seeds the estimates spread as wide as each says."""
    row = [torch.tensor([1, 0, 0, 1, 1, 0])]
    bounds = [nelbo(toy(crooked), row, [0], samples=4, seed=1000 * s)[0] for s in range(200)]
    spread = torch.tensor([b.value for b in bounds]).std()
    said = torch.tensor([b.error for b in bounds]).square().mean().sqrt()
    assert 0.85 * said < spread < 1.15 * said, (spread, said)


@pytest.mark.parametrize("block", [None, 1, 3, 4])
@pytest.mark.parametrize(("n", "given"), [(1, 0), (7, 0), (7, 1), (8, 5), (9, 4)])
def test_what_is_drawn(n: int, given: int, block: int | None) -> None:
    """In every group, a row or a block, k of n_g places weigh n_g / k; over the draws k takes every value."""
    weights = draw(n, given, block, 64, seed=3)
    assert weights.shape == (64, n) and bool((weights[:, :given] == 0).all())
    assert torch.equal(weights, draw(n, given, block, 64, seed=3))
    assert not torch.equal(weights, draw(n, given, block, 64, seed=4)) or n - given == 1 or block == 1
    for start in range(0, n, block or n):
        group = weights[:, max(start, given) : min(start + (block or n), n)]
        size = group.shape[1]
        if size == 0:
            continue
        counts = (group > 0).sum(1)
        assert set(counts.tolist()) == set(range(1, size + 1))
        assert torch.allclose(group.sum(1), torch.full((64,), float(size)))
        assert bool(((group > 0).sum(0) > 0).all()), "every place is masked in some draw"


def test_a_block_model_is_scored_block_by_block() -> None:
    """Its bound is the sum of each block's bound, given the clean blocks before it."""
    model = make("blocks")
    row = torch.arange(11) * 7 % MASK
    whole = nelbo(model, [row], [1], samples=600)[0]
    parts = [nelbo(model, [row[: i + 4]], [max(i, 1)], samples=600, seed=9)[0] for i in (0, 4, 8)]
    error = math.hypot(whole.error, *(p.error for p in parts))
    assert abs(whole.value - sum(p.value for p in parts)) < 4 * error
    assert error < 0.05 * whole.value


@pytest.mark.parametrize("name", ["both sides, shifted", "blocks, shifted", "mdlm, timed"])
def test_a_rows_bound_does_not_depend_on_its_neighbours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(name)
    rows = [torch.arange(n) * 5 % MASK for n in (9, 2, 14)]
    given = [1, 1, 6]
    together = nelbo(model, rows, given, samples=4, seed=5)
    for r in range(3):
        assert together[r].value == pytest.approx(
            nelbo(model, [rows[r]], [given[r]], samples=4, seed=5 + r)[0].value, rel=1e-5
        )
    monkeypatch.setattr(likelihood, "PLACES", 10)  # several forwards, one of them a longer row alone
    for a, b in zip(nelbo(model, rows, given, samples=4, seed=5), together, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-5)


def test_a_uniform_model_and_every_token_once() -> None:
    """Equal odds for 96 ids, the mask's not among them: log2 96 bits a token, with no error at all."""
    model = make("both sides, shifted")
    model.head.weight.zero_()
    tokens = torch.arange(50) % MASK
    for window, every in ((7, 1), (50, 1), (64, 1), (8, 3)):
        bound = bits_per_byte(model, tokens, 120, window=window, start=0, every=every)
        assert bound.value == pytest.approx(math.log2(96) * 50 / 120, rel=1e-6)
        assert bound.error == pytest.approx(0, abs=1e-6)


def test_requests_that_make_no_sense_are_refused() -> None:
    model, row = make("both sides, shifted"), torch.arange(5)
    for samples in (0, 1, 3):
        with pytest.raises(ValueError, match="draws come in pairs"):
            nelbo(model, [row], [1], samples=samples)
    with pytest.raises(ValueError, match="5 are given"):
        nelbo(model, [row], [5])
    with pytest.raises(ValueError, match="at least one given"):
        nelbo(model, [row], [0])
    with pytest.raises(ValueError, match="a text is wanted"):
        bits_per_byte(model, row[:0], 3, window=4, start=0)
    with pytest.raises(ValueError, match="one token after another"):
        nelbo(make_causal("llama"), [row], [1])
    assert VOCAB == MASK + 1
