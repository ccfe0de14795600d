"""Everything that test_ray.py asks of a local Ray cluster of two workers; prints what happened as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

PROMPTS = ["It is a truth", *["She", "The", "He was", "Mr", "A", "When", "There"] * 3]
WRITING = {"max_new_tokens": 12, "temperature": 0.8, "seed": 5, "n": 2}


def task(folder: Path, number: int) -> int:
    """The square, after leaving a note of who began it; task 2's first worker waits for its death."""
    mine = folder / f"task{number}.{os.getpid()}"
    mine.touch()
    if number == 2 and len(list(folder.glob("task2.*"))) == 1:
        time.sleep(300)
    return number * number


def wrong(number: int) -> int:
    if number == 1:
        raise ValueError("task 1 is wrong")
    return number


def dies(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def killer(folder: Path, pattern: str) -> threading.Thread:
    """Kills the first process that leaves a note of this name, as soon as another has left one too."""

    def watch() -> None:
        while not ((found := sorted(folder.glob(pattern))) and len(list(folder.glob("*.*"))) > 1):
            time.sleep(0.02)
        os.kill(int(found[0].suffix[1:]), signal.SIGKILL)
        (folder / "killed").write_text(found[0].suffix[1:])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def failure(work: Callable[[], Any]) -> str:
    try:
        return f"nothing, but {work()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class NotedCopy:
    """A copy of the model that leaves a note whenever it writes, and waits for its death the first time."""

    def __init__(self, name: str, options: Any):
        from constate.bench.ray.copies import Copy

        self.copy, self.folder = Copy(name, options), Path(os.environ["NOTES"])

    def write(self, prompts: Any, options: Any) -> Any:
        waits = prompts[0] == PROMPTS[0] and not (self.folder / "killed").exists()
        (self.folder / f"{'waits' if waits else 'copy'}.{os.getpid()}").touch()
        if waits:
            time.sleep(300)
        return self.copy.write(prompts, options)


def main(folder: Path) -> None:
    (notes := folder / "notes").mkdir()
    (copied := folder / "copies").mkdir()
    os.environ["NOTES"] = str(copied)
    import ray

    from constate.bench import executor, memory
    from constate.bench.ray import cluster, copies, sweep
    from constate.bench.results import Results

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    told: dict[str, Any] = {}
    killing = killer(notes, "task2.*")
    done = executor.points(partial(task, notes), range(6), "ray")
    told["swept"] = [one.result for one in executor.in_order(done)]
    killing.join()
    told["killed"] = int((notes / "killed").read_text())
    told["begun"] = {n: [int(p.suffix[1:]) for p in notes.glob(f"task{n}.*")] for n in range(6)}
    told["raised"] = failure(lambda: list(executor.points(wrong, range(3), "ray")))
    sweep.ATTEMPTS = cluster.ATTEMPTS = 1
    told["lost"] = failure(lambda: list(executor.points(dies, [0], "ray")))

    wanted = memory.points(["tiny/mamba2"], [64, 128])
    out = folder / "memory.jsonl"
    told["memory"] = list(memory.memory(wanted, Results(out), executor="ray"))
    told["again"] = list(memory.memory(wanted, Results(out), executor="ray"))

    copies.Copy, kept = NotedCopy, copies.Copy
    killing = killer(copied, "waits.*")
    written = copies.write("tiny/mamba2", PROMPTS, 2, loading={}, writing=WRITING)
    told["written"] = [asdict(result) for result in written]
    killing.join()
    copies.Copy = kept
    told["copy_killed"] = (copied / "killed").exists()
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
