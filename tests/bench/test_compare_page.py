"""The report in a browser: drawn without a word on the console, wide and narrow, in light and in the dark.

Wants Debian's chromium, or another of that family, on the PATH; Playwright brings the driver alone.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from constate.bench.compare.charts import Look
from constate.bench.compare.remembered import remembered
from constate.bench.compare.report import report
from constate.bench.compare.workload import Workload
from constate.bench.quality.probes import PROBES, probe
from constate.bench.quality.shipped import grid
from constate.training import SHIPPED
from tests.reports import CPU, GPU, MODELS, measured, record, speed

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(FOUND is None, reason=f"none of {', '.join(BROWSERS)} is on the PATH")

# Of two machines; and beside them places, the zoo and the families that ship.
BESIDE = 2 + len(remembered([], {}, Look(()), [], grid()).figures)
FIGURES, PANELS = 6 + BESIDE, 12 + BESIDE
WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    slow = speed("mixed", 1000, 2, engine="a peer with a name of some length", itl_p90_s=None)
    absent = speed("mixed", 1000, 2, engine="vllm", error="it is not installed", install="pip install vllm")
    others = [record("speed", row) for row in (slow, absent)]
    asked = [record("quality", row) for model in MODELS for row in scored(model)]
    records = [*measured(CPU), *others, *measured(GPU), *asked]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("constate.bench.compare.report.scores_of_zoo", lambda: list(zoo()))
        report(records, Workload(1000, 280, 2), out, ["constate compare"])
    return out / "report.html"


def scored(model: str) -> Iterator[dict[str, Any]]:
    """A row for every column of the table of what is remembered, and a place of two."""
    row = {"model": model, "seed": None, "score": 0.5, "chance": 0.25, "low": 0.4, "high": 0.6}
    book, windows = "northanger_abbey", "windows of 1024"
    for name in PROBES:
        yield {**row, "probe": name, "setting": probe(name).setting}
    yield {**row, "probe": "bpb", "setting": f"shakespeare, {windows} tokens"}
    yield {**row, "probe": "cloze", "setting": f"{book}, 4 words"}
    again = f"{book}, passages of 256 tokens read again"
    yield {**row, "probe": "repeat", "setting": again, "first_reading": 1.5}
    for low, high in ((0, 15), (16, 31)):
        places = f"{book}, places {low} to {high} of {windows}"
        yield {**row, "probe": "positions", "setting": places, "first": low, "last": high}


def zoo() -> Iterator[dict[str, Any]]:
    """Scores of every checkpoint that writes one token after another, as many as a legend holds."""
    held = {"conv_bytes": 0, "kv_bytes": 0}
    row = {"probe": "bpb", "setting": "northanger_abbey, windows of 1024 tokens", "bound": False, **held}
    for i, name in enumerate(SHIPPED):
        yield {**row, "model": f"tiny/{name}", "score": 1.6 + i / 100, "state_bytes": 2 ** (12 + i)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # No sandbox: in a container there is often none to be had, and the page is our own file.
        found = driver.chromium.launch(executable_path=FOUND, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Any]:
    """Opens the report at a width and in a scheme, once all is drawn; at the end nothing may have been said
    on the console and nothing asked of a network."""
    said: list[str] = []

    def open_at(width: int, scheme: str) -> Any:
        view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        view.on("console", lambda message: said.append(message.text))
        view.on("pageerror", lambda error: said.append(str(error)))
        view.on("request", lambda asked: said.append(asked.url) if asked.url.startswith("http") else None)
        view.goto(file.as_uri())
        drawn(view)
        return view

    yield open_at
    assert said == []


def drawn(view: Any) -> None:
    view.wait_for_selector(f"body[data-drawn='{PANELS}']", timeout=60_000)


def count(view: Any, what: str) -> int:
    return view.locator(what).count()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_is_drawn_and_fits(opened: Any, width: int, scheme: str):
    view = opened(width, scheme)
    assert count(view, "figure") == FIGURES
    assert count(view, ".chart svg") == PANELS
    # Of each machine 4 lengths and 3 prompts for each model, and its score; of one a peer's besides.
    assert count(view, "#memory .mark-symbol path") == 2 * 4 * len(MODELS)
    assert count(view, "#time .mark-symbol path") == 2 * 3 * len(MODELS)
    assert count(view, "#quality_by_bytes .mark-symbol path") == 2 * len(MODELS)
    assert count(view, "#quality_by_speed .mark-symbol path") == 2 * len(MODELS) + 1
    assert count(view, "#memory .mark-line path") == 2 * len(MODELS)
    assert view.evaluate("document.documentElement.scrollWidth") == width
    assert "vllm did not run mixed: it is not installed (pip install vllm)" in view.inner_text("main")
    # Nothing is cut off: what is drawn lies within the page, and has a size.
    boxes = view.evaluate(
        "[...document.querySelectorAll('.chart svg')].map(e => e.getBoundingClientRect().toJSON())"
    )
    for box in boxes:
        assert box["left"] >= 0 and box["right"] <= width and box["width"] > 250 and box["height"] > 250
    words = view.evaluate(OUTSIDE, width)
    assert words == []
    # Side by side where there is room, one below the other where there is none.
    tops = [round(box["top"]) for box in boxes[:2]]
    assert (tops[0] == tops[1]) == (width > 800)


# Texts that stick out of the page, of its own and of the charts.
OUTSIDE = """width => [...document.querySelectorAll('h1, h2, h3, p, li, td, th, button, svg text')]
  .filter(e => !e.closest('.wide, thead')).map(e => [e.textContent, e.getBoundingClientRect()])
  .filter(([text, box]) => box.width > 0 && (box.left < 0 || box.right > width)).map(([text]) => text)"""


def test_no_width_between_scrolls_sideways(opened: Any):
    view = opened(1280, "light")
    for width in (360, 500, 761, 800, 900, 1000, 1001, 1100, 1920):
        view.set_viewport_size({"width": width, "height": 900})
        view.wait_for_timeout(150)
        assert view.evaluate("document.documentElement.scrollWidth") <= width, width


@pytest.mark.parametrize("scheme", SCHEMES)
def test_words_are_read_in_both_schemes(opened: Any, scheme: str):
    """Contrast by WCAG 2's formula, 4.5 for text: of the page, of its tables and of the axes."""
    view = opened(1280, scheme)
    ground = luminance(view, "document.body", "backgroundColor")
    assert (ground < 0.02) if scheme == "dark" else (ground > 0.9)
    for what, style in (
        ("h1", "color"),
        ("td", "color"),
        ("figcaption", "color"),
        (".chart svg text", "fill"),
    ):
        ink = luminance(view, f"document.querySelector('{what}')", style)
        low, high = sorted((ink, ground))
        assert (high + 0.05) / (low + 0.05) >= 4.5, what


def luminance(view: Any, element: str, style: str) -> float:
    colour = view.evaluate(f"getComputedStyle({element}).{style}")
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_charts_follow_when_the_scheme_changes(opened: Any):
    view = opened(1280, "light")
    before = view.evaluate("getComputedStyle(document.querySelector('.chart svg text')).fill")
    view.emulate_media(color_scheme="dark")
    view.wait_for_function(
        "before => document.querySelector('.chart svg text') && "
        "getComputedStyle(document.querySelector('.chart svg text')).fill !== before",
        arg=before,
    )
    drawn(view)
    assert count(view, "#memory .mark-symbol path") == 2 * 4 * len(MODELS)


def test_a_series_is_hidden_everywhere_and_comes_back(opened: Any):
    view = opened(1280, "light")
    button = view.locator("button[data-series='mixed']")
    for shown, pressed in ((len(MODELS) - 1, "false"), (len(MODELS), "true")):
        button.click()
        view.wait_for_function(
            "wanted => document.querySelectorAll('#memory .mark-symbol path').length === wanted",
            arg=2 * 4 * shown,
        )
        assert button.get_attribute("aria-pressed") == pressed
        assert count(view, "#quality_by_speed .mark-symbol path") == 2 * shown + 1
    for name in MODELS:  # none at all is no error either
        view.locator(f"button[data-series='{name}']").click()
    view.wait_for_function("document.querySelectorAll('#memory .mark-symbol path').length === 0")


def test_a_point_tells_its_numbers(opened: Any):
    view = opened(1280, "light")
    view.locator("#memory .mark-symbol path").first.hover()
    told = view.locator("#vg-tooltip-element")
    told.wait_for(state="visible")
    assert "measured" in told.inner_text() and "predicted" in told.inner_text()


def test_a_fault_in_a_chart_is_seen(browser: Any, file: Path, tmp_path: Path):
    """The check of the console and of what is drawn can fail: here a chart's data is broken."""
    broken = tmp_path / "broken.html"
    broken.write_text(
        file.read_text(encoding="utf-8").replace('"mark": {"type": "line"', '"mark": {"type": "lien"', 1)
    )
    said: list[str] = []
    view = browser.new_page()
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.goto(broken.as_uri())
    view.wait_for_timeout(3000)
    assert said
    assert view.evaluate("document.body.dataset.drawn") == ""
