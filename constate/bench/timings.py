"""The points of `bench speed`: which model, how long a prompt, how many rows; kept, resumed and spread.

Knows names, options and results; what is timed, and how, is speed.py's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ..core.model import Model
from ..diffusion_lm.plan import Plan
from ..loading import load
from .executor import Done, in_order
from .executor import points as spread
from .outlook import paper_of, refuse
from .peak import Point
from .results import Results
from .shapes import SHAPES, random_model
from .speed import speed


@dataclass(frozen=True)
class Timing:
    """One point: `rows` prompts of `prompt` tokens and `new` more of each, in `rounds` turns with the engines
    `against`. `name` is a shape's or what constate.load takes, `load` its options. `plan` holds fields of
    diffusion_lm's Plan, for models that heed one. `threads`: None as torch picks them."""

    name: str
    prompt: int
    new: int
    rows: int
    rounds: int = 3
    against: tuple[str, ...] = ()
    check: bool = False
    plan: Mapping[str, Any] | None = None
    threads: int | None = None
    load: Mapping[str, Any] = field(default_factory=dict)


def timings(
    wanted: Sequence[Timing],
    results: Results | None = None,
    *,
    executor: str = "local",
    done: Callable[[Timing], None] = lambda point: None,
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each point, in their order, one an engine. Points that `results` has are not timed again,
    and each new one is kept there at once. `done` is told of every point. Raises as `speed` does, and at
    once where the memory here would not suffice by prediction."""
    results = Results() if results is None else results
    kept = [results.done("speed", asdict(point)) for point in wanted]
    todo = [i for i, record in enumerate(kept) if record is None]
    if executor == "local":  # another machine has its own memory
        for i in todo:
            _refuse(wanted[i])

    def fresh() -> Iterator[Done[list[dict[str, Any]]]]:
        tasks = [wanted[i] for i in todo]
        cards = any(str(point.load.get("device", "cpu")).startswith("cuda") for point in tasks)
        for one in spread(time, tasks, executor, gpus=int(cards), alone=True):
            results.add("speed", asdict(tasks[one.index]), one.result, one.place)
            yield one

    coming = (one.result for one in in_order(fresh()))
    for point, record in zip(wanted, kept, strict=True):
        rows = [dict(found) for found in record.rows] if record is not None else next(coming)
        done(point)
        yield rows


def time(point: Timing) -> list[dict[str, Any]]:
    """The rows of one point, timed in this process."""
    if point.threads is not None:
        torch.set_num_threads(point.threads)
    given = tuple(sorted(point.load.items()))
    model, plain = _model(point.name, given), {**point.load, "dtype": "float32", "weights": None}
    exact = model.weight_dtype == "float32"
    source = None if exact or not point.against else _model(point.name, tuple(sorted(plain.items())))
    asked: dict[str, Any] = {
        key: getattr(point, key) for key in ("prompt", "new", "rounds", "against", "check")
    }
    plan = None if point.plan is None else Plan(**point.plan)
    places = paper_of(point.name, point.load).positions
    return list(
        speed(model, point.name, rows=[point.rows], plan=plan, source=source, positions=places, **asked)
    )


@lru_cache(maxsize=2)  # a model, and the same in float32
def _model(name: str, given: tuple[tuple[str, Any], ...]) -> Model:
    options: dict[str, Any] = dict(given)
    return random_model(name, **options) if name in SHAPES else load(name, **options)


def heeds_plan(name: str) -> bool:
    """Whether the model of this name fills places in any order."""
    return not paper_of(name, {}).causal


def _refuse(point: Timing) -> None:
    """Raises ValueError where memory would not suffice, with the largest length that fits."""
    way = "pieces" if paper_of(point.name, point.load).causal else "one-shot"
    refuse(Point(point.name, point.prompt + point.new, point.rows, way, load=dict(point.load)))
