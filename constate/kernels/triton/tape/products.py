"""Matrix products of a decode step: PyTorch's on memory that stays, with results in float32. Knows the work
and no kernel.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..linear import linear
from .works import Product, Run


def product(work: Product) -> Run:
    """y = W x + bias (`added`: y += W x), as one call. Where W is narrow, x is its twin in W's dtype; sums
    are float32 and so is y, unless only another product reads it (`left`)."""
    x, y, weight, bias = work.x, work.y, work.weight, work.bias
    if work.scales is not None:
        return partial(linear, x, weight, bias, work.scales, out=y)
    if work.exact:
        weight = weight.float()
    if weight.dtype == torch.float32:
        return _float32(x, weight, bias, y, work.added)
    assert work.given is not None
    if work.left is not None:
        own = None if bias is None else bias.to(weight.dtype)
        return _float32(work.given, weight, own, work.left, False)
    return _narrow(work.given, weight, bias, y, work.added)


def _narrow(given: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, added: bool) -> Run:
    """Narrow factors, float32 sums. What a device and a PyTorch have of it is found out by asking: products,
    but none with a float32 addend, which is then added by itself; or none, as on a CPU."""
    into, spare = y if added else bias, torch.empty_like(y)
    try:
        torch.mm(given, weight.mT, out_dtype=torch.float32, out=spare)
    except RuntimeError:
        return partial(_wide, given, weight, bias, y, added)
    if into is None:
        return partial(torch.mm, given, weight.mT, out_dtype=torch.float32, out=y)
    try:
        torch.addmm(into, given, weight.mT, out_dtype=torch.float32, out=spare)
    except RuntimeError:
        return partial(_apart, given, weight, into, y, spare)
    return partial(torch.addmm, into, given, weight.mT, out_dtype=torch.float32, out=y)


def _apart(given: Tensor, weight: Tensor, into: Tensor, y: Tensor, spare: Tensor) -> None:
    torch.mm(given, weight.mT, out_dtype=torch.float32, out=spare)
    torch.add(into, spare, out=y)


def _float32(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, added: bool) -> Run:
    into = y if added else bias
    if into is None:
        return partial(torch.mm, x, weight.mT, out=y)
    return partial(torch.addmm, into, x, weight.mT, out=y)


def _wide(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, added: bool) -> None:
    said = x.float() @ weight.float().mT
    said = said if bias is None else said + bias
    y.copy_(y + said if added else said)
