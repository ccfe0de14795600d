"""The short convolution, the selective scan and the linear recurrence as Triton kernels, in its interpreter,
against float64 loops: decays from 1 to nothing, spans that end anywhere in a tile or a piece, empty ones."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import triton

from constate.kernels.triton import linear_recurrence, linear_recurrence_kernels, selective, short_conv
from constate.kernels.triton.launch import launches
from constate.spans import Spans
from tests.kernels import hostile
from tests.kernels import test_linear_recurrence as griffin
from tests.kernels import test_selective as mamba
from tests.kernels import test_short_conv as sums
from tests.kernels.triton.near import DTYPES, guarded, names, near, untouched

PACKS = ((5, 0, 33, 1, 17), (0, 0), (1, 1, 1), (70,))
SIZES = ((6, 4), (1, 1), (5, 16), (17, 3))  # channels, states


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and blocks that these inputs fill several of."""
    for module in (short_conv, selective, linear_recurrence):
        monkeypatch.setattr(module, "CHANNELS", 8)
        monkeypatch.setattr(module, "STEP_CHANNELS", 8)


# -- the short convolution -----------------------------------------------------------------------------


@pytest.mark.parametrize("w", [1, 2, 4])
@pytest.mark.parametrize("lengths", [*PACKS, (1, 2, 3, 4, 5)])
def test_short_conv(lengths: tuple[int, ...], w: int) -> None:
    spans = Spans.of(lengths)
    x, weight, bias, initial = sums.inputs(spans, w)
    for dtype, kept in ((DTYPES[0], DTYPES[1]), (DTYPES[1], DTYPES[0]), (DTYPES[2], DTYPES[2])):
        now, held = x.to(dtype), initial.to(kept)
        for start, b, act in ((held, bias, "silu"), (None, None, None)):
            with launches() as made:
                o, final = short_conv.short_conv(now, weight, b, start, spans, activation=act)
            assert names(made) == ["short_conv_tiles"]
            want, last = sums.loop(now, weight, b, start, spans, act)
            near(o, want, dtype)
            assert o.dtype == dtype and torch.equal(final, last.to(dtype if start is None else kept))


def test_short_conv_of_many_channels_and_strides() -> None:
    """Each three channels are the loop's own; x lies crosswise and the taps backwards apart."""
    spans = Spans.of((20, 3))
    x, weight, initial = (hostile.normal(*s, seed=i) for i, s in enumerate(((23, 21), (21, 4), (2, 3, 21))))
    crossed, apart = x.mT.contiguous().mT, guarded(initial)[0]
    o, final = short_conv.short_conv(crossed, weight.mT.contiguous().mT, None, apart, spans)
    for c in range(0, 21, 3):
        part = slice(c, c + 3)
        want, last = sums.loop(x[:, part], weight[part], None, initial[..., part], spans)
        near(o[:, part], want)
        assert torch.equal(final[..., part].double(), last)


@pytest.mark.parametrize("w", [1, 2, 4])
def test_short_conv_steps_are_the_sum(w: int) -> None:
    rows, steps = 3, 6
    x, weight, bias, initial = sums.inputs(Spans.of([steps] * rows), w)
    want, last = sums.loop(x, weight, bias, initial, Spans.of([steps] * rows))
    history, pool = guarded(initial) if w > 1 else (initial, initial[:0])
    for t in range(steps):
        with launches() as made:
            o = short_conv.short_conv_step(x[t::steps], weight, bias, history)
        assert names(made) == ["short_conv_one"]
        near(o, want[t::steps])
    assert torch.equal(history.double(), last) and untouched(pool)


# -- the selective scan ----------------------------------------------------------------------------------


def cut(monkeypatch: pytest.MonkeyPatch, module: Any, size: int | None) -> None:
    monkeypatch.setattr(module, "piece", lambda *_: size)


@pytest.mark.parametrize("size", [None, 16, 20])
@pytest.mark.parametrize("lengths", PACKS)
def test_selective(lengths: tuple[int, ...], size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whole, and in pieces of a tile and of a tile and a bit."""
    cut(monkeypatch, selective, size)
    for shape in SIZES if size is None else SIZES[:1]:
        given, initial, spans = mamba.draw(lengths, shape)
        with launches() as made:
            o, final = mamba.scan(given, initial, spans, selective)
        pieces = size is not None and spans.total > 0
        ran = ["selective_walk", "selective_chain", "selective_walk"] if pieces else ["selective_walk"]
        assert names(made) == (ran if size is None or spans.total else ["selective_chain"])
        want, last = mamba.loop(given, initial, spans)
        near(o, want)
        near(final, last, least=0.0)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_selective_in_16_bits_and_without_its_options(dtype: torch.dtype) -> None:
    given, initial, spans = mamba.draw((20, 1), (6, 4))
    per_token = {name: getattr(given, name).to(dtype) for name in mamba.PER_TOKEN}
    for other in (given._replace(**per_token), given._replace(d=None, z=None, dt_bias=None)):
        o, final = mamba.scan(other, initial, spans, selective)
        want, last = mamba.loop(other, initial, spans)
        near(o, want, o.dtype)
        near(final, last, least=0.0)


@pytest.mark.parametrize("shape", SIZES)
def test_selective_steps_are_the_scan(shape: tuple[int, int]) -> None:
    given, initial, spans = mamba.draw((4, 4), shape)
    want, last = mamba.loop(given, initial, spans)
    state, pool = guarded(initial)
    for t in range(4):
        with launches() as made:
            o = mamba.step(given.at(slice(t, None, 4)), state, selective)
        assert names(made) == ["selective_one"]
        near(o, want[t::4])
    near(state, last, least=0.0)
    assert untouched(pool)


def test_selective_strides_change_no_bit() -> None:
    given, initial, spans = mamba.draw((9, 3), (6, 4))
    apart = given._replace(**{name: guarded(getattr(given, name))[0] for name in mamba.PER_TOKEN})
    apart = apart._replace(a=given.a.mT.contiguous().mT, b=given.b.mT.contiguous().mT)
    o, final = mamba.scan(given, initial, spans, selective)
    p, last = mamba.scan(apart, guarded(initial)[0], spans, selective)
    assert torch.equal(o, p) and torch.equal(final, last)


def test_when_rows_are_cut() -> None:
    """One long row of few channels is; many rows, short ones, and many channels are not."""
    cpu = torch.device("cpu")
    for module in (selective, linear_recurrence):
        assert module.piece(Spans.of((65536,)), 24, cpu) is not None
        for lengths, channels in (((65536,) * 1024, 24), ((400,), 24), ((65536,), 65536)):
            assert module.piece(Spans.of(lengths), channels, cpu) is None


# -- the linear recurrence ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 16, 20])
@pytest.mark.parametrize("lengths", PACKS)
def test_recurrence(lengths: tuple[int, ...], size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, linear_recurrence, size)
    x, log_a, initial, spans = griffin.draw(lengths, 17)
    with launches() as made:
        o, final = linear_recurrence.linear_recurrence_scan(x, log_a, initial, spans)
    pieces = size is not None and spans.total > 0
    ran = ["recurrence_walk", "recurrence_chain", "recurrence_walk"] if pieces else ["recurrence_walk"]
    assert names(made) == (ran if size is None or spans.total else ["recurrence_chain"])
    want, last = griffin.loop(x, log_a, initial, spans)
    near(o, want)
    near(final, last, least=0.0)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_recurrence_in_16_bits_and_strided(dtype: torch.dtype) -> None:
    x, log_a, initial, spans = griffin.draw((20, 3), 5)
    log_a = log_a.clamp(min=-1e4)  # what the type holds
    x, log_a = x.to(dtype), log_a.to(dtype)
    crossed = x.mT.contiguous().mT
    o, final = linear_recurrence.linear_recurrence_scan(
        crossed, guarded(log_a)[0], guarded(initial)[0], spans
    )
    want, last = griffin.loop(x, log_a, initial, spans)
    near(o, want, dtype)
    near(final, last, least=0.0)


def test_recurrence_steps_are_the_scan() -> None:
    x, log_a, initial, spans = griffin.draw((4, 4), 17)
    want, last = griffin.loop(x, log_a, initial, spans)
    state, pool = guarded(initial)
    for t in range(4):
        with launches() as made:
            o = linear_recurrence.linear_recurrence_step(x[t::4], log_a[t::4], state)
        assert names(made) == ["recurrence_one"]
        near(o, want[t::4])
    near(state, last, least=0.0)
    assert untouched(pool)


# -- all of them -------------------------------------------------------------------------------------------


def test_pieces_of_a_text_are_the_whole() -> None:
    given, initial, _ = mamba.draw((40,), (6, 4))
    want, last = mamba.loop(given, initial, Spans.of((40,)))
    state, outputs = initial, []
    for a, b in pairwise((0, 0, 1, 16, 33, 40)):
        o, state = mamba.scan(given.at(slice(a, b)), state, Spans.of((b - a,)), selective)
        outputs.append(o)
    near(torch.cat(outputs), want)
    near(state, last, least=0.0)


def test_what_autograd_asks_for_is_the_chunked_forms() -> None:
    x, log_a, initial, spans = griffin.draw((5,), 3)
    with launches() as made:
        o, _ = linear_recurrence.linear_recurrence_scan(x.requires_grad_(), log_a, initial, spans)
    assert o.requires_grad and not made


def test_softplus_far_below_zero_keeps_its_digits() -> None:
    """e^-20 is what feeds the state there, not the 0 that log(1 + e^-20) rounds to: and all between."""
    given, initial, spans = mamba.draw((1,) * 12, (1, 1))
    dt = torch.tensor([-80.0, -20.0, -15.0, -9.0, -4.0, -1.0, -0.1, 0.0, 0.1, 2.0, 15.0, 90.0])[:, None]
    given = given._replace(dt=dt, d=None, z=None, dt_bias=None)
    given = given._replace(**{name: torch.ones_like(getattr(given, name)) for name in ("x", "b", "c")})
    o, _ = mamba.scan(given, torch.zeros_like(initial), spans, selective)
    want = torch.nn.functional.softplus(dt.double())
    assert float(((o - want) / want).abs().max()) < 1e-6


def test_a_sum_that_loses_the_carried_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound bites: the likeliest mistake of a scan in tiles is far outside of it."""
    x, log_a, initial, spans = griffin.draw((33,), 17)
    monkeypatch.setattr(linear_recurrence_kernels, "compose", forgetful)
    o, _ = linear_recurrence.linear_recurrence_scan(x, log_a, initial, spans)
    want, _ = griffin.loop(x, log_a, initial, spans)
    with pytest.raises(AssertionError, match="off by"):
        near(o, want)


@triton.jit
def forgetful(decay, added, later_decay, later_added):
    return decay * later_decay, later_added


def test_spans_of_another_device_are_refused() -> None:
    x, log_a, initial, _ = griffin.draw((5,), 3)
    with pytest.raises(ValueError, match="spans is on meta, others are on cpu"):
        linear_recurrence.linear_recurrence_scan(x, log_a, initial, Spans.of((5,), "meta"))
