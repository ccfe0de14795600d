"""One token through a convolution or a recurrence, its state updated in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gated_delta import GatedDelta
from ..gated_linear import GatedLinear
from ..selective import Selective
from ..short_conv import ShortConv
from .recorder import Recorder


class Scans(Recorder):
    """The steps of ops whose states several families share."""

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, *, silu: bool
    ) -> Tensor:
        """See reference.short_conv_step; the history is shifted in place."""
        o = self.vector(x.shape[1])
        self._call(
            "short_conv",
            ShortConv,
            x=x,
            weight=weight,
            bias=bias,
            history=history,
            o=o,
            offsets=self.offsets,
            rows=self.rows,
            channels=x.shape[1],
            width=weight.shape[1],
            x_stride=x.stride(0),
            o_stride=o.stride(0),
            silu=silu,
            history_bf16=history.dtype == torch.bfloat16,
        )
        return o

    def gated_linear(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        state: Tensor,
        *,
        heads: int,
        scale: float = 1.0,
        v_scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> Tensor:
        """See reference.gated_linear_step, `heads` of them for q and k. `v_scale` (rows, h) multiplies v
        first; `skip` (h,) adds that much of the unscaled v to the output."""
        o = self.vector(state.shape[1] * state.shape[3])
        self._call(
            "gated_linear",
            GatedLinear,
            **self._scan(q, k, v, log_decay, state, o, heads),
            v_scale=v_scale,
            skip=skip,
            v_scale_stride=0 if v_scale is None else v_scale.stride(0),
            scale=scale,
        )
        return o

    def gated_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor,
        state: Tensor,
        *,
        heads: int,
        scale: float = 1.0,
    ) -> Tensor:
        """See reference.gated_delta_step."""
        o = self.vector(state.shape[1] * state.shape[3])
        scan = self._scan(q, k, v, log_decay, state, o, heads)
        self._call("gated_delta", GatedDelta, **scan, beta=beta, beta_stride=beta.stride(0), scale=scale)
        return o

    def _scan(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor, o: Tensor, heads: int
    ) -> dict[str, Any]:
        _, h, dk, dv = state.shape
        kind = 0 if decay is None else 1 if decay.shape[1] == h else 2
        return {
            "q": q,
            "k": k,
            "v": v,
            "log_decay": decay,
            "state": state,
            "o": o,
            "offsets": self.offsets,
            "rows": self.rows,
            "hk": heads,
            "h": h,
            "dk": dk,
            "dv": dv,
            "q_stride": q.stride(0),
            "k_stride": k.stride(0),
            "v_stride": v.stride(0),
            "decay_stride": 0 if decay is None else decay.stride(0),
            "o_stride": o.stride(0),
            "decay_kind": kind,
        }

    def selective(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        state: Tensor,
        *,
        d: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
    ) -> Tensor:
        """See reference.selective_step."""
        o = self.vector(x.shape[1])
        self._call(
            "selective",
            Selective,
            x=x,
            dt=dt,
            a=a,
            b=b,
            c=c,
            d=d,
            z=z,
            dt_bias=dt_bias,
            state=state,
            o=o,
            offsets=self.offsets,
            rows=self.rows,
            channels=a.shape[0],
            states=a.shape[1],
            x_stride=x.stride(0),
            dt_stride=dt.stride(0),
            b_stride=b.stride(0),
            c_stride=c.stride(0),
            z_stride=0 if z is None else z.stride(0),
            o_stride=o.stride(0),
        )
        return o
