"""Teaching a tiny model a probe: fresh episodes in every step, the loss at the answers alone.

What a step reads depends on the seed and the step's number, so that a run is the same whenever it is run.
Knows losses and optimisers; not what any probe asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ...core.decay import inverse_softplus
from ...core.model import Model
from ...kernels.dispatch import select
from ...spans import Spans
from ...training.init import initialise
from ...training.optim import course, optimizers
from . import families
from .asking import answered
from .probes.episodes import SILENT, Probe

ROWS = 64
EASIER = 0.6  # of the steps: until then each step's episodes come from another of the probe's stages
CHECK = 50  # steps from one look at fresh episodes to the next
SOLVED = 0.999  # of their answers right, twice in a row, and the training is over
HALF_LIFE = (512.0, 8192.0)


@dataclass(frozen=True)
class Lesson:
    """What is taught to what: a family (families.py) with `size` keys of state, at most `steps` steps of
    `rows` episodes; `until_solved`, it ends where that is solved before, which is too early for who is asked
    at greater lengths then."""

    family: str
    probe: Probe
    size: int = 16
    steps: int = 600
    seed: int = 0
    rows: int = ROWS
    until_solved: bool = True


def teach(lesson: Lesson) -> Iterator[tuple[int, float, Model]]:
    """(step, share of right answers on fresh episodes, the model) every CHECK steps and at the end.

    The last one is the trained model; its `ops` are PyTorch's, which have gradients. Raises
    FloatingPointError where a loss is not finite.
    """
    model = begin(lesson)
    chosen, stages, solved = optimizers(model), lesson.probe.easier(), 0
    for step in range(lesson.steps):
        late = step >= EASIER * lesson.steps
        stage = lesson.probe if late else stages[step % len(stages)]
        loss = _loss(model, stage, lesson.rows, _seed(lesson.seed, step))
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = course(step, lesson.steps)
        for optimizer in chosen.values():
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
            optimizer.step()
        done = step + 1
        if done % CHECK == 0 or done == lesson.steps:
            if not torch.isfinite(loss):
                raise FloatingPointError(f"{lesson.family}: the loss is {loss.item()} at step {step}")
            right = _right(model, lesson.probe, lesson.rows, _seed(lesson.seed, -done))
            solved = solved + 1 if right >= SOLVED else 0
            yield done, right, model
            if solved == 2 and lesson.until_solved:
                return


def begin(lesson: Lesson) -> Model:
    """The untrained model, the same for the same lesson."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lesson.seed)
        model = initialise(families.build(lesson.family, lesson.probe.ids, lesson.size))
        remember(model)
    model.ops = select("torch")
    return model


@torch.no_grad()
def remember(model: Model) -> None:
    """Draw decays anew, in place, so that a state keeps things for as long as the probes ask.

    Published initialisations are for text and forget within a few tokens, and a model that forgets gets no
    gradient that would teach it otherwise: Mamba-2 stays at chance for hundreds of steps. Step sizes of
    about 1 and half-lives log-uniform in HALF_LIFE are what all recurrences with a rate begin with here.
    """
    low, high = (torch.tensor(2.0).log() / t for t in reversed(HALF_LIFE))
    for module in model.modules():
        rates, bias = getattr(module, "a_log", None), getattr(module, "dt_bias", None)
        if isinstance(rates, nn.Parameter) and isinstance(bias, nn.Parameter):
            rates.uniform_(low.log().item(), high.log().item())
            bias.copy_(inverse_softplus(torch.ones_like(bias)))


def _loss(model: Model, probe: Probe, rows: int, seed: int) -> torch.Tensor:
    episodes = probe.draw(rows, seed)
    spans = Spans.of([episodes.tokens.shape[1]] * rows)
    wanted = episodes.wanted.flatten()
    asked = wanted != SILENT
    return F.cross_entropy(model(episodes.tokens.flatten(), spans)[asked], wanted[asked])


def _right(model: Model, probe: Probe, rows: int, seed: int) -> float:
    ids = torch.arange(probe.ids)
    hits, asked = answered(model, probe.draw(rows, seed), probe.answers, ids)
    return float(hits.sum() / asked.sum())


def _seed(run: int, step: int) -> int:
    """Of a step's episodes, below asking.FROM; steps below 0 are looks at what was learned."""
    return (run * 20_011 + step) % 999_983
