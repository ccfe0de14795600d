"""A process for each call of a function, forked from one that has imported all and computed nothing.

Memory that an earlier measurement touched is never quite given back, so each needs a process of its own; and
importing PyTorch takes longer than most measurements. A server (`python -m constate.bench.forks`) imports
it once and forks a child for each request. It must never compute: once a process has run a parallel region,
OpenMP hangs in its children. Knows processes and pipes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any

from .peak import Point, measure

UNTOUCHED = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # asked in any other way, CUDA is lost to children


class Forks:
    """The server, started on first use with `environ` added to this process's own variables, and ended by
    `close` or with this process."""

    def __init__(self, **environ: str) -> None:
        self.environ = environ
        self._server: subprocess.Popen[str] | None = None

    def __call__(self, point: Point) -> dict[str, Any]:
        """`peak.measure(point)` in a fresh process. Raises ValueError with what it said where it failed."""
        if self._server is None or self._server.poll() is not None:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "constate.bench.forks"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | UNTOUCHED | self.environ,
                start_new_session=True,  # Ctrl-C is for the process that asked, which ends this one
            )
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(asdict(point)) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise ValueError(f"{point.name}: the measuring process ended without an answer")
        told = json.loads(answer)
        if "error" in told:
            raise ValueError(f"{point.name} at {point.length:,} tokens: {told['error']}")
        return told

    def close(self) -> None:
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)  # and the child that it waits for
            self._server.communicate()
            self._server = None

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(requests: IO[str], answers: IO[str], work: Callable[[Point], dict[str, Any]] = measure) -> None:
    """Answer each line of `requests`, a Point in JSON, by one line, made in a child process."""
    for line in iter(requests.readline, ""):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.write(writer, _answer(work, line).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            told = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not told:
            killed = " (memory did not suffice?)" if status == -9 else ""
            told = json.dumps({"error": f"its process ended with status {status}{killed}"})
        answers.write(told + "\n")
        answers.flush()


def _answer(work: Callable[[Point], dict[str, Any]], line: str) -> str:
    try:
        return json.dumps(work(Point(**json.loads(line))))
    except KeyboardInterrupt:
        return json.dumps({"error": "interrupted"})
    except BaseException as error:  # a child of the server must never run on as a second server
        first = " ".join(str(error).split())
        if isinstance(error, ValueError):
            return json.dumps({"error": first})
        return json.dumps({"error": f"{type(error).__name__}: {first}" if first else type(error).__name__})


if __name__ == "__main__":
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed by what runs goes where it harms no answer
    serve(sys.stdin, told)
