"""Linear layers: one product, by whichever backend serves the model. Knows no mixer.

A layer's matrix is one block of rows in the model's dtype, or, with weights in 8 bits, several blocks, of
which some are int8 and some float32 (see int8.py for who decides).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.chunked.linear import dequantised
from ..kernels.chunked.linear import linear as chunked
from .backed import Backed

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


class Linear(Backed, nn.Linear):
    """y = x W^T + b, W (out, in), x (..., in) in W's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The same with this bias in the place of its own."""
        if self.ops is None:
            return F.linear(x, self.weight, bias)
        return self.ops.linear(x, self.weight, bias)

    def record(self, tape: Tape, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Written onto a tape: x (rows, in) to a new (rows, out), with this bias in the place of its own."""
        y, bias = tape.vector(self.out_features), self.bias if bias is None else bias
        tape.matrix(self.weight, x, y, bias=None if bias is None else tape.constant(bias))
        return y

    @property
    def like(self) -> Tensor:
        """A tensor in the activations' dtype, on their device."""
        return self.weight


class Rows(nn.Module):
    """Some rows of a matrix, (n, in): int8 with `scales` (n, ceil(in / 64)), one for each 64 weights of a
    row, or float32 without."""

    float32: ClassVar[frozenset[str]] = frozenset({"weight", "scales"})

    def __init__(self, weight: Tensor, scales: Tensor | None = None):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = None if scales is None else nn.Parameter(scales, requires_grad=False)

    @property
    def count(self) -> int:
        return self.weight.shape[0]

    def matrix(self) -> Tensor:
        """The rows in float32."""
        return self.weight if self.scales is None else dequantised(self.weight, self.scales)


class Int8Linear(Linear):
    """y = x W^T + b where W is `rows`, blocks laid one below the other; x and y float32, no gradient."""

    def __init__(self, rows: Sequence[Rows], bias: Tensor | None = None):
        nn.Module.__init__(self)
        self.rows = nn.ModuleList(rows)
        self.in_features, self.out_features = rows[0].weight.shape[1], sum(part.count for part in rows)
        self.register_parameter("weight", None)  # what asks for one matrix fails at once
        self.bias = None if bias is None else nn.Parameter(bias.float(), requires_grad=False)

    @property
    def blocks(self) -> list[tuple[slice, Rows]]:
        """Each block with the outputs that it makes, in order."""
        found, first = [], 0
        for part in self.rows:
            assert isinstance(part, Rows)
            found.append((slice(first, first + part.count), part))
            first += part.count
        return found

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        linear = chunked if self.ops is None else self.ops.linear
        if len(self.rows) == 1:
            part = self.blocks[0][1]
            return linear(x, part.weight, bias, part.scales)
        y = x.new_empty(*x.shape[:-1], self.out_features)
        for made, part in self.blocks:
            linear(x, part.weight, None if bias is None else bias[made], part.scales, out=y[..., made])
        return y

    def record(self, tape: Tape, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y, bias = tape.vector(self.out_features), self.bias if bias is None else bias
        for made, part in self.blocks:
            own = None if bias is None else tape.constant(bias[made])
            tape.matrix(part.weight, x, y[:, made], scales=part.scales, bias=own)
        return y

    @property
    def like(self) -> Tensor:
        rows = self.blocks[0][1]
        return rows.weight if rows.scales is None else rows.scales


class Int8Embedding(nn.Embedding):
    """The rows of a table by their numbers, float32."""

    def __init__(self, rows: Rows):
        nn.Module.__init__(self)
        self.register_parameter("weight", None)
        self.rows = rows
        self.num_embeddings, self.embedding_dim = rows.weight.shape

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"

    def forward(self, input: Tensor) -> Tensor:
        """ids (...,) to (..., embedding_dim)."""
        weight, scales = self.rows.weight[input], self.rows.scales
        return weight if scales is None else dequantised(weight, scales[input])
