"""A checkpoint's folder to a model that is ready to run, and back. Knows Hugging Face's files and keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..core.architecture import Architecture, read_config, write_config
from ..core.checkpoint import Checkpoint, read_json, whole, write_json, write_tensors
from ..core.model import Model
from ..core.weights import export, fill
from ..kernels.dispatch import select
from .families import find
from .names import locate
from .text import read_text_side

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    name: str | Path,
    device: str = "cpu",
    dtype: str = "float32",
    backend: str = "auto",
    state_dtype: str = "float32",
) -> Model:
    """The model of this name, for inference (eval, no gradients).

    `name`: "tiny/NAME" that ships here, a folder with config.json and safetensors, or a hub id
    "OWNER/NAME". `dtype` of the weights (those that an architecture keeps in float32 stay) and
    `state_dtype` of recurrent state: float32, bfloat16, float16. `backend`: see kernels.dispatch.select.
    Raises ValueError, one clear line or a list of faults, for anything that is not exactly right.
    """
    place, weight_dtype, states = _device(device), _dtype("dtype", dtype), _dtype("state_dtype", state_dtype)
    ops = select(backend, place)
    folder = locate(name)
    raw = read_json(folder / "config.json")
    architecture = _architecture_of(raw, folder)
    checkpoint = Checkpoint(folder)
    try:
        config = read_config(architecture.Config, raw)
        with _NoInit():
            model = architecture.build(config).to_dtype(weight_dtype).to(place)
        params = dict(model.named_parameters())
        shapes = {key: p.shape for key, p in params.items()}
        with torch.no_grad():  # into the model's own memory: the file's may be misaligned, and goes away
            fill(architecture.weights(config), checkpoint, shapes, lambda key, t: params[key].copy_(t))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    model.architecture, model.ops, model.state_dtype = architecture, ops, states
    text = read_text_side(folder, raw, rows=model.head.out_features)
    model.tokenizer, model.vocab, model.eos_ids = text.tokenizer, text.vocab, text.eos_ids
    model.chat_template, model.special_tokens = text.chat_template, text.special_tokens
    return model.requires_grad_(False).eval()


def save(model: Model, folder: str | Path, dtype: str = "float32") -> None:
    """Write config.json, model.safetensors and the tokenizer as `load` reads them, under the published
    names of the architecture. What a module keeps in float32 is stored so."""
    folder, stored, architecture = Path(folder), _dtype("dtype", dtype), model.architecture
    if architecture is None:
        raise ValueError("this model has no .architecture, which knows how its weights are named: set it")
    folder.mkdir(parents=True, exist_ok=True)
    kept = _kept(model)
    params = {
        name: p.detach().to(torch.float32 if name in kept else stored) for name, p in model.named_parameters()
    }
    write_tensors(folder / "model.safetensors", export(architecture.weights(model.config), params))
    ids = sorted(model.eos_ids)
    text = {"eos_token_id": ids[0] if len(ids) == 1 else ids} if ids else {}
    config = write_config(model.config, architecture.model_type) | text | {"dtype": dtype}
    write_json(folder / "config.json", config)
    if model.tokenizer is not None:
        tokenizer = model.tokenizer
        whole(folder / "tokenizer.json", lambda new: tokenizer.save(str(new)))
    if special := model.special_tokens:
        write_json(folder / "tokenizer_config.json", special)
    if template := model.chat_template:
        whole(folder / "chat_template.jinja", lambda new: new.write_text(template, encoding="utf-8"))


def _architecture_of(raw: Mapping[str, Any], folder: Path) -> Architecture:
    if "model_type" not in raw:
        original = "; d_model and n_layer are mamba_ssm's original dialect" if "d_model" in raw else ""
        raise ValueError(f"{folder}/config.json has no model_type: Hugging Face's format is wanted{original}")
    try:
        return find(str(raw["model_type"])).architecture
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


class _NoInit(TorchFunctionMode):
    """Leaves weights as they come from memory: every one is filled from the file, and drawing random
    numbers takes longer. Buffers are computed as always."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return (kwargs or {}).get("tensor", args[0] if args else None)
        return func(*args, **(kwargs or {}))


def _kept(model: Model) -> set[str]:
    """The parameters that their modules keep in float32."""
    return {
        f"{prefix}.{key}".removeprefix(".")
        for prefix, module in model.named_modules()
        for key in getattr(type(module), "float32", frozenset())
    }


def _dtype(what: str, name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"{what}={name!r}: one of {', '.join(DTYPES)} is wanted")
    return DTYPES[name]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch built without CUDA asserts
        why = str(error).splitlines()[0]
        raise ValueError(f"device={name!r} cannot be used here ({why}); 'cpu' always can") from error
    return device
