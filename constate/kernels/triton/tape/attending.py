"""Positions, the cache of keys and values, and attention over it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...chunked.attention import attention_step
from ..attention import WIDEST, WIDEST_VALUE, launch_step, scratch
from ..launch import launch, power
from .drafts import Draft
from .recorder import Recorder
from .works import Python, Run, Scan, Work


@triton.jit
def turns(frequencies, turns, past, factor, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Programs (rows,): turns (rows, 2, HALF), cosines and sines of a row's position, times factor."""
    row = tl.cast(tl.program_id(0), tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    position = tl.load(past + row).to(tl.float32)
    angle = position * tl.load(frequencies + i, mask=inside, other=0.0)
    to = turns + row * 2 * HALF + i
    tl.store(to, tl.cos(angle) * factor, mask=inside)
    tl.store(to + HALF, tl.sin(angle) * factor, mask=inside)


class Attending(Recorder):
    """Queries and keys turned to their positions, keys and values put in their places, and read."""

    def turns(self, frequencies: tuple[float, ...], factor: float) -> Tensor:
        """(rows, 2 half) cosines and sines of this step's positions, times factor; made once a step."""
        key = (frequencies, factor)
        if key not in self._turns:
            half = len(frequencies)
            self._turns[key] = to = self.vector(2 * half)
            given: dict[str, Any] = {
                "frequencies": torch.tensor(frequencies, dtype=torch.float32, device=to.device),
                "turns": to,
                "past": self.past,
                "factor": factor,
                "HALF": half,
                "BLOCK": power(half),
            }
            call = partial(launch, turns, (self.rows,), to, **given)
            self.works.insert(0, Work("turns", [self.past], [to], lambda: call))
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
        """As on native's tape."""
        hk, dk, dv = k.shape[2], k.shape[3], v.shape[3]
        query, key, value = qkv.split([heads * dk, hk * dk, hk * dv], dim=1)
        self.rotate(query, heads, turns, q_norm, eps)
        self.note(_turned(key, dk, turns, k_norm, eps, k))
        self.note(_turned(value, dv, None, None, eps, v))

    def rotate(
        self, x: Tensor, heads: int, turns: Tensor | None, norm: Tensor | None = None, eps: float = 0.0
    ) -> None:
        """Norm each of `heads` slices of x where there is a norm, then rotate it, in place."""
        if turns is not None or norm is not None:
            self.note(_turned(x, x.shape[1] // heads, turns, norm, eps))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, heads: int, *, scale: float | None = None) -> Tensor:
        """Each row's query (rows, heads dk) over everything its buffers hold, this step's token included."""
        dk, dv = k.shape[3], v.shape[3]
        o = self.vector(heads * dv)
        query = q[:, : heads * dk].unflatten(1, (heads, dk))
        if dk > WIDEST or dv > WIDEST_VALUE:  # no kernel holds such heads

            def step() -> None:
                held = (self.past + 1).clamp(max=k.shape[1])
                o.copy_(attention_step(query, k, v, held, k.shape[1], scale=scale).flatten(1))

            touched = [q, k, v, o]
            self.works.append(Python("attention over wide heads", touched, touched, lambda: step))
            return o

        def make() -> Run:
            capacity, last = k.shape[1], scan.leaving
            between, arrived = scratch(query, k, v, capacity)
            to = scan.result.unflatten(1, (heads, dv))
            return partial(
                launch_step,
                *(query, k, v, self.past, to, between, arrived, capacity),
                scale=dk**-0.5 if scale is None else scale,
                more=1,
                gate=None if last is None else last.tensors["by"],
            )

        reads = [q[:, : heads * dk], k, v, self.past]
        scan = Scan("attend", reads, [o], make, o=o, heads=heads, gates=True)
        self.works.append(scan)
        return o


def _turned(
    x: Tensor, size: int, turns: Tensor | None, norm: Tensor | None, eps: float, to: Tensor | None = None
) -> Draft:
    """Slices of x normed and turned, in place or to this token's place of a cache."""
    tensors, options = {"x": x, "o": x if to is None else to}, {}
    if norm is not None:
        tensors["weight"] = norm
        options |= {"norm": "rms", "eps": eps, "shared": True}
    if turns is not None:
        tensors["turns"] = turns
        options["turned"] = turns.shape[1]
    if to is None:
        return Draft(tensors, size, options)
    return Draft(tensors, size, options | {"o_step": to.stride(2)}, (to.shape[1], to.stride(0), to.stride(1)))
