"""Whether a checkpoint fits into memory, asked before any of it is taken. Knows sizes and this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Size

# What weights are held in; an architecture keeps some in float32 all the same, too few to count here.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # a container's own, in cgroup v2


def check_room(shapes: Iterable[Size], dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError where weights of these shapes in this dtype are larger than the memory that is free
    on the device: their size, what there is, and in which dtypes they would fit."""
    count, room = sum(shape.numel() for shape in shapes), available(device)
    needed = count * dtype.itemsize
    if room is None or needed <= room:
        return
    fitting = [name for name, other in DTYPES.items() if count * other.itemsize <= room]
    if fitting:
        smaller = f"{' and '.join(fitting)} would fit ({_size(count * DTYPES[fitting[0]].itemsize)})"
    else:
        smaller = f"no dtype would fit (16 bits need {_size(2 * count)})"
    asked = str(dtype).removeprefix("torch.")
    raise ValueError(
        f"{count:,} weights in {asked} are {_size(needed)}, and {_size(room)} of memory are free on "
        f"{device}: {smaller}"
    )


def available(device: torch.device) -> int | None:
    """Bytes that are free on the device; None where this system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    limits = [limit for limit in (_system(), _container()) if limit is not None]
    return min(limits) if limits else None


def _system() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # no such name, or no such call
        return None


def _container() -> int | None:
    try:
        return int(_LIMIT.read_text())  # "max" where there is none
    except (OSError, ValueError):
        return None


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"
