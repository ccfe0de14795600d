"""The table of twins: python -m tests.twin_table [NAME ...] prints, for each released hybrid and attention
variant, what its tests have just found beside transformers' own model.

A row has the largest difference of any logit, how many odd points were seen (left out alone, each moves a
logit by more than 1e-3; the least that one did) and how many laws held, over all of its entries and the
backends that are here. It runs the tests themselves, in this process, and fails as they do. Knows no family.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.core.model import Model
from tests import twins
from tests.models import HYBRIDS, MODELS


@dataclass
class Row:
    """What was found of one model: differences, what odd points moved, and tests passed of those run."""

    differences: list[float] = field(default_factory=list)
    moves: list[float] = field(default_factory=list)
    points: list[bool] = field(default_factory=list)
    laws: list[bool] = field(default_factory=list)

    def line(self, name: str) -> str:
        far = f"{max(self.differences):.1e}" if self.differences else "none"
        least = f"{min(self.moves):.1e}" if self.moves else "none"
        points, laws = (f"{sum(held)}/{len(held)}" for held in (self.points, self.laws))
        return f"{name:16} {far:>18} {points:>11} {least:>12} {laws:>9}"


class Table:
    """A pytest plugin that listens to the tests of twins and laws."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.now = Row()
        self.judge = twins.same_logits

    def row_of(self, nodeid: str) -> Row:
        """The row that a test is about, by its file, or a law's by its model."""
        file, _, test = nodeid.partition("::")
        if file.endswith("_twin.py"):
            name = file.rpartition("/test_")[2].removesuffix("_twin.py")
        else:
            law = test.partition("[")[2]
            name = next((k for k in MODELS if f"-{k}-" in f"-{law}"), "")
            name = MODELS[name].raw["model_type"] if name else ""
        return self.rows.setdefault(name, Row())

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        twins.same_logits = self.compared
        for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
            if hasattr(module, "moved"):
                setattr(module, "moved", self.moved)  # noqa: B010  (a module that may be None, for pyright)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.now = self.row_of(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            test, row = report.nodeid.partition("::")[2], self.row_of(report.nodeid)
            found = {"test_law[": row.laws, "test_each_odd_point": row.points}
            for start, held in found.items():
                if test.startswith(start):
                    held.append(report.passed)

    def compared(self, got: Tensor, want: Tensor, what: str = "logits") -> None:
        if got.shape == want.shape and got.numel():
            self.now.differences.append(float((got.double() - want.double()).abs().max()))
        self.judge(got, want, what)

    def moved(self, twin: twins.Twin, removals: Callable[[Model], Any], n: int = 60) -> float:
        far = twins.moved(twin, removals, n)
        self.now.moves.append(far)
        return far


def main(names: list[str]) -> int:
    if unknown := sorted(set(names) - set(HYBRIDS)):
        print(f"{', '.join(unknown)}: known are {', '.join(HYBRIDS)}", file=sys.stderr)
        return 2
    names, table = names or list(HYBRIDS), Table()
    files = [f"tests/hybrid/test_{name}_twin.py" for name in names]
    laws = " or ".join(f"{name}-" for name in names)
    chosen = f"equals_the_twin or each_odd_point or (test_law and ({laws}))"
    late = "ignore::pytest.PytestAssertRewriteWarning"  # of plugins that what is imported here brought along
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-W", late, "-k", chosen]
    torch.set_num_threads(1)
    code = pytest.main([*files, "tests/test_laws.py", *options], plugins=[table])
    print(f"\n{'model':16} {'largest difference':>18} {'odd points':>11} {'least moved':>12} {'laws':>9}")
    for name in names:
        print(table.rows.get(name, Row()).line(name))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
