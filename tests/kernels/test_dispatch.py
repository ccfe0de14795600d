"""Which function serves an op and why; backends that are named but absent say so."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from constate.kernels import dispatch, reference
from constate.kernels.dispatch import BACKENDS, FILES, BackendUnavailable, Ops, available, select
from constate.spans import Spans


def test_ops_has_a_field_for_every_op():
    assert [f.name for f in dataclasses.fields(Ops)] == [*FILES, "backend", "choices", "tape"]


@pytest.mark.parametrize("backend", ["reference", "torch", "native", "triton"])
def test_signatures_are_the_reference_s(backend):
    """Same names, same kinds, same defaults: backends can be swapped under any call."""
    ops = select(backend)
    for op in FILES:
        mine = inspect.signature(getattr(ops, op)).parameters.values()
        want = inspect.signature(getattr(reference, op)).parameters.values()
        assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in want], op


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_auto_says_what_it_took_and_what_it_passed(device):
    ops = select("auto", device)
    assert ops.backend == ("native" if device == "cpu" else "torch") and set(ops.choices) == set(FILES)
    for op, choice in ops.choices.items():
        assert choice.op == op and "auto: " in choice.reason and "triton: " in choice.reason
        served = select(choice.backend, device)
        assert getattr(ops, op) is getattr(served, op)
        assert choice.backend == "torch" or choice.reason.startswith("auto: ")


def test_reference_is_the_loop():
    ops = select("reference")
    assert ops.backend == "reference"
    assert all(getattr(ops, op) is getattr(reference, op) for op in FILES)


@pytest.mark.parametrize(("backend", "device"), [("native", "meta"), ("triton", "cpu"), ("triton", "meta")])
def test_absent_backends_say_so(backend, device, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendUnavailable, match=rf"{backend}.* on {device}: .*Here: reference, torch"):
        select(backend, device)
    assert issubclass(BackendUnavailable, ValueError)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'cuda'; one of auto, reference"):
        select("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a CUDA device")
def test_cuda_without_a_device_says_so():
    assert not any(row.here for row in available("cuda"))
    with pytest.raises(BackendUnavailable, match="sees no CUDA device"):
        select("auto", "cuda")


@pytest.mark.parametrize("interpreted", [True, False])
def test_doctor_s_rows(interpreted, monkeypatch):
    """Triton serves the CPU where its interpreter was asked for, and even then "auto" does not take it."""
    if not interpreted:
        monkeypatch.delenv("TRITON_INTERPRET")
    rows = available("cpu")
    assert [row.backend for row in rows] == list(BACKENDS)
    here = {"reference", "torch", "native"} | ({"triton"} if interpreted else set())
    assert {row.backend for row in rows if row.here} == here
    assert all(row.reason for row in rows)
    assert select("auto", "cpu").backend == "native"


def test_ops_are_frozen():
    ops = select()
    with pytest.raises(dataclasses.FrozenInstanceError):
        ops.backend = "reference"  # pyright: ignore[reportAttributeAccessIssue]  # the point of the test
    with pytest.raises(TypeError):
        ops.choices["attention"] = None  # pyright: ignore[reportIndexIssue]  # the point of the test


def test_backends_agree_on_one_call():
    q, k, v = torch.randn(3, 40, 2, 4, generator=torch.Generator().manual_seed(0)).unbind()
    spans = Spans.of([30, 10])
    results = [
        select(name).gated_linear_scan(q, k, v, None, None, spans)
        for name in ("reference", "torch", "native")
    ]
    for want, *found in zip(*results, strict=True):
        assert all(float((x - want).abs().max()) < 1e-4 for x in found)


def test_selecting_imports_nothing_optional():
    script = (
        "import sys; from constate.kernels.dispatch import select; select(); "
        "print(sorted({'triton', 'mamba_ssm', 'causal_conv1d', 'fla'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Driver:
    """Stands for triton.runtime.driver on a machine with, or without, a GPU that it knows."""

    def __init__(self, arch: int | None):
        self.arch = arch

    @property
    def active(self) -> Driver:
        return self

    def get_current_target(self) -> SimpleNamespace:
        if self.arch is None:
            raise RuntimeError("0 active drivers ([]). There should only be one.")
        return SimpleNamespace(backend="cuda", arch=self.arch)


@pytest.mark.parametrize(
    ("arch", "taken", "said"),
    [
        (90, "triton", "Triton kernels compiled for this GPU"),
        (75, "torch", "sm_75; sm_80 or later is wanted"),
        (None, "torch", "Triton finds no driver: RuntimeError: 0 active drivers"),
    ],
)
def test_auto_on_a_gpu_takes_triton_where_it_works(arch, taken, said, monkeypatch):
    """Case K2: a machine whose Triton finds no driver, or too old a card, is served by PyTorch, and told."""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fake = SimpleNamespace(runtime=SimpleNamespace(driver=Driver(arch)))
    real = dispatch.import_module
    monkeypatch.setattr(
        dispatch, "import_module", lambda name, *at: fake if name == "triton" else real(name, *at)
    )
    ops = select("auto", "cuda")
    assert ops.backend == taken and said in ops.choices["gated_linear_scan"].reason
    if taken == "torch":
        with pytest.raises(BackendUnavailable, match=said.split(":")[0]):
            select("triton", "cuda")


def test_without_triton_installed_a_gpu_is_pytorch_s(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    ops = select("auto", "cuda")
    assert ops.backend == "torch" and "Triton is not installed" in ops.choices["linear"].reason
