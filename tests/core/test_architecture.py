"""Reading config.json: types, required keys, and that no key which changes the maths passes unseen."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from constate.core.architecture import NEUTRAL, NO_EFFECT, Architecture, read_config, write_config
from constate.loading import find
from tests.models import MODELS


@dataclass(frozen=True)
class Config:
    hidden_size: int
    num_layers: int
    eps: float = 1e-5
    tied: bool = False
    act: str = "silu"
    head_dim: int | None = None
    window: float | None = None
    limit: tuple[float, float] = (0.0, math.inf)
    rope: Mapping[str, Any] | None = None


BASE = {"model_type": "toy", "hidden_size": 8, "num_layers": 2}


def test_fields_defaults_and_types():
    config = read_config(Config, {**BASE, "eps": 1, "head_dim": None, "window": 3, "rope": {"theta": [1, 2]}})
    assert config == Config(8, 2, eps=1.0, window=3.0, rope={"theta": (1, 2)})
    assert type(config.window) is int  # written back as it was: transformers refuses 2.0 for its integers
    assert type(read_config(Config, BASE | {"hidden_size": 8.0}).hidden_size) is int


@pytest.mark.parametrize("text", ['[0.0, {"__float__": "Infinity"}]', "[0.0, Infinity]"])
def test_infinity_in_both_spellings(text: str):
    """transformers 5 writes the first, earlier versions the second."""
    assert read_config(Config, {**BASE, "limit": json.loads(text)}).limit == (0.0, math.inf)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", "8", "hidden_size: '8' where int is wanted"),
        ("hidden_size", True, "hidden_size: True where int is wanted"),
        ("hidden_size", 8.5, "hidden_size: 8.5 where int is wanted"),
        ("hidden_size", None, "hidden_size: None where int is wanted"),
        ("tied", 1, "tied: 1 where bool is wanted"),
        ("head_dim", "x", "head_dim: 'x' where int or null is wanted"),
        ("window", [1], "window"),
        ("hidden_size", -1, "hidden_size: -1 where at least 0 is wanted"),
        ("head_dim", -4, "head_dim: -4 where at least 0 is wanted"),
        ("rope", "linear", "rope: 'linear' where object or null is wanted"),
        ("rope", [1], "where object or null is wanted"),
        ("limit", 3, "limit: 3 where list is wanted"),
        ("limit", "ab", "limit: 'ab' where list is wanted"),
        ("eps", "small", "eps: 'small' where float is wanted"),
        ("logit_softcap", 30.0, "logit_softcap = 30.0 is not understood"),
        ("hiden_size", 9, "hiden_size = 9 is not understood .near 'hidden_size', which is known."),
        ("attention_bias", True, "attention_bias = True is not supported; only False is"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor = 0.5 is not supported; only 1.0 is"),
        ("quantization_config", {"bits": 4}, "quantization_config = .* is not understood"),
    ],
)
def test_a_key_that_is_wrong_or_not_understood(key: str, value: Any, message: str):
    with pytest.raises(ValueError, match=message):
        read_config(Config, BASE | {key: value})


def test_every_fault_is_named_at_once():
    with pytest.raises(ValueError) as raised:
        read_config(Config, {"model_type": "toy", "tied": 3, "odd": 1})
    assert all(
        part in str(raised.value)
        for part in ("'toy'", "tied: 3", "odd = 1", "missing: hidden_size, num_layers")
    )


def test_what_leaves_the_maths_alone_passes():
    idle = {key: object() for key in NO_EFFECT}
    assert read_config(Config, {**idle, **NEUTRAL, **BASE, "unheard_of": None}) == Config(8, 2)
    assert not NO_EFFECT & NEUTRAL.keys()


def test_a_field_comes_before_the_house_list():
    @dataclass(frozen=True)
    class Odd:
        chunk_size: int
        attention_bias: bool

    assert read_config(Odd, {"chunk_size": 4, "attention_bias": True}) == Odd(4, True)


def test_a_config_s_own_check_is_heard():
    @dataclass(frozen=True)
    class Picky:
        heads: int

        def __post_init__(self) -> None:
            if self.heads % 2:
                raise ValueError(f"heads {self.heads} is odd")

    with pytest.raises(ValueError, match="heads 3 is odd"):
        read_config(Picky, {"heads": 3})


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("gla", "num_heads", 0),
        ("gla", "attn", {"layers": 1, "num_heads": 4}),
        ("gla", "attn", {"layers": ["0"], "num_heads": 4}),
        ("gla", "attn", [3]),
        ("rwkv7", "value_dim", ["a", "a", "a"]),
        ("rwkv7", "hidden_size", 0),
    ],
)
def test_what_stands_inside_a_value_is_refused_as_a_request(model_type: str, key: str, value: Any):
    """As ValueError, which the command line says in one line; anything else is a traceback there."""
    config = find(model_type).architecture.Config
    read_config(config, MODELS[model_type].raw)
    with pytest.raises(ValueError, match=f"config.json of model_type '{model_type}'"):
        read_config(config, {**MODELS[model_type].raw, key: value})


@pytest.mark.parametrize("limit", [[1], [0.0, 0.1, 0.2], []])
def test_a_limit_has_two_ends(limit: list[float]):
    with pytest.raises(ValueError, match=r"time_step_limit .*: a low and a high one are wanted"):
        read_config(find("mamba2").architecture.Config, {**MODELS["mamba2"].raw, "time_step_limit": limit})


def test_write_config_is_read_back():
    config = Config(8, 2, head_dim=4, rope={"type": "linear", "factor": 2.0})
    written = write_config(config, "toy")
    assert written["model_type"] == "toy"
    assert "window" not in written
    assert read_config(Config, json.loads(json.dumps(written))) == config


def test_decode_is_autoregressive_unless_said_otherwise():
    from constate.core import decode

    arch = Architecture("toy", Config, lambda config: config, lambda config: [])
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "autoregressive", lambda *args, **options: seen.append((args, options)))
        arch.decode(1, seed=2)
    assert seen == [((1,), {"seed": 2})]
