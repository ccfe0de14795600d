"""RecurrentGemma beside transformers' own, its odd points one by one, and configs that are refused.

Their float32 takes 1 - a^2 of an a near 1, and loses what it takes it for; so the twin here is their module
in float64, beside our float32. Their recurrent layers keep their state on the module: it follows one text by
single steps, and where it breaks laws that ours keep is shown below, and their uncached forward is the judge.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.core.architecture import read_config
from constate.core.attention import Attention
from constate.core.mixer import Call
from constate.core.mlp import GatedMLP, activation
from constate.core.model import Model
from constate.hybrid.recurrent_gemma import ARCHITECTURE, Config
from constate.kernels.dispatch import Op
from constate.spans import Spans
from constate.ssm import rg_lru
from constate.ssm.rg_lru import RGLRU
from tests.models import MODELS
from tests.referee import same_logits
from tests.test_twins import every, norms
from tests.twins import (
    LENGTHS,
    VOCAB,
    Removal,
    Twin,
    Twins,
    ids,
    moved,
    same_decoding,
    same_export,
    same_forward,
)

Removals = Callable[[Model], list[Removal]]

ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
GEMMA: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=48, num_hidden_layers=4, intermediate_size=72, num_attention_heads=4,
    num_key_value_heads=2, block_types=["recurrent", "attention", "recurrent"], attention_window_size=5,
    conv1d_width=3, logits_soft_cap=5.0, rms_norm_eps=1e-2, rope_parameters=ROPE,
)  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "recurrent_gemma": ("recurrent_gemma", GEMMA),
    "recurrent_gemma otherwise": (
        "recurrent_gemma",
        {
            **GEMMA,
            "num_hidden_layers": 5,
            "block_types": ["recurrent", "recurrent", "attention"],
            "lru_width": 80,
            "conv1d_width": 4,
            "attention_bias": True,
            "attention_window_size": 20,
            "tie_word_embeddings": False,
        },
    ),
}


def finish(theirs: Any) -> None:
    """Decays a token from nearly none to nearly all, where _spread leaves all below a thousandth."""
    g = torch.Generator().manual_seed(6)
    for name, p in theirs.named_parameters():
        if name.endswith("recurrent_param"):
            rates = torch.logspace(-4, 0.3, p.numel())[torch.randperm(p.numel(), generator=g)]
            p.copy_(rates.expm1().log())


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twin]:
    made, exact = Twins(CONFIGS, tmp_path_factory, finish), {}

    def get(name: str) -> Twin:
        if name not in exact:
            single = made(name)
            exact[name] = replace(single, theirs=deepcopy(single.theirs).double())
        return exact[name]

    return get


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_equals_the_twin(name: str, twin: Callable[[str], Twin]) -> None:
    same_forward(twin(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_equals_the_twin(name: str, twin: Callable[[str], Twin]) -> None:
    same_decoding(twin(name), cached=False)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_go_back_as_they_came(name: str, twin: Callable[[str], Twin]) -> None:
    same_export(twin(name))


def test_ours_is_nearer_to_float64_than_their_float32(twin: Callable[[str], Twin]) -> None:
    """Of slow decays 1 - exp(2 log a) keeps three digits or none, -expm1(2 log a) seven."""
    both, prompt = twin("recurrent_gemma"), ids(130)
    with torch.no_grad():
        single = deepcopy(both.theirs).float()(prompt[None], use_cache=False).logits[0]
        ours = both.ours(prompt, Spans.of([130]))
    want = both.whole(prompt)
    near, far = (float((logits - want).abs().max()) for logits in (ours, single))
    assert near < 1e-4 and far > 20 * near, f"ours is off by {near:.1e}, theirs by {far:.1e}"


# -- their cached path ------------------------------------------------------------------------------


class Cached:
    """Their model with a cache of its own, from nothing: a forward without one clears the module's state."""

    def __init__(self, theirs: Any):
        from transformers import DynamicCache

        theirs(ids(1)[None], use_cache=False)
        self.theirs, self.cache = theirs, DynamicCache(config=theirs.config)

    @torch.no_grad()
    def __call__(self, tokens: Tensor, **options: Any) -> Tensor:
        """(rows, n) to (rows, n, vocab)."""
        options = {"use_cache": True, "past_key_values": self.cache, **options}
        return self.theirs(tokens, **options).logits.float()


def test_steps_equal_their_steps(twin: Callable[[str], Twin]) -> None:
    """One text, a prompt and then single tokens, is what their cached path is right for."""
    both = twin("recurrent_gemma")
    for n in LENGTHS:
        prompt, theirs, cache = ids(n, seed=n), Cached(both.theirs), both.ours.init_cache(1)
        want, got = theirs(prompt[None])[0, -1:], both.ours(prompt, Spans.of([n]), cache, at="last")
        for i in range(8):
            same_logits(got, want, f"{n} tokens, step {i}")
            token = got.argmax(-1)
            want, got = theirs(token[None])[0], both.ours.step(token, cache)


def test_their_second_piece_breaks_law_2(twin: Callable[[str], Twin]) -> None:
    """A piece of several tokens starts their convolution from zeros; ours goes on."""
    both, prompt = twin("recurrent_gemma"), ids(40)
    whole, theirs, cache = both.whole(prompt), Cached(both.theirs), both.ours.init_cache(1)
    pieces = prompt.split(20)
    their = torch.cat([theirs(piece[None])[0] for piece in pieces])
    ours = torch.cat([both.ours(piece, Spans.of([20]), cache) for piece in pieces])
    assert float((their - whole)[20:].abs().max()) > 1e-2
    same_logits(ours, whole, "ours in two pieces")


def test_their_padded_row_breaks_law_3(twin: Callable[[str], Twin]) -> None:
    """A row padded on the right carries its pads into the next step: their recurrent layers read no mask.
    Ours has no pads: the shorter row is packed beside the longer."""
    both, short, long = twin("recurrent_gemma"), ids(7, seed=1), ids(12, seed=2)
    next_tokens, theirs = torch.tensor([5, 9]), Cached(both.theirs)
    padded = torch.stack([torch.cat([short, short.new_zeros(5)]), long])
    mask = torch.arange(12)[None] < torch.tensor([[7], [12]])
    theirs(padded, attention_mask=mask.long())
    positions = torch.tensor([[7], [12]])
    mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.bool)], 1).long()
    their = theirs(next_tokens[:, None], attention_mask=mask, position_ids=positions)[:, 0]
    cache = both.ours.init_cache(2)
    both.ours(torch.cat([short, long]), Spans.of([7, 12]), cache)
    ours = both.ours.step(next_tokens, cache)
    for row, prompt in enumerate((short, long)):
        whole = both.whole(torch.cat([prompt, next_tokens[row : row + 1]]))[-1:]
        same_logits(ours[row : row + 1], whole, f"row {row}")
        assert (float((their[row : row + 1] - whole).abs().max()) > 1e-2) == (row == 0)


# -- every odd point is seen ------------------------------------------------------------------------


def of(kind: type[Any]) -> Callable[[Model], list[Any]]:
    return lambda model: [m for m in model.mixers() if isinstance(m, kind)]


def inside(kind: type[Any], part: str) -> Callable[[Model], list[Any]]:
    return lambda model: [getattr(m, part) for m in of(kind)(model)]


def rotary(**fields: Any) -> Removals:
    return lambda model: [(m, "rotary", replace(m.rotary, **fields)) for m in of(Attention)(model)]


def lru_convs(model: Model) -> list[Any]:
    return [m.conv for m in of(RGLRU)(model)]


def operands(change: Callable[[RGLRU, Tensor, Call, Tensor, Tensor], Tensor]) -> Removals:
    """What each token adds replaced by change(mixer, x, call, fed, log_a); x is the convolution's output."""

    def faulty(mixer: RGLRU) -> Callable[[Tensor, Call], tuple[Tensor, Tensor]]:
        right = mixer._operands

        def call(x: Tensor, call: Call) -> tuple[Tensor, Tensor]:
            fed, log_a = right(x, call)
            return change(mixer, x, call, fed, log_a), log_a

        return call

    return lambda model: [(m, "_operands", faulty(m)) for m in of(RGLRU)(model)]


def share(log_a: Tensor) -> Tensor:
    return (-torch.expm1(2 * log_a)).sqrt()


def scaled_from_the_start(m: RGLRU, x: Tensor, call: Call, fed: Tensor, log_a: Tensor) -> Tensor:
    return torch.where(call.positions[:, None] == 0, fed * share(log_a), fed)


def unscaled(m: RGLRU, x: Tensor, call: Call, fed: Tensor, log_a: Tensor) -> Tensor:
    return torch.where(call.positions[:, None] == 0, fed, fed / share(log_a))


def gates(change: Callable[[Tensor], Tensor]) -> Removals:
    """change of both gates' weights and biases, whose last axis is (input, recurrence)."""
    return lambda model: [
        (m, name, change(getattr(m, name))) for m in of(RGLRU)(model) for name in ("gates", "gate_bias")
    ]


def swapped(t: Tensor) -> Tensor:
    return torch.cat(t.chunk(2, dim=-1)[::-1], dim=-1)


def transposed_blocks(model: Model) -> list[Removal]:
    return [
        (m, "gates", torch.cat([block.mT for block in m.gates.chunk(2, dim=-1)], dim=-1))
        for m in of(RGLRU)(model)
    ]


def interleaved(model: Model) -> list[Removal]:
    def faulty(attend: Op) -> Op:
        def call(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
            k, v = (t.repeat(1, q.shape[1] // t.shape[1], 1) for t in (k, v))
            return attend(q, k, v, *rest, **options)

        return call

    return [(model, "ops", replace(model.ops, attention=faulty(model.ops.attention)))]


def swapped_layers(model: Model) -> list[Removal]:
    """The first two mixers change places."""
    first, second, *others = model.branches[0], model.branches[2]
    rest = [b for b in model.branches if b not in (first, second)]
    order = (replace(first, mixer=second.mixer), rest[0], replace(second, mixer=first.mixer), *rest[1:])
    return [(model, "branches", tuple(order)), *others]


PLAIN, OTHERWISE = CONFIGS
ODD_POINTS: dict[str, tuple[str, Removals]] = {
    "the embedding's scale": (PLAIN, lambda m: [(m, "embed_scale", 1.0)]),
    "which is rounded to bfloat16": (PLAIN, lambda m: [(m, "embed_scale", 48**0.5)]),
    "norms' weights are distances from one": (PLAIN, every(norms, "offset", 0.0)),
    "the norms' eps": (PLAIN, every(norms, "eps", 1e-6)),
    "the cap on the logits": (PLAIN, lambda m: [(m, "logit_cap", None)]),
    "the cap's size": (PLAIN, lambda m: [(m, "logit_cap", 30.0)]),
    "the tied head": (PLAIN, lambda m: [(m.head, "weight", m.embed.weight.flip(0))]),
    "the untied head": (OTHERWISE, lambda m: [(m.head, "weight", m.embed.weight)]),
    "the order of the layers": (PLAIN, swapped_layers),
    "half of a head is turned": (
        PLAIN,
        rotary(frequencies=tuple(100.0 ** (-i / 12) for i in range(0, 12, 2))),
    ),
    "rotary at all": (PLAIN, every(of(Attention), "rotary", lambda r: None)),
    "rope_theta": (PLAIN, rotary(frequencies=tuple(10000.0 ** (-i / 6) for i in range(0, 6, 2)))),
    "few key heads": (PLAIN, interleaved),
    "the window": (PLAIN, every(of(Attention), "window", lambda w: None)),
    "the window to the token": (PLAIN, every(of(Attention), "window", lambda w: w + 1)),
    "attention's bias on its way out": (PLAIN, every(inside(Attention, "out"), "bias", torch.zeros_like)),
    "attention's bias on q, k, v": (OTHERWISE, every(inside(Attention, "qkv"), "bias", torch.zeros_like)),
    "the MLP's bias": (PLAIN, every(inside(GatedMLP, "gate_up"), "bias", torch.zeros_like)),
    "the MLP's bias on its way out": (PLAIN, every(inside(GatedMLP, "down"), "bias", torch.zeros_like)),
    "the MLP's tanh-GELU": (PLAIN, every(of(GatedMLP), "act", lambda _: activation("silu"))),
    "which is not erf-GELU": (PLAIN, every(of(GatedMLP), "act", lambda _: activation("gelu"))),
    "the recurrent block's GELU": (PLAIN, every(of(RGLRU), "act", lambda _: activation("silu"))),
    "its bias": (PLAIN, every(inside(RGLRU, "in_proj"), "bias", torch.zeros_like)),
    "its bias on its way out": (PLAIN, every(inside(RGLRU, "out_proj"), "bias", torch.zeros_like)),
    "its order of y and x": (
        PLAIN,
        every(inside(RGLRU, "in_proj"), "weight", lambda w: torch.cat(w.chunk(2)[::-1])),
    ),
    "the convolution's bias": (PLAIN, every(lru_convs, "bias", torch.zeros_like)),
    "no SiLU after the convolution": (PLAIN, every(lru_convs, "activation", "silu")),
    "the input gate": (PLAIN, operands(lambda m, x, call, fed, log_a: x * share(log_a))),
    "the order of the gates": (PLAIN, gates(swapped)),
    "the gates' biases": (PLAIN, every(of(RGLRU), "gate_bias", torch.zeros_like)),
    "the gates' blocks are read from the left": (PLAIN, transposed_blocks),
    "the gates' blocks": (OTHERWISE, every(of(RGLRU), "gates", lambda t: t.roll(1, 0))),
    "the rate": (PLAIN, every(of(RGLRU), "rate", torch.zeros_like)),
    "the 8 in the decay": (PLAIN, lambda m: [(rg_lru, "SHARPNESS", 4.0)]),
    "sqrt(1 - a^2)": (PLAIN, operands(unscaled)),
    "which the first token is spared": (PLAIN, operands(scaled_from_the_start)),
}


@pytest.mark.parametrize("point", ODD_POINTS)
def test_each_odd_point_moves_the_logits(point: str, twin: Callable[[str], Twin]) -> None:
    name, removals = ODD_POINTS[point]
    far = moved(twin(name), removals)
    assert far > 1e-3, f"{name} does not notice that {point} is gone ({far:.1e})"


def test_the_first_files_mean_the_same() -> None:
    """Their config.json, with `_block_types` and the rotary keys of transformers 4; and the defaults."""
    first = {
        "model_type": "recurrent_gemma",
        "_block_types": ["recurrent", "recurrent", "attention"],
        "attention_window_size": 2048,
        "embeddings_scale_by_sqrt_dim": True,
        "head_dim": 256,
        "hidden_size": 2560,
        "intermediate_size": 15360,
        "lru_width": 2560,
        "num_attention_heads": 10,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "w_init_variance_scale": 0.01,
        "final_w_init_variance_scale": 0.0769,
    }
    config = read_config(Config, first)
    assert [i for i, kind in enumerate(config.kinds) if kind == "attention"] == [2, 5, 8, 11, 14, 17, 20, 23]
    assert config.rope == {"partial_rotary_factor": 0.5, "rope_theta": 10000.0}
    assert config.heads == (10, 1, 256)
    assert read_config(Config, {}).rope["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize(
    ("over", "fact"),
    [
        ({"block_types": ["recurrent", "mamba"]}, r"block_types has \['mamba'\]"),
        ({"_block_types": ["attention"]}, "_block_types .*which"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"rope_theta": 7.0}, "rope_theta both"),
        ({"partial_rotary_factor": 0.125}, "partial_rotary_factor both"),
        ({"hidden_activation": "mish"}, "activation 'mish' is not known"),
        ({"head_dim": 16}, "head_dim 16: only hidden_size / num_attention_heads"),
        ({"num_attention_heads": 5}, "num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"lru_width": 50}, "50 channels do not fall into 4 equal blocks"),
        ({"intermediate_size": 71}, "intermediate_size 71"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap 0"),
        ({"embeddings_scale_by_sqrt_dim": False}, "embeddings_scale_by_sqrt_dim false"),
        ({"attention_window_size": 0}, "window 0"),
        ({"sliding_window_pattern": 3}, "sliding_window_pattern = 3 is not understood"),
    ],
)
def test_what_it_does_not_know_is_refused_by_name(over: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        ARCHITECTURE.build(read_config(Config, {**MODELS["recurrent_gemma"].raw, **over}))
