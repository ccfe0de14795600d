"""How kernels are launched, and that the interpreter of these tests computes as a GPU does."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from constate.kernels.dispatch import FILES, select
from constate.kernels.triton import MISSING, launch
from constate.kernels.triton.launch import Launch, as_launched, dry, launches, served
from constate.spans import Spans


@triton.jit
def combine(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def everything(x, y, o, sums, scanned, most, count, SIZE: tl.constexpr):
    """Products, elementwise arithmetic, reductions, a user's scan and reduction, a loop of runtime length."""
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    total = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for number in range(count):
        a = tl.load(
            x + tl.cast(number, tl.int64) * (SIZE * SIZE) + at, mask=(i < SIZE - 1)[:, None], other=0.0
        )
        b = tl.load(y + tl.cast(number, tl.int64) * (SIZE * SIZE) + at)
        total += tl.dot(a, b, input_precision="ieee") + (a * b).to(tl.float32)
    tl.store(o + at, total.to(o.dtype.element_ty))
    tl.store(sums + i, tl.sum(tl.load(x + at), axis=1).to(tl.float32))
    given = tl.load(x + at).to(tl.float32) * 0.1, tl.load(y + at).to(tl.float32)
    tl.store(scanned + at, tl.associative_scan(given, 0, combine)[1])
    tl.store(most + i, tl.reduce(given, 0, combine)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_interpreter_computes_as_a_gpu_does(dtype: torch.dtype) -> None:
    """Left alone it multiplies the bits of bfloat16, and cuts where a GPU rounds."""
    x, y = torch.randn(2, 2, 16, 16).to(dtype)
    o, sums, scanned, most = torch.empty(16, 16, dtype=dtype), *torch.empty(3, 16, 16)
    given: dict[str, Any] = {"x": x, "y": y, "o": o, "sums": sums, "scanned": scanned, "most": most}
    launch.launch(everything, (1,), x, **given, count=2, SIZE=16)
    masked = x.clone()
    masked[:, 15] = 0
    want = (masked.double() @ y.double() + (masked * y).double()).sum(0)
    assert float((o.double() - want.to(dtype).double()).abs().max()) <= 1e-5 * float(want.abs().max())
    assert float((sums[0] - x[0].float().sum(1)).abs().max()) <= torch.finfo(dtype).eps * 40
    carried = torch.zeros(16)
    for t in range(16):
        carried = carried * (x[0, t].float() * 0.1) + y[0, t].float()
        torch.testing.assert_close(scanned[t], carried)
    torch.testing.assert_close(most[0], carried)


@triton.jit
def double(x, n, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(x + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


def test_launches_are_counted_inside_the_block_alone() -> None:
    x = torch.ones(20)
    launch.launch(double, (2,), x, x=x, n=20, SIZE=16)
    with launches() as made:
        launch.launch(double, (2,), x, x=x, n=20, SIZE=16)
        with launches() as inner:
            launch.launch(double, (1,), x, x=x, n=20, SIZE=16)
        launch.launch(double, (0,), x, x=x, n=20, SIZE=16)
    launch.launch(double, (2,), x, x=x, n=20, SIZE=16)
    assert made == [Launch("double", (2,))] and inner == [Launch("double", (1,))]
    assert x.tolist() == [16.0] * 16 + [8.0] * 4


def test_a_dry_launch_runs_nothing_and_knows_its_types() -> None:
    x = torch.ones(20, dtype=torch.bfloat16)
    with dry() as kept:
        launch.launch(double, (2,), x, warps=8, x=x, n=20, SIZE=16)
    assert [(kernel.__name__, warps) for kernel, _, warps, _ in kept] == [("double", 8)]
    assert bool((x == 1).all())
    for n, kind in ((20, "i32"), (32, "i32:16"), (2**40, "i64:16")):
        (case,) = as_launched("an op", lambda n=n: launch.launch(double, (2,), x, x=x, n=n, SIZE=16))
        assert case.signature == {"x": "*bf16", "n": kind} and case.constants == {"SIZE": 16}
    (case,) = as_launched("an op", lambda: launch.launch(double, (2,), x, x=None, n=1, SIZE=16))
    assert case.signature == {} and case.constants == {"x": None, "n": 1, "SIZE": 16}


def test_devices_and_dtypes_that_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(20)
    with pytest.raises(ValueError, match="on meta was given to a Triton kernel; TRITON_INTERPRET=1 is set"):
        launch.launch(double, (2,), x.to("meta"), x=x, n=20, SIZE=16)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="on cpu was given to a Triton kernel; one on a GPU is wanted"):
        launch.launch(double, (2,), x, x=x, n=20, SIZE=16)
    assert served(64, (x, None)) and not served(257, (x,)) and not served(64, (x, x.double()))
    leaf = torch.ones(1, requires_grad=True)
    assert not served(64, (x, leaf))
    with torch.no_grad():
        assert served(64, (x, leaf))


def test_every_op_has_a_kernel_or_a_reason() -> None:
    """And an op without one is PyTorch's, which says so."""
    ops = select("triton", "cpu")
    assert set(MISSING) <= set(FILES)
    for op, choice in ops.choices.items():
        assert choice.backend == ("torch" if op in MISSING else "triton")
        assert choice.reason.startswith(MISSING.get(op, "asked for"))


def test_nothing_of_the_backend_imports_triton_before_it_is_picked() -> None:
    """Nor where it is picked and is not there: the CPU has no GPU's kernels outside the interpreter."""
    script = """
import sys
import constate.kernels.triton
from constate.kernels.dispatch import BackendUnavailable, available, select
available("cpu"), available("cuda"), select("auto", "cpu")
try:
    select("triton", "cpu")
except BackendUnavailable as error:
    print("triton" in sys.modules, error)
"""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=plain
    )
    assert done.stdout.startswith("False backend 'triton' on cpu: Triton kernels serve GPUs alone")


@pytest.mark.parametrize("lengths", [(5, 0, 33, 1), (16,), (0, 0), (32, 16, 17)])
def test_tiles_of_spans(lengths: tuple[int, ...]) -> None:
    """Each token lies in one tile of its row, in order; both copies agree, and are made once."""
    spans = Spans.of(lengths)
    tiles = spans.tiles(16)
    assert tiles is spans.tiles(16) and tiles is not spans.tiles(32)
    covered = []
    for tile in range(tiles.count):
        row, start = int(tiles.row[tile]), int(tiles.start[tile])
        assert int(tiles.first[row]) <= tile < int(tiles.first[row + 1])
        covered += [(row, t) for t in range(start, min(start + 16, spans.offsets[row + 1]))]
    assert covered == [(r, t) for r, part in enumerate(spans.slices()) for t in range(part.start, part.stop)]
    assert tiles.row.shape == tiles.start.shape == (tiles.count,) and int(tiles.first[-1]) == tiles.count
    assert tiles.most == max(tiles.counts) and tiles.first.dtype == tiles.start.dtype == torch.int64


def test_spans_of_a_device_without_a_number_are_not_made_anew_for_one_of_its_tensors() -> None:
    spans = Spans((3, 2), torch.device("cpu", 0))  # as "cuda:0" beside "cuda"
    assert spans.to(torch.zeros(5).device) is spans and spans.to("meta") is not spans
