"""The gated linear scan and step as Triton kernels, in its interpreter, against a float64 loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.kernels.dispatch import select
from constate.kernels.triton import gated_linear, gated_linear_step, launch
from constate.kernels.triton.gated_linear_walk import Sizes
from constate.kernels.triton.launch import launches
from constate.spans import Spans
from tests.kernels import hostile, test_gated_linear

KINDS = ("none", "scalar", "vector")
PACKS = ((5, 0, 33, 1), (0, 3), (16,), (1, 1, 1), (0, 0))
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
# Called with lists unpacked, whose lengths no type knows.
scan: Any = gated_linear.gated_linear_scan
step: Any = gated_linear.gated_linear_step
step_to: Any = gated_linear_step.step
loop: Any = test_gated_linear.loop


@pytest.fixture(params=["rows", "stretches"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A card that rows alone fill, and one that wants them cut as fine as they may be."""
    small = request.param == "rows"
    monkeypatch.setattr(gated_linear, "multiprocessors", lambda device: 1 if small else 10_000)
    monkeypatch.setattr(gated_linear, "LEAST", 1)
    yield request.param


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 tokens for every class: borders everywhere, and the interpreter is quicker."""
    monkeypatch.setattr(gated_linear, "sizes", lambda dk, dtype: Sizes(16, 16, 16, 4, 4))


def inputs(
    spans: Spans, hk: int, h: int, dk: int, dv: int, kind: str, dtype: torch.dtype = torch.float32
) -> tuple[list[Any], Tensor]:
    """[q, k, v, log_decay] and a random initial state."""
    n = spans.total
    decay = {"none": None, "scalar": (n, h), "vector": (n, h, dk)}[kind]
    q, k, v = (
        hostile.normal(n, hk, dk, seed=0),
        hostile.normal(n, hk, dk, seed=1),
        hostile.normal(n, h, dv, seed=2),
    )
    g = None if decay is None else hostile.log_decays(*decay, seed=3)
    return [q.to(dtype), k.to(dtype), v.to(dtype), g], hostile.normal(spans.rows, h, dk, dv, seed=9)


def close(got: Tensor, want: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Within BOUNDS of the largest entry."""
    assert got.shape == want.shape and bool(torch.isfinite(got).all())
    worst = float((got.double() - want.double()).abs().max()) if want.numel() else 0.0
    assert worst <= BOUNDS[dtype] * (float(want.abs().max()) if want.numel() else 1.0), worst


def check(
    spans: Spans, given: list[Any], initial: Tensor | None, dtype: torch.dtype, scale: float = 0.3
) -> list[str]:
    """The scan against the loop; the kernels that ran."""
    with launches() as made:
        o, final = scan(*given, initial, spans, scale=scale, checked=True)
    want, last = loop(*given, initial, spans, scale)
    assert o.dtype == given[2].dtype and final.dtype == torch.float32
    close(o, want, dtype)
    close(final, last, dtype)
    return [one.kernel for one in made]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", PACKS)
def test_packed_rows(lengths: tuple[int, ...], kind: str, way: str) -> None:
    spans = Spans.of(lengths)
    given, initial = inputs(spans, 1, 2, 20, 12, kind)
    ran = check(spans, given, initial, torch.float32)
    parts = ["linear_tiles"] if kind == "vector" and spans.total else []
    cut = way == "stretches" and max(lengths) > 16
    assert ran == parts + (["linear_walk", "linear_pass", "linear_walk"] if cut else ["linear_walk"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, kind: str, way: str) -> None:
    spans = Spans.of((7, 0, 34))
    given, initial = inputs(spans, 1, 1, 20, 12, kind, dtype)
    check(spans, given, initial, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dk", "dv"), [(16, 16), (48, 65), (80, 48), (96, 100), (256, 256), (1, 1)])
def test_head_sizes(dk: int, dv: int, kind: str) -> None:
    spans = Spans.of((19,))
    given, initial = inputs(spans, 1, 1, dk, dv, kind)
    check(spans, given, initial, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_tiles_of_the_table(dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes that a GPU takes, not the small ones of the other tests."""
    monkeypatch.undo()
    spans = Spans.of((65,))
    given, initial = inputs(spans, 1, 1, 100, 66, kind, dtype)
    check(spans, given, initial, dtype)


def test_sizes_know_the_head_and_the_dtype_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for dtype in BOUNDS:
        assert gated_linear.sizes(80, dtype) == gated_linear.sizes(128, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_initial_state(kind: str, way: str) -> None:
    spans = Spans.of((20, 0, 5))
    given, _ = inputs(spans, 2, 2, 8, 5, kind)
    check(spans, given, None, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_strides_of_any_kind(kind: str) -> None:
    """Slices of a wider projection, heads first, every second channel, a decay that all tokens share."""
    spans = Spans.of((18, 4))
    (q, k, v, g), initial = inputs(spans, 2, 4, 12, 10, kind)
    wide = torch.full((22, 200), torch.nan)
    wide[:, 5:29] = q.flatten(1)
    heads_first = k.transpose(0, 1).contiguous().transpose(0, 1)
    channels = torch.full((22, 4, 20), torch.nan)
    channels[..., ::2] = v
    decay = None if g is None else g[:1].clone().expand_as(g)
    turned = initial.mT.contiguous().mT
    given = [wide[:, 5:29].unflatten(1, (2, 12)), heads_first, channels[..., ::2], decay]
    assert not any(x.is_contiguous() for x in given if x is not None)
    check(spans, given, turned, torch.float32)


def test_a_small_decay_survives_beside_a_huge_one() -> None:
    n = 40
    g = torch.full((n, 1), -1e-3)
    g[0] = -1e4
    one = torch.ones(n, 1, 1)
    for decay in (g, g[..., None]):
        o, _ = scan(one, one, one, decay, None, Spans.of([n]))
        want, _ = loop(one, one, one, decay, None, Spans.of([n]), 1.0)
        close(o, want)


@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_all_minus_infinity_forgets_everything(kind: str, way: str) -> None:
    spans = Spans.of((35,))
    (q, k, v, g), initial = inputs(spans, 1, 2, 8, 5, kind)
    check(spans, [q, k, v, torch.full_like(g, -torch.inf)], initial, torch.float32)


def test_float16_states_may_leave_its_range() -> None:
    """A sum over tokens beyond 65504 is still read: in float16 it would be infinite."""
    spans = Spans.of((40,))
    q, k = torch.full((40, 1, 4), 0.001), torch.full((40, 1, 4), 100.0)
    v = torch.full((40, 1, 3), 100.0)
    given: list[Any] = [q.half(), k.half(), v.half(), None]
    _, final = scan(*given, None, spans)
    assert float(final.max()) > 65504
    check(spans, given, None, torch.float16)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_several_dtypes_are_computed_in_float32(kind: str) -> None:
    spans = Spans.of((20,))
    (q, k, v, g), initial = inputs(spans, 1, 2, 8, 5, kind)
    check(spans, [q.bfloat16(), k, v, g], initial, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_change_nothing(kind: str, way: str) -> None:
    spans = Spans.of((5, 20, 3))
    given, initial = inputs(spans, 1, 1, 8, 5, kind)
    own, other = spans.slices()[1], [None if x is None else x.flip(0) for x in given]
    for mine, theirs in zip(given, other, strict=True):
        if theirs is not None:
            theirs[own] = mine[own]
    start = initial.flip(0)
    start[1] = initial[1]
    o, final = scan(*given, initial, spans)
    p, last = scan(*other, start, spans)
    assert torch.equal(o[own], p[own]) and torch.equal(final[1], last[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(20, 0), (0, 0), (1, 1)])
def test_scans_are_pure(lengths: tuple[int, ...], kind: str, way: str) -> None:
    spans = Spans.of(lengths)
    given, initial = inputs(spans, 1, 2, 8, 5, kind)
    before = [x.clone() for x in (*given, initial) if x is not None]
    scan(*given, initial, spans)[1].fill_(torch.nan)
    after = [x for x in (*given, initial) if x is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_steps_equal_the_loop(dtype: torch.dtype, kind: str) -> None:
    """In one launch each, on a state that is every second slot of a pool and lies keys last."""
    spans = Spans.of([5, 5, 5])
    given, initial = inputs(spans, 2, 4, 20, 24, kind, dtype)
    want, last = loop(*given, initial, spans, 0.3)
    held = torch.zeros(6, 4, 24, 20)
    state = held[1::2].mT
    state.copy_(initial)
    for t in range(5):
        with launches() as made:
            o = step(*(None if x is None else x[t::5] for x in given), state, scale=0.3)
        assert [(one.kernel, one.grid) for one in made] == [("linear_step", (12,))] and o.dtype == dtype
        close(o, want[t::5], dtype)
    close(state, last)
    assert not held[::2].any()


@pytest.mark.parametrize(("dk", "dv"), [(256, 256), (100, 300), (3, 1)])
def test_a_step_of_heads_that_one_program_does_not_hold(dk: int, dv: int) -> None:
    spans = Spans.of([1, 1])
    given, initial = inputs(spans, 1, 1, dk, dv, "scalar")
    want, last = loop(*given, initial, spans, 1.0)
    close(step(*given, initial), want)
    close(initial, last)


def test_what_a_step_does_on_the_way() -> None:
    """Values scaled first, and a share of the unscaled ones in the output."""
    spans = Spans.of([1, 1, 1])
    (q, k, v, g), state = inputs(spans, 2, 4, 8, 5, "scalar")
    scales, skip = hostile.normal(3, 4, seed=20), hostile.normal(4, seed=21)
    want, last = loop(q, k, v * scales[..., None], g, state, spans, 0.5)
    o = torch.empty(3, 20)
    step_to(q, k, v, g, state, o, 0.5, v_scale=scales, skip=skip)()
    close(o.view(3, 4, 5), want + skip[:, None].double() * v.double())
    close(state, last)


@pytest.mark.parametrize("kind", KINDS)
def test_what_kernels_do_not_serve_is_the_chunked_form_s(kind: str) -> None:
    """Gradients, float64, and keys wider than 256: no kernel runs, and the answer is the chunked form's."""
    spans = Spans.of((20, 3))
    (q, k, v, g), initial = inputs(spans, 1, 2, 8, 5, kind)
    wide, start = inputs(spans, 1, 1, 257, 2, kind)
    calls = [
        ([q.requires_grad_(), k, v, g], initial),
        ([q.detach().double(), k, v, g], initial),
        (wide, start),
    ]
    for given, state in calls:
        with launches() as made:
            o, final = scan(*given, state, spans)
        want, last = select("torch").gated_linear_scan(*given, state, spans)
        assert not made and torch.equal(o, want) and torch.equal(final, last)
    scan(q, k, v, g, initial, spans)[0].sum().backward()
    assert q.grad is not None and bool(q.grad.any())


def test_bad_input_is_refused_as_everywhere() -> None:
    spans = Spans.of([3])
    (q, k, v, g), initial = inputs(spans, 2, 4, 8, 5, "scalar")
    for name in ("triton", "torch"):
        ops = select(name)
        with pytest.raises(ValueError, match="3 value heads cannot share 2 key heads"):
            ops.gated_linear_scan(q, k, v[:, :3], g[:, :3], None, spans)
        with pytest.raises(ValueError, match="never positive"):
            ops.gated_linear_scan(q, k, v, -g, initial, spans, checked=True)
        with pytest.raises(ValueError, match="swapped"):
            ops.gated_linear_scan(q, k, v, g, initial.mT, spans)
        with pytest.raises(ValueError, match="spans hold 4 tokens"):
            ops.gated_linear_scan(q, k, v, g, initial, Spans.of([4]))
        with pytest.raises(ValueError, match=r"log_decay is \(3, 2\)"):
            ops.gated_linear_scan(q, k, v, g[:, :2], initial, spans)
        with pytest.raises(ValueError, match="float32 state"):
            ops.gated_linear_step(q, k, v, g, initial.expand(3, -1, -1, -1).bfloat16())


def test_a_cpu_tensor_is_refused_where_nothing_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    spans = Spans.of([3])
    given, initial = inputs(spans, 2, 4, 8, 5, "scalar")
    with pytest.raises(ValueError, match="a tensor on cpu was given to a Triton kernel; one on a GPU"):
        scan(*given, initial, spans)


@pytest.mark.parametrize("kind", KINDS)
def test_the_operators_are_registered_as_pytorch_wants(kind: str) -> None:
    spans = Spans.of([3, 18])
    given, initial = inputs(spans, 1, 2, 8, 5, kind)
    tiles = spans.tiles(16)
    cut = (tiles.first, tiles.row, tiles.start)
    here = cut if kind == "vector" else (None, None, None)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for pieces, length in (((None, None, None), 0), (cut, 16)):
        arguments = (*given, initial, spans.cu, *here, *pieces, length, 1.0)
        torch.library.opcheck(gated_linear._scan, arguments, test_utils=checks)
    one = [None if x is None else x[:2] for x in given]
    torch.library.opcheck(gated_linear._step, (*one, initial, 1.0), test_utils=checks)
