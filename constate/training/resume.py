"""A training's state in one file, so that an interrupted run goes on as if it had not stopped.

One safetensors file, replaced in one move: the parameters, what the optimisers keep for each, and a JSON
header. No generator is stored, since what a step reads depends on its number alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.checkpoint import whole
from ..core.model import Model

FORMAT = "constate.training.1"
Optimizers = Mapping[str, torch.optim.Optimizer]


def save(path: Path, model: Model, optimizers: Optimizers, header: Mapping[str, Any]) -> None:
    """Write everything; the old file stays whole until the new one is."""
    tensors = {f"model/{name}": p.detach() for name, p in model.named_parameters()}
    tensors |= _kept(model, optimizers)
    metadata = {"format": FORMAT, "header": json.dumps(dict(header))}
    whole(path, lambda new: save_file({n: t.contiguous() for n, t in tensors.items()}, new, metadata))


def load(path: Path, model: Model, optimizers: Optimizers) -> None:
    """Fill the model and the optimisers from a file of the same recipe (see `header`)."""
    with safe_open(path, "pt") as file, torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(file.get_tensor(f"model/{name}"))
        names = {id(p): name for name, p in model.named_parameters()}
        stored: dict[str, list[str]] = defaultdict(list)
        for key in file.keys():  # noqa: SIM118  # no mapping: it cannot be iterated
            owner, _, what = key.rpartition("/")
            stored[owner].append(what)
        for kind, optimizer in optimizers.items():
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                owner = f"{kind}/{names[id(p)]}"
                optimizer.state[p] = {what: file.get_tensor(f"{owner}/{what}") for what in stored[owner]}


def header(path: Path) -> dict[str, Any] | None:
    """What `save` was given, or None where there is no file. Raises ValueError for a foreign file."""
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is no state of a training (format {metadata.get('format')!r})")
    return json.loads(metadata["header"])


def _kept(model: Model, optimizers: Optimizers) -> dict[str, Tensor]:
    """Every tensor that an optimiser keeps, as kind/parameter/what."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{kind}/{names[id(p)]}/{what}": value
        for kind, optimizer in optimizers.items()
        for p, kept in optimizer.state.items()
        for what, value in kept.items()
    }
