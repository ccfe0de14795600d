"""The Ray cluster that work goes to: the one that is there, or else a local one for the time of the work.

`constate` must be installed, in this very version, wherever the cluster has workers. Knows how Ray is
started and stopped; knows no work.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from threading import get_ident
from typing import Any

ATTEMPTS = 3  # further ones, for work whose worker was lost


def present() -> None:
    """Raises ValueError where the package ray is not installed."""
    if find_spec("ray") is None:
        raise ValueError("--executor ray wants the package ray: pip install 'constate[ray]'")


@contextmanager
def cluster() -> Iterator[Any]:
    """The module ray, connected: to what this process is connected to already, else to the cluster that
    RAY_ADDRESS or this machine's files name, else to a local one that ends with the work."""
    present()
    # Nothing is reported to anybody, and no worker that was given no card has its view of them changed.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    with redirect_stdout(OwnLines(sys.stdout)):
        if ray.is_initialized():
            yield ray
            return
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError:
            ray.init(address="local", include_dashboard=False, **quiet)
        try:
            yield ray
        finally:
            ray.shutdown()


class OwnLines:
    """Standard output for the thread that made this; what others write goes to standard error. Ray tells of
    lost workers on standard output, from a thread of its own, and results alone belong there."""

    def __init__(self, stream: Any):
        self._stream, self._thread = stream, get_ident()

    def write(self, text: str) -> int:
        return (self._stream if get_ident() == self._thread else sys.stderr).write(text)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def said(error: Exception) -> Exception:
    """What Ray reports as the exception that the work raised, or as a ValueError where its worker was lost
    more often than it is run again."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return cause
    first = str(error).strip().split("\n")[0]
    return ValueError(f"ray: its worker was lost {ATTEMPTS + 1} times ({first})")
