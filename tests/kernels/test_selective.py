"""The selective scan and step against a float64 loop, on decays from 1 to underflow, lengths and packings.

`wide` stands for how many tiles a segment walks side by side: 1 walks one level at a time, 100 a few, and the
default all that these small states have. They are three ways through the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from constate.kernels import reference
from constate.kernels.chunked import segments, selective, selective_walk
from constate.spans import Spans
from tests.kernels import hostile
from tests.kernels.memory import peak_bytes

OPS = {"chunked": selective, "reference": reference}
WIDE = (1, 100, selective_walk.WIDE)
SIZES = ((6, 4), (1, 1), (5, 16))  # channels, s
PER_TOKEN = ("x", "dt", "b", "c", "z")


class Inputs(NamedTuple):
    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None

    def at(self, tokens: slice) -> Inputs:
        """The arguments of some of the tokens."""
        held = {name: getattr(self, name) for name in PER_TOKEN}
        return self._replace(**{name: y[tokens] for name, y in held.items() if y is not None})


def pick(values: tuple[float, ...], *shape: int, seed: int) -> Tensor:
    return torch.tensor(values)[torch.randint(len(values), shape, generator=hostile.generator(seed))]


def draw(
    lengths: tuple[int, ...], size: tuple[int, int] = SIZES[0], seed: int = 0
) -> tuple[Inputs, Tensor, Spans]:
    """Steps of 0 to 50 beside rates of 0 to 1e6: exp(delta a) is 1, 0 and much in between, in every tile."""
    (channels, s), spans = size, Spans.of(lengths)
    n = spans.total
    x, z = (hostile.normal(n, channels, seed=seed + i) for i in range(2))
    b, c = (hostile.normal(n, s, seed=seed + i) for i in range(2, 4))
    d, bias = (hostile.normal(channels, seed=seed + i) for i in range(4, 6))
    dt = pick((-200.0, -20.0, -8.0, -5.0, -3.0, -3.0, 0.0, 5.0, 50.0), n, channels, seed=seed + 6)
    a = pick((-0.0, -1e-6, -1e-2, -0.3, -1.0, -50.0, -1e4, -1e6), channels, s, seed=seed + 7)
    initial = hostile.normal(spans.rows, channels, s, seed=seed + 8)
    return Inputs(x, dt, a, b, c, d, z, bias), initial, spans


def loop(x: Inputs, initial: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
    """The equations in float64, token by token."""
    u, dt, a, b, c, d, z, bias = (None if y is None else y.double() for y in x)
    assert u is not None and dt is not None and a is not None and b is not None and c is not None
    delta = softplus(dt if bias is None else dt + bias)
    outputs, finals = [], []
    for row, part in enumerate(spans.slices()):
        h = initial[row].double()
        for t in range(part.start, part.stop):
            h = (delta[t][:, None] * a).exp() * h + (delta[t] * u[t])[:, None] * b[t]
            o = h @ c[t]
            o = o if d is None else o + d * u[t]
            outputs.append(o if z is None else o * silu(z[t]))
        finals.append(h)
    return torch.stack(outputs) if outputs else u, torch.stack(finals)


def scan(x: Inputs, initial: Tensor | None, spans: Spans, module: Any = selective) -> tuple[Tensor, Tensor]:
    *packed, d, z, bias = x
    return module.selective_scan(*packed, initial, spans, d=d, z=z, dt_bias=bias, checked=True)


def step(x: Inputs, state: Tensor, module: Any = selective) -> Tensor:
    *packed, d, z, bias = x
    return module.selective_step(*packed, state, d=d, z=z, dt_bias=bias)


def check(x: Inputs, initial: Tensor, spans: Spans, module: Any = selective) -> None:
    (o, final), (want, last) = scan(x, initial, spans, module), loop(x, initial, spans)
    hostile.assert_output(o, want)
    hostile.assert_state(final, last)
    assert final.dtype == torch.float32


def test_the_inputs_are_hostile() -> None:
    x, _, _ = draw((64,))
    assert x.dt_bias is not None
    decay = (softplus(x.dt + x.dt_bias)[..., None] * x.a).exp()
    for start in range(0, 64, 16):
        tile = decay[start : start + 16]
        assert (tile == 0).any() and (tile == 1).any() and ((tile > 0.02) & (tile < 0.98)).any()


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("length", sorted({*hostile.LENGTHS, 2, 31, 32, 33}))
def test_one_row(length: int, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective_walk, "WIDE", wide)
    for size in SIZES[: 1 if length > 70 else None]:
        check(*draw((length,), size))


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("lengths", [*hostile.PACKS, (40, 40, 40)])
def test_packed(lengths: tuple[int, ...], wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective_walk, "WIDE", wide)
    check(*draw(lengths))


@pytest.mark.parametrize("lengths", hostile.PACKS)
def test_the_reference_is_the_same_op(lengths: tuple[int, ...]) -> None:
    check(*draw(lengths), reference)


@pytest.mark.parametrize("lengths", [(70,), (20, 0, 1, 33)])
def test_short_tiles_where_one_step_is_a_budget(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (segments, selective_walk):
        monkeypatch.setattr(module, "BUDGET", 1)
    check(*draw(lengths))


@pytest.mark.parametrize("lengths", [(0, 0), (0, 3)])
def test_an_empty_span_hands_on_a_copy_of_its_state(lengths: tuple[int, int]) -> None:
    x, initial, spans = draw(lengths)
    before = initial.clone()
    _, final = scan(x, initial, spans)
    assert torch.equal(final[0], initial[0])
    final += 1  # as a step would
    assert torch.equal(initial, before)


@pytest.mark.parametrize("without", ["d", "z", "dt_bias"])
def test_what_may_be_left_out(without: str) -> None:
    x, initial, spans = draw((40, 1))
    x = x._replace(**{without: None})
    check(x, initial, spans)
    o, last = loop(x.at(slice(0, 2)), initial, Spans.ones(2))
    hostile.assert_output(step(x.at(slice(0, 2)), initial), o)
    hostile.assert_state(initial, last)


def test_no_initial_state_is_zeros() -> None:
    x, initial, spans = draw((40, 0, 1))
    (o, final), (want, last) = scan(x, None, spans), loop(x, torch.zeros_like(initial), spans)
    hostile.assert_output(o, want)
    hostile.assert_state(final, last)


@pytest.mark.parametrize("dt_bias", [None, 2.0])
def test_softplus_is_applied_once_and_nothing_clamps_it(dt_bias: float | None) -> None:
    """Case F3: a pre-activation of 5.0 is a step of 5.0067, not 5.0, not 0.1 and not softplus of 5.0067."""
    one, bias = torch.ones(3, 1), None if dt_bias is None else torch.tensor([dt_bias])
    dt = one * (5.0 - (dt_bias or 0.0))
    a, state = torch.tensor([[-0.5]]), torch.zeros(1, 1, 1)
    stepped = selective.selective_step(one[:1], dt[:1], a, one[:1], one[:1], state, dt_bias=bias)
    assert stepped.item() == pytest.approx(5.0067, abs=5e-5)
    o, _ = selective.selective_scan(one, dt, a, one, one, None, Spans.of([3]), dt_bias=bias)
    delta, kept = 5.006715, 0.081811  # log(1 + e^5), exp(-0.5 delta)
    assert o.flatten().tolist() == pytest.approx(
        [delta, delta * (1 + kept), delta * (1 + kept + kept**2)], rel=1e-5
    )


def test_an_exponent_beyond_float32_is_a_decay_of_zero() -> None:
    x, initial, spans = draw((40, 3))
    x = x._replace(a=torch.full_like(x.a, -1e38), dt=torch.full_like(x.dt, 50.0))
    check(x, initial, spans)
    assert all(y.isfinite().all() for y in gradients(x, initial, partial(scan, spans=spans)))


def gradients(x: Inputs, initial: Tensor, run: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Of a weighting of (o, final) in which every entry counts differently."""
    leaves = [y.clone().requires_grad_() for y in (*x, initial) if y is not None]
    o, final = run(Inputs(*leaves[:-1]), leaves[-1])
    weights = (hostile.normal(*y.shape, seed=70 + i).double() for i, y in enumerate((o, final)))
    torch.stack([(y * w).sum() for y, w in zip((o, final), weights, strict=True)]).sum().backward()
    assert all(y.grad is not None for y in leaves)
    return [y.grad for y in leaves if y.grad is not None]


def same_gradients(got: list[Tensor], want: list[Tensor]) -> None:
    for name, mine, theirs in zip((*Inputs._fields, "initial"), got, want, strict=True):
        hostile.assert_gradient(mine, theirs, f"gradient of {name}")


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("lengths", [(65,), (33, 33), (1, 40, 0, 17), (1, 1)])
def test_gradients(lengths: tuple[int, ...], wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective_walk, "WIDE", wide)
    for size in SIZES:
        x, initial, spans = draw(lengths, size)
        got, want = (gradients(x, initial, partial(run, spans=spans)) for run in (scan, loop))
        same_gradients(got, want)


def test_a_second_backward_pass_finds_what_the_first_found() -> None:
    x, initial, spans = draw((70, 3))
    leaves = [y.clone().requires_grad_() for y in (*x, initial) if y is not None]
    loss = scan(Inputs(*leaves[:-1]), leaves[-1], spans)[0].sum()
    first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("cuts", [(1, 2), (15, 16, 17), (63, 65, 100)])
def test_pieces_equal_the_whole(cuts: tuple[int, ...], wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, states and gradients of a sequence cut anywhere, an empty piece included."""
    monkeypatch.setattr(selective_walk, "WIDE", wide)
    x, initial, spans = draw((130,))

    def pieces(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for a, b in pairwise((0, 0, *cuts, 130)):
            o, state = scan(x.at(slice(a, b)), state, Spans.of([b - a]))
            outputs.append(o)
        return torch.cat(outputs), state

    (o, final), (want, last) = pieces(x, initial), scan(x, initial, spans)
    hostile.assert_output(o, want)
    hostile.assert_state(final, last)
    same_gradients(gradients(x, initial, pieces), gradients(x, initial, lambda x, s: scan(x, s, spans)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_steps_equal_the_scan(length: int, op: str) -> None:
    rows = 2
    x, initial, spans = draw((length,) * rows)
    want, last = scan(x, initial, spans)
    held = torch.full((2 * rows, 6, 5), torch.nan)
    state = held[::2, :, :4]  # every second slot of a pool, and not all of a slot: a view with holes
    state.copy_(initial)
    for t in range(length):
        hostile.assert_output(step(x.at(slice(t, None, length)), state, OPS[op]), want[t::length])
    hostile.assert_state(state, last)
    assert held[1::2].isnan().all() and held[:, :, 4:].isnan().all(), "written beside the state"


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("lengths", [(17, 64, 40), (40, 40, 40), (1, 70, 1), (0, 1, 33)])
def test_neighbours_change_nothing(
    lengths: tuple[int, ...], wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selective_walk, "WIDE", wide)
    x, initial, spans = draw(lengths)
    other, start, _ = draw(lengths, seed=50)
    own = spans.slices()[1]
    start[1] = initial[1]
    for name in PER_TOKEN:
        getattr(other, name)[own] = getattr(x, name)[own]
    other = other._replace(a=x.a, d=x.d, dt_bias=x.dt_bias)
    (o, final), (p, last) = scan(x, initial, spans), scan(other, start, spans)
    assert torch.equal(o[own], p[own]) and torch.equal(final[1], last[1])
    assert not torch.equal(o, p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    x, initial, spans = draw((70, 1, 9))
    x = x._replace(**{name: getattr(x, name).to(dtype) for name in PER_TOKEN})
    (o, final), (want, last) = scan(x, initial, spans), loop(x, initial, spans)
    assert o.dtype == dtype and final.dtype == torch.float32
    hostile.assert_state(final, last)
    assert float((o.double() - want).abs().max()) <= torch.finfo(dtype).eps * float(want.abs().max())
    assert step(x.at(slice(0, 3)), initial).dtype == dtype


def test_inputs_are_left_alone() -> None:
    x, initial, spans = draw((69, 1))
    given = [y for y in (*x, initial) if y is not None]
    before = [y.clone() for y in given]
    scan(x, initial, spans)
    gradients(x, initial, lambda x, s: scan(x, s, spans))
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize("graded", [False, True])
def test_memory_is_linear_and_holds_no_state_a_token(graded: bool) -> None:
    def run(x: Inputs, spans: Spans) -> None:
        o, _ = scan(x, None, spans)
        if graded:
            o.sum().backward()

    channels, s, peaks = 32, 64, []
    for n in (2048, 4096):
        x, _, spans = draw((n,), (channels, s))
        for y in x:
            assert y is not None
            y.requires_grad_(graded)
        peaks.append(peak_bytes(lambda x=x, spans=spans: run(x, spans)))
    assert peaks[0] > 0 and peaks[1] <= 2.2 * peaks[0]
    assert peaks[1] < 4096 * channels * s * 4


@pytest.mark.parametrize("op", OPS)
def test_bad_input_is_refused(op: str) -> None:
    x, initial, spans = draw((3,))
    with pytest.raises(ValueError, match="never positive"):
        scan(x._replace(a=-x.a), initial, spans, OPS[op])
    with pytest.raises(ValueError, match="spans hold 4 tokens"):
        scan(x, initial, Spans.of([4]), OPS[op])
    with pytest.raises(ValueError, match="swapped"):
        scan(x, initial.mT, spans, OPS[op])
    with pytest.raises(ValueError, match=r"dt is \(3, 1\)"):
        scan(x._replace(dt=x.dt[:, :1]), initial, spans, OPS[op])
    with pytest.raises(ValueError, match=r"a is \(4, 6\)"):
        scan(x._replace(a=x.a.mT), initial, spans, OPS[op])
    with pytest.raises(ValueError, match=r"state|initial"):
        step(x, initial, OPS[op])
