"""The report's charts as Vega-Lite, by altair: each a function of plain rows, without a size or a theme.

Knows marks, scales and labels; knows no bench and nothing of how a row came about. What a chart is drawn on
(a page of any width, light or dark; a picture) gives it size, legend and the colours of axes. A row names its
`series`, which has one colour and one shape in all charts; the parameter `hidden` lists the series not to
draw. Axes reach over the rows of `beside` too, so that charts of several machines can be read side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import altair as alt

Row = Mapping[str, Any]
Rows = Sequence[Row]

# Each has a contrast of 3 or more with a white and with a nearly black ground.
COLOURS = (
    *("#2f7fd1", "#d9601a", "#2e9e5b", "#b25fd0", "#c08400"),
    *("#d6457f", "#12949e", "#8a8f2a", "#7a7f8c", "#a8653a"),
)
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
FRONT = "#8a8f98"
SIZES = "['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB']"
POWER = "floor(log(datum.value) / log(1024) + 1e-9)"
SIZE = f"format(datum.value / pow(1024, {POWER}), '~r') + ' ' + {SIZES}[{POWER}]"
COUNT = (
    "datum.value >= 1048576 ? format(datum.value / 1048576, '~r') + 'M' : "
    "datum.value >= 1024 ? format(datum.value / 1024, '~r') + 'k' : format(datum.value, '~r')"
)
SHOWN = "indexof(hidden, datum.series) < 0"
BITS = "bits a byte, unseen book"
TICKS = 8  # on a logarithmic axis at most


@dataclass(frozen=True)
class Look:
    """Which colour and shape each series has, in every chart alike. A chart whose series the page's legend
    does not hold has a `legend` of its own, and what it shares with `others` looks as it does there."""

    series: tuple[str, ...]
    legend: bool = False
    others: tuple[str, ...] = ()

    def colour(self, series: str) -> str:
        return COLOURS[self._place(series) % len(COLOURS)]

    def shape(self, series: str) -> str:
        return SHAPES[self._place(series) % len(SHAPES)]

    def _place(self, series: str) -> int:
        return list(dict.fromkeys((*self.others, *self.series))).index(series)

    def coloured(self) -> alt.Color:
        scale = alt.Scale(domain=list(self.series), range=[self.colour(s) for s in self.series])
        return alt.Color("series:N", scale=scale, title=None, **self._legend())

    def shaped(self) -> alt.Shape:
        scale = alt.Scale(domain=list(self.series), range=[self.shape(s) for s in self.series])
        return alt.Shape("series:N", scale=scale, title=None, **self._legend())

    def _legend(self) -> dict[str, Any]:
        """As many columns as the chart's width holds: a phone's two."""
        columns = alt.ExprRef("width < 400 ? 2 : width < 600 ? 3 : 4")
        return (
            {"legend": alt.Legend(orient="bottom", columns=columns, symbolOpacity=1)} if self.legend else {}
        )


def bytes_by_length(lines: Rows, points: Rows, look: Look, beside: Rows, title: str) -> alt.LayerChart:
    """`length`, `bytes`: what was predicted as lines, what was measured as points, hollow where `flagged`."""
    x = doubling(alt.X, "length", "tokens in each sequence", beside)
    y = doubling(alt.Y, "bytes", title, beside, SIZE)
    told = _told(series="model", tokens="tokens", measured="measured", predicted="predicted", remark="remark")
    sound, flagged = [p for p in points if not p["flagged"]], [p for p in points if p["flagged"]]
    return _layered(
        _on(lines).mark_line(strokeWidth=2).encode(x=x, y=y, color=look.coloured()),
        _marked(_on(sound), look).encode(x=x, y=y, tooltip=told),
        _marked(_on(flagged), look, filled=False).encode(x=x, y=y, tooltip=told),
    )


def time_per_token(points: Rows, look: Look, beside: Rows) -> alt.LayerChart:
    """`length`, `ms` with `ms_high` above it: the median and the 90th percentile of a decode step."""
    x = doubling(alt.X, "length", "tokens of prompt, one sequence", beside)
    highest = [{"ms": row["ms_high"]} for row in beside]
    y = even(alt.Y, "ms", "milliseconds a token", highest, "~g")
    told = _told(series="model", tokens="prompt", time="median", high="90th percentile")
    spread = _on(points).mark_rule(strokeWidth=2, opacity=0.45)
    return _layered(
        _on(points).mark_line(strokeWidth=2).encode(x=x, y=y, color=look.coloured()),
        spread.encode(x=x, y=y, y2="ms_high:Q", color=look.coloured()),
        _marked(_on(points), look).encode(x=x, y=y, tooltip=told),
    )


def throughput(points: Rows, look: Look, beside: Rows) -> alt.LayerChart:
    """`rows`, `tokens_per_s`: tokens decoded a second by all sequences together."""
    x = doubling(alt.X, "rows", "sequences at once", beside)
    y = even(alt.Y, "tokens_per_s", "tokens a second, all sequences", beside)
    told = _told(series="model", sequences="sequences", rate="tokens a second", tokens="prompt")
    return _layered(
        _on(points).mark_line(strokeWidth=2).encode(x=x, y=y, color=look.coloured()),
        _marked(_on(points), look).encode(x=x, y=y, tooltip=told),
    )


def quality_by_bytes(points: Rows, edge: Rows, look: Look, beside: Rows) -> alt.LayerChart:
    """`bytes`, `bits` (with `low` and `high` where it is an estimate); `edge` is the front."""
    x = doubling(alt.X, "bytes", "bytes that a sequence holds", beside, SIZE)
    return _quality(points, edge, look, beside, x)


def quality_by_speed(points: Rows, edge: Rows, look: Look, beside: Rows) -> alt.LayerChart:
    """`tokens_per_s`, `bits`, as above."""
    x = even(alt.X, "tokens_per_s", "new tokens a second for the workload", beside)
    return _quality(points, edge, look, beside, x)


def _quality(points: Rows, edge: Rows, look: Look, beside: Rows, x: Any) -> alt.LayerChart:
    scores = [row[name] for row in beside for name in ("bits", "low", "high") if row[name] is not None]
    y = alt.Y("bits:Q", title=BITS, scale=alt.Scale(domain=_around(scores), nice=True))
    told = _told(series="model", held="held by a sequence", rate="tokens a second", score="bits a byte")
    front = _on(edge).mark_line(interpolate="step-after", strokeDash=[5, 4], strokeWidth=1.5, color=FRONT)
    spread = _on([p for p in points if p["low"] is not None]).mark_rule(strokeWidth=2, opacity=0.45)
    return _layered(
        front.encode(x=x, y=y, order="at:Q"),
        spread.encode(x=x, y=alt.Y("low:Q", title=None), y2="high:Q", color=look.coloured()),
        _marked(_on(points), look, 110).encode(x=x, y=y, tooltip=told),
    )


def score_by_bytes(points: Rows, look: Look, title: str, chance: float) -> alt.LayerChart:
    """`bytes`, `score` (a share, with `low` and `high` where there are seeds): of one family a line."""
    x = doubling(alt.X, "bytes", "bytes that a sequence holds", points, SIZE)
    scale = alt.Scale(domain=[0, 1])
    y = alt.Y("score:Q", title=title, scale=scale, axis=alt.Axis(tickCount=6, format=".0%"))
    told = _told(told="model, mean and interval", held="held by a sequence")
    known = _on([p for p in points if p["low"] is not None]).mark_rule(strokeWidth=2, opacity=0.45)
    ends = [min(p["bytes"] for p in points), max(p["bytes"] for p in points)]
    guessed = _on([{"series": None, "bytes": b, "score": chance} for b in ends])
    return _layered(
        guessed.mark_line(strokeDash=[5, 4], strokeWidth=1.5, color=FRONT).encode(x=x, y=y),
        _on(points).mark_line(strokeWidth=2).encode(x=x, y=y, color=look.coloured()),
        known.encode(x=x, y=alt.Y("low:Q", title=None), y2="high:Q", color=look.coloured()),
        _marked(_on(points), look, 110).encode(x=x, y=y, tooltip=told),
    )


def bits_by_state(points: Rows, joined: Sequence[Rows], look: Look) -> alt.LayerChart:
    """`bytes`, `bits`: checkpoints, with a line through those of one family in several sizes."""
    x = doubling(alt.X, "bytes", "bytes that a sequence holds after 1,024 tokens", points, SIZE)
    scale = alt.Scale(domain=_around([row["bits"] for row in points]), nice=True)
    y = alt.Y("bits:Q", title=BITS, scale=scale)
    told = _told(series="model", held="held by a sequence", score="bits a byte")
    lines = [_on([{**row, "series": None} for row in each]) for each in joined]
    return _layered(
        *(line.mark_line(strokeWidth=1.5, color=FRONT).encode(x=x, y=y) for line in lines),
        _marked(_on(points), look, 110).encode(x=x, y=y, tooltip=told),
    )


def bits_by_place(points: Rows, look: Look) -> alt.LayerChart:
    """`place`, `bits`: the cost of tokens by how far into the window they stand."""
    x = doubling(alt.X, "place", "place in the window, up to", points)
    scale = alt.Scale(domain=_around([row["bits"] for row in points]), nice=True)
    y = alt.Y("bits:Q", title=BITS, scale=scale)
    told = _told(series="model", places="places", score="bits a byte")
    return _layered(
        _on(points).mark_line(strokeWidth=2).encode(x=x, y=y, color=look.coloured()),
        _marked(_on(points), look).encode(x=x, y=y, tooltip=told),
    )


def _around(scores: Sequence[float]) -> list[float]:
    """A little more than what lies between the least and the greatest."""
    room = 0.08 * (max(scores) - min(scores)) or 0.1
    return [min(scores) - room, max(scores) + room]


def _on(rows: Rows) -> alt.Chart:
    """A chart on these rows, without those that are hidden; a row without a series always shows."""
    return alt.Chart(alt.InlineData([dict(row) for row in rows])).transform_filter(SHOWN)


def _marked(chart: alt.Chart, look: Look, size: int = 70, filled: bool = True) -> alt.Chart:
    marked = chart.mark_point(size=size, strokeWidth=1.8, filled=filled, opacity=1)
    return marked.encode(color=look.coloured(), shape=look.shaped())


def _layered(*layers: alt.Chart) -> alt.LayerChart:
    """Those that have rows: Vega warns of a scale over none."""
    drawn = [layer for layer in layers if layer.data.values]
    return alt.LayerChart(layer=drawn).add_params(alt.param(name="hidden", value=[]))


def _told(**fields: str) -> list[alt.Tooltip]:
    return [alt.Tooltip(f"{field}:N", title=title) for field, title in fields.items()]


def doubling(channel: Any, field: str, title: str, rows: Rows, label: str = COUNT) -> Any:
    """A logarithmic axis on which as many times as much is one tick further."""
    values = [row[field] for row in rows if row[field] > 0]
    ticks = doublings(min(values), max(values)) if values else [1, 2]
    scale = alt.Scale(type="log", base=2, domain=[ticks[0], ticks[-1]], nice=False)
    return channel(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(values=ticks, labelExpr=label))


def even(channel: Any, field: str, title: str, rows: Rows, form: str = "~s") -> Any:
    """An axis from zero; `form` is how d3 writes its numbers."""
    most = max((row[field] for row in rows), default=1.0)
    scale = alt.Scale(domain=[0, most * 1.05], nice=True)
    return channel(
        f"{field}:Q",
        title=title,
        scale=scale,
        axis=alt.Axis(tickCount=6, labelExpr=f"format(datum.value, '{form}')"),
    )


def doublings(low: float, high: float) -> list[int]:
    """Powers of two around what lies between `low` and `high`: two at least and TICKS at most, equally many
    times apart (2, 4, 16 or 256 times)."""
    step = 2
    while True:
        ticks = [1]
        while ticks[-1] < high or len(ticks) < 2:
            ticks.append(ticks[-1] * step)
        ticks = [a for a, b in pairwise(ticks) if b > low] + ticks[-1:]
        if len(ticks) <= TICKS:
            return ticks
        step *= step
