"""Zamba2 beside transformers' own, its odd points one by one, and configs that are refused.

transformers' one-token step does not know that a step size is at least time_step_min, which breaks law 1
(step folded over the tokens == forward): its whole forwards are compared. It ties the layers that share a
block only where the head is tied too; every published model has both.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from constate.core.adapted import Adapted
from constate.core.architecture import read_config
from constate.core.mixer import Call
from constate.core.mlp import activation
from constate.core.model import Model
from constate.core.rotary import Rotary
from constate.core.weights import export
from constate.hybrid.zamba2 import ARCHITECTURE, Config, Hybrid
from constate.loading import load
from constate.spans import Spans
from tests.models import MODELS
from tests.referee import same_logits
from tests.test_twins import every, gates, norms, one_group, plain_frequencies
from tests.twins import VOCAB, Removal, Twin, Twins, ids, moved, same_decoding, same_export, same_forward

MAMBA, HYBRID = "linear_attention", "hybrid"
ZAMBA: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=48, num_hidden_layers=5, intermediate_size=40, num_attention_heads=4,
    layers_block_type=[MAMBA, HYBRID, HYBRID, MAMBA, HYBRID], num_mem_blocks=2, n_mamba_heads=6,
    mamba_d_state=10, mamba_d_conv=3, mamba_ngroups=2, chunk_size=16, rms_norm_eps=1e-2, time_step_min=0.1,
    adapter_rank=5, add_bias_linear=True, use_shared_attention_adapter=True, use_mem_rope=True,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0}, tie_word_embeddings=True,
)  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "zamba2": ("zamba2", ZAMBA),
    "one block": (
        "zamba2",
        {
            **ZAMBA,
            "num_hidden_layers": 3,
            "layers_block_type": [HYBRID, MAMBA, HYBRID],
            "num_mem_blocks": 1,
            "num_key_value_heads": 2,
            "add_bias_linear": False,
            "use_shared_attention_adapter": False,
            "use_mem_rope": False,
        },
    ),
    "untied head": ("zamba2", {**ZAMBA, "tie_word_embeddings": False}),
}


@torch.no_grad()
def finish(theirs: Any) -> None:
    """Layers that share a block hold the same weights, whatever the head does. Matrices of the blocks are
    smaller than others: seven in a row with no residual between them make much of rounding."""
    for name, p in theirs.named_parameters():
        if "shared_transformer" in name and p.ndim > 1:
            p.mul_(0.3 if "adapter" in name and name.endswith(".1.weight") else 0.7)
    hybrids = [layer for layer in theirs.model.layers if hasattr(layer, "shared_transformer")]
    blocks = theirs.config.num_mem_blocks
    for use, layer in enumerate(hybrids):
        layer.shared_transformer.load_state_dict(hybrids[use % blocks].shared_transformer.state_dict())


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twin]:
    return Twins(CONFIGS, tmp_path_factory, finish)


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_equals_the_twin(name: str, twin: Callable[[str], Twin]) -> None:
    same_forward(twin(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_equals_the_twin(name: str, twin: Callable[[str], Twin]) -> None:
    same_decoding(twin(name), cached=False)


def test_steps_keep_the_limit_that_the_twins_step_forgets(twin: Callable[[str], Twin]) -> None:
    """Law 1 holds for ours, and is what theirs breaks."""
    pair, prompt = twin("zamba2"), ids(20)
    cache, want = pair.ours.init_cache(1), pair.whole(prompt)
    same_logits(torch.cat([pair.ours.step(t[None], cache) for t in prompt]), want, "steps over the limit")
    with torch.no_grad():
        their = pair.theirs(prompt[None, :19], use_cache=True)
        kept = {"past_key_values": their["past_key_values"]}
        stepped = pair.theirs(prompt[None, 19:], use_cache=True, **kept).logits[0].float()
    with pytest.raises(AssertionError):
        same_logits(stepped, want[-1:], "their step")


# -- shared weights -----------------------------------------------------------------------------


def test_parameters_are_as_many_and_shared(twin: Callable[[str], Twin]) -> None:
    pair = twin("zamba2")
    ours, theirs = (sum(p.numel() for p in m.parameters()) for m in (pair.ours, pair.theirs))
    assert ours == theirs
    first, other, again = (block.mixer for block in pair.ours.blocks if isinstance(block.mixer, Hybrid))
    assert again.attention.out is first.attention.out is not other.attention.out
    assert again.attention.qkv.base is first.attention.qkv.base
    assert again.attention.qkv.down is not first.attention.qkv.down
    cache = pair.ours.init_cache(1)
    pair.ours(ids(7), Spans.of([7]), cache)
    keys = [t for name, t, _ in cache.leaves() if name.endswith(".k")]
    assert len(keys) == 3 and not torch.equal(keys[0], keys[2]), "keys and values are not shared"


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "untied head"])
def test_weights_go_back_as_they_came(name: str, twin: Callable[[str], Twin]) -> None:
    same_export(twin(name))


def test_a_shared_block_is_read_from_every_layer_and_written_once(twin: Callable[[str], Twin]) -> None:
    """transformers writes a block for each of its users where the head is not tied."""
    pair = twin("untied head")
    stored, architecture = load_file(pair.folder / "model.safetensors"), pair.ours.architecture
    assert architecture is not None
    written = export(architecture.weights(pair.ours.config), dict(pair.ours.named_parameters()))
    assert all(torch.equal(written[name], stored[name]) for name in written)
    again = {name for name in stored if name.startswith("model.layers.4.shared_transformer.")}
    assert again and stored.keys() - written.keys() == again


def test_a_shared_block_with_two_values_is_refused(twin: Callable[[str], Twin], tmp_path: Path) -> None:
    pair = twin("untied head")
    stored = load_file(pair.folder / "model.safetensors")
    stored["model.layers.4.shared_transformer.self_attn.o_proj.weight"][0, 0] += 1
    shutil.copytree(pair.folder, tmp_path / "two")
    save_file(stored, tmp_path / "two" / "model.safetensors")
    with pytest.raises(ValueError, match=r"different values: blocks\.1\.mixer\.attention\.out\.weight by"):
        load(tmp_path / "two")


# -- odd points ---------------------------------------------------------------------------------

Of = Callable[[Model], list[Removal]]


def hybrids(model: Model) -> list[Any]:
    return [block.mixer for block in model.blocks if isinstance(block.mixer, Hybrid)]


def within(path: str) -> Callable[[Model], list[Any]]:
    """The module at this path in every hybrid layer."""
    return lambda model: [m.get_submodule(path) for m in hybrids(model)]


def ssms(model: Model) -> list[Any]:
    return [m.mamba if isinstance(m, Hybrid) else m for m in model.mixers()]


def call_of(name: str, wrap: Callable[[Any, Any], Any]) -> Of:
    """A method of every hybrid layer, replaced by wrap(layer, method)."""
    return lambda model: [(m, name, wrap(m, getattr(m, name))) for m in hybrids(model)]


def other_embedding(change: Callable[[Tensor, Tensor], Tensor]) -> Of:
    """`change(x, embedding)` is read beside x."""

    def wrap(m: Any, _: Any) -> Any:
        return lambda x, call: m.attention_norm(torch.cat([x, change(x, call.shared["embedding"])], -1))

    return call_of("_beside", wrap)


def turned_round(m: Any, _: Any) -> Any:
    return lambda x, call: m.attention_norm(torch.cat([call.shared["embedding"], x], -1))


def skipping(m: Any, _: Any) -> Any:
    """The MLP's input added to its output, as in any other transformer."""
    return lambda x, said, call: m.mamba_norm(x + m.linear(said + m.mlp(m.mlp_norm(said), call)))


def no_linear(m: Any, _: Any) -> Any:
    return lambda x, said, call: m.mamba_norm(x + m.mlp(m.mlp_norm(said), call))


def into_the_residual(m: Any, forward: Any) -> Any:
    def run(x: Tensor, call: Call, state: Any = None) -> Tensor:
        said = m.attention(m._beside(x, call), call)
        said = m.linear(m.mlp(m.mlp_norm(said), call))
        return said + m.mamba(m.mamba_norm(x + said), call)

    return run


def first_users(name: str) -> Of:
    """The third hybrid layer adds what the first adds, whose block it uses."""

    def removal(model: Model) -> list[Removal]:
        first, _, third = hybrids(model)
        mine, other = third.get_submodule(name), first.get_submodule(name)
        return [(mine, "down", other.down), (mine, "up", other.up)]

    return removal


def one_block(model: Model) -> list[Removal]:
    """All layers use the first block."""
    first, second, _ = hybrids(model)
    qkv, gate_up = second.attention.qkv, second.mlp.gate_up
    return [
        (qkv, "base", first.attention.qkv.base),
        (second.attention, "out", first.attention.out),
        (gate_up, "base", first.mlp.gate_up.base),
        (second.mlp, "down", first.mlp.down),
    ]


def unadapted(name: str) -> Of:
    return lambda model: [
        (m.up, "weight", torch.zeros_like(m.up.weight)) for m in within(name)(model) if isinstance(m, Adapted)
    ]


def part_unadapted(part: int) -> Of:
    """q, k or v without its adapter."""

    def zeroed(m: Any) -> Tensor:
        parts = list(m.up.weight.chunk(3))
        parts[part] = torch.zeros_like(parts[part])
        return torch.cat(parts)

    return lambda model: [(m.up, "weight", zeroed(m)) for m in within("attention.qkv")(model)]


def rotary(theta: float | None) -> Of:
    def removal(model: Model) -> list[Removal]:
        plain = hybrids(model)[0].attention.rotary
        new = theta and replace(plain, frequencies=plain_frequencies(plain, theta))
        return [(m.attention, "rotary", new) for m in hybrids(model)]

    return removal


def half_rotary(model: Model) -> list[Removal]:
    plain = hybrids(model)[0].attention.rotary
    half = replace(plain, frequencies=plain_frequencies(plain)[: plain.dim // 4])
    return [(m.attention, "rotary", half) for m in hybrids(model)]


def some_rotary(model: Model) -> list[Removal]:
    turn = Rotary.of({"rope_theta": 100.0}, hybrids(model)[0].attention.dim)
    return [(m.attention, "rotary", turn) for m in hybrids(model)]


ODD_POINTS: dict[str, tuple[str, Of]] = {
    "the embedding beside x": ("zamba2", other_embedding(lambda x, e: torch.zeros_like(e))),
    "the embedding, not x twice": ("zamba2", other_embedding(lambda x, e: x)),
    "x first": ("zamba2", call_of("_beside", turned_round)),
    "scores by half of head_dim": ("zamba2", every(within("attention"), "scale", 24**-0.5)),
    "nothing is added within a block": ("zamba2", call_of("_with", skipping)),
    "a linear of its own": ("zamba2", call_of("_with", no_linear)),
    "what a block says stays off the residual": ("zamba2", call_of("forward", into_the_residual)),
    "blocks in turn": ("zamba2", one_block),
    "q's adapter": ("zamba2", part_unadapted(0)),
    "k's adapter": ("zamba2", part_unadapted(1)),
    "v's adapter": ("zamba2", part_unadapted(2)),
    "the MLP's adapter": ("zamba2", unadapted("mlp.gate_up")),
    "the MLP's adapter without the others": ("one block", unadapted("mlp.gate_up")),
    "each use's own adapters to q, k, v": ("zamba2", first_users("attention.qkv")),
    "each use's own adapter to the MLP": ("zamba2", first_users("mlp.gate_up")),
    "rotary positions": ("zamba2", rotary(None)),
    "rope_theta": ("zamba2", rotary(10000.0)),
    "rotary over a whole head": ("zamba2", half_rotary),
    "no rotary positions": ("one block", some_rotary),
    "GELU": ("zamba2", every(within("mlp"), "act", lambda _: activation("silu"))),
    "erf-GELU": ("zamba2", every(within("mlp"), "act", lambda _: activation("gelu_pytorch_tanh"))),
    "time_step_min": ("zamba2", every(ssms, "dt_limit", (0.0, math.inf))),
    "the gated norm's own eps": ("zamba2", every(gates, "eps", 1e-2)),
    "the gated norm's groups": ("zamba2", every(gates, "groups", 1)),
    "a gate before the norm": ("zamba2", every(gates, "before", True)),
    "groups of B and C": ("zamba2", one_group),
    "the norms' eps": ("zamba2", every(norms, "eps", 1e-5)),
    "a bias in the MLP": ("zamba2", every(within("mlp.gate_up.base"), "bias", None)),
    "a bias at the MLP's end": ("zamba2", every(within("mlp.down"), "bias", None)),
    "a bias in Mamba-2": ("zamba2", lambda m: [(s.in_proj, "bias", None) for s in ssms(m)]),
    "a bias at Mamba-2's end": ("zamba2", lambda m: [(s.out_proj, "bias", None) for s in ssms(m)]),
    "D": ("zamba2", every(ssms, "d", torch.zeros_like)),
    "the convolution's bias": (
        "zamba2",
        lambda m: [(s.conv, "bias", nn.Parameter(torch.zeros_like(s.conv.bias))) for s in ssms(m)],
    ),
    "the tied head": ("zamba2", lambda m: [(m.head, "weight", m.embed.weight.flip(0))]),
    "the untied head": ("untied head", lambda m: [(m.head, "weight", m.embed.weight)]),
}


@pytest.mark.parametrize("point", ODD_POINTS)
def test_each_odd_point_moves_the_logits(point: str, twin: Callable[[str], Twin]) -> None:
    name, removals = ODD_POINTS[point]
    far = moved(twin(name), removals)
    assert far > 1e-3, f"{name} does not notice that {point} is gone ({far:.1e})"


# -- configs ------------------------------------------------------------------------------------


def test_older_configs_mean_the_same(twin: Callable[[str], Twin], tmp_path: Path) -> None:
    """Layers called "mamba", and a rope_theta by itself."""
    pair = twin("zamba2")
    shutil.copytree(pair.folder, tmp_path / "older")
    place = tmp_path / "older" / "config.json"
    raw = json.loads(place.read_text())
    raw["layers_block_type"] = ["mamba" if k == MAMBA else k for k in raw["layers_block_type"]]
    raw["rope_theta"] = raw.pop("rope_parameters")["rope_theta"]
    place.write_text(json.dumps(raw))
    same_logits(load(tmp_path / "older", backend="torch")(ids(33), Spans.of([33])), pair.whole(ids(33)))


def test_without_a_list_the_layers_are_those_of_the_2_7b_model() -> None:
    raw = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 54, "num_attention_heads": 4}
    config = read_config(Config, {**raw, "n_mamba_heads": 8})
    assert config.hybrids == (6, 12, 18, 24, 30, 36, 42, 47, 51)


@pytest.mark.parametrize(
    ("over", "fact"),
    [
        (
            {"layers_block_type": ["mamba", "hybrid", "attention", "hybrid"]},
            "layers_block_type has",
        ),
        ({"layers_block_type": ["mamba"]}, "layers_block_type lists 1 layers"),
        ({"use_long_context": True}, "use_long_context"),
        ({"use_conv_bias": False}, "use_conv_bias false"),
        ({"use_shared_mlp_adapter": False}, "use_shared_mlp_adapter false"),
        ({"num_mem_blocks": 0}, "num_mem_blocks 0"),
        ({"num_attention_heads": 5}, "num_attention_heads 5 cannot share 64 channels"),
        ({"n_mamba_heads": 6}, "n_mamba_heads 6 cannot share 64 channels"),
        ({"attention_head_dim": 8}, "attention_head_dim 8 where the other keys say 16"),
        ({"hybrid_layer_ids": [0, 1]}, r"hybrid_layer_ids \(0, 1\) where the other keys say \(1, 2, 3\)"),
        ({"num_key_value_heads": 2}, "use_shared_attention_adapter wants as many"),
        ({"rope_theta": 5.0}, "rope_theta both"),
        ({"hidden_act": "mish"}, "activation 'mish' is not known"),
        ({"sliding_window": 64}, "sliding_window = 64 is not understood"),
    ],
)
def test_what_it_does_not_know_is_refused_by_name(over: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        ARCHITECTURE.build(read_config(Config, {**MODELS["zamba2"].raw, **over}))
