"""A decode step as a list of launches and products, prepared once and replayed for every token.

What native.tape offers and tells of, for the same callers: a vector here is a float32 tensor (rows, width), a
row a sequence, on the device of the rows' lengths; each method notes one work and returns where its result
will lie. What lies between two products is then joined to as few launches as possible (fuse.py), and on a GPU
the whole is captured as one CUDA graph (replay.py). Knows tensors and kernels; knows no mixer and no model.
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
