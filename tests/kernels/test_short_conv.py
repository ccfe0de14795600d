"""The short convolution against a float64 loop: short pieces, mixed dtypes (case B4), packings, gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from constate.kernels import reference
from constate.kernels.chunked import short_conv as chunked
from constate.spans import Spans
from tests.kernels import hostile

C = 3
OPS = {"chunked": chunked, "reference": reference}


def loop(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    spans: Spans,
    act: str | None = "silu",
) -> tuple[Tensor, Tensor]:
    """The direct sum in float64."""
    w = weight.shape[1]
    outputs, finals, t = [], [], 0
    for row, length in enumerate(spans.lengths):
        seen = [torch.zeros(C).double()] * (w - 1) if initial is None else list(initial[row].double())
        for _ in range(length):
            seen.append(x[t].double())
            o = torch.zeros(C).double() if bias is None else bias.double()
            for j in range(w):
                o = o + weight[:, j].double() * seen[len(seen) - w + j]
            outputs.append(o / (1 + (-o).exp()) if act == "silu" else o)
            t += 1
        finals.append(torch.stack(seen[len(seen) - w + 1 :]) if w > 1 else torch.zeros(0, C).double())
    return torch.stack(outputs) if outputs else torch.zeros(0, C).double(), torch.stack(finals)


def inputs(spans: Spans, w: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        hostile.normal(spans.total, C, seed=1),
        hostile.normal(C, w, seed=2),
        hostile.normal(C, seed=3),
        hostile.normal(spans.rows, w - 1, C, seed=4),
    )


@pytest.mark.parametrize("history", ["none", "zeros", "random"])
@pytest.mark.parametrize("w", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("op", OPS)
def test_every_short_length(op, w, history):
    """Pieces of 1 .. w + 1 tokens: where shorter than the history, the old one shifts in."""
    for length in range(1, w + 2):
        spans = Spans.of([length])
        x, weight, bias, initial = inputs(spans, w)
        start = {"none": None, "zeros": torch.zeros_like(initial), "random": initial}[history]
        for act in ("silu", None):
            o, final = OPS[op].short_conv(x, weight, bias, start, spans, activation=act)
            want, last = loop(x, weight, bias, start, spans, act)
            hostile.assert_output(o, want)
            assert torch.equal(final.double(), last)


@pytest.mark.parametrize("w", [1, 2, 4])
@pytest.mark.parametrize("lengths", [*hostile.PACKS, (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("op", OPS)
def test_packed(op, lengths, w):
    spans = Spans.of(lengths)
    x, weight, bias, initial = inputs(spans, w)
    for start in (initial, None):
        for b in (bias, None):
            o, final = OPS[op].short_conv(x, weight, b, start, spans)
            want, last = loop(x, weight, b, start, spans)
            hostile.assert_output(o, want)
            assert torch.equal(final.double(), last)


@pytest.mark.parametrize("lengths", [(6,), (2,), (5, 1, 0, 3)])
@pytest.mark.parametrize("op", OPS)
def test_history_of_another_dtype(op, lengths):
    """A float32 history beside bfloat16 activations, or the other way round, is not refused or rounded."""
    spans = Spans.of(lengths)
    x, weight, bias, initial = inputs(spans, 4)
    for dtype, kept in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        now, start = x.to(dtype), initial.to(kept)
        o, final = OPS[op].short_conv(now, weight, bias, start, spans)
        want, last = loop(now, weight, bias, start, spans)
        assert o.dtype == dtype and final.dtype == kept
        assert torch.equal(final, last.to(kept))
        allowed = max(torch.finfo(dtype).eps, 1e-6) * float(want.abs().max())
        assert float((o.double() - want).abs().max()) <= allowed
    _, final = OPS[op].short_conv(x.bfloat16(), weight, bias, None, spans)
    assert final.dtype == torch.bfloat16


@pytest.mark.parametrize("w", [1, 2, 4])
@pytest.mark.parametrize("op", OPS)
def test_steps_equal_the_sum(op, w):
    rows, steps = 3, 7
    spans = Spans.of([steps] * rows)
    x, weight, bias, initial = inputs(spans, w)
    want, last = loop(x, weight, bias, initial, spans)
    pool = torch.zeros(2 * rows, w - 1, C)
    history = pool[1::2]
    history.copy_(initial)
    for t in range(steps):
        o = OPS[op].short_conv_step(x[t::steps], weight, bias, history)
        hostile.assert_output(o, want[t::steps])
    assert torch.equal(history.double(), last)
    assert not pool[::2].any()


def weighted(o: Tensor, final: Tensor) -> Tensor:
    return (o.double() * hostile.normal(*o.shape, seed=77)).sum() + (
        final.double() * hostile.normal(*final.shape, seed=78)
    ).sum()


@pytest.mark.parametrize("lengths", [(9,), (4, 4), (3, 0, 1, 7)])
@pytest.mark.parametrize("w", [1, 2, 4])
def test_gradients_against_the_loop(lengths, w):
    spans = Spans.of(lengths)
    mine = [t.clone().requires_grad_() for t in inputs(spans, w)]
    theirs = [t.clone().requires_grad_() for t in inputs(spans, w)]
    weighted(*chunked.short_conv(*mine, spans=spans)).backward()
    weighted(*loop(*theirs, spans=spans)).backward()
    for name, a, b in zip(("x", "weight", "bias", "initial"), mine, theirs, strict=True):
        if not a.numel():
            continue  # a width of 1 has no history
        assert a.grad is not None and b.grad is not None
        hostile.assert_gradient(a.grad, b.grad, f"gradient of {name}")


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (3, 4, 8)])
def test_pieces_equal_the_whole(cuts):
    n, w = 12, 4
    values = inputs(Spans.of([n]), w)
    whole, parts = ([t.clone().requires_grad_() for t in values] for _ in range(2))
    o, final = chunked.short_conv(*whole, spans=Spans.of([n]))
    weighted(o, final).backward()
    x, weight, bias, state = parts
    outputs, edges = [], (0, 0, *cuts, n)
    for a, b in pairwise(edges):
        piece, state = chunked.short_conv(x[a:b], weight, bias, state, Spans.of([b - a]))
        outputs.append(piece)
    weighted(torch.cat(outputs), state).backward()
    hostile.assert_output(torch.cat(outputs), o)
    assert torch.equal(state, final)
    for name, a, b in zip(("x", "weight", "bias", "initial"), parts, whole, strict=True):
        assert a.grad is not None and b.grad is not None
        hostile.assert_gradient(a.grad, b.grad, f"gradient of {name}")


@pytest.mark.parametrize("lengths", [(5, 6, 2), (4, 4, 4), (1, 1, 1)])
def test_neighbours_change_nothing(lengths):
    spans = Spans.of(lengths)
    x, weight, bias, initial = inputs(spans, 4)
    own = spans.slices()[1]
    other, start = hostile.normal(*x.shape, seed=50), hostile.normal(*initial.shape, seed=51)
    other[own], start[1] = x[own], initial[1]
    o, final = chunked.short_conv(x, weight, bias, initial, spans)
    p, last = chunked.short_conv(other, weight, bias, start, spans)
    assert torch.equal(o[own], p[own]) and torch.equal(final[1], last[1])


def test_the_history_it_returns_is_its_own():
    """final holds w - 1 inputs, not a view that keeps the whole sequence alive."""
    x, weight, bias, initial = inputs(Spans.of([100]), 4)
    _, final = chunked.short_conv(x, weight, bias, initial, Spans.of([100]))
    assert final.untyped_storage().nbytes() == 3 * C * 4


@pytest.mark.parametrize("op", OPS)
def test_bad_input_is_refused(op):
    spans = Spans.of([5])
    x, weight, bias, initial = inputs(spans, 4)
    conv = OPS[op].short_conv
    with pytest.raises(ValueError, match="activation"):
        conv(x, weight, bias, initial, spans, activation="gelu")
    with pytest.raises(ValueError, match="squeeze its middle axis"):
        conv(x, weight[:, None], bias, initial, spans)
    with pytest.raises(ValueError, match=r"initial is \(1, 4, 3\); \(1, 3, 3\) is wanted"):
        conv(x, weight, bias, torch.zeros(1, 4, C), spans)
    with pytest.raises(ValueError, match="spans hold 6 tokens"):
        conv(x, weight, bias, initial, Spans.of([6]))
    with pytest.raises(ValueError, match="bias"):
        conv(x, weight, bias[:2], initial, spans)
