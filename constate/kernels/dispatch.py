"""Picks a backend: which function serves each op, and why. `doctor` prints it; a Call carries the result.

Knows the names of ops and backends; knows no model. Backends are looked up when they are selected, and
nothing that may be missing is imported before that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

from .native import MISSING

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
    tape: Op | None = None  # (rows, past) -> native.tape.Tape, where a decode step can be prepared

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
    """The ops of `backend`: "auto", "reference", "torch", "native" or "triton".

    "auto" takes the fastest that is here and records why in `choices`. Raises BackendUnavailable, a
    ValueError, for a backend that does not serve `device`, and ValueError for an unknown name.
    """
    device = _place(device)
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; one of {', '.join(('auto', *BACKENDS))} is wanted")
    if backend == "auto":
        return _auto(device)
    row = _availability(backend, device)
    if not row.here:
        here = ", ".join(other.backend for other in available(device) if other.here) or "nothing"
        raise BackendUnavailable(f"backend {backend!r} on {device.type}: {row.reason}. Here: {here}")
    return _ops(backend, f"asked for; {row.reason}")


def _auto(device: torch.device) -> Ops:
    """The fastest that is here; where C kernels should be and are not, a warning says so, once."""
    rows = {name: _availability(name, device) for name in ("triton", "native", "torch")}
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
    """A row for every backend, in the order of BACKENDS. Raises ValueError for a device of no known kind."""
    device = _place(device)
    return [_availability(backend, device) for backend in BACKENDS]


def _availability(backend: str, device: torch.device) -> Availability:
    if device.type == "cuda" and not torch.cuda.is_available():
        return Availability(backend, False, "PyTorch sees no CUDA device")
    if backend == "native":
        return _native(device)
    here, reason = {
        "reference": (True, "a plain loop over tokens: the specification, slow on purpose"),
        "torch": (True, "tiles of matrix products in plain PyTorch, on any device"),
        "triton": (False, "no op has a Triton form yet"),
    }[backend]
    return Availability(backend, here, reason)


def _native(device: torch.device) -> Availability:
    """Compiles the C kernels, where no earlier process has."""
    if device.type != "cpu":
        return Availability("native", False, "C kernels serve the CPU alone")
    from .native.build import loaded, unavailable

    if (reason := unavailable()) is not None:
        return Availability("native", False, reason)
    note = loaded().note
    return Availability("native", True, "C compiled for this machine" + (f"; {note}" if note else ""))


def _place(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"PyTorch knows no device {str(device)!r}; cpu or cuda is wanted") from None


def _ops(backend: str, reason: str) -> Ops:
    choices = {op: _choice(op, backend, reason) for op in FILES}
    functions = {
        op: getattr(import_module(_module(choice.backend, FILES[op]), __package__), op)
        for op, choice in choices.items()
    }
    tape = import_module(".native.tape", __package__).Tape if backend == "native" else None
    return Ops(**functions, backend=backend, choices=MappingProxyType(choices), tape=tape)


def _choice(op: str, backend: str, reason: str) -> Choice:
    """An op that a backend has no form of is PyTorch's."""
    missing = MISSING.get(op) if backend == "native" else None
    return Choice(op, backend, reason) if missing is None else Choice(op, "torch", f"{missing}; {reason}")


def _module(backend: str, file: str) -> str:
    return {"reference": ".reference", "torch": f".chunked.{file}"}.get(backend, f".{backend}.{file}")
