"""Keys and values read across layers: what it saves, which faults the laws would see, what is refused.

That the layers compute what they should stands in test_laws.py and test_mixers.py ("composed cross-layer").
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from constate.core.architecture import read_config
from constate.core.attention import AttentionSpec
from constate.core.cross_layer import CrossLayerAttention
from constate.hybrid.composed import ARCHITECTURE, Config
from constate.spans import Spans
from tests.models import ATTENTION, MODELS, ROPE, WINDOW, make, tokens
from tests.referee import referee, same_logits

NAME = "composed cross-layer"


def build(*mixers: dict[str, Any]) -> Any:
    layers = [{"mixer": m, "mlp": None} for m in mixers]
    return ARCHITECTURE.build(
        read_config(Config, {"vocab_size": 20, "hidden_size": 16, "layers": layers, "model_type": "composed"})
    )


def test_what_is_read_is_not_held_twice() -> None:
    """Half the layers hold half the bytes; a step still reads the keys for every layer that asks."""
    own, shared = build(*[ATTENTION] * 4), build(ATTENTION, {**ATTENTION, "kv_from": 0})
    four = build(ATTENTION, {**ATTENTION, "kv_from": 0}, ATTENTION, {**ATTENTION, "kv_from": 2})
    assert 2 * four.cost(0, 100).held["kv"] == own.cost(0, 100).held["kv"]
    assert four.cost(1, 99).read["kv"] == own.cost(1, 99).read["kv"]
    assert 2 * four.cost(1, 99).written["kv"] == own.cost(1, 99).written["kv"]
    assert 2 * four.init_cache(3, 50).nbytes() == own.init_cache(3, 50).nbytes()
    assert shared.cost(8, 0).flops["attention"] * 2 == own.cost(8, 0).flops["attention"]


@pytest.mark.parametrize("reader", [2, 3])
def test_whose_keys_are_read_matters(reader: int) -> None:
    """The other lender's keys, which have the same shape, are far off in forward and in step."""
    model = make(NAME)
    mixer = model.blocks[reader].get_submodule("mixer")
    assert isinstance(mixer, CrossLayerAttention)
    prompt, want = tokens(20), referee(NAME).read(tokens(20)).logits
    same_logits(model(prompt, Spans.of([20])), want)
    mixer.kv_from = 1 - mixer.kv_from
    assert float((model(prompt, Spans.of([20])) - want).abs().max()) > 1e-2
    cache = model.init_cache(1)
    model(prompt[:-1], Spans.of([19]), cache)
    stepped = model.step(prompt[-1:], cache)
    assert float((stepped - want[-1:]).abs().max()) > 1e-2


def test_nothing_is_lent_that_nobody_reads() -> None:
    model = make(NAME)
    lends = [getattr(block.get_submodule("mixer"), "lends", None) for block in model.blocks]
    assert lends == [0, 1, None, None, None]
    assert all(m.lends is None for m in make("composed attention").mixers() if hasattr(m, "lends"))


@pytest.mark.parametrize(
    ("mixers", "fact"),
    [
        ([{**ATTENTION, "kv_from": 0}], "kv_from 0 is no earlier layer"),
        ([ATTENTION, {**ATTENTION, "kv_from": 1}], "kv_from 1 is no earlier layer"),
        ([ATTENTION, {**ATTENTION, "kv_from": -1}], "kv_from -1 is no earlier layer"),
        ([ATTENTION, {**ATTENTION, "kv_from": "0"}], "kv_from '0' is no earlier layer"),
        (
            [ATTENTION, {**ATTENTION, "kv_from": 0}, {**ATTENTION, "kv_from": 1}],
            "kv_from 1 is no earlier layer",
        ),
        (
            [{"type": "retnet", "heads": 2, "key_dim": 4, "value_dim": 4}, {**ATTENTION, "kv_from": 0}],
            "kv_from 0 is no earlier layer",
        ),
        ([ATTENTION, {**ATTENTION, "kv_from": 0, "kv_heads": 4}], "kv_heads not as in"),
        ([ATTENTION, {**ATTENTION, "kv_from": 0, "head_dim": 6}], "head_dim not as in"),
        ([ATTENTION, {**ATTENTION, "kv_from": 0, "window": WINDOW}], "window not as in"),
        ([ATTENTION, {**ATTENTION, "kv_from": 0, "rope": ROPE}], "rope not as in"),
        ([ATTENTION, {**ATTENTION, "kv_from": 0, "heads": 3}], "3 query heads cannot share 2"),
        (
            [{"type": "retnet", "heads": 2, "key_dim": 4, "value_dim": 4, "kv_from": 0}],
            r"unknown keys \['kv_from'\]",
        ),
    ],
)
def test_a_layer_that_cannot_be_read_is_refused(mixers: list[dict[str, Any]], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        build(*mixers)


def test_a_reader_without_a_lender_says_so() -> None:
    with pytest.raises(ValueError, match="kv_from"):
        CrossLayerAttention(16, AttentionSpec(heads=2, head_dim=4))


def test_gradients_reach_the_lender_through_its_readers() -> None:
    """Training without a cache: the lender's keys are also learned from what others make of them."""
    model = build(ATTENTION, {**ATTENTION, "kv_from": 0})
    lender = model.blocks[0].get_submodule("mixer")
    with torch.no_grad():
        lender.out.weight.zero_()  # what it says itself is nothing
    model(tokens(9) % 20, Spans.of([9])).square().sum().backward()
    assert float(lender.qkv.weight.grad.abs().max()) > 0


def test_every_composed_kind_of_attention_has_its_laws() -> None:
    """MHA, GQA, MQA, window, latent, and across layers: each stands in a hostile composed model."""
    composed = [entry.raw for entry in MODELS.values() if entry.raw["model_type"] == "composed"]
    mixers = [layer["mixer"] for raw in composed for layer in raw["layers"]]
    attentions = [m for m in mixers if m["type"] == "attention"]
    assert any(m["heads"] == m["kv_heads"] for m in attentions), "no multi-head attention"
    assert any(m["heads"] > m["kv_heads"] > 1 for m in attentions), "no grouped-query attention"
    assert any(m["kv_heads"] == 1 for m in attentions), "no multi-query attention"
    assert any(m.get("window") for m in attentions) and any(m.get("kv_from") == 0 for m in attentions)
    assert any(m["type"] == "latent" for m in mixers)
