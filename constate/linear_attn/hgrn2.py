"""HGRN2 (Qin et al., 2404.07904): a gated linear RNN whose state is an outer product.

S_t = diag(f_t) S_{t-1} + (1 - f_t) i_t^T, o_t = S_t^T q_t (equations 5 and 6): the key is what the forget
gate leaves over, so a channel writes as much as it forgets. f = b + (1 - b) sigmoid(x W): each layer's
lower bound b keeps deep layers from forgetting fast (HGRN, Qin et al., 2311.04823, section 3.2): over the
layers the cumulative sum of a softmax, less the first layer's, so that layer 0 has none. The output is
normed over its whole width, without a gate. Departures: q, f and i are one product; f is kept as its
logarithm. The config and the names are flash-linear-attention's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.architecture import Architecture
from ..core.cost import Cost, linear_scan
from ..core.linear import Linear
from ..core.mixer import Call
from ..core.model import Model
from ..core.norms import RMSNorm
from ..core.short_conv import ShortConv
from ..core.state import ConvSSM, State, in_float32
from ..core.weights import Rule, fuse, same
from . import frame
from .recurrence import Recurrence

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape

BOUNDS = "hgrn2.bounds"


@dataclass(frozen=True)
class HGRN2Spec:
    """heads with key_dim forgetting channels and value_dim; conv 0 means no convolution; `bound`, what the
    forget gate is at least where no table of learned bounds says it."""

    heads: int
    key_dim: int
    value_dim: int
    conv: int = 0
    norm_eps: float = 1e-5
    bound: float = 0.0


class HGRN2(Recurrence):
    """One in-projection to q, f, i; convolution over them; scan with key 1 - f; norm; out.

    Learned lower bounds are one table of all layers, since each bound sums over those before: the first
    mixer holds its `table` rows and leaves the bounds to the later ones, of which each reads row `layer`.
    """

    float32: ClassVar[frozenset[str]] = frozenset({"bounds"})

    def __init__(self, d: int, spec: HGRN2Spec, *, layer: int = 0, table: int = 0):
        super().__init__()
        if not 0 <= spec.bound < 1:
            raise ValueError(f"bound {spec.bound}: a forget gate's lower bound is at least 0 and below 1")
        self.h, self.dk, self.dv = spec.heads, spec.key_dim, spec.value_dim
        self.bound, self.layer = spec.bound, layer
        self.keys, self.values = self.h * self.dk, self.h * self.dv
        self.convolved = 2 * self.keys + self.values
        self.in_proj = Linear(d, self.convolved, bias=False)
        self.conv = ShortConv(self.convolved, spec.conv, activation=None) if spec.conv else None
        self.bounds = nn.Parameter(torch.zeros(table, self.keys)) if table else None
        self.norm = RMSNorm(self.values, spec.norm_eps)
        self.out_proj = Linear(self.values, d, bias=False)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        conv, ssm = (state.conv, state.ssm) if isinstance(state, ConvSSM) else (None, None)
        qfi = self.in_proj(x)
        q, k, i, decay = self._operands(self.convolve(qfi, call, conv), call)
        o, final = call.ops.gated_linear_scan(q, k, i, decay, ssm, call.spans, scale=self.dk**-0.5)
        if ssm is not None:
            ssm.copy_(final)
        return self._leave(o)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        qfi = self.in_proj(x)
        q, k, i, decay = self._operands(self.convolve_step(qfi, call, state.conv), call)
        with in_float32(state.ssm) as ssm:
            o = call.ops.gated_linear_step(q, k, i, decay, ssm, scale=self.dk**-0.5)
        return self._leave(o)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        qfi = self.record_conv(tape, self.in_proj.record(tape, x), state.conv)
        q, f, i = qfi.split([self.keys, self.keys, self.values], dim=-1)
        bound = self._bound(tape.shared)
        bound = None if bound is None else tape.constant(bound.expand(self.keys))
        with tape.side_by_side():
            q = tape.activate("silu", q)
            decay, key = tape.forget(f, bound)
        o = tape.gated_linear(q, key, i, decay, state.ssm, heads=self.h, scale=self.dk**-0.5)
        o = tape.gated_norm(o, None, tape.constant(self.norm.weight), self.norm.eps)
        return self.out_proj.record(tape, o)

    @property
    def exact(self) -> Mapping[str, Sequence[slice]]:
        return {"in_proj": [slice(self.keys, 2 * self.keys)]}  # f

    def cost(self, new: int, past: int) -> Cost:
        return self.price(new, linear_scan(new, self.h, self.dk, self.dv))

    def _operands(self, qfi: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, f, i = qfi.split([self.keys, self.keys, self.values], dim=-1)
        decay = F.logsigmoid(f.float())
        bound = self._bound(call.shared)
        if bound is not None:
            decay = torch.logaddexp(bound.log(), torch.log1p(-bound) + decay)
        key = -torch.expm1(decay)
        q, key, i, decay = (t.unflatten(-1, (self.h, -1)) for t in (F.silu(q), key, i, decay))
        return q, key, i, decay

    def _bound(self, shared: dict[Any, Any]) -> Tensor | None:
        """(keys,), or None where there is none; `shared`, what layers of one call leave for one another."""
        if self.bounds is not None:
            shares = self.bounds.float().softmax(0)
            # A bound that rounds to 0 or 1 has a logarithm without a gradient.
            shared[BOUNDS] = (shares.cumsum(0) - shares[0]).clamp(1e-30, 1 - 1e-7)
        if self.layer:
            return shared[BOUNDS][self.layer]
        return torch.tensor(self.bound, device=self.like.device) if self.bound else None

    def _leave(self, o: Tensor) -> Tensor:
        o = self.norm(o.flatten(1))
        return self.out_proj(o.to(self.dtype))


@dataclass(frozen=True, kw_only=True)
class Config(frame.Frame):
    """flash-linear-attention's keys for model_type "hgrn2". expand_ratio, a head's channels, comes before
    num_heads where both are given."""

    num_heads: int | None = None
    expand_ratio: int | None = 128
    use_short_conv: bool = False
    conv_size: int = 4
    use_lower_bound: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        d, ratio = self.hidden_size, self.expand_ratio
        if ratio is None and self.num_heads is None:
            raise ValueError("one of expand_ratio and num_heads is wanted")
        if d % (ratio or self.num_heads or 1):
            raise ValueError(f"hidden_size {d} does not fall into heads of expand_ratio {ratio}")

    @property
    def spec(self) -> HGRN2Spec:
        d = self.hidden_size
        h = d // self.expand_ratio if self.expand_ratio else self.num_heads or 1
        return HGRN2Spec(
            heads=h,
            key_dim=d // h,
            value_dim=d // h,
            conv=self.conv_size if self.use_short_conv else 0,
            norm_eps=1e-5,  # the layer's norm is fused with its product there, and is not told norm_eps
        )

    @property
    def first(self) -> int:
        """The first layer that is not attention: it holds the table of lower bounds."""
        attention = self.attention
        return next((i for i in range(self.num_hidden_layers) if i not in attention), -1)


def build(config: Config) -> Model:
    def mixer(i: int) -> HGRN2:
        if not config.use_lower_bound:
            return HGRN2(config.hidden_size, config.spec)
        table = config.num_hidden_layers if i == config.first else 0
        return HGRN2(config.hidden_size, config.spec, layer=i, table=table)

    return frame.build(config, mixer)


def weights(config: Config) -> list[Rule]:
    """flash-linear-attention's names to ours."""
    spec = config.spec
    qfi = [spec.heads * spec.key_dim] * 2 + [spec.heads * spec.value_dim]

    def mixer(source: str, ours: str) -> list[Rule]:
        rules = [
            fuse([f"{source}{p}_proj.weight" for p in "qfi"], ours + "in_proj.weight", qfi),
            same(source + "g_norm.weight", ours + "norm.weight"),
            same(source + "o_proj.weight", ours + "out_proj.weight"),
        ]
        if spec.conv:
            convs = [f"{source}{p}_conv1d.weight" for p in "qfi"]
            rules.append(frame.fuse_convs(convs, ours + "conv.weight", qfi))
        return rules

    rules = frame.weights(config, mixer)
    if config.use_lower_bound and config.first >= 0:
        rules.append(same("model.lower_bounds", f"blocks.{config.first}.mixer.bounds"))
    return rules


ARCHITECTURE = Architecture("hgrn2", Config, build, weights)
