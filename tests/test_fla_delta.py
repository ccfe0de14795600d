"""The odd points of the delta rule's families beside flash-linear-attention's logits; see test_fla.py.

RWKV7 is the table of RWKV-7's conventions, each with its removal, for any model of that family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from constate.core.architecture import read_config
from constate.core.checkpoint import read_json
from constate.core.model import Model
from constate.core.norms import LayerNorm, unit
from constate.kernels import reference
from constate.linear_attn import gated_deltanet, rwkv7
from constate.linear_attn.rwkv7 import TimeMix
from constate.loading import find
from tests.test_fla import FOLDER, check_removal, having, ones, op, unscaled, zeros
from tests.test_twins import Removal, convs, every, gates, mixers, parts

Points = Mapping[str, Callable[[Model], list[Removal]]]
DELTA, DPLR = "gated_delta_scan", "dplr_delta_scan"


def untied(model: Model) -> list[Removal]:
    return [(model.head, "weight", model.embed.weight)]


def tied(model: Model) -> list[Removal]:
    return [(model.head, "weight", model.embed.weight.flip(0))]


def only_writes(
    scan: Any, q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Tensor, *rest: Any, **o: Any
) -> Any:
    return reference.gated_linear_scan(q, k, v * beta[..., None], g, *rest, **o)


def rates(change: Callable[[Tensor], Tensor]) -> Callable[[Model], list[Removal]]:
    return op(DELTA, lambda scan, q, k, v, g, beta, *rest, **o: scan(q, k, v, g, change(beta), *rest, **o))


def erases_the_undecayed(
    scan: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *rest: Any, **o: Any
) -> Any:
    h = v.shape[1]
    q, k = (x.repeat_interleave(h // x.shape[1], 1) for x in (q, k))
    write = k * beta[..., None]
    return reference.dplr_delta_scan(q, write, v, g, k, -write, *rest, **o)


def interleaved(scan: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **o: Any) -> Any:
    times = v.shape[1] // k.shape[1]
    return scan(q.repeat(1, times, 1), k.repeat(1, times, 1), v, *rest, **o)


def without_activation(model: Model) -> list[Removal]:
    act = [(m, "act", "identity") for m in mixers(model)]
    return [*act, *((m.conv, "activation", None) for m in mixers(model) if m.conv is not None)]


def blocks_eps(model: Model) -> list[Removal]:
    return [(b.mixer_norm, "eps", 1e-6) for b in model.blocks]


DELTA_NET: Points = {
    "negative eigenvalues": having("rate", "negative", False),
    "keys of unit length": having("rate", "qk_norm", lambda _: lambda x: x),
    "beta is a sigmoid": rates(lambda beta: torch.full_like(beta, 1.0)),
    "a key's value is replaced": op(DELTA, only_writes),
    "scale of the query": op(DELTA, unscaled),
    "SiLU of q and k": without_activation,
    "norm, then gate": every(gates, "before", False),
    "norm's weight": every(gates, "weight", ones),
    "the norm's eps": every(gates, "eps", 1e-6),
    "the blocks' eps": blocks_eps,
    "untied head": untied,
}
DELTA_NET_SUM: Points = {
    "elu plus one": having("rate", "act", "relu"),
    "keys that sum to one": having("rate", "qk_norm", lambda _: unit),
    "no rates": rates(lambda beta: 0.9 * beta),
    "no negative eigenvalues": rates(lambda beta: 2 * beta),
    "q and k: no SiLU after the convolution": every(convs, "activation", "silu"),
    "norm without a gate": every(parts("mixer.norm"), "weight", ones),
    "the norm's eps": every(parts("mixer.norm"), "eps", 1e-6),
}
DELTA_NET_PLAIN: Points = {
    "SiLU without a convolution": without_activation,
    "no negative eigenvalues": rates(lambda beta: 2 * beta),
    "tied head": tied,
}
GATED: Points = {
    "negative eigenvalues": having("a_log", "negative", False),
    "keys of unit length": lambda model: [(gated_deltanet, "unit", lambda x: x)],
    "beta is a sigmoid": rates(lambda beta: torch.full_like(beta, 1.0)),
    "a key's value is replaced": op(DELTA, only_writes),
    "decays, then erases": op(DELTA, erases_the_undecayed),
    "value heads share keys in order": op(DELTA, interleaved),
    "scale of the query": op(DELTA, unscaled),
    "A_log": every(mixers, "a_log", zeros),
    "dt_bias": every(mixers, "dt_bias", zeros),
    "SiLU after the convolution": every(convs, "activation", None),
    "norm, then gate": every(gates, "before", False),
    "norm's weight": every(gates, "weight", ones),
    "the norm's eps": every(gates, "eps", 1e-6),
    "the blocks' eps": blocks_eps,
    "untied head": untied,
}
GATED_PLAIN: Points = {
    "norm without a gate": every(parts("mixer.norm"), "weight", ones),
    "the norm's eps": every(parts("mixer.norm"), "eps", 1e-6),
    "no negative eigenvalues": rates(lambda beta: 2 * beta),
    "tied head": tied,
}


# -- RWKV-7 -----------------------------------------------------------------------------------------


def each(change: Callable[[TimeMix], tuple[str, Any]]) -> Callable[[Model], list[Removal]]:
    """An attribute of every time mix, or of something in it, by what stood there."""
    return lambda model: [(m, *change(m)) for m in mixers(model)]


def linear_where(name: str) -> Callable[[Model], list[Removal]]:
    """The low-rank projection without its activation."""

    def removal(model: Model) -> list[Removal]:
        found = [getattr(m, name) for m in mixers(model)]
        return [(low, "forward", lambda x, act, right=low.forward: right(x)) for low in found]

    return removal


def kappa_of_the_scaled_key(m: TimeMix) -> tuple[str, Any]:
    def operands(*args: Any, right: Any = m._operands) -> tuple[Tensor, ...]:
        r, k, v, decay, a, b, gate = right(*args)
        kappa = unit(k * m.kappa_scale.view(m.h, m.dk), m.kappa_eps)
        return r, k, v, decay, -kappa, kappa * (b / -a), gate

    return "_operands", operands


def bonus_of_the_unscaled_key(m: TimeMix) -> tuple[str, Any]:
    def leave(o: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor, right: Any = m._leave) -> Tensor:
        return right(o, r, torch.ones_like(k), v, gate)

    return "_leave", leave


def bonus_behind_the_gate(m: TimeMix) -> tuple[str, Any]:
    def leave(o: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        bonus = (r * k * m.bonus).sum(-1, keepdim=True) * v
        return m.out_proj(m.norm(o.flatten(1)) * gate + bonus.flatten(1))

    return "_leave", leave


def relu_not_squared(model: Model) -> list[Removal]:
    def plain(m: Any) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, delta: m.down(F.relu(m.up(torch.addcmul(x, delta, m.mix))))

    return [(block.mlp, "_mlp", plain(block.mlp)) for block in model.blocks]


def decays_first(
    scan: Any, r: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, *rest: Any, **o: Any
) -> Any:
    return scan(r, k, v, g, a * g.exp(), *rest, **o)


def rates_of_one(
    scan: Any, r: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor, *rest: Any, **o: Any
) -> Any:
    return scan(r, k, v, g, a, -a, *rest, **o)


def layer_norms(model: Model) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, LayerNorm)]


def later(model: Model) -> list[Any]:
    return mixers(model)[1:]


def reordered(*order: int) -> Callable[[Model], list[Removal]]:
    return every(mixers, "mix", lambda mix: mix[list(order)])


RWKV7: Points = {
    "layer norm behind the embedding": lambda model: [(model, "embed_norm", None)],
    "layer norms' bias": every(layer_norms, "bias", zeros),
    "token shift": every(mixers, "mix", zeros),
    "token shift in the channel mix": every(parts("mlp"), "mix", zeros),
    "mixes: r before w": reordered(1, 0, 2, 3, 4, 5),
    "mixes: w before k": reordered(0, 2, 1, 3, 4, 5),
    "mixes: v before a": reordered(0, 1, 2, 4, 3, 5),
    "mixes: a before g": reordered(0, 1, 2, 3, 5, 4),
    "the strongest decay": lambda model: [(rwkv7, "STRONGEST", -1.0)],
    "decay bias": every(parts("mixer.decay"), "bias", zeros),
    "tanh in the decay": linear_where("decay"),
    "rate's bias": every(parts("mixer.rate"), "bias", zeros),
    "a rate for each channel": op(DPLR, rates_of_one),
    "sigmoid in the gate": linear_where("gate"),
    "k_k": every(mixers, "kappa_scale", ones),
    "k_a": every(mixers, "rate_share", zeros),
    "removal key from the key before it is scaled": each(kappa_of_the_scaled_key),
    "the erase reads the undecayed state": op(DPLR, decays_first),
    "no scale of r": op(DPLR, lambda scan, *args, **o: scan(*args, **{**o, "scale": 0.5})),
    "group norm's eps": every(parts("mixer.norm"), "eps", 1e-2),
    "group norm's weight": every(parts("mixer.norm"), "weight", ones),
    "group norm's bias": every(parts("mixer.norm"), "bias", zeros),
    "bonus": every(mixers, "bonus", zeros),
    "bonus with the key": each(bonus_of_the_unscaled_key),
    "bonus before the gate": each(bonus_behind_the_gate),
    "the first layer's value": every(later, "share", None),
    "value share's bias": every(lambda model: [m.share for m in later(model)], "bias", zeros),
    "relu squared": relu_not_squared,
    "untied head": untied,
}
RWKV7_FLA: Points = {
    **RWKV7,
    "group norm a head": every(parts("mixer.norm"), "groups", 1),
    "layer norms' eps": every(layer_norms, "eps", 1e-5),
}
RWKV7_PLAIN: Points = {
    "no norm of the embedding": lambda model: [(model, "embed_norm", LayerNorm(32).requires_grad_(False))],
    "group norm's eps": every(parts("mixer.norm"), "eps", 1e-5),
    "group norm's bias": every(parts("mixer.norm"), "bias", zeros),
    "tied head": tied,
}

POINTS: Mapping[str, Points] = {
    "delta_net": DELTA_NET,
    "delta_net_sum": DELTA_NET_SUM,
    "delta_net_plain": DELTA_NET_PLAIN,
    "gated_deltanet": GATED,
    "gated_deltanet_plain": GATED_PLAIN,
    "rwkv7": RWKV7_FLA,
    "rwkv7_plain": RWKV7_PLAIN,
}


@pytest.mark.parametrize(("name", "point"), [(name, point) for name in POINTS for point in POINTS[name]])
def test_each_odd_point_moves_the_logits(name: str, point: str) -> None:
    check_removal(name, point, POINTS[name][point])


@pytest.mark.parametrize(
    ("name", "key", "value", "fact"),
    [
        ("delta_net", "qk_norm", "max", "norm 'max'"),
        ("delta_net", "qk_activation", "gelu", "activation 'gelu'"),
        ("delta_net", "expand_v", 0.7, "expand_v gives 22.4 channels"),
        ("gated_deltanet", "num_v_heads", 3, "num_v_heads 3 is no multiple of num_heads 2"),
        ("gated_deltanet", "expand_v", 0.7, "expand_v gives 8.4 channels"),
        ("gated_deltanet", "output_gate_activation", "sigmoid", "only 'swish'"),
        ("rwkv7", "hidden_act", "gelu", "'sqrelu' is what"),
        ("rwkv7", "num_heads", 3, "num_heads 3 of head_dim 8 are not hidden_size 32"),
        ("rwkv7", "value_dim", [32, 64, 64], "one for all layers"),
        ("rwkv7", "value_dim", 33, "not shared evenly by 4 heads"),
        ("rwkv7", "attn", {"layers": [1], "num_heads": 4}, "attn = .* is not understood"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(name: str, key: str, value: Any, fact: str) -> None:
    raw = {**read_json(FOLDER / name / "config.json"), key: value}
    architecture = find(raw["model_type"]).architecture
    with pytest.raises(ValueError, match=fact):
        architecture.build(read_config(architecture.Config, raw))
