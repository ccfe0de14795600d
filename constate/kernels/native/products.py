"""The argument record of products.c."""

from __future__ import annotations

import ctypes

from .call import fields


class Heads(ctypes.Structure):
    _fields_ = fields(
        "x bias weight y",
        "rows heads in out x_stride x_head weight_head y_stride y_head outputs_first bf16",
    )
