"""How RWKV-7's tensors are called, and what their shapes tell: flash-linear-attention's names and BlinkDL's.

BlinkDL's .pth files come with no config.json. rwkv.cpp writes his names with two changes of layout. Knows
no mixer and no file; `config` in what follows is rwkv7.Config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Size

from ..core.weights import Rule, drop, fuse, head, reshape, same, transpose

# Names: ours, flash-linear-attention's, BlinkDL's.
_NORMS = (
    ("norm", "model.norm", "ln_out"),
    ("embed_norm", "model.layers.0.pre_norm", "blocks.0.ln0"),
    ("blocks.{i}.mixer_norm", "model.layers.{i}.attn_norm", "blocks.{i}.ln1"),
    ("blocks.{i}.mlp_norm", "model.layers.{i}.ffn_norm", "blocks.{i}.ln2"),
    ("blocks.{i}.mixer.norm", "model.layers.{i}.attn.g_norm", "blocks.{i}.att.ln_x"),
)
_MATRICES = (
    ("mixer.r_proj", "attn.r_proj", "att.receptance"),
    ("mixer.k_proj", "attn.k_proj", "att.key"),
    ("mixer.v_proj", "attn.v_proj", "att.value"),
    ("mixer.out_proj", "attn.o_proj", "att.output"),
    ("mlp.up", "ffn.key", "ffn.key"),
    ("mlp.down", "ffn.value", "ffn.value"),
)
_VECTORS = (
    ("mixer.kappa_scale", "attn.k_k", "att.k_k"),
    ("mixer.rate_share", "attn.k_a", "att.k_a"),
    ("mlp.mix", "ffn.x_k", "ffn.x_k"),
)
_LOW_RANKS = (("decay", "w"), ("rate", "a"), ("gate", "g"), ("share", "v"))


def fla(config: Any) -> list[Rule]:
    """flash-linear-attention's names to ours."""
    source, ours = "model.layers.{i}.", "blocks.{i}."
    rules = [
        same("model.embeddings.weight", "embed.weight"),
        head("lm_head.weight", config.tie_word_embeddings),
    ]
    for mine, theirs, _ in _NORMS:
        parts = ("weight", "bias") if config.norm_bias or theirs.endswith("g_norm") else ("weight",)
        rules += [same(f"{theirs}.{part}", f"{mine}.{part}") for part in parts]
    rules += [same(f"{source}{theirs}.weight", f"{ours}{mine}.weight") for mine, theirs, _ in _MATRICES]
    rules += [same(source + theirs, ours + mine) for mine, theirs, _ in _VECTORS]
    for mine, letter in _LOW_RANKS:
        theirs, mine = f"{source}attn.{letter}_lora.lora.", f"{ours}mixer.{mine}."
        rules += [
            same(theirs + "0.weight", mine + "down.weight"),
            same(theirs + "2.weight", mine + "up.weight"),
        ]
        rules.append(same(theirs + "2.bias", mine + "bias"))
    rules.append(_stacked([f"{source}attn.x_{letter}" for letter in "rwkvag"], ours + "mixer.mix"))
    return [*rules, same(source + "attn.r_k", ours + "mixer.bonus")]


def blinkdl(config: Any) -> list[Rule]:
    """BlinkDL's names to ours: his matrices of low rank multiply from the right."""
    mixes = [f"blocks.{{i}}.att.x_{letter}" for letter in "rwkvag"]
    return [*_original(config, transpose), _stacked(mixes, "blocks.{i}.mixer.mix")]


def rwkv_cpp(config: Any) -> list[Rule]:
    """The same as rwkv.cpp converts them: matrices of low rank transposed, the six mixes in one tensor."""
    d = config.hidden_size
    mixes = reshape("blocks.{i}.att.x_rwkvag", "blocks.{i}.mixer.mix", (6, 1, d), (6, d))
    return [*_original(config, same), mixes]


def _original(config: Any, matrix: Callable[[str, str], Rule]) -> list[Rule]:
    at, ours, row = "blocks.{i}.att.", "blocks.{i}.", (1, 1, -1)
    rules = [same("emb.weight", "embed.weight"), head("head.weight", config.tie_word_embeddings)]
    for mine, _, theirs in _NORMS:
        rules += [same(f"{theirs}.{part}", f"{mine}.{part}") for part in ("weight", "bias")]
    rules += [same(f"{ours}{theirs}.weight", f"{ours}{mine}.weight") for mine, _, theirs in _MATRICES]
    rules += [reshape(ours + theirs, ours + mine, row, (-1,)) for mine, _, theirs in _VECTORS]
    # Some files give the first layer a share of its own value; nobody reads it.
    rules += [drop(f"blocks.0.att.v{part}") for part in "012"]
    for mine, letter in _LOW_RANKS:
        theirs, mine = at + letter, f"{ours}mixer.{mine}."
        rules += [matrix(theirs + "1", mine + "down.weight"), matrix(theirs + "2", mine + "up.weight")]
        rules.append(reshape(theirs + "0", mine + "bias", row, (-1,)))
    return [*rules, same(at + "r_k", ours + "mixer.bonus")]


def _stacked(src: Sequence[str], dst: str) -> Rule:
    """Rows (1, 1, d) as one matrix."""
    joined = fuse(src, dst, dim=1)
    return replace(
        joined,
        forth=lambda t: [joined.forth(t)[0].squeeze(0)],
        back=lambda t: joined.back([t[0].unsqueeze(0)]),
    )


def config_of(raw: Mapping[str, Any], shapes: Mapping[str, Size]) -> Mapping[str, Any]:
    """What flash-linear-attention's config.json would say of a checkpoint in BlinkDL's names, which has none:
    from the tensors' shapes. Raises ValueError for heads whose group norm is not known."""
    wanted = ["emb.weight", "blocks.0.ffn.key.weight"] + [
        f"blocks.0.att.{n}" for n in ("r_k", "w1", "a1", "g1")
    ]
    if missing := [name for name in wanted if name not in shapes]:
        raise ValueError(f"an RWKV-7 checkpoint in BlinkDL's names lacks {', '.join(missing)}")
    (vocab, d), (heads, head_dim) = shapes["emb.weight"], shapes["blocks.0.att.r_k"]
    if head_dim != 64:
        raise ValueError(
            f"heads of {head_dim} channels: the eps of BlinkDL's group norm is known for 64 alone"
        )

    def rank(name: str, layer: int = 0) -> int:
        shape = shapes.get(f"blocks.{layer}.att.{name}", (1,))  # (d, rank), or rwkv.cpp's (rank, d)
        return next((n for n in shape if n != d), d)

    return {
        **{key: value for key, value in raw.items() if key in ("eos_token_id", "bos_token_id")},
        "vocab_size": vocab,
        "hidden_size": d,
        "num_hidden_layers": len({name.split(".")[1] for name in shapes if name.startswith("blocks.")}),
        "head_dim": head_dim,
        "num_heads": heads,
        "intermediate_size": shapes["blocks.0.ffn.key.weight"][0],
        "decay_low_rank_dim": rank("w1"),
        "a_low_rank_dim": rank("a1"),
        "gate_low_rank_dim": rank("g1"),
        "v_low_rank_dim": rank("v1", 1),
        "fuse_norm": False,
    }
