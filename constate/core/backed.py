"""A module whose function is one op. Knows which backend serves it, and nothing of models or of the op."""

from __future__ import annotations

from torch import nn

from ..kernels.dispatch import Ops


class Backed(nn.Module):
    """Served by `ops`, which `Model.ops` hands down to every such module of the model; None, as in a module
    on its own, is plain PyTorch. Mixers are not: they find the ops in their call."""

    ops: Ops | None = None
