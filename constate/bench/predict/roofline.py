"""How long a pass takes at best, and what bounds it: work over what a machine can do.

Weights are read while they compute, and so are states and keys; one follows the other in every layer. So the
bound of a pass is max(weights' FLOPs / F, weights' bytes / BW) + max(mixing's FLOPs / F, its bytes / BW),
with nothing for launches, for activations, or for a cache that is faster than the memory. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import Hardware
from .paper import Work


@dataclass(frozen=True)
class Bound:
    """`seconds` of the pass at best; `compute` and `memory` what arithmetic and traffic alone would take.
    `by`: "compute" or "memory", whichever fills more of those seconds; `limit` names the largest part:
    compute, weights, kv, state or conv."""

    seconds: float
    compute: float
    memory: float
    by: str
    limit: str


def bound(work: Work, machine: Hardware, dtype: str) -> Bound:
    rate, bandwidth = machine.rate(dtype), machine.bandwidth
    spent = {"compute": 0.0, "weights": 0.0}
    heavy, read = work.weight_flops / rate, work.weight_bytes / bandwidth
    spent["compute" if heavy > read else "weights"] += max(heavy, read)
    mixed, moved = work.mixing_flops / rate, {k: n / bandwidth for k, n in work.moved.items()}
    if mixed > sum(moved.values()):
        spent["compute"] += mixed
    else:
        spent |= moved
    total = sum(spent.values())
    return Bound(
        seconds=total,
        compute=heavy + mixed,
        memory=read + sum(moved.values()),
        by="compute" if 2 * spent["compute"] > total else "memory",
        limit=max(spent, key=lambda kind: spent[kind]),
    )
