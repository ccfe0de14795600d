"""A program: every Triton op over three tokens, or rows, that lie 2**30 numbers apart. Run by test_cases.py.

The third lies past what 32 bits count, at an offset that wraps to a place before the first, where NaN waits.
The memory is a file of holes, of which a few pages are ever touched. Prints `right: OP, OP ...`; exit status
77 and the reason where there is no room for such a mapping.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.kernels import calls
from tests.triton_interpreter import install

install()

APART, WRAPPED = 2**30, 2**31
ROOM = 2**20  # numbers that an argument may take beside each of the three places
KINDS = ("linear", "linear, by channel", "delta", "delta, by channel", "low rank", "selective", "recurrence")
KINDS += ("conv",)


class Holes:
    """Virtual memory of one dtype; `far` puts the tokens of a tensor apart in it."""

    def __init__(self, folder: str, dtype: torch.dtype):
        size = WRAPPED + 2 * APART + 64 * ROOM
        path = Path(folder) / str(dtype)
        with path.open("wb") as file:
            file.truncate(size * dtype.itemsize)
        self.memory, self.taken = torch.from_file(str(path), shared=True, size=size, dtype=dtype), 0

    def far(self, x: Tensor) -> Tensor:
        """The same three tokens, further apart; NaN where the third's offset wraps to."""
        assert len(x) == 3 and x[0].numel() <= ROOM
        begin, self.taken = self.taken, self.taken + ROOM
        inner = x[0].contiguous().stride()
        spread = self.memory.as_strided(x.shape, (APART, *inner), WRAPPED + begin)
        spread.copy_(x)
        self.memory[begin : begin + x[0].numel()] = torch.nan
        return spread


def main() -> None:
    right = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            holes = {dtype: Holes(folder, dtype) for dtype in (torch.float32, torch.bfloat16)}
        except (OSError, RuntimeError) as error:
            print(f"no mapping of this size here: {error}")
            raise SystemExit(77) from None
        for op, given in every():
            narrow = {n: _cast(n, x) for n, x in given.items()}
            for each in holes.values():
                each.taken = 0
            apart = {n: _apart(x, holes) for n, x in narrow.items()}
            want = calls.run("triton", op, calls.copied(narrow))
            calls.same(calls.run("triton", op, apart), want, op, 1e-6)
            right.append(op)
    print("right:", ", ".join(dict.fromkeys(right)))


def every() -> Iterator[tuple[str, dict[str, Any]]]:
    """An op and its arguments, three tokens or rows on the first axis of what has them."""
    for kind in KINDS:
        yield calls.scan(kind, [3], heads=(1, 2))
        yield calls.step(kind, 3, heads=(1, 2))
    yield calls.step("attention", 3)
    x, weight, scales = torch.randn(3, 70), torch.randint(-9, 9, (5, 70)).to(torch.int8), torch.rand(5, 2)
    yield "linear", {"x": x, "weight": weight, "scales": scales}
    yield "rms_norm", {"x": x, "weight": torch.rand(70), "eps": 1e-5, "gate": torch.randn(3, 70)}


def _cast(name: str, x: Any) -> Any:
    return x.bfloat16() if name in ("q", "k", "v", "x", "z") and isinstance(x, Tensor) else x


def _apart(x: Any, holes: dict[torch.dtype, Holes]) -> Any:
    return holes[x.dtype].far(x) if isinstance(x, Tensor) and len(x) == 3 and x.dtype in holes else x


if __name__ == "__main__":
    main()
