"""The C forms of the ops whose state is a matrix, against one float64 loop, on what breaks careless kernels:
every decay beside every other, lengths around the block of four tokens, widths around every vector's."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from constate.spans import Spans
from tests.kernels import hostile
from tests.kernels.memory import peak_bytes

SCALE = 0.3
OPS = ("gated_linear", "gated_delta", "dplr_delta")
KINDS = ("none", "head", "channel")
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 63, 130)
WIDTHS = ((8, 12), (5, 1), (24, 16), (16, 33), (40, 35), (100, 48), (64, 80), (3, 96), (17, 100), (128, 64))

Given = dict[str, Any]


def draw(
    op: str, lengths: tuple[int, ...], kind: str, heads: tuple[int, int], dims: tuple[int, int]
) -> Given:
    """The tensors of a scan, by name; keys of the delta rules are of unit length, beta reaches 2."""
    (hk, h), (dk, dv), spans = heads, dims, Spans.of(lengths)
    n = spans.total
    decay = {"none": None, "head": (n, h), "channel": (n, h, dk)}[kind]
    given: Given = {
        "q": hostile.normal(n, hk, dk, seed=1),
        "k": normalize(hostile.normal(n, hk, dk, seed=2), dim=-1) * 0.9999,
        "v": hostile.normal(n, h, dv, seed=3),
        "log_decay": None if decay is None else hostile.log_decays(*decay, seed=4),
    }
    rate = torch.rand(n, h, generator=hostile.generator(5))
    if op == "gated_delta":
        given["beta"] = 2 * rate
    if op == "dplr_delta":
        kappa = normalize(hostile.normal(n, h, dk, seed=6), dim=-1) * 0.9999
        given |= {"a": -kappa, "b": kappa * rate[..., None]}
    return {**given, "initial": hostile.normal(spans.rows, h, dk, dv, seed=7), "spans": spans}


def loop(op: str, given: Given) -> tuple[Tensor, Tensor]:
    """The equations of the three, in float64, token by token."""
    wanted = ("q", "k", "v", "log_decay", "beta", "a", "b")
    held: list[Any] = [None if given.get(name) is None else given[name].double() for name in wanted]
    q, k, v, g, beta, a, b = held
    group = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    outputs, finals = [], []
    for row, part in enumerate(given["spans"].slices()):
        s = given["initial"][row].double()
        for t in range(part.start, part.stop):
            decay = torch.ones(()).double() if g is None else g[t].exp()
            decay = decay.reshape(-1, decay.shape[-1] if decay.ndim == 2 else 1, 1)
            column, row_v = k[t, :, :, None], v[t, :, None, :]
            if op == "dplr_delta":
                s = decay * s + b[t, :, :, None] * (a[t, :, None] @ s) + column * row_v
            else:
                s = decay * s
                if op == "gated_delta":
                    row_v = beta[t, :, None, None] * (row_v - k[t, :, None] @ s)
                s = s + column * row_v
            outputs.append(SCALE * (q[t, :, None] @ s)[:, 0])
        finals.append(s)
    return torch.stack(outputs) if outputs else v, torch.stack(finals)


def scan(op: str, given: Given, backend: str = "native") -> tuple[Tensor, Tensor]:
    module = import_module(f"constate.kernels.{backend}.{op}")
    return getattr(module, f"{op}_scan")(**given, scale=SCALE)


def step(op: str, given: Given, state: Tensor, at: slice) -> Tensor:
    tokens = {
        name: x if x is None else x[at] for name, x in given.items() if name not in ("initial", "spans")
    }
    module = import_module(f"constate.kernels.native.{op}")
    return getattr(module, f"{op}_step")(**tokens, state=state, scale=SCALE)


def check(op: str, given: Given) -> None:
    (o, final), (want, last) = scan(op, given), loop(op, given)
    hostile.assert_output(o, want)
    hostile.assert_state(final, last)
    assert o.dtype == final.dtype == torch.float32


@pytest.mark.parametrize("heads", hostile.HEADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_one_row(op: str, kind: str, heads: tuple[int, int]) -> None:
    for length in LENGTHS:
        check(op, draw(op, (length,), kind, heads, WIDTHS[0]))


@pytest.mark.parametrize("dims", WIDTHS)
@pytest.mark.parametrize("op", OPS)
def test_widths(op: str, dims: tuple[int, int]) -> None:
    for kind in KINDS[1:]:
        check(op, draw(op, (6, 0, 1, 4), kind, (1, 2), dims))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_packed(op: str, kind: str) -> None:
    for lengths in hostile.PACKS:
        check(op, draw(op, lengths, kind, (2, 4), WIDTHS[3]))


@pytest.mark.parametrize("decay", hostile.LOG_DECAYS)
@pytest.mark.parametrize("op", OPS)
def test_one_decay_everywhere(op: str, decay: float) -> None:
    for kind in KINDS[1:]:
        given = draw(op, (70, 3), kind, (1, 2), WIDTHS[0])
        check(op, given | {"log_decay": torch.full_like(given["log_decay"], decay)})


@pytest.mark.parametrize("op", OPS)
def test_a_decay_of_next_to_nothing_loses_nothing(op: str) -> None:
    """e^-1e-12 is 1 in float32: a polynomial that is not exactly 1 at 0 would drift, 5e-5 in 1,024 tokens."""
    for kind in KINDS[1:]:
        given = draw(op, (1024,), kind, (1, 1), (4, 16))
        nothing = {name: given[name] * 0 for name in ("v", "beta", "b") if name in given}  # is written
        _, final = scan(op, given | nothing | {"log_decay": torch.full_like(given["log_decay"], -1e-12)})
        assert torch.equal(final, given["initial"])


@pytest.mark.parametrize("op", OPS)
def test_steps_equal_the_scan_and_write_only_their_state(op: str) -> None:
    for kind in KINDS:
        given = draw(op, (9, 9), kind, (1, 2), WIDTHS[4])
        want, last = scan(op, given)
        _, h, dk, dv = given["initial"].shape
        held = torch.full((4, h, dk + 1, dv), torch.nan)
        state = held[::2, :, :dk]  # every second slot of a pool, and not all of a slot
        state.copy_(given["initial"])
        for t in range(9):
            hostile.assert_output(step(op, given, state, slice(t, None, 9)), want[t::9])
        hostile.assert_state(state, last)
        assert held[1::2].isnan().all() and held[:, :, dk:].isnan().all(), "written beside the state"


@pytest.mark.parametrize("op", OPS)
def test_pieces_equal_the_whole(op: str) -> None:
    given = draw(op, (130,), "head", (1, 2), WIDTHS[0])
    want, last = scan(op, given)
    for cuts in ((1, 2, 5), (4, 63, 64), (127, 129, 130)):
        state, outputs = given["initial"], []
        for a, b in pairwise((0, *cuts, 130)):
            part = {name: x[a:b] for name, x in given.items() if name not in ("initial", "spans")}
            o, state = scan(op, {**part, "initial": state, "spans": Spans.of([b - a])})
            outputs.append(o)
        hostile.assert_output(torch.cat(outputs), want)
        hostile.assert_state(state, last)


@pytest.mark.parametrize("op", OPS)
def test_neighbours_and_threads_change_no_bit(op: str) -> None:
    given = draw(op, (17, 40, 1, 9), "head", (1, 3), WIDTHS[5])
    own, before = given["spans"].slices()[1], torch.get_num_threads()
    alone = {name: x[own] for name, x in given.items() if name not in ("initial", "spans")}
    alone |= {"initial": given["initial"][1:2], "spans": Spans.of([40])}
    try:
        torch.set_num_threads(1)
        o, final = scan(op, given)
        p, last = scan(op, alone)
        assert torch.equal(o[own], p) and torch.equal(final[1:2], last)
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            p, last = scan(op, given)
            assert torch.equal(o, p) and torch.equal(final, last), f"{threads} threads"
    finally:
        torch.set_num_threads(before)


def _odd(x: Tensor) -> Tensor:
    """The same numbers, the last axis apart in memory."""
    return x.mT.contiguous().mT if x.ndim > 1 else x


def _inside(x: Tensor) -> Tensor:
    """The same numbers within a wider tensor of NaN, as a slice of a projection lies."""
    wide = torch.full((x.shape[0] + 2, *x.shape[1:-1], 2 * x.shape[-1] + 3), torch.nan)
    wide[1:-1, ..., 1 : x.shape[-1] + 1] = x
    return wide[1:-1, ..., 1 : x.shape[-1] + 1]


@pytest.mark.parametrize("layout", [_odd, _inside])
@pytest.mark.parametrize("op", OPS)
def test_layouts(op: str, layout: Callable[[Tensor], Tensor]) -> None:
    """Case K4: strides of every kind equal a contiguous copy."""
    for dims in ((8, 48), (100, 80)):
        given = draw(op, (5, 6), "channel", (1, 2), dims)
        moved = {name: layout(x) if isinstance(x, Tensor) else x for name, x in given.items()}
        for mine, theirs in zip(scan(op, moved), scan(op, given), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("op", OPS)
def test_expanded_inputs(op: str) -> None:
    given = draw(op, (6,), "head", (2, 2), WIDTHS[0])
    for name, x in given.items():
        if isinstance(x, Tensor) and name != "initial":
            for axis in range(x.ndim):
                flat = x.narrow(axis, 0, 1).expand_as(x)
                for mine, theirs in zip(
                    scan(op, {**given, name: flat}), scan(op, {**given, name: flat.contiguous()}), strict=True
                ):
                    assert torch.equal(mine, theirs), f"{name}, axis {axis}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("op", OPS)
def test_other_dtypes_are_computed_in_float32(op: str, dtype: torch.dtype) -> None:
    given = draw(op, (13, 1), "head", (1, 2), WIDTHS[0])
    given |= {name: x.to(dtype) for name, x in given.items() if isinstance(x, Tensor) and name != "initial"}
    (o, final), (want, last) = scan(op, given), loop(op, given)
    assert o.dtype == dtype and final.dtype == torch.float32
    hostile.assert_state(final, last)
    error = float((o.double() - want).abs().max()) / float(want.abs().max())
    assert error <= max(1e-6, torch.finfo(dtype).eps)


@pytest.mark.parametrize("op", OPS)
def test_inputs_are_left_alone(op: str) -> None:
    given = draw(op, (9, 0, 1), "head", (1, 2), WIDTHS[0])
    before = {name: x.clone() for name, x in given.items() if isinstance(x, Tensor)}
    _, final = scan(op, given)
    assert torch.equal(final[1], given["initial"][1])
    final += 1  # as a step would
    assert all(torch.equal(given[name], x) for name, x in before.items())


@pytest.mark.parametrize("op", OPS)
def test_gradients_come_from_the_chunked_form(op: str) -> None:
    given = draw(op, (9,), "head", (1, 2), WIDTHS[0])
    found = []
    for backend in ("native", "chunked"):
        leaf = given["v"].clone().requires_grad_()
        o, final = scan(op, {**given, "v": leaf}, backend)
        (o.square().sum() + final.square().sum()).backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    assert torch.equal(*found)
    with torch.no_grad():  # a parameter that nobody differentiates runs in C
        o, _ = scan(op, {**given, "v": given["v"].clone().requires_grad_()})
    assert torch.equal(o, scan(op, given)[0])


@pytest.mark.parametrize("op", OPS)
def test_memory_is_what_is_returned(op: str) -> None:
    """Case G2: no temporary a token, whatever the length."""
    for n in (512, 2048):
        given = draw(op, (n,), "channel", (1, 2), WIDTHS[0])
        o, final = scan(op, given)
        peak = peak_bytes(lambda given=given: scan(op, given))
        assert peak <= 4 * (o.numel() + final.numel()) + 4096


@pytest.mark.parametrize("op", OPS)
def test_keys_too_wide_for_the_kernel(op: str) -> None:
    check(op, draw(op, (3,), "head", (1, 1), (1025, 2)))
    check(op, draw(op, (5,), "head", (1, 1), (1024, 2)))


@pytest.mark.parametrize("op", OPS)
def test_bad_input_is_refused(op: str) -> None:
    given = draw(op, (3,), "head", (2, 4), WIDTHS[0])
    wrong: dict[str, Given] = {
        "3 value heads cannot share 2": {"v": given["v"][:, :3], "log_decay": given["log_decay"][:, :3]},
        "spans hold 4 tokens": {"spans": Spans.of([4])},
        "swapped": {"initial": given["initial"].mT},
        "never positive": {"log_decay": given["log_decay"].abs() + 1, "checked": True},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            scan(op, given | change)
    with pytest.raises(ValueError, match="float32 state in place"):
        step(op, draw(op, (1,), "head", (2, 4), WIDTHS[0]), given["initial"].bfloat16(), slice(None))


@pytest.mark.parametrize("op", OPS)
def test_the_loop_bites(op: str) -> None:
    """The check of all these tests sees a wrong scale, a decay off by one, and a group read wrongly."""
    given = draw(op, (9,), "head", (2, 4), WIDTHS[0])
    faults = {
        "decay": {"log_decay": given["log_decay"].roll(1, 0)},
        "group": {"k": given["k"].flip(1)},
        "state": {"initial": given["initial"] * 1.01},
    }
    for name, fault in faults.items():
        (o, final), (want, last) = scan(op, given | fault), loop(op, given)
        with pytest.raises(AssertionError):
            hostile.assert_output(o, want)
            hostile.assert_state(final, last)
            pytest.fail(f"{name} was not seen", pytrace=False)
