"""What a point of `bench memory` needs, by prediction: bytes, arithmetic, and whether it can be measured.

Everything is asked of an outline of the model, made from its config anew; the model that is measured never
has a say. Knows points and models on paper; measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ..core.checkpoint import Checkpoint, read_json
from ..core.decode import PIECE
from ..core.int8 import stores_int8
from ..diffusion_lm.denoiser import Masked
from ..loading import locate
from ..loading.folder import dtype_named
from .peak import NEW, Point
from .predict.limits import first
from .predict.paper import Paper, paper
from .shapes import SHAPES
from .units import size
from .workspace import workspace

LONG = 5e10  # FLOPs of attention in a prompt from which keys and values are filled, not computed
TOO_LONG = 1e12  # in a single call, which cannot be filled: the point is left out, and its row says so


class TooLarge(ValueError):
    """A point that memory does not suffice for."""


def paper_of(name: str, load: Mapping[str, Any]) -> Paper:
    """The model of this name (a shape's, or what constate.load takes) on paper, as `load` would make it.
    Raises ValueError also for a format that has its bytes on paper alone."""
    kinds = {key: load.get(key) or usual for key, usual in _USUAL.items()}
    dtype_named("state_dtype", kinds["state_dtype"])
    stores_int8(kinds["weights"], dtype_named("dtype", kinds["dtype"]))
    return _paper(name, **kinds)


_USUAL = {"dtype": "float32", "state_dtype": "float32", "weights": None}


@lru_cache(maxsize=64)
def _paper(name: str, dtype: str, state_dtype: str, weights: str | None) -> Paper:
    stored = {"dtype": dtype, "state_dtype": state_dtype, "weights": weights}
    if name in SHAPES:
        return paper(SHAPES[name], **stored)
    folder = locate(name)
    return paper(read_json(folder / "config.json"), **stored, shapes=Checkpoint(folder).shapes())


def effort(point: Point) -> float:
    """About how long a point takes beside others."""
    new = point.length - point.filled
    computed = paper_of(point.name, point.load).model.cost(new, point.filled, point.rows).total_flops
    return 0.0 if too_long(point) else 3e10 + computed


def too_long(point: Point) -> bool:
    """Whether the attention of one call, which must be computed, is more than TOO_LONG."""
    return point.way == "one-shot" and attention(point) > TOO_LONG


def attention(point: Point) -> int:
    """FLOPs of attention in reading the prompt."""
    return paper_of(point.name, point.load).model.cost(point.length, 0, point.rows).flops.get("attention", 0)


def filled(point: Point, fill: str) -> int:
    """How many tokens of each row are filled in: whole pieces, all but the last."""
    model = paper_of(point.name, point.load).model
    grows = model.cost(0, point.length).held.get("kv", 0)
    if point.way != "pieces" or fill == "never" or not grows:
        return 0
    return (point.length - 1) // PIECE * PIECE if fill == "always" or attention(point) > LONG else 0


def held(about: Paper, point: Point) -> dict[str, int]:
    """What all rows hold once the prompt is read and the last token is written."""
    config = about.model.config
    kept = not isinstance(config, Masked) or config.asked(0).exact_cache
    context = point.length + (NEW if about.causal else 0)
    return {kind: point.rows * n if kept else 0 for kind, n in about.held(context).items()}


def scratch(about: Paper, point: Point) -> int:
    new = min(point.length, PIECE) if point.way == "pieces" else point.length
    return workspace(about.model, new, point.length, point.rows, str(point.load.get("device", "cpu")))


def refuse(point: Point, free: int | None = None) -> None:
    """Raises TooLarge where the prediction of a point is more than the memory that is `free` (None: on the
    point's device now), with the largest length that fits."""
    if free is None:
        from ..loading.folder import device_named
        from ..loading.memory import available

        free = available(device_named(str(point.load.get("device", "cpu"))))
    about = paper_of(point.name, point.load)

    def needs(length: int) -> int:
        at = replace(point, length=length)
        return about.weight_bytes + sum(held(about, at).values()) + scratch(about, at)

    if free is None or needs(point.length) <= free:
        return
    fits = (first(lambda length: needs(length) > free, point.length) or 0) - 1
    advice = f"the largest length that fits is {fits:,} tokens" if fits > 0 else "no length fits"
    raise TooLarge(
        f"{point.name} at {point.length:,} tokens a row, rows {point.rows}, needs "
        f"{size(needs(point.length))} by prediction and {size(free)} is free: {advice}"
    )
