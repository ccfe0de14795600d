"""From a name to a model that is ready to run, and back to a folder.

`names` knows where checkpoints lie, `families` which architectures there are, `dialects` which of them a
checkpoint is and how it is written, `folder` what is in its folder; `convert` makes such folders of others.
None imports transformers, which takes longer than loading a small model.
"""

from .convert import Converted, convert
from .families import Found, architectures, find
from .folder import DTYPES, load, save
from .names import checkpoints, locate

__all__ = [
    "DTYPES",
    "Converted",
    "Found",
    "architectures",
    "checkpoints",
    "convert",
    "find",
    "load",
    "locate",
    "save",
]
