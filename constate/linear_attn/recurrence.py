"""What the mixers of this family share around their operands: the state, the price and the way out.

A subclass sets `h`, `dk`, `dv`, `in_proj`, `out_proj`, `norm` and, where it may have one, `conv` over the
first `convolved` channels of its in-projection. What it puts into the scan is its own. No architecture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.cost import Cost, carried, matmul, read_weights
from ..core.linear import Linear
from ..core.mixer import Call, Mixer
from ..core.norms import GatedRMSNorm, RMSNorm
from ..core.short_conv import ShortConv
from ..core.state import ConvSSM, State

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


class Recurrence(Mixer):
    """A state (rows, h, dk, dv) behind an optional short convolution (a history of no token without)."""

    h: int
    dk: int
    dv: int
    convolved: int
    conv: ShortConv | None
    in_proj: Linear
    out_proj: Linear
    norm: GatedRMSNorm | RMSNorm

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        ssm = torch.zeros(rows, self.h, self.dk, self.dv, dtype=dtype, device=self.like.device)
        if self.conv is None:
            return ConvSSM(self.like.new_zeros(rows, 0, self.convolved), ssm)
        return ConvSSM(self.conv.init_history(rows), ssm)

    @property
    def like(self) -> Tensor:
        return self.in_proj.like

    def price(self, new: int, scan: int, *others: Linear) -> Cost:
        """The cost with `scan` FLOPs in the recurrence and `others` beside the in- and out-projection."""
        flops = {
            "projection": matmul(new, self.in_proj, self.out_proj, *others),
            "conv": self.conv.flops(new) if self.conv else 0,
            "scan": scan,
        }
        state = carried("state", 4 * self.h * self.dk * self.dv, new)
        history = carried("conv", self.conv.history_bytes if self.conv else 0, new)
        return Cost(flops, read_weights(*self.parameters())) + state + history

    def convolve(self, x: Tensor, call: Call, history: Tensor | None) -> Tensor:
        """x (n, convolved), packed; the history moves on."""
        return x if self.conv is None else self.conv(x, call, history)

    def convolve_step(self, x: Tensor, call: Call, history: Tensor) -> Tensor:
        """x (rows, convolved), one token a row."""
        return x if self.conv is None else self.conv.step(x, call, history)

    def record_conv(self, tape: Tape, x: Tensor, history: Tensor) -> Tensor:
        """`convolve_step` written onto a tape."""
        return x if self.conv is None else self.conv.record(tape, x, history)

    def record_leave(self, tape: Tape, o: Tensor, gate: Tensor) -> Tensor:
        """`leave` written onto a tape: o (rows, h dv)."""
        if isinstance(self.norm, GatedRMSNorm):
            o = self.norm.record(tape, o, gate, self.h)
        else:
            o = tape.gated_norm(o, None, tape.constant(self.norm.whole), self.norm.eps, groups=self.h)
        return self.out_proj.record(tape, o)

    def leave(self, o: Tensor, gate: Tensor) -> Tensor:
        """o (n, h, dv) normed a head, gated where the norm is, and projected; gate (n, h dv) or (n, 0)."""
        gated = isinstance(self.norm, GatedRMSNorm)
        o = self.norm(o, gate.unflatten(-1, (self.h, -1))) if gated else self.norm(o)
        return self.out_proj(o.flatten(1).to(gate.dtype))
