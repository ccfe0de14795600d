"""The comparison's part on quality: which row stands for a question, what is said, tabled and drawn of it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from constate.bench.compare import measure, remembered
from constate.bench.compare.charts import Look
from constate.bench.compare.evidence import quality
from constate.bench.compare.measure import Sweep
from constate.bench.compare.remembered import COLUMNS, Remembered
from constate.bench.compare.report import report
from constate.bench.quality.probes import PROBES
from constate.bench.quality.probes.passkey import Passkey
from constate.bench.quality.probes.recall import Recall
from constate.bench.results import Record, Results, read
from tests.reports import ASKED, measured, record
from tests.reports import score as bits

BOOK_PARTS = {
    "cloze": "4 words of the passage, passages of 120 words and more",
    "repeat": "passages of 256 tokens read again",
}
SETTINGS = {name: f"northanger_abbey, {part}" for name, part in BOOK_PARTS.items()}
SETTINGS |= {name: probe().setting for name, probe in PROBES.items()}
SERIES = {"mixed": "mixed · float32", "recurrent": "recurrent"}
LOOK = Look(tuple(SERIES.values()))


def told(probe: str, model: str, value: float, **more: Any) -> dict[str, Any]:
    """A row of `constate quality`: a question's mean over seeds unless `seed` is given."""
    held = {"state_bytes": 4096, "conv_bytes": 0, "kv_bytes": 1024, "params": 1000}
    asked = {"probe": probe, "model": model, "seed": None, "setting": SETTINGS.get(probe, "s")}
    asked |= {"score": value, "chance": 0.25}
    return {**asked, **held, "n": 9, "low": value - 0.1, "high": value + 0.1, "dtype": "float32", **more}


def place(model: str, first: int, last: int, value: float) -> dict[str, Any]:
    setting = f"northanger_abbey, places {first} to {last} of windows of 1024"
    return told("positions", model, value, setting=setting, first=first, last=last)


def family(name: str, size: int, value: float, seed: int = 0, probe: str = "recall") -> dict[str, Any]:
    setting = "16 pairs in 64 ids of 128"
    row = told(probe, name, value, seed=seed, setting=setting, chance=1 / 64)
    return row | {"family": name, "size": size, "held_bytes": size * 1024}


def kept(*rows: dict[str, Any], **more: Any) -> Record:
    return replace(record("quality", rows[0], **more), rows=list(rows))


def of(*records: Record, zoo: tuple[dict[str, Any], ...] = (), grid: tuple[Record, ...] = ()) -> Remembered:
    return remembered.remembered(records, SERIES, LOOK, zoo, grid)


def cells(found: Remembered, name: str) -> dict[str, str]:
    return dict(zip(COLUMNS, dict(found.rows)[name], strict=True))


def test_the_mean_over_seeds_stands_for_them_and_the_newest_for_all() -> None:
    seeds = [told("recall", "mixed", 0.4, seed=0), told("recall", "mixed", 0.6, seed=1)]
    old = kept(told("recall", "mixed", 0.9), taken="2026-01-01T00:00:00+00:00")
    found = of(kept(*seeds, told("recall", "mixed", 0.5)), old)
    assert cells(found, "mixed")["recall"] == "0.50 (0.40 to 0.60)"
    assert cells(found, "by chance")["recall"] == "0.25"
    assert cells(found, "mixed")["copy"] == "–" and cells(found, "by chance")["copy"] == "–"
    assert [name for name, _ in found.rows] == ["mixed", "by chance"], "who was asked nothing has no row"


def test_what_has_several_settings_is_their_mean() -> None:
    depths = [told("passkey", "mixed", 0.1 + d / 250, setting=Passkey(depth=d).setting) for d in (0, 100)]
    found = of(kept(*depths))
    assert cells(found, "mixed")["passkey"] == "0.30"


def test_only_what_everybody_is_asked_is_set_side_by_side() -> None:
    """Another text's rows, other windows', other settings': kept with the rest, told beside none of them."""
    page = "page.txt, places 0 to 15 of windows of 1024"
    short = "northanger_abbey, places 0 to 15 of windows of 64"
    foreign = [
        told("positions", "mixed", 9.0, setting=page, first=0, last=15),
        told("positions", "mixed", 9.0, setting=short, first=0, last=15),
        told(
            "repeat", "mixed", 9.0, setting="page.txt, passages of 256 tokens read again", first_reading=9.5
        ),
        told("cloze", "mixed", 0.9, setting="shakespeare, 4 words of the passage"),
        told("recall", "mixed", 0.9, setting=Recall(pairs=2).setting),
        told("bpb", "mixed", 9.0, setting="page.txt, windows of 1024 tokens"),
        told("bpb", "mixed", 9.0, setting="shakespeare, read whole"),
        told("bpb", "mixed", 9.0, setting="northanger_abbey, windows of 1024 tokens, one in 9"),
    ]
    found = of(kept(*foreign))
    assert found.rows == [] and found.said == [] and found.figures == []
    usual = [told("recall", "mixed", 0.5), place("mixed", 0, 15, 1.9)]
    found = of(kept(*usual, *foreign))
    assert cells(found, "mixed") == {**dict.fromkeys(COLUMNS, "–"), "recall": "0.50 (0.40 to 0.60)"}
    assert [p["bits"] for p in values(found, "places")[1]] == [1.9]


def test_the_book_is_scored_in_the_same_windows_for_all() -> None:
    book = told("bpb", "mixed", 1.5, setting="northanger_abbey, windows of 1024 tokens; an upper bound")
    other = [
        told("bpb", "mixed", 1.9, setting=f"northanger_abbey, {how}")
        for how in ("windows of 64 tokens", "read whole", "windows of 10240 tokens")
    ]
    assert quality([kept(book), kept(*other)])["mixed"]["score"] == 1.5


@pytest.mark.parametrize(
    ("row", "lacks"),
    [
        (told("recall", "mixed", math.nan), "score, low, high"),
        ({**told("recall", "mixed", 0.5), "score": "0.5"}, "score"),
        ({"probe": "recall", "model": "mixed", "setting": "s", "score": 0.5}, "chance"),
        ({"probe": "bpb", "score": 0.5}, "model"),
        ({"probe": "bpb", "model": ["mixed"], "score": 0.5}, "model"),
        (told("positions", "mixed", 0.5), "first, last"),
        (told("repeat", "mixed", 0.5), "first_reading"),
        (told("recall", "mixed", 0.5) | {"family": "attention"}, "size, held_bytes"),
    ],
)
def test_what_a_foreign_row_lacks_is_told(row: dict[str, Any], lacks: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"does not tell its {lacks}: files that `constate quality --out`"):
        report([*measured(), kept(row)], ASKED, tmp_path, [])
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_number_is_told_nowhere(tmp_path: Path) -> None:
    """A model of NaN has scores of NaN, which JSON lacks: None in files, and no score in a report."""
    results = Results(tmp_path / "results.jsonl")
    rows = [told("repeat", "mixed", math.nan, first_reading=math.inf), told("bpb", "mixed", math.nan)]
    kept_rows = results.add("quality", {}, [*rows, bits("mixed", score=math.nan), {"task": "copa"}]).rows
    line = (tmp_path / "results.jsonl").read_text()
    assert "NaN" not in line and "Infinity" not in line
    assert [row.get("score") for row in kept_rows] == [None] * 4 and kept_rows[0]["first_reading"] is None
    records = [r for r in measured() if r.bench != "quality"]
    done = report([*records, *read(tmp_path / "results.jsonl")], ASKED, tmp_path, [])
    assert {row["bits_per_byte"] for row in done.rows} == {None}
    json.loads(_charts((tmp_path / "report.html").read_text()), parse_constant=pytest.fail)


def test_a_seed_that_was_joined_twice_counts_once() -> None:
    own = kept(family("attention", 4, 1.0), family("hybrid", 4, 1.0), family("hybrid", 4, 0.98, seed=1))
    once, twice = of(own), of(own, own)
    assert once.came_out == twice.came_out and "hybrid 0.99 [" in once.came_out[0]


def test_a_model_looks_alike_in_all_charts() -> None:
    book = "northanger_abbey, windows of 1024 tokens"
    zoo = [
        told("bpb", name, 1.6, setting=book, bound=False) for name in ("tiny/gla", "recurrent", "tiny/gla")
    ]
    (figure,) = of(zoo=tuple(zoo)).figures
    scale = figure.panels[0][1].to_dict()["layer"][-1]["encoding"]["color"]["scale"]
    drawn = dict(zip(scale["domain"], scale["range"], strict=True))
    assert drawn["recurrent"] == LOOK.colour("recurrent") and list(drawn) == ["tiny/gla", "recurrent"]
    assert drawn["tiny/gla"] not in {LOOK.colour(name) for name in LOOK.series}
    (points,) = figure.panels[0][1].to_dict()["datasets"].values()
    assert [p["series"] for p in points] == ["tiny/gla", "recurrent"], "who ships twice is drawn once"


def test_bits_a_byte_of_the_book_stay_where_they_are() -> None:
    """The whole book's are a standing's; a second text's, and a part's, are no score of the book."""
    book = told("bpb", "mixed", 1.5, setting="northanger_abbey, windows of 1024 tokens")
    part = told("bpb", "mixed", 1.9, setting="northanger_abbey, windows of 1024 tokens, one in 9")
    other = told("bpb", "mixed", 3.7, setting="shakespeare, windows of 1024 tokens, one in 10")
    assert cells(of(kept(book, other)), "mixed")["bpb"] == "3.70"
    assert quality([kept(book, other, part)])["mixed"]["score"] == 1.5
    assert of(kept(book)).rows == []
    assert cells(of(kept({**other, "bound": True})), "mixed")["bpb"] == "at most 3.70"


def test_sentences() -> None:
    again = [
        told("repeat", name, 1.5, first_reading=first) for name, first in (("mixed", 1.9), ("recurrent", 1.4))
    ]
    ids = [told("recall", "mixed", 0.3), told("copy", "mixed", 0.9), told("copy", "recurrent", 0.2)]
    one, two = of(kept(*again, *ids)).said
    assert "costs mixed 0.400 less bits a byte than at first, recurrent 0.100 more:" in one
    assert "by luck: mixed on copy, of 3 scores." in two
    (two,) = of(kept(ids[0])).said
    assert "by luck: none, of 1 scores." in two
    (read,) = of(kept(told("cloze", "mixed", 0.5, contaminated=True))).said
    assert read == "mixed read these very texts in training: its scores on them are not held out."
    assert of(kept(told("cloze", "mixed", 0.5, contaminated=False))).said == []


def values(found: Remembered, name: str) -> list[list[dict[str, Any]]]:
    (figure,) = [f for f in found.figures if f.name == name]
    spec = figure.panels[0][1].to_dict()
    return [spec["datasets"][layer["data"]["name"]] for layer in spec["layer"]]


def test_places_are_drawn_as_the_report_draws_the_model() -> None:
    found = of(kept(place("mixed", 0, 15, 1.9), place("mixed", 16, 63, 1.6), place("recurrent", 0, 15, 1.8)))
    line, points = values(found, "places")
    assert line == points and [p["place"] for p in points] == [16, 64, 16]
    assert {p["series"] for p in points} == {"mixed · float32", "recurrent"}


def test_sizes_of_one_family_are_joined() -> None:
    book = "northanger_abbey, windows of 1024 tokens"
    zoo = [
        told("bpb", f"tiny/{name}", value, setting=book, bound=False, state_bytes=held)
        for name, value, held in (
            ("gla_k64", 1.60, 400),
            ("gla", 1.62, 200),
            ("gla_k4", 1.65, 100),
            ("mamba", 1.61, 50),
        )
    ]
    bound = told("bpb", "tiny/mdlm", 2.0, setting=book, bound=True)
    other = told("bpb", "tiny/gla", 3.7, setting="shakespeare, windows of 1024 tokens", bound=False)
    joined, points = values(of(zoo=(*zoo, bound, other)), "bits_by_state")
    assert [p["bits"] for p in joined] == [1.65, 1.62, 1.60]
    assert [p["series"] for p in points] == [row["model"] for row in zoo]
    assert points[0]["bytes"] == 400 + 1024


def test_own_families_take_the_place_of_those_that_ship() -> None:
    shipped = kept(family("attention", 4, 1.0), family("hybrid", 4, 1.0))
    own = kept(family("attention", 4, 0.5), family("hybrid", 4, 0.5), family("hybrid", 4, 0.7, seed=1))
    assert of(grid=(shipped,)).came_out[0].startswith("Came out: attention and a hybrid")
    found = of(own, grid=(shipped,))
    assert found.came_out[0].startswith("Did not come out: attention and a hybrid")
    assert "Seen: attention 0.50; hybrid 0.60 [0.00, 1.00]" in found.came_out[0]
    assert [f.name for f in found.figures] == ["recall"]
    assert of().came_out == [] and of().figures == []


def test_a_family_looks_alike_in_every_figure() -> None:
    copy = {"setting": "32 of 32 symbols, 160 bits", "chance": 1 / 32}
    rows = [family("attention", 4, 1.0), family("window", 4, 0.1), family("linear", 4, 0.5)]
    rows += [family(name, 4, 0.9, probe="copy") | copy for name in ("linear", "attention")]
    scales = []
    for figure in of(kept(*rows)).figures:
        layers = figure.panels[0][1].to_dict()["layer"]
        scale = next(layer["encoding"]["color"]["scale"] for layer in layers if "color" in layer["encoding"])
        scales.append(dict(zip(scale["domain"], scale["range"], strict=True)))
    recall, copied = scales
    assert copied == {name: recall[name] for name in ("linear", "attention")}


def test_a_report_tells_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "<script>alert(1)</script>"
    rows = [told("recall", "mixed", 0.9), place("mixed", 0, 15, 1.9), place("mixed", 16, 63, 1.6)]
    done = report(
        [*measured(), kept(*rows, told("copy", hostile, 0.1))], ASKED, tmp_path, ["constate compare"]
    )
    assert done.remembered[0].endswith("which were trained on the probes.")
    assert {path.name for path in done.files} >= {"places.png", "recall.png", "copy.png", "bits_by_state.png"}
    html = (tmp_path / "report.html").read_text()
    assert '<td data-label="recall">0.90 (0.80 to 1.00)</td>' in html and hostile not in html
    assert 'id="places-0"' in html and json.loads(_charts(html))["recall-0"]


def _charts(html: str) -> str:
    start = html.index('id="charts">') + len('id="charts">')
    return html[start : html.index("</script>", start)]


def test_scores_that_ship_are_kept_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    book = told("bpb", "tiny/gla", 1.0, setting="northanger_abbey, windows of 1024 tokens")
    ships = [book, told("recall", "tiny/gla", 0.1), told("recall", "tiny/gla", 0.2, seed=0)]
    monkeypatch.setattr(measure, "scores", lambda name: ships if name == "tiny/gla" else [])
    results = Results()
    for _ in range(2):
        for name in ("tiny/gla", "tiny/mamba"):
            measure._score(name, Sweep((name,)), results, print)
    asked = [(r.settings["model"], r.settings["source"], len(r.rows)) for r in results.records]
    beside = "quality.json beside the checkpoint"
    assert asked == [("tiny/gla", "scores that ship", 2), ("tiny/gla", beside, 1), ("tiny/mamba", beside, 1)]
    assert quality(results.records)["tiny/gla"]["score"] != 1.0
    monkeypatch.setattr(measure, "shipped_score", lambda name: None)  # as a model that was not trained here
    alone = Results()
    measure._score("tiny/gla", Sweep(("tiny/gla",)), alone, print)
    assert quality(alone.records)["tiny/gla"]["score"] == 1.0
    assert [len(r.rows) for r in alone.records] == [2, 1]
    ships[1] = told("recall", "tiny/gla", 0.3)
    measure._score("tiny/gla", Sweep(("tiny/gla",)), results, print)
    (row,) = remembered._newest(results.records, "tiny/gla")
    assert row["score"] == 0.3, "what ships anew takes the place of what shipped"


def test_bits_alone_are_no_quality_section() -> None:
    assert of(kept(bits("mixed"))).rows == []
