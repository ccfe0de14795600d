"""DeepSeek-V3 beside transformers' own, its odd points one by one, and configs that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.core.architecture import read_config
from constate.core.experts import Experts, Router
from constate.core.model import Model
from constate.hybrid.deepseek_v3 import ARCHITECTURE, Config
from tests.models import MODELS
from tests.test_twins import every, mixers, norms, parts, plain_frequencies, rotary
from tests.twins import VOCAB, Removal, Twin, Twins, moved, same_decoding, same_export, same_forward

DEEPSEEK: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=48, num_hidden_layers=3, intermediate_size=40, first_k_dense_replace=1,
    num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=14, q_lora_rank=18, qk_nope_head_dim=10,
    qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=12, n_group=4, topk_group=2, num_experts_per_tok=3,
    moe_intermediate_size=20, n_shared_experts=2, routed_scaling_factor=1.7, rms_norm_eps=1e-2,
    max_position_embeddings=64,
)  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "deepseek_v3",
        {
            **DEEPSEEK,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
            "attention_bias": True,
        },
    ),
    "deepseek_v3 otherwise": (
        "deepseek_v3",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "norm_topk_prob": False,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
        },
    ),
}


def finish(theirs: Any) -> None:
    """The corrections are buffers of zero; sigmoids apart enough that they do not change every choice."""
    g = torch.Generator().manual_seed(6)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=g))


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twin]:
    return Twins(CONFIGS, tmp_path_factory, finish)


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_equals_the_twin(name: str, twin: Callable[[str], Twin]) -> None:
    same_forward(twin(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_equals_the_twin(name: str, twin: Callable[[str], Twin]) -> None:
    """Our absorbed steps beside theirs, which expand every latent of the past."""
    same_decoding(twin(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_go_back_as_they_came(name: str, twin: Callable[[str], Twin]) -> None:
    same_export(twin(name))


# -- every odd point is seen ------------------------------------------------------------------------


def routers(model: Model) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, Router)]


def experts(model: Model) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, Experts)]


def routed(**fields: Any) -> Callable[[Model], list[Removal]]:
    """Routers with other settings."""
    return lambda model: [(r, "spec", replace(r.spec, **fields)) for r in routers(model)]


def corrected_weights(model: Model) -> list[Removal]:
    """Experts weighed by what they were chosen by."""

    def faulty(router: Router) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        right = router.forward

        def call(x: Tensor) -> tuple[Tensor, Tensor]:
            chosen, _ = right(x)
            assert router.correction is not None
            weights = ((x @ router.weight.T).sigmoid() + router.correction).gather(1, chosen)
            return chosen, weights / weights.sum(-1, keepdim=True) * router.spec.scale

        return call

    return [(r, "forward", faulty(r)) for r in routers(model)]


def groups_by_their_best(model: Model) -> list[Removal]:
    def faulty(router: Router) -> Callable[[Tensor], Tensor]:
        def call(appeal: Tensor) -> Tensor:
            grouped = appeal.unflatten(-1, (router.spec.groups, -1))
            best = grouped.amax(-1).topk(router.spec.kept_groups, dim=-1).indices
            out = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, False)
            return grouped.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(1)

        return call

    return [(r, "_within_groups", faulty(r)) for r in routers(model)]


def one_shared_expert(model: Model) -> list[Removal]:
    """The first half of the shared MLP alone."""
    half = model.config.moe_intermediate_size
    return [
        (
            e.shared.down,
            "weight",
            torch.cat([e.shared.down.weight[:, :half], 0 * e.shared.down.weight[:, half:]], 1),
        )
        for e in experts(model)
    ]


def as_in_the_file(model: Model) -> list[Removal]:
    """The shared channels in the order of an interleaving file, turned in halves all the same."""
    config = model.config
    keys, shared, h = config.qk_nope_head_dim, config.qk_rope_head_dim, config.num_attention_heads
    back = torch.arange(shared).unflatten(0, (2, -1)).T.flatten()
    each = torch.cat([torch.arange(keys), keys + back])
    queries = (torch.arange(h)[:, None] * (keys + shared) + each).flatten()
    removals: list[Removal] = []
    for mixer in mixers(model):
        rows = len(mixer.in_proj.weight)
        order = torch.cat([torch.arange(rows - shared), rows - shared + back])
        removals += [
            (mixer.in_proj, part, getattr(mixer.in_proj, part)[order]) for part in ("weight", "bias")
        ]
        removals.append((mixer.q_proj, "weight", mixer.q_proj.weight[queries]))
    return removals


ODD_POINTS: dict[str, tuple[str, Callable[[Model], list[Removal]]]] = {
    "the latents' norm": ("deepseek_v3", every(parts("mixer.norm"), "weight", torch.ones_like)),
    "the query latents' norm": ("deepseek_v3", every(parts("mixer.q_norm"), "weight", torch.ones_like)),
    "the latents' eps": ("deepseek_v3", every(parts("mixer.norm"), "eps", 1e-2)),
    "the query latents' eps": ("deepseek_v3", every(parts("mixer.q_norm"), "eps", 1e-2)),
    "the other norms' eps": ("deepseek_v3", every(norms, "eps", 1e-6)),
    "rotary": ("deepseek_v3", every(mixers, "rotary", None)),
    "neighbouring channels turn together": ("deepseek_v3", as_in_the_file),
    "yarn's frequencies": ("deepseek_v3", rotary(frequencies=plain_frequencies)),
    "yarn's mscale": ("deepseek_v3", rotary(factor=lambda r: 1.0)),
    "yarn's mscale_all_dim in the scores": ("deepseek_v3", every(mixers, "scale", 18**-0.5)),
    "scores scaled by both kinds of channels": ("deepseek_v3 otherwise", every(mixers, "scale", 10**-0.5)),
    "sigmoid scores": ("deepseek_v3", routed(scores="softmax")),
    "a correction in the choice": ("deepseek_v3", every(routers, "correction", torch.zeros_like)),
    "and in the choice alone": ("deepseek_v3", corrected_weights),
    "groups": ("deepseek_v3", routed(groups=1, kept_groups=1)),
    "as many groups": ("deepseek_v3", routed(kept_groups=3)),
    "groups judged by two": ("deepseek_v3", groups_by_their_best),
    "as many experts": ("deepseek_v3", routed(per_token=2)),
    "norm_topk_prob": ("deepseek_v3", routed(normalise=False)),
    "no norm_topk_prob": ("deepseek_v3 otherwise", routed(normalise=True)),
    "routed_scaling_factor": ("deepseek_v3", routed(scale=1.0)),
    "the shared experts": ("deepseek_v3", every(experts, "shared", None)),
    "both shared experts": ("deepseek_v3", one_shared_expert),
    "a bias on the first product": ("deepseek_v3", every(parts("mixer.in_proj"), "bias", None)),
    "a bias on the output": ("deepseek_v3", every(parts("mixer.out"), "bias", None)),
    "an untied head": ("deepseek_v3", lambda m: [(m.head, "weight", m.embed.weight)]),
}


@pytest.mark.parametrize("point", ODD_POINTS)
def test_each_odd_point_moves_the_logits(point: str, twin: Callable[[str], Twin]) -> None:
    name, removals = ODD_POINTS[point]
    far = moved(twin(name), removals)
    assert far > 1e-3, f"{name} does not notice that {point} is gone ({far:.1e})"


def test_the_first_release_reads_the_same() -> None:
    """Its config.json, whose rope_scaling is of the older dialect and whose router is named by its keys."""
    yarn = {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
    older = {
        "rope_theta": 10000,
        "rope_scaling": {**yarn, "type": "yarn", "beta_fast": 32, "beta_slow": 1},
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "ep_size": 1,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 163840,
    }
    config = read_config(Config, older)
    assert config.scale == pytest.approx(192**-0.5 * 1.3688879**2)
    assert config.latent.rope == {
        **yarn,
        "type": "yarn",
        "rope_theta": 10000,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    assert config.experts.groups == 8 and config.experts.shared == 2048


@pytest.mark.parametrize(
    ("over", "fact"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"num_key_value_heads": 1}, "num_key_value_heads 1 of 3 heads"),
        ({"n_group": 3}, "8 experts in 3 groups"),
        ({"num_experts_per_tok": 5}, "there are not as many"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic'"),
        ({"q_lora_rank": None}, "attention_bias true with q_lora_rank null"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"index_topk": 2048}, "index_topk = 2048 is not understood"),
        ({"hidden_act": "mish"}, "activation 'mish' is not known"),
    ],
)
def test_what_it_does_not_know_is_refused_by_name(over: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        ARCHITECTURE.build(read_config(Config, {**MODELS["deepseek_v3"].raw, **over}))
