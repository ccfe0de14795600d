"""Rotary frequencies and their scalings beside the published formulas, in plain numbers (case H5)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from constate.core.mixer import Call
from constate.core.rotary import Rotary
from constate.kernels.dispatch import select
from constate.spans import Spans

DIM, THETA = 16, 10000.0


def call(*lengths: int, past: tuple[int, ...] | None = None) -> Call:
    past = past or (0,) * len(lengths)
    return Call(Spans.of(lengths), select("reference", "cpu"), past, torch.tensor(past))


def base(dim: int = DIM, theta: float = THETA) -> list[float]:
    return [1 / theta ** (2 * i / dim) for i in range(dim // 2)]


def near(got: Rotary, want: list[float], factor: float = 1.0) -> None:
    assert got.frequencies == pytest.approx(want, rel=1e-6)
    assert got.factor == pytest.approx(factor, abs=1e-6)


@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_default_and_linear(name: str) -> None:
    near(Rotary.of({}, DIM), base())
    near(Rotary.of({name: "default", "rope_theta": 500.0}, DIM), base(theta=500.0))
    near(Rotary.of({name: "linear", "factor": 4.0}, DIM), [f / 4 for f in base()])


def test_only_the_first_part_of_a_head_may_turn() -> None:
    rotary = Rotary.of({"partial_rotary_factor": 0.25}, DIM)
    near(rotary, base(dim=4))
    x = torch.randn(7, 2, DIM)
    turned = rotary.rotate(x, call(7))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert (turned[1:, :, :4] != x[1:, :, :4]).all()


def test_a_pair_of_channels_turns_by_position_times_frequency() -> None:
    rotary = Rotary.of({"rope_theta": THETA}, DIM)
    x = torch.randn(5, 1, DIM)
    turned = rotary.rotate(x, call(2, 3, past=(7, 100)))
    for token, position in enumerate((7, 8, 100, 101, 102)):
        for i, frequency in enumerate(base()):
            a, b = float(x[token, 0, i]), float(x[token, 0, i + DIM // 2])
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            got = turned[token, 0, i].item(), turned[token, 0, i + DIM // 2].item()
            assert got == pytest.approx((a * cos - b * sin, b * cos + a * sin), abs=2e-5)


def test_llama3_keeps_short_waves_slows_long_ones_and_ramps_between() -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": THETA,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    want = []
    for frequency in base():
        wave = 2 * math.pi / frequency
        if wave < 256 / 4.0:
            want.append(frequency)
        elif wave > 256 / 1.0:
            want.append(frequency / 8.0)
        else:
            smooth = (256 / wave - 1.0) / (4.0 - 1.0)
            want.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
    near(Rotary.of(parameters, DIM), want)
    assert len({round(b / w, 3) for b, w in zip(base(), want, strict=True)}) >= 3, "all three zones are met"


def test_yarn_factor_four() -> None:
    """Case H5's value, and equations 17 to 23 of Peng et al.: 0.1 ln(4) + 1 = 1.138629."""
    original, factor, dim = 64, 4.0, 8  # half of a head of 16
    parameters = {
        "rope_type": "yarn",
        "rope_theta": THETA,
        "factor": factor,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": 0.5,
        "beta_fast": 8.0,
        "truncate": False,
    }

    def channel(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = max(channel(8.0), 0), min(channel(1.0), dim - 1)
    want = []
    for i, frequency in enumerate(base(dim=dim)):
        gamma = 1 - min(1.0, max(0.0, (i - low) / (high - low)))  # 1: keep, 0: interpolate
        want.append((1 - gamma) * frequency / factor + gamma * frequency)
    near(Rotary.of(parameters, DIM), want, factor=1.138629)


def test_longrope_with_one_table_divides_each_frequency() -> None:
    divisors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    parameters = {"rope_type": "longrope", "short_factor": divisors, "long_factor": tuple(divisors)}
    want = [f / d for f, d in zip(base(), divisors, strict=True)]
    near(Rotary.of({**parameters, "attention_factor": 1.0}, DIM), want)
    # Without it: sqrt(1 + ln(factor) / ln(original)), the factor from how far the text was stretched.
    near(
        Rotary.of({**parameters, "factor": 4.0}, DIM, 1024), want, math.sqrt(1 + math.log(4) / math.log(1024))
    )
    stretched = {**parameters, "original_max_position_embeddings": 256}
    near(Rotary.of(stretched, DIM, 1024), want, math.sqrt(1 + math.log(4) / math.log(256)))


@pytest.mark.parametrize(
    ("parameters", "fact"),
    [
        ({"rope_type": "su"}, "'su': known are"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, "re-rotates keys"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "1 factors for 8 freq"),
        ({"rope_type": "dynamic", "factor": 2.0}, "re-rotates keys"),
        ({"rope_theta": 0}, "rope_theta 0: a base above 0"),
        ({"rope_theta": -1.0}, "rope_theta -1: a base above 0"),  # whose powers are complex numbers
        ({"rope_type": "default", "factor": 2.0}, "does not know the keys"),
        ({"rope_type": "linear"}, "wants factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "wants low_freq_factor"),
        ({"rope_type": "yarn", "factor": 4.0}, "wants original_max_position_embeddings"),
        ({"partial_rotary_factor": 0.2}, "an even number"),
    ],
)
def test_a_scaling_that_is_not_understood_raises(parameters: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        Rotary.of(parameters, DIM)


def test_scores_depend_on_distance_alone_and_tables_are_made_once_a_call() -> None:
    rotary = Rotary.of({"rope_theta": 50.0}, DIM)
    q, k = torch.randn(2, 1, 1, DIM)
    scores = []
    for past in (0, 9, 400):
        first, second = call(1, past=(past + 5,)), call(1, past=(past,))
        scores.append(float((rotary.rotate(q, first) * rotary.rotate(k, second)).sum()))
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-4)
    one = call(3)
    rotary.rotate(torch.randn(3, 1, DIM), one)
    table = one.shared[rotary]
    rotary.rotate(torch.randn(3, 2, DIM), one)
    assert one.shared[rotary] is table
