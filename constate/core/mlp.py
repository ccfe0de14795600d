"""Position-wise feed-forward layers: mixers whose state is Nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from .cost import Cost, matmul, read_weights
from .mixer import Call, Mixer
from .state import State

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of this name. Raises ValueError for one we do not have."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not known; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class GatedMLP(Mixer):
    """down(act(gate(x)) * up(x)), gate and up one product (Shazeer, 2002.05202)."""

    def __init__(self, d: int, width: int, *, act: str = "silu", bias: bool = False):
        super().__init__()
        self.gate_up = nn.Linear(d, 2 * width, bias=bias)
        self.down = nn.Linear(width, d, bias=bias)
        self.act = activation(act)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)

    @property
    def like(self) -> Tensor:
        return self.gate_up.weight

    def cost(self, new: int, past: int) -> Cost:
        return Cost(
            {"mlp": matmul(new, self.gate_up.weight, self.down.weight)},
            read_weights(*self.parameters()),
        )
