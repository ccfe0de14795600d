"""A GGUF file to a folder in Hugging Face's format, which transformers reads as well.

The names and shapes that the folder must have are those that the architecture's own rules write, so every
tensor is accounted for on either side before any is read. One tensor is held at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Size

from ...core.architecture import read_config
from ...core.checkpoint import WHOLE, whole, write_json, writing
from ...core.weights import export, fill
from ..families import find
from .file import GGUFFile
from .maps import config_of, rules_of
from .text import end_ids, special_tokens, tokenizer_of


def convert(path: str | Path, folder: str | Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files of a GGUF file into a folder.

    Quantised tensors become float32, others keep their dtype. Raises ValueError for a file that is cut short,
    an architecture, key, type or tokenizer that is not known, and tensors that are missing, left over or
    of another shape (named).
    """
    path, folder = Path(path), Path(folder)
    file = GGUFFile(path)
    try:
        _convert(file, folder)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _convert(file: GGUFFile, folder: Path) -> None:
    stored, tokenizer = file.outlines(), tokenizer_of(file.metadata)
    config = config_of(file.metadata, file, stored)
    rules, shapes = rules_of(file.metadata, config), _shapes(config)
    outlines = fill(rules, stored, shapes)
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder / WHOLE, outlines) as put:
        fill(rules, file, shapes, put)
    if ends := end_ids(file.metadata):
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    write_json(folder / "config.json", config)
    if tokenizer is not None:
        whole(folder / "tokenizer.json", lambda new: tokenizer.save(str(new)))
    if special := special_tokens(file.metadata):
        write_json(folder / "tokenizer_config.json", special)
    if template := file.metadata.get("tokenizer.chat_template"):
        whole(folder / "chat_template.jinja", lambda new: new.write_text(template, encoding="utf-8"))


def _shapes(config: Mapping[str, Any]) -> dict[str, Size]:
    """The names and shapes of the folder's tensors, from a model without memory."""
    architecture = find(str(config["model_type"])).architecture
    parsed = read_config(architecture.Config, config)
    with torch.device("meta"):
        params = dict(architecture.build(parsed).named_parameters())
    return {name: t.shape for name, t in export(architecture.weights(parsed), params).items()}
