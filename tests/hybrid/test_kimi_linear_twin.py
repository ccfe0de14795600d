"""Kimi Linear beside transformers' own, its odd points one by one, and configs that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from constate.core.architecture import read_config
from constate.core.latent import LatentAttention
from constate.core.model import Model
from constate.core.rotary import Rotary
from constate.hybrid.kimi_linear import ARCHITECTURE, Config
from constate.kernels.dispatch import Op
from constate.linear_attn import kda
from constate.linear_attn.kda import KDA
from constate.loading import load
from constate.spans import Spans
from tests.hybrid.test_deepseek_v3_twin import (
    corrected_weights,
    experts,
    finish,
    groups_by_their_best,
    one_shared_expert,
    routed,
    routers,
)
from tests.models import MODELS
from tests.test_twins import every, norms
from tests.twins import VOCAB, Removal, Twin, Twins, ids, moved, same_decoding, same_export, same_forward

Removals = Callable[[Model], list[Removal]]

LINEAR, FULL = "linear_attention", "full_attention"
KIMI: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=48, num_hidden_layers=4, intermediate_size=40,
    layer_types=[LINEAR, FULL, LINEAR, FULL], mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    linear_head_dim=12, linear_num_heads=3, linear_conv_kernel_dim=3, num_attention_heads=4,
    num_key_value_heads=4, kv_lora_rank=14, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=12,
    num_experts=12, n_group=4, topk_group=2, num_experts_per_token=3, moe_intermediate_size=20,
    n_shared_experts=2, routed_scaling_factor=1.7, rms_norm_eps=1e-2, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_linear": ("kimi_linear", KIMI),
    "kimi_linear otherwise": (
        "kimi_linear",
        {
            **KIMI,
            "num_hidden_layers": 5,
            "layer_types": None,  # the last of the five attends
            "mlp_layer_types": None,
            "linear_conv_kernel_dim": 4,
            "q_lora_rank": 18,
            "attention_bias": True,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twin]:
    return Twins(CONFIGS, tmp_path_factory, finish)


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_equals_the_twin(name: str, twin: Callable[[str], Twin]) -> None:
    same_forward(twin(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_equals_the_twin(name: str, twin: Callable[[str], Twin]) -> None:
    same_decoding(twin(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_go_back_as_they_came(name: str, twin: Callable[[str], Twin]) -> None:
    same_export(twin(name))


def test_the_first_release_s_names_are_read_too(twin: Callable[[str], Twin], tmp_path: Any) -> None:
    """There a layer without experts has an `mlp`."""
    both = twin("kimi_linear")
    tensors = load_file(both.folder / "model.safetensors")
    dense = "model.layers.0."
    renamed = {
        n.replace("block_sparse_moe", "mlp") if n.startswith(dense) else n: t for n, t in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((both.folder / "config.json").read_bytes())
    ours, prompt = load(tmp_path, backend="torch"), ids(9)
    assert torch.equal(ours(prompt, Spans.of([9])), both.ours(prompt, Spans.of([9])))


# -- every odd point is seen ------------------------------------------------------------------------


def of(kind: type[Any], part: str = "") -> Callable[[Model], list[Any]]:
    def get(model: Model) -> list[Any]:
        return [getattr(m, part) if part else m for m in model.mixers() if isinstance(m, kind)]

    return get


def scan(change: Callable[[Op], Op]) -> Removals:
    return lambda model: [
        (model, "ops", replace(model.ops, gated_delta_scan=change(model.ops.gated_delta_scan)))
    ]


def by_head(right: Op) -> Op:
    def faulty(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Any, **options: Any) -> Any:
        return right(q, k, v, g.exp().mean(-1).log(), *rest, **options)

    return faulty


def unscaled(right: Op) -> Op:
    """Queries not divided by sqrt(dk): the norm behind takes it back, up to its eps."""
    return lambda *args, **options: right(*args, **{**options, "scale": 1.0})


def erases_first(right: Op) -> Op:
    """The rule of a single token with the decay behind the erase: the state forgets what it just wrote."""

    def faulty(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial: Tensor | None,
        spans: Spans,
        **o: Any,
    ) -> Any:
        later = torch.cat([torch.zeros_like(g[:1]), g[:-1]])
        return right(q, k, v, later, beta, initial, spans, **o)

    return faulty


def rotated(model: Model) -> list[Removal]:
    rotary = Rotary.of({"rope_type": "default", "rope_theta": 10000.0}, 8)
    return [(m, "rotary", rotary) for m in of(LatentAttention)(model)]


def without_shared_key(model: Model) -> list[Removal]:
    """The rows that make the key of all heads set to nothing."""
    removals: list[Removal] = []
    for m in of(LatentAttention)(model):
        weight = m.in_proj.weight.clone()
        weight[-m.shared :] = 0
        removals.append((m.in_proj, "weight", weight))
    return removals


def swapped_layers(model: Model) -> list[Removal]:
    """The first two mixers change places."""
    first, mlp, second, *rest = model.branches
    order = (replace(first, mixer=second.mixer), mlp, replace(second, mixer=first.mixer), *rest)
    return [(model, "branches", order)]


def same_length(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x


PLAIN, OTHERWISE = CONFIGS
ODD_POINTS: dict[str, tuple[str, Removals]] = {
    "a decay for every channel": (PLAIN, scan(by_head)),
    "the scale of the queries": (PLAIN, scan(unscaled)),
    "decays, then erases": (PLAIN, scan(erases_first)),
    "the bias of the decays": (PLAIN, every(of(KDA), "dt_bias", torch.zeros_like)),
    "the rates of the decays": (PLAIN, every(of(KDA), "a_log", torch.zeros_like)),
    "which are exponentials": (PLAIN, every(of(KDA), "a_log", torch.exp)),
    "the softplus of the decays": (PLAIN, every(of(KDA), "bound", -5.0)),
    "their low rank": (PLAIN, every(of(KDA, "decay_proj"), "weight", torch.zeros_like)),
    "q and k of unit length": (PLAIN, lambda m: [(kda, "unit", same_length)]),
    "SiLU after the convolution": (PLAIN, every(of(KDA, "conv"), "activation", None)),
    "the gate": (PLAIN, every(of(KDA, "gate_proj"), "weight", torch.zeros_like)),
    "which is a sigmoid": (PLAIN, every(of(KDA, "norm"), "sigmoid", False)),
    "the norm before the gate": (PLAIN, every(of(KDA, "norm"), "before", False)),
    "the norm's weight": (PLAIN, every(of(KDA, "norm"), "weight", torch.ones_like)),
    "the norm's eps": (PLAIN, every(of(KDA, "norm"), "eps", 1e-6)),
    "the other norms' eps": (PLAIN, every(norms, "eps", 1e-6)),
    "the order of the layers": (PLAIN, swapped_layers),
    "no positions": (PLAIN, rotated),
    "the key that all heads share": (PLAIN, without_shared_key),
    "the scale of both kinds of channels": (PLAIN, every(of(LatentAttention), "scale", 10**-0.5)),
    "the latents' norm": (PLAIN, every(of(LatentAttention, "norm"), "weight", torch.ones_like)),
    "the latents' eps": (PLAIN, every(of(LatentAttention, "norm"), "eps", 1e-2)),
    "the query latents' eps": (OTHERWISE, every(of(LatentAttention, "q_norm"), "eps", 1e-2)),
    "a bias on the first product": (OTHERWISE, every(of(LatentAttention, "in_proj"), "bias", None)),
    "a bias on the output": (OTHERWISE, every(of(LatentAttention, "out"), "bias", None)),
    "sigmoid scores": (PLAIN, routed(scores="softmax")),
    "a correction in the choice": (PLAIN, every(routers, "correction", torch.zeros_like)),
    "and in the choice alone": (PLAIN, corrected_weights),
    "groups": (PLAIN, routed(groups=1, kept_groups=1)),
    "as many groups": (PLAIN, routed(kept_groups=3)),
    "groups judged by two": (PLAIN, groups_by_their_best),
    "as many experts": (PLAIN, routed(per_token=2)),
    "moe_renormalize": (PLAIN, routed(normalise=False)),
    "no moe_renormalize": (OTHERWISE, routed(normalise=True)),
    "routed_scaling_factor": (PLAIN, routed(scale=1.0)),
    "the shared experts": (PLAIN, every(experts, "shared", None)),
    "both shared experts": (PLAIN, one_shared_expert),
    "an untied head": (PLAIN, lambda m: [(m.head, "weight", m.embed.weight)]),
}


@pytest.mark.parametrize("point", ODD_POINTS)
def test_each_odd_point_moves_the_logits(point: str, twin: Callable[[str], Twin]) -> None:
    name, removals = ODD_POINTS[point]
    far = moved(twin(name), removals)
    assert far > 1e-3, f"{name} does not notice that {point} is gone ({far:.1e})"


PUBLISHED: dict[str, Any] = {  # of moonshotai/Kimi-Linear-48B-A3B-Instruct
    "model_type": "kimi_linear",
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "use_grouped_topk": True,
}


def test_the_first_release_is_understood() -> None:
    """Its layers count from one, and its last one attends, which no rule of every fourth would say."""
    config = read_config(Config, PUBLISHED)
    assert [i for i, kind in enumerate(config.kinds) if kind == FULL] == [3, 7, 11, 15, 19, 23, 26]
    assert [i for i, dense in enumerate(config.dense) if dense] == [0]
    assert (config.kda.heads, config.kda.key_dim, config.kda.conv) == (32, 128, 4)


@pytest.mark.parametrize(
    ("over", "fact"),
    [
        ({"layer_types": None}, "do not list each of the layers 1 to 4 once"),
        ({"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2, 3, 4], "full_attn_layers": [4]}},
         "do not list each of the layers 1 to 4 once"),
        ({"layer_types": [LINEAR, LINEAR, LINEAR, "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": [LINEAR]}, r"layer_types \['linear_attention'\]: 4 of"),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "gated"]}, "gated"),
        ({"linear_attn_config": {"gate_lower_bound": -5.0}}, "linear_attn_config has .'gate_lower_bound'"),
        ({"mla_use_nope": False}, "mla_use_nope False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1"),
        ({"use_grouped_topk": False}, "use_grouped_topk false with num_expert_group 3"),
        ({"num_key_value_heads": 1}, "num_key_value_heads 1 of 3 heads"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias true with q_lora_rank null"),
        ({"num_expert_group": 4}, "6 experts in 4 groups"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling = .* is not understood"),
        ({"attn_res_block_size": 2}, "attn_res_block_size = 2 is not understood"),
    ],
)  # fmt: skip
def test_what_it_does_not_know_is_refused_by_name(over: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        ARCHITECTURE.build(read_config(Config, {**MODELS["kimi_linear"].raw, **over}))
