"""Attention's decode step, RMS norms and the int8 product as Triton kernels, in its interpreter, against
float64 formulas: pasts in one part and in several, odd head sizes, strides, places that nobody may read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from constate.core.int8 import quantised
from constate.kernels.triton import attention, linear, norms
from constate.kernels.triton.launch import launches
from tests.kernels import hostile
from tests.kernels.triton.near import DTYPES, guarded, names, near, untouched

# -- attention -----------------------------------------------------------------------------------------

HEADS = ((4, 2, 8, 5), (3, 3, 100, 16), (6, 1, 80, 48), (18, 1, 16, 33), (5, 1, 70, 64))  # h, hk, dk, dv
LENGTHS = (1, 70, 33)


def softmax(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float | None = None) -> Tensor:
    """A row and a head at a time, in float64."""
    group, rows = q.shape[1] // k.shape[2], []
    factor = q.shape[2] ** -0.5 if scale is None else scale
    for row, length in enumerate(lengths):
        heads = []
        for head in range(q.shape[1]):
            scores = factor * (k[row, :length, head // group].double() @ q[row, head].double())
            weights = (scores - scores.max()).exp()
            heads.append(weights @ v[row, :length, head // group].double() / weights.sum())
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def draw(
    sizes: tuple[int, ...], lengths: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k and v, of which nothing behind a row's length is a number."""
    (h, hk, dk, dv), rows, capacity = sizes, len(lengths), max(lengths) + 3
    q = hostile.normal(rows, h, dk, seed=1, scale=3.0)
    k, v = (hostile.normal(rows, capacity, hk, d, seed=2 + i) for i, d in enumerate((dk, dv)))
    for row, length in enumerate(lengths):
        k[row, length:], v[row, length:] = torch.nan, torch.nan
    return [x.to(dtype) for x in (q, k, v)]


def step(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], **options: float) -> Tensor:
    return attention.attention_step(q, k, v, torch.tensor(lengths), max(lengths), **options)


@pytest.mark.parametrize("shortest", [16, 128])
@pytest.mark.parametrize("sizes", HEADS)
def test_attention(sizes: tuple[int, ...], shortest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SHORTEST", shortest)
    for dtype in DTYPES[: 2 if sizes == HEADS[0] else 1]:
        q, k, v = draw(sizes, LENGTHS, dtype)
        with launches() as made:
            o = step(q, k, v, LENGTHS)
        assert names(made) == ["attend_one"] and made[0].grid[2] == (4 if shortest == 16 else 1)
        near(o, softmax(q, k, v, LENGTHS), dtype)
        assert o.dtype == dtype


def test_attention_over_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are a slice of the keys, both wider than a head ever is; a scale of the caller's."""
    monkeypatch.setattr(attention, "SHORTEST", 16)
    q, kv, _ = draw((17, 1, 288, 8), (40, 9), torch.float32)
    near(step(q, kv, kv[..., :257], (40, 9), scale=0.05), softmax(q, kv, kv[..., :257], (40, 9), 0.05))


def test_attention_of_sharp_scores_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part's largest score is its own, and 1e3 may lie between: nothing overflows, nothing is lost."""
    monkeypatch.setattr(attention, "SHORTEST", 16)
    q, k, v = draw((2, 1, 16, 8), (65,))
    k[0, ::16] *= 300.0
    near(step(q, k, v, (65,)), softmax(q, k, v, (65,)))


def test_attention_where_it_lies_and_as_a_captured_step_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided buffers, into memory of the caller's; lengths of the device that are one behind, a ring that is
    full; scratch for a longer past than there is, left as it was found."""
    monkeypatch.setattr(attention, "SHORTEST", 16)
    q, k, v = (guarded(x)[0] for x in draw((4, 2, 8, 5), LENGTHS))
    o, pool = guarded(torch.zeros(3, 20))
    want = softmax(q, k, v, LENGTHS)
    o = pool[1::2, 1:21].unflatten(1, (4, 5))
    partial, arrived = attention.scratch(q, k, v, 1000)
    for _ in range(2):
        past = torch.tensor(LENGTHS) - 1
        attention.launch_step(q, k, v, past, o, partial, arrived, 1000, scale=8**-0.5, more=1)
        near(o, want)
        assert not arrived.any() and pool[::2].isnan().all() and pool[:, 0].isnan().all()
    whole = draw((4, 2, 8, 5), (73, 73, 73))
    k, v = (x[:, :73] for x in whole[1:])
    attention.launch_step(q, k, v, torch.full((3,), 500), o, partial, arrived, 73, scale=8**-0.5, more=1)
    near(o, softmax(q, k, v, (73, 73, 73)))


def test_a_place_too_many_is_seen() -> None:
    q, k, v = draw((4, 2, 8, 5), (9, 9))
    k, v = k.nan_to_num(0.0), v.nan_to_num(0.0)
    with pytest.raises(AssertionError, match="off by"):
        near(step(q, k, v, (10, 10)), softmax(q, k, v, (9, 9)))


# -- norms ---------------------------------------------------------------------------------------------


def normed(x: Tensor, weight: Tensor, groups: int, gate: Tensor | None, first: bool, sigmoid: bool) -> Tensor:
    x, factor = x.double(), torch.ones(()).double()
    if gate is not None:
        factor = 1 / (1 + (-gate.double()).exp())
        factor = factor if sigmoid else factor * gate.double()
    y = (x * factor if first else x).unflatten(-1, (groups, -1))
    y = (y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt()).flatten(-2) * weight.double()
    return y if first else y * factor


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((5, 100), 1),
        ((3, 4, 48), 1),
        ((7, 96), 4),
        ((2, 3, 2, 80), 2),
        ((1, 4001), 1),
        ((0, 7), 1),
        ((6, 1), 1),
    ],
)
def test_norms(shape: tuple[int, ...], groups: int) -> None:
    for i, dtype in enumerate(DTYPES):
        x, gate = (hostile.normal(*shape, seed=j, scale=3.0).to(dtype) for j in (1, 2))
        weight = hostile.normal(shape[-1], seed=3)
        lain = guarded(x)[0] if x.ndim > 1 else x
        for given, first, sigmoid in ((None, False, False), (gate, i == 0, i == 1), (gate, i == 1, i == 2)):
            with launches() as made:
                options = {"gate": given, "groups": groups, "gate_first": first, "sigmoid": sigmoid}
                o = norms.rms_norm(lain, weight, 1e-3, **options)
            assert names(made) == (["gated_norm"] if x.numel() else []) and o.dtype == dtype
            near(o, normed(x, weight, groups, given, first, sigmoid), dtype)


# -- the int8 product ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "out"), [(1, 1), (64, 17), (130, 7), (257, 33)])
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_int8_product(rows: int, width: int, out: int) -> None:
    """Over widths that end within a group, and into every second column of a wider result."""
    weight, scales = quantised(hostile.normal(out, width, seed=1))
    x, bias = hostile.normal(rows, width, seed=2), hostile.normal(out, seed=3)
    meant = torch.stack([weight[:, i].double() * scales[:, i // 64].double() for i in range(width)], 1)
    want = torch.einsum("rk,nk->rn", x.double(), meant)
    with launches() as made:
        y = linear.linear(x, weight, bias, scales)
        wide, pool = guarded(torch.zeros(rows, out))
        apart = torch.zeros(2 * out, 2 * width, dtype=torch.int8)[::2, ::2].copy_(weight)
        linear.linear(guarded(x)[0], apart, None, scales, out=wide)
    assert names(made) == ["int8_rows"] * 2
    near(y, want + bias.double())
    near(wide, want)
    assert untouched(pool)


def test_many_rows_and_other_weights_are_pytorchs() -> None:
    weight, scales = quantised(hostile.normal(5, 70, seed=1))
    x = hostile.normal(linear.MOST + 1, 70, seed=2)
    with launches() as made:
        linear.linear(x, weight, None, scales)
        linear.linear(x[:1], weight.float())
    assert not made
