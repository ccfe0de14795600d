"""The gated linear scan and step against a float64 loop, on hostile decays, lengths, packings and heads."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.kernels import reference
from constate.kernels.chunked import gated_linear
from constate.spans import Spans
from tests.kernels import hostile
from tests.kernels.memory import peak_bytes

DK, DV = 8, 5
KINDS = ("scalar", "vector", "none")
OPS = {"chunked": gated_linear, "reference": reference}


def inputs(spans: Spans, hk: int, h: int, kind: str, seed: int = 0) -> tuple[list[Any], Tensor]:
    """[q, k, v, log_decay] and a random initial state."""
    n = spans.total
    decay = {
        "scalar": lambda: hostile.log_decays(n, h, seed=seed + 3),
        "vector": lambda: hostile.log_decays(n, h, DK, seed=seed + 3),
        "none": lambda: None,
    }[kind]()
    q, k = hostile.normal(n, hk, DK, seed=seed), hostile.normal(n, hk, DK, seed=seed + 1)
    return [q, k, hostile.normal(n, h, DV, seed=seed + 2), decay], hostile.normal(
        spans.rows, h, DK, DV, seed=9
    )


def loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial: Tensor | None, spans: Spans, scale: float
) -> tuple[Tensor, Tensor]:
    """The equation in float64, token by token."""
    h, hk = v.shape[1], q.shape[1]
    own = [j // (h // hk) for j in range(h)]
    q, k, v = q.double()[:, own], k.double()[:, own], v.double()
    outputs, finals, t = [], [], 0
    for row, length in enumerate(spans.lengths):
        s = torch.zeros(h, q.shape[2], v.shape[2]).double() if initial is None else initial[row].double()
        for _ in range(length):
            if g is not None:
                decay = g[t].double().exp()
                s = s * (decay[:, :, None] if g.ndim == 3 else decay[:, None, None])
            s = s + torch.einsum("hk,hv->hkv", k[t], v[t])
            outputs.append(scale * torch.einsum("hk,hkv->hv", q[t], s))
            t += 1
        finals.append(s)
    return torch.stack(outputs) if outputs else v.new_zeros(v.shape), torch.stack(finals)


def check(module, spans: Spans, hk: int, h: int, kind: str, scale: float = 0.3) -> None:
    (q, k, v, g), initial = inputs(spans, hk, h, kind)
    o, final = module.gated_linear_scan(q, k, v, g, initial, spans, scale=scale, checked=True)
    want, last = loop(q, k, v, g, initial, spans, scale)
    hostile.assert_output(o, want)
    hostile.assert_state(final, last)
    assert final.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hk", "h"), hostile.HEADS)
@pytest.mark.parametrize("length", hostile.LENGTHS)
def test_one_row(length, hk, h, kind):
    check(gated_linear, Spans.of([length]), hk, h, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", hostile.PACKS)
@pytest.mark.parametrize("op", OPS)
def test_packed(op, lengths, kind):
    check(OPS[op], Spans.of(lengths), 2, 4, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_wide_state_takes_the_long_tile(kind, monkeypatch):
    monkeypatch.setattr(gated_linear, "SMALL_STATE", 0)
    for lengths in ([130], [63, 64, 65], [200, 3]):
        check(gated_linear, Spans.of(lengths), 1, 3, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(200,), (70, 70), (130, 0, 1, 65)])
def test_segments_of_one_level(lengths, kind, monkeypatch):
    from constate.kernels.chunked import segments

    monkeypatch.setattr(segments, "BUDGET", 1)
    check(gated_linear, Spans.of(lengths), 2, 4, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_no_initial_state_is_zeros(kind):
    spans = Spans.of([20, 0, 5])
    (q, k, v, g), _ = inputs(spans, 2, 2, kind)
    o, final = gated_linear.gated_linear_scan(q, k, v, g, None, spans)
    want, last = loop(q, k, v, g, None, spans, 1.0)
    hostile.assert_output(o, want)
    hostile.assert_state(final, last)


@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_all_minus_infinity_forgets_everything(kind):
    spans = Spans.of([70, 3])
    (q, k, v, _), initial = inputs(spans, 2, 4, "none")
    g = torch.full((73, 4) if kind == "scalar" else (73, 4, DK), -torch.inf)
    o, _ = gated_linear.gated_linear_scan(q, k, v, g, initial, spans, scale=0.5)
    same = (q * k).sum(-1, dtype=torch.float64).repeat_interleave(2, 1)[..., None] * v.double() * 0.5
    hostile.assert_output(o, same)


@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_all_zero_is_a_cumulative_sum(kind):
    (q, k, v, _), _ = inputs(Spans.of([150]), 2, 2, "none")
    g = torch.zeros((150, 2) if kind == "scalar" else (150, 2, DK))
    o, final = gated_linear.gated_linear_scan(q, k, v, g, None, Spans.of([150]))
    sums = torch.einsum("nhk,nhv->nhkv", k.double(), v.double()).cumsum(0)
    hostile.assert_output(o, torch.einsum("nhk,nhkv->nhv", q.double(), sums))
    hostile.assert_state(final, sums[-1:])


def test_a_small_decay_survives_beside_a_huge_one():
    """A float32 prefix sum loses -1e-3 after -1e4 and fails this by 0.4."""
    n = 32
    g = torch.full((n, 1), -1e-3)
    g[0] = -1e4
    one = torch.ones(n, 1, 1)
    for decay in (g, g[..., None]):
        o, _ = gated_linear.gated_linear_scan(one, one, one, decay, None, Spans.of([n]))
        want = torch.tensor([sum(math.exp(-1e-3 * j) for j in range(t + 1)) for t in range(n)]).double()
        assert float((o.flatten() - want).abs().max()) < 1e-5


def leaves(tensors: list[Any]) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors if t is not None]


def losses(o: Tensor, final: Tensor) -> Tensor:
    """A sum with a different weight for every entry, so that no gradient is trivially right."""
    return (o.double() * hostile.normal(*o.shape, seed=77)).sum() + (
        final.double() * hostile.normal(*final.shape, seed=78)
    ).sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hk", "h"), hostile.HEADS)
@pytest.mark.parametrize("lengths", [(65,), (33, 33), (1, 40, 0, 17)])
def test_gradients_against_the_loop(lengths, hk, h, kind):
    spans = Spans.of(lengths)
    tensors, initial = inputs(spans, hk, h, kind)
    mine, theirs = leaves([*tensors, initial]), leaves([*tensors, initial])
    for wrt, fn in ((mine, gated_linear.gated_linear_scan), (theirs, None)):
        q, k, v, *g, start = wrt
        args = (q, k, v, g[0] if g else None, start, spans)
        losses(*(fn(*args, scale=0.3) if fn else loop(*args, 0.3))).backward()
    for name, got, want in zip("qkvgs" if kind != "none" else "qkvs", mine, theirs, strict=True):
        assert got.grad is not None and want.grad is not None
        hostile.assert_gradient(got.grad, want.grad, f"gradient of {name}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(1, 2), (15, 64), (63, 65, 100), (32, 33, 96)])
def test_pieces_equal_the_whole(cuts, kind):
    """Outputs, states and gradients of a sequence cut anywhere, an empty piece included."""
    tensors, initial = inputs(Spans.of([130]), 2, 4, kind)
    whole, parts = leaves([*tensors, initial]), leaves([*tensors, initial])

    q, k, v, *g, start = whole
    o, final = gated_linear.gated_linear_scan(q, k, v, g[0] if g else None, start, Spans.of([130]))
    losses(o, final).backward()

    q, k, v, *g, start = parts
    outputs, state, edges = [], start, (0, 0, *cuts, 130)
    for a, b in pairwise(edges):
        piece = gated_linear.gated_linear_scan(
            q[a:b], k[a:b], v[a:b], g[0][a:b] if g else None, state, Spans.of([b - a])
        )
        outputs.append(piece[0])
        state = piece[1]
    losses(torch.cat(outputs), state).backward()

    hostile.assert_output(torch.cat(outputs), o)
    hostile.assert_state(state, final)
    for name, a, b in zip("qkvgs" if kind != "none" else "qkvs", parts, whole, strict=True):
        assert a.grad is not None and b.grad is not None
        hostile.assert_gradient(a.grad, b.grad, f"gradient of {name}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(17, 64, 40), (40, 40, 40), (1, 70, 1)])
def test_neighbours_change_nothing(lengths, kind):
    spans = Spans.of(lengths)
    tensors, initial = inputs(spans, 2, 4, kind)
    own = spans.slices()[1]
    other, start = inputs(spans, 2, 4, kind, seed=50)
    start[1] = initial[1]
    for mine, theirs in zip(tensors, other, strict=True):
        if mine is not None and theirs is not None:
            theirs[own] = mine[own]
    o, final = gated_linear.gated_linear_scan(*tensors, initial=initial, spans=spans)
    p, last = gated_linear.gated_linear_scan(*other, initial=start, spans=spans)
    assert torch.equal(o[own], p[own]) and torch.equal(final[1], last[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_steps_equal_the_scan(op, kind):
    rows, steps = 3, 12
    spans = Spans.of([steps] * rows)
    (q, k, v, g), initial = inputs(spans, 2, 4, kind)
    want, last = loop(q, k, v, g, initial, spans, 0.3)
    held = torch.zeros(6, 4, DK, DV)
    state = held[1::2]  # every second slot of a pool: a view with holes
    state.copy_(initial)
    for t in range(steps):
        now = slice(t, None, steps)
        o = OPS[op].gated_linear_step(q[now], k[now], v[now], None if g is None else g[now], state, scale=0.3)
        hostile.assert_output(o, want[now])
    hostile.assert_state(state, last)
    assert not held[::2].any()


def test_an_accumulator_without_decay_is_exact():
    """Case F1: adding 1.0 stalls at 256 in bfloat16; a float32 state reaches 4096."""
    one = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    state = torch.zeros(1, 1, 1, 1)
    for _ in range(4096):
        gated_linear.gated_linear_step(one, one, one, torch.zeros(1, 1), state)
    assert state.item() == 4096.0
    many = torch.ones(4096, 1, 1, dtype=torch.bfloat16)
    for g in (None, torch.zeros(4096, 1), torch.zeros(4096, 1, 1)):
        _, final = gated_linear.gated_linear_scan(many, many, many, g, None, Spans.of([4096]))
        assert final.item() == 4096.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_inputs_are_computed_in_float32(kind, dtype):
    spans = Spans.of([70, 1, 9])
    (q, k, v, g), initial = inputs(spans, 2, 4, kind)
    q, k, v = (t.to(dtype) for t in (q, k, v))
    o, final = gated_linear.gated_linear_scan(q, k, v, g, initial, spans)
    want, last = loop(q, k, v, g, initial, spans, 1.0)
    assert o.dtype == dtype and final.dtype == torch.float32
    hostile.assert_state(final, last)
    assert float((o.double() - want).abs().max()) <= torch.finfo(dtype).eps * float(want.abs().max())


@pytest.mark.parametrize("op", OPS)
def test_bad_input_is_refused(op):
    scan, step = OPS[op].gated_linear_scan, OPS[op].gated_linear_step
    spans = Spans.of([3])
    (q, k, v, g), initial = inputs(spans, 2, 4, "scalar")
    assert g is not None
    with pytest.raises(ValueError, match="3 value heads cannot share 2 key heads"):
        scan(q, k, v[:, :3], g[:, :3], None, spans)
    with pytest.raises(ValueError, match="never positive"):
        scan(q, k, v, -g, initial, spans, checked=True)
    with pytest.raises(ValueError, match="never NaN"):
        scan(q, k, v, torch.full_like(g, torch.nan), initial, spans, checked=True)
    with pytest.raises(ValueError, match="swapped"):
        scan(q, k, v, g, initial.mT, spans)
    with pytest.raises(ValueError, match="spans hold 4 tokens"):
        scan(q, k, v, g, initial, Spans.of([4]))
    with pytest.raises(ValueError, match=r"log_decay is \(3, 2\)"):
        scan(q, k, v, g[:, :2], initial, spans)
    with pytest.raises(ValueError, match="initial"):
        scan(q, k, v, g, initial.expand(2, -1, -1, -1), spans)
    with pytest.raises(ValueError, match=r"state|initial"):
        step(q, k, v, g, initial, scale=1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(40,), (1, 1), (0, 0), (40, 0, 1)])
def test_scans_are_pure(lengths, kind):
    """Nothing given is written to, and what is returned is not the initial state itself."""
    spans = Spans.of(lengths)
    tensors, initial = inputs(spans, 2, 4, kind)
    before = [t.clone() for t in (*tensors, initial) if t is not None]
    _, final = gated_linear.gated_linear_scan(*tensors, initial=initial, spans=spans)
    final.fill_(torch.nan)
    after = [t for t in (*tensors, initial) if t is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_training_after_inference_mode(kind):
    """What a scan keeps between calls may be made in inference mode and is saved for backward later."""
    gated_linear._later.cache_clear()
    spans = Spans.of([40])
    tensors, initial = inputs(spans, 2, 2, kind)
    with torch.inference_mode():
        gated_linear.gated_linear_scan(*tensors, initial=initial, spans=spans)
    initial.requires_grad_()
    o, final = gated_linear.gated_linear_scan(*tensors, initial=initial, spans=Spans.of([40]))
    losses(o, final).backward()
    assert initial.grad is not None


def peak(tokens: int, kind: str) -> int:
    """Bytes that a scan holds at its peak above its inputs."""
    spans = Spans.of([tokens])
    (q, k, v, g), _ = inputs(spans, 4, 8, kind)
    with torch.no_grad():
        return peak_bytes(lambda: gated_linear.gated_linear_scan(q, k, v, g, None, spans))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_linear_and_mostly_the_output(kind):
    short, long = peak(1024, kind), peak(2048, kind)
    assert short > 0 and long / short <= 2.2
    assert long - short <= 1.2 * 1024 * 8 * DV * 4
