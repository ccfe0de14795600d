"""The comparison's charts, as Vega draws them, and the folder that they lie in."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from constate.bench.compare import charts, page
from constate.bench.compare.evidence import gather, quality
from constate.bench.compare.figures import figures
from constate.bench.compare.report import report
from constate.bench.compare.standing import standings
from constate.bench.results import Record
from tests.reports import (
    ASKED,
    CPU,
    GPU,
    measured,
    memory,
    record,
    speed,
)

SHIPPED = ("bits_by_state", "recall", "copy")  # of the zoo and of trained families, in every report

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
    assert set(specs) == {f"{name}-0" for name in (*drawn(measured()), *SHIPPED)}
    assert 'onerror=\\"alert(1)' in told[0]  # the name came through whole


def test_pictures_are_pngs_of_their_size(folder: Path):
    pictures = sorted(path.name for path in folder.glob("*.png"))
    assert pictures == sorted(f"{name}.png" for name in (*drawn(measured()), *SHIPPED))
    for path in folder.glob("*.png"):
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = (int.from_bytes(head[i : i + 4]) for i in (16, 20))
        assert width > page.PICTURE["width"] * page.SHARP and height > page.PICTURE["height"] * page.SHARP
