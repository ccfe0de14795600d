"""`constate models`: architectures, and the checkpoints that ship with each."""

from __future__ import annotations

from .options import Json
from .output import show


def models(as_json: Json = False) -> None:
    """List the architectures that the package knows and the checkpoints that ship with it."""
    from ..loading import architectures, checkpoints

    shipped = checkpoints()
    rows = [
        {
            "model_type": found.model_type,
            "family": found.family,
            "file": found.file,
            "checkpoints": [name for name, of in shipped.items() if of == found.model_type],
        }
        for found in architectures().values()
    ]
    show(rows, as_json, ("model_type", "family", "file", "checkpoints"))
