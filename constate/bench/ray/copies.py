"""One model, M copies of it: prompts written by Ray actors, each with the weights loaded once.

Every result is what one copy alone would give, whichever wrote it: rows of a batch do not know each other,
and a prompt's samples draw from its own seeds. Knows actors and their queue; generation is generate's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...generation import Result, generate
from ...loading import load
from .cluster import ATTEMPTS, cluster, said

BATCH = 8  # prompts a call at most: rows of one model call


class Copy:
    """A loaded model, in a process of its own."""

    def __init__(self, name: str, options: Mapping[str, Any]):
        self.model = load(name, **options)

    def write(self, prompts: Sequence[str], options: Mapping[str, Any]) -> list[Result]:
        return generate(self.model, prompts, **options)


def write(
    name: str,
    prompts: Sequence[str],
    copies: int,
    *,
    loading: Mapping[str, Any],
    writing: Mapping[str, Any],
) -> Iterator[Result]:
    """What `generate(load(name, **loading), prompts, **writing)` returns, in its order, each as soon as it
    and those before it are written. A copy that is lost is started anew and its prompts are written again,
    ATTEMPTS times. Raises ValueError for `copies` below 1, and whatever loading or writing raises."""
    if copies < 1:
        raise ValueError(f"copies {copies}: at least 1 is wanted")
    batches = _batches(prompts, copies, writing)
    copies = min(copies, len(batches))
    with cluster() as ray:
        share = ray.cluster_resources().get("CPU", 1) / copies
        cards = int(str(loading.get("device", "cpu")).startswith("cuda"))
        actor = ray.remote(Copy).options(
            num_cpus=int(share) or share, num_gpus=cards, max_restarts=ATTEMPTS, max_task_retries=ATTEMPTS
        )
        actors = [actor.remote(name, loading) for _ in range(copies)]
        todo = iter(enumerate(batches))
        running: dict[Any, tuple[int, Any]] = {}

        def start(idle: Any) -> None:
            for number, (batch, options) in todo:
                running[idle.write.remote(batch, options)] = (number, idle)
                return

        for idle in actors:
            start(idle)
        early: dict[int, list[Result]] = {}
        told = 0
        while running:
            (ready,), _ = ray.wait(list(running), num_returns=1)
            number, idle = running.pop(ready)
            try:
                early[number] = ray.get(ready)
            except ray.exceptions.RayError as error:
                raise said(error) from None
            start(idle)
            while told in early:
                yield from early.pop(told)
                told += 1


def _batches(
    prompts: Sequence[str], copies: int, writing: Mapping[str, Any]
) -> list[tuple[Sequence[str], Mapping[str, Any]]]:
    """The prompts in order, BATCH together at most, each batch with its own options: where every prompt has a
    text to its right, with those."""
    size, right = max(1, min(BATCH, -(-len(prompts) // copies))), writing.get("infill")
    batches = []
    for first in range(0, len(prompts), size):
        mine = slice(first, first + size)
        own = {"infill": right[mine]} if isinstance(right, list) else {}
        batches.append((prompts[mine], {**writing, **own}))
    return batches
