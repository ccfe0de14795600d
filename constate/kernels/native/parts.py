"""What a tape writes for single families: the part of it that knows their kernels. See tape.py for the rest,
and for what vectors and calls are. Knows no mixer and no model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .dplr_delta import DplrDelta
from .experts import Ask, Choice, Choose
from .gates import MAPS, NORMS, Divide, Features, Forget, RealGate
from .glue import ACTIVATIONS
from .latent import EnterLatent
from .linear import FORMATS
from .linear_recurrence import LinearRecurrence
from .products import Heads
from .rwkv7 import DeltaLeave, DeltaOperands, Mixtures


class Parts:
    rows: int
    past: Tensor
    offsets: Tensor

    def _call(self, kernel: str, args: type[ctypes.Structure], **given: Any) -> ctypes.Structure:
        raise NotImplementedError("Tape has it")

    def vector(self, width: int) -> Tensor:
        raise NotImplementedError("Tape has it")

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
        """y = x W for each head: weight (heads, in, out), or (heads, out, in) with `outputs_first`, whose
        heads may lie apart; from one head to the next are `x_head` numbers in x and `y_head` in y."""
        count, size, out = weight.shape[0], *(weight.shape[:0:-1] if outputs_first else weight.shape[1:])
        self._call(
            "heads",
            Heads,
            x=x,
            bias=bias,
            weight=weight,
            y=y,
            rows=self.rows,
            heads=count,
            **{"in": size},
            out=out,
            x_stride=x.stride(0),
            x_head=x_head,
            weight_head=weight.stride(0),
            y_stride=y.stride(0),
            y_head=y_head,
            outputs_first=outputs_first,
            bf16=weight.dtype == torch.bfloat16,
        )

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
        """A feature map or activation, one of gates.MAPS, of each of `heads` slices of x, over its norm, one
        of gates.NORMS, with `ones` ones behind; each for a group of heads of the result."""
        size = x.shape[1] // heads
        width = 1 + size + size * (size + 1) // 2 if kind == "taylor" else size
        o = self.vector(heads * group * (width + ones))
        self._call(
            "features",
            Features,
            x=x,
            o=o,
            rows=self.rows,
            heads=heads,
            size=size,
            group=group,
            ones=ones,
            kind=MAPS[kind],
            norm=NORMS[norm],
            x_stride=x.stride(0),
            o_stride=o.stride(0),
            eps=eps,
        )
        return o

    def spread(self, x: Tensor, heads: int, group: int) -> Tensor:
        """Each of `heads` slices of x repeated for a group of heads."""
        return x if group == 1 else self.features("identity", x, heads, group=group)

    def divide(self, x: Tensor, heads: int, eps: float) -> Tensor:
        """Each of `heads` slices of x over (its last channel + eps), without that."""
        size = x.shape[1] // heads - 1
        o = self.vector(heads * size)
        self._call(
            "divide",
            Divide,
            x=x,
            o=o,
            rows=self.rows,
            heads=heads,
            size=size,
            x_stride=x.stride(0),
            o_stride=o.stride(0),
            eps=eps,
        )
        return o

    # -- recurrences ----------------------------------------------------------------------------

    def real_gate(
        self, gates: Tensor, x: Tensor, rate: Tensor, heads: int, least: float
    ) -> tuple[Tensor, Tensor]:
        """RG-LRU's operands from gates (rows, heads 2 block), before their sigmoids, the input gate of each
        block first; log a is `rate` times the recurrence gate."""
        fed, log_a = self.vector(x.shape[1]), self.vector(x.shape[1])
        self._call(
            "real_gate",
            RealGate,
            gates=gates,
            x=x,
            rate=rate,
            past=self.past,
            fed=fed,
            log_a=log_a,
            rows=self.rows,
            heads=heads,
            block=x.shape[1] // heads,
            gates_stride=gates.stride(0),
            x_stride=x.stride(0),
            o_stride=fed.stride(0),
            least=least,
        )
        return fed, log_a

    def linear_recurrence(self, x: Tensor, log_a: Tensor, state: Tensor) -> Tensor:
        """See reference.linear_recurrence_step."""
        o = self.vector(x.shape[1])
        self._call(
            "linear_recurrence",
            LinearRecurrence,
            x=x,
            log_a=log_a,
            state=state,
            o=o,
            offsets=self.offsets,
            rows=self.rows,
            channels=x.shape[1],
            x_stride=x.stride(0),
            decay_stride=log_a.stride(0),
            o_stride=o.stride(0),
        )
        return o

    def forget(self, x: Tensor, bound: Tensor | None) -> tuple[Tensor, Tensor]:
        """The logarithm of the gate b + (1 - b) sigmoid(x), and 1 less the gate; b (width,), None for 0."""
        decay, key = self.vector(x.shape[1]), self.vector(x.shape[1])
        self._call(
            "forget",
            Forget,
            x=x,
            bound=bound,
            log_bound=None if bound is None else bound.log(),
            decay=decay,
            key=key,
            rows=self.rows,
            width=x.shape[1],
            x_stride=x.stride(0),
            o_stride=decay.stride(0),
        )
        return decay, key

    # -- RWKV-7 ---------------------------------------------------------------------------------

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
        """What a token leaves: latent (rows, rank + shared), the first `rank` channels normed, the others
        turned, to its place in kv (rows, capacity, 1, rank + shared). And the last `shared` channels of each
        query of q (rows, heads dk), turned, to those of query (rows, heads (rank + shared))."""
        rank = norm.numel()
        self._call(
            "enter_latent",
            EnterLatent,
            q=q,
            latent=latent,
            query=query,
            norm=norm,
            turns=turns,
            kv=kv,
            past=self.past,
            rows=self.rows,
            h=heads,
            dk=q.shape[1] // heads,
            rank=rank,
            shared=kv.shape[3] - rank,
            capacity=kv.shape[1],
            q_stride=q.stride(0),
            latent_stride=latent.stride(0),
            query_stride=query.stride(0),
            kv_row=kv.stride(0),
            kv_place=kv.stride(1),
            bf16=kv.dtype == torch.bfloat16,
            eps=eps,
        )

    # -- experts --------------------------------------------------------------------------------

    def choose(
        self,
        logits: Tensor,
        per_token: int,
        *,
        correction: Tensor | None,
        groups: int,
        kept_groups: int,
        sigmoid: bool,
        normalise: bool,
        scale: float,
    ) -> Choice:
        """The experts that each row asks, and what their answers weigh; the logits become scores."""
        experts, pairs = logits.shape[1], (self.rows, per_token)
        chosen, order, place = (torch.zeros(pairs, dtype=torch.int64) for _ in range(3))
        choice = Choice(chosen, torch.zeros(pairs), order, place)
        given = {
            "logits": logits,
            "correction": correction,
            "appeal": self.vector(experts),
            "weights": choice.weights,
            "chosen": chosen,
            "order": order,
            "place": place,
            "starts": torch.zeros(experts + 1, dtype=torch.int64),
            "rows": self.rows,
            "experts": experts,
            "per_token": per_token,
            "groups": groups,
            "kept_groups": kept_groups,
            "sigmoid": sigmoid,
            "normalise": normalise,
            "scale": scale,
        }
        self._call("choose", Choose, **given)
        if self.rows > 1:
            self._call("sort_chosen", Choose, **given)
        return choice

    def experts(
        self,
        x: Tensor,
        choice: Choice,
        up: Tensor,
        down: Tensor,
        act: str,
        *,
        beside: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """The chosen experts' answers, weighed and summed: up (E, width or, gated, 2 width, in), down (E, in,
        width), float32 or bfloat16; plus `beside` (rows, in), where there is one, times the sigmoid of `gate`
        (rows, 1), where there is one."""
        per_token, width, inner = choice.chosen.shape[1], down.shape[2], down.shape[1]
        pairs = self.rows * per_token
        common = {
            "chosen": choice.chosen,
            "order": choice.order,
            "place": choice.place,
            "rows": self.rows,
            "per_token": per_token,
        }
        x_stride = 0
        if self.rows > 1:  # for one row, what all its experts read
            given = torch.zeros(pairs, inner)
            self._call("gather", Ask, **common, **{"in": inner}, x=x, inner=given, x_stride=x.stride(0))
            x, x_stride = given, inner
        hidden, y = torch.zeros(pairs, width), self.vector(inner)
        gated = up.shape[1] != width
        self._call(
            "experts_up",
            Ask,
            **common,
            **_stack(up),
            x=x,
            inner=hidden,
            more=torch.zeros(pairs, width) if gated else None,
            out=width,
            x_stride=x_stride,
            gated=gated,
            act=ACTIVATIONS[act],
        )
        self._call(
            "experts_down",
            Ask,
            **common,
            **_stack(down),
            x=hidden,
            weights=choice.weights,
            beside=beside,
            gate=gate,
            more=torch.zeros(pairs, inner),
            y=y,
            out=inner,
            x_stride=width,
            beside_stride=0 if beside is None else beside.stride(0),
            y_stride=y.stride(0),
        )
        return y


def _stack(weight: Tensor) -> dict[str, Any]:
    """(E, out, in) as a record names it."""
    return {
        "weight": weight,
        "in": weight.shape[2],
        "format": FORMATS[weight.dtype],
        "bytes": weight[0].numel() * weight.element_size(),
    }
