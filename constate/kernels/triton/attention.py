"""Attention's decode step as one Triton kernel: a query a row over everything that its buffers hold.

A row's places are split over programs, so that a long past fills the card; each leaves a softmax of its own
part, and the last of a row to come weighs them together. How far each row has come is read on the device,
so that a captured step stays right as the past grows. Heads that share a key head are one program's, and
where they are many its products run on tensor cores. Prompts are PyTorch's fused attention's. Knows strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import shapes
from ..chunked import attention as chunked
from .gated_delta_parts import precision
from .launch import Compiled, as_launched, launch, multiprocessors, on_device, power, served
from .maths import sigmoid

WIDEST, WIDEST_VALUE = 1024, 512
"""Wider keys and values, of latents say, go to the chunked form."""

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def gated(answer, gate, at, head, cv, dv, both):
    """Heads' answers (heads, dv) times the sigmoid of their gate, where there is one."""
    if gate is not None:
        given = tl.load(gate + at + head[:, None] * dv + cv[None, :], mask=both, other=0.0)
        answer *= sigmoid(given.to(tl.float32))
    return answer


@triton.jit
def attend_one(
    q,
    k,
    v,
    lengths,
    o,
    partial,
    arrived,
    more,
    capacity,
    heads,
    group,
    dk,
    dv,
    q_row,
    q_head,
    q_channel,
    k_row,
    k_place,
    k_head,
    k_channel,
    v_row,
    v_place,
    v_head,
    v_channel,
    o_row,
    scale,
    gate,
    gate_row,
    PLACES: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    DV: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs (rows, key heads x blocks of the heads that share one, parts of the past).

    A row holds `lengths[row] + more` places, `capacity` at most. `partial` (rows, heads, parts, dv + 2) and
    `arrived` (rows, programs of a row's part) int32, zeros before and after, are scratch. The sigmoid of
    gate (rows, heads dv), where there is one, weighs the output.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    blocks = tl.cdiv(group, HEADS)
    kind = tl.program_id(1) // blocks
    part = tl.program_id(2)
    parts = tl.num_programs(2)
    length = tl.minimum(tl.load(lengths + row) + more, capacity)
    each = tl.maximum(tl.cdiv(tl.cdiv(length, parts), PLACES), 1) * PLACES
    active = tl.maximum(tl.cdiv(length, each), 1)
    if part >= active:
        return
    mine = (tl.program_id(1) % blocks) * HEADS + tl.arange(0, HEADS)
    asked = mine < group
    head = tl.cast(kind * group + mine, tl.int64)
    cv = tl.arange(0, DV)
    wide = cv < dv
    queries = q + row * q_row + head * q_head
    keys = k + row * k_row + kind * k_head
    values = v + row * v_row + kind * v_head + tl.cast(cv, tl.int64) * v_channel
    top = tl.full((HEADS,), -float("inf"), tl.float32)
    weight = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, DV), tl.float32)
    for start in tl.range(part * each, tl.minimum((part + 1) * each, length), PLACES, num_stages=STAGES):
        place = tl.cast(start, tl.int64) + tl.arange(0, PLACES)
        held = place < length
        score = tl.zeros((HEADS, PLACES), tl.float32)
        for i in tl.static_range(PARTS):
            c = i * PART + tl.arange(0, PART)
            real = c < dk
            c = tl.cast(c, tl.int64)
            query = tl.load(
                queries[:, None] + c[None, :] * q_channel, mask=asked[:, None] & real[None, :], other=0.0
            )
            key = tl.load(
                keys + place[:, None] * k_place + c[None, :] * k_channel,
                mask=held[:, None] & real[None, :],
                other=0.0,
            )
            if HEADS < 16:
                query, key = query.to(tl.float32), key.to(tl.float32)
                score += tl.sum(query[:, None, :] * key[None, :, :], 2)
            else:
                score = tl.dot(query.to(key.dtype), tl.trans(key), score, input_precision=PRECISION)
        score = tl.where(held[None, :], score * (scale * LOG2E), -float("inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        share = tl.exp2(score - higher[:, None])
        kept = tl.exp2(top - higher)
        value = tl.load(
            values[None, :] + place[:, None] * v_place, mask=held[:, None] & wide[None, :], other=0.0
        )
        if HEADS < 16:
            added = tl.sum(share[:, :, None] * value.to(tl.float32)[None, :, :], 1)
        else:
            added = tl.dot(share.to(value.dtype), value, input_precision=PRECISION)
        mixed = mixed * kept[:, None] + added
        weight = weight * kept + tl.sum(share, 1)
        top = higher
    both = asked[:, None] & wide[None, :]
    target = o + row * o_row + head[:, None] * dv + cv[None, :]
    if active == 1:
        answer = mixed / tl.maximum(weight, 1e-30)[:, None]
        answer = gated(answer, gate, row * gate_row, head, cv, dv, both)
        tl.store(target, answer.to(o.dtype.element_ty), mask=both)
    else:
        scratch = partial + (row * heads + head) * parts * (dv + 2)
        own = scratch + part * (dv + 2)
        tl.store(own, top, mask=asked)
        tl.store(own + 1, weight, mask=asked)
        tl.store(own[:, None] + 2 + cv[None, :], mixed, mask=both)
        tl.debug_barrier()  # all threads' parts are written before one of them says so
        counter = arrived + row * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(counter, 1, sem="acq_rel") == active - 1:
            tl.debug_barrier()
            best = tl.full((HEADS,), -float("inf"), tl.float32)
            whole = tl.zeros((HEADS,), tl.float32)
            sums = tl.zeros((HEADS, DV), tl.float32)
            for other in range(0, active):
                theirs = scratch + other * (dv + 2)
                peak = tl.load(theirs, mask=asked, other=0.0, cache_modifier=".cg")
                shares = tl.load(theirs + 1, mask=asked, other=0.0, cache_modifier=".cg")
                mixes = tl.load(theirs[:, None] + 2 + cv[None, :], mask=both, other=0.0, cache_modifier=".cg")
                above = tl.maximum(best, peak)
                old = tl.exp2(best - above)
                new = tl.exp2(peak - above)
                sums = sums * old[:, None] + mixes * new[:, None]
                whole = whole * old + shares * new
                best = above
            answer = gated(sums / whole[:, None], gate, row * gate_row, head, cv, dv, both)
            tl.store(target, answer.to(o.dtype.element_ty), mask=both)
            tl.store(counter, 0)


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
