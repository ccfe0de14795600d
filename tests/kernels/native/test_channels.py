"""The selective scan and the short convolution in C against float64 loops: channel counts around every
vector's width, pieces shorter than the taps, histories of two dtypes, decays from 1 to nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from constate.kernels.native.selective import selective_scan, selective_step
from constate.kernels.native.short_conv import short_conv, short_conv_step
from constate.spans import Spans
from tests.kernels import hostile

SIZES = ((6, 4), (1, 1), (5, 16), (16, 16), (17, 16), (33, 3), (96, 8), (40, 17), (3, 40), (2, 300))
CHANNELS = (1, 3, 15, 16, 17, 63, 64, 65, 130)
WIDTHS = (1, 2, 3, 4, 5, 32, 40)

Given = dict[str, Any]


def pick(values: tuple[float, ...], *shape: int, seed: int) -> Tensor:
    return torch.tensor(values)[torch.randint(len(values), shape, generator=hostile.generator(seed))]


def draw(lengths: tuple[int, ...], size: tuple[int, int]) -> Given:
    """Steps of 0 to 50 beside rates of 0 to 1e6: exp(delta a) is 1, 0 and much in between."""
    (channels, s), spans = size, Spans.of(lengths)
    n = spans.total
    return {
        "x": hostile.normal(n, channels, seed=1),
        "dt": pick((-200.0, -20.0, -8.0, -5.0, -3.0, 0.0, 5.0, 50.0), n, channels, seed=2),
        "a": pick((-0.0, -1e-6, -1e-2, -0.3, -1.0, -50.0, -1e4, -1e6), channels, s, seed=3),
        "b": hostile.normal(n, s, seed=4),
        "c": hostile.normal(n, s, seed=5),
        "d": hostile.normal(channels, seed=6),
        "z": hostile.normal(n, channels, seed=7, scale=3.0),
        "dt_bias": hostile.normal(channels, seed=8),
        "initial": hostile.normal(spans.rows, channels, s, seed=9),
        "spans": spans,
    }


def loop(given: Given) -> tuple[Tensor, Tensor]:
    wanted = ("x", "dt", "a", "b", "c", "d", "z", "dt_bias")
    held: list[Any] = [None if given[name] is None else given[name].double() for name in wanted]
    x, dt, a, b, c, d, z, bias = held
    delta = softplus(dt if bias is None else dt + bias)
    outputs, finals = [], []
    for row, part in enumerate(given["spans"].slices()):
        h = given["initial"][row].double()
        for t in range(part.start, part.stop):
            h = (delta[t][:, None] * a).exp() * h + (delta[t] * x[t])[:, None] * b[t]
            o = h @ c[t] if d is None else h @ c[t] + d * x[t]
            outputs.append(o if z is None else o * silu(z[t]))
        finals.append(h)
    return torch.stack(outputs) if outputs else x, torch.stack(finals)


def check(given: Given) -> None:
    (o, final), (want, last) = selective_scan(**given), loop(given)
    hostile.assert_output(o, want)
    hostile.assert_state(final, last)


@pytest.mark.parametrize("size", SIZES)
def test_selective_packed(size: tuple[int, int]) -> None:
    for lengths in ((1,), (2,), (130,), (5, 0, 1, 33), (0, 0), (1, 1, 1)):
        check(draw(lengths, size))


def test_selective_without_its_options() -> None:
    given = draw((9, 1), (17, 16))
    for name in ("d", "z", "dt_bias"):
        check({**given, name: None})


def test_selective_softplus_far_below_zero_keeps_its_digits() -> None:
    """delta = e^-20 is what feeds the state where dt is -20, not the 0 that log(1 + e^-20) rounds to."""
    given = draw((5, 1), (17, 4))
    given |= {"dt": torch.full_like(given["dt"], -20.0), "initial": torch.zeros_like(given["initial"])}
    given |= {"a": torch.full_like(given["a"], -1.0), "dt_bias": None, "d": None}
    (_, final), (_, last) = selective_scan(**given), loop(given)
    assert 0 < float(last.abs().max()) < 1e-7
    hostile.assert_state(final, last)


def test_selective_decays_of_next_to_nothing_lose_nothing() -> None:
    given = draw((1024,), (16, 16))
    given |= {"a": torch.full_like(given["a"], -1e-13), "x": given["x"] * 0}
    _, final = selective_scan(**given)
    assert torch.equal(final, given["initial"])


def test_selective_steps_equal_the_scan() -> None:
    given = draw((7, 7), (19, 16))
    want, last = selective_scan(**given)
    held = torch.full((4, 19, 18), torch.nan)
    state = held[1::2, :, 1:17]
    state.copy_(given["initial"])
    for t in range(7):
        one = {name: given[name][t::7] for name in ("x", "dt", "b", "c", "z")}
        o = selective_step(**one, a=given["a"], d=given["d"], dt_bias=given["dt_bias"], state=state)
        hostile.assert_output(o, want[t::7])
    hostile.assert_state(state, last)
    assert held[::2].isnan().all() and held[:, :, 0].isnan().all() and held[:, :, 17].isnan().all()


def wide(x: Tensor) -> Tensor:
    """The same numbers as a slice of a wider tensor of NaN."""
    held = torch.full((x.shape[0] + 2, *x.shape[1:-1], 2 * x.shape[-1] + 3), torch.nan)
    held[1:-1, ..., 1 : x.shape[-1] + 1] = x
    return held[1:-1, ..., 1 : x.shape[-1] + 1]


def turn(x: Tensor) -> Tensor:
    """The same numbers, the last axis apart in memory."""
    return x.mT.contiguous().mT


def test_layouts_neighbours_and_threads_change_no_bit() -> None:
    given, before = draw((9, 40, 1), (33, 16)), torch.get_num_threads()
    own = given["spans"].slices()[1]
    alone = {name: x[own] if name in ("x", "dt", "b", "c", "z") else x for name, x in given.items()}
    alone |= {"initial": given["initial"][1:2], "spans": Spans.of([40])}
    moved: Given = {name: wide(x) if isinstance(x, Tensor) and x.ndim > 1 else x for name, x in given.items()}
    turned: Given = {
        name: turn(x) if isinstance(x, Tensor) and x.ndim > 1 else x for name, x in given.items()
    }
    flat: Given = {
        **given,
        "b": given["b"][:1].expand_as(given["b"]),
        "x": given["x"][:, :1].expand_as(given["x"]),
    }
    dense: Given = {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in flat.items()}
    try:
        torch.set_num_threads(1)
        o, final = selective_scan(**given)
        p, last = selective_scan(**alone)
        assert torch.equal(o[own], p) and torch.equal(final[1:2], last)
        for other in (moved, turned):
            p, last = selective_scan(**other)
            assert torch.equal(o, p) and torch.equal(final, last)
        for mine, theirs in zip(selective_scan(**flat), selective_scan(**dense), strict=True):
            assert torch.equal(mine, theirs)
        torch.set_num_threads(3)
        p, last = selective_scan(**given)
        assert torch.equal(o, p) and torch.equal(final, last)
    finally:
        torch.set_num_threads(before)


def conv_loop(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor, spans: Spans, act: str | None
) -> tuple[Tensor, Tensor]:
    w = weight.shape[1]
    outputs, finals = [], []
    for row, part in enumerate(spans.slices()):
        seen = [*initial[row].double(), *x[part].double()]
        for t in range(part.stop - part.start):
            o = sum(weight[:, j].double() * seen[t + j] for j in range(w))
            assert isinstance(o, Tensor)
            o = o if bias is None else o + bias
            outputs.append(silu(o) if act == "silu" else o)
        finals.append(torch.stack(seen[len(seen) - w + 1 :]) if w > 1 else initial[row].double())
    return torch.stack(outputs) if outputs else x.double(), torch.stack(finals)


def conv(channels: int, w: int, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor, Spans]:
    spans = Spans.of(lengths)
    x, weight = hostile.normal(spans.total, channels, seed=1), hostile.normal(channels, w, seed=2)
    history = hostile.normal(spans.rows, w - 1, channels, seed=4)
    return x, weight, hostile.normal(channels, seed=3), history, spans


@pytest.mark.parametrize("act", ["silu", None])
@pytest.mark.parametrize("w", WIDTHS)
def test_short_conv(w: int, act: str | None) -> None:
    for channels in CHANNELS:
        x, weight, bias, history, spans = conv(channels, w, (1, 0, w - 1, w, w + 1, 70))
        for own in (bias, None):
            o, final = short_conv(x, weight, own, history, spans, activation=act)
            want, last = conv_loop(x, weight, own, history, spans, act)
            hostile.assert_output(o, want)
            assert torch.equal(final.double(), last)


def test_short_conv_without_a_history_begins_at_zeros() -> None:
    x, weight, bias, history, spans = conv(17, 4, (3, 2))
    o, final = short_conv(x, weight, bias, None, spans)
    want, last = conv_loop(x, weight, bias, torch.zeros_like(history), spans, "silu")
    hostile.assert_output(o, want)
    assert torch.equal(final.double(), last)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_conv_histories_of_a_dtype_of_their_own(dtype: torch.dtype, kept: torch.dtype) -> None:
    """The current piece is read as it came; what is kept is rounded to the nearest as PyTorch does."""
    x, weight, bias, history, spans = conv(35, 4, (2, 7, 1))
    x, history = x.to(dtype), history.to(kept)
    o, final = short_conv(x, weight, bias, history, spans)
    want, last = conv_loop(x, weight, bias, history, spans, "silu")
    assert o.dtype == dtype and final.dtype == kept
    assert float((o.double() - want).abs().max()) <= max(1e-6, torch.finfo(dtype).eps) * float(
        want.abs().max()
    )
    assert torch.equal(final, last.float().to(kept))


def test_bfloat16_histories_round_as_pytorch_does() -> None:
    """Ties to even, up to infinity, NaN stays NaN."""
    x = torch.cat(
        [torch.randn(500), torch.tensor([1.00390625, 1.01171875, 3.4e38, torch.inf, torch.nan, -0.0])]
    )
    x = x[None]
    _, final = short_conv(
        x, torch.ones(506, 2), None, torch.zeros(1, 1, 506).bfloat16(), Spans.of([1]), activation=None
    )
    want = x.bfloat16()
    assert torch.equal(final[0].nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(final[0].isnan(), want.isnan())


def test_short_conv_steps_equal_the_scan() -> None:
    x, weight, bias, history, spans = conv(70, 4, (6, 6))
    want, last = short_conv(x, weight, bias, history, spans)
    held = torch.full((4, 3, 72), torch.nan)
    state = held[::2, :, 1:71]
    state.copy_(history)
    for t in range(6):
        hostile.assert_output(short_conv_step(x[t::6], weight, bias, state), want[t::6])
    assert torch.equal(state, last)
    assert held[1::2].isnan().all() and held[:, :, 0].isnan().all() and held[:, :, 71].isnan().all()


def test_short_conv_layouts_neighbours_and_threads_change_no_bit() -> None:
    (x, weight, bias, history, spans), before = conv(133, 4, (9, 40, 1)), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        o, final = short_conv(x, weight, bias, history, spans)
        own = spans.slices()[1]
        p, last = short_conv(x[own], weight, bias, history[1:2], Spans.of([40]))
        assert torch.equal(o[own], p) and torch.equal(final[1:2], last)
        torch.set_num_threads(3)
        for mine in (wide(x), turn(x), x):
            p, last = short_conv(mine, wide(weight), bias, wide(history), spans)
            assert torch.equal(o, p) and torch.equal(final, last)
    finally:
        torch.set_num_threads(before)


def test_inputs_are_left_alone() -> None:
    given = draw((4, 0, 1), (17, 16))
    x, weight, bias, history, spans = conv(17, 4, (2, 3))
    tensors = [x, weight, bias, history, *(y for y in given.values() if isinstance(y, Tensor))]
    before = [y.clone() for y in tensors]
    selective_scan(**given)[1].add_(1)
    short_conv(x, weight, bias, history, spans)[1].add_(1)
    assert all(torch.equal(y, old) for y, old in zip(tensors, before, strict=True))


def test_gradients_come_from_the_chunked_form() -> None:
    from constate.kernels.chunked import selective
    from constate.kernels.chunked import short_conv as conv_chunked

    given = draw((5,), (6, 4))
    x, weight, bias, history, spans = conv(6, 4, (5,))
    pairs = (
        (
            lambda leaf, op: op(**{**given, "dt": leaf})[0],
            selective_scan,
            selective.selective_scan,
            given["dt"],
        ),
        (
            lambda leaf, op: op(x, leaf, bias, history, spans)[0],
            short_conv,
            conv_chunked.short_conv,
            weight,
        ),
    )
    for call, mine, theirs, value in pairs:
        found = []
        for op in (mine, theirs):
            leaf = value.clone().requires_grad_()
            call(leaf, op).square().sum().backward()
            found.append(leaf.grad)
        assert torch.equal(*found)


def test_bad_input_is_refused() -> None:
    given = draw((3,), (6, 4))
    with pytest.raises(ValueError, match="never positive"):
        selective_scan(**{**given, "a": given["a"].abs() + 1, "checked": True})
    with pytest.raises(ValueError, match="dt_bias"):
        selective_scan(**{**given, "dt_bias": given["dt_bias"][:3]})
    x, weight, bias, history, spans = conv(6, 4, (3,))
    with pytest.raises(ValueError, match="activation"):
        short_conv(x, weight, bias, history, spans, activation="gelu")
    with pytest.raises(ValueError, match="history"):
        short_conv_step(x, weight, bias, history)


def test_the_loops_bite() -> None:
    given, fault = draw((9,), (17, 16)), draw((9,), (17, 16))
    fault["dt_bias"] = fault["dt_bias"] + 1e-2
    with pytest.raises(AssertionError):
        hostile.assert_state(selective_scan(**fault)[1], loop(given)[1])
    x, weight, bias, history, spans = conv(17, 4, (9,))
    with pytest.raises(AssertionError):
        want, _ = conv_loop(x, weight, bias, history, spans, "silu")
        hostile.assert_output(short_conv(x, weight.roll(1, 1), bias, history, spans)[0], want)
