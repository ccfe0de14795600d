"""What this machine can do at best, measured: the yardstick that fractions are given in. Knows no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median
from time import perf_counter

import torch

STREAM = 512 * 2**20  # bytes read: past a server's last cache too, of 260 MiB and more
SIDE = 1024  # of the square matrices multiplied


@dataclass(frozen=True)
class Machine:
    """Bytes a second of a plain read, and FLOPs a second of a square matrix product in one dtype."""

    bandwidth: float
    flops: float


def measure(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Machine:
    """Time one read and one product, each a few times, with as many threads as torch has now."""
    stream = torch.ones(STREAM // 4, device=device)
    a, b = (
        torch.ones(SIDE, SIDE, device=device, dtype=dtype),
        torch.ones(SIDE, SIDE, device=device, dtype=dtype),
    )
    return Machine(STREAM / _seconds(stream.sum, device), 2 * SIDE**3 / _seconds(lambda: a @ b, device))


def measured(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Machine:
    """The same, taken once in this process for as many threads as torch has now."""
    return _measured(device, dtype, torch.get_num_threads())


@cache
def _measured(device: str, dtype: torch.dtype, threads: int) -> Machine:
    return measure(device, dtype)


def _seconds(work: Callable[[], torch.Tensor], device: str) -> float:
    work()
    return median(timed(work, device)[0] for _ in range(7))


def timed(work: Callable[[], torch.Tensor], device: str) -> tuple[float, torch.Tensor]:
    """Seconds that `work` takes, the device's queue included, and what it returns."""
    settle(device)
    began = perf_counter()
    result = work()
    settle(device)
    return perf_counter() - began, result


def settle(device: str) -> None:
    """Wait until an accelerator has done what was asked of it; a CPU always has."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
