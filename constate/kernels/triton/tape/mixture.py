"""A mixture of experts: the router's choice, and the experts that it asks."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..described import power as block
from ..launch import launch
from .experts import IN, OUT, choose, experts_down, experts_up
from .recorder import Recorder
from .works import Product, Run, Work, region


class Choice(NamedTuple):
    """The experts that each row asks, (rows, per_token) int32, and what their answers weigh, float32."""

    chosen: Tensor
    weights: Tensor


class Mixture(Recorder):
    """See core/experts.py for what is computed."""

    def choose(
        self,
        logits: Tensor,
        per_token: int,
        *,
        correction: Tensor | None,
        groups: int,
        kept_groups: int,
        sigmoid: bool,
        normalise: bool,
        scale: float,
    ) -> Choice:
        """The experts that each row asks, and what their answers weigh."""
        for work in self.works:
            if isinstance(work, Product) and region(work.y) == region(logits):
                work.exact = True  # a score that was rounded picks another expert
        pairs = (self.rows, per_token)
        chosen = torch.zeros(pairs, dtype=torch.int32, device=logits.device)
        choice = Choice(chosen, torch.zeros(pairs, dtype=torch.float32, device=logits.device))
        given: dict[str, Any] = {
            "logits": logits,
            "correction": correction,
            "weights": choice.weights,
            "chosen": chosen,
            "scale": scale,
            "EXPERTS": logits.shape[1],
            "BLOCK": block(logits.shape[1]),
            "ASKED": per_token,
            "GROUPS": groups,
            "KEPT": kept_groups,
            "SIGMOID": sigmoid,
            "NORMALISE": normalise,
        }
        call = partial(launch, choose, (self.rows,), logits, **given)
        self.step("choose", [logits], list(choice), lambda: call)
        return choice

    def experts(
        self,
        x: Tensor,
        choice: Choice,
        up: Tensor,
        down: Tensor,
        act: str,
        *,
        beside: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """The chosen experts' answers, weighed and summed: up (E, width or, gated, 2 width, in), down (E, in,
        width), float32 or narrow; plus `beside` (rows, in), where there is one, times the sigmoid of `gate`
        (rows, 1), where there is one."""
        per_token, width, inner = choice.chosen.shape[1], down.shape[2], down.shape[1]
        pairs, y = self.rows * per_token, self.vector(inner)
        hidden = torch.full((pairs, width), torch.nan, dtype=torch.float32, device=x.device)
        common: dict[str, Any] = {"chosen": choice.chosen, "hidden": hidden, "size": inner, "width": width}
        common |= {"ASKED": per_token, "OUT": OUT, "IN": IN}
        first: dict[str, Any] = {"x": x, "up": up.detach(), "x_row": x.stride(0)}
        first |= {"GATED": up.shape[1] != width, "ACT": act}
        tiles = (triton.cdiv(width, OUT), pairs)
        ask = partial(launch, experts_up, tiles, x, **common, **first)
        self.works.append(Work("experts_up", [x, choice.chosen], [hidden], lambda: ask, product=True))
        second: dict[str, Any] = {
            "down": down.detach(),
            "weights": choice.weights,
            "beside": beside,
            "gate": gate,
            "beside_row": 0 if beside is None else beside.stride(0),
            "gate_row": 0 if gate is None else gate.stride(0),
            "y_row": y.stride(0),
        }
        tiles = (triton.cdiv(inner, OUT), self.rows)

        def make() -> Run:
            return partial(launch, experts_down, tiles, x, y=work.parts[0], **common, **second)

        reads = [hidden, *choice, *(t for t in (beside, gate) if t is not None)]
        work = Work("experts_down", reads, [y], make, product=True, parts=[y])
        self.works.append(work)
        return y
