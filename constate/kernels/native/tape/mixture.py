"""A mixture of experts: the router's choice, and the experts that it asks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..experts import Ask, Choice, Choose
from ..glue import ACTIVATIONS
from ..linear import FORMATS
from .recorder import Recorder


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
        """The experts that each row asks, and what their answers weigh; the logits become scores."""
        experts, pairs = logits.shape[1], (self.rows, per_token)
        chosen, order, place = (torch.zeros(pairs, dtype=torch.int64) for _ in range(3))
        choice = Choice(chosen, torch.zeros(pairs), order, place)
        given = {
            "logits": logits,
            "correction": correction,
            "appeal": self.vector(experts),
            "weights": choice.weights,
            "chosen": chosen,
            "order": order,
            "place": place,
            "starts": torch.zeros(experts + 1, dtype=torch.int64),
            "rows": self.rows,
            "experts": experts,
            "per_token": per_token,
            "groups": groups,
            "kept_groups": kept_groups,
            "sigmoid": sigmoid,
            "normalise": normalise,
            "scale": scale,
        }
        self._call("choose", Choose, **given)
        if self.rows > 1:
            self._call("sort_chosen", Choose, **given)
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
        width), float32 or bfloat16; plus `beside` (rows, in), where there is one, times the sigmoid of `gate`
        (rows, 1), where there is one."""
        per_token, width, inner = choice.chosen.shape[1], down.shape[2], down.shape[1]
        pairs = self.rows * per_token
        common = {
            "chosen": choice.chosen,
            "order": choice.order,
            "place": choice.place,
            "rows": self.rows,
            "per_token": per_token,
        }
        x_stride = 0
        if self.rows > 1:  # for one row, what all its experts read
            given = torch.zeros(pairs, inner)
            self._call("gather", Ask, **common, **{"in": inner}, x=x, inner=given, x_stride=x.stride(0))
            x, x_stride = given, inner
        hidden, y = torch.zeros(pairs, width), self.vector(inner)
        gated = up.shape[1] != width
        self._call(
            "experts_up",
            Ask,
            **common,
            **_stack(up),
            x=x,
            inner=hidden,
            more=torch.zeros(pairs, width) if gated else None,
            out=width,
            x_stride=x_stride,
            gated=gated,
            act=ACTIVATIONS[act],
        )
        self._call(
            "experts_down",
            Ask,
            **common,
            **_stack(down),
            x=hidden,
            weights=choice.weights,
            beside=beside,
            gate=gate,
            more=torch.zeros(pairs, inner),
            y=y,
            out=inner,
            x_stride=width,
            beside_stride=0 if beside is None else beside.stride(0),
            y_stride=y.stride(0),
        )
        return y


def _stack(weight: Tensor) -> dict[str, Any]:
    """(E, out, in) as a record names it."""
    return {
        "weight": weight,
        "in": weight.shape[2],
        "format": FORMATS[weight.dtype],
        "bytes": weight[0].numel() * weight.element_size(),
    }
