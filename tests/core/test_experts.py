"""The mixture of experts beside a float64 loop over tokens, with every router that a family here uses."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from constate.core.experts import Experts, ExpertsSpec
from constate.core.mixer import Call
from constate.kernels.dispatch import select
from constate.spans import Spans
from tests import loops

D = 10
SPECS = {
    "jamba": ExpertsSpec(experts=5, per_token=2, width=7, normalise=False),
    "minimax": ExpertsSpec(experts=6, per_token=3, width=9),
    "qwen3_next": ExpertsSpec(experts=6, per_token=2, width=7, shared=5, shared_gate=True),
    "deepseek_v3": ExpertsSpec(
        experts=9, per_token=3, width=7, scores="sigmoid", scale=2.5, groups=3, kept_groups=2,
        correction=True, shared=8,
    ),
    "kimi_linear": ExpertsSpec(
        experts=4, per_token=2, width=7, scores="sigmoid", normalise=False, scale=2.446, correction=True,
        shared=7,
    ),
    "nemotron_h": ExpertsSpec(
        experts=8, per_token=3, width=9, act="relu2", gated=False, scores="sigmoid", scale=0.7, groups=2,
        kept_groups=1, correction=True, shared=5, latent=6, bias=True,
    ),
}  # fmt: skip


def made(spec: ExpertsSpec) -> Experts:
    torch.manual_seed(3)
    layer = Experts(D, spec)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.copy_(torch.randn(p.shape) * (1.4 * p.shape[-1] ** -0.5 if p.ndim > 1 else 0.3))
            if name == "router.correction":
                p.mul_(2)  # enough to choose another expert now and then
    return layer


def call(n: int) -> Call:
    return Call(Spans.of([n]), select("torch"), (0,), torch.zeros(1, dtype=torch.int64))


def inputs(n: int) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(n))


def wanted(layer: Experts, x: Tensor, spec: ExpertsSpec) -> Tensor:
    return loops.experts(loops.params(layer), x.double(), asdict(spec)).y


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("n", [0, 1, 2, 33])
def test_experts_equal_the_loop(name: str, n: int) -> None:
    layer, x = made(SPECS[name]), inputs(n)
    want = wanted(layer, x, SPECS[name])
    got = layer(x, call(n))
    assert got.shape == want.shape and got.dtype == torch.float32
    assert torch.allclose(
        got.double(), want, rtol=0, atol=1e-5 * max(1.0, float(want.abs().max()) if n else 0)
    )


# What a router could leave out: each must move what some token hears by more than the loop's tolerance.
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "weights are normalised": ("jamba", {"normalise": True}),
    "weights are not normalised": ("minimax", {"normalise": False}),
    "one expert fewer": ("minimax", {"per_token": 2}),
    "sigmoid for softmax": ("qwen3_next", {"scores": "sigmoid"}),
    "softmax for sigmoid": ("kimi_linear", {"scores": "softmax"}),
    "the shared expert's gate is left out": ("qwen3_next", {"shared_gate": False}),
    "the shared expert is left out": ("deepseek_v3", {"shared": 0}),
    "the scale is left out": ("deepseek_v3", {"scale": 1.0}),
    "groups are ignored": ("deepseek_v3", {"groups": 1, "kept_groups": 1}),
    "one group fewer": ("deepseek_v3", {"kept_groups": 1}),
    "the correction is left out": ("deepseek_v3", {"correction": False}),
    "relu2 is SiLU": ("nemotron_h", {"act": "silu"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_part_of_a_router_is_seen(fault: str) -> None:
    name, change = FAULTS[fault]
    layer, x = made(SPECS[name]), inputs(33)
    without = wanted(layer, x, replace(SPECS[name], **change))
    assert (layer(x, call(33)).double() - without).abs().max() > 1e-2


def test_the_correction_has_no_say_in_the_weights() -> None:
    layer, x = made(SPECS["deepseek_v3"]), inputs(33)
    before, correction = layer(x, call(33)), layer.router.correction
    assert correction is not None
    with torch.no_grad():
        correction += 5.0
    assert torch.equal(layer(x, call(33)), before), "what all experts gain chooses none and weighs none"


@pytest.mark.parametrize("name", SPECS)
def test_gathered_weights_and_all_experts_give_what_grouped_tokens_give(name: str) -> None:
    layer, x = made(SPECS[name]), inputs(5)
    chosen, _ = layer.router(x)
    inner = x if layer.latent_in is None else layer.latent_in(x)
    with torch.no_grad():
        grouped = layer._grouped(inner, chosen)
        others = layer._gathered(inner, chosen), layer._all(inner, chosen)
    assert grouped.shape == (5, SPECS[name].per_token, inner.shape[1])
    for other in others:
        assert torch.allclose(grouped, other, rtol=0, atol=1e-5 * float(grouped.abs().max()))


def test_a_compiled_layer_asks_in_one_graph() -> None:
    """Few tokens by gathered weights, many by asking all experts: the host may not ask how many each has."""
    layer = made(SPECS["deepseek_v3"])
    compiled = torch.compile(layer.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        for n in (1, 33):
            x = inputs(n)
            assert torch.allclose(compiled(x, call(n)), layer(x, call(n)), rtol=0, atol=1e-5)


def test_gradients_equal_the_loops() -> None:
    for name, spec in SPECS.items():
        layer, x, weight = made(spec), inputs(9).requires_grad_(), torch.randn(9, D)
        (layer(x, call(9)) * weight).sum().backward()
        p = {key: w.detach().double().requires_grad_() for key, w in layer.named_parameters()}
        exact = x.detach().double().requires_grad_()
        (loops.experts(p, exact, asdict(spec)).y * weight).sum().backward()
        own = {"x": x, **dict(layer.named_parameters())}
        for key, w in {"x": exact, **p}.items():
            if key == "router.correction":
                assert own[key].grad is None, "a choice has no gradient"
                continue
            got, want = own[key].grad, w.grad
            assert got is not None and want is not None
            bound = 1e-5 * max(1.0, float(want.detach().abs().max()))
            assert torch.allclose(got.double(), want, rtol=0, atol=bound), f"{name}: {key}"


def test_a_token_hears_the_same_in_any_company() -> None:
    layer, x = made(SPECS["deepseek_v3"]), inputs(33)
    layer.requires_grad_(False)
    alone = torch.cat([layer(t[None], call(1)) for t in x])
    assert torch.allclose(layer(x, call(33)), alone, rtol=0, atol=1e-5 * float(alone.abs().max()))
    shuffled = torch.randperm(33)
    assert torch.allclose(layer(x[shuffled], call(33)), alone[shuffled], rtol=0, atol=1e-5)


def test_scores_stay_float32_in_a_model_of_less() -> None:
    layer = made(SPECS["deepseek_v3"]).bfloat16()
    x = inputs(33).bfloat16()
    chosen, weights = layer.router(x)
    assert weights.dtype == torch.float32
    exact = (x.double() @ layer.router.weight.double().T).sigmoid()
    total = exact.gather(1, chosen).sum(-1, keepdim=True)
    assert torch.allclose(weights.double(), 2.5 * exact.gather(1, chosen) / total, rtol=1e-5, atol=0)
    assert layer(x, call(33)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", SPECS)
def test_cost_counts_the_experts_that_are_asked(name: str) -> None:
    layer, spec = made(SPECS[name]), SPECS[name]
    for n in (1, 13):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(inputs(n), call(n))
        assert layer.cost(n, 0).total_flops == counter.get_total_flops()
    one = layer.up[0].nbytes + layer.down[0].nbytes
    others = sum(p.nbytes for p in layer.parameters()) - spec.experts * one
    assert layer.cost(1, 0).weight_bytes == others + spec.per_token * one
    assert abs(layer.cost(10_000, 0).weight_bytes - others - spec.experts * one) <= 2
    assert layer.cost(0, 0).weight_bytes == others


def test_how_many_experts_a_few_tokens_ask() -> None:
    """Half of the experts a token: of the rest each next token asks half. Rows together ask as tokens do."""
    layer = Experts(D, ExpertsSpec(experts=8, per_token=4, width=7))
    stacks = layer.up.nbytes + layer.down.nbytes
    for tokens, share in ((1, 1 / 2), (2, 3 / 4), (3, 7 / 8)):
        read = layer.reads(tokens)
        assert read[id(layer.up)] + read[id(layer.down)] == stacks * share


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scores": "sparsemax"}, "'softmax' or 'sigmoid'"),
        ({"groups": 4}, "groups of one size"),
        ({"groups": 3, "kept_groups": 4}, "groups of one size"),
        ({"groups": 9, "kept_groups": 3}, "best two"),
        ({"per_token": 10}, "not as many"),
        ({"per_token": 0}, "not as many"),
        ({"groups": 3, "kept_groups": 1, "per_token": 4}, "not as many"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(ExpertsSpec(experts=9, per_token=2, width=5), **change)
