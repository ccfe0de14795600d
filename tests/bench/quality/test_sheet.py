"""Every probe on every model, kept; and the results that ship."""

from pathlib import Path
from typing import Any

import pytest

from constate.bench.quality import grid, sheet, shipped
from constate.bench.quality.asked import NAMES, READING
from constate.bench.quality.findings import findings
from constate.bench.quality.probes import PROBES
from constate.bench.quality.sheet import Sheet, scored
from constate.bench.results import Results
from constate.training import SHIPPED
from constate.training.recipes import DIFFUSION


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was asked of whom, in the place of models and probes; a `mute` model has no text."""
    told: list[tuple[str, str]] = []

    def rows(probe: str, model: Any, name: str, **_: Any) -> list[dict[str, Any]]:
        told.append((probe, name))
        if name == "mute" and probe in READING:
            raise ValueError("mute has no tokenizer")
        return [{"probe": probe, "model": name, "score": 0.5}]

    monkeypatch.setattr(sheet, "rows", rows)
    monkeypatch.setattr(sheet, "load", lambda name, **_: name)
    monkeypatch.setattr(sheet, "locate", lambda name: name)
    return told


def test_a_sheet_goes_on_where_it_stopped(asked: list[tuple[str, str]], tmp_path: Path) -> None:
    file, whole = tmp_path / "scores.jsonl", Sheet(["one", "two"])
    steps = scored(whole, Results(file), print)
    for _ in range(4):
        next(steps)
    assert len(asked) == 4
    found = list(scored(whole, Results(file), print))
    assert len(found) == whole.total == 2 * (len(NAMES) + 1)
    assert len(asked) == whole.total, "what was kept is not asked again"
    assert [label for label, _ in found][:2] == ["bpb of one", "positions of one"]
    list(scored(Sheet(["one"], seeds=3), Results(file), print))
    assert len(asked) == whole.total + whole.total // 2, "another number of seeds is another question"


def test_what_a_model_cannot_be_asked_is_left_out_and_said(
    asked: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    found = dict(scored(Sheet(["mute"]), Results(), said.append))
    assert [label.split()[0] for label, rows in found.items() if rows] == list(PROBES)
    assert len(said) == len(READING) + 1 and said[0].endswith("is left out: mute has no tokenizer")
    with pytest.raises(ValueError, match="no tokenizer"):
        list(scored(Sheet(["mute"], "bpb"), Results(), said.append))


def test_what_is_not_there_is_told_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--text absent\.txt: neither"):
        Sheet(["tiny/gla"], text="absent.txt")
    monkeypatch.setattr(sheet, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match="no model 'nobody'"):
        next(scored(Sheet(["tiny/gla", "nobody"]), Results(), print))


def test_what_was_written_anew_is_asked_anew(
    asked: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, mine = tmp_path / "page.txt", tmp_path / "mine"
    page.write_text("It was")
    mine.mkdir()
    (mine / "config.json").write_text("{}")
    results, question = Results(), Sheet([str(mine)], "bpb", text=str(page))
    for seen, file, text in (
        (1, page, "It was"),
        (2, page, "It is so"),
        (3, mine / "config.json", '{"a": 1}'),
    ):
        for _ in range(2):
            list(scored(question, results, print))
            assert len(asked) == seen
            file.write_text(text) if _ == 1 else None
    (tmp_path / "tiny" / "gla").mkdir(parents=True)
    (tmp_path / "shakespeare").write_text("It was")
    monkeypatch.chdir(tmp_path)
    list(scored(Sheet(["tiny/gla"], "bpb", text="shakespeare"), results, print))
    assert "stamps" not in results.records[-1].settings, "what ships, whatever lies here"


def test_a_sheet_of_another_text_reads_that_alone(tmp_path: Path) -> None:
    page = str(tmp_path / "page.txt")
    Path(page).write_text("It was")
    told = Sheet(["one"], text=page).questions
    assert {text for probe, text, _ in told if probe in READING} == {page}
    assert {text for probe, text, _ in told if probe not in READING} == {None}
    assert [probe for probe, _, _ in told] == list(NAMES)
    with pytest.raises(ValueError, match="name one in place of all"):
        Sheet(["one"], settings={"pairs": 2})
    with pytest.raises(ValueError, match="seeds 0; at least 1"):
        Sheet(["one"], seeds=0)
    with pytest.raises(ValueError, match="'telepathy' is not known"):
        Sheet(["one"], "telepathy")


def test_scores_of_the_whole_zoo_ship() -> None:
    rows = shipped.scores()
    assert {row["model"] for row in rows} >= {f"tiny/{name}" for name in (*SHIPPED, *DIFFUSION)}
    for name in SHIPPED:
        mine = shipped.scores(f"tiny/{name}")
        held = any(row["state_bytes"] for row in mine)
        assert {row["probe"] for row in mine} == set(NAMES) - (set() if held else {"drift"})
        assert {row["seed"] for row in mine if row["probe"] in PROBES} == {0, 1, 2, None}
        assert all(row["low"] is not None for row in mine if row["probe"] != "drift")
    assert shipped.scores("./mine") == []


def test_the_grid_ships_whole_and_bears_its_findings_out() -> None:
    kept = {str(sorted(record.settings.items())) for record in shipped.grid()}
    assert kept >= {str(sorted(grid._settings(run).items())) for run in grid.default()}
    rows = grid.rows(shipped.grid())
    assert [f.claim for f in findings(rows) if f.holds is not True] == []
    for probe in ("recall", "copy", "parity"):
        for size in grid.SIZES:
            same = [r for r in rows if r["probe"] == probe and r["size"] == size]
            params = {r["params"] for r in same}
            assert not params or max(params) <= 1.01 * min(params)
            fixed = {r["state_bytes"] for r in same if not r["kv_bytes"]}
            assert len(fixed) <= 1, "families of one size hold as much"
