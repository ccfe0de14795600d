"""The peers by name, and what becomes of one that is absent or fails. Knows no peer's conventions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

from ..core.model import Model
from .engine import Absent, Engine
from .engines import Transformers, plain_peers
from .gpu_peers import Fla, MambaSSM
from .llamacpp import LlamaCpp
from .vllm_peer import Vllm

PEERS: Mapping[str, Callable[[Model, Model, int], Engine]] = {
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
    "fla": Fla,
    "mamba_ssm": MambaSSM,
    "vllm": Vllm,
}
"""Each is made of our model, the same weights in float32, and how many tokens will be written."""
INSTALL = {"transformers": "pip install transformers"}  # where the import itself is what fails


@dataclass(frozen=True)
class Missing:
    """A peer that was asked for and cannot be timed: why, and what to do about it if anything."""

    name: str
    error: str
    install: str | None = None


def check(names: Sequence[str]) -> None:
    """Raises ValueError for a name that is not known."""
    if unknown := [name for name in names if name not in PEERS]:
        raise ValueError(f"--against {unknown[0]!r} is not known; known are {', '.join(PEERS)}")


def made(
    names: Sequence[str], model: Model, source: Model, room: int
) -> tuple[Sequence[Engine], Sequence[Missing]]:
    """The peers of these names that hold the model's weights, and the others. The last ones made are kept:
    the next point is mostly of the same model. Raises ValueError for a name that is not known."""
    check(names)
    return _made(tuple(names), model, source, room) if names else ((), ())


@lru_cache(maxsize=1)
def _made(
    names: Sequence[str], model: Model, source: Model, room: int
) -> tuple[Sequence[Engine], Sequence[Missing]]:
    engines: list[Engine] = []
    failed: list[Missing] = []
    for name in names:
        try:
            engines.append(PEERS[name](model, source, room))
        except Exception as error:  # whatever a package of others raises is that peer's row, and no end
            failed.append(missed(name, error))
    return engines, failed


def missed(name: str, error: Exception) -> Missing:
    """What a peer's row says of this error."""
    if isinstance(error, Absent):
        return Missing(name, str(error), error.install)
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    install = INSTALL.get(name) if isinstance(error, ImportError) else None
    return Missing(name, " ".join(f"{kind}{error}".split())[:500], install)


def alone(model: Model) -> AbstractContextManager[None]:
    """While peers are built and run beside a model on a CPU, GPU kernels are hidden from them."""
    return plain_peers() if model.device.type == "cpu" else nullcontext()
