"""Mixture of experts (Shazeer et al., 1701.06538): a router sends each token to a few of many small MLPs.

One layer for all families: what differs is how the router scores, chooses and weighs, and what stands beside
the experts. Tokens are grouped by expert, so that each expert that is wanted is one product over its tokens;
none is dropped and none is padded. Knows routing and MLPs; where a layer has experts is its model's matter.

A token's group depends on its neighbours, and products over groups of other sizes round otherwise: with
experts, a row beside other neighbours is the same within rounding, not bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cost import Cost, matmul, read_weights
from .linear import Linear
from .mixer import Call, Mixer
from .mlp import MLP, GatedMLP, activation
from .state import Nothing, State

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


@dataclass(frozen=True)
class ExpertsSpec:
    """`experts` MLPs of `width` hidden channels, of which each token asks `per_token`.

    `scores` of all experts are their softmax, or a sigmoid each; the weights of the chosen are their scores,
    with `normalise` divided by their sum, times `scale`. With `groups` above 1 only the `kept_groups` with
    the best two scores in sum are chosen from. `correction` is a learned bias that has a say in the choice
    and none in the weights. `gated` experts are SwiGLU-like, others down(act(up(x))). `shared` is the width
    of an expert that every token asks, with `shared_gate` weighed by a sigmoid. With `latent` the experts
    work in that width, between two projections. `bias` is that of the shared expert and the projections.
    """

    experts: int
    per_token: int
    width: int
    act: str = "silu"
    gated: bool = True
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    correction: bool = False
    shared: int = 0
    shared_gate: bool = False
    latent: int | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"a router's scores {self.scores!r}: 'softmax' or 'sigmoid' is known")
        if self.shared_gate and not self.shared:
            raise ValueError("shared_gate without shared: there is no shared expert to weigh")
        if self.experts % self.groups or not 1 <= self.kept_groups <= self.groups:
            raise ValueError(
                f"{self.experts} experts in {self.groups} groups, {self.kept_groups} of them kept: groups of "
                "one size are wanted, and at least one kept"
            )
        if self.groups > 1 and self.experts < 2 * self.groups:
            raise ValueError(f"{self.groups} groups of one expert: a group is judged by its best two")
        if not 1 <= self.per_token <= self.experts // self.groups * self.kept_groups:
            raise ValueError(
                f"{self.per_token} experts a token of {self.experts} in {self.groups} groups, of which "
                f"{self.kept_groups} are kept: there are not as many"
            )


class Router(nn.Module):
    """Scores of the experts, float32 whatever the model's dtype: a score that was rounded picks another.
    Departure: the published softmax routers take their logits in the model's dtype."""

    float32: ClassVar[frozenset[str]] = frozenset({"correction"})

    def __init__(self, d: int, spec: ExpertsSpec):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.experts, d))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        self.correction = nn.Parameter(torch.zeros(spec.experts)) if spec.correction else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (n, d) to the chosen experts, (n, per_token) int64, and their weights, float32."""
        spec = self.spec
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.softmax(-1) if spec.scores == "softmax" else logits.sigmoid()
        chosen = self.choose(scores)
        weights = scores.gather(1, chosen)
        if spec.normalise:  # sigmoids may all be near nothing, which the published routers guard against
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights if spec.scale == 1.0 else weights * spec.scale

    def choose(self, scores: Tensor) -> Tensor:
        """scores (n, E) to the experts that each token asks, (n, per_token), the most wanted first."""
        appeal = scores if self.correction is None else scores + self.correction
        if self.spec.groups > 1:
            appeal = self._within_groups(appeal)
        return appeal.topk(self.spec.per_token, dim=-1).indices

    def _within_groups(self, appeal: Tensor) -> Tensor:
        """The appeal of the experts in the best groups, none elsewhere (DeepSeek-V3, 2412.19437, 2.1.2)."""
        grouped = appeal.unflatten(-1, (self.spec.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.spec.kept_groups, dim=-1).indices
        out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=appeal.device).scatter_(1, best, False)
        return grouped.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(1)


class Experts(Mixer):
    """sum of w_e expert_e(x) over the chosen e, and the shared expert beside it.

    The experts' weights are stacked: `up` (E, width or 2 width, in), where gated the gate's rows first, and
    `down` (E, in, width).
    """

    def __init__(self, d: int, spec: ExpertsSpec):
        super().__init__()
        self.spec, inner = spec, spec.latent or d
        self.router = Router(d, spec)
        self.up = nn.Parameter(torch.empty(spec.experts, spec.width * (2 if spec.gated else 1), inner))
        self.down = nn.Parameter(torch.empty(spec.experts, inner, spec.width))
        for weights in (self.up, self.down):
            nn.init.uniform_(weights, -(weights.shape[-1] ** -0.5), weights.shape[-1] ** -0.5)
        kind = GatedMLP if spec.gated else MLP
        self.shared = kind(d, spec.shared, act=spec.act, bias=spec.bias) if spec.shared else None
        self.shared_gate = Linear(d, 1, bias=False) if spec.shared_gate else None
        self.latent_in = Linear(d, inner, bias=spec.bias) if spec.latent else None
        self.latent_out = Linear(inner, d, bias=spec.bias) if spec.latent else None
        self.act = activation(spec.act)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        chosen, weights = self.router(x)
        y = self._ask(x if self.latent_in is None else self.latent_in(x), chosen, weights)
        y = y if self.latent_out is None else self.latent_out(y)
        if self.shared is None:
            return y
        shared = self.shared(x, call)
        return y + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor | None:
        spec, logits, beside, gate = self.spec, tape.vector(self.spec.experts), None, None
        if self.latent_out is not None and self.shared_gate is not None:
            return None  # the gated expert cannot join the sum before the projection: in no published model
        with tape.side_by_side():
            tape.matrix(self.router.weight, x, logits)
            given = x if self.latent_in is None else self.latent_in.record(tape, x)
            gate = None if self.shared_gate is None else self.shared_gate.record(tape, x)
        choice = tape.choose(
            logits,
            spec.per_token,
            correction=self.router.correction,
            groups=spec.groups,
            kept_groups=spec.kept_groups,
            sigmoid=spec.scores == "sigmoid",
            normalise=spec.normalise,
            scale=spec.scale,
        )
        beside = None if self.shared is None else self.shared.record(tape, x, Nothing())
        if self.latent_out is None:
            return tape.experts(given, choice, self.up, self.down, spec.act, beside=beside, gate=gate)
        y = self.latent_out.record(tape, tape.experts(given, choice, self.up, self.down, spec.act))
        if beside is not None:
            tape.add(y, beside)
        return y

    @property
    def exact(self) -> Mapping[str, Sequence[slice]]:
        return {"shared_gate": [slice(None)]} if self.shared_gate is not None else {}  # as the router

    def reads(self, tokens: int) -> dict[int, int]:
        """Of the stacks, the experts that `tokens` tokens ask if all are asked as often: E (1 - (1 -
        k / E)^tokens), which for one token is k."""
        spec, whole = self.spec, read_weights(*self.parameters())
        asked = 1 - (1 - spec.per_token / spec.experts) ** tokens
        return {**whole, **{id(w): round(whole[id(w)] * asked) for w in (self.up, self.down)}}

    def cost(self, new: int, past: int) -> Cost:
        mine = self.spec.per_token * matmul(new, self.up[0], self.down[0])
        others = [m for m in (self.shared_gate, self.latent_in, self.latent_out) if m is not None]
        flops = {
            "router": matmul(new, self.router.weight),
            "experts": mine + matmul(new, *others),
        }
        beside = self.shared.cost(new, past).flops if self.shared else {}
        return Cost({**flops, **beside}, self.reads(new))

    @property
    def like(self) -> Tensor:
        return self.down

    def _ask(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x (n, in) through each token's experts, weighed and summed. The order of the sum is the token's
        own, so that no neighbour has a say in it."""
        if _host_waits(x) and chosen.numel() <= self.spec.experts:
            answers = self._gathered(x, chosen)
        elif _host_must_not_wait(x):
            answers = self._all(x, chosen)
        else:
            answers = self._grouped(x, chosen)
        return (answers.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _grouped(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Each token's answers, (n, per_token, in): a product for every expert that anyone asks."""
        asked = chosen.flatten()
        order = asked.argsort(stable=True)
        sizes = asked.bincount(minlength=self.spec.experts).tolist()
        grouped = x[order // self.spec.per_token]
        parts = [
            F.linear(self._inner(F.linear(part, self.up[e])), self.down[e])
            for e, part in enumerate(grouped.split(sizes))
            if sizes[e]
        ]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return (torch.cat(parts) if parts else grouped)[back].unflatten(0, chosen.shape)

    def _gathered(self, x: Tensor, chosen: Tensor) -> Tensor:
        """The same for a few tokens on an accelerator: copies of the experts' weights cost less there than
        a host that waits to hear how many tokens each expert has, and a captured step must not wait."""
        y = torch.bmm(self.up[chosen.flatten()], x.repeat_interleave(self.spec.per_token, 0).unsqueeze(-1))
        y = torch.bmm(self.down[chosen.flatten()], self._inner(y.squeeze(-1)).unsqueeze(-1))
        return y.squeeze(-1).unflatten(0, chosen.shape)

    def _all(self, x: Tensor, chosen: Tensor) -> Tensor:
        """The same in a step that is compiled or captured, for so many tokens that nearly every expert is
        asked by one: all experts answer all tokens. Their weights, which cost the most, are read once."""
        y = torch.bmm(x.expand(self.spec.experts, *x.shape), self.up.mT)  # (E, n, width)
        y = torch.bmm(self._inner(y), self.down.mT)
        return y[chosen, torch.arange(len(x), device=x.device).unsqueeze(-1)]

    def _inner(self, y: Tensor) -> Tensor:
        if not self.spec.gated:
            return self.act(y)
        gate, up = y.chunk(2, dim=-1)
        return self.act(gate) * up


def _host_waits(x: Tensor) -> bool:
    """Whether to ask how many tokens each expert has would make the host wait, or cannot be asked at all."""
    return x.is_cuda or _host_must_not_wait(x)


def _host_must_not_wait(x: Tensor) -> bool:
    """Whether this call is being compiled, or captured as a CUDA graph."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())
