"""constate: language models whose memory does not grow, with the state an explicit value.

The face of the package. It knows where each public name lives and fetches it on first use, so that
`import constate` and `constate --help` cost milliseconds: torch is imported only by what needs it.
It knows nothing else.

    import constate

    model = constate.load("tiny/hybrid")
    print(constate.generate(model, ["It is a truth"])[0].text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what the lazy names are, for type checkers and editors
    from .core.cache import Cache
    from .generation import generate, stream
    from .loading import load
    from .spans import Spans

__version__ = "0.1.0"
__all__ = ["Cache", "Spans", "__version__", "generate", "load", "stream"]

_HOMES = {
    "load": ".loading",
    "generate": ".generation",
    "stream": ".generation",
    "Cache": ".core.cache",
    "Spans": ".spans",
}


def __getattr__(name: str) -> Any:
    """Fetch a public name from its home and keep it, so that this runs once a name."""
    if name not in _HOMES:
        raise AttributeError(f"module 'constate' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
