"""Teaching: families that differ in the mixer alone, a training that shows what the literature says, and a
grid that goes on where it stopped."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from constate.bench.quality import families, grid
from constate.bench.quality.findings import findings
from constate.bench.quality.grid import Run
from constate.bench.quality.probes import probe
from constate.bench.quality.report import report
from constate.bench.quality.teaching import Lesson, begin, teach
from constate.bench.results import Results
from constate.spans import Spans
from constate.ssm.mamba2 import Mamba2

SIZES = (4, 16, 64)


@pytest.mark.parametrize("size", SIZES)
def test_families_have_the_same_parameters(size: int) -> None:
    counts = {
        name: sum(p.numel() for p in families.build(name, 128, size).parameters()) for name in families.FULL
    }
    assert max(counts.values()) < 1.01 * min(counts.values()), counts


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", families.FULL)
def test_families_hold_the_same_state(name: str, size: int) -> None:
    """`size` x 64 float32 numbers a recurrent layer, whatever the mixer; a window as many in its ring."""
    held = families.build(name, 128, size).cost(0, 1000).held
    mixers = families.layers(name)
    recurrent = sum(m not in ("attention", "window") for m in mixers)
    assert held.get("state", 0) == 4 * recurrent * size * 64
    if name == "window":
        assert held["kv"] == 4 * 4 * size * 64
    if name == "attention":
        assert held["kv"] == 4 * 4 * 2 * 64 * 1000


@torch.no_grad()
def test_decays_begin_where_the_probe_can_be_learned() -> None:
    """A state keeps more than half of what it read 256 tokens before."""
    model = begin(Lesson("mamba2", probe("recall"), 16))
    mixers = [m for m in model.modules() if isinstance(m, Mamba2)]
    for mixer in mixers:
        rate = mixer.a_log.exp() * torch.nn.functional.softplus(mixer.dt_bias)
        assert float((-rate * 256).exp().min()) > 0.5
    assert len(mixers) == 4


def test_a_lesson_is_the_same_whenever_it_is_given() -> None:
    lesson = Lesson("gated_deltanet", probe("recall", pairs=2, vocab=16), 4, steps=3, rows=4)
    runs = [list(teach(lesson))[-1][2] for _ in range(2)]
    for (name, p), q in zip(runs[0].named_parameters(), runs[1].parameters(), strict=True):
        assert torch.equal(p, q), name
    other = list(teach(replace(lesson, seed=1)))[-1][2]
    assert not torch.equal(other.embed.weight, runs[0].embed.weight)


@torch.no_grad()
def test_the_loss_is_that_of_the_answers_alone() -> None:
    """Against a float64 sum over the asked places."""
    from constate.bench.quality import teaching

    asked = probe("copy", length=5, vocab=4)
    model = begin(Lesson("linear", asked, 4))
    drawn = asked.draw(3, 11)
    said = model(drawn.tokens.flatten(), Spans.of([10] * 3)).double().view(3, 10, -1)
    want = [
        -said[r, t].log_softmax(-1)[drawn.wanted[r, t]]
        for r in range(3)
        for t in range(10)
        if drawn.wanted[r, t] >= 0
    ]
    assert len(want) == 15
    got = teaching._loss(model, asked, 3, 11)
    assert float(got) == pytest.approx(float(torch.stack(want).mean()), rel=1e-5)


def test_attention_recalls_what_a_small_state_cannot_hold(tmp_path: Path) -> None:
    """The smoke grid: both trained here, on fixed seeds; what was kept is not trained again."""
    runs, kept = grid.smoke(), Results(tmp_path / "results.jsonl")
    by_family = {run.family: record.rows[0] for run, record in grid.train(runs, kept, jobs=1)}
    assert by_family["attention"]["score"] > 0.9
    assert by_family["linear"]["score"] < 0.5
    assert by_family["linear"]["low"] > by_family["linear"]["chance"]  # it holds something
    again = Results(tmp_path / "results.jsonl")
    told = list(grid.train(runs, again, jobs=1))
    assert [record.rows for _, record in told] == [json.loads(json.dumps(r.rows)) for r in kept.records]
    assert len(again.records) == 2
    done = report(again.records, tmp_path)
    assert all(path.exists() for path in done.files)
    assert "attention" in (tmp_path / "findings.md").read_text()


def _rows(family: str, name: str, size: int, scores: list[float], setting: str = "s") -> list[dict[str, Any]]:
    shared = {"probe": name, "family": family, "size": size, "setting": setting, "chance": 0.5}
    more = {"held_bytes": 64 * size, "params": 1}
    return [{**shared, **more, "seed": i, "score": score} for i, score in enumerate(scores)]


def test_a_claim_holds_where_the_numbers_say_so_and_only_there() -> None:
    told = [
        *_rows("attention", "recall", 4, [0.99, 1.0]),
        *_rows("hybrid", "recall", 4, [0.97, 0.99]),
        *_rows("linear", "recall", 4, [0.2, 0.3]),
        *_rows("linear", "recall", 16, [0.5, 0.6]),
        *_rows("delta_net", "recall", 4, [0.3, 0.3]),
        *_rows("delta_net", "recall", 16, [0.7, 0.8]),
        *_rows("attention", "copy", 4, [0.99, 0.99]),
        *_rows("linear", "copy", 4, [0.4, 0.5]),
        *_rows("delta_net_negative", "parity", 16, [1.0, 0.99]),
        *_rows("delta_net_negative", "parity", 16, [0.96, 0.97], "4 s"),
        *_rows("attention", "parity", 16, [0.6, 0.6]),
        *_rows("attention", "parity", 16, [0.5, 0.51], "4 s"),
    ]
    assert all(f.holds for f in findings(told))
    worse = {
        0: ("hybrid", "recall", 4, 0.6),
        1: ("linear", "recall", 16, 0.1),
        2: ("delta_net", "recall", 16, 0.3),
        3: ("hybrid", "recall", 4, 0.3),
        4: ("linear", "copy", 4, 0.99),
        5: ("delta_net_negative", "parity", 16, 0.7),
        6: ("attention", "parity", 16, 0.8),
    }
    for i, (family, name, size, score) in worse.items():
        changed = [
            row
            | ({"score": score} if (row["family"], row["probe"], row["size"]) == (family, name, size) else {})
            for row in told
        ]
        assert findings(changed)[i].holds is False, findings(told)[i].claim
    assert all(f.holds is None for f in findings([]))


def test_a_run_that_is_interrupted_leaves_the_others(tmp_path: Path) -> None:
    few = {"pairs": 1, "vocab": 8}
    runs = [Run("linear", "recall", 2, seed, 1, few) for seed in range(3)]
    kept = Results(tmp_path / "r.jsonl")
    going = grid.train(runs, kept, jobs=1)
    next(going)
    del going
    assert len(Results(tmp_path / "r.jsonl").records) == 1
    assert len(list(grid.train(runs, Results(tmp_path / "r.jsonl"), jobs=1))) == 3
    assert len(Results(tmp_path / "r.jsonl").records) == 3


def test_a_family_of_other_layers_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("hybrid", "recall", 2, 0, 1, {})
    kept = Results()
    kept.add("quality", grid._settings(run), [{"kept": True}])
    assert next(grid.train([run], kept, jobs=1))[1].rows == [{"kept": True}]
    monkeypatch.setitem(cast(dict, families.FULL), "hybrid", ("linear", "linear", "linear", "attention"))
    monkeypatch.setattr(grid, "score", lambda run: [{"kept": False}])
    assert next(grid.train([run], kept, jobs=1))[1].rows == [{"kept": False}]


@pytest.mark.parametrize(("name", "said"), [("gated", "known are"), ("linear,atention", "atention")])
def test_an_unknown_family_is_told(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        families.layers(name)
