"""The committed tables of what kernels compile to: they hold every kernel as it is; and what they say."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from constate.bench import doctor
from constate.kernels.triton import compile as compiler
from constate.kernels.triton.compile import SHARED, TARGETS, digest, kept
from constate.kernels.triton.gated_linear import gated_linear_scan
from constate.kernels.triton.launch import Compiled, as_launched
from constate.spans import Spans

VERSIONS = ("3.6.0", "3.7.1", "3.9.0")
ROOT = Path(compiler.__file__).parent
KEYS = ("op", "kernel", "target", "registers", "spill_bytes", "shared_bytes", "tensor_core")
# The chunked form of each gated scan, by the kernels that make products of tiles with states.
CHUNKED = {"gated_linear_scan": "linear_walk", "gated_delta_scan": "delta_walk"}


@pytest.fixture(scope="module")
def declared() -> list[compiler.Case]:
    return compiler.cases()


@pytest.fixture(scope="module")
def sources(declared: list[compiler.Case]) -> dict[str, Compiled]:
    return {digest(case): case for _, _, case in declared}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_table_holds_every_kernel_as_it_is(version: str, sources: dict[str, Compiled]) -> None:
    """By the source of each, so that a table which was not brought up to date shows."""
    wanted = {(source, target): case for source, case in sources.items() for target in TARGETS}
    found = {(row["source"], row["target"]): row for row in kept(version)}
    stale = sorted(
        {f"{case.kernel.__name__} of {case.op}" for key, case in wanted.items() if key not in found}
    )
    assert not stale, f"python -m constate.kernels.triton.compile, with Triton {version}, for {stale}"
    assert set(found) == set(wanted)
    for row in found.values():
        assert list(row)[: len(KEYS)] == list(KEYS)
        assert "error" not in row and row["shared_bytes"] <= SHARED[row["target"]], row


def test_every_kernel_that_is_launched_declares_a_case(declared: list[compiler.Case]) -> None:
    named = re.compile(r"\b(?:launch\(|partial\(\s*launch,)\s*(\w+),")
    launched = {name for path in ROOT.rglob("*.py") for name in named.findall(path.read_text())} - {"kernel"}
    assert launched >= {"linear_walk", "linear_pass", "linear_tiles", "linear_step"}
    assert launched <= {case.kernel.__name__ for _, _, case in declared}


@pytest.mark.parametrize("version", VERSIONS)
def test_no_kernel_spills_on_sm_90(version: str) -> None:
    spilled = [row for row in kept(version) if row["target"] == "sm_90" and row["spill_bytes"]]
    assert not spilled, spilled


@pytest.mark.parametrize("version", VERSIONS)
def test_products_are_made_by_tensor_cores(version: str) -> None:
    """wgmma in each gated scan's walk on sm_90, the targets' own elsewhere; none where no product is."""
    rows = kept(version)
    for op, kernel in CHUNKED.items():
        for target, unit in {"sm_80": "mma", "sm_90": "wgmma", "gfx942": "mfma"}.items():
            found = [r for r in rows if (r["op"], r["kernel"], r["target"]) == (op, kernel, target)]
            assert found and all(row["tensor_core"] == unit for row in found), (op, target)
    without = {row["kernel"] for row in rows if row["tensor_core"] is None}
    assert {"linear_pass", "linear_step"} <= without and not without & set(CHUNKED.values())


def test_float32_is_never_made_of_one_tf32_product(tmp_path: Path) -> None:
    """By the assembler's text, since the interpreter cannot see it: three where one would keep ten bits."""
    script = """
import dataclasses, json, re, sys
import torch
from constate.kernels.triton import compile as compiler
from tests.kernels.triton.test_compile import float32_case
counts = {}
for kind in ("tf32x3", "tf32"):
    case = float32_case(kind)
    row = compiler.measured(case, "sm_90")
    text = compiler._compile(case, "sm_90").asm["ptx"]
    counts[kind] = [len(re.findall(r"mma\\S*tf32", text)), row["float32_products"]]
print(json.dumps(counts))
"""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = plain | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_ALWAYS_COMPILE": "1",
        "TRITON_DUMP_PTXAS_LOG": "1",
    }
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=told)
    assert done.returncode == 0, done.stderr
    counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert counts["tf32"][0] > 0 and counts["tf32x3"][0] == 3 * counts["tf32"][0]
    assert counts["tf32x3"][1] == ["tf32x3"] and counts["tf32"][1] == ["tf32"]


def float32_case(precision: str):
    """The one-pass walk of a float32 scan with a decay a head."""
    q, k, v, g = torch.empty(64, 2, 64), torch.empty(64, 2, 64), torch.empty(64, 2, 64), torch.empty(64, 2)
    spans = Spans.of([32, 32])
    (case,) = as_launched("gated_linear_scan", lambda: gated_linear_scan(q, k, v, g, None, spans))
    return dataclasses.replace(case, constants={**case.constants, "PRECISION": precision})


def test_the_doctor_compiles_what_is_asked_for(
    declared: list[compiler.Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel, in another process; and the table of this Triton says the same of it."""
    one = [found for found in declared if found[2].kernel.__name__ == "linear_pass"][:1]
    monkeypatch.setattr(compiler, "cases", lambda everything: one)
    (row,) = doctor.compiled("sm_90")
    assert row["kernel"] == "linear_pass" and row["tensor_core"] is None and row["spill_bytes"] == 0
    if triton.__version__ in VERSIONS:
        assert row in kept()


def test_what_does_not_compile_says_why(
    declared: list[compiler.Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the row, and in the exit status of a process that dies."""
    (module, _, case) = next(found for found in declared if found[2].kernel.__name__ == "linear_pass")
    monkeypatch.setattr(compiler, "cases", lambda everything: [(module, 10_000, case)])
    (row,) = doctor.compiled("sm_90")
    assert "IndexError" in row["error"] and row["registers"] is None
    with pytest.raises(ValueError, match="target is 'sm_99'; one of sm_80, sm_90, sm_100, gfx942 is wanted"):
        list(doctor.compiled("sm_99"))
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="Triton is not installed"):
        doctor.compiled("sm_90")
