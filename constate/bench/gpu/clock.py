"""Seconds on a device: one call at a time with cold caches, or many captured in a graph and replayed.

Knows events, graphs and caches; knows not what it times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

FLUSH = 256 * 2**20
"""Bytes written between two timed calls: past any card's last cache. That also gives the host time to queue
the call, so that what lies between the events is the device's time and not Python's."""
MOST = 50  # calls a timing
REPEATS = 5  # runs of something long


@dataclass(frozen=True)
class Timing:
    """Median seconds of a call, of the very first (compilation and all), and how many calls it is the median
    of."""

    seconds: float
    first_s: float
    calls: int


class Clock:
    """Times calls on one device for about `budget` seconds each; with a budget of 0 each once."""

    def __init__(self, device: str, budget: float):
        self.device, self.budget, self.cuda = device, budget, device.startswith("cuda")
        self.flush = torch.empty(FLUSH, dtype=torch.int8, device=device) if self.cuda else None

    def settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def time(self, work: Callable[[], Any]) -> Timing:
        """The call alone: what it needs exists before, what it returns is dropped."""
        first = self._plain(work)
        if not self.budget:
            return Timing(first, first, 1)
        again = self._plain(work)
        calls = max(3, min(MOST, int(self.budget / max(again, 1e-6))))
        times = self._events(work, calls) if self.cuda else [self._plain(work) for _ in range(calls)]
        return Timing(median(times), first, calls)

    def captured(self, works: Sequence[Callable[[], Any]]) -> float | None:
        """Seconds of one of these calls, which differ in the memory they touch, captured together in one
        CUDA graph and replayed; None without such a graph: on a CPU, or for a call that reads the device."""
        if not self.cuda or not self.budget:
            return None
        graph = torch.cuda.CUDAGraph()
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            for work in works:
                work()
        torch.cuda.current_stream(self.device).wait_stream(aside)
        self.settle()
        try:
            # The outer one brings the stream back where a capture fails: PyTorch's own way out then does not.
            with torch.cuda.stream(torch.cuda.current_stream(self.device)), torch.cuda.graph(graph):
                for work in works:
                    work()
        except RuntimeError:  # it asked the device for a value; the stream is as it was
            self.settle()
            return None
        graph.replay()
        return self.time(graph.replay).seconds / len(works)

    @property
    def repeats(self) -> int:
        """How often `runs` calls its work at most."""
        return REPEATS if self.budget else 1

    def runs(self, work: Callable[[], Any]) -> float:
        """Median wall seconds of calls that keep the device busy by themselves, such as decoding: Python's
        time between launches counts, since users wait for it too."""
        return median(self._plain(work) for _ in range(self.repeats))

    def peak(self, work: Callable[[], Any]) -> int | None:
        """Bytes that the call holds at most beyond what was there before it; None on a CPU."""
        if not self.cuda:
            return None
        self.settle()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        self.settle()
        return torch.cuda.max_memory_allocated(self.device) - before

    def _plain(self, work: Callable[[], Any]) -> float:
        self.settle()
        began = perf_counter()
        work()
        self.settle()
        return perf_counter() - began

    def _events(self, work: Callable[[], Any], calls: int) -> list[float]:
        assert self.flush is not None
        marks = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(calls)]
        for began, ended in marks:
            self.flush.zero_()
            began.record()
            work()
            ended.record()
        self.settle()
        return [began.elapsed_time(ended) / 1e3 for began, ended in marks]
