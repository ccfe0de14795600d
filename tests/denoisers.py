"""Tiny denoisers whose weights hide no fault, for every architecture of diffusion_lm.

As tests/models.py for causal models, whose spreading of weights it uses. Knows no law and no decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from constate.core.architecture import read_config
from constate.core.model import Model
from constate.kernels.dispatch import select
from constate.loading import find
from tests.models import ATTENTION, ROPE, TRANSFORMER, VOCAB, spread

MASK = VOCAB - 1  # the mask id of all of these; the ids before it are real
LAYERS = ({**ATTENTION, "rope": ROPE}, {**ATTENTION, "rope": ROPE, "bias": True, "qk_norm": True})


def _composed(**over: Any) -> dict[str, Any]:
    layers = [{"mixer": m, "mlp": {"width": 40} if i else None} for i, m in enumerate(LAYERS)]
    head = {"model_type": "composed_diffusion", "vocab_size": VOCAB, "hidden_size": 32, "layers": layers}
    return {**head, "mask_token_id": MASK, **over}


MDLM = {
    "vocab_size": VOCAB,  # the last id is the mask
    "hidden_dim": 32,
    "n_blocks": 2,
    "n_heads": 4,
    "cond_dim": 12,
    "model_length": 64,
}
QWEN = {**TRANSFORMER, "mask_token_id": MASK}

DENOISERS: Mapping[str, Mapping[str, Any]] = {
    "both sides": _composed(),
    "both sides, shifted": _composed(shift=True),
    "blocks": _composed(block=4),
    "blocks, shifted": _composed(block=5, shift=True),
    "llada": {
        "model_type": "llada",
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "mlp_hidden_size": 40,
        "vocab_size": VOCAB,
        "rope_theta": 100.0,
        "rms_norm_eps": 1e-5,
        "mask_token_id": MASK,
    },
    "dream": {**QWEN, "model_type": "Dream"},
    "mdlm": {**MDLM, "model_type": "mdlm"},
    "mdlm, timed": {**MDLM, "model_type": "mdlm", "time_conditioning": True},
    "bd3lm": {**MDLM, "model_type": "bd3lm", "block_size": 4},
    "bd3lm, bare": {**MDLM, "model_type": "bd3lm", "block_size": 3, "adaln": False},
    "sdar": {**QWEN, "model_type": "sdar", "block_size": 6},
    "llada2_moe": {
        **QWEN,
        "model_type": "llada2_moe",
        "rms_norm_eps": 1e-5,
        "use_bias": False,
        "first_k_dense_replace": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 12,
        "n_group": 4,
        "topk_group": 2,
        "block_size": 7,
    },
}


def make(name: str, backend: str = "torch", **over: Any) -> Model:
    """The denoiser of this entry with hostile weights, the same at every call. `over` changes its config."""
    raw = {**DENOISERS[name], **over}
    architecture = find(raw["model_type"]).architecture
    seed = 500 + list(DENOISERS).index(name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = architecture.build(read_config(architecture.Config, raw))
    spread(model, seed)
    model.architecture, model.vocab = architecture, MASK
    model.ops = select(backend, "cpu")
    return model.requires_grad_(False)
