"""What the packages' entrances share: whose tensors they take, and packed rows as batches.

Knows spans and devices; knows no package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...spans import Spans

DEVICE = "cuda"
"""The packages' kernels are for GPUs; some read a CPU tensor's address as if it were one of theirs."""


def on_gpu(package: str, **tensors: Tensor | None) -> None:
    """Refuses tensors that lie elsewhere, or on two devices. Raises ValueError."""
    given = {name: x for name, x in tensors.items() if x is not None}
    first, *_ = given
    for name, x in given.items():
        if x.device.type != DEVICE:
            raise ValueError(
                f"{name} on {x.device} was given to {package}: its kernels are never called for tensors that "
                "are not on a GPU. Backend 'auto' picks what serves a device"
            )
        if x.device != given[first].device:
            raise ValueError(f"{first} is on {given[first].device} and {name} on {x.device}")


def graded(*tensors: Tensor | None) -> bool:
    """Whether autograd wants to know: then the chunked form serves the call, as on every backend."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def spread(x: Tensor, h: int) -> Tensor:
    """(..., hk, d) to (..., h, d), for kernels without shared key heads: a copy where they are shared."""
    return x if x.shape[-2] == h else x.repeat_interleave(h // x.shape[-2], dim=-2)


def over_rows(
    function: Callable[..., tuple[Tensor, Tensor]],
    tokens: dict[str, Tensor],
    initial: Tensor,
    spans: Spans,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(o, final) of a function over (batch, time, ...) tensors, `initial_state` and `cu_seqlens`.

    `tokens` are packed (n, ...), among them `v` or `x`, which o is like. Rows of equal length go as a batch,
    others packed; a row without tokens is not handed over, and its state stays as it was.
    """
    options |= {"output_final_state": True}
    full = [row for row, length in enumerate(spans.lengths) if length]
    if not full:
        return torch.empty_like(tokens["v" if "v" in tokens else "x"]), initial.clone()
    if spans.uniform:
        batch = {name: x.unflatten(0, (spans.rows, spans.longest)) for name, x in tokens.items()}
        o, final = function(**batch, initial_state=initial, **options)
        return o.flatten(0, 1), final.float()
    batch = {name: x.unsqueeze(0) for name, x in tokens.items()}
    if len(full) == spans.rows:
        o, final = function(**batch, initial_state=initial, cu_seqlens=spans.cu, **options)
        return o.squeeze(0), final.float()
    where = torch.tensor(full, device=initial.device)
    cu = Spans.of((spans.lengths[row] for row in full), initial.device).cu
    o, final = function(**batch, initial_state=initial[where], cu_seqlens=cu, **options)
    return o.squeeze(0), initial.index_copy(0, where, final.float())
