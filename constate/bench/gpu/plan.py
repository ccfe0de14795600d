"""What is asked, and in which order: correctness first, then what matters most among the times.

Knows names and sizes; computes nothing. An item is what one answer of the worker is about, plain enough for
JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...kernels.dispatch import FILES
from .families import FAMILIES
from .peers import known
from .scans import SCANS, STEPS

Item = Mapping[str, Any]
OURS = "constate"
QUICK_MODELS = ("mamba2-130m", "gated-delta-144m")
MODELS = (*QUICK_MODELS, "mamba-130m", "llama-135m", "kimi_linear-medium", "falcon_h1-medium")


@dataclass(frozen=True)
class Sizes:
    """How much is asked. `widths` (dk, dv) and `dtypes` of the ops' checks; `lengths` and `rows` of the
    times; `timed` the dtypes they are of; `budget` seconds a timing; `small` sizes for a dry run."""

    seconds: int
    widths: Sequence[tuple[int, int]]
    dtypes: Sequence[str]
    families: Sequence[str]
    lengths: Sequence[int]
    rows: Sequence[int]
    models: Sequence[str]
    budget: float
    copied: int = 2**31
    side: int = 8192
    small: bool = False

    @property
    def timed(self) -> str:
        return "float32" if self.small else "bfloat16"


QUICK = Sizes(
    seconds=90,
    widths=((64, 64), (24, 16)),
    dtypes=("float32", "bfloat16"),
    families=tuple(FAMILIES),
    lengths=(4096,),
    rows=(64,),
    models=QUICK_MODELS,
    budget=0.02,
)
FULL = Sizes(
    seconds=300,
    widths=((64, 64), (24, 16), (128, 128), (128, 64), (48, 80), (96, 100), (256, 256), (16, 16)),
    dtypes=("float32", "bfloat16", "float16"),
    families=tuple(FAMILIES),
    lengths=tuple(2**k for k in (12, 11, 14, 16, 10, 13, 15)),  # if time runs out, the last are left out
    rows=(64, 1, 256, 16, 4),
    models=MODELS,
    budget=0.05,
)
DRY = Sizes(
    seconds=600,
    widths=((24, 16),),
    dtypes=("float32",),
    families=("gla", "llama"),
    lengths=(33,),
    rows=(2,),
    models=("gla",),
    budget=0.0,
    copied=2**20,
    side=64,
    small=True,
)


def checks(sizes: Sizes, backends: Sequence[str]) -> list[Item]:
    """Every op of each backend at each width and dtype, the first width of all before the next; then every
    family. The worker skips what a backend has no form of."""
    ops = [
        {"kind": "op", "op": op, "backend": backend, "dk": dk, "dv": dv, "dtype": dtype}
        for dk, dv in sizes.widths
        for dtype in sizes.dtypes
        for op in FILES
        for backend in backends
    ]
    families = [{"kind": "family", "family": name, "backend": backends[0]} for name in sizes.families]
    first = len(sizes.dtypes) * len(FILES) * len(backends)
    return [*ops[:first], *families, *ops[first:]]


def times(sizes: Sizes, backend: str, others: Sequence[str]) -> list[Item]:
    """Our steps, scans and models, then the peers' of the same size; the sizes that come first in `sizes`
    before the others. An item is of one engine, so that one which hangs loses itself alone."""
    shared = {"backend": backend, "dtype": sizes.timed, "budget": sizes.budget, "small": sizes.small}
    items: list[Item] = []
    for i in range(max(len(sizes.rows), len(sizes.lengths))):
        rows, lengths = list(sizes.rows[i : i + 1]), list(sizes.lengths[i : i + 1])

        def of(engine: str, rows: list[int] = rows, lengths: list[int] = lengths) -> list[Item]:
            one = {"engine": engine, **shared}
            steps = [{"kind": "step", "case": case, "rows": n, **one} for n in rows for case in STEPS]
            scans = [{"kind": "scan", "case": case, "length": n, **one} for n in lengths for case in SCANS]
            return [item for item in (*steps, *scans) if engine == OURS or known(engine, str(item["case"]))]

        items += of(OURS)
        items += [
            {"kind": "model", "model": model, "rows": rows, "lengths": lengths, **shared}
            for model in sizes.models
        ]
        for engine in others:
            items += of(engine)
    return items


def warm(items: Sequence[Item], sizes: Sizes) -> list[Item]:
    """Each timed case once at its first size: what is compiled then is on the disk when it is timed."""
    first = [
        item for item in items if sizes.rows[0] == item.get("rows") or sizes.lengths[0] == item.get("length")
    ]
    return [{**item, "budget": 0.0} for item in first]
