"""The elementwise linear recurrence against a float64 loop, on hostile decays, lengths and packings.

The loop is h_t = a_t h_{t-1} + x_t as the paper writes it, and its gradients are autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.kernels import reference
from constate.kernels.chunked import linear_recurrence, segments
from constate.kernels.chunked.linear_recurrence import linear_recurrence_scan, linear_recurrence_step
from constate.spans import Spans
from tests.kernels import hostile
from tests.kernels.memory import peak_bytes

OPS = {"chunked": linear_recurrence, "reference": reference}
CHANNELS = (5, 130)
Run = Callable[[Tensor, Tensor, Tensor, Spans], tuple[Tensor, Tensor]]


def draw(lengths: Sequence[int], channels: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Spans]:
    spans = Spans.of(lengths)
    x = hostile.normal(spans.total, channels, seed=seed)
    log_a = hostile.log_decays(spans.total, channels, seed=seed + 1)
    return x, log_a, hostile.normal(spans.rows, channels, seed=seed + 2), spans


def loop(x: Tensor, log_a: Tensor, initial: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
    """The equation in float64, token by token."""
    outputs, finals = [], []
    for row, part in enumerate(spans.slices()):
        h = initial[row].double()
        for t in range(part.start, part.stop):
            h = log_a[t].double().exp() * h + x[t].double()
            outputs.append(h)
        finals.append(h)
    return torch.stack(outputs) if outputs else x.double(), torch.stack(finals)


def scan(
    x: Tensor, log_a: Tensor, initial: Tensor | None, spans: Spans, module: Any = linear_recurrence
) -> tuple[Tensor, Tensor]:
    return module.linear_recurrence_scan(x, log_a, initial, spans, checked=True)


def check(x: Tensor, log_a: Tensor, initial: Tensor, spans: Spans, run: Run = scan) -> None:
    (o, final), (want, last) = run(x, log_a, initial, spans), loop(x, log_a, initial, spans)
    hostile.assert_output(o, want)
    hostile.assert_state(final, last)
    assert final.dtype == torch.float32


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("length", sorted({*hostile.LENGTHS, 2, 31, 32, 33}))
def test_one_row(length: int, channels: int) -> None:
    check(*draw([length], channels))


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("lengths", [*hostile.PACKS, (40, 40, 40)])
def test_packed(lengths: tuple[int, ...], channels: int) -> None:
    check(*draw(lengths, channels))


@pytest.mark.parametrize("lengths", hostile.PACKS)
def test_the_reference_is_the_same_op(lengths: tuple[int, ...]) -> None:
    check(*draw(lengths), run=lambda x, a, s, spans: scan(x, a, s, spans, reference))


@pytest.mark.parametrize("lengths", [(200,), (70, 70), (130, 0, 1, 65)])
def test_segments_of_one_level(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide steps are walked from the true state, one tile a row."""
    monkeypatch.setattr(segments, "BUDGET", 1)
    check(*draw(lengths))


@pytest.mark.parametrize("fault", ["a decay of the token before", "no state from before", "spans ignored"])
def test_the_check_sees(fault: str) -> None:
    def run(x: Tensor, log_a: Tensor, initial: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        if fault == "spans ignored":
            o, final = scan(x, log_a, initial[:1], Spans.of([spans.total]))
            return o, final.expand_as(initial)
        late = fault.startswith("a decay")
        return scan(x, log_a.roll(1, 0) if late else log_a, initial if late else None, spans)

    with pytest.raises(AssertionError, match="off by"):
        check(*draw([33, 40]), run=run)


@pytest.mark.parametrize("lengths", [(0, 0), (0, 3)])
def test_an_empty_span_hands_on_a_copy_of_its_state(lengths: tuple[int, int]) -> None:
    x, log_a, initial, spans = draw(lengths)
    before = initial.clone()
    _, final = scan(x, log_a, initial, spans)
    assert torch.equal(final[0], initial[0])
    final += 1  # as a step would
    assert torch.equal(initial, before)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("decay", hostile.LOG_DECAYS)
def test_one_decay_everywhere(decay: float, op: str) -> None:
    """0 is a running sum, -inf leaves x; no initial state is zeros."""
    x, log_a, initial, spans = draw([130, 3])
    o, final = scan(x, torch.full_like(log_a, decay), None, spans, OPS[op])
    want, last = loop(x, torch.full_like(log_a, decay), torch.zeros_like(initial), spans)
    hostile.assert_output(o, want)
    hostile.assert_state(final, last)
    if decay == 0:
        hostile.assert_output(o[:130], x[:130].double().cumsum(0))
    if decay == -torch.inf:
        assert torch.equal(o, x)


def test_a_small_decay_survives_beside_a_huge_one() -> None:
    """After -1e4 a float32 prefix sum moves in steps of 1e-3, and -3e-4 a token is lost."""
    x, log_a, initial, spans = draw([32])
    log_a = torch.full_like(log_a, -3e-4)
    log_a[0] = -1e4
    x = x.abs()
    (o, final), (want, last) = scan(x, log_a, initial, spans), loop(x, log_a, initial, spans)
    assert float(((o - want).abs() / want).max()) < 1e-5
    assert float(((final - last).abs() / last).max()) < 1e-5


def gradients(x: Tensor, log_a: Tensor, initial: Tensor, spans: Spans, run: Run) -> list[Tensor]:
    """Of a weighting of (o, final) in which every entry counts differently."""
    leaves = [y.clone().requires_grad_() for y in (x, log_a, initial)]
    o, final = run(leaves[0], leaves[1], leaves[2], spans)
    weights = (hostile.normal(*y.shape, seed=70 + i).double() for i, y in enumerate((o, final)))
    torch.stack([(y * w).sum() for y, w in zip((o, final), weights, strict=True)]).sum().backward()
    assert all(y.grad is not None for y in leaves)
    return [y.grad for y in leaves if y.grad is not None]


def same_gradients(got: list[Tensor], want: list[Tensor]) -> None:
    for name, mine, theirs in zip(("x", "log_a", "initial"), got, want, strict=True):
        hostile.assert_gradient(mine, theirs, f"gradient of {name}")


@pytest.mark.parametrize("budget", [segments.BUDGET, 1])
@pytest.mark.parametrize("lengths", [(65,), (33, 33), (1, 40, 0, 17), (0, 34, 2), (1, 1), (0, 1)])
def test_gradients(lengths: tuple[int, ...], budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "BUDGET", budget)
    args = draw(lengths)
    same_gradients(gradients(*args, run=scan), gradients(*args, run=loop))


@pytest.mark.parametrize("cuts", [(1, 2), (15, 16, 17), (63, 65, 100), (32, 33, 96)])
def test_pieces_equal_the_whole(cuts: tuple[int, ...]) -> None:
    """Outputs, states and gradients of a sequence cut anywhere, an empty piece included."""

    def pieces(x: Tensor, log_a: Tensor, state: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        outputs = []
        for a, b in pairwise((0, 0, *cuts, spans.total)):
            o, state = scan(x[a:b], log_a[a:b], state, Spans.of([b - a]))
            outputs.append(o)
        return torch.cat(outputs), state

    args = draw([130])
    (o, final), (want, last) = pieces(*args), scan(*args)
    hostile.assert_output(o, want)
    hostile.assert_state(final, last)
    same_gradients(gradients(*args, run=pieces), gradients(*args, run=scan))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("length", [1, 2, 33, 130])
def test_steps_equal_the_scan(length: int, op: str) -> None:
    x, log_a, initial, spans = draw([length] * 2)
    want, last = scan(x, log_a, initial, spans)
    held = torch.full((4, 9), torch.nan)
    state = held[::2, :5]  # every second slot of a pool, and not all of a slot: a view with holes
    state.copy_(initial)
    outputs = [OPS[op].linear_recurrence_step(x[t::length], log_a[t::length], state) for t in range(length)]
    for t, o in enumerate(outputs):  # after all the steps: an output that is a view of the state has moved on
        hostile.assert_output(o, want[t::length])
    hostile.assert_state(state, last)
    assert held[1::2].isnan().all() and held[:, 5:].isnan().all(), "written beside the state"


@pytest.mark.parametrize("lengths", [(17, 64, 40), (40, 40, 40), (1, 70, 1), (0, 1, 33)])
def test_neighbours_change_nothing(lengths: tuple[int, ...]) -> None:
    x, log_a, initial, spans = draw(lengths)
    y, log_b, start, _ = draw(lengths, seed=50)
    own = spans.slices()[1]
    y[own], log_b[own], start[1] = x[own], log_a[own], initial[1]
    (o, final), (p, last) = scan(x, log_a, initial, spans), scan(y, log_b, start, spans)
    assert torch.equal(o[own], p[own]) and torch.equal(final[1], last[1])
    assert not torch.equal(o, p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    x, log_a, initial, spans = draw([70, 1, 9])
    x, log_a = x.to(dtype), log_a.to(dtype)
    (o, final), (want, last) = scan(x, log_a, initial, spans), loop(x, log_a, initial, spans)
    assert o.dtype == dtype and final.dtype == torch.float32
    hostile.assert_state(final, last)
    assert float((o.double() - want).abs().max()) <= torch.finfo(dtype).eps * float(want.abs().max())
    assert linear_recurrence_step(x[:3], log_a[:3], initial).dtype == dtype


def test_inputs_are_left_alone() -> None:
    args = draw([69, 1])
    before = [y.clone() for y in args[:3]]
    scan(*args)
    gradients(*args, run=scan)
    assert all(torch.equal(a, b) for a, b in zip(args[:3], before, strict=True))


@pytest.mark.parametrize("graded", [False, True])
def test_memory_is_linear(graded: bool) -> None:
    peaks = []
    for n in (4096, 8192):
        x, log_a, _, spans = draw([n], 40)
        x, log_a = x.requires_grad_(graded), log_a.requires_grad_(graded)
        peaks.append(peak_bytes(lambda x=x, a=log_a, spans=spans: linear_recurrence_scan(x, a, None, spans)))
    assert 0 < peaks[1] <= 2.2 * peaks[0]
    assert peaks[1] < 6 * 8192 * 40 * 4


@pytest.mark.parametrize("op", OPS)
def test_bad_input_is_refused(op: str) -> None:
    run, once = OPS[op].linear_recurrence_scan, OPS[op].linear_recurrence_step
    x, log_a, initial, spans = draw([3])
    with pytest.raises(ValueError, match=r"log_a is|log_a \(3, 4\)"):
        run(x, log_a[:, :4], initial, spans)
    with pytest.raises(ValueError, match=r"log_a holds .*never positive"):
        run(x, log_a.abs(), initial, spans, checked=True)
    with pytest.raises(ValueError, match="flatten"):
        run(x[:, None], log_a[:, None], initial, spans)
    with pytest.raises(ValueError, match="spans hold 4 tokens"):
        run(x, log_a, initial, Spans.of([4]))
    with pytest.raises(ValueError, match="initial is"):
        run(x, log_a, initial.expand(2, -1), spans)
    with pytest.raises(ValueError, match=r"state|initial"):
        once(x, log_a, initial.expand(3, -1)[:, :4])
    with pytest.raises(ValueError, match=r"wanted|float32"):
        linear_recurrence_step(x[:1], log_a[:1], initial.double())
