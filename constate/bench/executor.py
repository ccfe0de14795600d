"""Where the points of a sweep run: in this process, one after another, or as tasks of a Ray cluster.

Knows tasks and workers; knows nothing of what a task measures. A task that measures memory starts a process
of its own wherever it runs (see memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .place import here

EXECUTORS = ("local", "ray")
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Done(Generic[R]):
    """Task number `index` gave `result` at `place` (the machine and versions there, see place.here)."""

    index: int
    result: R
    place: Mapping[str, Any]


def points(
    work: Callable[[T], R],
    tasks: Sequence[T],
    executor: str = "local",
    *,
    gpus: int = 0,
    alone: bool = False,
) -> Iterator[Done[R]]:
    """`work` of every task, each as soon as it is done: in order where `executor` is "local", with "ray" as
    they come. Under "ray" `work`, tasks and results must pickle, each task is given `gpus` cards and, where
    it is to be `alone`, a whole machine's cores, and one whose worker is lost runs again. What `work` raises
    ends the sweep. Raises ValueError at once for an executor that is not known or cannot run here."""
    check(executor)
    if executor == "ray":
        from .ray.sweep import spread

        return spread(work, tasks, gpus, alone)
    return (Done(i, work(task), here()) for i, task in enumerate(tasks))


def check(executor: str) -> None:
    """Raises ValueError for an executor that is not known, or whose package is absent."""
    if executor not in EXECUTORS:
        raise ValueError(f"--executor {executor!r} is not known; known are {', '.join(EXECUTORS)}")
    if executor == "ray":
        from .ray.cluster import present

        present()


def in_order(done: Iterable[Done[R]]) -> Iterator[Done[R]]:
    """The same, by task: one that comes early waits for those before it."""
    waiting: dict[int, Done[R]] = {}
    following = 0
    for one in done:
        waiting[one.index] = one
        while following in waiting:
            yield waiting.pop(following)
            following += 1
