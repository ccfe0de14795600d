"""Where linear attention goes wrong in published code: pads that are half masked, sums that are not
carried, gates at their ends (cases A4 and F4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from constate.core.cache import Cache
from constate.core.feature_maps import taylor
from constate.core.linear import Linear
from constate.core.mixer import Call
from constate.core.model import Model
from constate.core.norms import RMSNorm
from constate.core.state import Matrix
from constate.kernels.dispatch import select
from constate.linear_attn.hgrn2 import HGRN2, HGRN2Spec
from constate.linear_attn.linear_attn import LinearAttention, LinearAttentionSpec
from constate.loading import find, load, save
from constate.spans import Spans
from tests import loops
from tests.backends import BACKENDS
from tests.models import MODELS, VOCAB, WINDOW, make, spread, tokens
from tests.referee import referee, same_logits, same_state
from tests.test_fla import having, told
from tests.test_twins import Removal, changed

FAMILIES = ("gla", "retnet", "linear_attn", "based", "delta_net", "gated_deltanet", "hgrn2")


def call_of(backend: str, *lengths: int) -> Call:
    rows = len(lengths)
    return Call(Spans.of(lengths), select(backend, "cpu"), (0,) * rows, torch.zeros(rows, dtype=torch.int64))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_hole_in_a_row_is_as_if_it_had_never_been(name: str) -> None:
    """Case A4: mask 1,1,0,0,1,1. The row reads nothing where its neighbour reads two tokens: output,
    state and key sum are those of the row without the hole."""
    model, judge = make(name), referee(name)
    own = tokens(4, seed=3)

    def run(other: torch.Tensor) -> tuple[torch.Tensor, Cache]:
        cache, seen = model.init_cache(2), []
        for mine, theirs in zip((own[:2], own[:0], own[2:]), other.split(2), strict=True):
            logits = model(torch.cat([mine, theirs]), Spans.of([len(mine), 2]), cache)
            seen.append(logits[: len(mine)])
        return torch.cat(seen), cache.select([0])

    logits, cache = run(tokens(6, seed=4))
    want = judge.read(own)
    same_logits(logits, want.logits, name)
    same_state(cache, want.cache, name)
    again, cache_again = run((tokens(6, seed=4) + 1) % VOCAB)
    assert torch.equal(again, logits), "the row changed with what stood beside its hole"
    for (what, t, _), (_, other, _) in zip(cache.leaves(), cache_again.leaves(), strict=True):
        assert torch.equal(t, other), what


# -- Based, of which no whole model is published: the float64 loop is its twin -------------------------


def first_order(x: Tensor) -> Tensor:
    k = x.shape[-1]
    return F.pad(taylor(x)[..., : 1 + k], (0, k * (k + 1) // 2))


def pairs_once(x: Tensor) -> Tensor:
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1])
    features = taylor(x)
    return torch.cat(
        [features[..., : 1 + x.shape[-1]], features[..., 1 + x.shape[-1] :] * (0.5 ** (i != j))], -1
    )


def mapped(change: Callable[[Tensor], Tensor]) -> Callable[[Model], list[Removal]]:
    return having("map", "map", lambda right: replace(right, apply=change))


BASED: dict[str, Callable[[Model], list[Removal]]] = {
    "the second order": mapped(first_order),
    "each pair of channels counts twice": mapped(pairs_once),
    "the root of the dimension": mapped(lambda x: taylor(x * x.shape[-1] ** 0.25)),
    "the normaliser": told(normaliser=False),
    "no norm of the output": having("map", "norm", lambda _: RMSNorm(8).requires_grad_(False)),
    "the window": having("window", "window", None),
    "the window to the token": having("window", "window", WINDOW + 1),
    "rotary in the window": having("rotary", "rotary", None),
}


@pytest.mark.parametrize("point", BASED)
def test_each_odd_point_of_based_moves_the_logits(point: str) -> None:
    model, prompt = make("based"), tokens(60)
    want, spans = loops.model(model, prompt, MODELS["based"].raw), Spans.of([60])
    same_logits(model(prompt, spans), want, "whole")

    def without(removals: list[Removal]) -> float:
        if not removals:
            return float((model(prompt, spans) - want).abs().max())
        with changed(*removals[0]):
            return without(removals[1:])

    assert without(BASED[point](model)) > 1e-3, f"nothing notices that {point} is gone"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_is_written_reads_as_itself(name: str, tmp_path: Path) -> None:
    model, spans = make(name), Spans.of([30])
    model.architecture = find(MODELS[name].raw["model_type"]).architecture
    save(model, tmp_path)
    again = load(tmp_path, backend="torch")
    assert again.config == model.config
    assert torch.equal(again(tokens(30), spans), model(tokens(30), spans))


# -- sums and gates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 15, 33, 65])
def test_the_key_sum_counts_every_key_once_and_nothing_else(n: int, backend: str) -> None:
    """The tail of a tile has no features, where elu + 1 of a zero key would be ones."""
    spec = LinearAttentionSpec(heads=2, key_dim=6, value_dim=5)
    mixer = LinearAttention(12, spec).requires_grad_(False)
    spread(mixer, seed=1)
    x = torch.randn(n + 7, 12)
    state = mixer.init_state(3, 0)
    assert isinstance(state, Matrix)
    mixer(x, call_of(backend, n, 0, 7), state)
    keys = (x.double() @ mixer.in_proj.weight.double().T)[:, 12:24].unflatten(-1, (2, 6))
    features = F.elu(keys) + 1
    for row, part in enumerate((slice(0, n), slice(n, n), slice(n, None))):
        want = features[part].sum(0)
        off = float((state.s[row, :, :, -1].double() - want).abs().max())
        assert off <= 5e-5 * max(1e-30, float(want.abs().max())), f"row {row} of {n}: off by {off:.1e}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("feature_map", ["elu", "relu", "taylor"])
def test_normalised_outputs_are_means_of_values(feature_map: str, backend: str) -> None:
    """Weights that sum to one: a value that never changes comes out as it is, however long the row; keys
    without any feature give zero, not 0/0."""
    spec = LinearAttentionSpec(3, 4, 5, feature_map=feature_map, output_norm=False)
    mixer = LinearAttention(8, spec).requires_grad_(False)
    spread(mixer, seed=2)
    x = torch.cat([torch.ones(200, 1), torch.randn(200, 7)], -1)
    mixer.in_proj.weight[-15:] = 0
    mixer.in_proj.weight[-15:, 0] = torch.randn(15)
    value = mixer.in_proj.weight[-15:, 0]
    mixer.out_proj = Linear(15, 15, bias=False).requires_grad_(False)
    mixer.out_proj.weight.copy_(torch.eye(15))
    y = mixer(x, call_of(backend, 200)).unflatten(-1, (3, 5))
    seen = y.abs().sum(-1) > 0
    assert bool(seen.float().mean() > (0.8 if feature_map == "relu" else 0.99))
    off = (y - value.view(3, 5))[seen].abs().max()
    assert float(off) <= 1e-4 * float(value.abs().max())
    assert bool(y.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_forget_gates_at_their_ends(backend: str) -> None:
    """Case F4: log-decays from 0 to -1e4 in one tile; outputs and gradients stay finite. A gate that is
    shut replaces the state, and one that is open writes nothing."""
    torch.manual_seed(0)
    mixer = HGRN2(6, HGRN2Spec(heads=1, key_dim=6, value_dim=6), layer=1, table=2)
    with torch.no_grad():
        mixer.in_proj.weight.copy_(torch.eye(6).repeat(3, 1))
        assert mixer.bounds is not None
        mixer.bounds[0], mixer.bounds[1] = 200.0, -200.0  # a bound that is 0 in float32
        mixer.bounds[:, 5] = torch.tensor([-200.0, 200.0])  # and one that is 1
    ends = torch.tensor([0.0, -1e-6, -5, -50, -1e4, 50])
    x = ends[torch.randint(0, 6, (200, 6))].requires_grad_()
    y = mixer(x, call_of(backend, 200))
    y.square().sum().backward()
    assert bool(y.isfinite().all()) and x.grad is not None and bool(x.grad.isfinite().all())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in mixer.parameters())

    shut = torch.tensor([[-1e4] * 5 + [50.0]])
    state = mixer.init_state(1, 0)
    with torch.no_grad():
        mixer(torch.randn(9, 6), call_of(backend, 9), state)
        mixer(shut, call_of(backend, 1), state)
    s = next(t for name, t, _ in state.leaves() if name == "ssm")[0, 0]
    assert torch.allclose(s[:5], shut.expand(5, 6), rtol=1e-6), "what was there is gone, and k = 1"
    assert float(s[5].abs().max()) < 1e-2, "a bound of 1 forgets nothing and writes nothing"
