"""Attention's decode step as one Triton kernel: a query a row over everything that its buffers hold.

A row's places are split over programs, so that a long past fills the card; each leaves a softmax of its own
part, and the last of a row to come weighs them together. How far each row has come is read on the device,
so that a captured step stays right as the past grows. Heads that share a key head are one program's, and
where they are many its products run on tensor cores. Knows strides; how many parts is attention.py's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .maths import sigmoid

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
