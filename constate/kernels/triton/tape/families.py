"""What single families have to themselves: feature maps, forget gates, latents."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from ..described import power as block
from ..launch import launch
from .drafts import Draft
from .heads import IN, OUT, ROWS, heads_product
from .real import real_recurrence
from .recorder import Recorder
from .works import Run, Scan, Work


class Families(Recorder):
    """Works that one family or two make."""

    # -- heads ----------------------------------------------------------------------------------

    def heads(
        self,
        weight: Tensor,
        x: Tensor,
        x_head: int,
        y: Tensor,
        y_head: int,
        *,
        bias: Tensor | None = None,
        outputs_first: bool = False,
    ) -> None:
        """As on native's tape."""
        weight = weight.detach().mT if outputs_first else weight.detach()
        heads, size, out = weight.shape
        given: dict[str, Any] = {
            "x": x,
            "weight": weight,
            "bias": bias,
            "rows": self.rows,
            "size": size,
            "out": out,
            "x_row": x.stride(0),
            "x_head": x_head,
            "weight_head": weight.stride(0),
            "weight_in": weight.stride(1),
            "weight_out": weight.stride(2),
            "y_row": y.stride(0),
            "y_head": y_head,
            "NARROW": weight.dtype != torch.float32,
            "ROWS": ROWS,
            "OUT": OUT,
            "IN": IN,
        }
        grid = (triton.cdiv(out, OUT), heads, triton.cdiv(self.rows, ROWS))

        def make() -> Run:
            return partial(launch, heads_product, grid, x, y=work.parts[0], **given)

        work = Work("heads", [x], [y], make, product=True, parts=[y])
        self.works.append(work)

    # -- features -------------------------------------------------------------------------------

    def features(
        self,
        kind: str,
        x: Tensor,
        heads: int,
        *,
        group: int = 1,
        ones: int = 0,
        norm: str = "",
        eps: float = 0.0,
    ) -> Tensor:
        """A feature map or activation of each of `heads` slices of x, over its norm ("", "sum", "absolute"
        or "length"), with `ones` ones behind; each for a group of heads of the result."""
        size = x.shape[1] // heads
        tensors, options = {"x": x}, {}
        if kind == "taylor":
            tensors |= dict(zip(("bias", "rate", "scales"), _pairs(size, x.device), strict=True))
        options |= {} if kind == "identity" else {"kind": kind}
        options |= {"norm": norm, "eps": eps} if norm else {}
        options |= ({"copies": group} if group > 1 else {}) | ({"ones": ones} if ones else {})
        draft = Draft(tensors, size, options)
        tensors["o"] = o = self.vector(heads * group * (draft.out + ones))
        self.note(draft)
        return o

    def spread(self, x: Tensor, heads: int, group: int) -> Tensor:
        """Each of `heads` slices of x repeated for a group of heads."""
        return x if group == 1 else self.features("identity", x, heads, group=group)

    def divide(self, x: Tensor, heads: int, eps: float) -> Tensor:
        """Each of `heads` slices of x over (its last channel + eps), without that."""
        size = x.shape[1] // heads
        o = self.vector(heads * (size - 1))
        self.note(Draft({"x": x, "o": o}, size, {"divide": eps}))
        return o

    # -- recurrences ----------------------------------------------------------------------------

    def real_gate(
        self, gates: Tensor, x: Tensor, rate: Tensor, heads: int, least: float
    ) -> tuple[Tensor, Tensor]:
        """RG-LRU's operands from gates (rows, heads 2 block), before their sigmoids, the input gate of each
        block first; log a is `rate` times the recurrence gate. Made by the recurrence that they are for."""
        fed, log_a = self.vector(x.shape[1]), self.vector(x.shape[1])
        self.shared[fed.data_ptr()] = (gates, x, rate, heads, least)
        return fed, log_a

    def linear_recurrence(self, x: Tensor, log_a: Tensor, state: Tensor) -> Tensor:
        """See reference.linear_recurrence_step; x and log_a are what real_gate gave."""
        gates, x, rate, heads, least = self.shared.pop(x.data_ptr())
        o, size = self.vector(x.shape[1]), x.shape[1] // heads
        given: dict[str, Any] = {
            "gates": gates,
            "x": x,
            "rate": rate,
            "past": self.past,
            "state": state,
            "o": o,
            "heads": heads,
            "gates_row": gates.stride(0),
            "x_row": x.stride(0),
            "state_row": state.stride(0),
            "o_row": o.stride(0),
            "least": least,
            "SIZE": size,
            "BLOCK": block(size),
        }

        def make() -> Run:
            return partial(launch, real_recurrence, (heads, self.rows), o, **given, **self.leaving(scan))

        scan = Scan("real_recurrence", [gates, x, self.past], [state, o], make, o=o, heads=heads, ends=True)
        self.works.append(scan)
        return o

    def forget(self, x: Tensor, bound: Tensor | None) -> tuple[Tensor, Tensor]:
        """The logarithm of the gate b + (1 - b) sigmoid(x), and 1 less the gate; b (width,), None for 0."""
        decay, key = self.vector(x.shape[1]), self.vector(x.shape[1])
        tensors = {"x": x, "o": decay, "second": key}
        tensors |= {} if bound is None else {"bias": bound, "rate": bound.log()}
        self.note(Draft(tensors, options={"kind": "forget"}))
        return decay, key

    # -- latent attention -----------------------------------------------------------------------

    def enter_latent(
        self,
        q: Tensor,
        latent: Tensor,
        query: Tensor,
        kv: Tensor,
        heads: int,
        *,
        norm: Tensor,
        eps: float,
        turns: Tensor | None,
    ) -> None:
        """As on native's tape."""
        rank, dk = norm.numel(), q.shape[1] // heads
        shared = kv.shape[3] - rank
        slots = (kv.shape[1], kv.stride(0), kv.stride(1))
        turned: dict[str, Any] = {} if turns is None else {"turned": turns.shape[1]}
        more = {} if turns is None else {"turns": turns}
        normed = {"norm": "rms", "eps": eps, "shared": True}
        self.note(Draft({"x": latent[:, :rank], "weight": norm, "o": kv[..., :rank]}, rank, normed, slots))
        self.note(Draft({"x": latent[:, rank:], "o": kv[..., rank:], **more}, shared, turned, slots))
        steps = {"x_step": dk, "o_step": rank + shared, "units": heads}
        tensors = {"x": q[:, dk - shared :], "o": query[:, rank:], **more}
        self.note(Draft(tensors, shared, turned | steps))


def _pairs(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each feature of core.feature_maps.taylor the two channels that it multiplies, -1 for none, int32,
    and what the product weighs."""
    one, other, weight = [-1], [-1], [1.0]
    for i in range(size):
        one, other, weight = [*one, i], [*other, -1], [*weight, size**-0.25]
    for i in range(size):
        for j in range(i, size):
            one.append(i)
            other.append(j)
            weight.append(size**-0.5 * (math.sqrt(0.5) if i == j else 1.0))
    first, second = (torch.tensor(t, dtype=torch.int32, device=device) for t in (one, other))
    return first, second, torch.tensor(weight, dtype=torch.float32, device=device)
