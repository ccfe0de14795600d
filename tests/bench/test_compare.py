"""`constate compare`: what it measures, what it reads, what it refuses."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from constate.bench.compare import measure
from constate.bench.compare.evidence import quality
from constate.bench.compare.workload import Workload
from constate.bench.results import Record, Results, read
from constate.bench.shapes import SHAPES, random_model
from constate.cli import main
from constate.cli.options import nbytes
from constate.core.model import Model
from tests.reports import (
    CPU,
    GPU,
    MODELS,
    measured,
    memory,
    record,
    score,
    speed,
)

# --- the command


def write(path: Path, records: list[Record]) -> str:
    path.write_text("".join(r.line() for r in records))
    return str(path)


def test_the_command_joins_files_of_several_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = [write(tmp_path / "a.jsonl", measured(CPU)), write(tmp_path / "b.jsonl", measured(GPU))]
    out = tmp_path / "out"
    line = ["compare", "--results", files[0], "--results", files[1], "--prompt", "1000", "--new", "280"]
    line += ["--concurrency", "2", "--memory-limit", "20MB", "--out", str(out), "--json"]
    assert main(line) == 0
    told = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [(row["machine"], row["model"]) for row in told] == [
        (machine, model) for machine in ("Abacus 9000, 2 cores", "Sliderule X") for model in MODELS
    ]
    assert {row["memory_limit_bytes"] for row in told} == {20_000_000}
    assert [row["sequences"] for row in told[:3]] == [2, 11, 37]
    assert len(read(out / "results.jsonl")) == 2 * len(measured())
    html = (out / "report.html").read_text()
    assert (
        "constate compare --prompt 1000 --new 280 --concurrency 2 --memory-limit 20000000 "
        f"--results {files[0]}" in html
    )
    # again, from what it wrote
    assert main(["compare", "--results", str(out / "results.jsonl"), "--out", str(out)]) == 0
    assert len(read(out / "results.jsonl")) == 2 * len(measured())


@pytest.mark.parametrize(
    "given, complaint",
    [
        (["--results", "absent.jsonl"], "no such results file"),
        (["--concurrency", "0"], "at least 1 of each"),
        (["--memory-limit", "much"], "'much' is no size"),
        (["--model", "tiny/absent"], "'tiny/absent' does not ship here"),
        (["--against", "abacus"], "known are transformers"),
        (["--executor", "abacus"], "known are local, ray"),
        (["--device", "abacus"], "cannot be used here"),
    ],
)
def test_what_is_wrong_is_said(
    given: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["compare", *given, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert complaint in told and told.count("\n") == 1
    assert not (tmp_path / "out" / "results.jsonl").exists(), "nothing is measured before it is said"


@pytest.mark.parametrize(
    "text, size",
    [
        ("2GiB", 2**31),
        ("80 GB", 80 * 10**9),
        ("1.5mib", 3 * 2**19),
        ("512", 512),
        ("7kb", 7000),
        ("0.5 TiB", 2**39),
    ],
)
def test_sizes_are_binary_where_they_say_so(text: str, size: int):
    assert nbytes(text) == size


def test_records_that_say_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write(tmp_path / "a.jsonl", [r for r in measured() if r.bench == "quality"])
    assert main(["compare", "--results", file, "--out", str(tmp_path / "out")]) == 2
    assert "no measured memory or speed of any model in 3 records" in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "or the next request would be refused for what lies there"


@pytest.mark.parametrize(
    "made, absent",
    [
        (record("memory", memory("mixed", 256) | {"predicted_peak_bytes": None}), "predicted_peak_bytes"),
        (record("speed", speed("mixed", 256) | {"itl_s": "fast"}), "itl_s"),
        (replace(record("memory", memory("mixed", 256)), rows=[{"model": "mixed"}]), "length"),
    ],
)
def test_a_row_by_another_hand_is_refused_by_name(
    made: Record, absent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write(tmp_path / "a.jsonl", [*measured(), made])
    assert main(["compare", "--results", file, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert f"taken {made.taken}, does not tell its {absent}" in told and told.count("\n") == 1


def test_results_that_are_there_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write(tmp_path / "a.jsonl", measured())
    out = tmp_path / "out"
    out.mkdir()
    kept = write(out / "results.jsonl", measured(GPU))
    assert main(["compare", "--results", file, "--out", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert read(kept) == measured(GPU)


# --- what is measured


class Benches:
    """Stands in for both benches: notes what is asked, and is interrupted before call number `until`."""

    def __init__(self, until: int | None = None):
        self.asked: list[Any] = []
        self.until = until

    def memory(self, points: Any, results: Results, executor: str) -> Any:
        for point in points:
            self._note((point.name, point.length, point.rows))
            yield {"model": point.name}

    def timings(self, points: Any, results: Results, executor: str) -> Any:
        for point in points:
            self._note((point.name, point.prompt, point.rows, point.new, point.rounds))
            yield [{"model": point.name}]

    def _note(self, what: Any) -> None:
        if len(self.asked) == self.until:
            raise KeyboardInterrupt
        self.asked.append(what)


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> Benches:
    made = Benches()
    monkeypatch.setattr(measure, "memory", made.memory)
    monkeypatch.setattr(measure, "timings", made.timings)
    return made


def test_a_sweep_asks_for_the_workload_itself(benches: Benches):
    sweep = measure.Sweep(("tiny/mamba", "tiny/gla"), lengths=(256,), prompts=(128,), rows=(4,))
    results = Results()
    done = list(measure.measure(sweep, Workload(500, 12, 2), results, lambda text: pytest.fail(text)))
    names = ("tiny/mamba", "tiny/gla")
    assert benches.asked == [
        *((name, 256, 1) for name in names),
        *((name, 508, 2) for name in names),  # the bench writes 4 more: 512 in the end
        *((name, *at, 12, 3) for name in names for at in ((128, 1), (500, 1), (500, 2), (500, 4))),
    ]
    assert [(at, of) for at, of, _ in done] == [(i, 14) for i in range(15)]
    assert {model: row["score"] for model, row in quality(results.records).items()} == {
        "tiny/mamba": pytest.approx(1.60634208),
        "tiny/gla": pytest.approx(1.62233742),
    }


def test_many_new_tokens_are_timed_by_a_few(benches: Benches):
    sweep = measure.Sweep(("tiny/mamba",), lengths=(256,), prompts=(), rows=())
    list(measure.measure(sweep, Workload(64, 10_000, 1), Results(), lambda text: None))
    assert benches.asked[-1] == ("tiny/mamba", 64, 1, measure.STEPS, measure.ROUNDS)


def test_a_point_that_memory_does_not_hold_is_left_out_and_said(benches: Benches):
    sweep = measure.Sweep(("tiny/transformer",), lengths=(256, 2**30), prompts=(), rows=(1,))
    remarks: list[str] = []
    last = list(measure.measure(sweep, Workload(64, 8, 1), Results(), remarks.append))[-1]
    assert last[:2] == (4, 4)  # 256 tokens, the workload's end, one speed, one score
    assert len(remarks) == 1 and "the largest length that fits is" in remarks[0]


def test_a_denoiser_is_timed_at_the_whole_workload_alone(benches: Benches):
    sweep = measure.Sweep(("tiny/mdlm",), lengths=(64,))
    results = Results()
    list(measure.measure(sweep, Workload(100, 50, 3), results, lambda text: None))
    weighed = [("tiny/mdlm", 64, 1), ("tiny/mdlm", 150, 3)]
    assert benches.asked == [*weighed, *(("tiny/mdlm", 100, rows, 50, 1) for rows in (1, 3))]
    row = quality(results.records)["tiny/mdlm"]
    assert row["bound"] and row["low"] < row["score"] < row["high"]
    assert row["high"] - row["score"] == pytest.approx(1.96 * 0.013099757536484099)


def test_scores_are_measured_where_that_is_asked(benches: Benches, monkeypatch: pytest.MonkeyPatch):
    def fake(model: Model, name: str) -> dict[str, Any]:
        if model.tokenizer is None:
            raise ValueError(f"{name} has no tokenizer")
        return {**score("mixed"), "model": name, "score": 1.25, "dtype": model.weight_dtype}

    monkeypatch.setattr(measure, "bpb", fake)
    sweep = measure.Sweep(("tiny/mamba",), (256,), (), (), {"dtype": "bfloat16"}, score=True)
    results, remarks = Results(), []
    for _ in range(2):  # the second time it is there
        list(measure.measure(sweep, Workload(64, 8, 1), results, remarks.append))
    scored = [r.rows for r in results.records if r.settings["source"] == "measured"]
    assert [(row["score"], row["dtype"]) for (row,) in scored] == [(1.25, "bfloat16")]
    bare = random_model({**SHAPES["mamba-130m"], "num_hidden_layers": 1, "vocab_size": 64})
    monkeypatch.setattr(measure, "load", lambda name, **options: bare)
    list(measure.measure(sweep, Workload(64, 8, 1), Results(), remarks.append))
    assert remarks == ["no score: tiny/mamba has no tokenizer"]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_the_command_measures_once_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Nothing stands in for anything here; the second run finds every point and measures none."""
    line = ["compare", "--model", "tiny/mamba", "--lengths", "96", "--prompts", "8", "--rows", "1"]
    line += ["--prompt", "16", "--new", "4", "--concurrency", "2", "--out", str(tmp_path), "--json"]
    assert main(line) == 0
    told = json.loads(capsys.readouterr().out)
    records = read(tmp_path / "results.jsonl")
    assert [r.bench for r in records] == ["memory"] * 2 + ["speed"] * 3 + ["quality"] * 2
    assert told["measured_peak_bytes"] == records[1].rows[0]["measured_peak_bytes"] > told["weight_bytes"]
    assert told["held_bytes"] == 32_768 + 12_288  # as the README's first table has it
    assert told["workload_s"] == pytest.approx(told["ttft_s"] + 4 * told["itl_s"])
    assert told["bits_per_byte"] == pytest.approx(1.60634208)
    assert main(line) == 0
    assert json.loads(capsys.readouterr().out) == told
    assert read(tmp_path / "results.jsonl") == records


def test_an_interruption_says_what_is_kept(
    benches: Benches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    benches.until = 3
    assert main(["compare", "--model", "tiny/mamba", "--out", str(tmp_path)]) == 130
    assert f"interrupted: {tmp_path / 'results.jsonl'} keeps 0 points" in capsys.readouterr().err


def test_what_has_no_score_on_that_book_has_none(tmp_path: Path):
    for told in ({}, {"held_out": {"my own text": {"bits_per_byte": 1.0, "bytes": 10}}}):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "quality.json").write_text(json.dumps(told))
        assert measure.shipped_score(str(tmp_path)) is None
