"""The doctor says what is wrong, and does not say it of what is right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.bench import doctor
from constate.kernels import dispatch, reference
from constate.kernels.triton import MISSING


@pytest.fixture(autouse=True)
def without_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    """Triton's interpreter is slow, and has a test of its own."""
    monkeypatch.delenv("TRITON_INTERPRET")


def rows() -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["op"], row["backend"]): row for row in doctor.doctor()}


def test_every_op_of_every_backend_has_a_row():
    found = rows()
    assert set(found) == {(op, backend) for op in dispatch.FILES for backend in dispatch.BACKENDS}
    for row in found.values():
        assert list(row) == ["op", "backend", "ok", "max_error", "reason"]
        assert row["reason"]
        assert (row["max_error"] is None) == (row["ok"] is None)
    assert all(found[op, "torch"]["ok"] is True for op in dispatch.FILES)
    assert all(found[op, "reference"]["max_error"] == 0 for op in dispatch.FILES)


def test_the_cases_are_hostile():
    cases = doctor.cases("cpu")
    assert set(cases) == set(dispatch.FILES)
    for op in ("gated_linear_scan", "gated_delta_scan"):
        decays = cases[op].args[3]
        first = decays[1:65].flatten()
        assert {0.0, -1e4, -torch.inf} <= set(first.tolist())
        assert cases[op].args[0].shape[1] != cases[op].args[2].shape[1]  # grouped heads
    assert 0 in doctor.LENGTHS and 1 in doctor.LENGTHS


def off(op: Callable[..., Any], where: int, by: float) -> Callable[..., Any]:
    """The op with one result wrong: the output (0) or the state (1)."""

    def wrong(*args: Any, **options: Any) -> Any:
        results = op(*args, **options)
        parts = list(results) if isinstance(results, tuple) else [results]
        parts[where] = parts[where] + by * torch.ones_like(parts[where])
        return tuple(parts) if len(parts) > 1 else parts[0]

    return wrong


def nan(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: tuple(r * float("nan") for r in op(*args, **options))


def careless(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op, overwriting an input that belongs to its caller."""

    def wrong(*args: Any, **options: Any) -> Any:
        results = op(*args, **options)
        args[0].zero_()
        return results

    return wrong


def frozen(op: Callable[..., Any]) -> Callable[..., Any]:
    """A step that forgets to advance its state."""

    def wrong(*args: Any, **options: Any) -> Tensor:
        return op(*(a.clone() if isinstance(a, Tensor) else a for a in args), **options)

    return wrong


def headwise(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op, right for a decay a head and taking the first channel's for all."""

    def wrong(*args: Any, **options: Any) -> Any:
        g = args[3][..., 0] if args[3].ndim == 3 else args[3]
        return op(*args[:3], g, *args[4:], **options)

    return wrong


def broken(op: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no such instruction")

    return wrong


@pytest.mark.parametrize(
    ("op", "fault"),
    [
        ("gated_linear_scan", lambda op: off(op, 0, 1e-2)),
        ("gated_delta_scan", lambda op: off(op, 1, 1e-2)),
        ("gated_delta_scan", headwise),
        ("gated_delta_step", headwise),
        ("linear_recurrence_scan", lambda op: off(op, 0, 1e-2)),
        ("attention", lambda op: off(op, 0, 1e-3)),
        ("selective_scan", nan),
        ("short_conv", careless),
        ("gated_delta_step", frozen),
        ("selective_step", broken),
    ],
)
def test_a_wrong_op_is_reported_and_only_it(
    monkeypatch: pytest.MonkeyPatch, op: str, fault: Callable[[Callable[..., Any]], Callable[..., Any]]
):
    real = doctor.select

    def select(backend: str, device: str) -> dispatch.Ops:
        ops = real(backend, device)
        planted = {**vars(ops), op: fault(getattr(ops, op))}
        return dispatch.Ops(**planted) if backend == "torch" else ops

    monkeypatch.setattr(doctor, "select", select)
    found = rows()
    assert [key for key, row in found.items() if row["ok"] is False] == [(op, "torch")]
    assert found[op, "torch"]["max_error"] is None or fault not in (nan, broken)
    if fault is broken:
        assert "no such instruction" in found[op, "torch"]["reason"]


def test_a_small_difference_is_allowed():
    case = doctor.cases("cpu")["gated_linear_scan"]
    want = case.run(reference.gated_linear_scan)
    got = case.run(off(reference.gated_linear_scan, 0, 1e-6))
    verdict = doctor.compare(got, want)
    assert verdict["ok"] and 0 < verdict["max_error"] <= 1e-4


def test_triton_s_kernels_are_examined_where_they_run(monkeypatch: pytest.MonkeyPatch):
    """In the interpreter here: what has a kernel is right, what has none says what serves it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(doctor, "LENGTHS", (1, 0, 20, 3))
    monkeypatch.setattr(doctor, "available", lambda device: dispatch.available(device)[-1:])
    found = rows()
    assert {backend for _, backend in found} == {"triton"}
    for (op, _), row in found.items():
        if op in MISSING:
            assert row["ok"] is None and row["reason"].startswith("torch serves it: ")
        else:
            assert row["ok"] is True, row
