"""What single families have to themselves: feature maps, forget gates, latents."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gates import MAPS, NORMS, Divide, Features, Forget, RealGate
from ..latent import EnterLatent
from ..linear_recurrence import LinearRecurrence
from ..products import Heads
from .recorder import Recorder


class Families(Recorder):
    """Calls that one family or two make."""

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
