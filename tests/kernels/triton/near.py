"""How near a Triton kernel comes to a float64 loop: within 1e-5 of the largest entry, in 16 bits 1e-2."""

from __future__ import annotations

import torch
from torch import Tensor

from constate.kernels.triton.launch import Launch

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
DTYPES = tuple(BOUNDS)


def near(got: Tensor, want: Tensor, dtype: torch.dtype = torch.float32, least: float = 1.0) -> None:
    """Of an op over inputs of `dtype`; the largest entry counts as `least` at the least."""
    assert got.shape == want.shape
    if not want.numel():
        return
    assert bool(torch.isfinite(got).all())
    far = float((got.double() - want.double()).abs().max()) / max(least, float(want.abs().max()))
    assert far <= BOUNDS[dtype], f"off by {far:.2e} of the largest entry, allowed {BOUNDS[dtype]:.0e}"


def names(made: list[Launch]) -> list[str]:
    return [launch.kernel for launch in made]


def guarded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same numbers within a wider tensor of NaN, every second of its rows, channels apart; and that."""
    held = torch.full((2 * x.shape[0] + 1, *x.shape[1:-1], 2 * x.shape[-1] + 1), torch.nan, dtype=x.dtype)
    inner = held[1::2, ..., 1::2]
    inner.copy_(x)
    return inner, held


def untouched(held: Tensor) -> bool:
    return bool(held[::2].isnan().all()) and bool(held[..., ::2].isnan().all())
