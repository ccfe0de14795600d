"""How a step is recorded as works, made ready and replayed; and the memory that results lie in. Knows works
and how each kind is run; knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..described import Jobs
from ..job import jobs
from ..launch import launch
from .drafts import Draft, fresh
from .fuse import fused, narrowed
from .products import product
from .replay import Replay
from .works import Launched, Product, Python, Run, Scan, Work


class Recorder:
    """`rows` sequences, of which `past` (rows,) int64 tokens each have been read when a step begins.

    Works are only noted while they are recorded. Before the first run they are joined to fewer launches,
    see fuse.py, and made ready. The memory that they name must stay where it is.
    """

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    """What a model's matrices may be stored in."""

    def __init__(self, rows: int, past: Tensor):
        self.rows, self.past = rows, past
        self.call: Any = None  # what steps between works are given, anew in every step
        self.shared: dict[Any, Any] = {}  # what whoever records leaves for later works
        self.works: list[Work] = []
        self.replay: Replay | None = None
        self._turns: dict[Any, Tensor] = {}  # cosines and sines are made once a step

    # -- running --------------------------------------------------------------------------------

    def run(self) -> None:
        """Do everything recorded, in order."""
        if self.replay is None:
            with torch.inference_mode(False), torch.no_grad():  # as where it was recorded
                self.works = fused(narrowed(fused(self.works)))
                ready = [self._ready(work) for work in self.works]
            steps = [work.name for work in self.works if isinstance(work, Python)]
            reason = f"a step of {steps[0]} is Python's" if steps else None
            self.replay = Replay(ready, self.past.device, reason)
        self.replay()

    @property
    def reason(self) -> str | None:
        """Why the step is not replayed as a CUDA graph, None where it is or will be."""
        return None if self.replay is None else self.replay.reason

    def between(self, step: Run, *touched: Tensor) -> None:
        """Record a step that is Python's: it reads and writes `touched` and runs in its place."""
        self.works.append(Python("a mixer", list(touched), list(touched), lambda: step))

    @property
    def pieces(self) -> list[list[Work]]:
        """The works between the steps that are Python's, and each of those by itself."""
        found: list[list[Work]] = []
        for work in self.works:
            if isinstance(work, Python) or not found or isinstance(found[-1][-1], Python):
                found.append([])
            found[-1].append(work)
        return found

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Works recorded within read and write nothing of one another's, which they show by themselves."""
        yield

    def _ready(self, work: Work) -> Run:
        if isinstance(work, Launched):
            return self._launch(work.listed)
        if isinstance(work, Product):
            return product(work)
        assert work.make is not None, f"nobody says how {work.name} is done"
        return work.make()

    def _launch(self, drafts: list[Draft]) -> Run:
        made = [draft.made(self.past) for draft in drafts]
        starts = [0]
        for _, units, _ in made:
            starts.append(starts[-1] + units)
        described = Jobs(tuple(one for one, _, _ in made), tuple(starts))
        widest = max(one.block for one, _, _ in made)
        given: dict[str, Any] = {
            "P": tuple(pointers for _, _, pointers in made),
            "past": self.past,
            "JOBS": described,
            "warps": 4 if widest <= 1024 else 8 if widest <= 4096 else 16,
        }
        return partial(launch, jobs, (starts[-1], self.rows), self.past, **given)

    def leaving(self, scan: Scan) -> dict[str, Any]:
        """What a scan's kernel wants for the end of its programs: LEAVING, None where nothing is to be done,
        and its pointers P."""
        if scan.leaving is None:
            return {"P": None, "LEAVING": None}
        head = scan.o.shape[1] // scan.heads
        together = scan.leaving.size // head
        arrivals = torch.zeros(self.rows, scan.heads // together, dtype=torch.int32, device=self.past.device)
        one, units, pointers = scan.leaving.made(self.past, together, arrivals)
        return {"P": pointers, "LEAVING": Jobs((one,), (0, units))}

    # -- recording ------------------------------------------------------------------------------

    def note(self, draft: Draft) -> None:
        """Append a job."""
        self.works.append(Launched.of(draft))

    def step(self, name: str, reads: list[Tensor], writes: list[Tensor], make: Callable[[], Run]) -> None:
        """Append a launch of a kernel of its own."""
        self.works.append(Work(name, reads, writes, make))

    # -- memory ---------------------------------------------------------------------------------

    def vector(self, width: int) -> Tensor:
        """Memory for a result, (rows, width)."""
        return fresh(self.rows, width, self.past)

    def constant(self, value: Tensor) -> Tensor:
        """A parameter, or what is computed from one, as kernels read it: float32, contiguous."""
        return value.detach().float().contiguous()
