"""torch.compile(model.step, fullgraph=True): every family, served by PyTorch's ops and by Triton's, which are
custom ops that the compiler sees no inside of; and how often a step is compiled as a text grows (case O1)."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from tests.compiled import BACKENDS, difference
from tests.models import MODELS, make, tokens

SAME = 1e-4  # as the laws have it: experts are other products in a compiled step


@pytest.mark.parametrize("ops", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_every_family_is_one_graph(name: str, ops: str) -> None:
    assert difference(name, ops, "aot_eager") <= SAME


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor wants a C++ compiler on a CPU")
@pytest.mark.parametrize(("name", "ops"), [("mamba2", "torch"), ("gla", "triton")])
def test_inductor(name: str, ops: str) -> None:
    """Of the rest: python -m tests.compiled."""
    assert difference(name, ops, "inductor", steps=2) <= SAME


class Counted:
    """A compiler that counts its graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


GROWING = [(name, "torch", None) for name in ("mamba2", "mistral", "qwen3")]


@pytest.mark.parametrize(
    ("name", "ops", "capacity"), [*GROWING, ("qwen3", "torch", 70), ("gla", "triton", 70)]
)
def test_a_growing_text_recompiles_little(name: str, ops: str, capacity: int | None) -> None:
    """Case O1: at lengths 1 to 70 at most 3 times after the first, though the cache grows on its way."""
    torch.compiler.reset()
    counted = Counted()
    model, plain = make(name, ops), make(name)
    mine, cache = (m.init_cache(1, capacity) for m in (model, plain))
    step = torch.compile(model.step, fullgraph=True, backend=counted)
    for ids in tokens(70).view(70, 1):
        got, want = step(ids, mine), plain.step(ids, cache)
        assert float((got - want).abs().max()) <= SAME * max(1.0, float(want.abs().max()))
    assert mine.lengths == (70,) and counted.graphs <= 4
