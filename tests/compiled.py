"""Whether a family's decode step compiles as one graph, and computes there what it computes without.

`python -m tests.compiled [NAME ...]` tries Inductor, which is too slow to try on every family in the tests:
a line a family and backend, exit status 1 where one does not compile or differs. Knows the tiny models.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from constate.spans import Spans
from tests.models import MODELS, make, tokens

LENGTHS = (3, 7)  # read before the step
BACKENDS = ("torch", "triton")


def difference(name: str, ops: str, compiler: str | Callable[..., Any], steps: int = 1) -> float:
    """How far a compiled step of this family, served by `ops`, is from the plain one of PyTorch's ops: the
    largest difference of logits and of states, over the largest entry (of at least 1)."""
    torch.compiler.reset()
    plain, model = make(name), make(name, ops)
    assert plain.fingerprint == model.fingerprint  # and known: a cache of its own would have asked for it
    cache = plain.init_cache(len(LENGTHS), 16)
    plain.forward(tokens(sum(LENGTHS)), Spans.of(LENGTHS), cache)
    mine = cache.clone()
    step = torch.compile(model.step, fullgraph=True, backend=compiler)
    worst = 0.0
    for ids in tokens(len(LENGTHS) * steps, seed=1).view(steps, -1):
        worst = max(worst, _far(step(ids, mine), plain.step(ids, cache)))
    held = zip(mine.leaves(), cache.leaves(), strict=True)
    return max(worst, *(_far(a.float(), b.float()) for (_, a, _), (_, b, _) in held))


def _far(got: Tensor, want: Tensor) -> float:
    if not want.numel():
        return 0.0
    return float((got - want).abs().max()) / max(1.0, float(want.abs().max()))


def main(names: Sequence[str]) -> int:
    worst = 0.0
    for name in names or MODELS:
        for ops in BACKENDS:
            begun = time.perf_counter()
            try:
                found = difference(name, ops, "inductor", steps=2)
            except Exception as error:  # whatever does not compile is the finding
                print(f"{name}: {ops}: {type(error).__name__}: {error}"[:300], flush=True)
                worst = float("inf")
                continue
            worst = max(worst, found)
            print(f"{name}: {ops}: {found:.1e} in {time.perf_counter() - begun:.0f} s", flush=True)
    return 0 if worst <= 1e-4 else 1


if __name__ == "__main__":
    from tests.triton_interpreter import Lazily

    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, as in conftest.py
    sys.meta_path.insert(0, Lazily())
    sys.exit(main(sys.argv[1:]))
