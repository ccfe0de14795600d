"""The delta rules as Triton kernels, in its interpreter, against the float64 loops of their ops' own tests:
the gated rule without a decay, with one a head and one a channel, and the diagonal plus low rank rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from constate.kernels.chunked import dplr_delta as chunked_dplr
from constate.kernels.chunked import gated_delta as chunked_gated
from constate.kernels.dispatch import select
from constate.kernels.triton import dplr_delta, gated_delta, launch
from constate.kernels.triton.gated_delta_parts import Sizes, sizes
from constate.kernels.triton.gated_delta_walk import walks_apart
from constate.kernels.triton.launch import launches
from constate.spans import Spans
from tests.kernels import test_dplr_delta, test_gated_delta

KINDS = ("none", "head", "channel", "lowrank")
PACKS = ((5, 0, 18, 1, 16), (1, 0, 1), (0, 0))
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
SCALE = 0.3
SMALL = Sizes(16, bk=32, bv=32, walked=32, tile_warps=4, walk_warps=4)

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(params=["one pass", "apart"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A card that the chains fill, and one that they do not."""
    for module in (gated_delta, dplr_delta):
        monkeypatch.setattr(module, "walks_apart", lambda *given: request.param == "apart")
    yield request.param


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 tokens for every class: borders everywhere, and the interpreter is quicker."""
    for module in (gated_delta, dplr_delta):
        monkeypatch.setattr(module, "sizes", lambda dk, dtype, decay: SMALL)


def draw(
    kind: str,
    lengths: tuple[int, ...],
    heads: tuple[int, int] = (1, 2),
    dims: tuple[int, int] = (20, 12),
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Any], Tensor, Spans]:
    """q, k, v of a dtype, then what the op has beside them, float32, and an initial state."""
    if kind == "lowrank":
        x, initial, spans = test_dplr_delta.draw(lengths, heads, dims)
    else:
        x, initial, spans = test_gated_delta.draw(lengths, heads, dims, vector=kind == "channel")
    q, k, v, g, *rest = x
    return [*(y.to(dtype) for y in (q, k, v)), None if kind == "none" else g, *rest], initial, spans


def loop(given: list[Any], initial: Tensor | None, spans: Spans) -> tuple[Tensor, Tensor]:
    """The op in float64, token by token."""
    q, k, v, g, *rest = given
    (n, h, dv), dk = v.shape, k.shape[2]
    start = torch.zeros(spans.rows, h, dk, dv) if initial is None else initial
    if len(rest) == 2:
        g = torch.zeros(n, h, dk) if g is None else g if g.ndim == 3 else g[..., None].expand(n, h, dk)
        x = test_dplr_delta.Inputs(q, k, v, g, *rest)
        return test_dplr_delta.loop(x, start, spans)
    x = test_gated_delta.Inputs(q, k, v, torch.zeros(n, h) if g is None else g, *rest)
    return test_gated_delta.loop(x, start, spans)


def scan(
    given: list[Any], initial: Tensor | None, spans: Spans, modules: Any = None
) -> tuple[Tensor, Tensor]:
    gated, dplr = modules or (gated_delta, dplr_delta)
    op: Any = dplr.dplr_delta_scan if len(given) == 6 else gated.gated_delta_scan
    return op(*given, initial, spans, scale=SCALE, checked=True)


def step(given: list[Any], state: Tensor) -> Tensor:
    op: Any = dplr_delta.dplr_delta_step if len(given) == 6 else gated_delta.gated_delta_step
    return op(*given, state, scale=SCALE)


def close(got: Tensor, want: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Within BOUNDS of the largest entry."""
    assert got.shape == want.shape and bool(torch.isfinite(got).all())
    worst = float((got.double() - want.double()).abs().max()) if want.numel() else 0.0
    assert worst <= BOUNDS[dtype] * (float(want.abs().max()) if want.numel() else 1.0), f"off by {worst}"


def check(given: list[Any], initial: Tensor | None, spans: Spans) -> list[str]:
    """The scan against the loop, as exact as v's dtype; the kernels that ran."""
    with launches() as made:
        o, final = scan(given, initial, spans)
    want, last = loop(given, initial, spans)
    dtype = given[2].dtype
    assert o.dtype == dtype and final.dtype == torch.float32
    close(o, want, dtype)
    close(final, last, dtype)
    return [one.kernel for one in made]


@every_kind
@pytest.mark.parametrize("lengths", PACKS)
def test_packed_rows(lengths: tuple[int, ...], kind: str, way: str) -> None:
    ran = check(*draw(kind, lengths))
    prepared = "delta_tiles" if kind in ("none", "head") else "vector_tiles"
    tiles = [prepared] if sum(lengths) else []
    outputs = ["delta_outputs"] if way == "apart" and sum(lengths) else []
    assert ran == [*tiles, "delta_walk", *outputs]


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, kind: str, way: str) -> None:
    check(*draw(kind, (21, 0, 34), heads=(1, 1), dims=(20, 24), dtype=dtype))


@every_kind
@pytest.mark.parametrize("dims", [(16, 16), (48, 65), (80, 48), (96, 100), (256, 256), (1, 1)])
def test_head_sizes(dims: tuple[int, int], kind: str) -> None:
    check(*draw(kind, (19,), heads=(1, 1), dims=dims))


@every_kind
@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_tiles_of_the_table(dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes that a GPU takes, not the small ones of the other tests."""
    monkeypatch.undo()
    check(*draw(kind, (67, 3), heads=(1, 1), dims=(36, 34), dtype=dtype))


def test_sizes_know_classes_alone() -> None:
    for dtype in BOUNDS:
        for decay in ("head", "channel", "lowrank"):
            assert sizes(80, dtype, decay) == sizes(128, dtype, decay)


def test_what_walks_in_one_pass() -> None:
    """Few long chains walk apart from their outputs; many, or chains of two tiles, do both at once."""
    device = torch.device("cpu")  # passes for a card of 132 multiprocessors
    assert walks_apart(1, 4, 64, 100, SMALL, device)
    assert not walks_apart(64, 4, 64, 100, SMALL, device)
    assert not walks_apart(1, 4, 64, 2, SMALL, device)


@every_kind
def test_without_an_initial_state(kind: str) -> None:
    given, _, spans = draw(kind, (20, 0, 5))
    check(given, None, spans)


@pytest.mark.parametrize("width", [None, "head"])
def test_the_low_rank_rule_takes_any_decay(width: str | None) -> None:
    given, initial, spans = draw("lowrank", (20, 3))
    given[3] = None if width is None else given[3][..., 0]
    check(given, initial, spans)


@every_kind
def test_strides_of_any_kind(kind: str) -> None:
    """Slices of a wider projection, heads first, every second channel, a decay that all tokens share."""
    given, initial, spans = draw(kind, (14, 4), heads=(2, 4), dims=(12, 10))
    q, k, v, g, *rest = given
    wide = torch.full((18, 200), torch.nan)
    wide[:, 5:29] = q.flatten(1)
    channels = torch.full((18, 4, 20), torch.nan)
    channels[..., ::2] = v
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, *rest)]
    decay = None if g is None else g[:1].clone().expand_as(g)
    given = [wide[:, 5:29].unflatten(1, (2, 12)), turned[0], channels[..., ::2], decay, *turned[1:]]
    assert not any(x.is_contiguous() for x in given if x is not None)
    check(given, initial.mT.contiguous().mT, spans)


@pytest.mark.parametrize("kind", ["none", "channel"])
def test_equal_keys_that_negate(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terms of a power series for the inverse would reach 1e8 here, and its entries are 2 at most."""
    monkeypatch.undo()
    (q, k, v, g, beta), initial, spans = draw(kind, (32,), heads=(1, 1), dims=(16, 16))
    k = torch.zeros_like(k)
    k[..., 3] = 1
    g = None if g is None else torch.zeros_like(g)
    check([q, k, v, g, torch.full_like(beta, 2.0)], initial, spans)


@pytest.mark.parametrize("kind", ["none", "channel"])
def test_bfloat16_hides_tf32(kind: str, monkeypatch: pytest.MonkeyPatch, tf32: list[int]) -> None:
    """In bfloat16 a tile's inverse is made of TF32 products, on keys so alike that its system is full. The
    interpreter is made to round as they do, and the error stays near what bfloat16 alone makes."""
    monkeypatch.undo()
    (q, k, v, g, beta), initial, spans = draw(kind, (64,), (1, 1), (16, 16), torch.bfloat16)
    k = normalize(k[:1].float() + 0.5 * k.float(), dim=-1).bfloat16()
    given = [q, k, v, None if g is None else torch.full_like(g, -0.01), beta * 0.9]
    want = loop(given, initial, spans)

    def errors() -> list[float]:
        pairs = zip(scan(given, initial, spans), want, strict=True)
        return [float((got.double() - right).norm() / right.norm()) for got, right in pairs]

    alone = errors()
    _round_products(monkeypatch, tf32)
    both = errors()
    assert sum(tf32) and both != alone
    assert all(a < 1.25 * b < 1.25e-2 for a, b in zip(both, alone, strict=True)), (both, alone)


@pytest.fixture
def tf32() -> list[int]:
    """How many products were rounded."""
    return []


def _round_products(monkeypatch: pytest.MonkeyPatch, seen: list[int]) -> None:
    """From here on products of float32 see their operands in TF32: ten bits behind the first."""
    from triton.runtime import interpreter

    plain, handle = interpreter.InterpreterBuilder.create_dot, interpreter.TensorHandle

    def rounded(x: Any) -> Any:
        if x.dtype.scalar != interpreter.tl.float32:
            return x
        bits = np.ascontiguousarray(x.data, np.float32).view(np.uint32)
        return handle(((bits + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32), x.dtype)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        seen.append(a.dtype.scalar == interpreter.tl.float32)
        return plain(self, rounded(a), rounded(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("kind", ["head", "channel", "lowrank"])
def test_a_small_decay_survives_beside_a_huge_one(kind: str) -> None:
    """After -1e4 a float32 prefix sum moves in steps of 1e-3, and -3e-4 a token is lost."""
    (q, k, v, g, *rest), initial, spans = draw(kind, (40,), heads=(1, 1), dims=(8, 12))
    g = torch.full_like(g, -3e-4)
    g[0] = -1e4
    given = [q.abs(), k.abs(), v.abs(), g, *(x.abs() * 1e-3 for x in rest)]  # little erased: g alone decays
    (o, final), (want, last) = scan(given, initial, spans), loop(given, initial, spans)
    assert float(((o - want).abs() / want).max()) < 1e-5
    assert float(((final - last).abs() / last).max()) < 1e-5


@pytest.mark.parametrize("kind", ["head", "channel", "lowrank"])
def test_all_minus_infinity(kind: str) -> None:
    given, initial, spans = draw(kind, (35,), heads=(1, 1))
    given[3] = torch.full_like(given[3], -torch.inf)
    check(given, initial, spans)


@every_kind
def test_the_check_sees_faults(kind: str) -> None:
    """Red for a decay that is a token late, keys of the neighbour head, and a state that was left out."""
    given, initial, spans = draw(kind, (2, 17), heads=(2, 2), dims=(8, 6))
    want, last = loop(given, initial, spans)
    late = [x if i != 3 or x is None else x.roll(1, 0) for i, x in enumerate(given)]
    other = [x.flip(1) if i == 1 else x for i, x in enumerate(given)]
    wrong = [(other, initial), (given, None)] + ([] if kind == "none" else [(late, initial)])
    for x, start in wrong:
        o, final = scan(x, start, spans)
        for got, right in ((o, want), (final, last)):
            with pytest.raises(AssertionError, match="off by"):
                close(got, right)


@every_kind
def test_float16_states_may_leave_its_range(kind: str, way: str) -> None:
    """A state beyond 65504 is still read: in float16 it would be infinite."""
    given, initial, spans = draw(kind, (36,), heads=(1, 1), dims=(8, 6), dtype=torch.float16)
    given[3] = None if given[3] is None else torch.full_like(given[3], -1e-3)
    given[0], given[1] = given[0] * 1e-3, given[1] * 1e-3
    initial = initial * 1e5
    assert float(loop(given, initial, spans)[1].abs().max()) > 65504
    check(given, initial, spans)


@every_kind
def test_products_are_of_the_values_dtype(kind: str) -> None:
    """Models hand over q and k of unit length in float32 beside values in bfloat16."""
    given, initial, spans = draw(kind, (18,), heads=(1, 1))
    given[2] = given[2].bfloat16()
    check(given, initial, spans)
    given, initial, spans = draw(kind, (18,), heads=(1, 1), dtype=torch.bfloat16)
    given[2] = given[2].float()
    check(given, initial, spans)


@every_kind
def test_neighbours_change_nothing(kind: str, way: str) -> None:
    given, initial, spans = draw(kind, (3, 18, 2), dims=(8, 5))
    own, other = spans.slices()[1], [None if x is None else x.flip(0) for x in given]
    for mine, theirs in zip(given, other, strict=True):
        if theirs is not None:
            theirs[own] = mine[own]
    start = initial.flip(0)
    start[1] = initial[1]
    (o, final), (p, last) = scan(given, initial, spans), scan(other, start, spans)
    assert torch.equal(o[own], p[own]) and torch.equal(final[1], last[1])
    assert not torch.equal(o, p)


@every_kind
@pytest.mark.parametrize("lengths", [(20, 0), (0, 0), (1, 1)])
def test_scans_are_pure(lengths: tuple[int, ...], kind: str) -> None:
    given, initial, spans = draw(kind, lengths, dims=(8, 5))
    before = [x.clone() for x in (*given, initial) if x is not None]
    scan(given, initial, spans)[1].fill_(torch.nan)
    after = [x for x in (*given, initial) if x is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@every_kind
@pytest.mark.parametrize("dtype", BOUNDS)
def test_steps_equal_the_loop(dtype: torch.dtype, kind: str) -> None:
    """In one launch each, on a state that is every second slot of a pool and lies keys last."""
    given, initial, spans = draw(kind, (5, 5, 5), heads=(2, 4), dtype=dtype)
    want, last = loop(given, initial, spans)
    held = torch.zeros(6, 4, 12, 20)
    state = held[1::2].mT
    state.copy_(initial)
    for t in range(5):
        with launches() as made:
            o = step([None if x is None else x[t::5] for x in given], state)
        assert [(one.kernel, one.grid) for one in made] == [("delta_step", (12,))] and o.dtype == dtype
        close(o, want[t::5], dtype)
    close(state, last)
    assert not held[::2].any()


@every_kind
@pytest.mark.parametrize("dims", [(256, 256), (100, 300), (3, 1)])
def test_a_step_of_heads_that_one_program_does_not_hold(dims: tuple[int, int], kind: str) -> None:
    given, initial, spans = draw(kind, (1, 1), heads=(1, 1), dims=dims)
    want, last = loop(given, initial, spans)
    close(step(given, initial), want)
    close(initial, last)


@every_kind
def test_what_kernels_do_not_serve_is_the_chunked_form_s(kind: str) -> None:
    """Gradients, float64, and keys wider than 256: no kernel runs, and the answer is the chunked form's."""
    given, initial, spans = draw(kind, (20, 3), dims=(8, 5))
    wide, start, _ = draw(kind, (20, 3), dims=(257, 2))
    leaf = given[0].clone().requires_grad_()
    for x, state in (
        ([leaf, *given[1:]], initial),
        ([given[0].double(), *given[1:]], initial),
        (wide, start),
    ):
        with launches() as made:
            o, final = scan(x, state, spans)
        want, last = scan(x, state, spans, (chunked_gated, chunked_dplr))
        assert not made and torch.equal(o, want) and torch.equal(final, last)
    scan([leaf, *given[1:]], initial, spans)[0].sum().backward()
    assert leaf.grad is not None and bool(leaf.grad.any())
    with launches() as made:
        step([leaf[:2], *(None if x is None else x[:2] for x in given[1:])], initial)
    assert not made


def test_bad_input_is_refused_as_everywhere() -> None:
    (q, k, v, g, beta), initial, spans = draw("head", (3,), heads=(2, 4), dims=(8, 5))
    (_, _, _, w, a, b), _, _ = draw("lowrank", (3,), heads=(2, 4), dims=(8, 5))
    wide = initial.expand(3, -1, -1, -1)
    for name in ("triton", "torch"):
        ops = select(name)
        gated, low, once = ops.gated_delta_scan, ops.dplr_delta_scan, ops.gated_delta_step
        assert {ops.choices[op].backend for op in ("gated_delta_scan", "dplr_delta_step")} == {name}
        for match, call in (
            ("3 value heads cannot share 2", (gated, q, k, v[:, :3], g[:, :3], beta[:, :3], None, spans)),
            ("beta", (gated, q, k, v, g, beta[:, :2], initial, spans)),
            ("swapped", (gated, q, k, v, g, beta, initial.mT, spans)),
            ("spans hold 4 tokens", (gated, q, k, v, g, beta, initial, Spans.of([4]))),
            (r"log_decay is \(3, 2\)", (gated, q, k, v, g[:, :2], beta, initial, spans)),
            ("float32 state", (once, q, k, v, g, beta, wide.half())),
            ("a is", (low, q, k, v, w, a[:, :2], b, initial, spans)),
            ("b is", (low, q, k, v, w, a, b[..., :2], initial, spans)),
        ):
            with pytest.raises(ValueError, match=match):
                call[0](*call[1:])
        with pytest.raises(ValueError, match="never positive"):
            gated(q, k, v, -g, beta, initial, spans, checked=True)
        with pytest.raises(ValueError, match="never positive"):
            low(q, k, v, -w, a, b, initial, spans, checked=True)


@every_kind
def test_a_cpu_tensor_is_refused_where_nothing_is_interpreted(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    given, initial, spans = draw(kind, (1,))
    for call in (lambda: scan(given, initial, spans), lambda: step(given, initial)):
        with pytest.raises(ValueError, match="a tensor on cpu was given to a Triton kernel; one on a GPU"):
            call()


@pytest.mark.parametrize("kind", ["head", "lowrank"])
def test_the_operators_are_registered_as_pytorch_wants(kind: str) -> None:
    given, initial, spans = draw(kind, (3, 17), heads=(1, 1))
    module, cut = dplr_delta if kind == "lowrank" else gated_delta, spans.tiles(16)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    places = (spans.cu, cut.first, cut.row, cut.start)
    torch.library.opcheck(module._scan, (*given, initial, *places, 1.0, True), test_utils=checks)
    one = [None if x is None else x[:2] for x in given]
    torch.library.opcheck(module._step, (*one, initial, 1.0), test_utils=checks)
