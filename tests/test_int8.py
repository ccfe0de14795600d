"""Weights in 8 bits (case N1): what becomes int8, what must not, and that a model then computes with what it
stores.

Which rows stay exact is asserted twice: as a list by hand, and by what it is for: with the same input, decays
and gates reach the scans unchanged to the bit.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import constate
from constate.bench.shapes import random_model
from constate.cli import main
from constate.core.adapted import Adapted
from constate.core.attention import Attention
from constate.core.convolution import Convolution
from constate.core.cross_layer import CrossLayerAttention
from constate.core.experts import Experts
from constate.core.int8 import plan, quantised, restored, to_int8
from constate.core.latent import LatentAttention
from constate.core.linear import Int8Embedding, Int8Linear
from constate.core.mixer import Call, Mixer
from constate.core.mlp import MLP, GatedMLP
from constate.core.model import Model
from constate.core.parallel import Parallel
from constate.hybrid.zamba2 import Hybrid
from constate.kernels.dispatch import Ops, select
from constate.linear_attn.delta_net import DeltaNet
from constate.linear_attn.gated_deltanet import GatedDeltaNet
from constate.linear_attn.gla import GLA
from constate.linear_attn.hgrn2 import HGRN2
from constate.linear_attn.kda import KDA
from constate.linear_attn.lightning import LightningAttention
from constate.linear_attn.linear_attn import LinearAttention
from constate.linear_attn.retnet import Retention
from constate.linear_attn.rwkv7 import ChannelMix, TimeMix
from constate.loading import load, save
from constate.spans import Spans
from constate.ssm.mamba import Mamba
from constate.ssm.mamba2 import Mamba2
from constate.ssm.rg_lru import RGLRU
from constate.training.text import shipped
from tests.backends import BACKENDS
from tests.models import MODELS, VOCAB, make, tokens
from tests.referee import same_logits

# By hand: the linear layers of each mixer, and which of their rows are float32 beside int8 ones ("all": the
# layer is left alone).
LOW_RANK = {f"{part}.{end}": "all" for part in ("decay", "rate", "share") for end in ("down", "up")}
LAYERS: dict[type[Mixer], Callable[[Any], dict[str, Any]]] = {
    Attention: lambda m: {adapted("qkv", m.qkv): [], "out": [], **({} if m.gate is None else {"gate": []})},
    CrossLayerAttention: lambda m: {"q": [], "out": [], **({} if m.gate is None else {"gate": []})},
    LatentAttention: lambda m: {
        "in_proj": [],
        "kv_proj": "all",
        "out": [],
        **({} if m.q_proj is None else {"q_proj": []}),
    },
    GatedMLP: lambda m: {adapted("gate_up", m.gate_up): [], "down": []},
    MLP: lambda m: {"up": [], "down": []},
    Experts: lambda m: {
        **({} if m.latent_in is None else {"latent_in": [], "latent_out": []}),
        **({} if m.shared_gate is None else {"shared_gate": "all"}),
    },
    Convolution: lambda m: {},
    Parallel: lambda m: {},
    Hybrid: lambda m: {"linear": []},
    Mamba: lambda m: {"in_proj": [], "x_proj": "all", "dt_proj": "all", "out_proj": []},
    Mamba2: lambda m: {"in_proj": rows(2 * m.h * m.p + 2 * m.g * m.s, m.h), "out_proj": []},
    RGLRU: lambda m: {"in_proj": [], "out_proj": []},
    LightningAttention: lambda m: {"in_proj": [], "out_proj": []},
    KDA: lambda m: {
        "in_proj": rows(m.convolved, m.decay_proj.in_features) + rows(m.in_proj.out_features - m.h, m.h),
        "decay_proj": "all",
        "gate_proj": [],
        "out_proj": [],
    },
    GLA: lambda m: {
        "in_proj": rows(m.h * m.dk + m.hk * (m.dk + m.dv) + m.gates, m.rank),
        "decay_proj": "all",
        "out_proj": [],
    },
    DeltaNet: lambda m: {
        "in_proj": rows(m.in_proj.out_features - m.h, m.h) if m.rate else [],
        "out_proj": [],
    },
    GatedDeltaNet: lambda m: {"in_proj": rows(m.in_proj.out_features - 2 * m.h, 2 * m.h), "out_proj": []},
    HGRN2: lambda m: {"in_proj": rows(m.h * m.dk, m.h * m.dk), "out_proj": []},
    LinearAttention: lambda m: {"in_proj": [], "out_proj": []},
    Retention: lambda m: {"in_proj": [], "out_proj": []},
    TimeMix: lambda m: {
        **{name: [] for name in ("r_proj", "k_proj", "v_proj", "out_proj", "gate.down", "gate.up")},
        **(LOW_RANK if m.share is not None else {k: v for k, v in LOW_RANK.items() if "share" not in k}),
    },
    ChannelMix: lambda m: {"up": [], "down": []},
}


def rows(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def adapted(name: str, layer: nn.Module) -> str:
    """The linear layer's name, which may lie beneath an adapter, whose low rank is not int8."""
    return f"{name}.base" if isinstance(layer, Adapted) else name


def every_mixer(model: Model) -> list[Mixer]:
    """Those within others too."""
    return [module for module in model.modules() if isinstance(module, Mixer)]


def in_int8(name: str, backend: str = "torch") -> Model:
    return to_int8(make(name, backend))


def test_a_weight_is_at_most_half_a_step_away() -> None:
    """Each 64 of a row have the step max / 127; a last, shorter group has its own; zeros stay zeros."""
    weight = torch.randn(7, 150) * torch.logspace(-6, 3, 150)
    weight[2, 64:128] = 0
    steps, scales = quantised(weight)
    assert steps.dtype == torch.int8 and steps.shape == (7, 150) and scales.shape == (7, 3)
    for row in range(7):
        for group, (start, end) in enumerate([(0, 64), (64, 128), (128, 150)]):
            part, step = weight[row, start:end], float(weight[row, start:end].abs().max()) / 127
            got = steps[row, start:end]
            assert scales[row, group].item() == pytest.approx(step, rel=1e-6)
            assert got.abs().max() == (127 if step else 0)
            assert (got * step - part).abs().max() <= step * 0.5001


@pytest.mark.parametrize("name", MODELS)
def test_what_stays_exact(name: str) -> None:
    """The list by hand, per mixer; and of the model beside its mixers the embedding and the head alone."""
    model, taken = make(name), plan(make(name))
    seen = {"embed.weight", "head.weight"}
    names = {id(p): name for name, p in model.named_parameters()}
    params = dict(model.named_parameters())
    for mixer in every_mixer(model):
        for layer, exact in LAYERS[type(mixer)](mixer).items():
            weight = names[id(mixer.get_submodule(layer).weight)]
            assert (weight not in taken) == (exact == "all"), weight
            if exact != "all":
                found = sorted({i for s in taken[weight] for i in range(params[weight].shape[0])[s]})
                assert found == exact, weight
            seen.add(weight)
    assert set(taken) <= seen, "something is int8 that is on no list"
    assert {"embed.weight"} <= set(taken)
    assert taken["embed.weight"] == () and taken.get("head.weight", ()) == ()


@pytest.mark.parametrize("name", MODELS)
def test_all_else_is_float32_and_unchanged(name: str) -> None:
    before, model = dict(make(name).named_parameters()), in_int8(name)
    taken = plan(make(name))
    after = {
        name: p for name, p in model.named_parameters() if ".rows" not in name and not name.startswith("rows")
    }
    assert after.keys() == before.keys() - taken.keys()
    for name, p in after.items():
        assert p.dtype == torch.float32 and torch.equal(p, before[name]), name
    means = restored(model)
    assert means.keys() == before.keys()
    for name, exact in taken.items():
        step = before[name].abs().max() / 127
        assert (means[name] - before[name]).abs().max() <= 0.5001 * step, name
        for part in exact:
            assert torch.equal(means[name][part], before[name][part]), name
        assert not torch.equal(means[name], before[name]), name


GATES = {  # what of a scan's arguments is made of exact rows alone
    "gated_linear_scan": ("log_decay",),
    "gated_delta_scan": ("log_decay", "beta"),
    "dplr_delta_scan": ("log_decay",),
}
ARGUMENTS = {"gated_linear_scan": {"log_decay": 3}, "gated_delta_scan": {"log_decay": 3, "beta": 4}}
ARGUMENTS["dplr_delta_scan"] = {"log_decay": 3}
GATED = [
    *("mamba2", "composed mamba2", "gla", "composed gla", "delta_net", "composed delta_net"),
    *("gated_deltanet", "composed gated_deltanet", "hgrn2", "composed hgrn2", "rwkv7", "composed rwkv7"),
    *("composed kda", "falcon_h1", "nemotron_h", "qwen3_next", "kimi_linear", "composed experts"),
]


def gates(model: Model) -> list[Tensor]:
    """The decays and betas that reach the scans when every mixer reads the same random input."""
    caught: list[Tensor] = []

    def watch(op: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            for what in GATES[op]:
                value = args[ARGUMENTS[op][what]]
                if value is not None:
                    caught.append(value)
            return right(*args, **options)

        return call

    ops = replace(model.ops, **{op: watch(op, getattr(model.ops, op)) for op in GATES})
    source, spans = torch.Generator().manual_seed(3), Spans.of([19])
    call = Call(spans, ops, (0,), torch.zeros(1, dtype=torch.int64))
    with torch.no_grad():
        for mixer in model.mixers():
            mixer(torch.randn(19, 32, generator=source), call, None)
    return caught


@pytest.mark.parametrize("name", GATED)
def test_decays_and_gates_do_not_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the order of sums: a product of the exact rows alone has another shape than that of all."""
    want, got = gates(make(name)), gates(in_int8(name))
    assert len(got) == len(want) > 0
    assert furthest(got, want) < 2e-6
    # The fault: a mixer that declares nothing. (RetNet-like decays, which no token moves, cannot change.)
    for mixer in {type(mixer) for mixer in every_mixer(make(name))}:
        monkeypatch.setattr(mixer, "exact", {})
    faulty = gates(in_int8(name))
    assert furthest(faulty, want) > 1e-3


def furthest(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest difference of a pair, relative to its largest entry."""
    pairs = zip(got, want, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_it_computes_with_what_is_stored(name: str, backend: str) -> None:
    """Its logits are those of a float32 model with the restored weights, read whole and token by token."""
    model, plain = in_int8(name, backend), make(name, "reference")
    means = restored(model)
    with torch.no_grad():
        for key, p in plain.named_parameters():
            p.copy_(means[key])
    prompt, spans = tokens(9), Spans.of([9])
    want = plain(prompt, spans)
    same_logits(model(prompt, spans), want, "whole")
    cache = model.init_cache(1)
    same_logits(torch.cat([model.step(t[None], cache) for t in prompt]), want, "step by step")


def test_bytes_and_the_tied_head_once() -> None:
    """A tied table is stored once; `cost` counts what is stored."""
    for name in MODELS:
        model = in_int8(name)
        stored = {id(p): p.untyped_storage().nbytes() for p in model.parameters()}
        assert model.weight_bytes == sum(stored.values())
        assert model.weight_dtype == "int8" and model.dtype == torch.float32
        untied = not {id(p) for p in model.embed.parameters()} & {id(p) for p in model.head.parameters()}
        price = model.cost(1, 0, 1).weights
        table = sum(p.nbytes - p[0].nbytes for p in model.embed.parameters()) if untied else 0
        layers = [m for m in model.modules() if isinstance(m, Experts)]
        asked = ((w.nbytes, w.nbytes * m.spec.per_token / len(w)) for m in layers for w in (m.up, m.down))
        unread = sum(whole - round(part) for whole, part in asked)
        assert sum(price.values()) == model.weight_bytes - table - unread, name
    llama = in_int8("llama")
    assert isinstance(llama.head, Int8Linear) and isinstance(llama.embed, Int8Embedding)
    assert llama.head.blocks[0][1] is llama.embed.rows


def test_load_and_what_is_refused(tmp_path: Path) -> None:
    model, whole = load("tiny/mamba2", weights="int8"), load("tiny/mamba2")
    changed = to_int8(load("tiny/mamba2"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), changed.parameters(), strict=True))
    assert model.weight_bytes < 0.3 * whole.weight_bytes
    assert model.fingerprint != whole.fingerprint
    result = constate.generate(model, ["It is a truth"], max_new_tokens=4)[0]
    assert result.usage.dtype == "int8" and result.usage.weight_bytes == model.weight_bytes
    with pytest.raises(ValueError, match="dtype 'bfloat16': activations are float32"):
        load("tiny/mamba2", dtype="bfloat16", weights="int8")
    with pytest.raises(ValueError, match="weights='int4': 'int8' is wanted"):
        load("tiny/mamba2", weights="int4")
    with pytest.raises(ValueError, match="weights are int8, and no checkpoint is"):
        save(model, tmp_path / "out")
    drawn = random_model({**MODELS["mamba2"].raw}, weights="int8")
    assert drawn.weight_dtype == "int8"


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "She", "--weights", "int8", "--max-new-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["dtype"] == "int8"
    assert main(["generate", "She", "--weights", "int8", "--dtype", "float16"]) == 2
    assert "leave dtype out" in capsys.readouterr().err


def nats(model: Model, ids: Tensor) -> Tensor:
    """What each token but the first costs, read as one sequence."""
    with torch.no_grad():
        logits = model(ids, Spans.of([len(ids)]))
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gla", "gated_deltanet", "hybrid"])
def test_perplexity_does_not_grow_with_position(name: str) -> None:
    """4,096 tokens of the held-out book: int8 costs little, in the last quarter no more than in the first."""
    whole, model = load(f"tiny/{name}"), load(f"tiny/{name}", weights="int8")
    assert whole.tokenizer is not None
    ids = torch.tensor(whole.tokenizer.encode(shipped("northanger_abbey")[20_000:40_000]).ids[:4096])
    assert len(ids) == 4096
    before, after = nats(whole, ids), nats(model, ids)
    assert (after.mean() - before.mean()).abs() / math.log(2) < 0.01, "bits a token"
    dearer = (after - before).view(-1)[:4092].view(4, -1).mean(1)
    assert abs(math.exp(dearer[3] - dearer[0]) - 1) < 0.02, dearer


def test_every_backend_has_the_op() -> None:
    assert "linear" in {f.name for f in fields(Ops)}
    assert all(select(backend).choices["linear"].backend == backend for backend in BACKENDS)


def test_ids_are_bounded_as_before() -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        in_int8("mamba2")(torch.tensor([VOCAB]), Spans.of([1]))


def test_a_model_can_be_shown_and_copied() -> None:
    model = in_int8("llama")
    assert "Int8Embedding" in repr(model) and f"{VOCAB}, 32" in repr(model.embed)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens(5), Spans.of([5])), model(tokens(5), Spans.of([5])))
