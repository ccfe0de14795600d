"""The measurement of a GPU, tried out without one: that it runs, what it asks, what it calls wrong.

The dry run is the very script at tiny sizes, its workers with Triton in its interpreter. What no CPU can show
(events, graphs) is not shown here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.bench.gpu import card, checks, models, peers, plan, report, run, sanitizer, scans, worker
from constate.bench.gpu.clock import Clock
from constate.bench.gpu.families import FAMILIES
from constate.cli import main
from constate.kernels import dispatch, reference
from constate.loading import architectures

KEYS = {
    *("card", "versions", "backends", "device", "backends_checked", "sizes", "yardsticks", "ops", "families"),
    *("scans", "steps", "models", "sanitizer", "failures", "left_out", "seconds"),
}


# -- the whole of it --------------------------------------------------------------------------------


def test_the_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every op, family, time and model of the plan, right in Triton's interpreter; the same on paper."""
    out = tmp_path / "card.json"
    status = main(
        ["bench", "gpu", "--dry-run", "--workers", "1", "--against", "", "--out", str(out), "--json"]
    )
    said = capsys.readouterr()
    record = json.loads(said.out)
    assert record == json.loads(out.read_text()) and record.keys() == KEYS
    assert report.wrong(record) == [] and status == 0, said.err
    assert record["failures"] == record["left_out"] == [] and record["sanitizer"] is None
    assert str(record["versions"]["torch"]).split("+")[0] == torch.__version__.split("+")[0]
    served = {op for op, c in dispatch.select("triton", "cpu").choices.items() if c.backend == "triton"}
    assert {row["op"] for row in record["ops"]} == served
    assert all(row["ok"] for row in (*record["ops"], *record["families"]))
    assert [row["family"] for row in record["families"]] == list(plan.DRY.families)
    for section, cases, key in (("scans", scans.SCANS, "length"), ("steps", scans.STEPS, "rows")):
        ours = [row for row in record[section] if row["engine"] == "constate"]
        assert [row["case"] for row in ours] == list(cases)
        assert all(row[key] == getattr(plan.DRY, "lengths" if key == "length" else key)[0] for row in ours)
        assert all(row["seconds"] > 0 and row["nbytes"] > 0 and row["reason"] for row in ours)
        others = {row["engine"] for row in record[section]} - {"constate"}
        assert others == {"pytorch"}
        assert all(row["difference"] < 1e-5 for row in record[section] if row["engine"] == "pytorch")
    phases = [(row["phase"], row.get("graph_reason")) for row in record["models"]]
    assert [phase for phase, _ in phases] == ["decode", "decode", "read"]
    assert phases[1][1] == "asked for without"
    names = [title for title, _, rows in report.tables(record) if rows]
    assert names == ["ops", "families", "scans", "steps", "models"]


def test_the_tables_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And a fault is an exit status of 1, told on standard error."""
    record = {
        **{key: [] for key in ("ops", "scans", "steps", "models", "failures", "left_out")},
        "families": [{"family": "mamba2", "backend": "triton", "ok": False, "max_error": 0.5}],
        "sanitizer": None,
        "yardsticks": {"error": "none"},
    }
    monkeypatch.setattr(run, "measure", lambda *args, **options: record)
    assert main(["bench", "gpu", "--quick"]) == 1
    said = capsys.readouterr()
    assert "mamba2" in said.out and "NO" in said.out
    assert "mamba2 triton: off by 0.5" in said.err


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(["bench", "gpu", "--quick", "--workers", "1"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "cuda" in said.err


# -- what is asked ----------------------------------------------------------------------------------


def test_every_architecture_has_a_family() -> None:
    assert {raw["model_type"] for raw in FAMILIES.values()} == set(architectures())


@pytest.mark.parametrize("sizes", [plan.QUICK, plan.FULL, plan.DRY], ids=["quick", "full", "dry"])
def test_the_plan(sizes: plan.Sizes) -> None:
    """Each op at the first width before any family, each family before further widths; every case of every
    size once; and items that JSON carries unchanged."""
    asked, timed = plan.checks(sizes, ["triton", "torch"]), plan.times(sizes, "triton", ["fla", "pytorch"])
    assert json.loads(json.dumps([asked, timed])) == [asked, timed]
    kinds = [item["kind"] for item in asked]
    first = kinds.index("family")
    assert {item["op"] for item in asked[:first]} == set(dispatch.FILES)
    assert {(item["dk"], item["dv"]) for item in asked[:first]} == {tuple(sizes.widths[0])}
    assert kinds.count("op") == len(dispatch.FILES) * 2 * len(sizes.widths) * len(sizes.dtypes)
    assert [item["family"] for item in asked if item["kind"] == "family"] == list(sizes.families)
    for kind, cases, key, values in (
        ("scan", scans.SCANS, "length", sizes.lengths),
        ("step", scans.STEPS, "rows", sizes.rows),
    ):
        ours = [item for item in timed if item["kind"] == kind and item["engine"] == "constate"]
        found = [(item["case"], item[key]) for item in ours]
        assert sorted(found) == sorted((case, value) for case in cases for value in values)
    engines = [item.get("engine", "constate") for item in timed]
    assert engines[: engines.index("fla")] == ["constate"] * engines.index("fla")
    assert {item["case"] for item in timed if item.get("engine") == "fla"} == {
        *("mamba2", "gla", "gated_deltanet", "kda", "rwkv7", "rg_lru")
    }
    shared = [item for item in timed if item["kind"] == "model"]
    assert sorted(r for item in shared for r in item["rows"]) == sorted([*sizes.rows] * len(sizes.models))
    warm = plan.warm(timed, sizes)
    assert {item["case"] for item in warm} == set(scans.STEPS) | set(scans.SCANS)
    assert all(item["budget"] == 0 for item in warm)


def test_the_sizes_that_were_ordered() -> None:
    assert (plan.QUICK.seconds, plan.FULL.seconds) == (90, 300)
    assert sorted(plan.FULL.lengths) == [2**k * 1024 for k in range(7)]
    assert (min(plan.FULL.rows), max(plan.FULL.rows)) == (1, 256) and 64 in plan.FULL.rows
    assert {48, 80, 96, 100, 16, 256} <= {width for pair in plan.FULL.widths for width in pair}


@pytest.mark.parametrize("step", [False, True], ids=["scan", "step"])
@pytest.mark.parametrize("case", scans.RECURRENT)
def test_what_a_call_must_move(case: str, step: bool) -> None:
    """Counted here from what the op returns: inputs and outputs once, and a state in and out."""
    make = scans.token if step else scans.prompt
    call = make(case, 3, torch.bfloat16, "cpu", True)
    tensors = [x for x in call.given.values() if isinstance(x, Tensor)]
    held = next(call.given[name] for name in ("state", "initial", "history") if name in call.given)
    returned = getattr(reference, call.op)(**call.given)
    o = returned[0] if isinstance(returned, tuple) else returned
    assert call.nbytes == sum(x.nbytes for x in tensors) + held.nbytes + o.nbytes
    assert call.flops > 0


def test_the_sizes_of_a_published_model() -> None:
    """Mamba-2's step of 64 rows: 64 heads of 64 by 128 in float32, read and written."""
    call = scans.token("mamba2", 64, torch.bfloat16, "cpu")
    state = 64 * 64 * 128 * 64 * 4
    small = 64 * (2 * 128 * 2 + 2 * 64 * 64 * 2 + 64 * 4)  # q and k of one group, v and o, a decay a head
    assert call.nbytes == 2 * state + small
    assert call.flops == 5 * 64 * 64 * 128 * 64
    scan = scans.prompt("mamba2", 2, torch.bfloat16, "cpu")
    assert scan.given["spans"].lengths == (2,) and scan.given["v"].shape == (2, 64, 64)


# -- what is called wrong ---------------------------------------------------------------------------

ITEM = {"kind": "op", "backend": "torch", "dk": 8, "dv": 12}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", dispatch.FILES)
def test_an_op_in_each_dtype(op: str, dtype: str) -> None:
    """The check itself, where it can be trusted: our PyTorch forms pass it."""
    rows = worker.answer({**ITEM, "op": op, "dtype": dtype}, "cpu")
    assert rows and all(row["ok"] for row in rows), rows
    assert len(rows) == (
        3 if op.startswith("gated_linear") else 2 if "delta" in op and "gated" in op else len(rows)
    )


@pytest.mark.parametrize(("op", "fault"), [("gated_delta_scan", 1), ("short_conv", 0), ("selective_step", 0)])
def test_a_wrong_op_is_found(op: str, fault: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the largest entry too much, in the output or in the state."""
    real = dispatch.select("torch", "cpu")

    def wrong(*args: Any, **options: Any) -> Any:
        returned = getattr(real, op)(*args, **options)
        parts = list(returned) if isinstance(returned, tuple) else [returned]
        parts[fault] = parts[fault] + 0.03 * parts[fault].abs().max()
        return tuple(parts) if len(parts) > 1 else parts[0]

    monkeypatch.setattr(checks, "select", lambda *_: dispatch.Ops(**{**vars(real), op: wrong}))
    for dtype in ("float32", "bfloat16"):
        rows = worker.answer({**ITEM, "op": op, "dtype": dtype}, "cpu")
        assert not any(row["ok"] for row in rows)
        record = {"ops": rows, "families": [], "failures": [], "sanitizer": None}
        assert len(report.wrong(record)) == len(rows) and op in report.wrong(record)[0]


@pytest.mark.parametrize("name", ["mamba2", "gated_deltanet", "llada"])
def test_a_wrong_family_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = worker.answer({"kind": "family", "family": name, "backend": "torch"}, "cpu")
    assert row["ok"] and row["max_error"] <= 1e-4
    real, made = checks.random_model, []

    def second_is_off(*args: Any, **options: Any) -> Any:
        model = real(*args, **options)
        made.append(model)
        if len(made) == 2:
            model.get_parameter("norm.weight").mul_(1.01)
        return model

    monkeypatch.setattr(checks, "random_model", second_is_off)
    (row,) = worker.answer({"kind": "family", "family": name, "backend": "torch"}, "cpu")
    assert row["ok"] is False and row["max_error"] > 1e-3


# -- what breaks ------------------------------------------------------------------------------------


@pytest.fixture
def one() -> Iterator[run.Worker]:
    served = run.Worker("cpu", {})
    yield served
    served.stop()


def test_a_worker_that_breaks_is_late_or_dies(one: run.Worker) -> None:
    """Each time the question is answered with an error, and the next one is served by a new process."""
    good = {"kind": "yardsticks", "nbytes": 2**16, "side": 8}
    reply = one.ask({"kind": "op", "op": "no such op", "backend": "torch", "dk": 8, "dv": 8})
    assert "no such op" in reply["error"] and "Traceback" in reply["traceback"] and not reply["last"]
    first = one.process
    assert "rows" in one.ask(good) and one.process is first
    assert first is not None
    first.kill()
    first.wait()
    assert "error" in one.ask(good)
    assert "rows" in one.ask(good) and one.process is not first
    assert "no answer in 0 s" in one.ask({**good, "side": 4096}, 0.0)["error"]
    assert one.process is None


def test_time_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not asked is named, in the plan's order; what was answered is kept."""

    class Quick:
        def ask(self, item: plan.Item, patience: float) -> dict[str, Any]:
            clock[0] += 1.0
            return {"rows": [{"op": item["op"]}]} if clock[0] != 2.0 else {"error": "broken"}

    clock = [0.0]
    monkeypatch.setattr(run, "monotonic", lambda: clock[0])
    items = [{"kind": "op", "op": str(i)} for i in range(5)]
    found, told = run.Report(), []
    worker_: Any = Quick()
    run._all([worker_], items, 3.0, found, told.append)
    assert [row["op"] for row in found.rows["ops"]] == ["0", "2"]
    assert [each["item"]["op"] for each in found.failures] == ["1"] and "broken" in told[0]
    assert [item["op"] for item in found.left_out] == ["3", "4"]
    late = {"kind": "scan", "case": "gla", "length": 9, "engine": "fla", "backend": "triton"}
    found.add(late, {"error": "no answer in 60 s"})
    assert found.rows["scans"] == [
        {"case": "gla", "length": 9, "engine": "fla", "error": "no answer in 60 s"}
    ]
    assert len(found.failures) == 1, "a peer that hangs is no failure of ours"


# -- what others say --------------------------------------------------------------------------------


def fake_fla(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """fla's step for a decay a head, computed by our reference, its output changed."""

    def fused(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor, **_: Any):
        state = initial_state.clone()
        o = reference.gated_linear_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], state, scale=scale)
        return change(o.unsqueeze(1)), state

    for name in ("fla", "fla.ops", "fla.ops.simple_gla"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["fla.ops.simple_gla"], "fused_recurrent_simple_gla", fused, raising=False)


STEP = {"kind": "step", "case": "mamba2", "rows": 3, "backend": "torch"}
STEP |= {"dtype": "float32", "budget": 0.0, "small": True}


def test_a_peer_is_compared_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    for change, low, high in ((lambda o: o, 0.0, 1e-6), (lambda o: 1.5 * o, 0.49, 0.51)):
        fake_fla(monkeypatch, change)
        (ours,), (theirs,), (absent,) = (
            worker.answer({**STEP, "engine": engine}, "cpu") for engine in ("constate", "fla", "mamba_ssm")
        )
        assert worker.answer({**STEP, "engine": "pytorch"}, "cpu") == []
        assert ours["engine"] == "constate" and "difference" not in ours
        assert theirs["engine"] == "fla" and low <= theirs["difference"] <= high and theirs["seconds"] > 0
        assert absent["engine"] == "mamba_ssm" and "ModuleNotFoundError" in absent["error"]


def test_pytorch_is_a_peer_where_it_has_the_op() -> None:
    for case, kind, size in (("attention", "scan", 9), ("attention", "step", 3), ("int8", "step", 3)):
        item = {**STEP, "kind": kind, "case": case, "length": size, "rows": size, "engine": "pytorch"}
        (theirs,) = worker.answer(item, "cpu")
        assert theirs["engine"] == "pytorch" and theirs["difference"] < 1e-5


def test_modules_stand_in_for_extensions_that_were_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in peers.EXTENSIONS:
        monkeypatch.setitem(sys.modules, name, None)
    peers.prepare()
    assert all(isinstance(sys.modules[name], ModuleType) for name in peers.EXTENSIONS)


# -- what is made of the numbers --------------------------------------------------------------------


def test_fractions_and_ratios() -> None:
    """Of the copy, counted both ways, and of the matrix product in the same dtype; others beside ours."""
    row = {"case": "gla", "length": 1024, "dtype": "bfloat16", "engine": "constate", "seconds": 2.0}
    row |= {"bytes_per_s": 3e12, "flops_per_s": 2e14}
    other = {**row, "engine": "fla", "seconds": 3.0, "bytes_per_s": 2e12, "flops_per_s": 0}
    broken = {"case": "gla", "length": 1024, "engine": "mamba_ssm", "error": "no"}
    shorter = {**row, "length": 512, "seconds": 1.0}
    rule = {"copy_bytes_per_s": 4e12, "matrix_flops_per_s": {"bfloat16": 8e14, "float32": 1.0}}
    record = {
        **{key: [] for key in ("ops", "families", "steps", "models", "failures", "left_out")},
        "scans": [row, other, broken, shorter],
        "sanitizer": None,
        "yardsticks": rule,
    }
    ((title, _, rows),) = report.tables(record)
    assert title == "scans" and [r["length"] for r in rows] == [512, 1024, 1024, 1024]
    _, ours, theirs, failed = rows
    assert (ours["bandwidth_fraction"], ours["flops_fraction"], ours["against_ours_ratio"]) == (
        0.75,
        0.25,
        1.0,
    )
    assert (theirs["against_ours_ratio"], theirs["flops_fraction"]) == (1.5, None)
    assert failed["against_ours_ratio"] is None
    assert report.wrong(record) == []  # a peer's failure is no fault of ours


def test_failures_and_complaints_count() -> None:
    failures = [{"item": {"kind": "op", "op": "linear"}, "error": "KeyError: 1"}]
    rows = [{"tool": "memcheck", "ok": False, "reason": "Invalid read"}, {"tool": "racecheck", "ok": None}]
    record = {"ops": [], "families": [], "failures": failures, "sanitizer": rows}
    assert report.wrong(record) == ["op linear: KeyError: 1", "memcheck: Invalid read"]


def test_the_clock_of_a_cpu() -> None:
    calls: list[int] = []
    clock = Clock("cpu", 0.0)
    timing = clock.time(lambda: calls.append(1))
    assert timing.calls == len(calls) == 1 and timing.seconds == timing.first_s > 0
    assert Clock("cpu", 1e-4).time(lambda: calls.append(1)).calls >= 3
    assert clock.captured([lambda: None]) is None and clock.peak(lambda: None) is None
    rule = card.yardsticks(clock, 2**16, 16)
    assert rule["copy_bytes_per_s"] > 0 and rule["matrix_flops_per_s"].keys() == set(card.DTYPES)


def test_a_model_with_and_without_its_recording() -> None:
    """The backend that records its step does so, and is asked once without; then its ops are its own."""
    rows = models.model("mamba2", [2], [9], "torch", "float32", Clock("cpu", 0.0), True)
    assert [(row["phase"], row["rows"]) for row in rows] == [("decode", 2), ("decode", 2), ("read", 1)]
    assert rows[0]["graph_reason"] == "this backend records no step"
    assert all(row["seconds"] > 0 and row["tokens_per_s"] > 0 and row["backend"] == "torch" for row in rows)
    if any(row.here for row in dispatch.available("cpu") if row.backend == "native"):
        on, off, _ = models.model("mamba2", [2], [9], "native", "float32", Clock("cpu", 0.0), True)
        assert on["recorded"] and not on["graph"] and "no graphs" in on["graph_reason"]
        assert not off["recorded"] and off["graph_reason"] == "asked for without"


# -- the sanitizer ----------------------------------------------------------------------------------


def tool(folder: Path, text: str, status: int = 0) -> None:
    """A compute-sanitizer that says this of every program, and passes the program's input by."""
    path = folder / "compute-sanitizer"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.stdin.read()\nprint('''{text}''')\nsys.exit({status})\n"
    )
    path.chmod(0o755)


def test_the_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    tool(tmp_path, "========= ERROR SUMMARY: 0 errors")
    assert [(r["tool"], r["ok"], r["errors"]) for r in sanitizer.sanitized("cuda", "triton", {})] == [
        ("memcheck", True, 0),
        ("racecheck", True, 0),
    ]
    tool(tmp_path, "========= Invalid __global__ read of size 4 bytes\n========= ERROR SUMMARY: 2 errors", 1)
    found = next(sanitizer.sanitized("cuda", "triton", {}))
    assert found["ok"] is False and found["errors"] == 2 and "Invalid __global__ read" in found["reason"]
    tool(tmp_path, "Device not supported", 1)
    found = next(sanitizer.sanitized("cuda", "triton", {}))
    assert found["ok"] is None and "Device not supported" in found["reason"]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sanitizer, "PLACES", ())
    assert "not on the PATH" in next(sanitizer.sanitized("cuda", "triton", {}))["reason"]


# -- the card, played -------------------------------------------------------------------------------


class Played:
    """Events that count the calls between them as milliseconds, a graph that remembers its calls; `refuses`
    makes it one that cannot be captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: bool = False):
        self.now, self.captures, self.replays, self.peaks = 0.0, 0, 0, iter((100, 164))
        played = self

        class Event:
            def __init__(self, enable_timing: bool = False):
                assert enable_timing

            def record(self) -> None:
                self.at = played.now

            def elapsed_time(self, end: Any) -> float:
                return end.at - self.at

        class Graph:
            def replay(self) -> None:
                played.now += 8.0
                played.replays += 1

        class Stream:
            def __init__(self, device: str = ""):
                self.device = device

            def wait_stream(self, other: Any) -> None:
                assert isinstance(other, Stream)

        @contextmanager
        def capture(graph: Any, **options: Any) -> Iterator[None]:
            assert isinstance(graph, Graph)
            if refuses:
                raise RuntimeError("operation not permitted when stream is capturing")
            played.captures += 1
            yield

        for name, value in {
            "Event": Event,
            "CUDAGraph": Graph,
            "Stream": Stream,
            "current_stream": lambda device=None: Stream(),
            "stream": lambda stream: nullcontext(),
            "graph": capture,
            "synchronize": lambda device=None: None,
            "reset_peak_memory_stats": lambda device: None,
            "memory_allocated": lambda device: next(self.peaks),
            "max_memory_allocated": lambda device: next(self.peaks),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def clock(self) -> Clock:
        clock = Clock("cpu", 1.0)
        clock.cuda, clock.device, clock.flush = True, "cuda:0", torch.ones(4)
        return clock

    def work(self) -> None:
        self.now += 2.0


def test_the_clock_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events round each call alone, after a flush; a graph of several calls, whose time is shared out."""
    card_ = Played(monkeypatch)
    clock = card_.clock()
    timing = clock.time(card_.work)
    assert timing.seconds == 2e-3 and timing.calls == 50
    assert clock.flush is not None and not clock.flush.any()
    assert clock.captured([card_.work] * 4) == 2e-3  # eight milliseconds a replay
    assert card_.captures == 1 and card_.replays > 3
    assert clock.peak(card_.work) == 64
    assert clock.runs(card_.work) > 0


def test_a_call_that_no_graph_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, refuses=True)
    assert played.clock().captured([played.work]) is None and played.replays == 0


def test_what_is_told_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=10**11
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    told = card.card("cuda:0")
    assert told["name"] == "NVIDIA H200" and told["capability"] == "9.0" and told["memory_bytes"] == 10**11
    assert json.loads(json.dumps(told)) == told


def test_a_broken_device_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access nothing in that process can be trusted."""

    def broken(device: str) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert worker._alive("cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert not worker._alive("cuda:0")
