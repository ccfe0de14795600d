"""Published denoisers beside transformers' own: LLaDA and Llama, Dream and Qwen2, SDAR and Qwen3,
LLaDA2.0 and GLM-4.5, whose layers are the same.

transformers is given a mask that shows every place, or every place's block and those before; what it wrote is
renamed to the denoiser's own names where those differ, and read from the folder as anybody would. Each odd
point left out must move our logits by more than 1e-3. MDLM and BD3-LM have no twin there: tests/dit.py is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from constate.core.attention import Attention
from constate.core.experts import Router
from constate.core.model import Model
from constate.core.norms import RMSNorm
from constate.diffusion_lm.denoiser import denoiser
from constate.loading import load, save
from constate.spans import Spans
from tests.referee import same_logits

transformers = pytest.importorskip("transformers")

VOCAB, MASK, BLOCK = 97, 96, 6
LENGTHS = (1, 5, 6, 7, 40)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 64,
}
ROPE = {"rope_type": "default", "rope_theta": 100.0}

# As LLaDA-8B-Base's config.json has them.
LLADA = {
    "model_type": "llada", "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"], "attention_dropout": 0.0, "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True, "bias_for_layer_norm": False, "block_group_size": 1,
    "block_type": "llama", "d_model": 48, "embedding_dropout": 0.0, "embedding_size": VOCAB,
    "eos_token_id": 2, "flash_attention": False, "include_bias": False, "include_qkv_bias": False,
    "init_cutoff_factor": None, "init_device": "meta", "init_fn": "mitchell", "init_std": 0.02,
    "input_emb_norm": False, "layer_norm_type": "rms", "layer_norm_with_affine": True,
    "mask_token_id": MASK, "max_sequence_length": 64, "mlp_hidden_size": 40, "mlp_ratio": 4,
    "multi_query_attention": None, "n_heads": 6, "n_kv_heads": 2, "n_layers": 2, "pad_token_id": 2,
    "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-2, "rope": True,
    "rope_full_precision": True, "rope_theta": 100.0, "scale_logits": False,
    "transformers_version": "4.46.3", "use_cache": False, "vocab_size": VOCAB, "weight_tying": False,
}  # fmt: skip
OLDER = {"rope_theta": 100.0, "rope_scaling": None, "use_sliding_window": False, "sliding_window": None}
DREAM = {
    **SIZES, **OLDER, "model_type": "Dream", "architectures": ["DreamModel"], "hidden_act": "silu",
    "mask_token_id": MASK, "max_window_layers": 28, "tie_word_embeddings": False, "use_mrope": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
SDAR = {
    **SIZES, **OLDER, "model_type": "sdar", "architectures": ["SDARForCausalLM"], "head_dim": 12,
    "attention_bias": False, "block_size": BLOCK, "mask_token_id": MASK, "tie_word_embeddings": True,
}  # fmt: skip

# As LLaDA2.0-mini's config.json has them.
LLADA2 = {
    **SIZES, "model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"], "attention_dropout": 0.0,
    "embedding_dropout": 0.0, "first_k_dense_replace": 1, "head_dim": 8, "hidden_act": "silu",
    "initializer_range": 0.02, "max_window_layers": 28, "moe_intermediate_size": 20,
    "moe_router_enable_expert_bias": True, "n_group": 4, "norm_head": False, "norm_softmax": False,
    "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 2,
    "output_dropout": 0.0, "output_router_logits": False, "pad_token_id": 2, "partial_rotary_factor": 0.5,
    "rope_scaling": None, "rope_theta": 100.0, "rotary_dim": 4, "routed_scaling_factor": 2.5,
    "router_dtype": "fp32", "score_function": "sigmoid", "tie_word_embeddings": False, "topk_group": 2,
    "torch_dtype": "bfloat16", "transformers_version": "4.52.3", "use_bias": False, "use_cache": False,
    "use_qkv_bias": False, "use_rmsnorm": True, "use_sliding_window": False,
    "using_split_qkv_in_self_attention": False, "block_size": BLOCK, "mask_token_id": MASK,
}  # fmt: skip
GLM = {
    **SIZES, "head_dim": 8, "first_k_dense_replace": 1, "moe_intermediate_size": 20, "n_group": 4,
    "topk_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "routed_scaling_factor": 2.5, "use_qk_norm": True, "tie_word_embeddings": False,
}  # fmt: skip


def ling(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' GLM-4.5 to what LLaDA2.0's files hold: q, k and v in one, each expert by itself."""
    out: dict[str, Tensor] = {}
    for name, t in tensors.items():
        name = name.replace("embed_tokens", "word_embeddings").replace("self_attn.", "attention.")
        name = name.replace("o_proj", "dense").replace("e_score_correction_bias", "expert_bias")
        name = name.replace("q_norm", "query_layernorm").replace("k_norm", "key_layernorm")
        stem = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(both.chunk(2) for both in t):
                out[f"{stem}.{e}.gate_proj.weight"], out[f"{stem}.{e}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            out.update({f"{stem}.{e}.down_proj.weight": down for e, down in enumerate(t)})
        elif name.endswith("q_proj.weight"):
            k, v = (tensors[name.replace("attention.q", f"self_attn.{p}")] for p in "kv")
            out[name.replace("q_proj", "query_key_value")] = torch.cat([t, k, v])
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            out[name] = t
    return out


def olmo(name: str) -> str:
    """transformers' Llama to what LLaDA's modelling code calls it, written out layer by layer."""
    parts = {
        "self_attn.q_proj": "q_proj",
        "self_attn.k_proj": "k_proj",
        "self_attn.v_proj": "v_proj",
        "self_attn.o_proj": "attn_out",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
    }
    whole = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}
    stem = name.removesuffix(".weight")
    if stem in whole:
        return f"model.transformer.{whole[stem]}.weight"
    _, _, i, part = stem.split(".", 3)
    return f"model.transformer.blocks.{i}.{parts[part]}.weight"


@dataclass(frozen=True)
class Twin:
    """A denoiser's config.json, transformers' kind and settings, how its tensors are written, rope's own."""

    raw: dict[str, Any]
    kind: str
    settings: dict[str, Any]
    written: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    rope: dict[str, Any] = field(default_factory=dict)


TWINS = {
    "llada": Twin(LLADA, "llama", SIZES, lambda tensors: {olmo(name): t for name, t in tensors.items()}),
    "dream": Twin(DREAM, "qwen2", {**SIZES, "use_sliding_window": False}),
    "sdar": Twin(SDAR, "qwen3", {**SIZES, "head_dim": 12, "tie_word_embeddings": True}),
    "llada2_moe": Twin(LLADA2, "glm4_moe", GLM, ling, {"partial_rotary_factor": 0.5}),
}


@dataclass(frozen=True)
class Pair:
    theirs: Any
    ours: Model
    folder: Path

    def whole(self, row: Tensor) -> Tensor:
        place = torch.arange(len(row))
        block = denoiser(self.ours).block
        seen = torch.ones(len(row), len(row), dtype=torch.bool)
        seen = seen if block is None else place // block <= place[:, None] // block
        with torch.no_grad():
            return self.theirs(row[None], attention_mask=seen[None, None]).logits[0].float()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            twin, folder = TWINS[name], tmp_path_factory.mktemp("twin")
            config = transformers.AutoConfig.for_model(
                twin.kind, **twin.settings, rope_parameters=ROPE | twin.rope
            )
            config._attn_implementation = "sdpa"
            theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            _spread(theirs)
            tied = twin.settings.get("tie_word_embeddings")
            tensors = {
                n: t.contiguous()
                for n, t in theirs.state_dict().items()
                if not (tied and n == "lm_head.weight")
            }
            tensors = {n: t.clone() for n, t in twin.written(tensors).items()}
            save_file(tensors, folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps(twin.raw))
            made[name] = Pair(theirs, load(folder, backend="torch"), folder)
        return made[name]

    return get


@torch.no_grad()
def _spread(model: Any) -> None:
    g = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        if "embed" in name:
            p.copy_(0.7 * noise)
        elif p.ndim > 1:
            p.copy_(1.4 * noise * p.shape[-1] ** -0.5)
        else:
            p.copy_(0.4 * noise + (0 if name.endswith("bias") else 1))
    for name, b in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            b.copy_(0.3 * torch.randn(b.shape, generator=g))


def ids(n: int) -> Tensor:
    g = torch.Generator().manual_seed(n)
    return torch.where(torch.rand(n, generator=g) < 0.4, MASK, torch.randint(3, MASK, (n,), generator=g))


@pytest.mark.parametrize("name", TWINS)
def test_logits_equal_the_twins(name: str, pair: Callable[[str], Pair]) -> None:
    twin = pair(name)
    want = [twin.whole(ids(n)) for n in LENGTHS]
    for n, each in zip(LENGTHS, want, strict=True):
        same_logits(twin.ours(ids(n), Spans.of([n])), each, f"{n} places")
    packed = twin.ours(torch.cat([ids(n) for n in LENGTHS]), Spans.of(LENGTHS))
    same_logits(packed, torch.cat(want), "packed")


@pytest.mark.parametrize("name", TWINS)
def test_it_is_asked_as_published(name: str, pair: Callable[[str], Pair]) -> None:
    about = denoiser(pair(name).ours)
    assert about.mask_id == MASK
    assert (about.shift, about.block) == {
        "llada": (False, None),
        "dream": (True, None),
        "sdar": (False, BLOCK),
        "llada2_moe": (False, BLOCK),
    }[name]


@pytest.mark.parametrize("name", TWINS)
def test_it_is_written_under_the_names_it_was_read_from(
    name: str, pair: Callable[[str], Pair], tmp_path: Path
) -> None:
    twin = pair(name)
    save(twin.ours, tmp_path)
    again = load(tmp_path, backend="torch")
    assert torch.equal(again(ids(9), Spans.of([9])), twin.ours(ids(9), Spans.of([9])))
    from safetensors import safe_open

    names = []
    for folder in (tmp_path, twin.folder):
        with safe_open(folder / "model.safetensors", "pt") as file:
            names.append(set(file.keys()))
    assert names[0] == names[1]


def _sight(block: int | None) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for mixer in model.mixers():
            if isinstance(mixer, Attention):
                mixer.block = block

    return change


def _no_biases(model: Model) -> None:
    for mixer in model.mixers():
        if isinstance(mixer, Attention):
            assert mixer.qkv.bias is not None
            mixer.qkv.bias.zero_()


def _no_qk_norm(model: Model) -> None:
    for mixer in model.mixers():
        if isinstance(mixer, Attention):
            mixer.q_norm = mixer.k_norm = None


def _another_eps(model: Model) -> None:
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.eps = 1e-6


def _gate_and_up_swapped(model: Model) -> None:
    for name, p in model.named_parameters():
        if name.endswith("gate_up.weight"):
            p.copy_(torch.cat(p.chunk(2)[::-1]))


def _experts(**over: Any) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for module in model.modules():
            if isinstance(module, Router):
                module.spec = replace(module.spec, **over)

    return change


def _no_correction(model: Model) -> None:
    for module in model.modules():
        if isinstance(module, Router):
            assert module.correction is not None
            module.correction.zero_()


ODD: dict[str, tuple[str, Callable[[Model], None]]] = {
    "llada: causal": ("llada", _sight(1)),
    "llada: eps": ("llada", _another_eps),
    "llada: ff_proj is the gate": ("llada", _gate_and_up_swapped),
    "dream: causal": ("dream", _sight(1)),
    "dream: biases": ("dream", _no_biases),
    "sdar: causal": ("sdar", _sight(1)),
    "sdar: sees all": ("sdar", _sight(None)),
    "sdar: blocks of 5": ("sdar", _sight(5)),
    "sdar: q and k normed": ("sdar", _no_qk_norm),
    "llada2_moe: causal": ("llada2_moe", _sight(1)),
    "llada2_moe: sees all": ("llada2_moe", _sight(None)),
    "llada2_moe: q and k normed": ("llada2_moe", _no_qk_norm),
    "llada2_moe: sigmoid": ("llada2_moe", _experts(scores="softmax")),
    "llada2_moe: weights sum to one": ("llada2_moe", _experts(normalise=False)),
    "llada2_moe: scaled": ("llada2_moe", _experts(scale=1.0)),
    "llada2_moe: groups": ("llada2_moe", _experts(groups=1, kept_groups=1)),
    "llada2_moe: correction": ("llada2_moe", _no_correction),
}


@pytest.mark.parametrize("point", ODD)
def test_leaving_out_an_odd_point_is_seen(point: str, pair: Callable[[str], Pair]) -> None:
    name, change = ODD[point]
    twin = pair(name)
    model = load(twin.folder, backend="torch")
    change(model)
    moved = float((model(ids(40), Spans.of([40])) - twin.whole(ids(40))).abs().max())
    assert moved > 1e-3, f"{point}: moves logits by {moved:.1e} only"
