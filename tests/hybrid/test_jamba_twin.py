"""Jamba beside transformers' own, its odd points one by one, and configs that are refused.

transformers' scan starts from nothing whenever it reads more than one token, which breaks law 2 (a sequence
cut anywhere == the whole): what continues with several tokens is compared with its uncached whole forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from constate.core.architecture import read_config
from constate.core.attention import Attention
from constate.core.experts import Experts
from constate.core.mlp import GatedMLP
from constate.core.model import Model
from constate.core.rotary import Rotary
from constate.hybrid.jamba import ARCHITECTURE, Config
from constate.spans import Spans
from constate.ssm.mamba import Mamba
from tests.models import MODELS
from tests.referee import same_logits
from tests.test_twins import b_and_c_swapped, every, interleaved_heads, norms, ungated_skip
from tests.twins import (
    VOCAB,
    Removal,
    Twin,
    Twins,
    changed,
    ids,
    moved,
    same_decoding,
    same_export,
    same_forward,
)

JAMBA: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=48, num_hidden_layers=5, intermediate_size=40, num_attention_heads=6,
    num_key_value_heads=2, rms_norm_eps=1e-2, attn_layer_period=3, attn_layer_offset=1, num_experts=6,
    num_experts_per_tok=2, mamba_d_state=10, mamba_d_conv=3, mamba_dt_rank=5,
)  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "jamba": ("jamba", JAMBA),
    "otherwise": (
        "jamba",
        {
            **JAMBA,
            "expert_layer_period": 3,
            "expert_layer_offset": 2,
            "num_experts_per_tok": 3,
            "mamba_expand": 1,
            "mamba_dt_rank": "auto",
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "no experts": ("jamba", {**JAMBA, "num_experts": 1}),
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
    pair = twin(name)
    ours, theirs = (sum(p.numel() for p in m.parameters()) for m in (pair.ours, pair.theirs))
    assert ours == theirs


def test_continuing_with_several_tokens_is_right_where_the_twin_is_not(twin: Callable[[str], Twin]) -> None:
    """Law 2 holds for ours, and is what theirs breaks."""
    pair, prompt = twin("jamba"), ids(40)
    cache, want = pair.ours.init_cache(1), pair.whole(prompt)
    parts = [pair.ours(piece, Spans.of([len(piece)]), cache) for piece in prompt.split([29, 7, 4])]
    same_logits(torch.cat(parts), want, "in pieces")
    with torch.no_grad():
        their = pair.theirs(prompt[None, :29], use_cache=True)
        kept = {"past_key_values": their["past_key_values"]}
        continued = pair.theirs(prompt[None, 29:], use_cache=True, **kept).logits[0].float()
    with pytest.raises(AssertionError):
        same_logits(continued, want[29:], "their second piece")


# -- odd points ---------------------------------------------------------------------------------

Of = Callable[[Model], list[Removal]]


def kind(of: type[Any]) -> Callable[[Model], list[Any]]:
    return lambda model: [m for m in model.mixers() if isinstance(m, of)]


mambas, attentions, experts = kind(Mamba), kind(Attention), kind(Experts)


def only(removal: Of) -> Of:
    """A removal that looks at every block's mixer, in the Mamba layers alone."""

    def taken(model: Model) -> list[Removal]:
        blocks = nn.ModuleList([block for block in model.blocks if isinstance(block.mixer, Mamba)])
        with changed(model, "blocks", blocks):
            return removal(model)

    return taken


def inner_norm(name: str, change: Callable[[Any], Removal]) -> Of:
    return lambda model: [change(m.norms[name]) for m in mambas(model)]


def unweighted(norm: Any) -> Removal:
    return norm, "weight", torch.ones_like(norm.weight)


def unnormed(norm: Any) -> Removal:
    return norm, "forward", lambda x: x * norm.weight


def spec(**over: Any) -> Of:
    return lambda model: [
        (owner, "spec", replace(m.spec, **over)) for m in experts(model) for owner in (m, m.router)
    ]


def turned(model: Model) -> list[Removal]:
    return [(m, "rotary", Rotary.of({"rope_theta": 100.0}, m.dim)) for m in attentions(model)]


def first_expert(model: Model) -> list[Removal]:
    """Every expert layer is one MLP, its first expert."""

    def one(layer: Any) -> Callable[..., Tensor]:
        dense = GatedMLP(layer.down.shape[1], layer.spec.width)
        dense.gate_up.weight.data, dense.down.weight.data = layer.up[0], layer.down[0]
        return lambda x, call, state=None: dense(x, call)

    return [(m, "forward", one(m)) for m in experts(model)]


def gate_last(model: Model) -> list[Removal]:
    return [(m, "up", m.up.roll(m.spec.width, 1)) for m in experts(model)]


def router_after_choice(model: Model) -> list[Removal]:
    """The softmax over the chosen alone, as Mixtral has it."""

    def late(router: Any) -> Callable[[Tensor], Any]:
        def choose(x: Tensor) -> Any:
            best = (x @ router.weight.T).topk(router.spec.per_token, dim=-1)
            return best.indices, best.values.softmax(-1)

        return choose

    return [(m.router, "forward", late(m.router)) for m in experts(model)]


ODD_POINTS: dict[str, tuple[str, Of]] = {
    "dt's norm": ("jamba", inner_norm("dt", unnormed)),
    "B's norm": ("jamba", inner_norm("b", unnormed)),
    "C's norm": ("jamba", inner_norm("c", unnormed)),
    "the weight of dt's norm": ("jamba", inner_norm("dt", unweighted)),
    "the weight of B's norm": ("jamba", inner_norm("b", unweighted)),
    "the weight of C's norm": ("jamba", inner_norm("c", unweighted)),
    "those norms' eps": ("jamba", inner_norm("c", lambda norm: (norm, "eps", 1e-6))),
    "attention knows no positions": ("jamba", turned),
    "grouped key heads": ("jamba", interleaved_heads),
    "experts": ("jamba", first_expert),
    "weights that do not sum to one": ("jamba", spec(normalise=True)),
    "a softmax over all experts": ("jamba", router_after_choice),
    "as many experts a token": ("jamba", spec(per_token=1)),
    "and not one more": ("otherwise", spec(per_token=4)),
    "an expert's gate before its other half": ("jamba", gate_last),
    "the norms' eps": ("jamba", every(norms, "eps", 1e-6)),
    "D": ("jamba", every(mambas, "d", torch.zeros_like)),
    "A": ("jamba", every(mambas, "a_log", torch.zeros_like)),
    "dt's bias": ("jamba", every(mambas, "dt_bias", torch.zeros_like)),
    "the order of B and C": ("jamba", only(b_and_c_swapped)),
    "the gate on D too": ("jamba", ungated_skip),
    "the convolution's bias": (
        "jamba",
        lambda m: [(s.conv, "bias", torch.zeros_like(s.conv.bias)) for s in mambas(m)],
    ),
    "no bias in the convolution": (
        "otherwise",
        lambda m: [(s.conv, "bias", torch.full((s.inner,), 0.1)) for s in mambas(m)],
    ),
    "SiLU after the convolution": ("jamba", lambda m: [(s.conv, "activation", None) for s in mambas(m)]),
    "mamba_proj_bias": ("otherwise", lambda m: [(s.in_proj, "bias", None) for s in mambas(m)]),
    "mamba_proj_bias at the end": ("otherwise", lambda m: [(s.out_proj, "bias", None) for s in mambas(m)]),
    "the untied head": ("jamba", lambda m: [(m.head, "weight", m.embed.weight)]),
    "the tied head": ("otherwise", lambda m: [(m.head, "weight", m.embed.weight.flip(0))]),
}


@pytest.mark.parametrize("point", ODD_POINTS)
def test_each_odd_point_moves_the_logits(point: str, twin: Callable[[str], Twin]) -> None:
    name, removals = ODD_POINTS[point]
    far = moved(twin(name), removals)
    assert far > 1e-3, f"{name} does not notice that {point} is gone ({far:.1e})"


# -- configs ------------------------------------------------------------------------------------


def test_the_layers_are_the_published_ones() -> None:
    """Jamba v0.1: attention in one layer of eight, the fifth; experts in every other, from the second on."""
    sizes = dict(vocab_size=65536, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
    older = {"mamba_inner_layernorms": True, "calc_logits_for_entire_prompt": False, "sliding_window": None}
    config = read_config(Config, {**sizes, **older, "num_attention_heads": 32, "num_key_value_heads": 8})
    assert [i for i in range(32) if config.attends(i)] == [4, 12, 20, 28]
    assert [i for i in range(32) if config.has_experts(i)] == list(range(1, 32, 2))
    assert (config.heads, config.ssm.inner, config.experts.experts) == ((32, 8, 128), 8192, 16)


@pytest.mark.parametrize(
    ("over", "fact"),
    [
        ({"attn_layer_offset": 3}, "attn_layer_offset 3 is not below attn_layer_period 3"),
        ({"expert_layer_offset": 2}, "expert_layer_offset 2 is not below expert_layer_period 2"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"mamba_dt_rank": "half"}, "mamba_dt_rank 'half'"),
        ({"mamba_inner_layernorms": False}, "mamba_inner_layernorms false"),
        ({"num_experts_per_tok": 6}, "6 experts a token of 5"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_theta": 10000.0}, "rope_theta = 10000.0 is not understood"),
        ({"sliding_window": 64}, "sliding_window = 64 is not understood"),
    ],
)
def test_what_it_does_not_know_is_refused_by_name(over: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        ARCHITECTURE.build(read_config(Config, {**MODELS["jamba"].raw, **over}))
