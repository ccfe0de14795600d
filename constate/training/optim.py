"""The optimisers and the learning rate's course.

Muon for the matrices inside the blocks, AdamW for everything else: embedding, norms, convolutions, decays,
biases. Knows modules and parameter shapes; knows no mixer and no data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.model import Model

MUON_LR, ADAM_LR = 0.02, 3e-3
WARMUP = 30  # steps
DECAY_FROM = 0.4  # of the run: constant until here, then linear to nearly zero
FLOOR = 0.02  # of the learning rate, at the very end


def course(step: int, steps: int) -> float:
    """What the learning rates are multiplied by at `step` of `steps`: warm-up, constant, linear decay."""
    left = (steps - step) / (steps * (1 - DECAY_FROM))
    return min(1.0, (step + 1) / WARMUP) * min(1.0, max(FLOOR, left))


def optimizers(model: Model) -> dict[str, torch.optim.Optimizer]:
    """Both optimisers by name, each over its own parameters."""
    hidden = list(matrices(model).values())
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    adamw = torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for optimizer in (built := {"muon": Muon(hidden), "adamw": adamw}).values():
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return built


def matrices(model: Model) -> dict[str, nn.Parameter]:
    """Weights of every Linear inside the blocks, by name."""
    linear = {id(m.weight) for m in model.blocks.modules() if isinstance(m, nn.Linear)}
    return {name: p for name, p in model.blocks.named_parameters(prefix="blocks") if id(p) in linear}


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made nearly orthogonal (Jordan et al. 2024,
    kellerjordan.github.io/posts/muon).

    Nesterov momentum; updates scaled by sqrt(max(1, rows / columns)); decoupled weight decay. Differs from
    torch.optim.Muon in working in float32, since a CPU without bfloat16 products takes many times longer
    for it, and in treating all matrices of one shape together.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = MUON_LR,
        momentum: float = 0.95,
        weight_decay: float = 0.02,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # no closure
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.shape].append(p)
            for shape, params in alike.items():
                updates = orthogonal(torch.stack([self._nesterov(p, group["momentum"]) for p in params]))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(params, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=scale)

    def _nesterov(self, p: nn.Parameter, momentum: float) -> Tensor:
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(state["momentum"], momentum)


def orthogonal(x: Tensor) -> Tensor:
    """The nearest matrix with all singular values about 1, (..., rows, columns), roughly: 0.7 to 1.2.

    Five quintic Newton-Schulz steps x <- a x + b (x x') x + c (x x')^2 x. Every step multiplies x from the
    left by a polynomial P in x x', and all these commute: so the small square x x' alone is iterated, as
    P (x x') P, and x is multiplied once at the end.
    """
    if x.shape[-2] > x.shape[-1]:
        return orthogonal(x.mT).mT
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    square, product = x @ x.mT, None
    for _ in range(5):
        step = b * square + c * (square @ square)
        step.diagonal(dim1=-2, dim2=-1).add_(a)
        product = step if product is None else step @ product
        square = step @ square @ step
    assert product is not None
    return product @ x
