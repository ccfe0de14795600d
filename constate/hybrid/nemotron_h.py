"""Nemotron-H (NVIDIA, 2504.03624) and Nemotron 3: each layer is one norm and one thing behind it.

That is Mamba-2, attention, an MLP or experts, as a list or a pattern of letters says. Its odd points:
attention has no positions at all and no biases; MLPs and experts are down(relu(up(x))^2), without a gate; a
step size is at least `time_step_min`, which elsewhere only draws the first weights, and has no upper limit;
the gated norm is a group's; the router scores by sigmoid, chooses by score plus correction within the best
groups and weighs by score; one shared expert has its own width and no gate; with `moe_latent_size` the
experts work in a narrower space. The Mamba heads times their width need not be `expand` times the model's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.architecture import Architecture
from ..core.attention import Attention, AttentionSpec
from ..core.experts import Experts, ExpertsSpec
from ..core.mixer import Mixer
from ..core.mlp import MLP
from ..core.model import Block, Model
from ..core.norms import RMSNorm
from ..core.weights import Rule, drop, fuse, head, same
from ..ssm.mamba2 import Mamba2, Mamba2Spec, mixer_weights
from .expert_names import expert_weights, mlp_weights

LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


@dataclass(frozen=True)
class Config:
    """The keys of Hugging Face's config.json for model_type "nemotron_h". `hybrid_override_pattern`,
    `attention_head_dim` and `rms_norm_eps` are what older files call `layers_block_type`, `head_dim` and
    `layer_norm_epsilon`."""

    vocab_size: int
    hidden_size: int
    layers_block_type: Sequence[str] | None = None
    hybrid_override_pattern: str | None = None
    num_hidden_layers: int | None = None
    tie_word_embeddings: bool = False
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    attention_head_dim: int | None = None
    intermediate_size: int = 21504
    mlp_hidden_act: str = "relu2"
    mlp_bias: bool = False
    ssm_state_size: int = 128
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    mamba_hidden_act: str = "silu"
    n_groups: int = 8
    conv_kernel: int = 4
    expand: float = 2  # not read: the heads say it
    time_step_min: float = 0.001
    time_step_limit: Sequence[float] = (0.0, math.inf)
    use_conv_bias: bool = True
    use_bias: bool = False
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    layer_norm_epsilon: float = 1e-5
    rms_norm_eps: float | None = None
    residual_in_fp32: bool = False

    def __post_init__(self) -> None:
        kinds, count = self.kinds, self.num_hidden_layers
        if unknown := sorted(set(kinds) - set(LETTERS.values())):
            raise ValueError(f"a layer is {unknown[0]!r}; known are {', '.join(LETTERS.values())}")
        if not kinds or count not in (None, len(kinds)):
            raise ValueError(f"{len(kinds)} layers are listed, num_hidden_layers is {count}")
        if any(listed != kinds for listed in self._listed):
            raise ValueError("layers_block_type and hybrid_override_pattern list other layers: which?")
        pairs = {"attention_head_dim": "head_dim", "rms_norm_eps": "layer_norm_epsilon"}
        for older, newer in pairs.items():
            was, now = getattr(self, older), getattr(self, newer)
            if None not in (was, now) and was != now:
                raise ValueError(f"{older} is {was} and {newer} {now}, two names of one thing: which?")
        if list(self.time_step_limit) != [0.0, math.inf]:
            raise ValueError(
                f"time_step_limit {list(self.time_step_limit)}: these models' steps are limited by "
                "time_step_min, and this one by both: which?"
            )
        if self.mamba_hidden_act != "silu":
            raise ValueError(f"mamba_hidden_act {self.mamba_hidden_act!r}: only 'silu' is known")
        if self.n_shared_experts != 1:
            raise ValueError(f"n_shared_experts {self.n_shared_experts}: one is what these models have")
        _ = self.experts  # raises for a router that cannot be

    @property
    def kinds(self) -> Sequence[str]:
        """What each layer is, in today's words."""
        return self._listed[0]

    @property
    def _listed(self) -> Sequence[Sequence[str]]:
        """The layers as each of the two keys lists them that are there."""
        words, letters = self.layers_block_type, self.hybrid_override_pattern
        today = [] if words is None else [[OLDER.get(kind, kind) for kind in words]]
        older = [] if letters is None else [[LETTERS.get(letter, letter) for letter in letters]]
        return today + older or [[]]

    @property
    def attention(self) -> AttentionSpec:
        head_dim = self.head_dim or self.attention_head_dim or 128
        return AttentionSpec(self.num_attention_heads, head_dim, self.num_key_value_heads)

    @property
    def ssm(self) -> Mamba2Spec:
        return Mamba2Spec(
            heads=self.mamba_num_heads,
            head_dim=self.mamba_head_dim,
            state_size=self.ssm_state_size,
            groups=self.n_groups,
            conv=self.conv_kernel,
            bias=self.use_bias,
            conv_bias=self.use_conv_bias,
            act=self.mamba_hidden_act,
            dt_limit=(self.time_step_min, math.inf),
            norm_eps=self.layer_norm_epsilon,
        )

    @property
    def experts(self) -> ExpertsSpec | None:
        if "moe" not in self.kinds:
            return None
        return ExpertsSpec(
            experts=self.n_routed_experts,
            per_token=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            act=self.mlp_hidden_act,
            gated=False,
            scores="sigmoid",
            normalise=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            groups=self.n_group,
            kept_groups=self.topk_group,
            correction=True,
            shared=self.moe_shared_expert_intermediate_size,
            latent=self.moe_latent_size,
            bias=self.mlp_bias,
        )


def build(config: Config) -> Model:
    d, eps = config.hidden_size, config.layer_norm_epsilon

    def mixer(kind: str) -> Mixer:
        if kind == "linear_attention":
            return Mamba2(d, config.ssm)
        if kind == "full_attention":
            return Attention(d, config.attention)
        spec = config.experts if kind == "moe" else None
        if spec is not None:
            return Experts(d, spec)
        return MLP(d, config.intermediate_size, act=config.mlp_hidden_act, bias=config.mlp_bias)

    return Model(
        config,
        [Block(mixer=(RMSNorm(d, eps), mixer(kind))) for kind in config.kinds],
        RMSNorm(d, eps),
        vocab=config.vocab_size,
        d=d,
        tied=config.tie_word_embeddings,
        residual_float32=config.residual_in_fp32,
    )


def weights(config: Config) -> list[Rule]:
    """Hugging Face's names to ours."""
    source, ours, spec = "backbone.layers.{i}.mixer.", "blocks.{i}.mixer.", config.experts
    qkv, attention = [source + f"{p}_proj.weight" for p in "qkv"], config.attention
    keys = (attention.kv_heads or attention.heads) * attention.head_dim
    rules = [
        same("backbone.embeddings.weight", "embed.weight"),
        same("backbone.norm_f.weight", "norm.weight"),
        same("backbone.layers.{i}.norm.weight", "blocks.{i}.mixer_norm.weight"),
        *mixer_weights(source, ours, config.ssm),
        fuse(qkv, ours + "qkv.weight", [attention.heads * attention.head_dim, keys, keys]),
        same(source + "o_proj.weight", ours + "out.weight"),
        drop("mtp.*"),  # guesses several tokens ahead, which speculation would read
        head("lm_head.weight", config.tie_word_embeddings),
    ]
    if spec is not None:
        rules += expert_weights(source, ours, spec)
    return rules + mlp_weights(source, ours, config.intermediate_size, False, config.mlp_bias)


ARCHITECTURE = Architecture("nemotron_h", Config, build, weights)
