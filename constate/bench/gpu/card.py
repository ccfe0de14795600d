"""What is measured on: the card, the versions, and how fast this card copies and multiplies today.

Knows PyTorch's view of a device; knows no op and no model. On a CPU, where the script is only tried out, the
same keys hold the CPU's numbers.
"""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

from ... import __version__
from .clock import Clock

PACKAGES = ("torch", "triton", "transformers", "numpy", "fla-core", "flash-linear-attention")
PACKAGES += ("mamba-ssm", "causal-conv1d")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def card(device: str) -> dict[str, Any]:
    """The device's name and what PyTorch knows of it, sizes in bytes."""
    if not device.startswith("cuda"):
        return {
            "name": platform.processor() or platform.machine(),
            "multiprocessors": torch.get_num_threads(),
        }
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "l2_bytes": getattr(found, "L2_cache_size", None),
    }


def versions() -> dict[str, str | None]:
    """Of Python, of what is installed among the packages that matter here (None: it is not), of this one."""
    found: dict[str, str | None] = {"python": platform.python_version(), "constate": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "cuda": torch.version.cuda, "hip": torch.version.hip}


def yardsticks(clock: Clock, nbytes: int, side: int) -> dict[str, Any]:
    """`copy_bytes_per_s`, counting bytes read and bytes written, of a copy of `nbytes`; and by dtype the
    FLOPs a second of a product of square matrices of that side, of random numbers (zeros run faster)."""
    source = torch.ones(nbytes // 4, device=clock.device)
    target = torch.empty_like(source)
    copied = clock.time(lambda: target.copy_(source)).seconds
    rates = {}
    for name, dtype in DTYPES.items():
        a, b = (torch.randn(side, side, device=clock.device).to(dtype) for _ in range(2))
        rates[name] = 2 * side**3 / clock.time(lambda a=a, b=b: a @ b).seconds
    return {"copy_bytes_per_s": 2 * nbytes / copied, "matrix_flops_per_s": rates}
