"""Where and with what something was measured: the machine, the versions, the source's git revision.

Knows how a system tells these; imports no torch, so that it may run before, or in place of, a process that
measures.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "flash-linear-attention",
    "mamba-ssm",
    "vllm",
    "ray",
    "llama-cpp-python",
)
CPUINFO, MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")


@cache
def here() -> dict[str, Any]:
    """`machine`, `versions` and `revision` of this process, as every record carries them."""
    return {"machine": machine(), "versions": versions(), "revision": revision()}


def machine() -> dict[str, Any]:
    """`cpu` its name, `cores` that this process may use, `memory_bytes`, `gpu` and `driver` (None without
    an NVIDIA card), `gpu_memory_bytes`, `system`. None where the system does not tell."""
    gpus = [line.split(", ") for line in _said("nvidia-smi", *_QUERY).splitlines() if line.count(", ") == 2]
    return {
        "cpu": _field(CPUINFO, "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "gpu": ", ".join(name for name, _, _ in gpus) or None,
        "gpu_memory_bytes": int(float(gpus[0][1])) * 2**20 if gpus else None,
        "driver": gpus[0][2] if gpus else None,
        "system": f"{platform.system()} {platform.release()}",
    }


_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")


def memory_bytes(key: str = "MemTotal") -> int | None:
    """The system's memory; with "MemAvailable" what programs can still have. None where it does not tell."""
    told = _field(MEMINFO, key)
    return int(told.split()[0]) * 1024 if told else None


def versions() -> dict[str, str | None]:
    """Of this package, Python, and what may do the work here; None for a package that is absent."""
    found: dict[str, str | None] = {"constate": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def revision() -> str | None:
    """The git revision of this package's source, with "+" where files differ from it; None outside one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed, or unpacked into someone else's repository
        return None
    head = _said("git", "-C", str(root), "rev-parse", "--short=12", "HEAD").strip()
    changed = _said("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no").strip()
    return head + "+" * bool(changed) if head else None


def _said(program: str, *arguments: str) -> str:
    """What a program prints; nothing where it is absent or fails."""
    if shutil.which(program) is None:
        return ""
    try:
        run = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout if run.returncode == 0 else ""


def _field(path: Path, key: str) -> str | None:
    """The value of the first `key : value` line of a file of /proc."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
