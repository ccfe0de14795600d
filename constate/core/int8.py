"""Weights in 8 bits: which of a model's are, and the change.

The matrices of projections, MLPs, embedding and head become int8 with a float32 scale for each 64 weights of
a row: w = scale * round(w / scale), scale the largest of the 64 over 127. Everything else stays float32:
activations and state, norms, convolutions, decay rates, biases, and of the projections the rows from which
gates and decays are made (`Mixer.exact`), since what a state loses by a wrong decay it loses at every token.
Knows modules and mixers; no architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.shapes import GROUP
from .linear import Int8Embedding, Int8Linear, Linear, Rows
from .mixer import Mixer
from .model import Model


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(out, in) to int8 and scales (out, ceil(in / 64)) float32; the last group of a row may be shorter."""
    rows, columns = weight.shape
    groups = -(-columns // GROUP)
    padded = F.pad(weight.float(), (0, groups * GROUP - columns)).view(rows, groups, GROUP)
    scales = padded.abs().amax(-1) / 127
    steps = (padded / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round()
    return steps.to(torch.int8).view(rows, -1)[:, :columns].contiguous(), scales


def stores_int8(weights: str | None, dtype: torch.dtype) -> bool:
    """What the option `weights` says beside a dtype. Raises ValueError for what it cannot be."""
    if weights is None:
        return False
    if weights != "int8":
        raise ValueError(f"weights={weights!r}: 'int8' is wanted, or nothing; dtype says the rest")
    if dtype != torch.float32:
        asked = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"weights='int8' with dtype {asked!r}: activations are float32 beside them; leave dtype out"
        )
    return True


def plan(model: Model) -> dict[str, tuple[slice, ...]]:
    """The parameters that int8 takes, by name, each with the rows of it that stay float32; one that would
    stay as a whole is not among them."""
    names = {id(p): name for name, p in model.named_parameters()}
    kept: dict[str, list[slice]] = {names[id(model.embed.weight)]: []}
    for module in model.modules():
        if isinstance(module, Linear):
            kept.setdefault(names[id(module.weight)], [])
    for mixer in (module for module in model.modules() if isinstance(module, Mixer)):
        for own, rows in mixer.exact.items():
            linear = mixer.get_submodule(own)
            assert isinstance(linear, Linear), f"{type(mixer).__name__}.exact names {own}, no Linear"
            kept[names[id(linear.weight)]] += rows
    return {name: tuple(rows) for name, rows in kept.items() if slice(None) not in rows}


def packed(weight: Tensor, exact: Sequence[slice]) -> list[Rows]:
    """A matrix as blocks of rows: those of `exact` float32, those between int8."""
    stays = torch.zeros(weight.shape[0], dtype=torch.bool)
    for rows in exact:
        stays[rows] = True
    blocks, first = [], 0
    for flags in torch.unique_consecutive(stays, return_counts=True)[1].tolist():
        part = weight[first : first + flags]
        blocks.append(Rows(part.float().contiguous().clone()) if stays[first] else Rows(*quantised(part)))
        first += flags
    return blocks


def put(model: Model, blocks: Mapping[str, list[Rows]]) -> Model:
    """The model with these in the places of its parameters of these names; shared ones stay shared."""
    taken = {id(p): blocks[name] for name, p in model.named_parameters() if name in blocks}
    made: dict[int, Linear] = {}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear) and id(child.weight) in taken:
                new = made.setdefault(id(child), Int8Linear(taken[id(child.weight)], child.bias))
                new.ops = child.ops
                setattr(module, name, new)
    if id(model.embed.weight) in taken:
        model.embed = Int8Embedding(*taken[id(model.embed.weight)])
    return model


def to_int8(model: Model) -> Model:
    """The model itself, its matrices in int8. Raises ValueError where it is not a float32 one."""
    stores_int8("int8", model.dtype)
    params = dict(model.named_parameters())
    return put(model, {name: packed(params[name].detach(), rows) for name, rows in plan(model).items()})


def restored(model: Model) -> dict[str, Tensor]:
    """Every parameter by its name, a shared one once; what is int8 as one float32 matrix, under the name that
    it has in a model without: what this model computes with, for those that read other formats."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in model.named_modules():
        blocks: list[Rows] = []
        if isinstance(module, Int8Linear):
            blocks = [part for _, part in module.blocks]
        elif isinstance(module, Int8Embedding):
            blocks = [module.rows]
        if blocks and id(blocks[0]) not in found:
            found[id(blocks[0])] = (f"{prefix}.weight", torch.cat([part.matrix() for part in blocks]))
        for name, p in module.named_parameters(recurse=False):
            if not isinstance(module, Rows) and id(p) not in found:
                found[id(p)] = (f"{prefix}.{name}", p.detach())
    return dict(found.values())
