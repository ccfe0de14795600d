"""Attention's decode step in C. Prompts are left to PyTorch's fused attention, which is as fast."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .. import shapes
from ..chunked.attention import attention
from ..chunked.attention import attention_step as chunked_step
from .call import fields, graded, packed, run

CHUNK = 256  # places that one thread sums at a time; attention.c has the same


def chunks(capacity: int) -> int:
    """Into how many chunks a buffer of this many places falls."""
    return max(1, -(-capacity // CHUNK))


class Attend(ctypes.Structure):
    _fields_ = fields(
        "q k v o partial lengths",
        "rows hk h dk dv capacity chunks q_stride o_stride k_row k_place v_row v_place bf16 more",
        "scale",
    )


class Enter(ctypes.Structure):
    _fields_ = fields(
        "qkv q_norm k_norm turns k v past",
        "rows hk h dk dv capacity stride rotated k_row k_place v_row v_place bf16",
        "eps",
    )


class Turns(ctypes.Structure):
    _fields_ = fields("frequencies turns past", "rows half", "factor")


def attention_step(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, longest: int, *, scale: float | None = None
) -> Tensor:
    """See reference.attention_step. Buffers of float32 and bfloat16 are read where they lie."""
    if graded((q, k, v)) or k.dtype not in (torch.float32, torch.bfloat16) or v.dtype != k.dtype:
        return chunked_step(q, k, v, lengths, longest, scale=scale)
    shapes.attention_step(q, k, v, lengths, longest)
    query, k, v, lengths = packed(q), _buffer(k), _buffer(v), lengths.long().contiguous()
    rows, h, dk = q.shape
    capacity, hk, dv = k.shape[1], k.shape[2], v.shape[3]
    count = chunks(capacity)  # of scratch; a length beyond `longest`, which is a fault, is then no wild write
    o = torch.empty(rows, h, dv)
    given = {
        "q": query,
        "k": k,
        "v": v,
        "o": o,
        "partial": torch.empty(rows * h * count * (2 + dv)),
        "lengths": lengths,
        "rows": rows,
        "hk": hk,
        "h": h,
        "dk": dk,
        "dv": dv,
        "capacity": capacity,
        "chunks": count,
        "q_stride": query.stride(0),
        "o_stride": o.stride(0),
        "k_row": k.stride(0),
        "k_place": k.stride(1),
        "v_row": v.stride(0),
        "v_place": v.stride(1),
        "bf16": k.dtype == torch.bfloat16,
        "scale": dk**-0.5 if scale is None else scale,
    }
    run("attend", Attend, **given)
    run("combine", Attend, **given)
    return o.to(q.dtype)


def _buffer(x: Tensor) -> Tensor:
    """(rows, capacity, hk, dim) with a place's numbers side by side."""
    x = x.detach()
    beside = x.stride(3) == 1 and (x.shape[2] == 1 or x.stride(2) == x.shape[3])
    return x if beside else x.contiguous()


__all__ = ["attention", "attention_step"]
