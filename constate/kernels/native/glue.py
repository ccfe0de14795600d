"""The argument records of glue.c, field by field, and its activations by name."""

from __future__ import annotations

import ctypes

from .call import fields

ACTIVATIONS = {
    "silu": 0,
    "gelu": 1,
    "gelu_pytorch_tanh": 2,
    "relu": 3,
    "relu2": 4,
    "sigmoid": 5,
    "logsigmoid": 6,
    "identity": 7,
    "tanh": 8,
}


class AddNorm(ctypes.Structure):
    _fields_ = fields(
        "x o kept y weight bias",
        "rows width x_stride kept_stride y_stride o_stride centred",
        "keep scale eps",
    )


class GatedNorm(ctypes.Structure):
    _fields_ = fields(
        "x gate weight o", "rows groups size x_stride gate_stride o_stride shared gate_first sigmoid", "eps"
    )


class Unit(ctypes.Structure):
    _fields_ = fields("x", "rows heads size stride", "eps")


class Decays(ctypes.Structure):
    _fields_ = fields("x bias rate dt decay", "rows heads x_stride o_stride", "low high bound")


class Activate(ctypes.Structure):
    _fields_ = fields("x y o", "rows width x_stride y_stride o_stride kind", "scale low")
