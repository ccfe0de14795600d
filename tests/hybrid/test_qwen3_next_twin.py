"""Qwen3-Next beside transformers' own, and what each of its odd points does to the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from constate.core.architecture import read_config
from constate.core.experts import Experts
from constate.core.model import Model
from constate.core.norms import GatedRMSNorm, RMSNorm
from constate.hybrid.qwen3_next import ARCHITECTURE, Config
from tests.models import MODELS
from tests.twins import Removal, Removals, Twins, moved, same_decoding, same_export, same_forward

LINEAR, FULL = "linear_attention", "full_attention"
SETTINGS = dict(
    vocab_size=97, hidden_size=48, intermediate_size=40, num_hidden_layers=4, num_attention_heads=6,
    num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-2, layer_types=[LINEAR, FULL, FULL, LINEAR],
    rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    linear_conv_kernel_dim=3, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=12,
    linear_value_head_dim=8, mlp_only_layers=[2], moe_intermediate_size=20,
    shared_expert_intermediate_size=28, num_experts=6, num_experts_per_tok=3,
)  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "as published": ("qwen3_next", SETTINGS),
    "otherwise": ("qwen3_next", {
        **SETTINGS, "attention_bias": True, "norm_topk_prob": False, "decoder_sparse_step": 2,
        "tie_word_embeddings": True, "layer_types": None, "full_attention_interval": 2,
        "mlp_only_layers": [], "rope_parameters": None, "linear_conv_kernel_dim": 4,
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return Twins(CONFIGS, tmp_path_factory)


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_equals_the_twin(name: str, twins: Twins) -> None:
    same_forward(twins(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_equals_the_twin(name: str, twins: Twins) -> None:
    same_decoding(twins(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_file_comes_back(name: str, twins: Twins) -> None:
    same_export(twins(name))


# -- every odd point is seen ----------------------------------------------------------------------


def modules(model: Model, kind: type[Any], part: str = "") -> list[Any]:
    return [m for name, m in model.named_modules() if isinstance(m, kind) and part in name]


def attentions(model: Model) -> list[Any]:
    return [m for m in model.mixers() if hasattr(m, "rotary")]


def deltas(model: Model) -> list[Any]:
    return [m for m in model.mixers() if hasattr(m, "a_log")]


def each(get: Callable[[Model], list[Any]], name: str, value: Any) -> Removals:
    def removals(model: Model) -> list[Removal]:
        return [(o, name, value(getattr(o, name)) if callable(value) else value) for o in get(model)]

    return removals


def routed(**change: Any) -> Removals:
    """Another spec in every layer of experts, and in its router."""

    def removals(model: Model) -> list[Removal]:
        layers = modules(model, Experts)
        owners = [*layers, *(layer.router for layer in layers)]
        return [(owner, "spec", replace(owner.spec, **change)) for owner in owners]

    return removals


def rotated(factor: float, theta: float = 100.0) -> Removals:
    def removals(model: Model) -> list[Removal]:
        dim = int(factor * model.config.head_dim)
        frequencies = tuple(theta ** (-i / dim) for i in range(0, dim, 2))
        return [(m, "rotary", replace(m.rotary, frequencies=frequencies)) for m in attentions(model)]

    return removals


def normed_late(model: Model) -> list[Removal]:
    """q and k rotated first and normed then."""

    def late(mixer: Any) -> Callable[..., Any]:
        q_norm, k_norm, early = mixer.q_norm, mixer.k_norm, mixer._enter

        def enter(x: Tensor, call: Any) -> Any:
            mixer.q_norm = None
            q, k, *rest = early(x, call)
            mixer.q_norm = q_norm
            return q_norm(q), k_norm(k), *rest

        return enter

    return [(m, "_enter", late(m)) for m in attentions(model)]


def interleaved(model: Model) -> list[Removal]:
    """Value head j reads key head j mod hk."""
    scan = model.ops.gated_delta_scan

    def faulty(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        q, k = (t.repeat(1, v.shape[1] // t.shape[1], 1) for t in (q, k))
        return scan(q, k, v, *rest, **options)

    return [(model, "ops", replace(model.ops, gated_delta_scan=faulty))]


def unsorted(twins: Twins, ours: str, names: list[str]) -> Removals:
    """The file's rows in the file's order."""

    def removals(model: Model) -> list[Removal]:
        (file,) = twins("as published").folder.glob("*.safetensors")
        stored = load_file(file)
        wanted = []
        for i, block in enumerate(model.blocks):
            files = [f"model.layers.{i}.{name}.weight" for name in names]
            if all(name in stored for name in files):
                owner: Any = block.get_submodule(ours)
                rows = torch.cat([stored[name] for name in files])
                wanted.append((owner, "weight", rows[: owner.out_features]))
        return wanted

    return removals


ODD_POINTS: dict[str, tuple[str, Removals]] = {
    "norms are one off": ("as published", each(lambda m: modules(m, RMSNorm), "offset", 0.0)),
    "the block norms are": ("as published", each(lambda m: modules(m, RMSNorm, "r_norm"), "offset", 0.0)),
    "the last norm is": ("as published", lambda m: [(m.norm, "offset", 0.0)]),
    "q's and k's norms are": ("as published", each(lambda m: modules(m, RMSNorm, "k_norm"), "offset", 0.0)),
    "the gated norm is not": (
        "as published", each(lambda m: modules(m, GatedRMSNorm), "weight", lambda w: w + 1)
    ),
    "eps": ("as published", each(lambda m: modules(m, RMSNorm), "eps", 1e-6)),
    "the gated norm's eps": ("as published", each(lambda m: modules(m, GatedRMSNorm), "eps", 1e-6)),
    "the norm before its gate": ("as published", each(lambda m: modules(m, GatedRMSNorm), "before", False)),
    "attention's gate": ("as published", each(attentions, "gate", None)),
    "a part is rotated": ("as published", rotated(1.0)),
    "that part by default": ("otherwise", rotated(0.5, 10000.0)),
    "rotary": ("as published", each(attentions, "rotary", None)),
    "rope_theta": ("as published", rotated(0.5, 10000.0)),
    "q and k are normed": ("as published", each(attentions, "q_norm", None)),
    "before they are rotated": ("as published", normed_late),
    "value heads side by side share a key head": ("as published", interleaved),
    "beta is at most one": ("as published", each(deltas, "negative", True)),
    "A": ("as published", each(deltas, "a_log", torch.zeros_like)),
    "the decay's bias": ("as published", each(deltas, "dt_bias", torch.zeros_like)),
    "SiLU after the convolution": (
        "as published", each(lambda m: [d.conv for d in deltas(m)], "activation", None)
    ),
    "weights of the chosen sum to one": ("as published", routed(normalise=False)),
    "or do not": ("otherwise", routed(normalise=True)),
    "how many are chosen": ("as published", routed(per_token=2)),
    "softmax": ("as published", routed(scores="sigmoid")),
    "the shared expert": ("as published", each(lambda m: modules(m, Experts), "shared", None)),
    "its gate": ("as published", each(lambda m: modules(m, Experts), "shared_gate", None)),
    "bias of q, k, v": (
        "otherwise", each(lambda m: [a.qkv for a in attentions(m)], "bias", torch.zeros_like)
    ),
    "bias of the gate": ("otherwise", each(lambda m: [a.gate for a in attentions(m)], "bias", None)),
    "bias of the output": ("otherwise", each(lambda m: [a.out for a in attentions(m)], "bias", None)),
    "untied head": ("as published", lambda m: [(m.head, "weight", m.embed.weight)]),
    "tied head": ("otherwise", lambda m: [(m.head, "weight", m.embed.weight.flip(0))]),
}  # fmt: skip


@pytest.mark.parametrize("point", ODD_POINTS)
def test_each_odd_point_moves_the_logits(point: str, twins: Twins) -> None:
    name, removals = ODD_POINTS[point]
    assert moved(twins(name), removals) > 1e-3, f"{name} does not notice that {point} is gone"


@pytest.mark.parametrize(
    ("ours", "names"),
    [
        ("mixer.in_proj", ["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"]),
        ("mixer.qkv", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    ],
)
def test_the_order_of_rows_in_a_file_moves_the_logits(ours: str, names: list[str], twins: Twins) -> None:
    assert moved(twins("as published"), unsorted(twins, ours, names)) > 1e-3


# -- config.json ----------------------------------------------------------------------------------


def test_the_older_keys_say_the_same() -> None:
    new = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"}
    raw = {**MODELS["qwen3_next"].raw, "rope_parameters": new}
    older = {k: v for k, v in raw.items() if k not in ("rope_parameters", "layer_types")}
    older |= {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "full_attention_interval": 2}
    a = read_config(Config, {**raw, "layer_types": [LINEAR, FULL, LINEAR]})
    b = read_config(Config, {**older, "rope_scaling": None})
    assert list(a.kinds) == list(b.kinds)
    rotary = [
        [m.rotary for m in ARCHITECTURE.build(config).mixers() if hasattr(m, "rotary")] for config in (a, b)
    ]
    assert rotary[0] == rotary[1] and rotary[0][0].dim == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": [LINEAR, FULL, "mamba"]}, r"layer_types has \['mamba'\]"),
        ({"layer_types": [LINEAR, FULL]}, "lists 2 layers"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.9}, "partial_rotary_factor both"),
        ({"hidden_size": 0}, "hidden_size: 0 where at least 1"),
        ({"linear_num_value_heads": 5}, "no multiple"),
        ({"num_experts_per_tok": 6}, "not as many"),
        ({"decoder_sparse_step": 0}, "a size is 0"),
        ({"full_attention_interval": 0, "layer_types": None}, "a size is 0"),
        ({"use_output_norm": True}, "use_output_norm = True is not understood"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ARCHITECTURE.build(read_config(Config, {**MODELS["qwen3_next"].raw, **change}))


def test_what_guesses_several_tokens_ahead_is_left_out(twins: Twins) -> None:
    rules = ARCHITECTURE.weights(twins("as published").ours.config)
    assert any(rule.dst == () and rule.slot("sources", "mtp.layers.0.mlp.gate.weight") for rule in rules)
