"""A matrix that several layers share, and what one of them adds to it in low rank (Hu et al., 2106.09685)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .cost import matmul
from .linear import Linear

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


class Adapted(nn.Module):
    """base(x) + up(down(x)): a matrix that several layers share, and what one of them adds in low rank.

    With `parts` the rows of base are that many equal parts, each with a down and an up of its own. Of low
    rank, they are no `Linear`: where weights are stored in 8 bits theirs are not, and take next to no room.
    """

    def __init__(self, base: Linear, rank: int, parts: int = 1):
        super().__init__()
        self.base, self.parts = base, parts
        self.down = nn.Linear(base.in_features, parts * rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    @property
    def in_features(self) -> int:
        return self.base.in_features

    @property
    def out_features(self) -> int:
        return self.base.out_features

    @property
    def like(self) -> Tensor:
        return self.base.like

    def forward(self, x: Tensor) -> Tensor:
        low = self.down(x).unflatten(-1, (self.parts, -1)).transpose(0, 1)
        up = self.up.weight.unflatten(0, (self.parts, -1)).mT
        return self.base(x) + torch.bmm(low, up).transpose(0, 1).flatten(1)

    def record(self, tape: Tape, x: Tensor) -> Tensor:
        """Written onto a tape: x (rows, in) to a new (rows, out)."""
        y, low = self.base.record(tape, x), tape.vector(self.down.out_features)
        tape.matrix(self.down.weight, x, low)
        ups = zip(
            self.up.weight.chunk(self.parts), low.chunk(self.parts, 1), y.chunk(self.parts, 1), strict=True
        )
        for weight, narrow, part in ups:
            wide = tape.vector(part.shape[1])
            tape.matrix(weight, narrow, wide)
            tape.add(part, wide)
        return y

    def flops(self, new: int) -> int:
        return matmul(new, self.down, self.up)
