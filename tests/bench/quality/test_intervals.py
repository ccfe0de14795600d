"""Intervals hold what they promise, by simulation, and by Wilson's and Student's own numbers."""

import math

import pytest
import torch

from constate.bench.quality.intervals import mean, share


def test_independent_answers_get_wilsons_interval() -> None:
    """By hand: 7 of 10, z = 1.959964."""
    right = torch.tensor([1] * 7 + [0] * 3)
    p, low, high = share(right, torch.ones(10, dtype=torch.int64))
    assert p == pytest.approx(0.7)
    # The spread between episodes uses n - 1, so that they are worth 9 answers; at least one an episode.
    assert (low, high) == (pytest.approx(0.3968, abs=2e-4), pytest.approx(0.8922, abs=2e-4))


@pytest.mark.parametrize("p", [0.03, 0.5, 0.9])
@pytest.mark.parametrize("together", [False, True])
def test_the_truth_lies_within_in_95_of_100(p: float, together: bool) -> None:
    """Also where the eight answers of an episode are all right or all wrong."""
    source, within = torch.Generator().manual_seed(1), 0
    for _ in range(1000):
        one = torch.rand(60, 1 if together else 8, generator=source) < p
        right = one.expand(60, 8).sum(1)
        _, low, high = share(right, torch.full((60,), 8))
        within += low <= p <= high
    assert 920 <= within <= 990


@pytest.mark.parametrize("right", [0, 8])
def test_no_certainty_where_all_answers_agree(right: int) -> None:
    p, low, high = share(torch.full((20,), right), torch.full((20,), 8))
    assert p == right / 8
    assert high - low > 0.1  # twenty episodes, not 160 answers
    assert 0 <= low <= p <= high <= 1


def test_seeds_get_students_interval() -> None:
    """By hand: 1, 2, 3: mean 2, deviation 1, t 4.303."""
    assert mean([1, 2, 3]) == (
        2,
        pytest.approx(2 - 4.303 / math.sqrt(3)),
        pytest.approx(2 + 4.303 / math.sqrt(3)),
    )
    middle, low, high = mean([0.4])
    assert middle == 0.4 and math.isnan(low) and math.isnan(high)


def test_nothing_asked_is_no_score() -> None:
    with pytest.raises(ValueError, match="asked"):
        share(torch.zeros(3), torch.zeros(3))
