"""Finds the system's C compiler and makes it compile: all files at the same time, a minute at the most.

Knows compilers, their flags, and what a library depends on; knows neither the files nor where they go.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path

# Contracting a * b + c is what makes it fast; -ffast-math would let a NaN, an infinity and exact zeros pass.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC")
PATIENCE = 60.0  # seconds for all of the compiling


class Unbuilt(RuntimeError):
    """There is no library here; the message is the reason."""


def compiler() -> list[str]:
    """The command that compiles C: $CC, or the first there is. Raises Unbuilt."""
    if sys.platform not in ("linux", "darwin"):
        raise Unbuilt(f"C kernels are built on Linux and macOS, not on {sys.platform}")
    given = shlex.split(os.environ.get("CC", ""))
    if given:
        if shutil.which(given[0]) is None:
            raise Unbuilt(f"CC is {os.environ['CC']!r}, and there is no such program")
        return given
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise Unbuilt("no C compiler: none of cc, gcc, clang is on the PATH; CC names another")


def key(command: list[str], sources: list[Path]) -> str:
    """Names everything that a library of these files depends on: another compiler, flag, source or machine is
    another library. Raises Unbuilt where the compiler does not even tell its version."""
    told = blake2b(digest_size=12)
    for file in sources:
        told.update(file.name.encode() + b"\0" + file.read_bytes())
    version = _finish(_start([*command, "--version"]), time.monotonic() + 10)
    for word in (*command, shutil.which(command[0]), version, *FLAGS, _native(), sys.platform, _processor()):
        told.update(str(word).encode() + b"\0")
    return told.hexdigest()


def _native() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _processor() -> str:
    """The machine and what its processor can do, by which a home that machines share keeps theirs apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    told = ("flags", "Features", "model name", "CPU part")
    return platform.machine() + "\n".join(sorted({line for line in lines if line.startswith(told)}))


def compile_to(library: Path, command: list[str], sources: list[Path]) -> None:
    """A shared library of these files; beside it their objects lie for a while. Raises Unbuilt with the
    compiler's words."""
    until = time.monotonic() + PATIENCE
    try:
        _compile([*command, *FLAGS, _native(), "-fopenmp"], library, sources, until)
    except Unbuilt as first:  # some have no OpenMP: one thread is better than none
        try:
            _compile([*command, *FLAGS, _native(), "-Wno-unknown-pragmas"], library, sources, until)
        except Unbuilt:
            raise first from None


def _compile(command: list[str], library: Path, sources: list[Path], until: float) -> None:
    objects = [library.parent / f"{source.stem}.o" for source in sources]
    started = [
        _start([*command, "-c", str(source), "-o", str(target)])
        for source, target in zip(sources, objects, strict=True)
    ]
    try:
        for process in started:
            _finish(process, until)
    finally:
        for process in started:
            _end(process)
    part = library.with_suffix(".part")
    _finish(_start([*command, "-shared", *map(str, objects), "-o", str(part), "-lm"]), until)
    part.rename(library)
    for target in objects:
        target.unlink()


def _start(command: list[str]) -> subprocess.Popen[str]:
    """In a session of its own, so that what a compiler starts can be ended with it."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip


def _finish(process: subprocess.Popen[str], until: float) -> str:
    """What it printed. Raises Unbuilt where it fails, or has not ended by then (and ends it)."""
    name = process.args[0] if isinstance(process.args, list) else process.args
    try:
        told, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        _end(process)
        raise Unbuilt(f"the C compiler {name} had not ended after {PATIENCE:.0f} s") from None
    if process.returncode:
        raise Unbuilt(
            f"the C compiler {name} failed ({process.returncode}): {told.strip()[-500:] or 'no word'}"
        )
    return told


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
