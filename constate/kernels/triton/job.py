"""What one program does to a slice of a row's vector between two products of a decode step, as device code.

A `Job` says at compile time which of these a slice goes through, in this order: scales, a divisor, a short
convolution with its history, bias and activation, a first gate, a residual sum, a norm, rotation, a scale and
a floor, RWKV-7's bonus, a second gate; then it is stored, if need be several times. `jobs` is the kernel that
does several side by side; a scan's kernel ends in `leave`, where the last program of a slice to arrive does
what is left to do with it. Knows vectors; knows no mixer, and nothing of who writes jobs (tape/drafts.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .described import at, count, of, power, start
from .maths import activated, sigmoid, silu, softplus


@triton.jit
def convolved(x, P, JOBS: tl.constexpr, J: tl.constexpr, row, c, inside):
    """x at the end of its history, which moves on by one place; weights (channels, taps)."""
    TAPS: tl.constexpr = of(JOBS, J, "taps")
    TAP: tl.constexpr = of(JOBS, J, "history_tap")
    taps = P[at("taps")] + c * TAPS
    total = x * tl.load(taps + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    if P[at("conv_bias")] is not None:
        total += tl.load(P[at("conv_bias")] + c, mask=inside, other=0.0).to(tl.float32)
    if TAPS > 1:
        history = P[at("history")] + row * of(JOBS, J, "history_row") + c
        for tap in tl.static_range(TAPS - 1):  # pyright: ignore[reportGeneralTypeIssues]  # the compiler's own loop
            past = tl.load(history + tap * TAP, mask=inside, other=0.0)
            total += tl.load(taps + tap, mask=inside, other=0.0).to(tl.float32) * past.to(tl.float32)
        tl.debug_barrier()  # slices narrower than a program are held by several threads: all have read
        for tap in tl.static_range(1, TAPS - 1):  # pyright: ignore[reportGeneralTypeIssues]  # as above
            past = tl.load(history + tap * TAP, mask=inside, other=0.0)
            tl.store(history + (tap - 1) * TAP, past, mask=inside)
        tl.store(history + (TAPS - 2) * TAP, x.to(P[at("history")].dtype.element_ty), mask=inside)
    if of(JOBS, J, "conv_silu"):
        total = silu(total)
    return total


@triton.jit
def job(P, JOBS: tl.constexpr, J: tl.constexpr, row, unit, past):
    """Job J of JOBS on slice `unit` of a row; `row` int64, `past` (rows,) the rows' lengths."""
    OUT: tl.constexpr = of(JOBS, J, "out")
    WHOLE: tl.constexpr = OUT + of(JOBS, J, "ones")
    KIND: tl.constexpr = of(JOBS, J, "kind")
    NORM: tl.constexpr = of(JOBS, J, "norm")
    TURNED: tl.constexpr = of(JOBS, J, "turned")
    COPIES: tl.constexpr = of(JOBS, J, "copies")
    FROM: tl.constexpr = of(JOBS, J, "cache")
    i = tl.arange(0, of(JOBS, J, "block"))
    c = unit * OUT + i
    inside = (i < OUT) & (c < of(JOBS, J, "width"))
    source = P[at("x")] + row * of(JOBS, J, "x_stride") + unit * of(JOBS, J, "x_step")
    second = tl.zeros((of(JOBS, J, "block"),), tl.float32)
    if KIND == "taylor":
        one = tl.load(P[at("bias")] + i, mask=inside, other=-1)
        other = tl.load(P[at("rate")] + i, mask=inside, other=-1)
        x = tl.load(P[at("scales")] + i, mask=inside, other=0.0)
        x *= tl.load(source + one, mask=one >= 0, other=1.0).to(tl.float32)
        x *= tl.load(source + other, mask=other >= 0, other=1.0).to(tl.float32)
    else:
        x = tl.load(source + i, mask=inside, other=0.0, cache_modifier=FROM).to(tl.float32)
        if P[at("scales")] is not None:
            x *= tl.load(P[at("scales")] + c, mask=inside, other=0.0).to(tl.float32)
    if of(JOBS, J, "divide") is not None:
        x = x / (tl.load(source + OUT, cache_modifier=FROM).to(tl.float32) + of(JOBS, J, "divide"))
    if of(JOBS, J, "taps") > 0:
        x = convolved(x, P, JOBS, J, row, c, inside)

    if KIND == "decays" or KIND == "bounded":
        x += tl.load(P[at("bias")] + c, mask=inside, other=0.0)
        rate = tl.load(P[at("rate")] + c, mask=inside, other=0.0)
        if KIND == "bounded":
            second = of(JOBS, J, "bound") * sigmoid(rate * x)
        else:
            x = tl.minimum(tl.maximum(softplus(x), of(JOBS, J, "least")), of(JOBS, J, "most"))
            second = -rate * x
    elif KIND == "forget":  # log(b + (1 - b) sigmoid(x)), and 1 less the gate
        second = sigmoid(-x)
        decay = -softplus(-x)
        if P[at("bias")] is not None:
            bound = tl.load(P[at("bias")] + c, mask=inside, other=0.0)
            second *= 1.0 - bound
            log_bound = tl.load(P[at("rate")] + c, mask=inside, other=0.0)
            decay = tl.minimum(softplus(log_bound - x) + decay, 0.0)
        x = decay
    elif KIND != "taylor":
        x = activated(x, KIND)

    if P[at("first")] is not None:
        gate = tl.load(P[at("first")] + row * of(JOBS, J, "first_stride") + c, mask=inside, other=0.0)
        x *= activated(gate.to(tl.float32), of(JOBS, J, "first"))
    if P[at("kept")] is not None:
        kept = tl.load(P[at("kept")] + row * of(JOBS, J, "kept_stride") + c, mask=inside, other=0.0)
        x = of(JOBS, J, "keep") * kept + of(JOBS, J, "said") * x
    if P[at("sum")] is not None:
        if NORM != "" and P[at("kept")] is not None:
            tl.debug_barrier()  # sum may be kept: see convolved; what is summed up below is then all threads'
        tl.store(P[at("sum")] + row * of(JOBS, J, "sum_stride") + c, x, mask=inside)

    by = 1.0
    p = i if of(JOBS, J, "shared") else c
    if NORM == "centred":
        x = tl.where(inside, x - tl.sum(x, 0) / OUT, 0.0)
    if NORM == "rms" or NORM == "centred":
        by = 1.0 / tl.sqrt(tl.sum(tl.where(inside, x * x, 0.0), 0) / OUT + of(JOBS, J, "eps"))
    elif NORM == "length":
        by = 1.0 / tl.sqrt(tl.sum(tl.where(inside, x * x, 0.0), 0) + of(JOBS, J, "eps"))
    elif NORM == "sum":
        by = 1.0 / (tl.sum(tl.where(inside, x, 0.0), 0) + of(JOBS, J, "eps"))
    elif NORM == "absolute":
        by = 1.0 / tl.maximum(tl.sum(tl.where(inside, tl.abs(x), 0.0), 0), of(JOBS, J, "eps"))
    if NORM != "":
        x *= by
    if P[at("weight")] is not None:
        x *= tl.load(P[at("weight")] + p, mask=inside, other=0.0).to(tl.float32)
    if P[at("norm_bias")] is not None:
        x += tl.load(P[at("norm_bias")] + p, mask=inside, other=0.0).to(tl.float32)

    if TURNED > 0:  # halves against each other: the partner is read again, and goes the same way
        HALF: tl.constexpr = TURNED // 2
        partner = tl.where(i < HALF, i + HALF, i - HALF)
        moves = i < TURNED
        beside = tl.load(source + partner, mask=moves, other=0.0).to(tl.float32) * by
        if P[at("weight")] is not None:
            beside *= tl.load(P[at("weight")] + partner, mask=moves, other=0.0).to(tl.float32)
        turn = P[at("turns")] + row * TURNED + tl.where(i < HALF, i, partner)
        cosine = tl.load(turn, mask=moves, other=1.0)
        sine = tl.load(turn + HALF, mask=moves, other=0.0)
        x = x * cosine + tl.where(i < HALF, -sine, sine) * beside
        tl.debug_barrier()  # o may be x: nobody writes before all have read

    if of(JOBS, J, "scale") != 1.0:
        x *= of(JOBS, J, "scale")
    if of(JOBS, J, "low") > -3e38:
        x = tl.maximum(x, of(JOBS, J, "low"))
    if P[at("bonus")] is not None:
        KEYS: tl.constexpr = of(JOBS, J, "bonus")
        k = tl.arange(0, power(KEYS))
        place = row * of(JOBS, J, "key_stride") + unit * KEYS + k
        said = tl.load(P[at("reads")] + place, mask=k < KEYS, other=0.0)
        said *= tl.load(P[at("key")] + place, mask=k < KEYS, other=0.0)
        said *= tl.load(P[at("bonus")] + unit * KEYS + k, mask=k < KEYS, other=0.0)
        value = row * of(JOBS, J, "value_stride") + c
        x += tl.sum(said, 0) * tl.load(P[at("value")] + value, mask=inside, other=0.0)
    if P[at("by")] is not None:
        gate = tl.load(P[at("by")] + row * of(JOBS, J, "by_stride") + c, mask=inside, other=0.0)
        x *= activated(gate.to(tl.float32), of(JOBS, J, "by"))

    if of(JOBS, J, "ones") > 0:
        x = tl.where(i < OUT, x, 1.0)
        inside = i < WHOLE
    if P[at("o")] is not None:
        if P[at("slots")] is not None:
            slots = P[at("slots")]
            place = row * slots[1] + (tl.load(past + row) % slots[0]) * slots[2]
        else:
            place = row * of(JOBS, J, "o_stride")
        place += unit * of(JOBS, J, "o_step")
        for copy in tl.static_range(COPIES):  # pyright: ignore[reportGeneralTypeIssues]  # the compiler's own loop
            tl.store(P[at("o")] + place + copy * WHOLE + i, x.to(P[at("o")].dtype.element_ty), mask=inside)
    if P[at("second")] is not None:
        place = row * of(JOBS, J, "second_stride") + unit * of(JOBS, J, "o_step")
        for copy in tl.static_range(COPIES):  # pyright: ignore[reportGeneralTypeIssues]  # the compiler's own loop
            tl.store(P[at("second")] + place + copy * WHOLE + i, second, mask=inside)
    if P[at("narrow")] is not None:
        place = row * of(JOBS, J, "narrow_stride") + unit * OUT + i
        tl.store(P[at("narrow")] + place, x.to(P[at("narrow")].dtype.element_ty), mask=inside)


@triton.jit
def jobs(P, past, JOBS: tl.constexpr):
    """Programs (slices of all jobs, rows)."""
    number = tl.program_id(0)
    row = tl.cast(tl.program_id(1), tl.int64)
    for j in tl.static_range(count(JOBS)):  # pyright: ignore[reportGeneralTypeIssues]  # the compiler's own loop
        if (number >= start(JOBS, j)) & (number < start(JOBS, j + 1)):
            job(P[j], JOBS, j, row, number - start(JOBS, j), past)


@triton.jit
def leave(P, JOBS: tl.constexpr, row, head, PROGRAMS: tl.constexpr):
    """The end of a scan's step: what is done to a head's output, or to that of several heads, by the last of
    its programs (PROGRAMS a head) to arrive. Results must be stored before."""
    tl.debug_barrier()
    ALL: tl.constexpr = PROGRAMS * of(JOBS, 0, "heads")
    unit = head // of(JOBS, 0, "heads")
    if ALL == 1:
        job(P, JOBS, 0, row, unit, None)
    else:
        arrivals = P[at("arrivals")] + row * start(JOBS, 1) + unit
        before = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
        if before == ALL - 1:
            tl.store(arrivals, 0)  # for the next step
            job(P, JOBS, 0, row, unit, None)
