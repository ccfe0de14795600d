"""Position-wise feed-forward layers: mixers whose state is Nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from .cost import Cost, matmul, read_weights
from .linear import Linear
from .mixer import Call, Mixer
from .state import State

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape

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
    """down(act(gate(x)) * up(x)), gate and up one product (Shazeer, 2002.05202). `gate_scale` multiplies
    what the activation sees."""

    def __init__(self, d: int, width: int, *, act: str = "silu", bias: bool = False, gate_scale: float = 1.0):
        super().__init__()
        self.gate_up = Linear(d, 2 * width, bias=bias)
        self.down = Linear(width, d, bias=bias)
        self.act, self.act_name, self.gate_scale = activation(act), act, gate_scale

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        gate = gate if self.gate_scale == 1.0 else gate * self.gate_scale
        return self.down(self.act(gate) * up)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        gate, up = self.gate_up.record(tape, x).chunk(2, dim=-1)
        gate = gate if self.gate_scale == 1.0 else tape.activate("identity", gate, scale=self.gate_scale)
        return self.down.record(tape, tape.activate(self.act_name, gate, up))

    @property
    def like(self) -> Tensor:
        return self.gate_up.like

    def cost(self, new: int, past: int) -> Cost:
        return Cost(
            {"mlp": matmul(new, self.gate_up, self.down)},
            read_weights(*self.parameters()),
        )


class MLP(Mixer):
    """down(act(up(x))), without a gate."""

    def __init__(self, d: int, width: int, *, act: str = "relu2", bias: bool = False):
        super().__init__()
        self.up = Linear(d, width, bias=bias)
        self.down = Linear(width, d, bias=bias)
        self.act, self.act_name = activation(act), act

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        return self.down(self.act(self.up(x)))

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        return self.down.record(tape, tape.activate(self.act_name, self.up.record(tape, x)))

    @property
    def like(self) -> Tensor:
        return self.up.like

    def cost(self, new: int, past: int) -> Cost:
        return Cost({"mlp": matmul(new, self.up, self.down)}, read_weights(*self.parameters()))
