"""What the comparison makes of records: each number beside the same worked out by hand or by force."""

import random
from dataclasses import asdict, replace
from typing import Any

import pytest

from constate.bench.compare.drawn import lines
from constate.bench.compare.evidence import gather, quality
from constate.bench.compare.findings import findings
from constate.bench.compare.front import front
from constate.bench.compare.line import Line
from constate.bench.compare.paper_lines import on_paper
from constate.bench.compare.standing import standings
from constate.bench.compare.workload import Workload
from constate.bench.memory import points as bench_points
from constate.bench.memory_rows import row
from constate.bench.results import Record
from tests.reports import (
    ASKED,
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
    standing,
)

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
