"""Inputs that break careless kernels, and the bounds that every op is held to."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_DECAYS = (0.0, -1e-6, -5.0, -50.0, -1e4, -torch.inf)
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130, 200)  # both sides of every tile edge
PACKS = (
    (5, 0, 64, 1, 17),
    (0, 3),
    (33, 33),
    (1, 1, 1),
    (1, 0, 1),
    (0, 0),
    (2, 1, 130, 1, 0, 65, 64),
    (16, 0),
)
HEADS = ((2, 4), (1, 3), (2, 2))  # (key heads, value heads)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)) * scale


def log_decays(*shape: int, seed: int) -> Tensor:
    """Every hostile value and mild ones, mixed entry by entry, so that each tile holds them all."""
    pick = torch.randint(0, 2 * len(LOG_DECAYS), shape, generator=generator(seed))
    mild = -torch.rand(*shape, generator=generator(seed + 1))
    hostile = torch.tensor(LOG_DECAYS)[pick.clamp(max=len(LOG_DECAYS) - 1)]
    # Zero twice as often as the rest, else no memory of the past survives long enough to be wrong.
    return torch.where(pick < len(LOG_DECAYS), hostile, torch.where(pick % 3 == 0, torch.zeros(()), mild))


def assert_output(got: Tensor, want: Tensor, what: str = "o") -> None:
    """Within 1e-4 of max(1, largest entry)."""
    _assert(got, want, 1e-4 * max(1.0, _largest(want)), what)


def assert_state(got: Tensor, want: Tensor, what: str = "final") -> None:
    """Within 5e-5 of the largest entry."""
    _assert(got, want, 5e-5 * _largest(want), what)


def assert_gradient(got: Tensor, want: Tensor, what: str) -> None:
    """Within 2e-4 of max(1, largest entry)."""
    _assert(got, want, 2e-4 * max(1.0, _largest(want)), what)


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _assert(got: Tensor, want: Tensor, bound: float, what: str) -> None:
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    assert bool(torch.isfinite(got).all()), f"{what} is not finite"
    worst = _largest(got.double() - want.double())
    assert worst <= bound, f"{what}: off by {worst:.3e}, allowed {bound:.3e}"
