"""The product of a linear layer against float64, every backend: odd widths around tiles and groups, several
rows, narrow weights, and inputs that lie as no kernel would like them (case K4).

The native form reads weights once for up to 16 rows and by panels beyond: both sides of that are here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.core.int8 import quantised
from constate.kernels.dispatch import select
from tests.backends import BACKENDS
from tests.kernels import hostile

OPS = {backend: select(backend).linear for backend in BACKENDS}
WIDTHS = [(1, 1), (5, 3), (16, 4), (48, 33), (64, 2), (80, 100), (127, 65), (130, 7), (1537, 70)]
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 31)
FORMATS = ("float32", "bfloat16", "int8")


def weights(out: int, width: int, stored: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """The stored form, its scales, and what both mean in float64."""
    exact = hostile.normal(out, width, seed=2)
    if stored != "int8":
        weight = exact.to(getattr(torch, stored))
        return weight, None, weight.double()
    weight, scales = quantised(exact)
    meant = torch.stack([weight[:, k].double() * scales[:, k // 64].double() for k in range(width)], dim=1)
    return weight, scales, meant


def close(got: Tensor, want: Tensor, bound: float = 1e-5) -> bool:
    """Within the rounding of float32 sums of terms of the result's size."""
    return (got.double() - want).abs().max().item() <= bound * max(1.0, want.abs().max().item())


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("backend", OPS)
def test_every_width_and_number_of_rows(backend: str, stored: str) -> None:
    op = OPS[backend]
    for width, out in WIDTHS:
        weight, scales, meant = weights(out, width, stored)
        bias = hostile.normal(out, seed=3)
        for rows in ROWS:
            x = hostile.normal(rows, width, seed=rows)
            want = torch.einsum("rk,nk->rn", x.double(), meant)
            assert close(op(x, weight, None, scales), want), (width, out, rows)
            assert close(op(x, weight, bias, scales), want + bias.double()), (width, out, rows)


@pytest.mark.parametrize("backend", OPS)
def test_a_scale_too_many_or_a_column_off_is_seen(backend: str) -> None:
    """The bound above bites: the likeliest mistakes in the tails are far outside of it."""
    weight, scales, meant = weights(5, 130, "int8")
    assert scales is not None
    x = hostile.normal(3, 130, seed=1)
    want = x.double() @ meant.T
    right = OPS[backend]
    assert close(right(x, weight, None, scales), want)
    shifted = torch.cat([scales[:, 1:], scales[:, :1]], dim=1)
    assert not close(right(x, weight, None, shifted), want)
    assert not close(right(x[:, :129], weight[:, :129].contiguous(), None, scales), want)
    assert not close(right(x.roll(1, 1), weight, None, scales), want)


@pytest.mark.parametrize("backend", OPS)
def test_inputs_lie_anyhow(backend: str) -> None:
    """Sliced, transposed, expanded inputs, strided weights, slices as output: as their contiguous copies."""
    op, (width, out) = OPS[backend], (100, 21)
    weight, scales, meant = weights(out, width, "int8")
    wide = hostile.normal(11, width + 13, seed=4)
    layouts = {
        "sliced": wide[:, 5 : 5 + width],
        "every second": hostile.normal(22, width, seed=5)[::2],
        "transposed": hostile.normal(width, 11, seed=6).T,
        "expanded": hostile.normal(1, width, seed=7).expand(11, width),
        "unaligned": hostile.normal(11 * width + 1, seed=8)[1:].view(11, width),
    }
    for name, x in layouts.items():
        want = x.double() @ meant.T
        whole = op(x.contiguous(), weight, None, scales)
        assert close(op(x, weight, None, scales), whole.double(), 1e-6), name
        assert close(op(x, weight, None, scales), want), name
        y = torch.full((11, out + 9), 7.0)
        assert op(x, weight, None, scales, out=y[:, 4 : 4 + out]).data_ptr() == y[:, 4:].data_ptr()
        assert close(y[:, 4 : 4 + out], want), name
        assert (y[:, :4] == 7).all() and (y[:, 4 + out :] == 7).all(), name
    turned = hostile.normal(width, out, seed=9).T
    assert close(op(wide[:, :width], turned), wide[:, :width].double() @ turned.double().T)


@pytest.mark.parametrize("backend", OPS)
def test_leading_axes_and_no_rows(backend: str) -> None:
    op, (weight, scales, meant) = OPS[backend], weights(6, 70, "int8")
    x = hostile.normal(2, 3, 70, seed=1)
    assert close(op(x, weight, None, scales), x.double() @ meant.T)
    assert op(x[0, 0], weight, None, scales).shape == (6,)
    assert op(x[0, :0], weight, None, scales).shape == (0, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", OPS)
def test_narrow_activations(backend: str, dtype: torch.dtype) -> None:
    """They come back in their dtype, rounded once or by the product's own rounding."""
    x, weight = hostile.normal(5, 96, seed=1).to(dtype), hostile.normal(12, 96, seed=2).to(dtype)
    y = OPS[backend](x, weight, hostile.normal(12, seed=3).to(dtype))
    want = x.double() @ weight.double().T + hostile.normal(12, seed=3).to(dtype).double()
    assert y.dtype == dtype
    assert close(y, want, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("backend", OPS)
def test_gradients(backend: str) -> None:
    """Where autograd asks, whatever the backend: of x, weight and bias."""
    x, weight, bias = (
        hostile.normal(*shape, seed=i).requires_grad_() for i, shape in enumerate([(9, 20), (6, 20), (6,)])
    )
    OPS[backend](x, weight, bias).square().sum().backward()
    y = x.detach().double() @ weight.detach().double().T + bias.detach().double()
    wants = (2 * y @ weight.detach().double(), 2 * y.T @ x.detach().double(), 2 * y.sum(0))
    for leaf, want in zip((x, weight, bias), wants, strict=True):
        assert leaf.grad is not None and close(leaf.grad, want)


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "width": (lambda op: op(torch.ones(2, 5), torch.ones(3, 4)), r"\(\.\.\., in\) and \(out, in\)"),
    "transposed": (lambda op: op(torch.ones(2, 3), torch.ones(3, 4)), "the weight is transposed"),
    "bias": (lambda op: op(torch.ones(2, 4), torch.ones(3, 4), torch.ones(4)), "bias"),
    "no scales": (lambda op: op(torch.ones(2, 4), torch.ones(3, 4, dtype=torch.int8)), "no scales"),
    "scales": (lambda op: op(torch.ones(2, 4), torch.ones(3, 4), None, torch.ones(3, 1)), "with scales"),
    "groups": (
        lambda op: op(torch.ones(2, 65), torch.ones(3, 65, dtype=torch.int8), None, torch.ones(3, 1)),
        r"scales is \(3, 1\); \(3, 2\)",
    ),
    "out": (lambda op: op(torch.ones(2, 4), torch.ones(3, 4), out=torch.ones(2, 4)), r"out is \(2, 4\)"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("backend", OPS)
def test_wrong_arguments_say_so(backend: str, what: str) -> None:
    call, words = WRONG[what]
    with pytest.raises(ValueError, match=words):
        call(OPS[backend])
