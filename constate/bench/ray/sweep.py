"""Points of a sweep as Ray tasks, one a point. Knows tasks; see executor.py for what a caller is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ..executor import Done
from ..place import here
from .cluster import ATTEMPTS, cluster, said

T = TypeVar("T")
R = TypeVar("R")


def spread(work: Callable[[T], R], tasks: Sequence[T], gpus: int, alone: bool) -> Iterator[Done[R]]:
    """Every task's result as it comes. Ray runs one again whose worker was lost, ATTEMPTS times; with
    `alone` each has all cores of a machine to itself."""
    with cluster() as ray:
        cores = min((node["Resources"].get("CPU", 1) for node in ray.nodes() if node["Alive"]), default=1)
        remote = ray.remote(_run).options(
            num_cpus=max(1, int(cores)) if alone else 1, num_gpus=gpus, max_retries=ATTEMPTS
        )
        waiting = {remote.remote(work, task): i for i, task in enumerate(tasks)}
        while waiting:
            (ready,), _ = ray.wait(list(waiting), num_returns=1)
            try:
                result, place = ray.get(ready)
            except ray.exceptions.RayError as error:
                raise said(error) from None
            yield Done(waiting.pop(ready), result, place)


def _run(work: Callable[[Any], Any], task: Any) -> tuple[Any, Mapping[str, Any]]:
    return work(task), here()
