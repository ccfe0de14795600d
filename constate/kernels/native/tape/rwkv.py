"""RWKV-7's two mixes: what a token takes of the one before, and its delta rule of rank one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..dplr_delta import DplrDelta
from ..rwkv7 import DeltaLeave, DeltaOperands, Mixtures
from .recorder import Recorder


class RWKV(Recorder):
    """See linear_attn/rwkv7.py for what is computed."""

    def mixtures(self, x: Tensor, before: Tensor, mix: Tensor) -> Sequence[Tensor]:
        """x + (before - x) mix[i] for each i, (rows, d) each; x takes the place of `before` (rows, 1, d)."""
        o = torch.zeros(mix.shape[0], *x.shape)
        self._call(
            "mixtures",
            Mixtures,
            x=x,
            mix=mix,
            before=before,
            o=o,
            rows=self.rows,
            width=x.shape[1],
            count=mix.shape[0],
            x_stride=x.stride(0),
            bf16=before.dtype == torch.bfloat16,
        )
        return o.unbind()

    def delta_operands(
        self,
        decay: Tensor,
        rate: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        *,
        mixed: tuple[Tensor, Tensor] | None,
        kappa_scale: Tensor,
        rate_share: Tensor,
        strongest: float,
        eps: float,
    ) -> Tensor:
        """In place: projections to log-decay, what removal writes, key and value; returns what removal reads.
        `mixed`: the share's projection and the value of the first layer."""
        reads, (share, first) = self.vector(k.shape[1]), mixed or (None, None)
        self._call(
            "delta_operands",
            DeltaOperands,
            decay=decay,
            rate=rate,
            k=k,
            v=v,
            reads=reads,
            share=share,
            first=first,
            kappa_scale=kappa_scale,
            rate_share=rate_share,
            **self._delta(k, v, heads),
            strongest=strongest,
            eps=eps,
        )
        return reads

    def dplr_delta(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, a: Tensor, b: Tensor, state: Tensor
    ) -> Tensor:
        """See reference.dplr_delta_step; a decay for each channel, as many heads of keys as of values."""
        _, h, dk, dv = state.shape
        o = self.vector(h * dv)
        given = {"q": q, "k": k, "v": v, "decay": decay, "a": a, "b": b, "o": o}
        strides = {f"{name}_stride": x.stride(0) for name, x in given.items()}
        given["log_decay"] = given.pop("decay")
        self._call(
            "dplr_delta",
            DplrDelta,
            **given,
            **strides,
            state=state,
            offsets=self.offsets,
            rows=self.rows,
            hk=h,
            h=h,
            dk=dk,
            dv=dv,
            decay_kind=2,
            scale=1.0,
        )
        return o

    def delta_leave(
        self,
        o: Tensor,
        r: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
        heads: int,
        *,
        weight: Tensor,
        bias: Tensor,
        bonus: Tensor,
        eps: float,
    ) -> None:
        """In place: o normed a head, plus the bonus' part of v, times gate."""
        self._call(
            "delta_leave",
            DeltaLeave,
            o=o,
            r=r,
            k=k,
            v=v,
            gate=gate,
            weight=weight,
            bias=bias,
            bonus=bonus,
            **self._delta(k, v, heads),
            eps=eps,
        )

    def _delta(self, k: Tensor, v: Tensor, heads: int) -> dict[str, int]:
        return {
            "rows": self.rows,
            "h": heads,
            "dk": k.shape[1] // heads,
            "dv": v.shape[1] // heads,
            "key_stride": k.stride(0),
            "value_stride": v.stride(0),
        }
