"""Asks the workers: correctness from several at once, times from one alone, all within the seconds given.

Knows processes, deadlines and the order of questions; imports nothing that needs a device. Every answer is
kept as it comes: what runs out of time, hangs or breaks loses itself alone, and is named in the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from time import monotonic
from typing import IO, Any

from ...kernels.packages import PACKAGES
from . import plan
from .plan import Item, Sizes
from .sanitizer import sanitized

PEERS = tuple(PACKAGES)
ROOT = str(Path(__file__).parents[3])  # a checkout need not be installed
CHECKING = 0.45  # of the time at most goes to checks
PATIENCE = 60.0  # seconds for one answer
SECTIONS = {"op": "ops", "family": "families", "scan": "scans", "step": "steps", "model": "models"}


@dataclass
class Report:
    """What has been found so far; `failures` are answers that were errors, `left_out` had no time left."""

    rows: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in SECTIONS.values()})
    failures: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[Item] = field(default_factory=list)

    def add(self, item: Item, reply: dict[str, Any]) -> None:
        if "error" in reply and item.get("engine", plan.OURS) != plan.OURS:
            where = {name: item[name] for name in ("case", "length", "rows", "engine") if name in item}
            self.rows[SECTIONS[item["kind"]]].append({**where, "error": reply["error"]})
        elif "error" in reply:
            told = {"error": reply["error"], "traceback": reply.get("traceback")}
            self.failures.append({"item": dict(item), **told})
        else:
            self.rows[SECTIONS[item["kind"]]].extend(reply["rows"])


class Worker:
    """One process of `worker.py`; started anew after it ended or was late."""

    def __init__(self, device: str, environment: dict[str, str]):
        self.device, self.environment = device, environment
        self.process: subprocess.Popen[str] | None = None

    def ask(self, item: Item, patience: float = PATIENCE) -> dict[str, Any]:
        """`rows`, or `error`: its own, or that there was no answer in `patience` seconds, or none at all."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(item) + "\n")
            process.stdin.flush()
            line = _line(process.stdout, patience)
        except (OSError, Empty) as error:
            self.stop()
            late = f"no answer in {patience:.0f} s" if isinstance(error, Empty) else str(error)
            return {"error": late, "last": True}
        if not line:
            status = process.wait()
            self.stop()
            return {"error": f"the process ended with status {status}", "last": True}
        reply = json.loads(line)
        if reply.get("last"):
            self.stop()
        return reply

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                with suppress(OSError):  # what it was asked and never read
                    pipe.close()
            self.process = None

    def _started(self) -> subprocess.Popen[str]:
        if self.process is None:
            command = [sys.executable, "-m", "constate.bench.gpu.worker", self.device]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, text=True, env=os.environ | self.environment
            )
        return self.process


def measure(
    sizes: Sizes,
    *,
    device: str,
    backends: Sequence[str],
    peers: Sequence[str],
    workers: int,
    sanitize: bool = False,
    told: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Everything that is found in `sizes.seconds`, as one JSON-able record (see the keys below).

    The first of `backends` is timed, all are checked. `told` hears how far it is. Raises ValueError where the
    device cannot be measured at all.
    """
    began = monotonic()
    # What a peer tunes at first use is kept on the disk, so that only one worker tunes it.
    environment = {"TRITON_CACHE_AUTOTUNING": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))}
    if sizes.small:
        environment["TRITON_INTERPRET"] = "1"
    end, report = began + sizes.seconds, Report()
    with _workers(workers, device, environment) as team:
        about = team[0].ask({"kind": "card"}, 2 * PATIENCE)
        if "error" in about:
            raise ValueError(f"{device} cannot be measured: {about['error']}")
        here = {row["backend"] for row in about["rows"][0]["backends"] if row["here"]}
        if absent := [name for name in backends if name not in here]:
            reasons = {row["backend"]: row["reason"] for row in about["rows"][0]["backends"]}
            raise ValueError(f"backend {absent[0]!r} on {device}: {reasons.get(absent[0], 'not known')}")
        found = [name for name in peers if find_spec(name) is not None]
        timed = plan.times(sizes, backends[0], ["pytorch", *found])
        checks = plan.checks(sizes, backends)
        told(f"{len(checks)} checks and {len(timed)} times, {sizes.seconds} s at most")
        _all(team, checks, began + CHECKING * sizes.seconds, report, told)
        if sizes.budget:  # what is compiled now, by all workers, need not be while one of them keeps the time
            _all(team, plan.warm(timed, sizes), began + CHECKING * sizes.seconds, Report(), told)
        for worker in team[1:]:
            worker.stop()
        rule = team[0].ask({"kind": "yardsticks", "nbytes": sizes.copied, "side": sizes.side, "budget": 0.2})
        _all(team[:1], timed, end, report, told)
    return {
        **about["rows"][0],
        "device": device,
        "backends_checked": list(backends),
        "sizes": asdict(sizes),
        "yardsticks": rule.get("rows", [None])[0] or {"error": rule.get("error")},
        **report.rows,
        "sanitizer": list(sanitized(device, backends[0], environment)) if sanitize else None,
        "failures": report.failures,
        "left_out": report.left_out,
        "seconds": monotonic() - began,
    }


@contextmanager
def _workers(count: int, device: str, environment: dict[str, str]) -> Iterator[list[Worker]]:
    team = [Worker(device, environment) for _ in range(count)]
    try:
        yield team
    finally:
        for worker in team:
            worker.stop()


def _all(
    team: Sequence[Worker], items: Sequence[Item], end: float, report: Report, told: Callable[[str], None]
) -> None:
    """Every item to whichever worker is free, in order, until `end`."""
    waiting: Queue[Item] = Queue()
    for item in items:
        waiting.put(item)

    def serve(worker: Worker) -> None:
        while True:
            try:
                item = waiting.get_nowait()
            except Empty:
                return
            left = end - monotonic()
            if left <= 0:
                report.left_out.append(dict(item))
                continue
            reply = worker.ask(item, min(PATIENCE, left + PATIENCE / 6))
            report.add(item, reply)
            if "error" in reply:
                told(f"{' '.join(str(value) for value in item.values())}: {reply['error']}")

    with ThreadPoolExecutor(len(team)) as pool:
        list(pool.map(serve, team))


def _line(stream: IO[str], patience: float) -> str:
    """The next line; raises Empty where there is none in time. The thread that waits ends with the child."""
    lines: Queue[str] = Queue()
    Thread(target=lambda: lines.put(stream.readline()), daemon=True).start()
    return lines.get(timeout=patience)
