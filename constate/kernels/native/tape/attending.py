"""Positions, the cache of keys and values, and attention over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention import Attend, Enter, Turns, chunks
from .recorder import Recorder


class Attending(Recorder):
    """Queries and keys turned to their positions, keys and values put in their places, and read."""

    def turns(self, frequencies: tuple[float, ...], factor: float) -> Tensor:
        """(rows, 2 half) cosines and sines of this step's positions, times factor; made once a step."""
        key = (frequencies, factor)
        if key not in self._turns:
            half = len(frequencies)
            self._turns[key] = turns = self.vector(2 * half)
            self._call(
                "turns",
                Turns,
                frequencies=torch.tensor(frequencies),
                turns=turns,
                past=self.past,
                rows=self.rows,
                half=half,
                factor=factor,
            )
        return self._turns[key]

    def enter(
        self,
        qkv: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        *,
        turns: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Norm and rotate the queries and keys of qkv (rows, (heads + 2 hk) d) in place, then write keys and
        values to their places in k, v (rows, capacity, hk, d)."""
        self._call(
            "enter",
            Enter,
            qkv=qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            turns=turns,
            **self._buffers(k, v, heads),
            past=self.past,
            stride=qkv.stride(0),
            rotated=0 if turns is None else turns.shape[1],
            eps=eps,
        )

    def rotate(
        self, x: Tensor, heads: int, turns: Tensor | None, norm: Tensor | None = None, eps: float = 0.0
    ) -> None:
        """Norm each of `heads` slices of x where there is a norm, then rotate it, in place."""
        self._call(
            "enter",
            Enter,
            qkv=x,
            q_norm=norm,
            turns=turns,
            past=self.past,
            rows=self.rows,
            h=heads,
            dk=x.shape[1] // heads,
            capacity=1,
            stride=x.stride(0),
            rotated=0 if turns is None else turns.shape[1],
            eps=eps,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, heads: int, *, scale: float | None = None) -> Tensor:
        """Each row's query (rows, heads dk) over everything its buffers hold, this step's token included."""
        capacity, dk, dv = k.shape[1], k.shape[3], v.shape[3]
        o = self.vector(heads * dv)
        partial = torch.empty(self.rows * heads * chunks(capacity) * (2 + dv))
        given = self._buffers(k, v, heads) | {
            "q": q,
            "o": o,
            "partial": partial,
            "lengths": self.past,
            "more": 1,
            "chunks": chunks(capacity),
            "q_stride": q.stride(0),
            "o_stride": o.stride(0),
            "scale": dk**-0.5 if scale is None else scale,
        }
        self._call("attend", Attend, **given)
        self._call("combine", Attend, **given)
        return o

    def _buffers(self, k: Tensor, v: Tensor, heads: int) -> dict[str, Any]:
        return {
            "k": k,
            "v": v,
            "rows": self.rows,
            "hk": k.shape[2],
            "h": heads,
            "dk": k.shape[3],
            "dv": v.shape[3],
            "capacity": k.shape[1],
            "k_row": k.stride(0),
            "k_place": k.stride(1),
            "v_row": v.stride(0),
            "v_place": v.stride(1),
            "bf16": k.dtype == torch.bfloat16,
        }
