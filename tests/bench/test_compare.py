"""The comparison: what it makes of records, each number beside the same worked out by hand or by force."""

import json
import random
import re
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from constate.bench.compare import charts, measure, page
from constate.bench.compare.drawn import lines
from constate.bench.compare.evidence import gather, quality
from constate.bench.compare.figures import figures
from constate.bench.compare.findings import findings
from constate.bench.compare.front import front
from constate.bench.compare.line import Line
from constate.bench.compare.paper_lines import on_paper
from constate.bench.compare.report import report
from constate.bench.compare.standing import Standing, standings
from constate.bench.compare.workload import Workload
from constate.bench.memory import points as bench_points
from constate.bench.memory_rows import row
from constate.bench.results import Record, Results, read
from constate.bench.shapes import SHAPES, random_model
from constate.cli import main
from constate.cli.options import nbytes
from constate.core.model import Model
from tests.reports import (
    CPU,
    GPU,
    MODELS,
    NEW,
    VERSIONS,
    WEIGHTS,
    WORK,
    measured,
    memory,
    record,
    score,
    speed,
)

ASKED = Workload(prompt=1000, new=280, concurrency=2, memory_limit=20_000_000)


def standing(records: list[Record], workload: Workload = ASKED) -> dict[str, Standing]:
    (one,) = gather(records)
    return {s.series: s for s in standings(one, quality(records), workload)}


# --- lines and fronts


@pytest.mark.parametrize("state, token", [(0, 4000), (60_000, 1000), (400_000, 0)])
def test_a_line_is_exact_where_memory_grows_evenly(state: int, token: int):
    line = Line.through({n: state + token * n for n in (260, 4100, 65_540)})
    for length in (0, 1, 259, 260, 261, 5000, 65_540, 10**6):
        assert line.at(length) == pytest.approx(state + token * length)
        assert line.slope(length) == pytest.approx(token)


def test_a_line_follows_a_window_that_fills():
    """Keys and values of a window stop growing: straight pieces say so, and no one line through all would."""
    line = Line.through({n: 1000 * min(n, 4096) for n in (256, 4096, 65_536)})
    assert line.at(1024) == 1_024_000 and line.slope(1024) == 1000
    assert line.at(20_000) == 4_096_000 and line.slope(20_000) == 0
    assert line.reaches(4_095_999) == pytest.approx(4096, abs=0.01)
    assert line.reaches(4_096_001) is None


def test_where_a_line_reaches_is_where_a_search_finds_it():
    source = random.Random(0)
    for _ in range(50):
        lengths = sorted(source.sample(range(1, 400), 4))
        total, points = 0.0, {}
        for length in lengths:
            total += source.choice([0, 0, 7, 1000])
            points[float(length)] = total
        line, wanted = Line.through(points), source.uniform(0, 2500)
        found = next((n / 50 for n in range(50 * 500) if line.at(n / 50) > wanted), None)
        reached = line.reaches(wanted)
        if found is None:
            assert reached is None or reached >= 499
        else:
            assert reached is not None and found - 0.021 <= reached <= found


def test_one_point_is_a_level_line():
    line = Line.through({512: 100})
    assert (line.at(1), line.at(9999), line.slope(3), line.reaches(100), line.reaches(99)) == (
        100,
        100,
        0,
        None,
        0,
    )


def test_the_front_is_what_brute_force_leaves():
    source = random.Random(1)
    points = [(source.randint(0, 9), source.randint(0, 9)) for _ in range(60)]
    kept = front(points, lambda p: p)
    assert kept == sorted(kept)
    for p in points:
        beaten = any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)
        assert (p in kept) == (not beaten)


def test_twins_are_both_on_the_front():
    assert front([("a", 1), ("b", 1)], lambda p: (p[1], p[1])) == [("a", 1), ("b", 1)]


# --- records to evidence


def test_records_are_sorted_by_machine_and_place():
    cpu, gpu = gather([*measured(CPU), *measured(GPU)])
    assert (cpu.label, gpu.label) == ("Abacus 9000, 2 cores", "Sliderule X")
    assert (cpu.limit, gpu.limit) == (16 * 2**30, 80 * 2**30)
    assert len(cpu.memory) == len(gpu.memory) == 15
    assert len(cpu.speed) == len(gpu.speed) == 15


def test_machines_of_one_name_are_told_apart():
    other = {**CPU, "memory_bytes": 2**30}
    labels = [one.label for one in gather([*measured(CPU), *measured(other)])]
    assert labels == ["Abacus 9000, 2 cores (1)", "Abacus 9000, 2 cores (2)"]


def test_the_newest_of_a_point_counts():
    old = record("memory", memory("mixed", 256, peak=2.0), taken="2026-01-01T00:00:00+00:00")
    new = record("memory", memory("mixed", 256, peak=1.0), taken="2026-01-02T00:00:00+00:00")
    for order in ([old, new], [new, old]):
        (one,) = gather(order)
        assert [row["measured_peak_bytes"] for row in one.memory] == [new.rows[0]["measured_peak_bytes"]]


def test_the_newest_score_counts():
    old = record("quality", score("mixed", score=2.0), taken="2026-01-01T00:00:00+00:00")
    new = record("quality", score("mixed", score=1.0), taken="2026-01-02T00:00:00+00:00")
    assert quality([old, new])["mixed"]["score"] == quality([new, old])["mixed"]["score"] == 1.0


def test_series_are_named_after_what_sets_them_apart():
    rows = [speed("mixed", 256), speed("mixed", 256, dtype="int8"), speed("mixed", 256, engine="llama.cpp")]
    (one,) = gather([record("speed", row) for row in rows])
    assert [r["series"] for r in one.speed] == [
        "mixed · float32",
        "mixed · int8",
        "mixed · float32 · llama.cpp",
    ]
    (one,) = gather([record("speed", row) for row in rows[::2]])
    assert [r["series"] for r in one.speed] == ["mixed", "mixed · llama.cpp"]


def test_a_prompt_read_in_one_call_does_not_stand_for_one_read_in_pieces():
    rows = [memory("mixed", 256), memory("mixed", 256, prefill="one-shot", peak=3.0)]
    (one,) = gather([record("memory", row) for row in rows])
    assert [row["prefill"] for row in one.memory] == ["pieces"]
    (one,) = gather([record("memory", rows[1])])
    assert [row["prefill"] for row in one.memory] == ["one-shot"]


def test_models_can_be_chosen():
    (one,) = gather(measured(), ["mixed"])
    assert {row["model"] for row in (*one.memory, *one.speed)} == {"mixed"}


# --- evidence to standings


@pytest.mark.parametrize("model", MODELS)
def test_a_standing_is_the_sum_on_paper(model: str):
    state, token, bits, ms = MODELS[model]
    s = standing(measured())[model]
    each = state + 1280 * token
    assert (s.weight, s.held, s.grows) == (WEIGHTS, pytest.approx(each), pytest.approx(token))
    assert s.predicted == s.peak == WEIGHTS + 2 * each + WORK
    assert s.sequences == (20_000_000 - WEIGHTS - WORK) // each
    assert s.fits is True
    assert s.ttft == pytest.approx(0.02)
    assert s.seconds == pytest.approx(0.02 + 280 * 1.1 * ms / 1e3)
    assert s.rate == pytest.approx(2 * 280 / (0.02 + 280 * 1.1 * ms / 1e3))
    assert (s.bits, s.bound, s.points, s.off) == (bits, False, 5, ())


def test_what_is_not_told_is_not_guessed():
    s = standing([record("memory", memory("mixed", 256))])["mixed"]
    assert (s.peak, s.seconds, s.rate, s.bits) == (None, None, None, None)
    assert (s.held, s.grows) == (pytest.approx(60_000 + 1280 * 1000), 1000)  # a row tells how it grows
    s = standing([record("speed", speed("mixed", 1000, 2))])["mixed"]
    assert (s.weight, s.held, s.sequences, s.fits) == (None, None, None, None)
    assert s.seconds is not None


def test_as_many_tokens_in_other_sequences_are_another_point():
    """1,280 tokens in each of 2 and 2,560 in one are as many, and not the same peak."""
    other = record("memory", memory("attention", 2560 - NEW, 1, peak=1.05))
    s = standing([other, *measured()])["attention"]
    assert s.peak == s.predicted == WEIGHTS + 2 * 1280 * 4000 + WORK


def test_another_prompt_is_not_the_workload():
    records = [record("speed", speed("mixed", 999, 2)), record("speed", speed("mixed", 1000, 3))]
    assert standing(records)["mixed"].seconds is None


def test_a_peak_beyond_the_limit_does_not_fit():
    just = WEIGHTS + WORK + 2 * 400_000
    tight = replace(ASKED, memory_limit=just)
    assert standing(measured(), tight)["recurrent"].fits is True
    assert standing(measured(), replace(ASKED, memory_limit=just - 1))["recurrent"].fits is False
    assert standing(measured(), tight)["attention"].sequences == 0


def test_without_a_limit_it_is_the_machines_memory():
    s = standing(measured(), replace(ASKED, memory_limit=None))["recurrent"]
    assert s.sequences == (16 * 2**30 - WEIGHTS - WORK) // 400_000


# --- what is said


def said(records: list[Record], workload: Workload = ASKED) -> str:
    (one,) = gather(records)
    return "\n".join(findings(standings(one, quality(records), workload), workload, workload.memory_limit))


def test_the_findings_are_those_worked_out_by_hand():
    told = said(measured())
    assert "one sequence of attention holds 4.9 MiB, one of recurrent 390.6 KiB: 12.8 times less" in told
    assert "attention 3.9 KiB and mixed 1,000 B; recurrent nothing" in told
    assert "sequence of attention holds at least as much as one of recurrent from 100 tokens on" in told
    assert "sequence of mixed holds at least as much as one of recurrent from 340 tokens on" in told
    assert "37 of recurrent, 11 of mixed and 2 of attention" in told
    # 0.174, 0.328 and 0.636 seconds
    assert "take recurrent 174.00 ms, which is 3,218 new tokens a second. Times as long: mixed 1.9" in told
    assert "mixed needs the fewest bits a byte, 1.610; recurrent 1.620 and attention 1.640" in told
    assert "both holds less and predicts better than recurrent and mixed" in told
    assert "both faster for this workload and predicts better than recurrent and mixed" in told
    assert "At all 15 points the measured peak is within a tenth" in told


def test_times_that_chance_could_swap_are_called_even():
    rows = [record("speed", speed("mixed", 1000, 2)), record("speed", speed("recurrent", 1000, 2))]
    near = record("speed", speed("attention", 1000, 2) | {"itl_s": 0.00057, "ttft_s": 0.02})
    told = said([*rows, near])
    assert "recurrent 174.00 ms" in told and "attention is as fast within 10%" in told
    assert "Times as long: mixed 1.9." in told


def test_what_does_not_fit_is_said():
    told = said(measured(), replace(ASKED, concurrency=12))
    assert "The 12 sequences asked for do not fit with mixed (11) and attention (2)." in told


def test_a_peak_off_its_prediction_is_said_with_the_reason():
    records = [*measured(), record("memory", memory("mixed", 8192, peak=1.11))]
    assert "At 1 of 16 points" in said(records)
    assert "mixed at 8,192 tokens: the sum is off." in said(records)
    assert "At all 16 points" in said([*measured(), record("memory", memory("mixed", 8192, peak=1.09))])
    assert "At 1 of 16 points" in said([*measured(), record("memory", memory("mixed", 8192, peak=0.89))])


def test_a_bound_is_not_ranked_among_scores():
    records = [
        *measured(),
        record("speed", speed("mixed", 256)),
        record("quality", score("mixed", bound=True)),
    ]
    records = [r for r in records if not (r.bench == "quality" and r.rows[0] == score("mixed"))]
    told = said(records)
    assert "recurrent needs the fewest bits a byte, 1.620; attention 1.640" in told
    assert "as bits a byte at most: mixed 1.610" in told


def test_a_model_without_a_score_is_named():
    records = [r for r in measured() if r.bench != "quality" or r.rows[0]["model"] != "mixed"]
    assert "No score came with mixed" in said(records)


def test_a_score_of_other_weights_is_said_to_be_one():
    rows = [
        record("speed", speed("mixed", 1000, 2, dtype="int8")),
        record("quality", score("mixed", dtype="float32")),
    ]
    assert "The scores are those of float32 weights" in said(rows)
    rows[0] = record("speed", speed("mixed", 1000, 2))
    assert "The scores are" not in said(rows)


# --- what is drawn


def marks(chart: Any, kind: str) -> int:
    """How many of them the chart shows, drawn as Vega draws it."""
    svg = vl_convert.vegalite_to_svg(chart.to_dict(), vl_version=page.VEGA_LITE)
    return len(
        re.findall(rf'<path aria-label="[^"]*" role="graphics-symbol" aria-roledescription="{kind}"', svg)
    )


def drawn(records: list[Record]) -> dict[str, Any]:
    scores = quality(records)
    found = [(one, standings(one, scores, ASKED)) for one in gather(records)]
    look = charts.Look(tuple(dict.fromkeys(s.series for _, many in found for s in many)))
    return {figure.name: figure for figure in figures(found, look)}


def test_every_point_is_drawn():
    found = drawn(measured())
    assert list(found) == ["memory", "held", "time", "throughput", "quality_by_bytes", "quality_by_speed"]
    points = {name: marks(figure.panels[0][1], "point") for name, figure in found.items()}
    assert points == {
        "memory": 12,
        "held": 12,
        "time": 9,
        "throughput": 9,
        "quality_by_bytes": 3,
        "quality_by_speed": 3,
    }
    lines = {name: marks(figure.panels[0][1], "line mark") for name, figure in found.items()}
    assert lines == {
        "memory": 3,
        "held": 3,
        "time": 3,
        "throughput": 3,
        "quality_by_bytes": 1,
        "quality_by_speed": 1,
    }


def test_a_denoiser_has_no_percentile_and_is_drawn():
    row = speed("mixed", 256, itl_p90_s=None, engine="constate, no cache")
    figure = drawn([record("speed", row)])["time"]
    assert marks(figure.panels[0][1], "point") == 1


def test_a_line_is_the_prediction_and_a_point_the_measurement():
    """A peak twice the prediction moves the point alone, and draws it hollow."""

    def rows(peak: float) -> list[list[dict[str, Any]]]:
        chart = drawn([record("memory", memory("mixed", n, peak=peak)) for n in (256, 4096)])[
            "memory"
        ].panels[0][1]
        return [layer["data"]["values"] for layer in _inlined(chart.to_dict())["layer"]]

    (line, sound), (same, hollow) = rows(1.0), rows(2.0)
    assert line == same
    assert [p["bytes"] for p in hollow] == [2 * p["bytes"] for p in sound]
    assert [p["flagged"] for p in (*sound, *hollow)] == [False, False, True, True]
    predicted = {row["length"]: row["bytes"] for row in line}
    assert predicted[256] == sound[0]["bytes"] and predicted[4096] == sound[1]["bytes"]


def _inlined(spec: dict[str, Any]) -> dict[str, Any]:
    """The specification with altair's named data put back where it is used."""
    for layer in spec["layer"]:
        if "name" in layer["data"]:
            layer["data"] = {"values": spec["datasets"][layer["data"]["name"]]}
    return spec


def test_machines_stand_side_by_side_on_the_same_axes():
    other = [replace(r, rows=[{**r.rows[0], "itl_s": 1.0, "itl_p90_s": 1.0}]) for r in measured(GPU)]
    (_, ours), (_, theirs) = drawn([*measured(CPU), *other])["time"].panels
    domains = [c.to_dict()["layer"][0]["encoding"]["y"]["scale"]["domain"] for c in (ours, theirs)]
    assert domains[0] == domains[1] == [0, 1050.0]


def test_ticks_are_powers_of_two_around_everything():
    for low, high in [(1, 1), (1, 16), (256, 65_536), (3.9e6, 3e8), (50_000, 9e12), (1000, 1001)]:
        ticks = charts.doublings(low, high)
        assert 2 <= len(ticks) <= charts.TICKS
        assert ticks[0] <= low and high <= ticks[-1]
        assert len({b // a for a, b in pairwise(ticks)}) == 1
        assert all(tick & (tick - 1) == 0 for tick in ticks)


def test_colours_are_seen_on_white_and_on_black():
    """Contrast by WCAG 2's formula: 3 for what is drawn."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    style = (page.HERE / "page.css").read_text()
    light, dark = re.findall(r"--ground: (#\w{6})", style)
    assert luminance(light) > 0.9 and luminance(dark) < 0.02
    for colour in charts.COLOURS:
        assert (luminance(light) + 0.05) / (luminance(colour) + 0.05) >= 3
        assert (luminance(colour) + 0.05) / (luminance(dark) + 0.05) >= 3
    assert len({*charts.COLOURS}) == len(charts.COLOURS)


# --- the folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    hostile = '<img src=x onerror="alert(1)"></script>'
    records = [r for r in measured() if r.rows[0]["model"] != "mixed"]
    records += [replace(r, rows=[{**r.rows[0], "model": hostile}]) for r in measured() if r not in records]
    report(records, ASKED, out, ["constate compare --out '<b>'"])
    return out


def test_the_page_needs_nothing_from_outside(folder: Path):
    html = (folder / "report.html").read_text(encoding="utf-8")
    outside = re.findall(
        r"""(?:src|href|action)\s*=\s*["']([^"'$]*)""", re.sub(r"(?s)<script>.*?</script>", "", html)
    )
    assert outside == ["data:,"]
    assert "@import" not in html.split("</style>")[0] and "url(" not in html.split("</style>")[0]


def test_names_are_text_and_never_markup(folder: Path):
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert "<img" not in re.sub(r"(?s)<script>.*?</script>", "", html)
    assert html.count("<script") == 3 and len(re.findall("</script>", html)) == 3
    told = re.findall(r'(?s)<script type="application/json" id="charts">(.*?)</script>', html)
    specs = json.loads(told[0])
    assert set(specs) == {f"{name}-0" for name in drawn(measured())}
    assert 'onerror=\\"alert(1)' in told[0]  # the name came through whole


def test_pictures_are_pngs_of_their_size(folder: Path):
    pictures = sorted(path.name for path in folder.glob("*.png"))
    assert pictures == sorted(f"{name}.png" for name in drawn(measured()))
    for path in folder.glob("*.png"):
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = (int.from_bytes(head[i : i + 4]) for i in (16, 20))
        assert width > page.PICTURE["width"] * page.SHARP and height > page.PICTURE["height"] * page.SHARP


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
    assert [(r.rows[0]["score"], r.rows[0]["dtype"]) for r in results.records] == [(1.25, "bfloat16")]
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
    assert [r.bench for r in records] == ["memory"] * 2 + ["speed"] * 3 + ["quality"]
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


# --- predictions between the points


def real(model: str, *lengths: int, **more: Any) -> list[Record]:
    """Records of a shipped model as the bench makes them, with the prediction in place of a measurement."""
    points = bench_points([model], lengths, dtype="float32")
    rows = [{**row(point, None), **more} for point in points]
    taken = {"taken": "2026-01-31T12:00:00+00:00"}
    return [
        Record("memory", {**asdict(point), "new": NEW}, [told], CPU, VERSIONS, **taken)
        for point, told in zip(points, rows, strict=True)
    ]


def test_lines_of_a_model_at_hand_are_its_predictions_and_no_straight_ones():
    """At 512 tokens workspace stops growing, which a straight line from 256 to 4,096 does not know."""
    (one,) = gather(real("tiny/gla", 256, 4096))
    peaks = {r["length"]: r["bytes"] for r in lines(one.memory, lambda r: r["predicted_peak_bytes"])}
    (exact,) = gather(real("tiny/gla", 1024))
    near = min(peaks, key=lambda n: abs(n - 1024))
    assert peaks[near] == pytest.approx(exact.memory[0]["predicted_peak_bytes"], rel=0.005)
    straight = Line.through({n: peaks[n] for n in (256, 4096)}).at(near)
    assert abs(straight / peaks[near] - 1) > 0.1


def test_the_peak_of_a_workload_that_was_not_measured_is_predicted_where_it_can_be():
    """With 2 sequences activations are twice those of one, which no row here tells."""
    (one,) = gather(real("tiny/gla", 256, 4096))
    (s,) = standings(one, {}, ASKED)
    (there,) = bench_points(["tiny/gla"], [ASKED.tokens - NEW], [2], dtype="float32")
    assert s.predicted == row(there, None)["predicted_peak_bytes"] and s.peak is None
    elsewhere = replace(one, memory=tuple({**r, "point": None} for r in one.memory))
    (s,) = standings(elsewhere, {}, ASKED)
    work = one.memory[1]["predicted_peak_bytes"] - one.memory[1]["predicted_bytes"]
    assert s.weight and s.held and s.predicted == s.weight + 2 * s.held + work


@pytest.mark.parametrize(
    "change",
    [{"predicted_peak_bytes": 1}, {"predicted_bytes": 1}, {"weight_bytes": 1}],
    ids=lambda c: next(iter(c)),
)
def test_a_model_that_predicts_otherwise_than_the_record_draws_no_line(change: dict[str, int]):
    (one,) = gather(real("tiny/gla", 256, 4096))
    assert on_paper(one.memory, [300]) is not None
    (one,) = gather(real("tiny/gla", 256, 4096, **change))
    assert on_paper(one.memory, [300]) is None


def test_a_name_that_is_not_here_is_not_looked_for():
    (one,) = gather(real("tiny/gla", 256, 4096))
    elsewhere = [{**r, "point": {**r["point"], "name": "somebody/somewhere"}} for r in one.memory]
    assert on_paper(elsewhere, [300]) is None
