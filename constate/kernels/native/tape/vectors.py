"""What lies between the products and the scans: matrices, sums and norms, gates."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from torch import Tensor

from .. import glue
from ..linear import FORMATS, Matrix
from .recorder import Recorder


class Vectors(Recorder):
    """Matrices, residual sums and norms, gates, on vectors (rows, width)."""

    def matrix(
        self,
        weight: Tensor,
        x: Tensor,
        y: Tensor,
        scales: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> ctypes.Structure:
        """y = W x + bias, W (out, in) float32, bfloat16, or int8 with `scales` (see native.linear)."""
        return self._call(
            "matrix",
            Matrix,
            weight=weight,
            scales=scales,
            bias=bias,
            x=x,
            y=y,
            rows=self.rows,
            **{"in": weight.shape[1]},
            out=weight.shape[0],
            x_stride=x.stride(0),
            y_stride=y.stride(0),
            format=FORMATS[weight.dtype],
        )

    def add_norm(
        self,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor | None,
        eps: float,
        *,
        bias: Tensor | None = None,
        centred: bool = False,
        keep: float = 1.0,
        kept: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """x = keep * kept + scale * y in place (`kept` None: x itself; y None: x stays), then the norm of x:
        RMS, or with `centred` a layer norm."""
        o = self.vector(x.shape[1])
        norm = {
            "o": o,
            "weight": weight,
            "bias": bias,
            "eps": eps,
            "centred": centred,
            "o_stride": o.stride(0),
        }
        self._add(x, y, keep, kept, scale, **norm)
        return o

    def add(
        self, x: Tensor, y: Tensor, *, keep: float = 1.0, kept: Tensor | None = None, scale: float = 1.0
    ) -> None:
        """x = keep * kept + scale * y in place."""
        self._add(x, y, keep, kept, scale)

    def _add(
        self, x: Tensor, y: Tensor | None, keep: float, kept: Tensor | None, scale: float, **norm: Any
    ) -> None:
        kept = x if kept is None else kept
        self._call(
            "add_norm",
            glue.AddNorm,
            x=x,
            kept=kept,
            y=y,
            rows=self.rows,
            width=x.shape[1],
            x_stride=x.stride(0),
            kept_stride=kept.stride(0),
            y_stride=0 if y is None else y.stride(0),
            keep=keep,
            scale=scale,
            **norm,
        )

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor | None,
        weight: Tensor | None,
        eps: float,
        *,
        groups: int = 1,
        gate_first: bool = False,
        sigmoid: bool = False,
    ) -> Tensor:
        """RMS norm of each of `groups` slices, times silu(gate), or its sigmoid, before (`gate_first`) or
        after; the weight is as wide as a slice, which all share, or as x."""
        o, size = self.vector(x.shape[1]), x.shape[1] // groups
        self._call(
            "gated_norm",
            glue.GatedNorm,
            x=x,
            gate=gate,
            weight=weight,
            o=o,
            rows=self.rows,
            groups=groups,
            size=size,
            x_stride=x.stride(0),
            gate_stride=0 if gate is None else gate.stride(0),
            o_stride=o.stride(0),
            shared=weight is not None and weight.numel() == size,
            gate_first=gate_first,
            sigmoid=sigmoid,
            eps=eps,
        )
        return o

    def unit(self, x: Tensor, heads: int, eps: float = 1e-6) -> None:
        """Divide each of `heads` slices of x by its length, in place."""
        size = x.shape[1] // heads
        self._call(
            "unit", glue.Unit, x=x, rows=self.rows, heads=heads, size=size, stride=x.stride(0), eps=eps
        )

    def decays(
        self,
        x: Tensor,
        bias: Tensor,
        rate: Tensor,
        limit: tuple[float, float] = (0.0, math.inf),
        *,
        bound: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """dt = softplus(x + bias) within `limit`, and the log-decay -rate dt; with a `bound`, negative, the
        log-decay bound sigmoid(rate (x + bias)), and a dt that says nothing."""
        dt, decay = self.vector(x.shape[1]), self.vector(x.shape[1])
        self._call(
            "decays",
            glue.Decays,
            x=x,
            bias=bias,
            rate=rate,
            dt=dt,
            decay=decay,
            rows=self.rows,
            heads=x.shape[1],
            x_stride=x.stride(0),
            o_stride=dt.stride(0),
            low=limit[0],
            high=limit[1],
            bound=bound or 0.0,
        )
        return dt, decay

    def activate(
        self, kind: str, x: Tensor, y: Tensor | None = None, *, scale: float = 1.0, low: float = -math.inf
    ) -> Tensor:
        """scale * act(x), at least `low`, times y (rows, width) or (width,) where there is one; `kind` is one
        of glue.ACTIVATIONS."""
        o = self.vector(x.shape[1])
        self._call(
            "activate",
            glue.Activate,
            x=x,
            y=y,
            o=o,
            rows=self.rows,
            width=x.shape[1],
            x_stride=x.stride(0),
            y_stride=0 if y is None or y.ndim == 1 else y.stride(0),
            o_stride=o.stride(0),
            kind=glue.ACTIVATIONS[kind],
            scale=scale,
            low=low,
        )
        return o
