"""RWKV-7's two mixes: what a token takes of the one before, and its delta rule of rank one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from ..described import power as block
from ..gated_delta_step import step
from ..launch import launch
from .drafts import Draft
from .recorder import Recorder
from .rwkv_kernels import CHANNELS, delta_operands, mixtures
from .works import Run, Scan, Work


class RWKV(Recorder):
    """See linear_attn/rwkv7.py for what is computed."""

    def mixtures(self, x: Tensor, before: Tensor, mix: Tensor) -> Sequence[Tensor]:
        """x + (before - x) mix[i] for each i, (rows, d) each; x takes the place of `before` (rows, 1, d)."""
        count, width = mix.shape
        o = torch.full((count, *x.shape), torch.nan, dtype=torch.float32, device=x.device)
        given: dict[str, Any] = {
            "x": x,
            "before": before,
            "mix": mix,
            "width": width,
            "x_row": x.stride(0),
            "before_row": before.stride(0),
            "COUNT": count,
            "CHANNELS": CHANNELS,
        }
        grid = (triton.cdiv(width, CHANNELS), self.rows)

        def make() -> Run:
            return partial(launch, mixtures, grid, x, o=tuple(work.parts), **given)

        work = Work("mixtures", [x, before], [o, before], make, parts=list(o.unbind()))
        self.works.append(work)
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
        """As on native's tape."""
        reads, (share, first) = self.vector(k.shape[1]), mixed or (None, None)
        dk, dv = k.shape[1] // heads, v.shape[1] // heads
        given: dict[str, Any] = {
            "decay": decay,
            "rate": rate,
            "k": k,
            "v": v,
            "reads": reads,
            "share": share,
            "first": first,
            "kappa_scale": kappa_scale,
            "rate_share": rate_share,
            "key_row": k.stride(0),
            "value_row": v.stride(0),
            "strongest": strongest,
            "eps": eps,
            "DK": dk,
            "DV": dv,
            "BK": block(dk),
            "BV": block(dv),
        }
        call = partial(launch, delta_operands, (heads, self.rows), k, **given)
        written = [decay, rate, k, v, reads]
        self.step("delta_operands", [*written, *(mixed or ())], written, lambda: call)
        return reads

    def dplr_delta(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, a: Tensor, b: Tensor, state: Tensor
    ) -> Tensor:
        """See reference.dplr_delta_step; a decay for each channel, as many heads of keys as of values."""
        h, dv = state.shape[1], state.shape[3]
        o = self.vector(h * dv)
        query, key, value, g, reads, writes = (t.unflatten(1, (h, -1)) for t in (q, k, v, decay, a, b))

        def make() -> Run:
            to = scan.o.unflatten(1, (h, dv))
            ends = self.leaving(scan)
            return step(query, key, value, g, state, to, 1.0, a=reads, b=writes, **ends)

        scan = Scan("dplr_delta", [q, k, v, decay, a, b], [state, o], make, o=o, heads=h, ends=True)
        self.works.append(scan)
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
        tensors = {"x": o, "o": o, "weight": weight, "norm_bias": bias, "reads": r, "key": k, "value": v}
        tensors |= {"bonus": bonus, "by": gate}
        options = {"norm": "centred", "eps": eps, "bonus": k.shape[1] // heads, "by": "identity"}
        self.note(Draft(tensors, o.shape[1] // heads, options))
