"""What the matrix kernel in C promises beside the right numbers: a result depends neither on the number of
rows (up to 16) nor on that of threads, and its record's other fields, which a decode step uses."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.core.int8 import quantised
from constate.kernels.dispatch import available

if not {row.backend: row.here for row in available("cpu")}["native"]:
    pytest.skip("no C kernels on this machine", allow_module_level=True)

from constate.kernels.native.call import run
from constate.kernels.native.linear import FORMATS, Matrix, linear
from tests.kernels import hostile


def stored(out: int, width: int, kind: torch.dtype) -> tuple[Tensor, Tensor | None]:
    weight = hostile.normal(out, width, seed=2)
    return quantised(weight) if kind == torch.int8 else (weight.to(kind), None)


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_results_do_not_depend_on_how_many_rows_come_along(kind: torch.dtype) -> None:
    """Bit for bit: so that a sequence decodes the same alone and in a batch."""
    for width, out in ((1, 1), (83, 37), (768, 70)):
        weight, scales = stored(out, width, kind)
        x = hostile.normal(16, width, seed=1)
        alone = torch.cat([linear(x[i : i + 1], weight, None, scales) for i in range(16)])
        for rows in range(2, 17):
            assert torch.equal(linear(x[:rows], weight, None, scales), alone[:rows]), (width, out, rows)


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_results_do_not_depend_on_threads(kind: torch.dtype) -> None:
    before = torch.get_num_threads()
    weight, scales = stored(150, 200, kind)
    try:
        for rows in (1, 3, 8, 16, 17, 200):
            x, results = hostile.normal(rows, 200, seed=1), []
            for count in (1, 2, 3, 7):
                torch.set_num_threads(count)
                results.append(linear(x, weight, None, scales))
            assert all(torch.equal(results[0], other) for other in results[1:]), rows
    finally:
        torch.set_num_threads(before)


def test_two_python_threads_at_once() -> None:
    """The scratch memory of a kernel is its thread's own."""
    cases = [(hostile.normal(rows, 300, seed=rows), *stored(90, 300, torch.int8)) for rows in (2, 40)]
    wants = [linear(x, weight, None, scales) for x, weight, scales in cases]
    wrong: list[int] = []

    def work(which: int) -> None:
        x, weight, scales = cases[which]
        for _ in range(100):
            if not torch.equal(linear(x, weight, None, scales), wants[which]):
                wrong.append(which)

    workers = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_computes_too() -> None:
    x, (weight, scales) = hostile.normal(40, 300, seed=1), stored(90, 300, torch.int8)
    want = linear(x, weight, None, scales)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(linear(x, weight, None, scales), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_norm_and_add_in_the_record(kind: torch.dtype) -> None:
    """y += W (x / rms(x) * norm) + bias, the norm computed on the way; float64 beside it."""
    for width, out in ((7, 5), (83, 37), (1600, 33)):
        weight, scales = stored(out, width, kind)
        bias, norm = hostile.normal(out, seed=3), hostile.normal(width, seed=4)
        for rows in (1, 5, 8, 21):
            x, y = hostile.normal(rows, width + 3, seed=5), hostile.normal(rows, out + 2, seed=6)
            given = y.clone()
            _matrix(x, y, weight, scales, bias, norm, eps=1e-3, add=1)
            entering = x[:, :width].double()
            rms = (entering.square().mean(-1, keepdim=True) + 1e-3).sqrt()
            meant = weight.double() if scales is None else _meant(weight, scales)
            want = given[:, :out].double() + entering / rms * norm.double() @ meant.T + bias.double()
            assert (y[:, :out] - want).abs().max() <= 1e-5 * max(1, want.abs().max()), (width, out, rows)
            assert torch.equal(y[:, out:], given[:, out:]), "past the row's end"


def _matrix(x: Tensor, y: Tensor, weight: Tensor, scales: Tensor | None, *more: Any, **fields: Any) -> None:
    bias, norm = more
    rows, (out, width) = x.shape[0], weight.shape
    strides = {"x_stride": x.stride(0), "y_stride": y.stride(0), "in": width, "out": out}
    given = {"weight": weight, "scales": scales, "bias": bias, "norm": norm, "x": x, "y": y}
    run("matrix", Matrix, **given, rows=rows, **strides, format=FORMATS[weight.dtype], **fields)


def _meant(weight: Tensor, scales: Tensor) -> Tensor:
    return torch.stack([weight[:, k].double() * scales[:, k // 64] for k in range(weight.shape[1])], dim=1)
