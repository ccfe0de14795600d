"""Falcon-H1 beside transformers' own, its odd points one by one, and configs that are refused.

transformers' one-token step ignores time_step_limit, which breaks law 1 (step folded over the tokens ==
forward): under a limit its whole forwards are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from constate.core.architecture import read_config
from constate.core.mixer import Call
from constate.core.model import Model
from constate.core.norms import GatedRMSNorm
from constate.hybrid.falcon_h1 import ARCHITECTURE, Config
from constate.spans import Spans
from tests.models import MODELS
from tests.referee import same_logits
from tests.test_twins import every, gates, interleaved_heads, norms, one_group, parts, plain_frequencies
from tests.twins import VOCAB, Removal, Twin, Twins, ids, moved, same_decoding, same_export, same_forward

FALCON: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, intermediate_size=40, num_attention_heads=6,
    num_key_value_heads=2, head_dim=12, rms_norm_eps=1e-2, rope_parameters={
        "rope_type": "default", "rope_theta": 100.0,
    },
    mamba_d_ssm=72, mamba_n_heads=6, mamba_d_head=12, mamba_n_groups=2, mamba_d_state=10, mamba_d_conv=3,
    mamba_chunk_size=16, mamba_rms_norm=True, mamba_norm_before_gate=False,
    embedding_multiplier=1.3, lm_head_multiplier=0.7, key_multiplier=0.6, attention_in_multiplier=1.1,
    attention_out_multiplier=0.8, ssm_in_multiplier=1.2, ssm_out_multiplier=0.9,
    ssm_multipliers=[0.9, 1.1, 0.7, 1.3, 0.6], mlp_multipliers=[0.8, 1.25],
)  # fmt: skip
BIASES = dict(
    attention_bias=True, mlp_bias=True, projectors_bias=True, mamba_proj_bias=True, mamba_conv_bias=False,
)  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_h1": ("falcon_h1", FALCON),
    "normed before its gate": ("falcon_h1", {**FALCON, "mamba_norm_before_gate": True, "mamba_n_groups": 3}),
    "only gated": ("falcon_h1", {**FALCON, **BIASES, "mamba_rms_norm": False, "tie_word_embeddings": True}),
    "limited": ("falcon_h1", {**FALCON, "time_step_limit": (0.2, 0.5)}),
}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twin]:
    return Twins(CONFIGS, tmp_path_factory)


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_equals_the_twin(name: str, twin: Callable[[str], Twin]) -> None:
    same_forward(twin(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_equals_the_twin(name: str, twin: Callable[[str], Twin]) -> None:
    same_decoding(twin(name), cached=name != "limited")


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_go_back_as_they_came(name: str, twin: Callable[[str], Twin]) -> None:
    same_export(twin(name))


def test_parameters_are_as_many(twin: Callable[[str], Twin]) -> None:
    pair = twin("only gated")
    ours, theirs = (sum(p.numel() for p in m.parameters()) for m in (pair.ours, pair.theirs))
    assert ours == theirs


# -- odd points ---------------------------------------------------------------------------------

SSM, ATTENTION = "mixer.ssm", "mixer.attention"
Of = Callable[[Model], list[Removal]]


def arm(at: int, factor: int, value: float) -> Of:
    """Arm `at` of each layer (0 the SSM, 1 attention) with `value` for the factor before (1) or after (2)."""

    def removal(model: Model) -> list[Removal]:
        taken: list[Removal] = []
        for both in parts("mixer")(model):
            arms = [list(a) for a in both.arms]
            arms[at][factor] = value
            taken.append((both, "arms", tuple(map(tuple, arms))))
        return taken

    return removal


def unscaled(part: int) -> Of:
    """z, x, B, C or dt without its multiplier."""

    def late(ssm: Any) -> Callable[[Tensor], Any]:
        right, scale = ssm._enter, FALCON["ssm_multipliers"][part]

        def enter(x: Tensor) -> Any:
            z, xbc, dt = right(x)
            x, b, c = xbc.split([ssm.inner, ssm.bc, ssm.bc], dim=-1)
            each = [z, x, b, c, dt]
            each[part] = each[part] / scale
            z, x, b, c, dt = each
            return z, torch.cat([x, b, c], dim=-1), dt

        return enter

    return lambda model: [(ssm, "_enter", late(ssm)) for ssm in parts(SSM)(model)]


def mlp_unscaled(model: Model) -> list[Removal]:
    return [(model, "branches", tuple(replace(b, scale=1.0) for b in model.branches))]


def one_after_the_other(model: Model) -> list[Removal]:
    """Attention reads what the SSM added."""

    def chained(both: Any) -> Callable[..., Tensor]:
        (ssm, a, b), (attention, c, d) = both.arms

        def run(x: Tensor, call: Call, state: Any = None) -> Tensor:
            said = b * ssm(a * x, call)
            return said + d * attention(c * (x + said), call)

        return run

    return [(both, "forward", chained(both)) for both in parts("mixer")(model)]


def rotary(theta: float | None) -> Of:
    def removal(model: Model) -> list[Removal]:
        plain = parts(ATTENTION)(model)[0].rotary
        new = theta and replace(plain, frequencies=plain_frequencies(plain, theta))
        return [(m, "rotary", new) for m in parts(ATTENTION)(model)]

    return removal


def gated_norm(model: Model) -> list[Removal]:
    return [(ssm, "norm", GatedRMSNorm(ssm.inner, 1e-2, groups=2)) for ssm in parts(SSM)(model)]


def scale(attention: float) -> Of:
    return every(parts(ATTENTION), "scale", attention)


ODD_POINTS: dict[str, tuple[str, Of]] = {
    "embedding_multiplier": ("falcon_h1", lambda m: [(m, "embed_scale", 1.0)]),
    "lm_head_multiplier": ("falcon_h1", lambda m: [(m, "logit_scale", 1.0)]),
    "key_multiplier": ("falcon_h1", scale(12**-0.5)),
    "ssm_in_multiplier": ("falcon_h1", arm(0, 1, 1.0)),
    "ssm_out_multiplier": ("falcon_h1", arm(0, 2, 1.0)),
    "attention_in_multiplier": ("falcon_h1", arm(1, 1, 1.0)),
    "attention_out_multiplier": ("falcon_h1", arm(1, 2, 1.0)),
    "z's multiplier": ("falcon_h1", unscaled(0)),
    "x's multiplier": ("falcon_h1", unscaled(1)),
    "B's multiplier": ("falcon_h1", unscaled(2)),
    "C's multiplier": ("falcon_h1", unscaled(3)),
    "dt's multiplier": ("falcon_h1", unscaled(4)),
    "the gate's multiplier": ("falcon_h1", every(parts("mlp"), "gate_scale", 1.0)),
    "the MLP's multiplier": ("falcon_h1", mlp_unscaled),
    "side by side": ("falcon_h1", one_after_the_other),
    "a gate before the norm": ("falcon_h1", every(gates, "before", True)),
    "a gate behind the norm": ("normed before its gate", every(gates, "before", False)),
    "no norm behind the gate": ("only gated", gated_norm),
    "the gated norm's groups": ("falcon_h1", every(gates, "groups", 1)),
    "the norms' eps": ("falcon_h1", every(norms, "eps", 1e-5)),
    "the gated norm's eps": ("falcon_h1", every(gates, "eps", 1e-5)),
    "groups of B and C": ("falcon_h1", one_group),
    "D": ("falcon_h1", every(parts(SSM), "d", torch.zeros_like)),
    "A": ("falcon_h1", every(parts(SSM), "a_log", torch.zeros_like)),
    "dt's bias": ("falcon_h1", every(parts(SSM), "dt_bias", torch.zeros_like)),
    "the convolution's bias": ("falcon_h1", every(parts(f"{SSM}.conv"), "bias", torch.zeros_like)),
    "no bias in the convolution": (
        "only gated",
        every(parts(f"{SSM}.conv"), "bias", nn.Parameter(torch.full((72 + 2 * 2 * 10,), 0.1))),
    ),
    "time_step_limit": ("limited", every(parts(SSM), "dt_limit", (0.0, math.inf))),
    "its lower end": ("limited", every(parts(SSM), "dt_limit", (0.0, 0.5))),
    "its upper end": ("limited", every(parts(SSM), "dt_limit", (0.2, math.inf))),
    "rotary positions": ("falcon_h1", rotary(None)),
    "rope_theta": ("falcon_h1", rotary(10000.0)),
    "grouped key heads": ("falcon_h1", interleaved_heads),
    "head_dim is not hidden / heads": ("falcon_h1", scale(0.6 * 8**-0.5)),
    "the untied head": ("falcon_h1", lambda m: [(m.head, "weight", m.embed.weight)]),
    "the tied head": ("only gated", lambda m: [(m.head, "weight", m.embed.weight.flip(0))]),
    "attention's bias": ("only gated", every(parts(f"{ATTENTION}.qkv"), "bias", None)),
    "attention's bias at its end": ("only gated", every(parts(f"{ATTENTION}.out"), "bias", None)),
    "mamba_proj_bias": ("only gated", every(parts(f"{SSM}.in_proj"), "bias", None)),
    "projectors_bias": ("only gated", every(parts(f"{SSM}.out_proj"), "bias", None)),
    "the MLP's bias": ("only gated", every(parts("mlp.gate_up"), "bias", None)),
    "the MLP's bias at its end": ("only gated", every(parts("mlp.down"), "bias", None)),
}


@pytest.mark.parametrize("point", ODD_POINTS)
def test_each_odd_point_moves_the_logits(point: str, twin: Callable[[str], Twin]) -> None:
    name, removals = ODD_POINTS[point]
    far = moved(twin(name), removals)
    assert far > 1e-3, f"{name} does not notice that {point} is gone ({far:.1e})"


def test_steps_keep_the_limits_that_the_twins_step_forgets(twin: Callable[[str], Twin]) -> None:
    """Law 1 holds for ours, and is what theirs breaks."""
    pair, prompt = twin("limited"), ids(20)
    cache, want = pair.ours.init_cache(1), pair.whole(prompt)
    same_logits(torch.cat([pair.ours.step(t[None], cache) for t in prompt]), want, "steps under the limits")
    with torch.no_grad():
        their = pair.theirs(prompt[None, :19], use_cache=True)
        kept = {"past_key_values": their["past_key_values"]}
        stepped = pair.theirs(prompt[None, 19:], use_cache=True, **kept).logits[0].float()
    with pytest.raises(AssertionError):
        same_logits(stepped, want[-1:], "their step")


# -- configs ------------------------------------------------------------------------------------


def test_a_published_config_of_before_transformers_5_is_read() -> None:
    """The keys and values of Falcon-H1-0.5B's config.json."""
    config = read_config(
        Config,
        {
            "model_type": "falcon_h1",
            "attn_layer_indices": None,
            "attention_bias": False,
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 0.9375,
            "embedding_multiplier": 5.656854249492381,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "key_multiplier": 0.39062499999999994,
            "lm_head_multiplier": 0.0390625,
            "mamba_chunk_size": 128,
            "mamba_d_head": 64,
            "mamba_d_ssm": 1536,
            "mamba_d_state": 128,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 24,
            "mamba_norm_before_gate": False,
            "mamba_rms_norm": False,
            "mamba_use_mlp": True,
            "max_position_embeddings": 16384,
            "mlp_expansion_factor": 8,
            "mlp_multipliers": [0.8838834764831844, 0.5859375],
            "num_attention_heads": 8,
            "num_hidden_layers": 36,
            "num_key_value_heads": 2,
            "num_logits_to_keep": 1,
            "projectors_bias": False,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 100000000000.0,
            "ssm_in_multiplier": 1.25,
            "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
            "ssm_out_multiplier": 0.23570226039551587,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 32784,
        },
    )
    assert (config.heads, config.inner, config.ssm.head_dim) == ((8, 2, 64), 1536, 64)
    assert config.rope == {"rope_theta": 1e11}
    assert config.attention.scale == pytest.approx(0.390625 / 8)


@pytest.mark.parametrize(
    ("over", "fact"),
    [
        ({"mamba_use_mlp": False}, "mamba_use_mlp false"),
        ({"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers .* 5 numbers are wanted"),
        ({"mlp_multipliers": [1.0]}, "mlp_multipliers .* 2 numbers are wanted"),
        ({"mamba_d_head": "half"}, "mamba_d_head 'half'"),
        ({"mamba_d_head": 9}, "are not the 48 channels"),
        ({"mamba_n_groups": 3}, "4 heads cannot share 3 groups"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic'"),
        ({"ssm_multipliers": ["one"] * 5}, "ssm_multipliers .* 5 numbers are wanted"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"sliding_window": 128}, "sliding_window = 128 is not understood"),
    ],
)
def test_what_it_does_not_know_is_refused_by_name(over: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        ARCHITECTURE.build(read_config(Config, {**MODELS["falcon_h1"].raw, **over}))


def test_an_empty_row_leaves_both_states_alone(twin: Callable[[str], Twin]) -> None:
    model = twin("falcon_h1").ours
    cache = model.init_cache(2)
    model(ids(9), Spans.of([9, 0]), cache)
    assert all(not t[1].any() for _, t, leaf in cache.leaves() if leaf.kind)
