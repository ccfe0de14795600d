"""How Python's side launches a Triton kernel: on the tensor's device, with everything that matters said.

Knows grids, devices and the sizes of tiles; knows no op. Importing it imports Triton, so that only files of
this room do, once a kernel is picked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs

INTERPRETED: bool = bool(knobs.runtime.interpret)
"""Whether kernels of this process run in Triton's interpreter (TRITON_INTERPRET=1), on the CPU's tensors."""

WIDEST = 256
"""Heads of more channels than this are served by the chunked form."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels read and write; another dtype is served by the chunked form."""


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's name and its grid."""

    kernel: str
    grid: tuple[int, ...]


_LOG: ContextVar[list[Launch] | None] = ContextVar("launches", default=None)


Call = tuple[Any, Mapping[str, Any], int, int]
"""A launch that was kept: kernel, arguments by name, warps, stages."""

_KEPT: ContextVar[list[Call] | None] = ContextVar("kept", default=None)


@contextmanager
def dry() -> Iterator[list[Call]]:
    """Inside the block nothing runs, whatever the device; what would be launched is kept, to be compiled."""
    made: list[Call] = []
    token = _KEPT.set(made)
    try:
        yield made
    finally:
        _KEPT.reset(token)


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """The launches made inside the block, in order: what tests and counts of launches read."""
    made: list[Launch] = []
    token = _LOG.set(made)
    try:
        yield made
    finally:
        _LOG.reset(token)


def launch(
    kernel: Any, grid: tuple[int, ...], at: Tensor, *, warps: int = 4, stages: int = 2, **given: Any
) -> None:
    """Runs `kernel` over `grid` on the device of `at`, with the kernel's arguments by name.

    None is passed on as a constant, as Triton does. A grid without programs launches nothing. Raises
    ValueError for a tensor on a device that Triton does not serve.
    """
    on_device(at)
    if 0 in grid:
        return
    if (kept := _KEPT.get()) is not None:
        kept.append((kernel, given, warps, stages))
        return
    if (made := _LOG.get()) is not None:
        made.append(Launch(kernel.__name__, grid))
    with _device(at):
        # Fused multiply-adds are said aloud: Triton's default for them changes between versions.
        kernel[grid](**given, num_warps=warps, num_stages=stages, enable_fp_fusion=True)


def on_device(x: Tensor, **others: Tensor | None) -> None:
    """Refuses a tensor that no Triton kernel of this process can read, and others that lie elsewhere."""
    for name, other in others.items():
        if other is not None and other.device != x.device:
            raise ValueError(f"{name} is on {other.device}, others are on {x.device}: one device is wanted")
    if x.device.type != ("cpu" if INTERPRETED else "cuda") and _KEPT.get() is None:
        wanted = (
            "TRITON_INTERPRET=1 is set, so one on the cpu is wanted"
            if INTERPRETED
            else "one on a GPU is wanted; backend 'auto' picks what serves a device"
        )
        raise ValueError(f"a tensor on {x.device} was given to a Triton kernel; {wanted}")


def served(head: int, tensors: Iterable[Tensor | None]) -> bool:
    """Whether kernels serve heads of `head` channels over these tensors: known dtypes, no gradient wanted."""
    given = [x for x in tensors if x is not None]
    if head > WIDEST or any(x.dtype not in DTYPES for x in given):
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in given))


def _device(at: Tensor) -> AbstractContextManager[Any]:
    return nullcontext() if at.device.type == "cpu" else torch.cuda.device(at.device)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs the device runs side by side at the least; the interpreter passes for a large GPU."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def power(n: int, least: int = 16) -> int:
    """The smallest power of two that holds `n`, and at least `least`: a block's edge (tl.dot wants 16)."""
    return max(least, 1 << max(0, n - 1).bit_length())


AXES = ("token", "head", "channel")


def strides(**tensors: Tensor | None) -> dict[str, int]:
    """Each tensor's strides as kernels name them, 0 where there is no such axis or no tensor."""
    given: dict[str, int] = {}
    for name, x in tensors.items():
        steps = (0, 0, 0) if x is None else (*x.stride(), 0, 0)[:3]
        given |= {f"{name}_{axis}": step for axis, step in zip(AXES, steps, strict=True)}
    return given


def precision(dtype: torch.dtype = torch.float32) -> str:
    """How float32 products are made in a kernel of this dtype: as three of TF32 on NVIDIA's tensor cores, as
    one where what comes out is rounded to 16 bits; in plain float32 elsewhere."""
    if INTERPRETED or torch.version.hip:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"


@dataclass(frozen=True)
class Compiled:
    """A case of the compile table, declared beside the kernel: which kernel, as what.

    `signature` gives each run-time argument's type ("*bf16", "i32", "fp32"; "i32:16" for a multiple of 16,
    as pointers always are), `constants` each tl.constexpr and each pointer that is None; `default` marks what
    runs at head sizes 64 and 128 in bfloat16.
    """

    op: str
    kernel: Any
    signature: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 2
    head: int | None = None
    dtype: str = "bf16"
    default: bool = False
    note: str = ""


def as_launched(op: str, call: Callable[[], object], **about: Any) -> Iterator[Compiled]:
    """The cases that a call of an op would launch, typed as Triton types a launch's arguments."""
    with dry() as made:
        call()
    for kernel, given, warps, stages in made:
        fixed = {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
        typed = {name: None if name in fixed else _type(value) for name, value in given.items()}
        signature = {name: kind for name, kind in typed.items() if kind is not None}
        constants = {name: value for name, value in given.items() if typed[name] is None}
        yield Compiled(op, kernel, signature, constants, warps, stages, **about)


_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


def _type(value: Any) -> Any:
    """None for what Triton compiles in: None, and the number 1. A tuple's types are a tuple, where None is
    None and 1 a number like others."""
    if isinstance(value, tuple):
        return tuple("i32" if isinstance(item, int) and item == 1 else _type(item) for item in value)
    if value is None or (isinstance(value, int) and value == 1):
        return None
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return ("i32" if -(2**31) <= value < 2**31 else "i64") + (":16" if value % 16 == 0 else "")
