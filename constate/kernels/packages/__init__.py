"""Installed kernel packages as backends, by name: flash-linear-attention, mamba-ssm, causal-conv1d.

Each serves the ops that it implements, for tensors on a GPU alone; our own fastest form serves the others.
Knows which ops those are and imports no package: `kernels.dispatch` imports a file of this room when it is
asked for.
"""

from collections.abc import Mapping
from types import MappingProxyType

PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fla": (
            *("gated_linear_scan", "gated_linear_step", "gated_delta_scan", "gated_delta_step"),
            *("dplr_delta_scan", "dplr_delta_step", "linear_recurrence_scan", "linear_recurrence_step"),
        ),
        "mamba_ssm": ("selective_scan", "selective_step"),
        "causal_conv1d": ("short_conv", "short_conv_step"),
    }
)
"""package -> the ops that it serves."""
