"""Compiles this folder's C files into one library on first use, keeps it, and loads it.

The library lies in $CONSTATE_CACHE or ~/.cache/constate, in a folder named after everything that it depends
on: sources, flags, compiler, machine. It is loaded only whole and unchanged; anything else there is built
anew. Where it cannot be had the reason is kept instead, and PyTorch serves. Knows files and OpenMP; knows no
compiler and no op.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from .compiler import Unbuilt, compile_to, compiler, key

SOURCES = Path(__file__).parent
KEPT = 8  # libraries: several versions and environments of one user live side by side
LOG = logging.getLogger("constate")


@dataclass(frozen=True)
class Library:
    """The loaded kernels. `note` says what is less than it could be."""

    path: Path
    handle: ctypes.CDLL = field(repr=False)
    run: Any = field(repr=False)  # constate_run(entries, count, threads)
    shared_threads: bool
    note: str

    def kernel(self, name: str, args: type[ctypes.Structure] | None = None) -> int:
        """The address of a kernel; of its record `args`, C and Python must think alike."""
        if args is not None:
            size = ctypes.c_int64.in_dll(self.handle, f"size_{args.__name__}").value
            if size != ctypes.sizeof(args):
                raise RuntimeError(f"{args.__name__} has {ctypes.sizeof(args)} bytes here and {size} in C")
        address = ctypes.cast(getattr(self.handle, name), ctypes.c_void_p).value
        assert address is not None
        return address


def library() -> Library:
    """The library, compiled if need be, and checked against the specification once a process.

    Raises Unbuilt where there is none: no compiler, one that fails, kernels that compute something else.
    """
    if (reason := unavailable()) is not None:
        raise Unbuilt(reason)
    return loaded()


@cache
def unavailable() -> str | None:
    """Why there is no library to be had here, None where there is one. Compiles it."""
    from .check import check  # which runs kernels

    try:
        loaded()
        return check()
    except Unbuilt as error:
        return str(error)


def loaded() -> Library:
    """The library, unchecked. Raises Unbuilt."""
    found = _loaded()
    if isinstance(found, str):
        raise Unbuilt(found)
    return found


@cache
def _loaded() -> Library | str:
    try:
        return _load(_found() / "kernels.so")
    except Unbuilt as error:
        return str(error)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        return f"the library could not be made or loaded: {error}"


def _found() -> Path:
    """The folder of a whole library, now built if it was not there. Raises Unbuilt and OSError."""
    command = compiler()
    home = cache_root() / key(command, sorted(SOURCES.glob("*.[ch]")))
    return home if _whole(home) else _build(command, home)


def cache_root() -> Path:
    given = os.environ.get("CONSTATE_CACHE")
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "constate"
    return base.expanduser() / "native"


# -- building ----------------------------------------------------------------------------------


def _whole(home: Path) -> bool:
    """Whether this folder holds a library of ours as it was written. A truncated one would crash."""
    try:
        if home.stat().st_uid not in (0, os.getuid()):
            return False
        return (home / "digest").read_text() == _digest(home / "kernels.so")
    except OSError:
        return False


def _digest(file: Path) -> str:
    return blake2b(file.read_bytes()).hexdigest()


def _build(command: list[str], home: Path) -> Path:
    """Compiles into a new folder and moves it to `home`; where that cannot be written, the folder lasts as
    long as this process. Several processes may build at once: each has its own folder, one stays."""
    new = _folder(home.parent)
    LOG.info("compiling the C kernels with %s into %s, once on this machine", command[0], home)
    try:
        compile_to(new / "kernels.so", command, sorted(SOURCES.glob("*.c")))
        (new / "digest").write_text(_digest(new / "kernels.so"))
        if new.parent != home.parent:
            return new
        try:
            _move(new, home)
        except OSError:  # what lies there is not ours to move: a library for this process alone
            atexit.register(shutil.rmtree, new, ignore_errors=True)
            return new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    _prune(home)
    return home


def _folder(parent: Path) -> Path:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".", dir=parent))
    except OSError as error:
        new = Path(tempfile.mkdtemp(prefix="constate-"))
        atexit.register(shutil.rmtree, new, ignore_errors=True)
        LOG.info("%s cannot be written (%s): the C kernels go to %s", parent, error.strerror, new)
        return new


def _move(new: Path, home: Path) -> None:
    if home.exists() and not _whole(home):
        aside = Path(tempfile.mkdtemp(prefix=".", dir=home.parent))
        home.rename(aside / "stale")
        shutil.rmtree(aside, ignore_errors=True)
    try:
        new.rename(home)
    except OSError:
        if not _whole(home):  # otherwise another process was first
            raise
        shutil.rmtree(new, ignore_errors=True)


def _prune(home: Path) -> None:
    others = [path for path in home.parent.iterdir() if path != home and not path.name.startswith(".")]
    for old in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)


# -- loading -----------------------------------------------------------------------------------


def _load(path: Path) -> Library:
    handle = ctypes.CDLL(str(path))
    run = handle.constate_run
    run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int), None
    ours, theirs = _home_of(handle), _torch_openmp()
    shared = ours is not None and ours == theirs
    note = "" if shared else f"one thread: OpenMP here is {ours or 'absent'}, PyTorch's {theirs or 'absent'}"
    return Library(path, handle, run, shared, note)


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p), ("address", ctypes.c_void_p),
    )  # fmt: skip


def _home_of(handle: ctypes.CDLL) -> str | None:
    """The file whose OpenMP a library calls; a second runtime in one process would cost 8 ms a call."""
    try:
        address, found = ctypes.cast(handle.omp_get_num_threads, ctypes.c_void_p), _Symbol()
        if not ctypes.CDLL(None).dladdr(address, ctypes.byref(found)) or not found.file:
            return None
    except (AttributeError, OSError):
        return None
    return os.path.realpath(os.fsdecode(found.file))


def _torch_openmp() -> str | None:
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    try:
        return _home_of(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)))
    except OSError:
        return None
