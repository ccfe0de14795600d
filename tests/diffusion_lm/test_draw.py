"""The noise that tokens are drawn with: its range, its distribution, and what is drawn with it."""

import math

import pytest
import torch

from constate.core.sampling import Sampling
from constate.diffusion_lm.draw import draw, gumbel, source, tempered

NARROW = -math.log(-math.log1p(-(2.0**-24)))  # the most that a uniform of 24 bits can make


def test_rare_noise_occurs_among_2_to_the_28_draws():
    """Case J4. Beyond 16.64, where noise of 24 bits ends, 15.9 of them are expected."""
    assert pytest.approx(16.64, abs=0.01) == NARROW
    noise, beyond, largest = source(1), 0, 0.0
    for _ in range(2**8):
        drawn = gumbel((2**20,), noise)
        beyond += int((drawn > 16.64).sum())
        largest = max(largest, float(drawn.max()))
    mean = 2**28 * -math.expm1(-math.exp(-16.64))
    assert abs(beyond - mean) < 4 * math.sqrt(mean)
    assert largest > 17.5  # the largest of so many lies about 28 ln 2 = 19.4


def test_noise_of_24_bits_is_seen():
    """The fault that the test above is for."""
    uniform = torch.rand(2**24, generator=source(1))  # float32: 24 bits
    assert float(-(-uniform.log()).clamp(min=2**-24).log().max()) < 16.7


def test_the_bulk_is_gumbel():
    drawn = gumbel((2**20,), source(2)).double().sort().values
    at = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    quantiles = -(-at.log()).log()
    below = torch.searchsorted(drawn, quantiles).double() / len(drawn)
    assert float((below - at).abs().max()) < 2.5 / math.sqrt(len(drawn))  # Kolmogorov-Smirnov
    assert bool(drawn.isfinite().all())


def test_both_ends_are_finite(monkeypatch: pytest.MonkeyPatch):
    """The bits set by hand: none, one, half, all."""

    def planted(self: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
        return self.copy_(torch.tensor([0, 1, 2**62, 2**63 - 1]))

    monkeypatch.setattr(torch.Tensor, "random_", planted)
    values = gumbel((4,), source(0)).tolist()
    want = [
        64 * math.log(2),
        63 * math.log(2) - math.log(1.5),
        -math.log(math.log(2)),
        -math.log(24 * math.log(2)),
    ]
    assert values == pytest.approx(want, abs=1e-4)


def test_a_tail_keeps_its_mass():
    """Case J4 in small: one logit of 0 beside 20,000 of -12.9, which have a twentieth of the mass."""
    logits = torch.full((1, 20_001), -12.9)
    logits[0, 0] = 0.0
    noise, rule = source(3), Sampling(1.0)
    hits = sum(draw(logits, [0], rule, noise, ())[0] > 0 for _ in range(2000))
    mass = 20_000 * math.exp(-12.9)
    want = 2000 * mass / (1 + mass)
    assert abs(hits - want) < 4 * math.sqrt(want)


@pytest.mark.parametrize(
    "rule",
    [
        Sampling(1.0),
        Sampling(0.5),
        Sampling(1.3, top_k=3),
        Sampling(1.0, top_p=0.7),
        Sampling(2.0, min_p=0.3),
        Sampling(0.8, repetition_penalty=1.7),
    ],
    ids=str,
)
def test_tokens_have_their_probabilities(rule: Sampling):
    logits = torch.tensor([1.0, 2.0, -0.5, 2.4, 0.3, -torch.inf])
    seen = {1, 2}
    scores = logits.double()
    for i in seen:
        scores[i] *= rule.repetition_penalty if scores[i] < 0 else 1 / rule.repetition_penalty
    p = (scores / rule.temperature).softmax(-1)
    ranked = sorted(range(6), key=lambda i: -p[i])
    kept = ranked[: rule.top_k or None]
    while len(kept) > 1 and float(p[kept[:-1]].sum()) >= rule.top_p * float(p[kept].sum()) and rule.top_p < 1:
        kept.pop()
    kept = [i for i in kept if p[i] >= rule.min_p * p[ranked[0]] and p[i] > 0]
    want = torch.zeros(6, dtype=torch.float64)
    want[kept] = p[kept] / p[kept].sum()
    ids = draw(logits[None], [0] * 8000, rule, source(4), seen)
    got = torch.bincount(torch.tensor(ids), minlength=6)
    assert (abs(got - 8000 * want) <= 5 * (8000 * want).sqrt()).all()
    mass = tempered(logits[None], rule)[0].softmax(-1)
    if rule.repetition_penalty == 1:  # which is not part of what certainty is measured on
        assert torch.allclose(mass.double(), want, atol=1e-6)


def test_greedy_takes_the_first_of_the_best():
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, -1.0]])
    assert draw(logits, [0, 1], Sampling(), source(0), ()) == [1, 0]
    assert draw(logits, [1, 0], Sampling(repetition_penalty=2.0), source(0), {1}) == [0, 2]
    assert torch.equal(tempered(logits, Sampling()), logits)


def test_seeds():
    """Any whole number is one, and all are unlike."""
    drawn = {seed: tuple(gumbel((4,), source(seed)).tolist()) for seed in (0, 1, -1, 2**70, -(2**70))}
    assert len(set(drawn.values())) == 5
    assert tuple(gumbel((4,), source(-1)).tolist()) == drawn[-1]
