"""Published sizes, from config alone on the meta device: bytes of keys and values, elements of recurrent
state, parameters. The figures are those of papers, model cards and configs, not this package's.

A config is transformers' default where that is the published one, else what the model card says. The figures
count w convolution inputs where a cache here holds w - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from constate.core.architecture import read_config
from constate.core.model import Model
from constate.loading import find

transformers = pytest.importorskip("transformers")


@dataclass(frozen=True)
class Size:
    """A model_type and what differs from transformers' defaults; `kv`, bytes in bfloat16 after so many
    tokens; `state` elements; `conv`, elements of w inputs of every convolution of `width` w."""

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    kv: Mapping[int, int] = field(default_factory=dict)
    state: int = 0
    conv: int = 0
    width: int = 4


GIB = 2**30
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
KDA_LAYERS = [i for i in range(26) if i % 4 != 3]

PUBLISHED: dict[str, Size] = {
    "DeepSeek-V2": Size(  # 34,560 elements a token: 60 latents of 512 and keys of 64
        "deepseek_v3",
        {
            "num_hidden_layers": 60,
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "first_k_dense_replace": 1,
            "n_routed_experts": 160,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "topk_group": 3,
            "moe_intermediate_size": 1536,
        },
        kv={1: 2 * 34_560},
    ),
    "DeepSeek-V3": Size("deepseek_v3", kv={1: 2 * 61 * (512 + 64)}),
    "Gemma-3-27B": Size(  # 52 layers of 62 hold 1024 tokens: 2.906 GiB of 15.5, then 10.406 of 62
        "gemma3_text",
        {
            "num_hidden_layers": 62,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
        },
        kv={n: (52 * 1024 + 10 * n) * 2 * 16 * 128 * 2 for n in (32_768, 131_072)},
    ),
    "MiniMax-01": Size(  # 10 of 80 layers attend, eight heads of 128; 70 x 64 heads of 128 x 128
        "minimax",
        {
            "num_hidden_layers": 80,
            "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10,
            "hidden_size": 6144,
            "intermediate_size": 9216,
            "num_attention_heads": 64,
            "head_dim": 128,
            "num_local_experts": 32,
        },
        kv={1: 40_960, 262_144: 10 * GIB},
        state=73_400_320,
    ),
    "Qwen3-Next-80B-A3B": Size(  # 12 of 48 layers attend, two heads of 256; 36 x 32 heads of 128 x 128
        "qwen3_next", kv={1: 24_576, 262_144: 6 * GIB}, state=18_874_368, conv=1_179_648
    ),
    "Nemotron-H-8B": Size(  # 24 Mamba-2 layers, 4 of attention, 24 MLPs
        "nemotron_h",
        {"layers_block_type": [LETTERS[letter] for letter in NEMOTRON_H_8B]},
        kv={1: 16_384, 262_144: 4 * GIB},
        state=25_165_824,
        conv=983_040,
    ),
    "Jamba": Size(  # 4 of 32 layers attend; 28 Mamba layers of 8192 channels with 16 states
        "jamba", kv={1: 16_384, 262_144: 4 * GIB}, state=3_670_016, conv=917_504
    ),
    "Falcon-H1-7B": Size(  # 44 x 3072 channels with 256 states
        "falcon_h1",
        {
            "num_hidden_layers": 44,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
        },
        state=34_603_008,
        conv=630_784,
    ),
    "Zamba2-7B": Size(  # 13 uses of shared blocks, keys and values of 32 heads of 224; 81 x 7168 x 64
        "zamba2",
        {
            "num_hidden_layers": 81,
            "hidden_size": 3584,
            "layers_block_type": ["hybrid" if i and i % 6 == 0 else "mamba" for i in range(81)],
            "n_mamba_heads": 112,
            "mamba_ngroups": 2,
            "num_mem_blocks": 2,
        },
        kv={1: 372_736, 262_144: 91 * GIB},
        state=37_158_912,
        conv=2_405_376,
    ),
    "RecurrentGemma-2B": Size(  # 18 of 26 layers recur, 8 hold 2048 tokens of one head of 256
        "recurrent_gemma",
        {"num_key_value_heads": 1, "intermediate_size": 15_360},
        kv={1: 8 * 1024, 2048: 16 * 2**20, 262_144: 16 * 2**20},
        state=18 * 2560,
        conv=18 * 2560 * 4,
    ),
    "Kimi-Linear-48B-A3B": Size(  # 7 of 27 layers hold a latent of 512 and a key of 64: 3/4 less
        "kimi_linear",
        {"layer_types": ["linear_attention" if i in KDA_LAYERS else "full_attention" for i in range(27)]},
        kv={1: 7 * 576 * 2},
        state=20 * 32 * 128 * 128,
        conv=20 * 3 * 4096 * 4,
    ),
}

# Parameters beside transformers' own class in what the published sizes leave out.
OTHERWISE: list[Size] = [
    Size("deepseek_v3", {"q_lora_rank": None, "tie_word_embeddings": True, "n_shared_experts": 3}),
    Size("gemma3_text"),
    Size("gemma3_text", {"tie_word_embeddings": False, "attention_bias": True}),
    Size("minimax"),
    Size("jamba", {"num_experts": 1, "mamba_proj_bias": True, "tie_word_embeddings": True}),
    Size("falcon_h1", {"mamba_rms_norm": True, "attention_bias": True, "projectors_bias": True}),
    Size("zamba2"),
    Size("zamba2", {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "add_bias_linear": True}),
]


def config_of(size: Size) -> Any:
    return transformers.AutoConfig.for_model(size.kind, **size.settings)


def ours(size: Size) -> Model:
    """The whole model without memory, its weights bfloat16."""
    raw = {"model_type": size.kind, **config_of(size).to_dict()}
    architecture = find(size.kind).architecture
    with torch.device("meta"):
        return architecture.build(read_config(architecture.Config, raw)).to_dtype(torch.bfloat16)


@pytest.mark.parametrize("name", [name for name, size in PUBLISHED.items() if size.kv])
def test_keys_and_values_have_the_published_size(name: str) -> None:
    model, size = ours(PUBLISHED[name]), PUBLISHED[name]
    for tokens, nbytes in size.kv.items():
        assert model.cost(0, tokens).held.get("kv", 0) == nbytes, f"{tokens} tokens"


@pytest.mark.parametrize("name", [name for name, size in PUBLISHED.items() if size.state])
def test_the_recurrent_state_has_the_published_size(name: str) -> None:
    size = PUBLISHED[name]
    held = ours(size).cost(0, 1000).held
    assert held["state"] == 4 * size.state, "float32 by default"
    assert held.get("conv", 0) == 2 * size.conv // size.width * (size.width - 1)


@pytest.mark.parametrize("size", [*PUBLISHED.values(), *OTHERWISE], ids=lambda size: size.kind)
def test_parameters_are_transformers(size: Size) -> None:
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config_of(size))
    buffers = theirs.named_buffers()  # a router's correction is a weight that they do not call one
    wanted = [b.numel() for name, b in buffers if name.endswith("e_score_correction_bias")]
    wanted += [p.numel() for p in theirs.parameters()]
    assert sum(p.numel() for p in ours(size).parameters()) == sum(wanted)
