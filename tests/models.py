"""Tiny models whose weights hide no fault, for every architecture that the finder knows.

Default weights hide most faults: norms of one, biases of zero, decays near one, one group, one head.
Here no two sizes agree by accident (dk != dv, more value heads than key heads, groups of two, widths 2 to
4), constants are moved, and decays a token run from under 0.01 to over 0.999. An architecture without an
entry in MODELS fails tests/test_laws.py, which says what to add. Knows no law.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from constate.core.architecture import read_config
from constate.core.decay import inverse_softplus
from constate.core.model import Model
from constate.kernels.dispatch import select
from constate.loading import find

VOCAB = 97
WINDOW = 5


@dataclass(frozen=True)
class Entry:
    """A config.json, and by hand what its cache grows by: `slope` bytes a token for ever, `ring` bytes a
    token for the first WINDOW ones. `widths` are those of its convolutions."""

    raw: Mapping[str, Any]
    slope: int = 0
    ring: int = 0
    widths: tuple[int, ...] = ()

    @property
    def recurrent(self) -> bool:
        return bool(self.widths) or self.raw["model_type"] not in ("llama", "composed")


def _composed(*mixers: Mapping[str, Any], mlps: bool = True, **over: Any) -> dict[str, Any]:
    layers = [
        {"mixer": m, "mlp": {"width": 40} if mlps and i % 2 == 0 else None} for i, m in enumerate(mixers)
    ]
    head = {"model_type": "composed", "vocab_size": VOCAB, "hidden_size": 32, "layers": layers}
    return {**head, "norm_eps": 1e-5, "tie_word_embeddings": False, **over}


MAMBA = {"type": "mamba", "inner": 48, "state_size": 6, "rank": 3, "conv": 4}
MAMBA2 = {"type": "mamba2", "heads": 4, "head_dim": 12, "state_size": 8, "groups": 2, "conv": 3}
GLA = {"type": "gla", "heads": 2, "key_dim": 8, "value_dim": 12, "rank": 5, "temperature": 2.0}
DELTA = {
    "type": "gated_deltanet",
    "heads": 2,
    "key_dim": 12,
    "value_dim": 8,
    "value_heads": 4,
    "conv": 3,
    "norm_eps": 1e-3,  # less, and the norm of a head that read almost nothing makes much of rounding
}
SQUARE = {"type": "gated_deltanet", "heads": 2, "key_dim": 8, "value_dim": 8, "conv": 2, "norm_eps": 1e-3}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
ATTENTION = {"type": "attention", "heads": 4, "kv_heads": 2, "head_dim": 8}
KV = 2 * 2 * 8 * 4  # bytes a token of one such layer: k and v, two heads of eight, float32

MODELS: Mapping[str, Entry] = {
    "mamba2": Entry(
        {
            "model_type": "mamba2",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 12,
            "n_groups": 2,
            "conv_kernel": 4,
            "use_bias": True,
        },
        widths=(4,),
    ),
    "llama": Entry(
        {
            "model_type": "llama",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": ROPE,
        },
        slope=2 * KV,
    ),
    "composed": Entry(  # one of everything
        _composed(
            {**DELTA, "negative": True},
            {**ATTENTION, "window": WINDOW, "rope": ROPE},
            {**MAMBA, "conv": 2},
            MAMBA2,
            ATTENTION,
            {**GLA, "conv": 4},
            tie_word_embeddings=True,
            embed_scale=1.7,
        ),
        slope=KV,
        ring=KV,
        widths=(2, 3, 4),
    ),
    "composed mamba": Entry(_composed(MAMBA, {**MAMBA, "conv": 3, "bias": True}), widths=(3, 4)),
    "composed mamba2": Entry(
        _composed({**MAMBA2, "conv": 2}, {**MAMBA2, "head_dim": 8, "dt_limit": [0.01, 2.0]}, mlps=False),
        widths=(2, 3),
    ),
    "composed gla": Entry(_composed({**GLA, "conv": 3}, GLA), widths=(3,)),
    "composed gated_deltanet": Entry(
        _composed({**DELTA, "negative": True}, SQUARE, {**DELTA, "conv": 4}), widths=(2, 3, 4)
    ),
    "composed window": Entry(
        _composed({**ATTENTION, "window": WINDOW, "rope": ROPE}, {**ATTENTION, "window": WINDOW}),
        ring=2 * KV,
    ),
    "composed attention": Entry(
        _composed({**ATTENTION, "rope": {**ROPE, "partial_rotary_factor": 0.5}}, ATTENTION), slope=2 * KV
    ),
}

RECURRENT = tuple(name for name, entry in MODELS.items() if entry.recurrent)
FULL_ATTENTION = ("llama", "composed attention")


def make(name: str, backend: str = "torch", **over: Any) -> Model:
    """The model of this entry with hostile weights, the same at every call. `over` changes its config."""
    raw = {**MODELS[name].raw, **over}
    architecture = find(raw["model_type"]).architecture
    seed = list(MODELS).index(name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = architecture.build(read_config(architecture.Config, raw))
    spread(model, seed)
    model.ops = select(backend, "cpu")
    return model.requires_grad_(False)


@torch.no_grad()
def spread(model: nn.Module, seed: int) -> None:
    """Moves every parameter in place: matrices so that logits are decided, constants off their constant,
    decays from under 0.01 to over 0.999."""
    g = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for name, p in model.named_parameters():
        if id(p) in seen:
            continue
        seen.add(id(p))
        noise = torch.randn(p.shape, generator=g)
        part = name.rsplit(".", 1)[-1]
        if part == "d":
            p.copy_(1 + 0.5 * noise)
        elif name.endswith("conv.weight"):
            p.copy_(noise * 1.2 * p.shape[1] ** -0.5)
        elif name == "embed.weight":
            p.copy_(noise * 0.7)
        elif name == "head.weight":
            p.copy_(noise * 3 * p.shape[1] ** -0.5)
        elif p.ndim > 1 and part != "a_log":
            p.copy_(noise * 1.4 * p.shape[1] ** -0.5)
        elif p.std() == 0 or part == "bias":
            p.add_(0.3 * noise)
    for module in model.modules():
        a_log, dt_bias = getattr(module, "a_log", None), getattr(module, "dt_bias", None)
        if isinstance(a_log, Tensor) and isinstance(dt_bias, Tensor):
            _spread_rates(a_log, dt_bias, g)
        decay = getattr(module, "decay_proj", None)
        if isinstance(decay, nn.Linear):  # log-sigmoid over a temperature of 2
            decay.bias.copy_(_shuffled(torch.linspace(-11, 9, decay.bias.numel()), g))


def _spread_rates(a_log: Tensor, dt_bias: Tensor, g: torch.Generator) -> None:
    """exp(a_log) * softplus(dt_bias), what is lost a token before the input has its say, from 2e-4 to 5."""
    dt = _shuffled(torch.logspace(-2, 0, dt_bias.numel()), g)
    dt_bias.copy_(inverse_softplus(dt))
    rates = _shuffled(torch.logspace(math.log10(2e-4), math.log10(5), a_log.numel()), g).view_as(a_log)
    a_log.copy_((rates / (dt if a_log.ndim == 1 else dt[:, None])).log())


def _shuffled(x: Tensor, g: torch.Generator) -> Tensor:
    return x[torch.randperm(x.numel(), generator=g)]


def tokens(n: int, seed: int = 0) -> Tensor:
    """(n,) random ids."""
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(1000 + seed))


def with_ops(model: Model, **changed: Any) -> None:
    """Replaces some of the ops that this model, and no other, calls."""
    model.ops = replace(model.ops, **changed)
