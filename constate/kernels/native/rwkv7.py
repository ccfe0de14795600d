"""The argument records of rwkv7.c, field by field."""

from __future__ import annotations

import ctypes

from .call import fields


class Mixtures(ctypes.Structure):
    _fields_ = fields("x mix before o", "rows width count x_stride bf16")


class DeltaOperands(ctypes.Structure):
    _fields_ = fields(
        "decay rate k v reads share first kappa_scale rate_share",
        "rows h dk dv key_stride value_stride",
        "strongest eps",
    )


class DeltaLeave(ctypes.Structure):
    _fields_ = fields("o r k v gate weight bias bonus", "rows h dk dv key_stride value_stride", "eps")
