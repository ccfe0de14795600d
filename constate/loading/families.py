"""Which architectures there are: the files of the families' folders that hold an `ARCHITECTURE`.

A file is named after its model_type, in small letters, so that loading one model imports one file. Knows no
checkpoint.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from dataclasses import dataclass
from types import ModuleType

from ..core.architecture import Architecture
from .names import near

FAMILIES = ("ssm", "linear_attn", "hybrid", "diffusion_lm")


@dataclass(frozen=True)
class Found:
    """An architecture and the file that holds it, as a path in the package."""

    model_type: str
    family: str
    file: str
    architecture: Architecture


def architectures() -> dict[str, Found]:
    """Every architecture in the families' folders, by model_type. Imports all of their files."""
    found: dict[str, Found] = {}
    for family in FAMILIES:
        package = importlib.import_module(f"..{family}", __package__)
        for module in pkgutil.iter_modules(package.__path__):
            each = _found(family, importlib.import_module(f"..{family}.{module.name}", __package__))
            if each is not None:
                found[each.model_type] = each
    return found


def find(model_type: str) -> Found:
    """The architecture of this model_type, importing its file alone. Raises ValueError with near names."""
    name = model_type.replace("-", "_").replace(".", "_").lower()
    for family in FAMILIES if name.isidentifier() else ():
        module = f"..{family}.{name}"
        if importlib.util.find_spec(module, __package__) is not None:
            each = _found(family, importlib.import_module(module, __package__))
            if each is not None and each.model_type == model_type:
                return each
    raise ValueError(f"model_type {model_type!r} is not known; {near(model_type, architectures())}")


def _found(family: str, module: ModuleType) -> Found | None:
    architecture = getattr(module, "ARCHITECTURE", None)
    if architecture is None:  # a file of mixers alone
        return None
    file = f"{family}/{module.__name__.split('.')[-1]}.py"
    return Found(architecture.model_type, family, file, architecture)
