"""Attention and its step against a float64 softmax written out: windows, contexts, head groups, masks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from constate.kernels import reference
from constate.kernels.chunked import attention as chunked
from constate.spans import Spans
from tests.kernels import hostile

DK, DV = 8, 5
OPS = {"chunked": chunked, "reference": reference}
HEADS = ((6, 2), (4, 4), (3, 1))  # (query heads, key heads)


def inputs(spans: Spans, context: Spans, h: int, hk: int) -> tuple[Tensor, Tensor, Tensor]:
    n, m = spans.total, context.total
    return (
        hostile.normal(n, h, DK, seed=1, scale=3.0),
        hostile.normal(m, hk, DK, seed=2),
        hostile.normal(m, hk, DV, seed=3),
    )


def loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans,
    context: Spans,
    window: int | None = None,
    scale: float = DK**-0.5,
    causal: bool = True,
    block: int = 1,
) -> Tensor:
    """One query at a time in float64, key heads repeated for their group one by one."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    outputs, begin, t = [], 0, 0
    for new, held in zip(spans.lengths, context.lengths, strict=True):
        for i in range(new):
            place = held - new + i
            seen = [
                m
                for m in range(held)
                if not causal or (m // block <= place // block and (window is None or m > place - window))
            ]
            heads = []
            for head in range(q.shape[1]):
                scores = torch.stack([scale * q[t, head] @ k[begin + m, head // group] for m in seen])
                weights = (scores - scores.max()).exp()
                heads.append(weights @ v[begin + torch.tensor(seen), head // group] / weights.sum())
            outputs.append(torch.stack(heads))
            t += 1
        begin += held
    return torch.stack(outputs) if outputs else torch.zeros(0, q.shape[1], v.shape[2]).double()


CASES = (
    # new tokens a row, context a row
    ((7,), (7,)),
    ((3,), (9,)),
    ((1,), (6,)),
    ((4, 4), (4, 4)),
    ((2, 2, 2), (5, 5, 5)),
    ((3, 0, 1, 5), (3, 4, 8, 9)),
    ((0, 0), (0, 3)),
    ((6, 1), (6, 1)),
)


@pytest.mark.parametrize("window", [None, 1, 2, 4, 100])
@pytest.mark.parametrize(("new", "held"), CASES)
@pytest.mark.parametrize("op", OPS)
def test_causal(op, new, held, window):
    spans, context = Spans.of(new), Spans.of(held)
    q, k, v = inputs(spans, context, 4, 2)
    o = OPS[op].attention(q, k, v, spans, context, window=window)
    hostile.assert_output(o, loop(q, k, v, spans, context, window))


@pytest.mark.parametrize(("new", "held"), CASES)
@pytest.mark.parametrize("op", OPS)
def test_bidirectional(op, new, held):
    spans, context = Spans.of(new), Spans.of(held)
    q, k, v = inputs(spans, context, 4, 2)
    o = OPS[op].attention(q, k, v, spans, context, causal=False, scale=0.7)
    hostile.assert_output(o, loop(q, k, v, spans, context, causal=False, scale=0.7))


@pytest.mark.parametrize("block", [2, 3, 100])
@pytest.mark.parametrize(("new", "held"), [*CASES, ((8,), (11,))])
@pytest.mark.parametrize("op", OPS)
def test_block_causal(op, new, held, block):
    """A query sees the rest of its block too, blocks being counted from the context's start."""
    spans, context = Spans.of(new), Spans.of(held)
    q, k, v = inputs(spans, context, 4, 2)
    o = OPS[op].attention(q, k, v, spans, context, block=block)
    hostile.assert_output(o, loop(q, k, v, spans, context, block=block))


@pytest.mark.parametrize("block", [2, 5])
@pytest.mark.parametrize(("new", "held"), [((13,), (13,)), ((5, 5), (8, 8)), ((9, 2), (9, 7))])
@pytest.mark.parametrize(("size", "mask"), [(4, 1 << 22), (256, 30)])
def test_block_causal_in_blocks_of_queries(new, held, block, size, mask, monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK", size)
    monkeypatch.setattr(chunked, "MASK", mask)
    spans, context = Spans.of(new), Spans.of(held)
    q, k, v = inputs(spans, context, 2, 1)
    o = chunked.attention(q, k, v, spans, context, block=block)
    hostile.assert_output(o, loop(q, k, v, spans, context, block=block))


@pytest.mark.parametrize("sight", [{"block": 0}, {"block": 2, "causal": False}, {"block": 2, "window": 3}])
@pytest.mark.parametrize("op", OPS)
def test_blocks_that_make_no_sense_are_refused(op, sight):
    spans = Spans.of([4])
    with pytest.raises(ValueError, match="block is"):
        OPS[op].attention(*inputs(spans, spans, 2, 1), spans, spans, **sight)


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 9])
@pytest.mark.parametrize(("new", "held"), [((11,), (11,)), ((9,), (14,)), ((5, 5), (8, 8)), ((9, 2), (9, 7))])
@pytest.mark.parametrize(("block", "mask"), [(4, 1 << 22), (256, 30), (256, 1)])
def test_blocks_of_queries(new, held, window, block, mask, monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK", block)
    monkeypatch.setattr(chunked, "MASK", mask)
    spans, context = Spans.of(new), Spans.of(held)
    q, k, v = inputs(spans, context, 2, 1)
    o = chunked.attention(q, k, v, spans, context, window=window)
    hostile.assert_output(o, loop(q, k, v, spans, context, window))


@pytest.mark.parametrize(("h", "hk"), HEADS)
@pytest.mark.parametrize("op", OPS)
def test_head_groups(op, h, hk):
    spans, context = Spans.of([5, 2]), Spans.of([6, 7])
    q, k, v = inputs(spans, context, h, hk)
    o = OPS[op].attention(q, k, v, spans, context)
    spread = OPS[op].attention(
        q, k.repeat_interleave(h // hk, 1), v.repeat_interleave(h // hk, 1), spans, context
    )
    hostile.assert_output(o, spread)
    hostile.assert_output(o, loop(q, k, v, spans, context))


@pytest.mark.parametrize(("h", "hk"), [(3, 2), (33, 2)])
@pytest.mark.parametrize("op", OPS)
def test_heads_that_do_not_divide_are_refused(op, h, hk):
    spans = Spans.of([2])
    q, k, v = inputs(spans, spans, h, hk)
    with pytest.raises(ValueError, match=f"{h} query heads cannot share {hk} key heads"):
        OPS[op].attention(q, k, v, spans, spans)
    with pytest.raises(ValueError, match=f"{h} query heads cannot share {hk} key heads"):
        OPS[op].attention_step(q[:1], k[None], v[None], torch.tensor([2]), 2)


@pytest.mark.parametrize("sight", [{}, {"window": 3}, {"causal": False}, {"block": 3}])
@pytest.mark.parametrize(("new", "held"), [((7,), (7,)), ((3,), (9,)), ((4, 4), (6, 6)), ((3, 1), (5, 4))])
def test_gradients_against_the_loop(new, held, sight):
    spans, context = Spans.of(new), Spans.of(held)
    mine = [x.clone().requires_grad_() for x in inputs(spans, context, 4, 2)]
    theirs = [x.clone().requires_grad_() for x in inputs(spans, context, 4, 2)]
    o = chunked.attention(*mine, spans=spans, context=context, **sight)
    weights = hostile.normal(*o.shape, seed=70)
    (o * weights).sum().backward()
    (loop(*theirs, spans=spans, context=context, **sight) * weights).sum().backward()
    for name, a, b in zip("qkv", mine, theirs, strict=True):
        assert a.grad is not None and b.grad is not None
        hostile.assert_gradient(a.grad, b.grad, f"gradient of {name}")


@pytest.mark.parametrize("window", [None, 4])
def test_pieces_equal_the_whole(window):
    whole = Spans.of([13])
    q, k, v = inputs(whole, whole, 4, 2)
    want = chunked.attention(q, k, v, whole, whole, window=window)
    edges = (0, 1, 5, 5, 8, 13)
    pieces = [
        chunked.attention(q[a:b], k[:b], v[:b], Spans.of([b - a]), Spans.of([b]), window=window)
        for a, b in pairwise(edges)
    ]
    hostile.assert_output(torch.cat(pieces), want)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [(4, 6, 3), (5, 5, 5), (1, 1, 1)])
def test_neighbours_change_nothing(lengths, window):
    spans = Spans.of(lengths)
    q, k, v = inputs(spans, spans, 4, 2)
    own = spans.slices()[1]
    others = [hostile.normal(*x.shape, seed=90) for x in (q, k, v)]
    for theirs, mine in zip(others, (q, k, v), strict=True):
        theirs[own] = mine[own]
    o = chunked.attention(q, k, v, spans, spans, window=window)
    p = chunked.attention(*others, spans=spans, context=spans, window=window)
    assert torch.equal(o[own], p[own])


@pytest.mark.parametrize("lengths", [(5,), (4, 4), (1, 7, 3)])
@pytest.mark.parametrize("op", OPS)
def test_step(op, lengths):
    """Beside rows of other lengths, with NaN where no token has been written yet past the longest."""
    rows, longest = len(lengths), max(lengths)
    q = hostile.normal(rows, 6, DK, seed=1)
    k, v = hostile.normal(rows, 9, 2, DK, seed=2), hostile.normal(rows, 9, 2, DV, seed=3)
    want = torch.cat(
        [loop(q[r : r + 1], k[r, :m], v[r, :m], Spans.of([1]), Spans.of([m])) for r, m in enumerate(lengths)]
    )
    k[:, longest:], v[:, longest:] = torch.nan, torch.nan
    o = OPS[op].attention_step(q, k, v, torch.tensor(lengths), longest)
    hostile.assert_output(o, want)


def test_bfloat16_keeps_its_dtype():
    spans = Spans.of([6, 3])
    q, k, v = (x.bfloat16() for x in inputs(spans, spans, 4, 2))
    o = chunked.attention(q, k, v, spans, spans)
    want = loop(q, k, v, spans, spans)
    assert o.dtype == torch.bfloat16
    assert float((o.double() - want).abs().max()) < 2**-6 * float(want.abs().max())


def test_a_window_costs_linear_work():
    """Counted by PyTorch: twice the tokens, twice the FLOPs, not four times."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    def flops(n: int) -> int:
        spans = Spans.of([n])
        q, k, v = inputs(spans, spans, 2, 1)
        seen = sdpa_kernel(SDPBackend.MATH)  # the fused kernel's are not counted
        with FlopCounterMode(display=False) as counter, torch.no_grad(), seen:
            chunked.attention(q, k, v, spans, spans, window=64)
        return counter.get_total_flops()

    assert flops(1024) > 0 and flops(2048) / flops(1024) < 2.3


@pytest.mark.parametrize("op", OPS)
def test_bad_input_is_refused(op):
    spans = Spans.of([3])
    q, k, v = inputs(spans, spans, 2, 1)
    with pytest.raises(ValueError, match="a context counts new tokens too"):
        OPS[op].attention(q, k[:2], v[:2], spans, Spans.of([2]))
    with pytest.raises(ValueError, match="1 rows of queries, but 2"):
        OPS[op].attention(q, k, v, spans, Spans.of([3, 0]))
    with pytest.raises(ValueError, match="window"):
        OPS[op].attention(q, k, v, spans, spans, window=0)
    with pytest.raises(ValueError, match="window"):
        OPS[op].attention(q, k, v, spans, spans, window=2, causal=False)
    with pytest.raises(ValueError, match="dk or hk differ"):
        OPS[op].attention(q[..., :4], k, v, spans, spans)
    with pytest.raises(ValueError, match="longest is 9"):
        OPS[op].attention_step(q[:1], k[None], v[None], torch.tensor([3]), 9)
