"""The gated delta scan and step against a float64 loop, on hostile decays, lengths, packings and heads.

The loop is the recurrence as the paper writes it, and its gradients are autograd's. Keys are of unit length
and beta reaches 2 (negative eigenvalues), the edge of what is stable. Decays are a head's (Gated DeltaNet) or
a channel's (Kimi Delta Attention).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from constate.kernels import reference
from constate.kernels.chunked import gated_delta, segments
from constate.kernels.chunked.gated_delta import gated_delta_scan, gated_delta_step
from constate.spans import Spans
from tests.kernels import hostile
from tests.kernels.memory import peak_bytes

SCALE = 0.3
OPS = {"chunked": gated_delta, "reference": reference}
DIMS = ((8, 12), (40, 8), (16, 72))  # the last two take the larger tile
either = pytest.mark.parametrize("vector", [False, True], ids=["a head", "a channel"])


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def draw(
    lengths: Sequence[int],
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = DIMS[0],
    seed: int = 0,
    *,
    vector: bool = False,
) -> tuple[Inputs, Tensor, Spans]:
    (hk, h), (dk, dv), spans = heads, dims, Spans.of(lengths)
    n = spans.total
    q, k = (hostile.normal(n, hk, dk, seed=seed + i) for i in range(2))
    v, g = hostile.normal(n, h, dv, seed=seed + 2), hostile.log_decays(n, h, *[dk] * vector, seed=seed + 3)
    beta = 2 * torch.rand(n, h, generator=hostile.generator(seed + 5))
    initial = hostile.normal(spans.rows, h, dk, dv, seed=seed + 6)
    return Inputs(q, normalize(k, dim=-1) * 0.9999, v, g, beta), initial, spans


def loop(x: Inputs, initial: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
    """The equation in float64, token by token."""
    q, k, v, g, beta = (y.double() for y in x)
    q, k = (y.repeat_interleave(v.shape[1] // y.shape[1], 1) for y in (q, k))
    outputs, finals = [], []
    for row, part in enumerate(spans.slices()):
        s = initial[row].double()
        for t in range(part.start, part.stop):
            s = g[t].exp().view(v.shape[1], -1, 1) * s
            error = v[t] - torch.einsum("hkv,hk->hv", s, k[t])
            s = s + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
            outputs.append(SCALE * torch.einsum("hkv,hk->hv", s, q[t]))
        finals.append(s)
    return torch.stack(outputs) if outputs else v, torch.stack(finals)


def scan(x: Inputs, initial: Tensor | None, spans: Spans, module: Any = gated_delta) -> tuple[Tensor, Tensor]:
    return module.gated_delta_scan(*x, initial, spans, scale=SCALE, checked=True)


def step(x: Inputs, state: Tensor, module: Any = gated_delta) -> Tensor:
    return module.gated_delta_step(*x, state, scale=SCALE)


def check(x: Inputs, initial: Tensor, spans: Spans, run: Callable[..., tuple[Tensor, Tensor]] = scan) -> None:
    (o, final), (want, last) = run(x, initial, spans), loop(x, initial, spans)
    hostile.assert_output(o, want)
    hostile.assert_state(final, last)
    assert final.dtype == torch.float32


@either
@pytest.mark.parametrize("heads", hostile.HEADS)
@pytest.mark.parametrize("length", sorted({*hostile.LENGTHS, 2, 31, 32, 33}))
def test_one_row(length: int, heads: tuple[int, int], vector: bool) -> None:
    check(*draw([length], heads, vector=vector))


@either
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("lengths", [*hostile.PACKS, (40, 40, 40)])
def test_packed(lengths: tuple[int, ...], dims: tuple[int, int], vector: bool) -> None:
    check(*draw(lengths, dims=dims, vector=vector))


@either
@pytest.mark.parametrize("lengths", hostile.PACKS)
def test_the_reference_is_the_same_op(lengths: tuple[int, ...], vector: bool) -> None:
    check(*draw(lengths, vector=vector), run=lambda x, initial, spans: scan(x, initial, spans, reference))


@either
@pytest.mark.parametrize("lengths", [(200,), (70, 70), (130, 0, 1, 65)])
def test_segments_of_one_level(
    lengths: tuple[int, ...], vector: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "BUDGET", 1)
    check(*draw(lengths, vector=vector))


@pytest.mark.parametrize("lengths", [(0, 0), (0, 3)])
def test_an_empty_span_hands_on_a_copy_of_its_state(lengths: tuple[int, int]) -> None:
    x, initial, spans = draw(lengths)
    before = initial.clone()
    _, final = scan(x, initial, spans)
    assert torch.equal(final[0], initial[0])
    final += 1  # as a step would
    assert torch.equal(initial, before)


@pytest.mark.parametrize("decay", [*hostile.LOG_DECAYS, None])
def test_one_decay_everywhere(decay: float | None) -> None:
    """0 and None are DeltaNet, -inf leaves scale (q . k) beta v; no initial state is zeros."""
    x, initial, spans = draw([130, 3])
    x = x._replace(g=torch.full_like(x.g, decay or 0.0))
    q, k, v, g, beta = x
    o, final = gated_delta_scan(q, k, v, None if decay is None else g, beta, None, spans, scale=SCALE)
    want, last = loop(x, torch.zeros_like(initial), spans)
    hostile.assert_output(o, want)
    hostile.assert_state(final, last)
    if decay == -torch.inf:
        read = (q.double() * k.double()).sum(-1).repeat_interleave(2, 1) * beta * SCALE
        hostile.assert_output(o, read[..., None] * v)


@pytest.mark.parametrize("op", OPS)
def test_one_decay_for_all_channels_is_a_head_s(op: str) -> None:
    x, initial, spans = draw([70, 1, 33])
    spread = x._replace(g=x.g[..., None].expand(-1, -1, 8))
    (o, final), (want, last) = scan(spread, initial, spans, OPS[op]), scan(x, initial, spans, OPS[op])
    hostile.assert_output(o, want)
    hostile.assert_state(final, last)


def test_the_check_sees_decays_of_other_channels() -> None:
    """The bounds of this file are red for decays rolled by a channel, or meaned to one a head."""
    x, initial, spans = draw([33], vector=True)
    for wrong in (x.g.roll(1, -1), x.g.exp().mean(-1).log()):
        with pytest.raises(AssertionError, match="off by"):
            check(x, initial, spans, run=lambda x, s, p, g=wrong: scan(x._replace(g=g), s, p))


@either
def test_a_small_decay_survives_beside_a_huge_one(vector: bool) -> None:
    """After -1e4 a float32 prefix sum moves in steps of 1e-3, and -3e-4 a token is lost."""
    x, initial, spans = draw([32], vector=vector)
    g = torch.full_like(x.g, -3e-4)
    g[0] = -1e4
    q, k, v = x.q.abs(), x.k.abs(), x.v.abs()
    x = Inputs(q, k, v, g, torch.full_like(x.beta, 1e-3))  # little is erased: what decays, decays by g
    (o, final), (want, last) = scan(x, initial, spans), loop(x, initial, spans)
    assert float(((o - want).abs() / want).max()) < 1e-5
    assert float(((final - last).abs() / last).max()) < 1e-5


def gradients(x: Inputs, initial: Tensor, run: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Of a weighting of (o, final) in which every entry counts differently."""
    leaves = [y.clone().requires_grad_() for y in (*x, initial)]
    o, final = run(Inputs(*leaves[:-1]), leaves[-1])
    weights = (hostile.normal(*y.shape, seed=70 + i).double() for i, y in enumerate((o, final)))
    torch.stack([(y * w).sum() for y, w in zip((o, final), weights, strict=True)]).sum().backward()
    assert all(y.grad is not None for y in leaves)
    return [y.grad for y in leaves if y.grad is not None]


def same_gradients(got: list[Tensor], want: list[Tensor]) -> None:
    for name, mine, theirs in zip((*Inputs._fields, "initial"), got, want, strict=True):
        hostile.assert_gradient(mine, theirs, f"gradient of {name}")


@either
@pytest.mark.parametrize("dims", DIMS[:2])
@pytest.mark.parametrize("heads", hostile.HEADS)
@pytest.mark.parametrize("lengths", [(65,), (33, 33), (1, 40, 0, 17), (1, 1)])
def test_gradients(
    lengths: tuple[int, ...], heads: tuple[int, int], dims: tuple[int, int], vector: bool
) -> None:
    x, initial, spans = draw(lengths, heads, dims, vector=vector)
    got, want = (gradients(x, initial, lambda x, s, run=run: run(x, s, spans)) for run in (scan, loop))
    same_gradients(got, want)


@either
@pytest.mark.parametrize("cuts", [(1, 2), (15, 16, 17), (63, 65, 100), (32, 33, 96)])
def test_pieces_equal_the_whole(cuts: tuple[int, ...], vector: bool) -> None:
    """Outputs, states and gradients of a sequence cut anywhere, an empty piece included."""
    x, initial, spans = draw([130], vector=vector)

    def pieces(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for a, b in pairwise((0, 0, *cuts, 130)):
            o, state = scan(Inputs(*(y[a:b] for y in x)), state, Spans.of([b - a]))
            outputs.append(o)
        return torch.cat(outputs), state

    (o, final), (want, last) = pieces(x, initial), scan(x, initial, spans)
    hostile.assert_output(o, want)
    hostile.assert_state(final, last)
    same_gradients(gradients(x, initial, pieces), gradients(x, initial, lambda x, s: scan(x, s, spans)))


@either
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_steps_equal_the_scan(length: int, op: str, vector: bool) -> None:
    rows = 2 if op == "chunked" else 1
    x, initial, spans = draw([length] * rows, vector=vector)
    want, last = scan(x, initial, spans)
    held = torch.full((2 * rows, 4, 9, 12), torch.nan)
    state = held[::2, :, :8]  # every second slot of a pool, and not all of a slot: a view with holes
    state.copy_(initial)
    for t in range(length):
        o = step(Inputs(*(y[t::length] for y in x)), state, OPS[op])
        hostile.assert_output(o, want[t::length])
    hostile.assert_state(state, last)
    assert held[1::2].isnan().all() and held[:, :, 8:].isnan().all(), "written beside the state"


def test_a_step_without_decay() -> None:
    (q, k, v, g, beta), state, spans = draw([1, 1, 1])
    want, last = loop(Inputs(q, k, v, torch.zeros_like(g), beta), state, spans)
    hostile.assert_output(gated_delta_step(q, k, v, None, beta, state, scale=SCALE), want)
    hostile.assert_state(state, last)


@either
@pytest.mark.parametrize("lengths", [(17, 64, 40), (40, 40, 40), (1, 70, 1), (0, 1, 33)])
def test_neighbours_change_nothing(lengths: tuple[int, ...], vector: bool) -> None:
    x, initial, spans = draw(lengths, vector=vector)
    other, start, _ = draw(lengths, seed=50, vector=vector)
    own = spans.slices()[1]
    start[1] = initial[1]
    for mine, theirs in zip(x, other, strict=True):
        theirs[own] = mine[own]
    (o, final), (p, last) = scan(x, initial, spans), scan(other, start, spans)
    assert torch.equal(o[own], p[own]) and torch.equal(final[1], last[1])
    assert not torch.equal(o, p)


@either
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_computed_in_float32(dtype: torch.dtype, vector: bool) -> None:
    x, initial, spans = draw([70, 1, 9], vector=vector)
    x = Inputs(*(y.to(dtype) for y in x))
    (o, final), (want, last) = scan(x, initial, spans), loop(x, initial, spans)
    assert o.dtype == dtype and final.dtype == torch.float32
    hostile.assert_state(final, last)
    assert float((o.double() - want).abs().max()) <= torch.finfo(dtype).eps * float(want.abs().max())
    assert step(Inputs(*(y[:3] for y in x)), initial).dtype == dtype


@either
def test_inputs_are_left_alone(vector: bool) -> None:
    x, initial, spans = draw([69, 1], vector=vector)
    before = [y.clone() for y in (*x, initial)]
    scan(x, initial, spans)
    gradients(x, initial, lambda x, s: scan(x, s, spans))
    assert all(torch.equal(a, b) for a, b in zip((*x, initial), before, strict=True))


@either
@pytest.mark.parametrize("graded", [False, True])
def test_memory_is_linear(graded: bool, vector: bool) -> None:
    peaks = []
    for n in (2048, 4096):
        x, _, spans = draw([n], (1, 2), vector=vector)
        x = Inputs(*(y.requires_grad_(graded) for y in x))
        peaks.append(peak_bytes(lambda x=x, spans=spans: scan(x, None, spans)))
    assert peaks[0] > 0 and peaks[1] <= 2.2 * peaks[0]
    assert peaks[1] < 4096 * 4096 * 4


@pytest.mark.parametrize("op", OPS)
def test_bad_input_is_refused(op: str) -> None:
    run, once = OPS[op].gated_delta_scan, OPS[op].gated_delta_step
    (q, k, v, g, beta), initial, spans = draw([3])
    with pytest.raises(ValueError, match="3 value heads cannot share 2 key heads"):
        run(q, k, v[:, :3], g[:, :3], beta[:, :3], None, spans)
    with pytest.raises(ValueError, match="never positive"):
        run(q, k, v, g.abs(), beta, initial, spans, checked=True)
    with pytest.raises(ValueError, match="beta"):
        run(q, k, v, g, beta[:, :2], initial, spans)
    with pytest.raises(ValueError, match="spans hold 4 tokens"):
        run(q, k, v, g, beta, initial, Spans.of([4]))
    with pytest.raises(ValueError, match="swapped"):
        run(q, k, v, g, beta, initial.mT, spans)
    with pytest.raises(ValueError, match="log_decay"):
        run(q, k, v, g[:, :, None].expand(-1, -1, 7), beta, initial, spans)
    with pytest.raises(ValueError, match="never positive"):
        run(q, k, v, g[:, :, None].expand(-1, -1, 8).abs(), beta, initial, spans, checked=True)
    with pytest.raises(ValueError, match="log_decay"):
        once(q, k, v, g[:, :, None].expand(-1, -1, 12), beta, initial)
    with pytest.raises(ValueError, match=r"state|initial"):
        once(q, k, v, g, beta, initial)
