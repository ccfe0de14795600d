"""The argument records of gates.c, field by field, and its feature maps and norms by name."""

from __future__ import annotations

import ctypes

from .call import fields
from .glue import ACTIVATIONS

MAPS = {**ACTIVATIONS, "elu": 100, "taylor": 101}
NORMS = {"": 0, "sum": 1, "absolute": 2, "length": 3}


class RealGate(ctypes.Structure):
    _fields_ = fields(
        "gates x rate past fed log_a", "rows heads block gates_stride x_stride o_stride", "least"
    )


class Forget(ctypes.Structure):
    _fields_ = fields("x bound log_bound decay key", "rows width x_stride o_stride")


class Features(ctypes.Structure):
    _fields_ = fields("x o", "rows heads size group ones kind norm x_stride o_stride", "eps")


class Divide(ctypes.Structure):
    _fields_ = fields("x o", "rows heads size x_stride o_stride", "eps")
