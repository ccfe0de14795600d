"""Qwen3-Next (Qwen Team, 2025): three layers of Gated DeltaNet to one of gated attention, experts in all.

Its odd points. Each block norm, q's and k's norm and the last one store how far their weight is from one; the
gated norm behind the recurrence stores the weight. Attention's output is weighed channel by channel by a
sigmoid of the layer's input; q and k are normed a head, then a quarter of their channels is rotated. In the
recurrence two value heads share a key head. The router's softmax is over all experts, the weights of the
chosen then sum to one; a shared expert beside them is weighed by a sigmoid of its own. In a file the rows of
the in-projections go key head by key head (q, k, its values, its gates; its betas, its decays), and the query
projection's head by head (query, gate).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.architecture import Architecture
from ..core.attention import Attention, AttentionSpec
from ..core.experts import Experts, ExpertsSpec
from ..core.mlp import GatedMLP
from ..core.model import Block, Model
from ..core.norms import RMSNorm
from ..core.weights import Rule, drop, head, reorder, reshape, same
from ..linear_attn.gated_deltanet import GatedDeltaNet, GatedDeltaNetSpec
from .expert_names import expert_weights, mlp_weights
from .transformer import TransformerConfig, either_dialect

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class Config(TransformerConfig):
    """The keys of Hugging Face's config.json for model_type "qwen3_next"; `partial_rotary_factor` and
    `full_attention_interval` are those of its older files."""

    num_key_value_heads: int | None = 2
    head_dim: int | None = 256
    max_position_embeddings: int = 32768
    partial_rotary_factor: float | None = None
    attention_bias: bool = False
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    decoder_sparse_step: int = 1
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts_per_tok: int = 10
    num_experts: int = 512
    norm_topk_prob: bool = True
    mlp_only_layers: Sequence[int] | None = None
    layer_types: Sequence[str] | None = None
    full_attention_interval: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act {self.hidden_act!r}: 'silu' is what these models have")
        listed, layers = len(self.kinds), self.num_hidden_layers
        if listed != layers:
            raise ValueError(f"layer_types lists {listed} layers, num_hidden_layers is {layers}")
        if unknown := sorted(set(self.kinds) - {LINEAR, FULL}):
            raise ValueError(f"layer_types has {unknown}; known are {LINEAR} and {FULL}")
        h, hk = self.linear_num_value_heads, self.linear_num_key_heads
        if h % hk:
            raise ValueError(f"linear_num_value_heads {h} is no multiple of linear_num_key_heads {hk}")
        if self.linear_conv_kernel_dim < 1:
            raise ValueError("linear_conv_kernel_dim 0: these models convolve q, k and v, so at least 1")
        _ = self.experts, self.sparse(0)  # raise for a router that cannot be, and for a step of 0

    @property
    def rope(self) -> Mapping[str, Any]:
        part = self.partial_rotary_factor
        older = dict(self.rope_scaling or {}) | ({} if part is None else {"partial_rotary_factor": part})
        return {"partial_rotary_factor": 0.25, **either_dialect(self.rope_parameters, self.rope_theta, older)}

    @property
    def kinds(self) -> Sequence[str]:
        """What each layer is: as listed, or every `full_attention_interval`-th full attention."""
        every = range(1, self.num_hidden_layers + 1)
        return self.layer_types or [LINEAR if i % self.full_attention_interval else FULL for i in every]

    @property
    def experts(self) -> ExpertsSpec | None:
        if not self.num_experts:
            return None
        return ExpertsSpec(
            experts=self.num_experts,
            per_token=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            normalise=self.norm_topk_prob,
            shared=self.shared_expert_intermediate_size,
            shared_gate=True,
        )

    def sparse(self, i: int) -> bool:
        """Whether layer i has experts; the others have an MLP of `intermediate_size`."""
        listed = i in (self.mlp_only_layers or ())
        return self.num_experts > 0 and not listed and (i + 1) % self.decoder_sparse_step == 0


def build(config: Config) -> Model:
    d, eps = config.hidden_size, config.rms_norm_eps
    h, hk, head_dim = config.heads
    attention = AttentionSpec(
        heads=h,
        kv_heads=hk,
        head_dim=head_dim,
        rope=config.rope,
        max_positions=config.max_position_embeddings,
        bias=config.attention_bias,
        out_bias=config.attention_bias,
        qk_norm=True,
        norm_eps=eps,
        norm_offset=1.0,
        gate=True,
    )
    delta = GatedDeltaNetSpec(
        heads=config.linear_num_key_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        value_heads=config.linear_num_value_heads,
        conv=config.linear_conv_kernel_dim,
        norm_eps=eps,
    )

    def norm() -> RMSNorm:
        return RMSNorm(d, eps, offset=1.0)

    def block(i: int, kind: str) -> Block:
        mixer = GatedDeltaNet(d, delta) if kind == LINEAR else Attention(d, attention)
        spec = config.experts if config.sparse(i) else None
        mlp = GatedMLP(d, config.intermediate_size) if spec is None else Experts(d, spec)
        return Block(mixer=(norm(), mixer), mlp=(norm(), mlp))

    return Model(
        config,
        [block(i, kind) for i, kind in enumerate(config.kinds)],
        norm(),
        vocab=config.vocab_size,
        d=d,
        tied=config.tie_word_embeddings,
    )


def weights(config: Config) -> list[Rule]:
    """Hugging Face's names to ours."""
    layer, ours = "model.layers.{i}.", "blocks.{i}."
    mlp, spec = (layer + "mlp.", ours + "mlp."), config.experts
    return [
        same("model.embed_tokens.weight", "embed.weight"),
        same("model.norm.weight", "norm.weight"),
        same(layer + "input_layernorm.weight", ours + "mixer_norm.weight"),
        same(layer + "post_attention_layernorm.weight", ours + "mlp_norm.weight"),
        *_delta(config, layer + "linear_attn.", ours + "mixer."),
        *_attention(config, layer + "self_attn.", ours + "mixer."),
        *([] if spec is None else expert_weights(*mlp, spec, shared="shared_expert")),
        *mlp_weights(*mlp, config.intermediate_size),
        drop("mtp.*"),  # guesses several tokens ahead, which speculation would read
        head("lm_head.weight", config.tie_word_embeddings),
    ]


def _delta(config: Config, source: str, ours: str) -> list[Rule]:
    hk, dk, dv = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
    shared = config.linear_num_value_heads // hk  # value heads a key head
    values = shared * dv
    channels, width = hk * (2 * dk + values), config.linear_conv_kernel_dim
    sizes = [hk * (2 * dk + 2 * values), hk * 2 * shared]
    rows = torch.arange(sum(sizes))
    order = torch.cat(
        [
            *_by_part(rows[: sizes[0]].unflatten(0, (hk, -1)), [dk, dk, values, values]),
            *_by_part(rows[sizes[0] :].unflatten(0, (hk, -1)), [shared, shared]),
        ]
    )
    projections = [source + f"in_proj_{part}.weight" for part in ("qkvz", "ba")]
    return [
        reorder(projections, [ours + "in_proj.weight"], order, sizes, [sum(sizes)]),
        reshape(source + "conv1d.weight", ours + "conv.weight", (channels, 1, width), (channels, width)),
        same(source + "A_log", ours + "a_log"),
        same(source + "dt_bias", ours + "dt_bias"),
        same(source + "norm.weight", ours + "norm.weight"),
        same(source + "out_proj.weight", ours + "out_proj.weight"),
    ]


def _attention(config: Config, source: str, ours: str) -> list[Rule]:
    h, hk, dim = config.heads
    sizes = [2 * h * dim, hk * dim, hk * dim]
    q, gate = _by_part(torch.arange(sizes[0]).unflatten(0, (h, -1)), [dim, dim])
    order = torch.cat([q, torch.arange(sizes[0], sum(sizes)), gate])
    split = [(h + 2 * hk) * dim, h * dim]
    rules = [same(source + f"{p}_norm.weight", ours + f"{p}_norm.weight") for p in "qk"]
    for part in ("weight", "bias") if config.attention_bias else ("weight",):
        names = [source + f"{p}_proj.{part}" for p in "qkv"]
        rules.append(reorder(names, [ours + f"qkv.{part}", ours + f"gate.{part}"], order, sizes, split))
        rules.append(same(source + f"o_proj.{part}", ours + f"out.{part}"))
    return rules


def _by_part(rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """rows (heads, sum of sizes), numbers of rows head by head, as one list for each part of a head."""
    return [part.flatten() for part in rows.split(list(sizes), dim=1)]


ARCHITECTURE = Architecture("qwen3_next", Config, build, weights)
