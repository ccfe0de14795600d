"""The process that measures: reads a question a line, writes an answer a line, until its input ends.

Knows what kind of question goes where. What libraries print goes to standard error: the answers have standard
output for themselves. A question that breaks is answered with its error; one that breaks the device too is
the last one, and the process ends.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...kernels.dispatch import available, select
from . import card, checks, models, peers, scans
from .clock import Clock
from .plan import OURS
from .scans import Call

COLD = 256 * 2**20  # bytes that a captured run of steps touches before it comes back to the first
COPIES = 64


def answer(asked: Mapping[str, Any], device: str) -> list[dict[str, Any]]:
    """The rows of one question."""
    kind = asked["kind"]
    dtype = card.DTYPES[asked.get("dtype", "float32")]
    clock = Clock(device, asked.get("budget", 0.0))
    if kind == "card":
        backends = [{"backend": r.backend, "here": r.here, "reason": r.reason} for r in available(device)]
        return [{"card": card.card(device), "versions": card.versions(), "backends": backends}]
    if kind == "yardsticks":
        return [card.yardsticks(clock, asked["nbytes"], asked["side"])]
    if kind == "op":
        given = (asked["op"], asked["backend"], device, asked["dk"], asked["dv"], dtype)
        return [{**row, "backend": asked["backend"], "dtype": asked["dtype"]} for row in checks.op(*given)]
    if kind == "family":
        return checks.family(asked["family"], asked["backend"], device)
    if kind == "model":
        given = (asked["model"], asked["rows"], asked["lengths"], asked["backend"], asked["dtype"])
        return models.model(*given, clock, asked["small"])
    return timed(asked, dtype, clock)


def timed(asked: Mapping[str, Any], dtype: torch.dtype, clock: Clock) -> list[dict[str, Any]]:
    """The row of one engine for one op at one size, none where it has no such function."""
    scan = asked["kind"] == "scan"
    make, size = (scans.prompt, asked["length"]) if scan else (scans.token, asked["rows"])

    def drawn() -> Call:
        return make(asked["case"], size, dtype, clock.device, asked["small"])

    call, ops = drawn(), select(asked["backend"], clock.device)
    function, choice = getattr(ops, call.op), ops.choices[call.op]
    more = {"length": size} if scan else {"rows": size}
    shared = {"case": asked["case"], "op": call.op, **more, "dtype": asked["dtype"]}
    shared |= {"flops": call.flops, "nbytes": call.nbytes}

    def ours(call: Call) -> Any:
        return function(**call.given)

    def row(engine: str, works: Sequence[Callable[[], Any]]) -> dict[str, Any]:
        timing = clock.time(works[0])
        captured = None if scan else clock.captured(works)
        best = min(timing.seconds, captured or timing.seconds)
        return {
            **shared,
            "engine": engine,
            "seconds": timing.seconds,
            "captured_s": captured,
            "first_s": timing.first_s,
            "calls": timing.calls,
            "bytes_per_s": call.nbytes / best,
            "flops_per_s": call.flops / best,
            "peak_bytes": clock.peak(works[0]),
        }

    with torch.no_grad():
        copies = 1 if scan or not asked["budget"] else _copies(call)
        several = [call, *(drawn() for _ in range(copies - 1))]
        engine = asked["engine"]
        if engine == OURS:
            found = row(engine, [partial(ours, c) for c in several])
            return [{**found, "backend": choice.backend, "reason": choice.reason}]
        try:
            first = peers.peer(engine, asked["case"], drawn())
            if first is None:
                return []
            off = _apart(first, ours(drawn()))
            made = [peers.peer(engine, asked["case"], c) for c in several]
            return [{**row(engine, [each.work for each in made if each]), "difference": off}]
        except Exception as error:  # a peer that fails is no fault of ours, and is said
            return [{**shared, "engine": engine, "error": said(error)}]


def _apart(peer: peers.Peer, ours: Any) -> float:
    """How far a peer's output lies from ours, as a part of ours, by norm."""
    mine = (ours[0] if isinstance(ours, tuple) else ours).double()
    return float((peer.output(peer.work()).double() - mine).norm() / mine.norm())


def _copies(call: Call) -> int:
    return max(1, min(COPIES, COLD // max(call.nbytes, 1)))


def said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def main(device: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if device.startswith("cuda"):
        peers.prepare()
    for line in sys.stdin:
        reply: dict[str, Any] = {}
        try:
            reply["rows"] = answer(json.loads(line), device)
        except Exception as error:  # the finding
            reply["error"], reply["traceback"] = said(error), traceback.format_exc()
        if "error" in reply or any("error" in row for row in reply["rows"]):
            reply["last"] = not _alive(device)
        print(json.dumps(reply), file=answers, flush=True)
        if reply.get("last"):
            return


def _alive(device: str) -> bool:
    """Whether the device still answers: after an illegal access it does not, in this process."""
    if device.startswith("cuda"):
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return False
    return True


if __name__ == "__main__":
    main(sys.argv[1])
