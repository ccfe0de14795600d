"""The library is compiled once, loaded whole or not at all, and where it cannot be had PyTorch serves.

Two files of the kernels' folder, compiled in a blink, stand for all of them wherever that is enough.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from constate.kernels import dispatch
from constate.kernels.native import build, check, compiler, gated_linear
from constate.kernels.native.call import fields
from constate.kernels.native.compiler import Unbuilt
from constate.spans import Spans
from tests.kernels import hostile

REAL = build.SOURCES


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and sources that take no time."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("run.c", "tape.h"):
        shutil.copy(REAL / name, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("CONSTATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache" / "native"


def load() -> build.Library:
    """What a new process would find."""
    found = build._loaded.__wrapped__()
    if isinstance(found, str):
        raise Unbuilt(found)
    return found


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def refuse(*_: object) -> None:
    raise AssertionError("compiled again")


def python(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    options = ["-W", "error", "-W", "ignore::DeprecationWarning"]
    return subprocess.run(
        [sys.executable, *options, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )


def test_compiled_once_and_found_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="constate"):
        first = load()
    assert "compiling the C kernels" in caplog.text
    assert first.path.parent.parent == place and [p.name for p in place.iterdir()] == [first.path.parent.name]
    assert sorted(p.name for p in first.path.parent.iterdir()) == ["digest", "kernels.so"]
    monkeypatch.setattr(build, "compile_to", refuse)
    assert load().path == first.path
    with pytest.raises(AssertionError, match="compiled again"):  # another flag is another library
        monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-DX"))
        load()


def test_a_changed_source_is_another_library(place: Path) -> None:
    first = load()
    with (build.SOURCES / "run.c").open("a") as file:
        file.write("int more(void) { return 7; }\n")
    second = load()
    assert second.path != first.path and second.handle.more() == 7
    assert not hasattr(first.handle, "more")


def test_old_libraries_go(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "KEPT", 2)
    first = load().path.parent
    for n in range(2):
        os.utime(first, (n, n))  # long ago
        with (build.SOURCES / "run.c").open("a") as file:
            file.write(f"int more{n}(void) {{ return 7; }}\n")
        load()
    assert len(list(place.iterdir())) == 2 and not first.exists()


def truncated(home: Path) -> None:
    library = home / "kernels.so"
    library.write_bytes(library.read_bytes()[:-2000])


def foreign(home: Path) -> None:
    (home / "kernels.so").write_bytes(b"\x7fELF of something else")


def unsigned(home: Path) -> None:
    (home / "digest").unlink()


def not_even_a_folder(home: Path) -> None:
    shutil.rmtree(home)
    home.write_text("")


@pytest.mark.parametrize("harm", [truncated, foreign, unsigned, not_even_a_folder])
def test_what_is_not_whole_is_built_anew(place: Path, harm: Callable[[Path], None]) -> None:
    home = build._found()  # not loaded yet, since this process would keep what it has loaded
    harm(home)
    assert not build._whole(home)
    assert build._found() == home and build._whole(home)
    assert [p.name for p in place.iterdir()] == [home.name], "something was left behind"
    load().run(None, 0, 1)


def test_a_library_of_somebody_else_is_not_loaded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = load().path.parent
    assert build._whole(home)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert build._whole(home) == (home.stat().st_uid == 0)


def test_a_cache_that_cannot_be_written(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CONSTATE_CACHE", "/dev/null/there")
    with caplog.at_level(logging.INFO, logger="constate"):
        found = load()
    assert "cannot be written" in caplog.text and not str(found.path).startswith("/dev")
    found.run(None, 0, 1)
    shutil.rmtree(found.path.parent)


def test_a_compiler_that_hangs_is_ended(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = program(
        tmp_path / "slow", f'[ "$1" = --version ] && exit 0; sleep 60 & echo $! >> {tmp_path}/pids; wait'
    )
    monkeypatch.setenv("CC", slow)
    monkeypatch.setattr(compiler, "PATIENCE", 1.0)
    begun = time.monotonic()
    with pytest.raises(Unbuilt, match="had not ended after 1 s"):
        load()
    assert time.monotonic() - begun < 20
    children = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert children and not any(alive(pid) for pid in children), "what it started runs on"
    assert not list(place.iterdir())


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_compiler_that_fails_is_quoted(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '[ "$1" = --version ] && exit 0; echo no such instruction; exit 3'
    monkeypatch.setenv("CC", program(tmp_path / "bad", text))
    with pytest.raises(Unbuilt, match=r"failed \(3\): no such instruction"):
        load()
    assert not list(place.iterdir())


def test_no_compiler(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(Unbuilt, match="CC is 'no-such-compiler', and there is no such program"):
        load()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unbuilt, match="none of cc, gcc, clang is on the PATH"):
        load()


def test_a_compiler_without_openmp_gives_one_thread(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f'for a in "$@"; do [ "$a" = -fopenmp ] && exit 1; done; exec {shutil.which("cc")} "$@"'
    monkeypatch.setenv("CC", program(tmp_path / "plain", text))
    found = load()
    assert not found.shared_threads and "one thread: OpenMP here is absent" in found.note


def test_one_openmp_serves_pytorch_and_the_kernels() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    script = (
        "import torch; from constate.kernels.native.build import library; found = library()\n"
        "lines = [line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line]\n"
        "names = ('gomp', 'libomp', 'iomp')\n"
        "print(found.shared_threads, len({x for x in lines if any(n in x for n in names)}))"
    )
    done = python(script)
    assert done.stdout.split() == ["True", "1"], done


def test_records_of_two_minds_are_refused() -> None:
    class ShortConv(ctypes.Structure):
        _fields_ = fields("x weight", "rows")

    with pytest.raises(RuntimeError, match=r"ShortConv has 24 bytes here and \d+ in C"):
        build.loaded().kernel("short_conv", ShortConv)


def test_a_library_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.check() is None
    real = gated_linear.gated_linear_step
    monkeypatch.setattr(gated_linear, "gated_linear_step", lambda *a, **o: real(*a, **o) * 1.001)
    reason = check.check()
    assert reason is not None and "gated_linear_step is off by" in reason
    monkeypatch.setattr(gated_linear, "gated_linear_step", lambda *a, **o: real(*a, **o) * torch.nan)
    assert "off by nan" in str(check.check())
    monkeypatch.setattr(build, "unavailable", lambda: reason)
    with pytest.raises(dispatch.BackendUnavailable, match="gated_linear_step is off by"):
        dispatch.select("native", "cpu")
    with pytest.warns(RuntimeWarning, match="gated_linear_step is off by"):
        assert dispatch.select("auto", "cpu").backend == "torch"


CPU_ONLY = """
import sys, warnings
import constate
from constate.kernels.dispatch import BackendUnavailable, available, select
assert select("torch").backend == "torch" and select("reference").backend == "reference"
assert "constate.kernels.native.build" not in sys.modules, "compiles before it is asked for"
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    model = constate.load("tiny/mamba2")
    assert select("auto").backend == "torch"
    text = constate.generate(model, ["The"], max_new_tokens=4)
seen = [w for w in seen if "C kernels" in str(w.message)]
assert [w.category for w in seen] == [RuntimeWarning], seen
assert "the C compiler /bin/false failed" in str(seen[0].message), seen[0]
assert text and model.ops.backend == "torch"
try:
    select("native")
except BackendUnavailable as error:
    assert "/bin/false" in str(error) and "Here: reference, torch" in str(error), error
else:
    raise AssertionError("native was given")
"""


def test_without_a_working_compiler_pytorch_serves_and_one_warning_says_so(tmp_path: Path) -> None:
    """Case K1, as CC that fails."""
    if not Path("/bin/false").exists():
        pytest.skip("no /bin/false")
    done = python(CPU_ONLY, CC="/bin/false", CONSTATE_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr


FORK = """
import os, signal, torch
from constate.kernels.dispatch import select
from constate.spans import Spans
torch.set_num_threads(2)
q, v, spans = torch.randn(64, 4, 16), torch.randn(64, 4, 32), Spans.of([64])
scan = select("native").gated_linear_scan
want, _ = scan(q, q, v, None, None, spans)
torch.randn(400, 400) @ torch.randn(400, 400)
child = os.fork()
if not child:
    signal.alarm(60)
    same = torch.equal(scan(q, q, v, None, None, spans)[0], want)
    torch.randn(400, 400) @ torch.randn(400, 400)
    os._exit(0 if same and torch.get_num_threads() == 1 else 5)
assert os.waitpid(child, 0)[1] == 0, "the child hung, or computed something else"
assert torch.get_num_threads() == 2 and torch.equal(scan(q, q, v, None, None, spans)[0], want)
"""


def test_a_forked_child_goes_on_with_one_thread() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    done = python(FORK)
    assert done.returncode == 0, done.stderr


def test_two_threads_at_once() -> None:
    """Each with a team of its own; one's records are not the other's."""
    spans, before = Spans.of([40, 3]), torch.get_num_threads()
    q = [hostile.normal(43, 2, 16, seed=i) for i in range(2)]
    v = [hostile.normal(43, 2, 32, seed=i + 2) for i in range(2)]
    op = gated_linear.gated_linear_scan
    want = [op(q[i], q[i], v[i], None, None, spans) for i in range(2)]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(100):
            o, final = op(q[i], q[i], v[i], None, None, spans)
            if not (torch.equal(o, want[i][0]) and torch.equal(final, want[i][1])):
                wrong.append(i)

    try:
        torch.set_num_threads(2)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert not wrong


def test_auto_takes_c_on_a_cpu_and_says_what_it_leaves_to_pytorch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops = dispatch.select("auto", "cpu")
    assert ops.backend == "native"
    assert ops.choices["gated_delta_scan"].reason.startswith("auto: C compiled for this machine")
    assert ops.choices["attention"].backend == "torch"
    assert "matrix products" in ops.choices["attention"].reason
    assert dispatch.select("auto", "meta").backend == "torch"
    with pytest.raises(dispatch.BackendUnavailable, match="C kernels serve the CPU alone"):
        dispatch.select("native", "meta")
