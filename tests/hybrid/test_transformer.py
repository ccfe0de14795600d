"""The transformer families' configs: what is published, which layers get a window, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from constate.core.architecture import read_config, write_config
from constate.core.attention import Attention
from constate.core.weights import export, fill
from constate.loading import find
from tests.models import MODELS, WINDOW, make

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 7}
S, F = "sliding_attention", "full_attention"

# config.json in the form in which these were published, with the keys of transformers 4.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896,
        "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
        "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen/Qwen3-0.6B": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "mistralai/Mistral-7B-v0.1": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
}  # fmt: skip


def config_of(model_type: str, **keys: Any) -> Any:
    return read_config(find(model_type).architecture.Config, {**SMALL, "model_type": model_type, **keys})


@pytest.mark.parametrize(
    ("name", "window", "heads", "theta"),
    [
        ("Qwen/Qwen2.5-0.5B", None, (14, 2, 64), 1e6),
        ("Qwen/Qwen3-0.6B", None, (16, 8, 128), 1e6),
        ("mistralai/Mistral-7B-v0.1", 4096, (32, 8, 128), 1e4),
    ],
)
def test_what_is_published_is_understood(
    name: str, window: int | None, heads: tuple[int, int, int], theta: float
) -> None:
    raw = PUBLISHED[name]
    config = read_config(find(raw["model_type"]).architecture.Config, raw)
    assert set(config.traits.windows) == {window}
    assert config.heads == heads
    assert config.rope["rope_theta"] == theta


@pytest.mark.parametrize(
    ("model_type", "keys", "windows"),
    [
        ("mistral", {}, [4096] * 4),  # transformers' default where the key is absent
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("qwen2", {}, [None] * 4),
        ("qwen2", {"sliding_window": 7}, [None] * 4),
        ("qwen2", {**SLIDING, "max_window_layers": 1}, [None, 7, 7, 7]),
        ("qwen2", {**SLIDING, "max_window_layers": 0}, [7] * 4),
        ("qwen2", SLIDING, [None] * 4),  # max_window_layers is 28
        ("qwen3", {**SLIDING, "layer_types": [S, F, S, F], "max_window_layers": 0}, [7, None, 7, None]),
        ("qwen3", {**SLIDING, "sliding_window": None, "max_window_layers": 0}, [None] * 4),
    ],
)
def test_windows_by_layer(model_type: str, keys: dict[str, Any], windows: list[int | None]) -> None:
    config = config_of(model_type, **keys)
    model = find(model_type).architecture.build(config)
    assert [m.window for m in model.mixers() if isinstance(m, Attention)] == windows
    again = read_config(type(config), write_config(config, model_type))
    assert again == config


@pytest.mark.parametrize(
    ("model_type", "keys", "complaint"),
    [
        ("qwen2", {"layer_types": [F, F]}, "layer_types lists 2 layers, num_hidden_layers is 4"),
        ("qwen2", {"layer_types": [S, F, F, F]}, "no window is in use"),
        ("qwen3", {**SLIDING, "layer_types": [F, "chunked_attention", F, F]}, "chunked_attention"),
        ("qwen3", {**SLIDING, "sliding_window": 0, "max_window_layers": 0}, "window 0"),
        ("qwen2", {"use_mrope": True}, "use_mrope = True is not supported"),
        ("mistral", {"layer_types": [F] * 4}, "layer_types = .* is not understood"),
        ("mistral", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("mistral", {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    ],
)
def test_what_would_change_the_maths_is_refused(
    model_type: str, keys: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        find(model_type).architecture.build(config_of(model_type, **keys))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "retnet"])
def test_weights_go_there_and_back(name: str) -> None:
    """Every parameter out under the published names and in again, bit for bit."""
    model = make(name)
    params = dict(model.named_parameters())
    rules = find(name).architecture.weights(model.config)
    published = export(rules, params)
    assert not any(key.startswith("blocks.") for key in published)
    again = fill(rules, published, {key: p.shape for key, p in params.items()})
    assert again.keys() == params.keys()
    assert all(bool((again[key] == p).all()) for key, p in params.items())


def test_a_window_bounds_the_cache() -> None:
    """Mistral's cache stops growing, which no full attention's does."""
    model = make("mistral")
    held = [model.cost(0, n).held["kv"] for n in (1, WINDOW, WINDOW + 1, 4000)]
    assert held == [MODELS["mistral"].ring * min(n, WINDOW) for n in (1, WINDOW, WINDOW + 1, 4000)]


@pytest.mark.parametrize(
    ("older", "odd"),
    [
        ({"rope_theta": 5000.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "factor"),
    ],
)
def test_two_rotary_dialects_that_disagree_are_refused(older: dict[str, Any], odd: str):
    """Of the two values of a key one would be ignored in silence, and transformers does not always read the
    same one. Where they agree, both may stand."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match=f"has {odd} both in rope_parameters and in the older"):
        config_of("llama", rope_parameters=rope, **older)
    assert config_of("llama", rope_parameters=rope, rope_scaling=rope, rope_theta=10000).rope == rope
