"""Nemotron-H beside transformers' own, and what each of its odd points does to the logits.

transformers' one-token step forgets that a step size is at least `time_step_min`, which its forward over
several tokens keeps: it breaks law 1. Where steps are small enough to tell, its whole forward is the judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.core.architecture import read_config
from constate.core.experts import Experts
from constate.core.mlp import MLP
from constate.core.model import Model
from constate.core.norms import GatedRMSNorm, RMSNorm
from constate.core.rotary import Rotary
from constate.hybrid.nemotron_h import ARCHITECTURE, Config
from tests.models import MODELS
from tests.twins import Removal, Removals, Twins, ids, moved, same_decoding, same_export, same_forward

MAMBA, ATTENTION = "linear_attention", "full_attention"
SETTINGS = dict(
    vocab_size=97, hidden_size=48, layers_block_type=[MAMBA, "mlp", ATTENTION, "moe", MAMBA, "moe"],
    num_attention_heads=6, num_key_value_heads=2, head_dim=12, intermediate_size=40, ssm_state_size=12,
    mamba_num_heads=6, mamba_head_dim=8, n_groups=3, conv_kernel=3, chunk_size=16, n_routed_experts=8,
    moe_intermediate_size=20, moe_shared_expert_intermediate_size=28, num_experts_per_tok=3,
    routed_scaling_factor=1.7, n_group=4, topk_group=2, layer_norm_epsilon=1e-2,
)  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "as published": ("nemotron_h", SETTINGS),
    "otherwise": ("nemotron_h", {
        **SETTINGS, "mlp_bias": True, "use_bias": True, "use_conv_bias": False, "moe_latent_size": 24,
        "norm_topk_prob": False, "n_group": 1, "topk_group": 1, "conv_kernel": 4,
    }),
    "short steps": ("nemotron_h", {**SETTINGS, "time_step_min": 0.2}),
}  # fmt: skip
WHOLE_ONLY = "short steps"


def corrected(theirs: Any) -> None:
    """The routers' corrections are buffers, which begin as zeros."""
    for i, (name, buffer) in enumerate(theirs.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.4 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(i)))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return Twins(CONFIGS, tmp_path_factory, corrected)


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_equals_the_twin(name: str, twins: Twins) -> None:
    same_forward(twins(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_equals_the_twin(name: str, twins: Twins) -> None:
    same_decoding(twins(name), cached=name != WHOLE_ONLY)


@torch.no_grad()
def test_their_step_forgets_the_least_step_size(twins: Twins) -> None:
    """Why that twin is judged by whole forwards. If this fails, it can be judged as the others are."""
    theirs, prompt = twins(WHOLE_ONLY).theirs, ids(20)
    read = theirs(prompt[None, :-1], use_cache=True)
    step = theirs(prompt[None, -1:], use_cache=True, past_key_values=read["past_key_values"]).logits[0]
    assert (step - twins(WHOLE_ONLY).whole(prompt)[-1:]).abs().max() > 1e-2


@pytest.mark.parametrize("name", CONFIGS)
def test_the_file_comes_back(name: str, twins: Twins) -> None:
    same_export(twins(name))


# -- every odd point is seen ----------------------------------------------------------------------


def modules(model: Model, kind: type[Any]) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, kind)]


def ssms(model: Model) -> list[Any]:
    return [m for m in model.mixers() if hasattr(m, "a_log")]


def attentions(model: Model) -> list[Any]:
    return [m for m in model.mixers() if hasattr(m, "rotary")]


def gates(model: Model) -> list[Any]:
    return modules(model, GatedRMSNorm)


def experts(model: Model) -> list[Any]:
    return modules(model, Experts)


def each(get: Callable[[Model], list[Any]], name: str, value: Any) -> Removals:
    def removals(model: Model) -> list[Removal]:
        return [(o, name, value(getattr(o, name)) if callable(value) else value) for o in get(model)]

    return removals


def routed(**change: Any) -> Removals:
    """Another spec in every layer of experts, and in its router."""

    def removals(model: Model) -> list[Removal]:
        owners = [*experts(model), *(layer.router for layer in experts(model))]
        return [(owner, "spec", replace(owner.spec, **change)) for owner in owners]

    return removals


def one_group(model: Model) -> list[Removal]:
    scan = model.ops.gated_linear_scan

    def first(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
        return scan(q[:, :1].expand_as(q), k[:, :1].expand_as(k), *rest, **options)

    return [(model, "ops", replace(model.ops, gated_linear_scan=first))]


def weighed_by_choice(model: Model) -> list[Removal]:
    """The correction enters the weights too."""

    def wrong(router: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        right = router.forward

        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            chosen, _ = right(x)
            scores = (x @ router.weight.T).sigmoid() + router.correction
            weights = scores.gather(1, chosen)
            return chosen, router.spec.scale * weights / weights.sum(-1, keepdim=True)

        return forward

    return [(layer.router, "forward", wrong(layer.router)) for layer in experts(model)]


def unbiased(layer: torch.nn.Linear) -> torch.nn.Linear:
    bare = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
    bare.weight = layer.weight
    return bare


RELU, ROTARY = torch.nn.functional.relu, Rotary.of({"rope_theta": 10000.0}, 12)
ODD_POINTS: dict[str, tuple[str, Removals]] = {
    "attention has no rotary": ("as published", each(attentions, "rotary", ROTARY)),
    "relu is squared in MLPs": ("as published", each(lambda m: modules(m, MLP), "act", lambda act: RELU)),
    "and in experts": ("as published", each(experts, "act", lambda act: RELU)),
    "the least step": ("short steps", each(ssms, "dt_limit", (0.0, math.inf))),
    "which is that of the config": ("as published", each(ssms, "dt_limit", (0.2, math.inf))),
    "groups of B and C": ("as published", one_group),
    "gated norm a group": ("as published", each(gates, "groups", 1)),
    "gate before norm": ("as published", each(gates, "before", True)),
    "the gated norm's eps": ("as published", each(gates, "eps", 1e-5)),
    "eps": ("as published", each(lambda m: modules(m, RMSNorm), "eps", 1e-5)),
    "A": ("as published", each(ssms, "a_log", torch.zeros_like)),
    "D": ("as published", each(ssms, "d", torch.zeros_like)),
    "dt bias": ("as published", each(ssms, "dt_bias", torch.zeros_like)),
    "conv bias": ("as published", each(lambda m: [s.conv for s in ssms(m)], "bias", torch.zeros_like)),
    "no conv bias": (
        "otherwise",
        each(lambda m: [s.conv for s in ssms(m)], "bias", torch.nn.Parameter(torch.full((120,), 0.1))),
    ),
    "SiLU after the convolution": (
        "as published", each(lambda m: [s.conv for s in ssms(m)], "activation", None)
    ),
    "bias into the recurrence": ("otherwise", each(lambda m: [s.in_proj for s in ssms(m)], "bias", None)),
    "bias out of it": ("otherwise", each(lambda m: [s.out_proj for s in ssms(m)], "bias", None)),
    "bias of MLPs": ("otherwise", each(lambda m: modules(m, MLP)[:1], "down", unbiased)),
    "bias of the shared expert": (
        "otherwise", each(lambda m: [e.shared for e in experts(m)], "up", unbiased)
    ),
    "bias into the latent": ("otherwise", each(lambda m: [e.latent_in for e in experts(m)], "bias", None)),
    "bias out of it again": ("otherwise", each(lambda m: [e.latent_out for e in experts(m)], "bias", None)),
    "the shared expert": ("as published", each(experts, "shared", None)),
    "sigmoid": ("as published", routed(scores="softmax")),
    "weights of the chosen sum to the scale": ("as published", routed(normalise=False)),
    "or do not": ("otherwise", routed(normalise=True)),
    "the scale": ("as published", routed(scale=1.0)),
    "groups of experts": ("as published", routed(groups=1, kept_groups=1)),
    "how many groups are kept": ("as published", routed(kept_groups=3)),
    "no groups": ("otherwise", routed(groups=4, kept_groups=2)),
    "the correction": (
        "as published", each(lambda m: [e.router for e in experts(m)], "correction", torch.zeros_like)
    ),
    "it has no say in the weights": ("as published", weighed_by_choice),
    "untied head": ("as published", lambda m: [(m.head, "weight", m.embed.weight)]),
}  # fmt: skip


@pytest.mark.parametrize("point", ODD_POINTS)
def test_each_odd_point_moves_the_logits(point: str, twins: Twins) -> None:
    name, removals = ODD_POINTS[point]
    assert moved(twins(name), removals) > 1e-3, f"{name} does not notice that {point} is gone"


# -- config.json ----------------------------------------------------------------------------------


def test_the_older_keys_say_the_same() -> None:
    raw = MODELS["nemotron_h"].raw
    older = {k: v for k, v in raw.items() if k not in ("layers_block_type", "head_dim")}
    older |= {"hybrid_override_pattern": "M-*EM", "attention_head_dim": 8, "num_hidden_layers": 5}
    listed = {**raw, "layers_block_type": ["mamba", "mlp", "attention", "moe", "mamba"]}
    new, old, named = (read_config(Config, each) for each in (raw, older, listed))
    assert new.kinds == old.kinds == named.kinds
    assert new.attention == old.attention and new.ssm == old.ssm and new.experts == old.experts


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers_block_type": [MAMBA, "rwkv"]}, "a layer is 'rwkv'"),
        ({"layers_block_type": None, "hybrid_override_pattern": "M-X"}, "a layer is 'X'"),
        ({"layers_block_type": []}, "0 layers are listed"),
        ({"layers_block_type": None}, "0 layers are listed"),
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4"),
        ({"hybrid_override_pattern": "M*-"}, "hybrid_override_pattern list other layers"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu'"),
        ({"attention_head_dim": 16}, "which"),
        ({"rms_norm_eps": 1e-6}, "which"),
        ({"time_step_limit": [0.01, 0.2]}, "time_step_limit"),
        ({"n_shared_experts": 2}, "n_shared_experts 2"),
        ({"n_group": 3}, "groups of one size"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"sliding_window": 8}, "sliding_window = 8 is not understood"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias = True is not supported"),
        ({"mlp_hidden_act": "mish"}, "'mish' is not known"),
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ARCHITECTURE.build(read_config(Config, {**MODELS["nemotron_h"].raw, **change}))
