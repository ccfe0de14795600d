"""How calls are recorded, kept alive and replayed; and the memory that results lie in. Knows C calls and no
kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..build import loaded
from ..call import Entry, pointer, threads

Step = Callable[[], object]


class Recorder:
    """`rows` sequences, of which `past` (rows,) int64 tokens each have been read when a step begins.

    Everything whose address was taken is kept alive; whoever records must see to it that it stays where it
    is (a cache that grew, a weight that was replaced, wants a new tape).
    """

    dtypes = (torch.float32, torch.bfloat16)
    """What a model's matrices may be stored in."""

    reason = "C on a CPU, which has no graphs"
    """Why a step is not a CUDA graph."""

    def __init__(self, rows: int, past: Tensor):
        self.rows, self.past = rows, past
        self.call: Any = None  # what steps between pieces are given, anew in every step
        self.shared: dict[Any, Any] = {}  # what whoever records leaves for later calls
        self.offsets = torch.arange(rows + 1)
        self._library = loaded()
        self._kept: list[Any] = [past, self.offsets]
        self._calls: list[tuple[int, ctypes.Structure, bool]] = []
        self._apart = False
        self.pieces: list[Step] = []
        self._turns: dict[Any, Tensor] = {}  # cosines and sines are made once a step

    # -- running --------------------------------------------------------------------------------

    def run(self) -> None:
        """Replay everything recorded, in order."""
        self._close()
        for piece in self.pieces:
            piece()

    def between(self, step: Step, *touched: Tensor) -> None:
        """Record a step that is Python's, which reads and writes `touched`: it runs after what was recorded
        before and before what comes."""
        self._close()
        self.pieces.append(step)

    def _close(self) -> None:
        """Make one C call of what was recorded since the last piece."""
        if not self._calls:
            return
        calls, self._calls = self._calls, []
        entries = (Entry * len(calls))()
        for entry, (kernel, args, apart) in zip(entries, calls, strict=True):
            entry.kernel, entry.args, entry.apart = kernel, ctypes.addressof(args), apart
        self._kept += [entries, *(args for _, args, _ in calls)]
        run, count = self._library.run, len(calls)
        self.pieces.append(lambda: run(ctypes.addressof(entries), count, threads()))

    def _call(self, kernel: str, args: type[ctypes.Structure], **given: Any) -> ctypes.Structure:
        """Append `kernel` with these fields; tensors give their address, and are kept."""
        fields = {}
        for name, value in given.items():
            if isinstance(value, Tensor):
                self._kept.append(value)
                value = pointer(value)
            fields[name] = value
        record = args(**fields)
        self._calls.append((self._library.kernel(kernel, args), record, self._apart))
        return record

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Calls recorded within read and write nothing of one another's: no thread waits between them."""
        before, self._apart = self._apart, True
        yield
        self._apart = before
        if self._calls and not before:
            self._calls[-1] = (*self._calls[-1][:2], False)

    # -- memory --------------------------------------------------------------------------------

    def vector(self, width: int) -> Tensor:
        """Memory for a result, (rows, width)."""
        return torch.zeros(self.rows, width)

    def constant(self, value: Tensor) -> Tensor:
        """A parameter, or what is computed from one, as kernels read it: float32, contiguous."""
        return value.detach().float().contiguous()
