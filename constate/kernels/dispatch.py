"""Picks a backend: which function serves each op, and why. `doctor` prints it; a Call carries the result.

Knows the names of ops and backends; knows no model. Backends are looked up when they are selected, and
nothing that may be missing is imported before that.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch

from .packages import PACKAGES
from .packages.entry import DEVICE

BACKENDS = ("reference", "torch", "native", "triton")

# The file of each op among the backends that keep one file an op.
FILES = MappingProxyType(
    {
        "gated_linear_scan": "gated_linear",
        "gated_linear_step": "gated_linear",
        "gated_delta_scan": "gated_delta",
        "gated_delta_step": "gated_delta",
        "dplr_delta_scan": "dplr_delta",
        "dplr_delta_step": "dplr_delta",
        "selective_scan": "selective",
        "selective_step": "selective",
        "linear_recurrence_scan": "linear_recurrence",
        "linear_recurrence_step": "linear_recurrence",
        "short_conv": "short_conv",
        "short_conv_step": "short_conv",
        "attention": "attention",
        "attention_step": "attention",
        "linear": "linear",
        "rms_norm": "norms",
    }
)

Op = Callable[..., Any]


class BackendUnavailable(ValueError):
    """The backend that was asked for is not here; the message says why and what is."""


@dataclass(frozen=True)
class Choice:
    """Which backend serves an op, and why."""

    op: str
    backend: str
    reason: str


@dataclass(frozen=True)
class Ops:
    """One function an op; the signatures are those of `reference`, which is the specification."""

    gated_linear_scan: Op
    gated_linear_step: Op
    gated_delta_scan: Op
    gated_delta_step: Op
    dplr_delta_scan: Op
    dplr_delta_step: Op
    selective_scan: Op
    selective_step: Op
    linear_recurrence_scan: Op
    linear_recurrence_step: Op
    short_conv: Op
    short_conv_step: Op
    attention: Op
    attention_step: Op
    linear: Op
    rms_norm: Op
    backend: str
    choices: Mapping[str, Choice]
    tape: Any = None  # (rows, past) -> native.tape.Tape or triton.tape.Tape, which prepare a decode step

    def __deepcopy__(self, memo: dict[int, Any]) -> Ops:
        """Itself: nothing here changes, and a copied model is served by the same functions."""
        return self


@dataclass(frozen=True)
class Availability:
    """A backend's row in `doctor`: whether it serves this device, and the reason either way."""

    backend: str
    here: bool
    reason: str


def select(backend: str = "auto", device: torch.device | str = "cpu") -> Ops:
    """The ops of `backend`: "auto", "reference", "torch", "native", "triton", or an installed package's by
    its name, "fla", "mamba_ssm" or "causal_conv1d", beside which our own serve what it has not.

    "auto" takes the fastest that is here and records why in `choices`. Raises BackendUnavailable, a
    ValueError, for a backend that does not serve `device`, and ValueError for an unknown name.
    """
    device = _place(device)
    if backend not in (known := ("auto", *BACKENDS, *PACKAGES)):
        raise ValueError(f"backend is {backend!r}; one of {', '.join(known)} is wanted")
    if backend == "auto":
        return _auto(device)
    row = _availability(backend, device)
    if not row.here:
        here = ", ".join(other.backend for other in available(device) if other.here) or "nothing"
        raise BackendUnavailable(f"backend {backend!r} on {device.type}: {row.reason}. Here: {here}")
    if backend in PACKAGES:
        beside = "triton" if _availability("triton", device).here else "torch"
        return _ops(beside, f"{backend} has no form of it", backend, f"asked for; {row.reason}")
    return _ops(backend, f"asked for; {row.reason}")


def _auto(device: torch.device) -> Ops:
    """The fastest that is here; where C kernels should be and are not, a warning says so, once.

    Triton's interpreter is never taken: it serves the CPU for tests, far slower than anything else.
    """
    rows = {name: _availability(name, device) for name in ("triton", "native", "torch")}
    if device.type == "cpu" and rows["triton"].here:
        rows["triton"] = Availability("triton", False, rows["triton"].reason)
    name = next((name for name, row in rows.items() if row.here), "torch")
    if not rows[name].here:
        raise BackendUnavailable(f"backend {name!r} on {device.type}: {rows[name].reason}. Here: nothing")
    if device.type == "cpu" and name == "torch":
        _warn(rows["native"].reason)
    passed = (f"{other}: {row.reason}" for other, row in rows.items() if other != name)
    return _ops(name, "auto: " + "; ".join((rows[name].reason, *passed)))


@cache
def _warn(reason: str) -> None:
    text = f"no C kernels on this CPU, PyTorch alone is slower: {reason}"
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def available(device: torch.device | str = "cpu") -> list[Availability]:
    """A row for every backend, in the order of BACKENDS, then for each of PACKAGES that is installed. Raises
    ValueError for a device of no known kind."""
    device = _place(device)
    packages = (name for name in PACKAGES if _installed(name))
    return [_availability(backend, device) for backend in (*BACKENDS, *packages)]


def _availability(backend: str, device: torch.device) -> Availability:
    if device.type == "cuda" and not torch.cuda.is_available():
        return Availability(backend, False, "PyTorch sees no CUDA device")
    if backend == "native":
        return _native(device)
    if backend == "triton":
        return _triton(device)
    if backend in PACKAGES:
        return _package(backend, device)
    reason = {
        "reference": "a plain loop over tokens: the specification, slow on purpose",
        "torch": "tiles of matrix products in plain PyTorch, on any device",
    }[backend]
    return Availability(backend, True, reason)


def _native(device: torch.device) -> Availability:
    """Compiles the C kernels, where no earlier process has."""
    if device.type != "cpu":
        return Availability("native", False, "C kernels serve the CPU alone")
    from .native.build import loaded, unavailable

    if (reason := unavailable()) is not None:
        return Availability("native", False, reason)
    note = loaded().note
    return Availability("native", True, "C compiled for this machine" + (f"; {note}" if note else ""))


def _triton(device: torch.device) -> Availability:
    """Imports Triton only where it could serve: on a GPU, or for the interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type not in ("cuda", "cpu"):
        return Availability("triton", False, "Triton kernels serve GPUs alone")
    if find_spec("triton") is None:
        return Availability("triton", False, "Triton is not installed")
    if device.type == "cpu":
        reason = (
            "Triton's interpreter: what a GPU would compute, slow, for tests"
            if interpreted
            else "Triton kernels serve GPUs alone; TRITON_INTERPRET=1 runs them in its interpreter"
        )
        return Availability("triton", interpreted, reason)
    if interpreted:
        return Availability("triton", False, "TRITON_INTERPRET=1 is set: kernels are interpreted, on the CPU")
    try:
        target = import_module("triton").runtime.driver.active.get_current_target()
    except Exception as error:  # no driver, no compiler for its launcher, a broken install: the reason says
        return Availability("triton", False, f"Triton finds no driver: {type(error).__name__}: {error}")
    if target.backend == "cuda" and target.arch < 80:
        return Availability("triton", False, f"this GPU is sm_{target.arch}; sm_80 or later is wanted")
    return Availability("triton", True, f"Triton kernels compiled for this GPU ({target.arch})")


def _package(name: str, device: torch.device) -> Availability:
    """Imports the package where it could serve, on a GPU: what is built for another torch fails here."""
    if not _installed(name):
        return Availability(name, False, f"the package {name} is not installed")
    if device.type != DEVICE:
        return Availability(name, False, f"{name}'s kernels serve GPUs alone")
    try:
        version = getattr(import_module(name), "__version__", "of no known version")
    except Exception as error:  # a missing extension, another torch's symbols: the reason says
        return Availability(name, False, f"{name} cannot be imported: {type(error).__name__}: {error}")
    return Availability(name, True, f"the installed package {name} {version}")


def _installed(name: str) -> bool:
    """Whether Python finds the package, without importing it."""
    try:
        return find_spec(name) is not None
    except ValueError:  # already imported, by something that left it without a spec
        return True


def _place(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"PyTorch knows no device {str(device)!r}; cpu or cuda is wanted") from None


def _ops(backend: str, reason: str, package: str | None = None, why: str = "") -> Ops:
    """The ops of a backend; with a package, its own in the place of those that it has."""
    choices = {op: _choice(op, backend, reason) for op in FILES}
    if package is not None:
        choices |= {op: Choice(op, package, why) for op in PACKAGES[package]}
    functions = {
        op: getattr(import_module(_module(choice.backend, FILES[op]), __package__), op)
        for op, choice in choices.items()
    }
    name = package or backend  # a package's kernels are on no tape
    taped = name in ("native", "triton")
    tape = import_module(f".{name}.tape", __package__).Tape if taped else None
    return Ops(**functions, backend=name, choices=MappingProxyType(choices), tape=tape)


def _choice(op: str, backend: str, reason: str) -> Choice:
    """An op that a backend has no form of is PyTorch's."""
    missing = None
    if backend in ("native", "triton"):
        missing = import_module(f".{backend}", __package__).MISSING.get(op)
    return Choice(op, backend, reason) if missing is None else Choice(op, "torch", f"{missing}; {reason}")


def _module(backend: str, file: str) -> str:
    if backend in PACKAGES:
        return f".packages.{backend}"
    return {"reference": ".reference", "torch": f".chunked.{file}"}.get(backend, f".{backend}.{file}")
