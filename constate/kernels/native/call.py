"""How Python's side calls a C kernel: records of arguments, addresses of tensors, the team of threads.

A kernel is a function over one record of named fields (`tape.h`); its mirror here is a ctypes.Structure of
the same name and order. Knows the form of a call; knows no op and no compiler.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import c_float, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from .build import loaded


class Entry(ctypes.Structure):
    """One call on a tape: the kernel's address, its record's, whether the next may begin before its end."""

    _fields_ = [("kernel", c_void_p), ("args", c_void_p), ("apart", c_int64)]


def fields(pointers: str, counts: str, floats: str = "") -> list[tuple[str, type]]:
    """The fields of a record, in the order that all records here keep: addresses, int64, float32."""
    kinds = ((pointers, c_void_p), (counts, c_int64), (floats, c_float))
    return [(name, kind) for names, kind in kinds for name in names.split()]


def pointer(x: Tensor | None) -> int | None:
    """The address of a tensor on the CPU, NULL for None. The caller keeps the tensor alive."""
    if x is None:
        return None
    if x.device.type != "cpu":
        raise ValueError(f"a tensor on {x.device} was given to a C kernel; one on the cpu is wanted")
    return x.data_ptr()


def run(kernel: str, record: type[ctypes.Structure], **given: Tensor | float | None) -> None:
    """Runs one kernel over a record of these fields, tensors by their address; a field not given is 0."""
    args = record(**{name: pointer(x) if isinstance(x, Tensor) else x for name, x in given.items()})
    entry = Entry(_address(kernel, record), ctypes.addressof(args))
    loaded().run(ctypes.addressof(entry), 1, threads())


@cache
def _address(kernel: str, record: type[ctypes.Structure]) -> int:
    return loaded().kernel(kernel, record)


def threads() -> int:
    """PyTorch's number of threads; 1 where ours would come from another OpenMP runtime."""
    return torch.get_num_threads() if loaded().shared_threads else 1


def graded(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd wants to know of an op over these tensors: the C forms have no gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def packed(x: Tensor) -> Tensor:
    """`x` (n, ...) as a kernel reads tokens: float32, the numbers of a token side by side, tokens any stride
    apart. Copies only what lies otherwise."""
    if x.dtype != torch.float32:
        return x.float().contiguous()
    if x.is_contiguous():
        return x
    wanted = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != wanted:
            return x.contiguous()
        wanted *= size
    return x


@contextmanager
def in_place(state: Tensor) -> Iterator[Tensor]:
    """`state` as one run of numbers for a kernel to update: itself, or a copy that is copied back."""
    held = state.contiguous()
    yield held
    if held is not state:
        state.copy_(held)


def stride(x: Tensor | None) -> int:
    """How far apart tokens lie, in numbers; 0 for None."""
    return 0 if x is None else x.stride(0)


def _one_thread() -> None:
    torch.set_num_threads(1)


# A team's threads do not live on in a forked child, where the next parallel call, PyTorch's own too, would
# wait for them for ever. PyTorch's data loaders do the same in their workers.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_one_thread)
