"""The argument record of latent.c."""

from __future__ import annotations

import ctypes

from .call import fields


class EnterLatent(ctypes.Structure):
    _fields_ = fields(
        "q latent query norm turns kv past",
        "rows h dk rank shared capacity q_stride latent_stride query_stride kv_row kv_place bf16",
        "eps",
    )
