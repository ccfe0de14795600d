"""The argument records of experts.c, field by field, and what a router leaves for the experts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from torch import Tensor

from .call import fields


class Choose(ctypes.Structure):
    _fields_ = fields(
        "logits correction appeal weights chosen order place starts",
        "rows experts per_token groups kept_groups sigmoid normalise",
        "scale",
    )


class Ask(ctypes.Structure):
    _fields_ = fields(
        "x weight chosen order place weights beside gate inner more y",
        "rows per_token in out x_stride beside_stride y_stride gated act format bytes",
    )


@dataclass(frozen=True)
class Choice:
    """Pairs of a row and an expert that it asks: the experts (rows, per_token) and their weights; the pairs
    by expert, and where in that order each pair is."""

    chosen: Tensor
    weights: Tensor
    order: Tensor
    place: Tensor
