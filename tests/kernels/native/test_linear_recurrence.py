"""The elementwise linear recurrence in C against a float64 loop: channel counts around every vector's and
tile's width, decays from 1 to nothing, empty rows."""

from __future__ import annotations

import pytest
import torch

from constate.kernels.chunked import linear_recurrence as chunked
from constate.kernels.native.linear_recurrence import linear_recurrence_scan, linear_recurrence_step
from constate.spans import Spans
from tests.kernels import hostile
from tests.kernels.test_linear_recurrence import draw, loop

CHANNELS = (1, 3, 15, 16, 17, 63, 64, 65, 130)


@pytest.mark.parametrize("channels", CHANNELS)
def test_packed(channels: int) -> None:
    for lengths in (*hostile.PACKS, (130,)):
        given = draw(lengths, channels)
        (o, final), (want, last) = linear_recurrence_scan(*given), loop(*given)
        hostile.assert_output(o, want)
        hostile.assert_state(final, last)


def test_without_an_initial_state_and_in_another_dtype() -> None:
    x, log_a, initial, spans = draw((3, 0, 9), 33)
    o, _ = linear_recurrence_scan(x.bfloat16(), log_a, None, spans)
    want, last = loop(x.bfloat16(), log_a, torch.zeros_like(initial), spans)
    assert o.dtype == torch.bfloat16 and (o.double() - want).abs().max() <= want.abs().max() / 128
    hostile.assert_state(linear_recurrence_scan(x.bfloat16(), log_a, None, spans)[1], last)


def test_a_decay_of_nothing_loses_nothing() -> None:
    x, _, initial, spans = draw((4096,), 20)
    _, final = linear_recurrence_scan(torch.zeros_like(x), torch.zeros_like(x), initial, spans)
    assert torch.equal(final, initial)


def test_steps_equal_the_scan() -> None:
    x, log_a, initial, spans = draw((6, 6), 70)
    want, last = linear_recurrence_scan(x, log_a, initial, spans)
    held = torch.full((4, 72), torch.nan)
    state = held[::2, 1:71]
    state.copy_(initial)
    for t in range(6):
        assert torch.equal(linear_recurrence_step(x[t::6], log_a[t::6], state), want[t::6])
    assert torch.equal(state, last)
    assert held[1::2].isnan().all() and held[:, 0].isnan().all() and held[:, 71].isnan().all()


def test_layouts_neighbours_and_threads_change_no_bit() -> None:
    (x, log_a, initial, spans), before = draw((9, 40, 1), 133), torch.get_num_threads()
    own = spans.slices()[1]
    try:
        torch.set_num_threads(1)
        o, final = linear_recurrence_scan(x, log_a, initial, spans)
        p, last = linear_recurrence_scan(x[own], log_a[own], initial[1:2], Spans.of([40]))
        assert torch.equal(o[own], p) and torch.equal(final[1:2], last)
        torch.set_num_threads(3)
        both = torch.cat([x, log_a], 1)
        turned = log_a.mT.contiguous().mT
        for mine, decay in ((both[:, :133], both[:, 133:]), (both[:, :133], log_a), (x, turned)):
            p, last = linear_recurrence_scan(mine, decay, initial, spans)
            assert torch.equal(o, p) and torch.equal(final, last)
    finally:
        torch.set_num_threads(before)


def test_inputs_are_left_alone_and_outputs_are_no_views() -> None:
    given = draw((2, 0, 3), 17)
    before = [y.clone() for y in given[:3]]
    linear_recurrence_scan(*given)[1].add_(1)
    assert all(torch.equal(y, old) for y, old in zip(given[:3], before, strict=True))
    state = given[2][:2].clone()
    linear_recurrence_step(given[0][:2], given[1][:2], state).add_(7)
    hostile.assert_state(state, given[1][:2].double().exp() * before[2][:2] + given[0][:2])


def test_gradients_come_from_the_chunked_form() -> None:
    x, log_a, initial, spans = draw((5, 2), 6)
    found = []
    for op in (linear_recurrence_scan, chunked.linear_recurrence_scan):
        leaf = log_a.clamp(min=-5).requires_grad_()
        op(x, leaf, initial, spans)[0].square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_bad_input_is_refused() -> None:
    x, log_a, initial, spans = draw((3,), 6)
    with pytest.raises(ValueError, match="both are wanted"):
        linear_recurrence_scan(x, log_a[:, :5], initial, spans)
    with pytest.raises(ValueError, match="initial"):
        linear_recurrence_scan(x, log_a, initial[:, :5], spans)
    with pytest.raises(ValueError, match="never positive"):
        linear_recurrence_scan(x, log_a.abs() + 1, initial, spans, checked=True)


def test_the_loop_bites() -> None:
    x, log_a, initial, spans = draw((9, 3), 17)
    with pytest.raises(AssertionError):
        want, _ = loop(x, log_a, initial, spans)
        hostile.assert_output(linear_recurrence_scan(x, log_a.roll(1, 1), initial, spans)[0], want)
