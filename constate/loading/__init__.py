"""From a name to a model that is ready to run, and back to a folder.

`names` knows where checkpoints lie, `families` which architectures there are, `folder` what is in a
checkpoint's folder. None imports transformers, which takes longer than loading a small model.
"""

from .families import Found, architectures, find
from .folder import DTYPES, load, save
from .names import checkpoints, locate

__all__ = ["DTYPES", "Found", "architectures", "checkpoints", "find", "load", "locate", "save"]
