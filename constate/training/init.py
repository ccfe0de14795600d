"""Starting weights: random ones, or another model's. Knows module kinds and the names of projections back to
the residual stream."""

from __future__ import annotations

import torch
from torch import nn

from ..core.model import Model

LEAVING = ("out", "out_proj", "down")  # projections whose output is added to the residual stream


@torch.no_grad()
def initialise(model: Model) -> Model:
    """Draw every matrix in place from torch's global generator; returns the model.

    Embedding: standard deviation 0.02. A Linear in a block: 0.5 / sqrt(inputs), divided further by
    sqrt(2 x blocks) where it adds to the residual stream, so that the stream's size does not depend on the
    depth. Decays, step sizes and convolutions keep what their mixers drew for themselves.
    """
    model.embed.weight.normal_(std=0.02)
    leaving = (2 * len(model.blocks)) ** -0.5
    for name, module in model.blocks.named_modules():
        if isinstance(module, nn.Linear):
            shrink = leaving if name.rsplit(".", 1)[-1] in LEAVING else 1.0
            module.weight.normal_(std=0.5 * shrink * module.in_features**-0.5)
            if module.bias is not None:
                module.bias.zero_()
    return model


@torch.no_grad()
def start_from(model: Model, trained: Model) -> Model:
    """Take over the weights of a model with the same layers in place; returns the model. Ids that the other
    lacks get the mean of its embeddings. Raises ValueError where the layers differ."""
    given, own = dict(trained.named_parameters()), dict(model.named_parameters())
    odd = sorted({*given} ^ {*own})
    odd += [n for n in own if n in given and own[n].shape[1:] != given[n].shape[1:]]
    odd += [n for n in own if n in given and len(own[n]) < len(given[n])]
    odd += [n for n in own if n in given and len(own[n]) > len(given[n]) and own[n] is not model.embed.weight]
    if odd:
        raise ValueError(f"the model to start from has other layers: {', '.join(sorted({*odd})[:4])} differ")
    for name, p in own.items():
        known = len(given[name])
        p[:known].copy_(given[name])
        p[known:].copy_(given[name].mean(0))
    return model
