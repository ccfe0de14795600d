"""MDLM (Sahoo et al., 2406.07524): a masked diffusion model whose stack is a DiT (Peebles & Xie, 2212.09748).

Each branch is x + gate * f(norm(x) * (1 + scale) + shift), and shift, scale and gate follow from an
embedding of the noise sigma, once for a row. Every place sees the whole row; the logits at a place predict
that place; the mask is the last id. Without `time_conditioning`, as published, sigma is heard as 0.

Departures. With `time_conditioning` sigma is not handed in but read off the row: -log(1 - share of masks),
what the log-linear schedule (schedules.py) has at that share; its authors hand in the schedule's, which is
the same on average. Products are in the weights' dtype, not in bfloat16 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.architecture import Architecture
from ..core.attention import Attention, AttentionSpec
from ..core.cache import Cache
from ..core.cost import Cost, matmul, read_weights
from ..core.linear import Linear
from ..core.mixer import Call, Mixer
from ..core.mlp import MLP
from ..core.model import Block, Model
from ..core.norms import LayerNorm
from ..core.state import State
from ..core.weights import Rule, drop, same, split
from ..spans import Spans
from .denoiser import Denoiser, Masked, masked_diffusion
from .schedules import sigma

FREQUENCIES = 128  # cosines, and as many sines, of the embedded sigma
HEARD = "what every branch hears of the noise"  # key of Call.shared: (rows, cond_dim)


@dataclass(frozen=True)
class Config(Masked):
    """The keys of Hugging Face's config.json for model_type "mdlm". `model_length` is what training saw."""

    vocab_size: int
    hidden_dim: int
    n_blocks: int
    n_heads: int
    cond_dim: int
    model_length: int = 1024
    time_conditioning: bool = False
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.hidden_dim % self.n_heads:
            raise ValueError(f"hidden_dim {self.hidden_dim} is not a multiple of n_heads {self.n_heads}")

    @property
    def mask(self) -> int:
        return self.vocab_size - 1 if self.mask_token_id is None else self.mask_token_id

    def asked(self, mask_id: int) -> Denoiser:
        return Denoiser(mask_id, time_conditioned=self.time_conditioning)


class Modulated(Mixer):
    """gate * f(norm(x) * (1 + scale) + shift), the three (d,) a row linear in what it hears of the noise.
    Without `cond` (None) it is f(norm(x))."""

    def __init__(self, d: int, inner: Mixer, cond: int | None):
        super().__init__()
        self.norm, self.inner = LayerNorm(d, bias=False), inner
        self.modulation = nn.Linear(cond, 3 * d) if cond is not None else None

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        return self.inner.init_state(rows, capacity, dtype)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        if self.modulation is None:
            return self.inner(self.norm(x), call, state)
        shift, scale, gate = self.modulation(call.shared[HEARD])[call.spans.row].chunk(3, dim=-1)
        return gate * self.inner(self.norm(x) * (1 + scale) + shift, call, state)

    def cost(self, new: int, past: int) -> Cost:
        own = Cost(weights=read_weights(*self.norm.parameters()))
        if self.modulation is not None:
            flops = {"modulation": matmul(1 if new else 0, self.modulation.weight)}
            own = own + Cost(flops, read_weights(*self.modulation.parameters()))
        return own + self.inner.cost(new, past)

    @property
    def like(self) -> Tensor:
        return self.inner.like


class DiT(Model):
    """A Model whose branches, and last norm, hear the noise of their row. `cond` None: they hear nothing."""

    def __init__(self, config: Config, blocks: Sequence[Block], cond: int | None):
        d, vocab = config.hidden_dim, config.vocab_size
        super().__init__(config, blocks, nn.Identity(), vocab=vocab, d=d, tied=False)
        self.head = Linear(d, vocab)
        self.last_norm = LayerNorm(d, bias=False)
        self.noise: nn.Sequential | None = None
        self.modulation: nn.Linear | None = None
        if cond is not None:
            self.noise = nn.Sequential(nn.Linear(2 * FREQUENCIES, cond), nn.SiLU(), nn.Linear(cond, cond))
            self.modulation = nn.Linear(cond, 2 * d)

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """One token a row, as a forward of one token: (rows,) to logits (rows, vocab)."""
        return self.forward(tokens, Spans.ones(len(tokens), tokens.device), cache)

    def cost(self, new: int = 1, past: int = 0, rows: int = 1) -> Cost:
        heard = [module for module in (self.noise, self.modulation) if module is not None]
        linear = [m for module in heard for m in module.modules() if isinstance(m, nn.Linear)]
        flops = {"modulation": matmul(1 if new else 0, *(m.weight for m in linear))}
        read = read_weights(*self.last_norm.parameters(), self.head.bias)
        read |= read_weights(*(p for module in heard for p in module.parameters()))
        return super().cost(new, past, rows) + Cost(flops, read).times(rows)

    def _hidden(self, tokens: Tensor, call: Call, states: Sequence[State] | None) -> Tensor:
        if self.noise is not None:
            call.shared[HEARD] = F.silu(self.noise(_waves(self._sigma(tokens, call.spans)).to(self._dtype)))
        x = self.last_norm(super()._hidden(tokens, call, states))
        if self.modulation is None:
            return x
        shift, scale = self.modulation(call.shared[HEARD])[call.spans.row].chunk(2, dim=-1)
        return x * (1 + scale) + shift

    def _sigma(self, tokens: Tensor, spans: Spans) -> Tensor:
        """The noise of each row, (rows,) float32."""
        masks = torch.zeros(spans.rows, device=tokens.device)
        if not self.config.time_conditioning:
            return masks
        masks.index_add_(0, spans.row, (tokens == self.config.mask).float())
        return sigma(masks / (spans.cu[1:] - spans.cu[:-1]).clamp(min=1))

    @property
    def _dtype(self) -> torch.dtype:
        return self.dtype


def _waves(sigma: Tensor) -> Tensor:
    """The sinusoidal embedding of (rows,) numbers, (rows, 2 x FREQUENCIES) float32."""
    rates = torch.exp(-math.log(10_000) * torch.arange(FREQUENCIES, device=sigma.device) / FREQUENCIES)
    angles = sigma[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def build(config: Config, block: int | None = None, conditioned: bool = True) -> Model:
    """`block`: how far a place sees (AttentionSpec); `conditioned`: whether the branches hear the noise."""
    d, h, cond = config.hidden_dim, config.n_heads, config.cond_dim if conditioned else None
    spec = AttentionSpec(heads=h, head_dim=d // h, rope={"rope_theta": 10_000.0}, block=block)
    blocks = [
        Block(
            mixer=(nn.Identity(), Modulated(d, Attention(d, spec), cond)),
            mlp=(nn.Identity(), Modulated(d, MLP(d, 4 * d, act="gelu_pytorch_tanh", bias=True), cond)),
        )
        for _ in range(config.n_blocks)
    ]
    return DiT(config, blocks, cond)


def weights(config: Config, conditioned: bool = True) -> list[Rule]:
    """The names of its authors' Hugging Face release to ours."""
    source, last, ours = "backbone.blocks.{i}.", "backbone.output_layer.", "blocks.{i}."
    rules = [
        same("backbone.vocab_embed.embedding", "embed.weight"),
        drop("backbone.rotary_emb.inv_freq"),
        same(last + "norm_final.weight", "last_norm.weight"),
        same(source + "norm1.weight", ours + "mixer.norm.weight"),
        same(source + "attn_qkv.weight", ours + "mixer.inner.qkv.weight"),
        same(source + "attn_out.weight", ours + "mixer.inner.out.weight"),
        same(source + "norm2.weight", ours + "mlp.norm.weight"),
    ]
    for part in ("weight", "bias"):
        rules += [
            same(f"{last}linear.{part}", f"head.{part}"),
            same(f"{source}mlp.0.{part}", f"{ours}mlp.inner.up.{part}"),
            same(f"{source}mlp.2.{part}", f"{ours}mlp.inner.down.{part}"),
        ]
        if conditioned:
            both = [f"{ours}{branch}.modulation.{part}" for branch in ("mixer", "mlp")]
            rules += [same(f"backbone.sigma_map.mlp.{i}.{part}", f"noise.{i}.{part}") for i in (0, 2)]
            rules += [same(f"{last}adaLN_modulation.{part}", f"modulation.{part}")]
            rules += [split(f"{source}adaLN_modulation.{part}", both)]
    return rules


ARCHITECTURE = Architecture("mdlm", Config, build, weights, decode=masked_diffusion)
