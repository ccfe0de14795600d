"""Feature maps beside the formulas that they stand for."""

from __future__ import annotations

import math

import pytest
import torch

from constate.core.feature_maps import FEATURE_MAPS, feature_map


@pytest.mark.parametrize("k", [1, 2, 5, 16])
def test_taylor_features_multiply_to_the_second_order_series(k: int) -> None:
    """Arora et al. 2024, section 4.1: phi(q) . phi(k) = 1 + s + s^2 / 2, s = q . k / sqrt(k)."""
    taylor = feature_map("taylor")
    q, key = torch.randn(7, 3, k), 3 * torch.randn(7, 3, k)
    s = (q.double() * key.double()).sum(-1) / math.sqrt(k)
    got = (taylor(q).double() * taylor(key).double()).sum(-1)
    want = 1 + s + s**2 / 2
    assert float((got - want).abs().max()) <= 1e-6 * max(1.0, float(want.abs().max()))
    assert taylor(q).shape[-1] == taylor.width(k) == 1 + k + k * (k + 1) // 2


def test_elu_is_one_at_zero_and_never_negative() -> None:
    x = torch.tensor([-100.0, -1.0, 0.0, 2.0])
    want = torch.tensor([0.0, math.exp(-1), 1.0, 3.0])
    assert torch.allclose(feature_map("elu")(x), want, rtol=0, atol=1e-7)
    assert bool((feature_map("relu")(x) == torch.tensor([0.0, 0.0, 0.0, 2.0])).all())
    assert torch.equal(feature_map("identity")(x), x)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_features_are_float32_of_the_width_that_is_said(name: str) -> None:
    x = torch.randn(4, 2, 6, dtype=torch.bfloat16)
    features = feature_map(name)(x)
    assert features.dtype == torch.float32
    assert features.shape == (4, 2, feature_map(name).width(6))


def test_an_unknown_map_is_named() -> None:
    with pytest.raises(
        ValueError, match="'performer' is not known; known are elu, relu, identity, unit, taylor"
    ):
        feature_map("performer")
