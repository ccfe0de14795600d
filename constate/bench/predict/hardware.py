"""What machines can do, by name, and what this one can.

Peaks as their makers state them: dense (no 2:4 sparsity), matrix products that sum in float32. Real code
reaches some 85 to 92 percent of the bandwidth and 60 to 75 of the products. Knows no model.

Sources: NVIDIA's data sheets of A100 SXM (2020), H100 SXM (2022), H200 SXM (2023) and HGX B200 (2024), whose
sparse numbers are halved; the white papers of the Ada (2022) and Blackwell (2025) GeForce cards; AMD's of the
EPYC 9654 (2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...loading.names import near


@dataclass(frozen=True)
class Hardware:
    """`bandwidth` bytes a second of its memory, `flops` a second by the activations' dtype, `memory_bytes`
    it has (None: not known). `measured`: whether that was seen here or read in a data sheet."""

    name: str
    bandwidth: float
    flops: Mapping[str, float]
    memory_bytes: int | None
    measured: bool = False

    def rate(self, dtype: str) -> float:
        """FLOPs a second with activations of this dtype."""
        return self.flops["float32" if dtype == "float32" else "bfloat16"]

    def ridge(self, dtype: str) -> float:
        """FLOPs a byte beyond which arithmetic bounds and not the memory."""
        return self.rate(dtype) / self.bandwidth


def _sheet(name: str, bandwidth: float, bfloat16: float, float32: float, memory: float) -> Hardware:
    return Hardware(name, bandwidth, {"bfloat16": bfloat16, "float32": float32}, int(memory))


GIB = 2**30
NAMED: Mapping[str, Hardware] = {
    each.name: each
    for each in (
        _sheet("a100", 2.039e12, 312e12, 19.5e12, 80e9),
        _sheet("h100", 3.35e12, 989e12, 67e12, 80e9),
        _sheet("h200", 4.8e12, 989e12, 67e12, 141e9),
        _sheet("b200", 8e12, 2250e12, 75e12, 180e9),
        # float16 sums would be twice as fast on the two GeForce cards, and PyTorch asks for float32 ones
        _sheet("rtx4090", 1.008e12, 165.2e12, 82.6e12, 24 * GIB),
        _sheet("rtx5090", 1.792e12, 209.5e12, 104.8e12, 32 * GIB),
        # One socket: 12 channels of DDR5-4800, 96 cores at 2.4 GHz of 32 float32 or 64 bfloat16 FLOPs a cycle
        _sheet("ddr5-12ch", 460.8e9, 14.7456e12, 7.3728e12, 768 * GIB),
    )
}
THIS = "this"


def hardware(name: str, device: str = "cpu") -> Hardware:
    """The machine of this name; "this" is measured, on `device`. Raises ValueError with the names known."""
    if name in (THIS, "this machine"):
        return this_machine(device)
    key = name.lower().replace(" ", "").replace("_", "-")
    if key not in NAMED:
        raise ValueError(f"hardware {name!r} is not known; {near(key, [*NAMED, THIS])}")
    return NAMED[key]


def this_machine(device: str = "cpu") -> Hardware:
    """What this machine does, measured in a second or two (see bench/machine.py), and its free memory. A CPU
    computes in float32 whatever the weights are stored as, and so has one rate."""
    from ...loading.folder import device_named
    from ...loading.memory import available
    from ..machine import measure

    place = device_named(device)
    plain = measure(device)
    half = plain.flops if place.type == "cpu" else measure(device, torch.bfloat16).flops
    rates = {"float32": plain.flops, "bfloat16": half}
    return Hardware(f"this machine ({device})", plain.bandwidth, rates, available(place), measured=True)
