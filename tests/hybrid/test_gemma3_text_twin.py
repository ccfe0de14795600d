"""Gemma 3 beside transformers' own, its odd points one by one, and configs that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from constate.core.architecture import read_config
from constate.core.mlp import activation
from constate.core.model import Model
from constate.core.norms import RMSNorm
from constate.core.rotary import Rotary
from constate.hybrid.gemma3_text import ARCHITECTURE, Config
from tests.models import MODELS
from tests.test_twins import every, interleaved_heads, mixers, norms, parts, plain_frequencies, windows
from tests.twins import VOCAB, Removal, Twin, Twins, moved, same_decoding, same_export, same_forward

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=48, num_hidden_layers=3, intermediate_size=40, num_attention_heads=6,
    num_key_value_heads=2, head_dim=12, rms_norm_eps=1e-2, sliding_window=5, query_pre_attn_scalar=37,
    layer_types=[SLIDING, SLIDING, FULL],
    rope_parameters={
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0},
    },
)  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text": ("gemma3_text", GEMMA),
    "gemma3_text otherwise": (
        "gemma3_text",
        {
            **GEMMA,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": 5.0,
            "sliding_window": 20,
            "num_hidden_layers": 7,
            "layer_types": None,
        },
    ),
}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twin]:
    return Twins(CONFIGS, tmp_path_factory)


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_equals_the_twin(name: str, twin: Callable[[str], Twin]) -> None:
    same_forward(twin(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_equals_the_twin(name: str, twin: Callable[[str], Twin]) -> None:
    same_decoding(twin(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_go_back_as_they_came(name: str, twin: Callable[[str], Twin]) -> None:
    same_export(twin(name))


def rotary(kind: str, change: Callable[[Rotary], Rotary]) -> Callable[[Model], list[Removal]]:
    """`change` in the layers of this kind alone."""

    def removal(model: Model) -> list[Removal]:
        kinds = zip(mixers(model), model.config.kinds, strict=True)
        return [(m, "rotary", change(m.rotary)) for m, its in kinds if its == kind]

    return removal


def base(theta: float) -> Callable[[Rotary], Rotary]:
    return lambda r: replace(r, frequencies=plain_frequencies(r, theta))


def post(name: str) -> Callable[[Model], list[Removal]]:
    """Without the norm behind this branch, which the branch's record holds."""

    def removal(model: Model) -> list[Removal]:
        posts = {id(m) for path, m in model.named_modules() if path.endswith(f".{name}_post")}
        plain = [replace(b, post=None) if id(b.post) in posts else b for b in model.branches]
        return [(model, "branches", tuple(plain))]

    return removal


def act(name: str) -> Callable[[Model], list[Removal]]:
    return lambda model: [(block.mlp, "act", activation(name)) for block in model.blocks]


def only(kind: type[Any], get: Callable[[Model], list[Any]]) -> Callable[[Model], list[Any]]:
    return lambda model: [m for m in get(model) if isinstance(m, kind)]


ODD_POINTS: dict[str, tuple[str, Callable[[Model], list[Removal]]]] = {
    "the base of the layers with a window": ("gemma3_text", rotary(SLIDING, base(1000.0))),
    "the base of the full layers": ("gemma3_text", rotary(FULL, lambda r: base(100.0)(r))),
    "the scaling of the full layers": ("gemma3_text", rotary(FULL, base(1000.0))),
    "no scaling of the others": (
        "gemma3_text",
        rotary(SLIDING, lambda r: replace(r, frequencies=tuple(f / 3 for f in r.frequencies))),
    ),
    "the window": ("gemma3_text", windows(lambda i, w: None)),
    "the window to the token": ("gemma3_text", windows(lambda i, w: w and w + 1)),
    "full layers": ("gemma3_text", windows(lambda i, w: 5)),
    "every sixth layer is full": ("gemma3_text otherwise", windows(lambda i, w: 20)),
    "and only the sixth": ("gemma3_text otherwise", windows(lambda i, w: None if i == 6 else w)),
    "the norm of q": ("gemma3_text", every(parts("mixer.q_norm"), "weight", torch.zeros_like)),
    "the norm of k": ("gemma3_text", every(parts("mixer.k_norm"), "weight", torch.zeros_like)),
    "the norms of q and k at all": ("gemma3_text", every(mixers, "q_norm", lambda norm: None)),
    "weights are distances from one": ("gemma3_text", every(only(RMSNorm, norms), "offset", 0.0)),
    "also in q's and k's norm": ("gemma3_text", every(parts("mixer.q_norm"), "offset", 0.0)),
    "the norms' eps": ("gemma3_text", every(norms, "eps", 1e-6)),
    "the norm behind attention": ("gemma3_text", post("mixer")),
    "the norm behind the MLP": ("gemma3_text", post("mlp")),
    "query_pre_attn_scalar": ("gemma3_text", every(mixers, "scale", 12**-0.5)),
    "tanh-GELU": ("gemma3_text", act("silu")),
    "tanh-GELU, not erf-GELU": ("gemma3_text", act("gelu")),
    "the embedding's scale": ("gemma3_text", lambda m: [(m, "embed_scale", 1.0)]),
    "the embedding's scale, not the head's": (
        "gemma3_text",
        lambda m: [(m.head, "weight", m.embed.weight * math.sqrt(48))],
    ),
    "grouped key heads": ("gemma3_text", interleaved_heads),
    "a cap on the logits": ("gemma3_text otherwise", lambda m: [(m, "logit_cap", None)]),
    "an untied head": ("gemma3_text otherwise", lambda m: [(m.head, "weight", m.embed.weight)]),
    "a bias on q, k, v": ("gemma3_text otherwise", every(parts("mixer.qkv"), "bias", None)),
    "a bias on the output": ("gemma3_text otherwise", every(parts("mixer.out"), "bias", None)),
}


@pytest.mark.parametrize("point", ODD_POINTS)
def test_each_odd_point_moves_the_logits(point: str, twin: Callable[[str], Twin]) -> None:
    name, removals = ODD_POINTS[point]
    far = moved(twin(name), removals)
    assert far > 1e-3, f"{name} does not notice that {point} is gone ({far:.1e})"


def test_older_configs_mean_the_same() -> None:
    """rope_theta, rope_local_base_freq, rope_scaling and sliding_window_pattern, as the first files have."""
    old = {
        "num_hidden_layers": 4,
        "sliding_window_pattern": 2,
        "rope_theta": 2000.0,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "cache_implementation": "hybrid",
    }
    config = read_config(Config, old)
    assert config.kinds == [SLIDING, FULL, SLIDING, FULL]
    assert config.ropes == {
        SLIDING: {"rope_theta": 50.0},
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 2000.0},
    }
    published = read_config(Config, {})
    assert [i for i, kind in enumerate(published.kinds) if kind == FULL] == [5, 11, 17, 23]
    assert [published.ropes[kind]["rope_theta"] for kind in (SLIDING, FULL)] == [1e4, 1e6]


@pytest.mark.parametrize(
    ("over", "fact"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention true"),
        ({"layer_types": [SLIDING, "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": [SLIDING]}, "layer_types lists 1 layers"),
        ({"sliding_window": None}, "no window is in use"),
        ({"hidden_activation": "mish"}, "activation 'mish' is not known"),
        ({"rope_parameters": {"chunked_attention": {}}}, "chunked_attention"),
        ({"rope_parameters": {FULL: {"rope_type": "dynamic"}}}, "'dynamic'"),
        ({"rope_theta": 5.0}, "full_attention|rope_theta both"),
        ({"attention_chunk_size": 128}, "attention_chunk_size = 128 is not understood"),
    ],
)
def test_what_it_does_not_know_is_refused_by_name(over: dict[str, Any], fact: str) -> None:
    raw = {**MODELS["gemma3_text"].raw, "layer_types": [SLIDING, FULL], "num_hidden_layers": 2, **over}
    with pytest.raises(ValueError, match=fact):
        ARCHITECTURE.build(read_config(Config, raw))
