"""Attention's decode step by Triton: see attention_kernel.py for the kernel, reference for the op.

Says into how many parts a row's past is split, and how large a program's tile is. Prompts are PyTorch's fused
attention's. Knows strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from .. import shapes
from ..chunked import attention as chunked
from .attention_kernel import attend_one
from .launch import Compiled, as_launched, launch, multiprocessors, on_device, power, precision, served

WIDEST, WIDEST_VALUE = 1024, 512
"""Wider keys and values, of latents say, go to the chunked form."""


def attention_step(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, longest: int, *, scale: float | None = None
) -> Tensor:
    """One query a row over the first lengths[r] places of its buffer; their order does not matter.

    q (rows, h, dk); k (rows, capacity, hk, dk) and v (rows, capacity, hk, dv) already hold the new token;
    lengths (rows,) int64 on q's device, `longest` their maximum on the host. Returns o (rows, h, dv) in q's
    dtype. Places behind a row's length are not read.
    """
    shapes.attention_step(q, k, v, lengths, longest)
    if q.shape[2] > WIDEST or v.shape[3] > WIDEST_VALUE or not served(0, (q, k, v)):
        return chunked.attention_step(q, k, v, lengths, longest, scale=scale)
    on_device(q, k=k, v=v, lengths=lengths)
    # Lengths are read side by side, whatever lies between them.
    return _step(q, k, v, lengths.contiguous(), longest, q.shape[2] ** -0.5 if scale is None else scale)


@torch.library.custom_op("constate::triton_attention_step", mutates_args=())
def _step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, longest: int, scale: float) -> Tensor:
    o = q.new_empty(*q.shape[:2], v.shape[3])
    partial, arrived = scratch(q, k, v, longest)
    launch_step(q, k, v, lengths, o, partial, arrived, longest, scale=scale)
    return o


@_step.register_fake
def _(q, k, v, lengths, longest, scale):
    return q.new_empty(*q.shape[:2], v.shape[3])


def scratch(q: Tensor, k: Tensor, v: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """What `launch_step` writes beside its output, for a past of at most `longest` places: the parts'
    softmaxes, and zeros that count the parts that are done, which it leaves as zeros."""
    (rows, h, _), hk = q.shape, k.shape[2]
    blocks, count = _programs(h // hk, hk), parts(rows, h, hk, longest, q.device)
    arrived = torch.zeros(rows, blocks, dtype=torch.int32, device=q.device)
    between = torch.empty(rows, h, count, v.shape[3] + 2, dtype=torch.float32, device=q.device)
    return between, arrived


def launch_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    o: Tensor,
    partial: Tensor,
    arrived: Tensor,
    longest: int,
    *,
    scale: float,
    more: int = 0,
    gate: Tensor | None = None,
) -> None:
    """One launch: o (rows, h, dv) whose rows alone may lie apart; row r's past is lengths[r] + more places.
    The sigmoid of `gate` (rows, h dv) weighs o."""
    (rows, h, dk), hk, dv = q.shape, k.shape[2], v.shape[3]
    block = heads_together(h // hk)
    places, part, stages = tile(dk, dv, k.dtype.itemsize, block)
    launch(
        attend_one,
        (rows, _programs(h // hk, hk), parts(rows, h, hk, longest, q.device)),
        q,
        stages=stages,
        **{"q": q, "k": k, "v": v, "lengths": lengths, "o": o, "partial": partial, "arrived": arrived},
        **{"more": more, "capacity": k.shape[1], "heads": h, "group": h // hk, "dk": dk, "dv": dv},
        **{"q_row": q.stride(0), "q_head": q.stride(1), "q_channel": q.stride(2)},
        **{"k_row": k.stride(0), "k_place": k.stride(1), "k_head": k.stride(2), "k_channel": k.stride(3)},
        **{"v_row": v.stride(0), "v_place": v.stride(1), "v_head": v.stride(2), "v_channel": v.stride(3)},
        o_row=o.stride(0),
        scale=scale,
        gate=gate,
        gate_row=0 if gate is None else gate.stride(0),
        PLACES=places,
        HEADS=block,
        PARTS=-(-dk // part),
        PART=part,
        DV=power(dv),
        STAGES=stages,
        PRECISION=precision(),
    )


SHORTEST = 128
"""Places of a part at the least: its softmax is written and read again."""


def parts(rows: int, h: int, hk: int, longest: int, device: torch.device) -> int:
    """Into how many parts a past is split at the most: enough programs for the card, long enough parts."""
    programs = rows * _programs(h // hk, hk)
    return max(1, min(-(-4 * multiprocessors(device) // programs), longest // SHORTEST))


def heads_together(group: int) -> int:
    """Heads of a program: a pair is summed up as it is, more are what a tensor core takes at once."""
    return group if group <= 2 else 16


def tile(dk: int, dv: int, itemsize: int, block: int) -> tuple[int, int, int]:
    """(places, channels of a part of the keys, stages) by the heads' sizes and the buffers' dtype."""
    part = min(power(dk), 128 if dk <= 256 else 64)
    wide = max(power(dk), power(dv))
    numbers = 8192 if itemsize == 2 else 4096
    places = max(16, min(64, numbers // wide))
    if block < 16:
        places = max(16, places // 2)
    # Narrow heads leave shared memory for a third stage; deeper, wide ones would not fit everywhere.
    return places, part, 3 if wide <= 64 and itemsize == 2 else 2


def _programs(group: int, hk: int) -> int:
    """Programs that a row's part of the past takes."""
    return hk * -(-group // heads_together(group))


def compiled() -> Iterator[Compiled]:
    """Heads of every size, alone and eight that share a key head; latents; sizes that are no power of two."""
    sizes = [(head, head, group) for head in (64, 128, 256, 80) for group in (1, 8)]
    lengths = torch.empty(32, dtype=torch.int64)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float16, "fp16")):
        for dk, dv, group in (*sizes, (576, 512, 16)):
            q, k = torch.empty(32, 16, dk, dtype=dtype), torch.empty(32, 4096, 16 // group, dk, dtype=dtype)
            call = partial(attention_step, q, k, k[..., :dv], lengths, 4096)
            note = f"{group} heads a key" if dk == dv else "latents"
            about = {"head": dk, "dtype": name, "default": dtype == torch.bfloat16 and dk in (64, 128)}
            yield from as_launched("attention_step", call, **about, note=note)
