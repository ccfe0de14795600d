"""Picks a backend: which function serves each op, and why. `doctor` prints it; a Call carries the result.

Knows the names of ops and backends; knows no model. Backends are looked up when they are selected, and
nothing that may be missing is imported before that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

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
        "short_conv": "short_conv",
        "short_conv_step": "short_conv",
        "attention": "attention",
        "attention_step": "attention",
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
    short_conv: Op
    short_conv_step: Op
    attention: Op
    attention_step: Op
    backend: str
    choices: Mapping[str, Choice]


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
    rows = {row.backend: row for row in available(device)}
    name = "torch" if backend == "auto" else backend
    if not rows[name].here:
        here = ", ".join(row.backend for row in rows.values() if row.here) or "nothing"
        raise BackendUnavailable(f"backend {name!r} on {device.type}: {rows[name].reason}. Here: {here}")
    reason = f"asked for; {rows[name].reason}"
    if backend == "auto":
        passed = (f"{other}: {rows[other].reason}" for other in ("triton", "native"))
        reason = "auto: " + "; ".join((rows[name].reason, *passed))
    return _ops(name, reason)


def available(device: torch.device | str = "cpu") -> list[Availability]:
    """A row for every backend, in the order of BACKENDS. Raises ValueError for a device of no known kind."""
    device = _place(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return [Availability(name, False, "PyTorch sees no CUDA device") for name in BACKENDS]
    return [
        Availability("reference", True, "a plain loop over tokens: the specification, slow on purpose"),
        Availability("torch", True, "tiles of matrix products in plain PyTorch, on any device"),
        Availability("native", False, "no op has a C form yet"),
        Availability("triton", False, "no op has a Triton form yet"),
    ]


def _place(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"PyTorch knows no device {str(device)!r}; cpu or cuda is wanted") from None


def _ops(backend: str, reason: str) -> Ops:
    functions = {
        op: getattr(import_module(_module(backend, file), __package__), op) for op, file in FILES.items()
    }
    choices = {op: Choice(op, backend, reason) for op in FILES}
    return Ops(**functions, backend=backend, choices=MappingProxyType(choices))


def _module(backend: str, file: str) -> str:
    return ".reference" if backend == "reference" else f".chunked.{file}"
