"""Our models beside flash-linear-attention's own: its folders, and the logits that it gave for them.

The folders in tests/fixtures/fla were made by make_fla.py there, which runs its kernels; nothing of it is
needed here. For each odd point of a family there is a removal that must move our logits off its by more
than 1e-3: a fixture that would not notice proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from constate.core.architecture import read_config
from constate.core.checkpoint import Checkpoint, read_json
from constate.core.feature_maps import feature_map
from constate.core.model import Model
from constate.core.weights import export
from constate.linear_attn.hgrn2 import HGRN2
from constate.linear_attn.retnet import Config
from constate.loading import find, load, save
from constate.spans import Spans
from tests.referee import same_logits
from tests.test_twins import Removal, changed, convs, every, gates, mixers, norms, parts

FOLDER = Path(__file__).parent / "fixtures" / "fla"
FIXTURES = sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir())


@cache
def ours(name: str) -> Model:
    return load(FOLDER / name, backend="torch")


@cache
def answer(name: str) -> tuple[Tensor, Tensor]:
    """Tokens (t,) and their logits (t, vocab)."""
    stored = load_file(FOLDER / name / "answer.safetensors")
    return stored["tokens"], stored["logits"]


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_equal_the_fixtures(name: str) -> None:
    """Whole, in pieces, and token by token."""
    model, (tokens, want) = ours(name), answer(name)
    same_logits(model(tokens, Spans.of([len(tokens)])), want, f"{name}, whole")
    cache = model.init_cache(1)
    pieces = [model(piece, Spans.of([len(piece)]), cache) for piece in tokens.split(17)]
    same_logits(torch.cat(pieces), want, f"{name}, in pieces of 17")
    cache = model.init_cache(1)
    same_logits(torch.cat([model.step(t[None], cache) for t in tokens]), want, f"{name}, token by token")


@pytest.mark.parametrize("name", FIXTURES)
def test_what_is_written_back_is_what_was_read(name: str, tmp_path: Path) -> None:
    model, source = ours(name), Checkpoint(FOLDER / name)
    assert model.architecture is not None
    written = export(model.architecture.weights(model.config), dict(model.named_parameters()))
    assert written.keys() == set(source)
    for key, tensor in written.items():
        assert torch.equal(tensor, source[key].float()), key
    save(model, tmp_path)
    again, (tokens, _) = load(tmp_path, backend="torch"), answer(name)
    assert again.config == model.config
    spans = Spans.of([len(tokens)])
    assert torch.equal(again(tokens, spans), model(tokens, spans))


# -- every odd point is seen ------------------------------------------------------------------------


def op(name: str, change: Callable[..., Any]) -> Callable[[Model], list[Removal]]:
    """`change(op, *args, **options)` in place of one op."""

    def removal(model: Model) -> list[Removal]:
        right = getattr(model.ops, name)
        faulty = replace(model.ops, **{name: lambda *args, **options: change(right, *args, **options)})
        return [(model, "ops", faulty)]

    return removal


def in_turn(scan: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
    """Of four heads that share two keys, the second and the third change theirs."""
    order = [0, 2, 1, 3]
    return scan(q, k[:, order], v[:, order], *rest, **options)


def unscaled(scan: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return scan(*args, **{**options, "scale": 1.0})


def full_key(scan: Callable[..., Any], q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
    return scan(q, torch.ones_like(k), *rest, **options)


def native(model: Model, kind: type[Any] | str) -> list[Any]:
    """The mixers of this class or with this attribute."""
    wanted = (lambda m: hasattr(m, kind)) if isinstance(kind, str) else (lambda m: isinstance(m, kind))
    return [m for m in mixers(model) if wanted(m)]


def having(name: str, attribute: str, value: Any) -> Callable[[Model], list[Removal]]:
    """An attribute changed in every mixer that has the one called `name`."""
    return every(lambda model: native(model, name), attribute, value)


def told(**fields: Any) -> Callable[[Model], list[Removal]]:
    """Fields changed in every mixer's spec."""
    return having("spec", "spec", lambda spec: replace(spec, **fields))


def normed_a_head(model: Model) -> list[Removal]:
    def by_head(mixer: Any) -> Callable[[Tensor], Tensor]:
        def leave(o: Tensor) -> Tensor:
            o = F.rms_norm(o, o.shape[-1:], None, mixer.norm.eps).flatten(1) * mixer.norm.weight
            return mixer.out_proj(o)

        return leave

    return [(m, "_leave", by_head(m)) for m in native(model, HGRN2)]


def turned(theta: float) -> Callable[[Model], list[Removal]]:
    def rotated(rotary: Any) -> Any:
        return replace(rotary, frequencies=tuple(theta ** (-i / rotary.dim) for i in range(0, rotary.dim, 2)))

    return having("rotary", "rotary", rotated)


def fading(change: Callable[[Tensor], Tensor]) -> Callable[[Model], list[Removal]]:
    """The logarithms (n, h) of RetNet's constant decays changed."""
    return having("log_decay", "log_decay", lambda right: lambda call: change(right(call)))


def normed_over_all_heads(model: Model) -> list[Removal]:
    def whole(mixer: Any) -> Callable[[Tensor, Tensor], Tensor]:
        def leave(o: Tensor, gate: Tensor) -> Tensor:
            o = F.rms_norm(o, o.shape[1:], None, mixer.norm.eps) * mixer.norm.weight
            return mixer.out_proj(o.flatten(1) * F.silu(gate))

        return leave

    return [(m, "_leave", whole(m)) for m in native(model, "log_decay")]


def still(rotary: Any) -> Any:
    return replace(rotary, frequencies=(0.0,) * len(rotary.frequencies))


def ones(p: Tensor) -> Tensor:
    return torch.ones_like(p)


def zeros(p: Tensor) -> Tensor:
    return torch.zeros_like(p)


LINEAR = "gated_linear_scan"

ODD_POINTS: dict[str, tuple[str, Callable[[Model], list[Removal]]]] = {
    "gla: query heads share keys in order": ("gla", op(LINEAR, in_turn)),
    "gla: scale of the query": ("gla", op(LINEAR, unscaled)),
    "gla: temperature": ("gla", having("temperature", "temperature", 1.0)),
    "gla: clamp_min": ("gla", having("decay_min", "decay_min", None)),
    "gla: decay bias": ("gla", every(parts("mixer.decay_proj"), "bias", zeros)),
    "gla: SiLU after the convolution": ("gla", every(convs, "activation", None)),
    "gla: norm, then gate": ("gla", every(gates, "before", False)),
    "gla: norm's weight": ("gla", every(gates, "weight", ones)),
    "gla: the norm's eps": ("gla", every(gates, "eps", 1e-6)),
    "gla: the blocks' eps": ("gla", every(lambda m: [b.mixer_norm for b in m.blocks], "eps", 1e-6)),
    "gla: untied head": ("gla", lambda m: [(m.head, "weight", m.embed.weight)]),
    "gla: norm without a gate": ("gla_hybrid", having("decay_proj", "norm", lambda _: torch.nn.Identity())),
    "gla: tied head": ("gla_hybrid", lambda m: [(m.head, "weight", m.embed.weight.flip(0))]),
    "gla: temperature without a clamp": ("gla_hybrid", having("temperature", "temperature", 8.0)),
    "attn: window": ("gla_hybrid", having("window", "window", None)),
    "attn: window to the token": ("gla_hybrid", having("window", "window", 8)),
    "attn: rotary": ("gla_hybrid", having("rotary", "rotary", None)),
    "attn: rope_theta": ("gla_hybrid", turned(10000.0)),
    "attn: bias": ("gla_hybrid", lambda m: [(native(m, "qkv")[1].qkv, "bias", None)]),
    "linear_attn: query heads share keys in order": ("linear_attn", op(LINEAR, in_turn)),
    "linear_attn: feature map": ("linear_attn", having("map", "map", lambda _: feature_map("relu"))),
    "linear_attn: normaliser": ("linear_attn", told(normaliser=False)),
    "linear_attn: output norm": ("linear_attn", having("map", "norm", lambda _: torch.nn.Identity())),
    "linear_attn: norm's weight": ("linear_attn", every(parts("mixer.norm"), "weight", ones)),
    "linear_attn: norm's eps": ("linear_attn", every(norms, "eps", 1e-6)),
    "linear_attn: no normaliser": ("linear_attn_relu", told(normaliser=True)),
    "linear_attn: another feature map": (
        "linear_attn_relu",
        having("map", "map", lambda _: feature_map("elu")),
    ),
    "linear_attn: scale of the query": ("linear_attn_relu", op(LINEAR, unscaled)),
    "linear_attn: norm_q": ("linear_attn_relu", told(unit_q=False)),
    "linear_attn: norm_k": ("linear_attn_relu", told(unit_k=False)),
    "hgrn2: lower bounds": ("hgrn2", every(lambda m: [m.blocks[0].mixer], "bounds", zeros)),
    "hgrn2: no bound in the first layer": ("hgrn2", every(lambda m: [m.blocks[0].mixer], "layer", 1)),
    "hgrn2: a bound a layer": ("hgrn2", every(lambda m: [m.blocks[2].mixer], "layer", 1)),
    "hgrn2: the key is what f leaves over": ("hgrn2", op(LINEAR, full_key)),
    "hgrn2: scale of the query": ("hgrn2", op(LINEAR, unscaled)),
    "hgrn2: no SiLU after the convolution": ("hgrn2", every(convs, "activation", "silu")),
    "hgrn2: norm over the whole width": ("hgrn2", normed_a_head),
    "hgrn2: norm's weight": ("hgrn2", every(parts("mixer.norm"), "weight", ones)),
    "hgrn2: norm_eps is not the mixer's": ("hgrn2", every(parts("mixer.norm"), "eps", 1e-2)),
    "hgrn2: norm_eps is the blocks'": ("hgrn2", every(parts("mixer_norm"), "eps", 1e-5)),
    "retnet: decay": ("retnet", fading(zeros)),
    "retnet: a decay a head": ("retnet", fading(lambda d: d[:, :1].expand_as(d))),
    "retnet: the first head's 5": ("retnet", fading(lambda d: torch.log1p(torch.expm1(d) / 2))),
    "retnet: decays of query heads": ("retnet", fading(lambda d: d[:, [0, 0, 1, 1]])),
    "retnet: rotation": ("retnet", having("rotary", "rotary", still)),
    "retnet: the rotation's speed": ("retnet", turned(100.0)),
    "retnet: query heads share keys in order": ("retnet", op(LINEAR, in_turn)),
    "retnet: scale of the query": ("retnet", op(LINEAR, unscaled)),
    "retnet: norm a head": ("retnet", normed_over_all_heads),
    "retnet: norm, then gate": ("retnet", every(gates, "before", False)),
    "retnet: norm's weight": ("retnet", every(gates, "weight", ones)),
    "retnet: the norm's eps": ("retnet", every(gates, "eps", 1e-6)),
    "retnet: the blocks' eps": ("retnet", every(norms, "eps", 1e-6)),
    "retnet: SiLU in the MLP": ("retnet", every(parts("mlp"), "act", lambda _: F.gelu)),
    "retnet: untied head": ("retnet", lambda m: [(m.head, "weight", m.embed.weight)]),
    "retnet: norm without a gate": ("retnet_plain", every(parts("mixer.norm"), "weight", ones)),
    "retnet: tied head": ("retnet_plain", lambda m: [(m.head, "weight", m.embed.weight.flip(0))]),
}


@pytest.mark.parametrize("point", ODD_POINTS)
def test_each_odd_point_moves_the_logits(point: str) -> None:
    name, removal = ODD_POINTS[point]
    check_removal(name, point, removal)


def check_removal(name: str, point: str, removal: Callable[[Model], list[Removal]]) -> None:
    """Without the point our logits leave the fixture's by more than 1e-3, and come back with it."""
    model, (tokens, want) = ours(name), answer(name)
    spans = Spans.of([len(tokens)])

    def without(removals: list[Removal]) -> float:
        if not removals:
            return float((model(tokens, spans) - want).abs().max())
        with changed(*removals[0]):
            return without(removals[1:])

    removals = removal(model)
    assert removals, "nothing was removed"
    assert without(removals) > 1e-3, f"{name} does not notice that {point} is gone"
    same_logits(model(tokens, spans), want, "put back")


# -- what a folder must not say ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key", "value", "fact"),
    [
        ("gla", "hidden_act", "gelu", "hidden_act 'gelu'"),
        ("gla", "feature_map", "relu", "feature_map = 'relu' is not understood"),
        ("gla", "elementwise_affine", False, "elementwise_affine"),
        ("gla", "use_gv", True, "use_gv = True is not supported"),
        ("gla", "expand_k", 0.7, "expand_k gives 22.4 channels"),
        ("gla", "num_kv_heads", 3, "num_heads 4 is no multiple of num_kv_heads 3"),
        ("gla", "attnres_block_size", 2, "attnres_block_size = 2 is not understood"),
        ("gla_hybrid", "attn", {"layers": [1], "heads": 2}, r"unknown keys \['heads'\]"),
        ("gla_hybrid", "attn", {"layers": [1]}, "attn lacks num_heads"),
        ("gla_hybrid", "attn", {"layers": [3], "num_heads": 4}, "layer 3 of 3"),
        ("gla_hybrid", "attn", {"layers": [1], "num_heads": 5}, "5 heads do not divide hidden_size 32"),
        ("linear_attn", "feature_map", "hedgehog", "feature map 'hedgehog' is not known"),
        ("linear_attn", "feature_map", "taylor", "model_type 'based' has it"),
        ("retnet", "feature_map", "relu", "feature_map 'relu'"),
        ("retnet", "expand_v", 0.7, "expand_v gives 22.4 channels"),
        ("retnet", "num_kv_heads", 3, "num_heads 4 is no multiple of num_kv_heads 3"),
        ("hgrn2", "expand_ratio", 12, "hidden_size 32 does not fall into heads"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(name: str, key: str, value: Any, fact: str) -> None:
    raw = {**read_json(FOLDER / name / "config.json"), key: value}
    with pytest.raises(ValueError, match=fact):
        read_config(find(raw["model_type"]).architecture.Config, raw)


def test_what_a_config_leaves_out_follows_from_the_width() -> None:
    """RetNet's values are twice as wide as its keys; an MLP is 2/3 of hidden_ratio widths, in whole 256s."""
    raw = {"model_type": "retnet", "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 1}
    config = read_config(Config, {**raw, "num_heads": 4})
    assert (config.spec.key_dim, config.spec.value_dim, config.width) == (12, 24, 256)
    assert read_config(Config, {**raw, "hidden_size": 768, "num_heads": 8}).width == 1024
    assert read_config(Config, {**raw, "num_heads": 4, "hidden_ratio": 20}).width == 768  # 640 rounded up
    with pytest.raises(ValueError, match="over 3 of 3 channels: an even number is wanted"):
        find("retnet").architecture.build(read_config(Config, {**raw, "num_heads": 16}))
