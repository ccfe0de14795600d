"""The ops as Triton kernels, forward and step, one file an op.

Nothing here imports Triton: `kernels.dispatch` imports an op's file when this backend is picked. MISSING
names the ops that have no Triton form, and why; the PyTorch form serves them.
"""

from collections.abc import Mapping
from types import MappingProxyType

MISSING: Mapping[str, str] = MappingProxyType(
    {
        "attention": "many queries at once are PyTorch's fused attention",
    }
)
"""op -> why it has no Triton form. A kernel's author takes the op's line away."""
