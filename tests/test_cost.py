"""What a model says it costs, beside what PyTorch counts and what is allocated.

FLOPs: PyTorch's own counter sees the matrix products of the token loop (whose attention computes exactly the
pairs that are seen); a counter of elementwise work sees its scans and convolutions. Bytes: storages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from constate.core.cache import Cache
from constate.core.cost import Cost
from constate.core.experts import Experts
from constate.core.latent import LatentAttention
from constate.core.mixer import Mixer
from constate.core.model import Model
from constate.spans import Spans
from tests.models import KV, MODELS, RECURRENT, WINDOW, make, tokens

NEW, PAST = 37, 11
aten = torch.ops.aten


class Elementwise(TorchDispatchMode):
    """Multiplications and additions of tensors of `size` elements; a sum is an addition each.

    exp and other functions of one element are not counted, as `Cost` says.
    """

    COUNTED = (aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.sub.Tensor)

    def __init__(self, size: int):
        super().__init__()
        self.size, self.flops = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.COUNTED and out.numel() == self.size:
            self.flops += out.numel()
        elif func is aten.sum.dim_IntList and args[0].numel() == self.size:
            self.flops += args[0].numel()
        return out


def counted(model: Model, cache: Cache | None = None, new: int = NEW) -> Counter[str]:
    """FLOPs of one forward of `new` tokens by the token loop: "matmul", "scan" and "conv"."""
    flops: Counter[str] = Counter()

    def watch(kind: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if kind == "conv" or op.__name__ == "linear_recurrence_scan":
                size = args[0].shape[1]
            else:  # the state of one row: every operand of that size is work on the state
                b, v = args[1], args[2]
                size = (
                    args[2].numel()
                    if op.__name__ == "selective_scan"
                    else v.shape[1] * b.shape[2] * v.shape[2]
                )
            with Elementwise(size) as mode:
                result = op(*args, **options)
            flops[kind] += mode.flops
            return result

        return call

    ops = model.ops
    kinds = {
        "gated_linear_scan": "scan",
        "gated_delta_scan": "scan",
        "dplr_delta_scan": "scan",
        "selective_scan": "scan",
        "linear_recurrence_scan": "scan",
        "short_conv": "conv",
    }
    model.ops = replace(ops, **{name: watch(kind, getattr(ops, name)) for name, kind in kinds.items()})
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens(new), Spans.of([new]), cache, at="last")
    model.ops = ops
    flops["matmul"] = counter.get_total_flops()
    return flops


def matmuls(cost: Cost) -> int:
    return sum(n for kind, n in cost.flops.items() if kind not in ("scan", "conv"))


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_what_pytorch_counts(name: str) -> None:
    model = make(name, "reference")
    cache = model.init_cache(1)
    for past in (0, NEW):
        said, seen = model.cost(NEW, past), counted(model, cache)
        assert matmuls(said) == pytest.approx(seen["matmul"], rel=0.02), f"after {past} tokens"
        assert said.flops.get("scan", 0) == pytest.approx(seen["scan"], rel=0.02), f"after {past} tokens"
        assert said.flops.get("conv", 0) == pytest.approx(seen["conv"], rel=0.02), f"after {past} tokens"
        assert said.total_flops == sum(said.flops.values())


def test_the_counters_see_each_component() -> None:
    """None of the comparisons above is of zero with zero."""
    seen = counted(make("composed", "reference"))
    assert all(seen[kind] > 0 for kind in ("matmul", "scan", "conv")), dict(seen)
    said = make("composed").cost(NEW, 0).flops
    assert {"projection", "attention", "mlp", "head", "scan", "conv"} <= {k for k, n in said.items() if n}


def unasked(layer: Experts, tokens: int) -> int:
    """Bytes of the experts that, all being as likely, no token asks."""
    missed = (1 - layer.spec.per_token / layer.spec.experts) ** tokens
    return sum(stack.nbytes - round(stack.nbytes * (1 - missed)) for stack in (layer.up, layer.down))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_cost_their_storage(name: str, dtype: torch.dtype) -> None:
    model = make(name).to_dtype(dtype)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert model.weight_bytes == sum(storages.values())
    tied = model.head.weight is model.embed.weight
    assert tied == MODELS[name].raw.get("tie_word_embeddings", False)
    rows = 0 if tied else model.embed.weight.nbytes - 5 * model.embed.weight[0].nbytes
    left = sum(unasked(mixer, 5) for mixer in model.mixers() if isinstance(mixer, Experts))
    assert model.cost(5, 0).weight_bytes == model.weight_bytes - rows - left, (
        "5 tokens read 5 rows of an untied embedding, and no expert that none of them asks"
    )
    assert model.cost(5, 0, rows=3).weight_bytes <= model.weight_bytes, "rows share the weights"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_held_bytes_are_what_a_cache_allocates(name: str, state_dtype: torch.dtype) -> None:
    model, entry = make(name), MODELS[name]
    model.state_dtype = state_dtype
    for n in (1, WINDOW - 1, WINDOW, 50):
        cache = model.init_cache(3, capacity=n)
        model(tokens(3 * n), Spans.of([n, n, n]), cache)
        said = model.cost(0, n, rows=3).held
        by_kind = Counter()
        for _, t, leaf in cache.leaves():
            if leaf.kind:
                full = 1 if not leaf.ring else min(n, WINDOW) / WINDOW
                by_kind[leaf.kind] += int(t.untyped_storage().nbytes() * full)
        assert {k: v for k, v in by_kind.items() if v} == {k: v for k, v in said.items() if v}
        growing = 3 * (entry.slope * n + entry.ring * min(n, WINDOW))
        assert said.get("kv", 0) == growing, f"the slope written by hand for {name} says {growing}"


def test_a_recurrence_is_constant_and_attention_has_its_slope() -> None:
    for name, entry in MODELS.items():
        model = make(name)
        near, far = (sum(model.cost(0, n).held.values()) for n in (1000, 100_000))
        assert far - near == 99_000 * entry.slope
        assert model.cost(1, 100_000).total_flops >= model.cost(1, 1000).total_flops
    for name in RECURRENT:
        if not MODELS[name].slope:
            assert make(name).cost(1, 100_000).flops == make(name).cost(1, 1000).flops


def test_traffic_of_a_step() -> None:
    """A step reads and writes a recurrent state whole, reads all KV and writes one token of it."""
    model = make("composed")
    one, more = model.cost(1, 99), model.cost(1, 99, rows=4)
    cache = model.init_cache(1).bytes()
    for kind in ("state", "conv"):
        assert one.read[kind] == one.written[kind] == cache[kind]
    assert one.read["kv"] == KV * 100 + KV * WINDOW
    assert one.written["kv"] == 2 * KV
    assert more.read == {k: 4 * n for k, n in one.read.items()}
    assert one.traffic == one.weight_bytes + sum(one.read.values()) + sum(one.written.values())
    idle = model.cost(0, 99)
    assert not any(idle.flops.values()) and not any(idle.read.values()) and not any(idle.written.values())


@pytest.mark.parametrize("name", MODELS)
def test_costs_of_pieces_add_up(name: str) -> None:
    model = make(name)
    whole, first, second = model.cost(60, PAST), model.cost(25, PAST), model.cost(35, PAST + 25)
    both = first + second
    again = {"head": first.flops["head"]}
    again["latent"] = sum(_made_again(mixer, 35, PAST + 25) for mixer in model.mixers())
    for kind, flops in both.flops.items():
        assert flops - again.get(kind, 0) == whole.flops[kind], f"two pieces pay twice for {kind}"
    assert both.weights.keys() == whole.weights.keys()


def _made_again(mixer: Mixer, new: int, past: int) -> int:
    """What a second piece pays for the keys and values of the first one's latents. (The sizes here are such
    that all three expand, or none does.)"""
    if not isinstance(mixer, LatentAttention) or not mixer._expands(new, past):
        return 0
    return 2 * past * mixer.kv_proj.weight.numel()


def test_a_shared_weight_counts_once() -> None:
    weight = Tensor(torch.zeros(3, 5))
    cost = Cost(weights={id(weight): 60}) + Cost(weights={id(weight): 60})
    assert cost.weight_bytes == 60
    assert cost.times(7).weight_bytes == 60
