"""The installed packages as backends: what they are handed, in which layout, and that no CPU tensor ever is.

The packages are played by modules that compute in float64, token by token, in the packages' own layouts and
under their own names; that the real ones have these functions was seen beside fla 0.6.0, mamba-ssm 2.3.2 and
causal-conv1d 1.7.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.bench import doctor
from constate.kernels import dispatch, reference
from constate.kernels.packages import PACKAGES, causal_conv1d, entry, fla, mamba_ssm
from constate.spans import Spans
from tests.kernels import hostile

FLA = {
    "simple_gla": "simple_gla",
    "gla": "gla",
    "gated_delta_rule": "gated_delta_rule",
    "kda": "kda",
    "dplr_delta_rule": "generalized_delta_rule",
    "hgrn": "hgrn",
}
Log = list[tuple[str, dict[str, Any]]]


def walk(kind: str, decay: str, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(batch, time, heads, dim) through one of fla's recurrences, in float64; `decay` names the gate."""
    x = {name: t.double() for name, t in given.items() if isinstance(t, Tensor) and name != "cu_seqlens"}
    q, k, v, first = x["q"], x["k"], x["v"], x["initial_state"]
    b, t, h, dv = v.shape
    assert given["output_final_state"] and first.shape == (first.shape[0], h, k.shape[-1], dv)
    assert h == q.shape[2] or kind in ("gated_delta_rule", "kda"), "keys that are not spread"
    q, k = (y.repeat_interleave(h // y.shape[2], 2) for y in (q, k))
    ends = given["cu_seqlens"].tolist() if "cu_seqlens" in given else [t]
    assert b == 1 or len(ends) == 1
    out, finals = torch.zeros(b, t, h, dv, dtype=torch.float64), []
    rows = [(0, *p) for p in pairwise(ends)] if len(ends) > 1 else [(i, 0, t) for i in range(b)]
    for r, (i, begin, end) in enumerate(rows):
        assert end > begin, "an empty row was handed over"
        for j in range(h):
            s = first[r, j].clone()
            for at in range(begin, end):
                g = x[decay][i, at, j].exp() if decay in x else torch.ones(())
                seen = s.T @ x["a"][i, at, j] if kind == "dplr_delta_rule" else None
                s = s * (g[:, None] if g.ndim else g)
                value = v[i, at, j]
                if kind in ("gated_delta_rule", "kda"):
                    value = x["beta"][i, at, j] * (value - s.T @ k[i, at, j])
                s = s + torch.outer(k[i, at, j], value)
                s = s if seen is None else s + torch.outer(x["b"][i, at, j], seen)
                out[i, at, j] = given["scale"] * (s.T @ q[i, at, j])
            finals.append(s)
    final = torch.stack(finals).view(len(rows), h, k.shape[-1], dv)
    return out.to(given["v"].dtype), final.float()


def hgrn(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """fla's recurrence of channels: each a head with a key, a value and a query of one number."""
    x, ones = given["x"][..., None], torch.ones_like(given["x"][..., None])
    tokens = {"q": ones, "k": ones, "v": x, "scale": 1.0}
    start = given["initial_state"][..., None, None]
    o, final = walk("hgrn", "g", {**given, **tokens, "initial_state": start})
    return o[..., 0], final[..., 0, 0]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """fla, mamba_ssm and causal_conv1d, on a CPU that passes for a GPU; what they were called with."""
    log: Log = []

    def put(name: str, **functions: Callable[..., Any]) -> None:
        module = ModuleType(name)
        for key, function in functions.items():
            setattr(module, key, function)
        monkeypatch.setitem(sys.modules, name, module)

    def named(kind: str, how: str) -> Callable[..., Any]:
        def function(**given: Any) -> tuple[Tensor, Tensor]:
            log.append((f"{how}_{kind}", given))
            if kind == "hgrn":
                return hgrn(given)
            decay = "gk" if kind == "dplr_delta_rule" or (kind == "gla" and how != "chunk") else "g"
            assert {"g", "gk"} & given.keys() <= {decay}
            finite = decay not in given or bool(given[decay].isfinite().all())
            assert finite or how != "chunk", "differences of infinite sums are no numbers"
            return walk(kind, decay, given)

        return function

    for name in ("fla", "fla.ops", "mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        put(name)
    for kind, place in FLA.items():
        each = {f"{how}_{kind}": named(kind, how) for how in ("chunk", "fused_recurrent")}
        put(f"fla.ops.{place}", **each)

    def scan(u, delta, a, b, c, d, z, bias, *, delta_softplus: bool, return_last_state: bool):
        log.append(("selective_scan_fn", {"u": u}))
        rows, _, time = u.shape
        assert b.shape == c.shape == (rows, a.shape[1], time) and delta_softplus and return_last_state
        spans = Spans.of([time] * rows)

        def packed(y: Tensor) -> Tensor:
            return y.transpose(1, 2).flatten(0, 1)

        more = {"d": d, "z": None if z is None else packed(z), "dt_bias": bias}
        o, final = reference.selective_scan(
            packed(u), packed(delta), a, packed(b), packed(c), None, spans, **more
        )
        return o.unflatten(0, (rows, time)).transpose(1, 2), final

    def update(state, x, dt, a, b, c, D=None, z=None, dt_bias=None, dt_softplus=False):
        log.append(("selective_state_update", {"x": x}))
        assert D is not None and dt_bias is not None and dt_softplus
        return reference.selective_step(x, dt, a, b, c, state, d=D, z=z, dt_bias=dt_bias)

    def conv(x, weight, bias, initial_states, return_final_states, activation):
        log.append(("causal_conv1d_fn", {"x": x}))
        rows, channels, time = x.shape
        assert x.stride(1) == 1 and x.stride(2) % 8 == 0 and channels % 8 == 0 and return_final_states
        assert initial_states.shape == (rows, channels, weight.shape[1] - 1) and initial_states.stride(1) == 1
        seen = torch.cat([initial_states, x], -1).double()
        taps = seen.unfold(-1, weight.shape[1], 1) * weight.double()[:, None]
        o = taps.sum(-1) + (0 if bias is None else bias.double()[:, None])
        o = torch.nn.functional.silu(o) if activation else o
        return o.to(x.dtype), seen[..., time:].to(x.dtype).transpose(1, 2).contiguous().transpose(1, 2)

    def conv_update(x, history, weight, bias, activation):
        log.append(("causal_conv1d_update", {"x": x}))
        o, final = conv(x.unsqueeze(1).transpose(1, 2), weight, bias, history, True, activation)
        log.pop()
        history.copy_(final)
        return o.squeeze(-1)

    put("mamba_ssm.ops.selective_scan_interface", selective_scan_fn=scan)
    put("mamba_ssm.ops.triton.selective_state_update", selective_state_update=update)
    put("causal_conv1d", causal_conv1d_fn=conv, causal_conv1d_update=conv_update)
    monkeypatch.setattr(entry, "DEVICE", "cpu")
    yield log


MODULES = {"fla": fla, "mamba_ssm": mamba_ssm, "causal_conv1d": causal_conv1d}


def at(case: doctor.Case, lengths: tuple[int, ...] | None, dtype: torch.dtype) -> doctor.Case:
    """The doctor's call with its activations in `dtype`, and in rows of other lengths."""

    def cast(i: int, x: Any) -> Any:
        if isinstance(x, Spans) and lengths is not None:
            return Spans.of(lengths)
        return x.to(dtype) if i < 3 and isinstance(x, Tensor) and x.ndim == 3 else x

    other = None if case.other is None else at(case.other, lengths, dtype)
    return doctor.Case(tuple(cast(i, x) for i, x in enumerate(case.args)), case.options, other)


@pytest.mark.parametrize("op", PACKAGES["fla"])
@pytest.mark.parametrize("lengths", [None, (22, 22, 22, 22)], ids=["unequal and empty rows", "equal rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fla_is_handed_what_the_op_means(
    played: Log, op: str, lengths: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    """Grouped heads, decays from none to total, states that are not zero; and which of its kernels."""
    case = at(doctor.cases("cpu")[op], lengths, dtype)
    want, got = case.run(getattr(reference, op)), case.run(getattr(fla, op))
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert doctor.difference(mine, theirs, least=1.0) <= bound
    walks = dtype == torch.float32 or op.endswith("_step") or op.startswith("linear_recurrence")
    assert played and all(name.startswith("fused_recurrent") == walks for name, _ in played)


@pytest.mark.parametrize("decay", ["by head", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["scan", "step"])
def test_fla_with_other_decays(played: Log, how: str, dtype: torch.dtype, decay: str) -> None:
    """The kernel for a decay a head serves it, and none is no argument or zeros, as the function has it."""
    for op, kind in (
        ("gated_linear", "simple_gla"),
        ("gated_delta", "gated_delta_rule"),
        ("dplr_delta", "dplr"),
    ):
        case = at(doctor.cases("cpu")[f"{op}_{how}"], None, dtype)
        q, k, v, g, *rest = case.args
        g = None if decay == "none" else g[..., 0] if g.ndim == 3 else g
        case = doctor.Case((q, k, v, g, *rest), case.options)
        played.clear()
        want = case.run(getattr(reference, f"{op}_{how}"))
        got = case.run(getattr(fla, f"{op}_{how}"))
        for mine, theirs in zip(got, want, strict=True):
            assert doctor.difference(mine, theirs, least=1.0) <= (1e-5 if dtype == torch.float32 else 1e-2)
        ((name, _),) = played
        assert kind in name


def test_fla_with_no_token_at_all(played: Log) -> None:
    case = doctor.cases("cpu")["gated_linear_scan"]
    q, k, v, g, initial, _ = case.args
    o, final = fla.gated_linear_scan(q[:0], k[:0], v[:0], g[:0], initial, Spans.of([0] * 4))
    assert o.shape == v[:0].shape and torch.equal(final, initial) and final is not initial
    assert not played


@pytest.mark.parametrize("parts", [{}, {"d", "z", "dt_bias"}], ids=["bare", "whole"])
def test_mamba_ssm_is_handed_what_the_op_means(played: Log, parts: set[str]) -> None:
    n, c, s = 12, 8, 4
    draw = {"d": (c,), "z": (n, c), "dt_bias": (c,)}
    more: dict[str, Any] = {name: hostile.normal(*draw[name], seed=i) for i, name in enumerate(sorted(parts))}
    x, dt = (hostile.normal(n, c, seed=10 + i) for i in range(2))
    b, co = (hostile.normal(n, s, seed=20 + i) for i in range(2))
    a = -hostile.normal(c, s, seed=30).exp()
    given = (x, dt, a, b, co)
    for lengths, name in (((4, 4, 4), "selective_scan_fn"), ((5, 7), None), ((0, 12), None)):
        played.clear()
        want = reference.selective_scan(*given, None, Spans.of(lengths), **more)
        got = mamba_ssm.selective_scan(*given, None, Spans.of(lengths), **more)
        assert [n for n, _ in played] == ([name] if name else [])  # else the chunked form
        for mine, theirs in zip(got, want, strict=True):
            hostile.assert_output(mine, theirs)
    played.clear()
    states = [hostile.normal(n, c, s, seed=40) for _ in range(2)]
    want = reference.selective_step(*given, states[0], **more)
    hostile.assert_output(mamba_ssm.selective_step(*given, states[1], **more), want)
    assert torch.equal(*states) and [n for n, _ in played] == ["selective_state_update"]
    mamba_ssm.selective_scan(*given, torch.zeros(3, c, s), Spans.of((4, 4, 4)), **more)
    assert len(played) == 1, "a scan that takes no initial state was given one"


def test_causal_conv1d_is_handed_what_the_op_means(played: Log) -> None:
    x, bias, wide = (hostile.normal(*shape, seed=i) for i, shape in enumerate([(12, 16), (16,), (12, 48)]))
    for width in (1, 2, 3, 4, 5):
        weight, start = hostile.normal(16, width, seed=5), hostile.normal(3, width - 1, 16, seed=6)
        for tokens, lengths, initial, whose in (
            (x, (4, 4, 4), start, 2 <= width <= 4),
            (wide[:, 8:24], (4, 4, 4), start, 2 <= width <= 4),
            (x, (4, 4, 4), None, 2 <= width <= 4),
            (x, (5, 4, 3), start, False),
            (x[:3], (1, 1, 1), start, width == 2),  # shorter than the history
            (x, (4, 4, 4), start.bfloat16(), False),
        ):
            played.clear()
            args = (tokens, weight, bias, initial, Spans.of(lengths))
            want, got = reference.short_conv(*args), causal_conv1d.short_conv(*args)
            for mine, theirs in zip(got, want, strict=True):
                hostile.assert_output(mine, theirs)
                assert mine.dtype == theirs.dtype
            served = whose and (initial is None or initial.dtype == tokens.dtype)
            assert [n for n, _ in played] == (["causal_conv1d_fn"] if served else []), (width, lengths)
        histories = [start.clone() for _ in range(2)]
        played.clear()
        want = reference.short_conv_step(x[:3], weight, None, histories[0])
        hostile.assert_output(causal_conv1d.short_conv_step(x[:3], weight, None, histories[1]), want)
        assert torch.equal(*histories) and len(played) == (2 <= width <= 4)


def test_what_wants_a_gradient_goes_elsewhere(played: Log) -> None:
    for package, module in MODULES.items():
        for op in PACKAGES[package]:
            case = doctor.cases("cpu")[op]
            first = case.args[0].clone().requires_grad_()
            args = [a.clone() if isinstance(a, Tensor) else a for a in (first, *case.args[1:])]
            returned = getattr(module, op)(*args, **case.options)
            (returned[0] if isinstance(returned, tuple) else returned).sum().backward()
            assert first.grad is not None and bool(first.grad.isfinite().all())
    assert not played


# -- where they are called --------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_no_tensor_of_a_cpu_is_ever_handed_over(
    played: Log, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not by a model that was moved to the CPU after its backend was picked."""
    monkeypatch.setattr(entry, "DEVICE", "cuda")
    for op in PACKAGES[package]:
        case = doctor.cases("cpu")[op]
        with pytest.raises(ValueError, match=f"on cpu was given to {package}"):
            case.run(getattr(MODULES[package], op))
    assert not played
    with pytest.raises(dispatch.BackendUnavailable, match=rf"{package}.* on cpu: .*serve GPUs alone"):
        dispatch.select(package, "cpu")
    assert dispatch.select("auto", "cpu").backend in ("native", "torch")


def test_tensors_of_two_devices_are_refused(played: Log) -> None:
    q, k, v, g, state = doctor.cases("cpu")["gated_linear_step"].args
    with pytest.raises(ValueError, match="state on meta was given to fla"):
        fla.gated_linear_step(q, k, v, g, state.to("meta"))


def test_a_package_by_name_on_a_gpu(played: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own ops are its own, the rest ours, and doctor's rows say so; `auto` takes none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for package in PACKAGES:
        ops = dispatch.select(package, "cuda")
        assert ops.backend == package and ops.tape is None
        served = {op for op, choice in ops.choices.items() if choice.backend == package}
        assert served == set(PACKAGES[package])
        for op, choice in ops.choices.items():
            function = getattr(ops, op)
            assert (function.__module__ == MODULES[package].__name__) == (op in served)
            assert ("asked for" in choice.reason) if op in served else (package in choice.reason)
        (row,) = [row for row in dispatch.available("cuda") if row.backend == package]
        assert row.here and package in row.reason
    assert dispatch.select("auto", "cuda").backend in ("torch", "triton")


def test_a_package_that_is_not_here_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(dispatch.BackendUnavailable, match="fla is not installed"):
        dispatch.select("fla", "cuda")
    assert "fla" not in [row.backend for row in dispatch.available("cuda")]

    def broken(name: str, package: str | None = None) -> ModuleType:
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setattr(dispatch, "import_module", broken)
    with pytest.raises(
        dispatch.BackendUnavailable, match=r"cannot be imported: ImportError: undefined symbol"
    ):
        dispatch.select("fla", "cuda")


def test_the_doctor_has_rows_of_what_an_installed_package_serves(
    played: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU they say why not, and change nothing of its verdict."""
    rows = [row for row in doctor.available("cpu") if row.backend in PACKAGES]
    monkeypatch.setattr(doctor, "available", lambda device: rows)
    found = list(doctor.doctor())
    assert {(row["backend"], row["op"]) for row in found} == {(p, op) for p in PACKAGES for op in PACKAGES[p]}
    assert all(row["ok"] is None and "GPUs alone" in row["reason"] for row in found)
    assert not played
