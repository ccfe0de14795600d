"""Shapes by name, published ones and medium ones of the hybrids, with random weights: for timing, where only
the shape matters.

Knows the config.json of each and how to fill a model with random numbers; downloads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.architecture import read_config
from ..core.int8 import stores_int8, to_int8
from ..core.model import Model
from ..kernels.dispatch import select
from ..loading import DTYPES, find
from .hybrids import HYBRIDS
from .predict.published import config

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "mamba-130m": config("mamba-130m"),
    "mamba2-130m": config("mamba2-130m"),
    "llama-135m": config("smollm2-135m"),
    # LLaDA's layers at the size of the others; published are only larger ones
    "llada-130m": {
        "model_type": "llada",
        "vocab_size": 32000,
        "d_model": 768,
        "n_layers": 12,
        "n_heads": 12,
        "mlp_hidden_size": 2048,
        "max_sequence_length": 4096,
        "mask_token_id": 31999,
    },
    # Qwen3-Next's layers without experts: gated DeltaNet, and attention in one layer of four
    "gated-delta-144m": {
        "model_type": "qwen3_next",
        "vocab_size": 50280,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 12,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 0,
        "mlp_only_layers": tuple(range(12)),
        "tie_word_embeddings": True,
    },
    **HYBRIDS,
}


def known(shape: str) -> str:
    """The name itself. Raises ValueError for one that is no shape's."""
    if shape not in SHAPES:
        raise ValueError(f"shape {shape!r} is not known; known are {', '.join(SHAPES)}")
    return shape


def random_model(
    shape: str | Mapping[str, Any],
    *,
    device: str = "cpu",
    dtype: str = "float32",
    backend: str = "auto",
    state_dtype: str = "float32",
    weights: str | None = None,
    seed: int = 0,
) -> Model:
    """A model of a named shape, or of a config.json's content, with random weights, without a tokenizer.

    Matrices are normal with deviation 0.02; what a module initialises in its own way (norms, decay rates,
    step biases) keeps that. Raises ValueError for an unknown name.
    """
    raw = SHAPES[known(shape)] if isinstance(shape, str) else shape
    if unknown := {dtype, state_dtype} - DTYPES.keys():
        raise ValueError(f"dtype {', '.join(unknown)} is not known; one of {', '.join(DTYPES)} is wanted")
    narrow = stores_int8(weights, DTYPES[dtype])
    architecture = find(raw["model_type"]).architecture
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = architecture.build(read_config(architecture.Config, raw))
        for name, p in model.named_parameters():
            if p.ndim > 1 and not name.endswith("conv.weight"):
                torch.nn.init.normal_(p, std=0.02)
    model.architecture, model.ops, model.state_dtype = (
        architecture,
        select(backend, device),
        DTYPES[state_dtype],
    )
    model = model.to_dtype(DTYPES[dtype]).to(device).requires_grad_(False).eval()
    return to_int8(model) if narrow else model
