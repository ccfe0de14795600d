"""The speed bench: its arithmetic, its order and its check. Nothing here asserts a time."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.bench import shapes, speed
from constate.bench.engines import Ours
from constate.bench.hybrids import HYBRIDS
from constate.bench.machine import Machine
from constate.core.model import Model
from constate.diffusion_lm.plan import Plan
from constate.spans import Spans
from tests.models import HYBRIDS as TEN
from tests.models import MODELS

ROOT = Path(__file__).parents[2]
KEYS = (
    "model engine rows prompt new ttft_s itl_s prefill_tokens_per_s decode_tokens_per_s bytes_per_token "
    "bandwidth_fraction flops_fraction prefill_ratio decode_ratio backend dtype threads "
    "model_calls tokens_per_call between_commits_s decoding cache_differs"
)
TINY = {
    "mamba2": {
        **{"model_type": "mamba2", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2},
        **{"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "tie_word_embeddings": True},
    },
    "llama": {
        **{"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"tie_word_embeddings": True, "rope_theta": 10000.0},
    },
}


# What transformers' own classes ask of a size: grouped products of 16 bytes, and heads that divide the width;
# and where their steps are not their forward: zamba2's least step size, recurrent_gemma's other widths.
AS_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "zamba2": {"tie_word_embeddings": True, "time_step_min": 1e-4},
    "kimi_linear": {"moe_intermediate_size": 16},
    "recurrent_gemma": {"lru_width": 32},
    "gemma3_text": {"num_attention_heads": 4},
    "deepseek_v3": {"moe_intermediate_size": 16},
}


@pytest.fixture
def model() -> Model:
    return shapes.random_model(TINY["mamba2"])


class Fake:
    """An engine that writes down when it was called and answers with fixed logits."""

    backend = dtype = "fake"

    def __init__(self, name: str, calls: list[str], best: int = 1, off: float = 0.0, priced: Any = None):
        self.name, self.calls, self.priced = name, calls, priced
        self.logits = torch.zeros(5)
        self.logits[best] = 1.0
        self.logits += off

    @property
    def exact(self) -> "Fake":
        return self

    def prefill(self, tokens: Tensor) -> Tensor:
        self.calls.append(f"{self.name}{tokens.shape[1]}")
        return self.logits.expand(tokens.shape[0], -1)

    def step(self, tokens: Tensor) -> Tensor:
        return self.logits.expand(tokens.shape[0], -1)


def test_rows_have_their_keys_and_prices(model: Model):
    rows = list(speed.speed(model, "m", prompt=20, new=2, rows=(1, 3), rounds=2))
    assert [row["rows"] for row in rows] == [1, 3]
    for row in rows:
        assert list(row) == KEYS.split()
        assert (row["engine"], row["prefill_ratio"], row["decode_ratio"]) == ("constate", 1.0, 1.0)
        assert (row["model_calls"], row["tokens_per_call"], row["decoding"]) == (2, 1.0, None)
        assert row["between_commits_s"] == row["itl_s"]
        assert row["bytes_per_token"] == model.cost(1, 21, row["rows"]).traffic // row["rows"]
        assert min(row["bandwidth_fraction"], row["flops_fraction"]) > 0


def test_engines_take_turns(model: Model, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    monkeypatch.setattr(speed, "Ours", lambda model, new: Fake("a", calls, priced=model))
    monkeypatch.setattr(speed, "PEERS", {"b": lambda ours, source, new: Fake("b", calls, priced=source)})
    rows = list(speed.speed(model, "m", prompt=100, new=1, rounds=3, against=["b"]))
    assert calls == ["a64", "b64", *["a100", "b100"] * 3]
    assert [row["engine"] for row in rows] == ["a", "b"]


def test_rates_are_plain_arithmetic(model: Model):
    machine, took = Machine(bandwidth=1e9, flops=1e10), speed.Run(ttft=0.5, itl=0.01)
    rates = speed.rates(model, took, rows=2, prompt=100, new=10, machine=machine)
    assert rates["prefill_tokens_per_s"] == 400
    assert rates["decode_tokens_per_s"] == 200
    assert rates["bandwidth_fraction"] == pytest.approx(model.cost(1, 105, 2).traffic / 1e7)
    assert rates["flops_fraction"] == pytest.approx(model.cost(100, 0, 2).total_flops / 5e9)


@pytest.mark.parametrize(("peer", "said"), [({"best": 2}, "logits"), ({"off": 0.1}, "logits")])
def test_a_peer_that_computes_something_else_is_not_timed(peer: dict[str, Any], said: str):
    calls: list[str] = []
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    speed.compare(Fake("a", calls), Fake("b", calls), tokens, 2)
    with pytest.raises(speed.Disagreement, match=said):
        speed.compare(Fake("a", calls), Fake("b", calls, **peer), tokens, 2)


def test_our_engine_reads_in_pieces_as_one(model: Model, monkeypatch: pytest.MonkeyPatch):
    """Its logits are those of one plain forward, whatever the pieces."""
    tokens = torch.randint(0, 97, (2, 21))
    whole = model.forward(tokens.flatten(), Spans.of([21, 21]), at="last")
    monkeypatch.setattr("constate.bench.engines.PIECE", 8)
    engine = Ours(model, room=1)
    torch.testing.assert_close(engine.prefill(tokens), whole, atol=1e-4, rtol=0)
    longer = torch.cat([tokens, torch.tensor([[5], [6]])], 1)
    want = model.forward(longer.flatten(), Spans.of([22, 22]), at="last")
    torch.testing.assert_close(engine.step(torch.tensor([5, 6])), want, atol=1e-4, rtol=0)


def test_transformers_holds_the_same_weights():
    """In a process of its own: transformers is slow to import, and hides what is imported with it."""
    code = f"""
from constate.bench import shapes, speed
for name, raw in {TINY!r}.items():
    model = shapes.random_model(raw)
    options = dict(prompt=19, new=3, rows=(2,), rounds=1, against=["transformers"], check=True)
    rows = list(speed.speed(model, name, **options))
    assert [row["engine"] for row in rows] == ["constate", "transformers"], rows
    assert rows[1]["prefill_ratio"] > 0 and "transformers" in rows[1]["backend"]
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert child.returncode == 0, child.stderr


def test_transformers_holds_each_hybrid() -> None:
    """The ten, tiny, whose files name experts one by one, tie blocks or leave out what the config says; and
    steps on a cache that one of them never hands back."""
    tiny = {name: {**MODELS[name].raw, **AS_TRANSFORMERS.get(name, {})} for name in MODELS if name in TEN}
    code = f"""
from constate.bench import shapes, speed
for name, raw in {tiny!r}.items():
    options = dict(prompt=11, new=2, rows=(2,), rounds=1, against=["transformers"], check=True)
    rows = list(speed.speed(shapes.random_model(raw), name, **options))
    assert [row["engine"] for row in rows] == ["constate", "transformers"], rows
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert child.returncode == 0, child.stderr
    assert len(tiny) == 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"against": ["abacus"]}, "abacus"),
        ({"rows": (0,)}, "at least 1"),
        ({"rounds": 0}, "at least 1"),
        ({"plan": Plan(steps=4)}, "one token after another"),
    ],
)
def test_a_wrong_request_is_refused(model: Model, options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        next(speed.speed(model, "m", **options))


def test_the_check_is_for_float32_alone():
    model = shapes.random_model(TINY["mamba2"], dtype="bfloat16")
    with pytest.raises(ValueError, match="float32"):
        next(speed.speed(model, "m", check=True))


def test_named_shapes_are_the_published_ones():
    """Parameter counts as the model cards give them, counted on paper alone: no weights are made."""
    from constate.core.architecture import read_config
    from constate.loading import find

    counts = {}
    for name, raw in shapes.SHAPES.items():
        architecture = find(raw["model_type"]).architecture
        with torch.device("meta"):
            model = architecture.build(read_config(architecture.Config, raw))
        counts[name] = sum(p.numel() for p in model.parameters())
    assert counts["llama-135m"] == 134_515_008
    assert counts["mamba-130m"] == 129_135_360
    assert counts["gated-delta-144m"] == 144_490_968  # as transformers counts its own
    assert counts["llada-130m"] == 134_105_856
    assert counts["mamba2-130m"] == pytest.approx(129e6, rel=0.01)
    assert len(HYBRIDS) == 10 and all(50e6 < counts[name] < 150e6 for name in HYBRIDS)


def test_the_same_seed_draws_the_same_weights():
    a, b = (shapes.random_model(TINY["llama"], seed=s).state_dict() for s in (3, 3))
    assert all(torch.equal(a[name], b[name]) for name in a)
    c = shapes.random_model(TINY["llama"], seed=4).state_dict()
    assert not torch.equal(a["embed.weight"], c["embed.weight"])
