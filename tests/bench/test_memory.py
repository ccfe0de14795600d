"""The memory bench: its predictions equal what a cache holds, its children measure what they say, and what
was measured once is kept."""

from __future__ import annotations

import io
import json
import mmap
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from constate.bench import forks, growth, memory, memory_rows, outlook, peak
from constate.bench.engines import Ours
from constate.bench.peak import NEW, Point
from constate.bench.results import Results
from constate.bench.shapes import random_model
from constate.bench.workspace import workspace
from constate.cli import main
from constate.loading import load, save
from constate.spans import Spans
from tests.bench.test_speed import TINY
from tests.kernels.memory import peak_bytes

KEYS = (
    "model length rows prefill weight_bytes kv_bytes state_bytes conv_bytes predicted_bytes "
    "predicted_workspace_bytes predicted_peak_bytes measured_peak_bytes peak_above_model_bytes "
    "measured_held_bytes workspace_bytes reserved_peak_bytes growth_bytes_per_token sequences_per_gb "
    "filled_tokens positions backend dtype state_dtype device threads method flags "
    "measured_growth_bytes_per_token"
)
ZOO = ("mamba", "mamba2", "gla", "gated_deltanet", "hybrid", "transformer")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and forks")


def saved(folder: Path, raw: dict[str, Any]) -> str:
    save(random_model(raw), folder)
    return str(folder)


def told(about: Point, peak_off: int = 0, held_off: int = 0, method: str = "VmHWM, reset") -> dict[str, Any]:
    """What a child would say that measured what is predicted, but for so many bytes."""
    paper = outlook.paper_of(about.name, about.load)
    held = sum(outlook.held(paper, about).values()) + held_off
    peak = held + outlook.scratch(paper, about) + peak_off
    named = {"backend": "native", "threads": 1, "method": method}
    return {"peak": peak, "held": held, "reserved": peak, **named}


# -- on paper -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("raw", TINY.values(), ids=TINY)
def test_predicted_is_what_a_cache_holds(tmp_path: Path, raw: dict[str, Any], rows: int):
    said = memory_rows.row(Point(saved(tmp_path, raw), 70, rows), None)
    engine = Ours(load(tmp_path), NEW)
    ids = engine.prefill(torch.zeros(rows, 70, dtype=torch.int64)).argmax(-1)
    for _ in range(NEW):
        ids = engine.step(ids).argmax(-1)
    held = engine.cache.bytes()
    assert (said["state_bytes"], said["conv_bytes"], said["kv_bytes"]) == tuple(held[k] for k in _KINDS)
    assert said["predicted_bytes"] == engine.cache.nbytes() + engine.model.weight_bytes


_KINDS = ("state", "conv", "kv")


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"weights": "int8"}, {"state_dtype": "bfloat16"}])
def test_predicted_follows_the_formats(options: dict[str, str]):
    said, model = memory_rows.row(Point("tiny/hybrid", 9, load=options), None), load("tiny/hybrid", **options)
    assert said["weight_bytes"] == model.weight_bytes
    held = model.init_cache(1, 9 + NEW).bytes()
    assert {k: said[f"{k}_bytes"] for k in _KINDS} == held


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in ZOO), ("mamba2", "bfloat16"), ("hybrid", "bfloat16")]
)
def test_the_rule_for_workspace_is_near_what_pytorch_allocates(name: str, dtype: str):
    """In pieces after a longer past, and in one call; PyTorch's profiler is the judge."""
    model = load(f"tiny/{name}", dtype=dtype)
    paper = outlook.paper_of(f"tiny/{name}", {"dtype": dtype}).model
    for new, past, rows in ((512, 0, 1), (512, 1536, 1), (1024, 0, 1), (100, 0, 3)):
        cache = model.init_cache(rows, past + new)
        cache.advance([past] * rows)
        tokens, spans = torch.zeros(rows * new, dtype=torch.int64), Spans.of([new] * rows)
        took = peak_bytes(lambda t=tokens, s=spans, c=cache: model.forward(t, s, c, at="last"))
        assert workspace(paper, new, past + new, rows) == pytest.approx(took, rel=0.15), (new, past, rows)


def test_a_sequence_is_charged_by_its_length():
    """Growth a token, sequences in 10^9 bytes, and where models cross, against caches that are allocated."""
    lean, growing = load("tiny/mamba2"), load("tiny/transformer")
    (crossed,) = growth.crossings(["tiny/mamba2", "tiny/transformer", "tiny/mdlm"], {})
    assert (crossed["growing"], crossed["constant"]) == ("tiny/transformer", "tiny/mamba2")
    at = crossed["tokens"]
    assert growing.init_cache(1, at).nbytes() >= lean.init_cache(1).nbytes()
    assert growing.init_cache(1, at - 1).nbytes() < lean.init_cache(1).nbytes()
    assert list(growth.sentences([crossed])) == [
        f"a sequence of tiny/transformer holds as much as one of tiny/mamba2 from {at} tokens on"
    ]
    row = memory_rows.row(Point("tiny/transformer", 100, rows=3), None)
    assert row["growth_bytes_per_token"] == 4 * 2 * 128 * 4
    assert row["sequences_per_gb"] == 10**9 // growing.init_cache(1, 100 + NEW).nbytes()


def test_what_will_not_fit_is_refused_with_the_largest_length_that_does():
    asked, free = Point("tiny/transformer", 100_000, rows=2), 200 * 2**20
    with pytest.raises(ValueError, match=r"the largest length that fits is ([\d,]+) tokens") as refused:
        outlook.refuse(asked, free)
    fits = int(str(refused.value).split("fits is ")[1].split(" ")[0].replace(",", ""))
    outlook.refuse(replace(asked, length=fits), free)
    with pytest.raises(ValueError, match=f"fits is {fits:,}"):
        outlook.refuse(replace(asked, length=fits + 1), free)
    with pytest.raises(ValueError, match="no length fits"):
        outlook.refuse(asked, 2**20)


def test_nothing_is_measured_where_one_point_will_not_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("constate.loading.memory.available", lambda device: 100 * 2**20)
    monkeypatch.setattr(memory, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match="the largest length that fits"):
        next(memory.memory(memory.points(["tiny/transformer"], [64, 65536])))


def test_rows_are_flagged_with_the_reason(tmp_path: Path):
    name = saved(tmp_path, {**TINY["llama"], "max_position_embeddings": 50})
    near, far = Point(name, 50), Point(name, 51)
    assert memory_rows.row(near, told(near))["flags"] == []
    assert memory_rows.row(far, told(far))["flags"] == ["beyond the 50 positions that the model was made for"]
    total = memory_rows.row(near, None)["predicted_peak_bytes"]
    assert memory_rows.row(near, told(near, total // 10 - 1))["flags"] == []
    (said,) = memory_rows.row(near, told(near, total // 5))["flags"]
    assert said.startswith("20% above the prediction: activations and workspace took")
    (said,) = memory_rows.row(near, told(near, held_off=-total // 5))["flags"]
    assert said.startswith("20% below the prediction: weights and sequences hold")
    (said,) = memory_rows.row(near, told(near, total // 5, method="ru_maxrss, never reset"))["flags"]
    assert said.endswith("this system cannot reset the peak")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lengths": [0]}, "at least 1"),
        ({"lengths": [8], "rows": [0]}, "at least 1"),
        ({"lengths": [8], "ways": ["twice"]}, "pieces, one-shot"),
        ({"lengths": [8], "ways": []}, "pieces, one-shot"),
        ({"lengths": [8], "fill": "perhaps"}, "auto, never, always"),
        ({"lengths": [8], "dtype": "bf16"}, "float32, bfloat16, float16 is wanted"),
        ({"lengths": [8], "weights": "fp8"}, "'int8' is wanted"),  # known on paper alone
        ({"lengths": [8], "weights": "int8", "dtype": "bfloat16"}, "leave dtype out"),
    ],
)
def test_a_wrong_request_is_no_point(wrong: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        memory.points(["tiny/mamba2"], **wrong)


def test_long_attention_is_filled_or_left_out_and_says_so():
    (point,) = memory.points(["tiny/transformer"], [65536])
    assert point.filled == 65536 - 512
    assert any("filled, not computed" in flag for flag in memory_rows.row(point, told(point))["flags"])
    assert memory.points(["tiny/transformer"], [65536], fill="never")[0].filled == 0
    assert memory.points(["tiny/mamba2"], [65536], fill="always")[0].filled == 0
    assert memory.points(["tiny/transformer"], [513, 512], fill="always")[0].filled == 512
    (row,) = memory.memory(memory.points(["tiny/mdlm"], [65536]))
    assert row["measured_peak_bytes"] is None and "--fill never" in row["flags"][0]


# -- measured -----------------------------------------------------------------------------------------


@linux
def test_the_meter_sees_memory_that_came_and_went_and_nothing_before():
    def touched(size: int) -> mmap.mmap:
        block = mmap.mmap(-1, size)
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1
        return block

    size, noise = 32 * 2**20, 16 * 2**20
    touched(4 * size).close()
    meter = peak.Resident()
    with touched(size):
        assert size <= meter.held() + 2**20 < size + noise
    assert meter.held() < noise
    assert size <= meter.peak() + 2**20 < size + noise


@linux
def test_points_are_measured_beside_their_predictions():
    """Cases G3 and L2: each in a fresh process, after a warm-up, with the peak reset. What is held grows by
    nothing without attention, and by keys and values alone with it; and the transformer's long point, which
    was filled, takes what is predicted too."""
    wanted = memory.points(["tiny/mamba2", "tiny/transformer"], [1024, 16384], fill="always")
    found = {(row["model"], row["length"]): row for row in memory.memory(wanted)}
    for row in found.values():
        assert list(row) == KEYS.split()
        assert row["measured_peak_bytes"] == row["weight_bytes"] + row["peak_above_model_bytes"]
        assert row["measured_peak_bytes"] == row["measured_held_bytes"] + row["workspace_bytes"]
        assert row["measured_held_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.03)
        assert row["measured_peak_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.10)
    lean, growing = found["tiny/mamba2", 16384], found["tiny/transformer", 16384]
    assert abs(lean["measured_growth_bytes_per_token"]) < 16  # a page in 256 tokens, of 280 kB held
    assert lean["measured_peak_bytes"] == pytest.approx(
        found["tiny/mamba2", 1024]["measured_peak_bytes"], rel=0.05
    )
    assert growing["measured_growth_bytes_per_token"] == pytest.approx(4096, rel=0.02)
    assert growing["reserved_peak_bytes"] > growing["measured_peak_bytes"]  # glibc keeps what is freed


@linux
def test_another_config_moves_both(tmp_path: Path):
    """The prediction is made from config.json and the measurement from the loaded model: neither knows the
    other, and twice the key/value heads are seen by both. A filled prompt takes what a computed one does."""
    wide = {**TINY["llama"], "hidden_size": 128}
    names = [
        saved(tmp_path / str(heads), {**wide, "num_key_value_heads": heads, "num_attention_heads": 8})
        for heads in (4, 8)
    ]
    points = [memory.points([n], [4096], fill=fill)[0] for n in names for fill in ("never", "always")]
    few, few_filled, many, many_filled = memory.memory(points)
    assert many["kv_bytes"] == 2 * few["kv_bytes"] == 2 * 4100 * 2 * 2 * 4 * 16 * 4
    more = many["predicted_bytes"] - few["predicted_bytes"]
    assert many["measured_held_bytes"] - few["measured_held_bytes"] == pytest.approx(more, rel=0.05)
    for computed, filled in ((few, few_filled), (many, many_filled)):
        assert (computed["filled_tokens"], filled["filled_tokens"]) == (0, 4096 - 512)
        assert filled["measured_held_bytes"] == pytest.approx(computed["measured_held_bytes"], rel=0.02)
        assert filled["measured_peak_bytes"] == pytest.approx(computed["measured_peak_bytes"], rel=0.05)


@linux
def test_models_that_fill_places_in_any_order_are_measured_too():
    """Without a cache nothing is kept between calls; a block-causal one keeps its prompt's keys, values."""
    both, blocks = memory.memory(memory.points(["tiny/mdlm", "tiny/block_diffusion"], [1024]))
    assert (both["prefill"], both["kv_bytes"], blocks["kv_bytes"]) == ("one-shot", 0, 1024 * 4096)
    for row in (both, blocks):
        assert row["measured_held_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.05)
        assert row["measured_peak_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.15)


@linux
def test_what_fails_in_a_child_is_told():
    asked, answered = json.dumps({"name": "m", "length": 3}) + "\n", io.StringIO()

    def fails(point: Point) -> dict[str, Any]:
        if point.length == 3:
            raise ValueError("one\nreason")
        os._exit(9)

    forks.serve(io.StringIO(asked + asked.replace("3", "4")), answered, fails)
    assert [json.loads(line) for line in answered.getvalue().splitlines()] == [
        {"error": "one reason"},
        {"error": "its process ended with status 9"},
    ]


@linux
def test_a_server_answers_for_a_model_that_is_not_there(tmp_path: Path):
    with forks.Forks() as fork, pytest.raises(ValueError, match=r"at 16 tokens: .*absent"):
        fork(Point(str(tmp_path / "absent"), 16))


# -- kept ---------------------------------------------------------------------------------------------


def fake(point: Point, *_: Any) -> dict[str, Any]:
    return memory_rows.row(point, told(point))


def test_a_sweep_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out, measured = tmp_path / "memory.jsonl", []
    wanted = memory.points(["tiny/mamba2", "tiny/gla"], [64, 128])

    def until_the_third(point: Point, *_: Any) -> dict[str, Any]:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(point)
        return fake(point)

    monkeypatch.setattr(memory, "measure", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        list(memory.memory(wanted, Results(out)))
    assert len(out.read_text().splitlines()) == 2
    monkeypatch.setattr(memory, "measure", lambda point, *_: measured.append(point) or fake(point))
    rows = list(memory.memory(wanted, Results(out)))
    assert [(row["model"], row["length"]) for row in rows] == [(p.name, p.length) for p in wanted]
    assert measured == wanted  # each once
    list(memory.memory([replace(wanted[0], rows=2)], Results(out)))
    assert len(measured) == 5  # another setting is another point


def test_interrupted_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def second(point: Point, *_: Any) -> dict[str, Any]:
        if point.length == 128:
            raise KeyboardInterrupt
        return fake(point)

    monkeypatch.setattr(memory, "measure", second)
    argv = ["bench", "memory", "--model", "tiny/mamba2", "--lengths", "64,128", "--out"]
    assert main([*argv, str(tmp_path / "m.jsonl")]) == 130
    out, err = capsys.readouterr()
    assert "tiny/mamba2" in out and "1 of 2 points are measured; they are in" in err
    monkeypatch.setattr(memory, "measure", fake)
    assert main([*argv, str(tmp_path / "m.jsonl"), "--json"]) == 0
    assert [json.loads(line)["length"] for line in capsys.readouterr().out.splitlines()] == [64, 128]


def test_rows_that_differ_by_the_way_alone_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(memory, "measure", fake)
    asked = ["bench", "memory", "--model", "tiny/mamba2", "--lengths", "8"]
    assert main([*asked, "--prefill", "pieces,one-shot"]) == 0
    assert capsys.readouterr().out.count("one-shot") == 2, "in both tables"
    assert main(asked) == 0
    assert "prefill" not in capsys.readouterr().out


def test_growth_is_measured_between_the_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "measure", fake)
    rows = list(memory.memory(memory.points(["tiny/transformer", "tiny/mamba2"], [64, 128, 512], [1, 2])))
    slopes = {(g["model"], g["rows"]): g["measured_growth_bytes_per_token"] for g in growth.growth(rows)}
    assert slopes == {
        **{("tiny/transformer", rows): 4096 for rows in (1, 2)},
        **{("tiny/mamba2", rows): 0 for rows in (1, 2)},
    }
