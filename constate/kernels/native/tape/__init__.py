"""A decode step as a list of C calls, prepared once and replayed for every token.

A vector here is a float32 tensor (rows, width), a row a sequence; its memory is the tape's own, or, for a
state, the cache's. Each method appends one call and returns where its result will lie. Between calls
may stand steps that have no C form. Knows tensors and the C kernels; knows no mixer and no model.
"""

from __future__ import annotations

from .attending import Attending
from .families import Families
from .mixture import Mixture
from .rwkv import RWKV
from .scans import Scans
from .vectors import Vectors


class Tape(Vectors, Scans, Attending, Families, RWKV, Mixture):
    """What `core.recording` writes a model's step onto: one way of recording (recorder.py), and what can be
    recorded, by kind."""


__all__ = ["Tape"]
