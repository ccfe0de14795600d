"""The report as one page that opens without a network: text, tables, interactive charts and their library.

Knows HTML and Vega's bundle; what is said and drawn is handed in. The template and its style and script lie
beside this file, in page.html, page.css and page.js.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .charts import Look
from .figures import Figure

HERE = Path(__file__).parent
HEIGHT = 340
PICTURE = {"width": 760, "height": 420}  # a panel of a PNG, in points, of which each is SHARP pixels wide
SHARP = 2
VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])  # as vl_convert names it
# Vega's symbols, drawn in a square from 0 to 12.
OUTLINES = {
    "circle": "M6 1a5 5 0 1 0 .01 0z",
    "square": "M1.5 1.5h9v9h-9z",
    "triangle-up": "M6 1l5.5 10H.5z",
    "diamond": "M6 0l5 6-5 6-5-6z",
    "cross": "M4 1h4v3h3v4H8v3H4V8H1V4h3z",
    "triangle-down": "M6 11L.5 1h11z",
    "triangle-right": "M11 6L1 11.5V.5z",
}


def page(figures: Sequence[Figure], beside: Sequence[Figure], look: Look, told: Mapping[str, Any]) -> str:
    """The page's HTML: `figures` of machines, and those `beside` them that belong to none. `told` is what
    the template names besides: title, asked, machines, columns, remembered, commands, facts, details; all of
    it text, which is escaped here."""
    specs = {
        f"{figure.name}-{i}": _responsive(chart)
        for figure in (*figures, *beside)
        for i, (_, chart) in enumerate(figure.panels)
    }
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return template.from_string(_beside("page.html")).render(
        **told,
        style=Markup(_beside("page.css")),
        script=_script(_beside("page.js")),
        library=_script(library()),
        charts=Markup(json.dumps(specs).replace("<", "\\u003c")),
        figures=[_framed(figure) for figure in figures],
        beside=[_framed(figure) for figure in beside],
        legend=[{"name": name, "key": key(name, look)} for name in look.series],
    )


def picture(figure: Figure) -> bytes:
    """A figure as PNG, its machines side by side, on white."""
    charts = [chart.properties(**PICTURE, title=label) for label, chart in figure.panels]
    whole = alt.hconcat(*charts) if len(charts) > 1 else charts[0]
    grey = "#565d69"
    whole = whole.configure(background="white", padding=16)
    whole = whole.configure_axis(
        labelColor=grey, titleColor=grey, titleFontWeight="normal", gridColor="#e6e8ec", labelFontSize=12
    )
    whole = whole.configure_legend(labelFontSize=12, symbolSize=90).configure_view(stroke=None)
    whole = whole.configure_title(color=grey, fontSize=13, fontWeight="normal", anchor="start")
    return vl_convert.vegalite_to_png(whole.to_dict(), vl_version=VEGA_LITE, scale=SHARP)


def _framed(figure: Figure) -> dict[str, Any]:
    panels = [{"id": f"{figure.name}-{i}", "label": label} for i, (label, _) in enumerate(figure.panels)]
    return {"name": figure.name, "title": figure.title, "caption": figure.caption, "panels": panels}


@cache
def library() -> str:
    """Vega, Vega-Lite and vega-embed in one script, which binds vegaEmbed to the window."""
    bundle: Any = vl_convert.javascript_bundle  # its stub calls the snippet required, and its text does not
    return bundle(vl_version=VEGA_LITE)


def key(name: str, look: Look) -> Markup:
    """A series' mark, as small as a letter."""
    outline = OUTLINES[look.shape(name)]
    svg = '<svg viewBox="0 0 12 12" aria-hidden="true"><path fill="{}" d="{}"/></svg>'
    return Markup(svg).format(look.colour(name), outline)


def _responsive(chart: alt.LayerChart) -> dict[str, Any]:
    """As wide as the page lets it be; the page's script gives it colours."""
    spec = chart.properties(width="container", height=HEIGHT).to_dict()
    del spec["config"]  # altair's default sizes
    return spec | {"autosize": {"type": "fit-x", "contains": "padding"}}


def _script(text: str) -> Markup:
    """Source that stands inside a script element, which nothing in it may end."""
    return Markup(re.sub(r"<(?=/script|!--)", r"\\x3c", text, flags=re.IGNORECASE))


def _beside(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
