"""Where a checkpoint of a given name lies: in the package, in a folder, on the hub. Knows no tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from ..core.checkpoint import PICKLES, read_json, refusal

ZOO = Path(__file__).parents[1] / "zoo"
# What we read of a hub repository. Weights in other formats, or once more under other names, stay there.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
HUB_OTHERS = ["*/*", "consolidated*"]


def locate(name: str | Path) -> Path:
    """The folder of a checkpoint, downloaded where it is a hub id. Raises ValueError."""
    text, path = str(name), Path(name).expanduser()
    if text.startswith("tiny/"):
        folder = ZOO / text.removeprefix("tiny/")
        if text not in checkpoints():
            raise ValueError(f"{text!r} does not ship here; {near(text, checkpoints())}")
        return folder
    if text and path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{path} has no config.json: the folder that Hugging Face's files lie in is wanted"
            )
        return path
    if text == "smollm2" or path.suffix.lower() == ".gguf":
        return _read_gguf(text, path)
    if path.is_file():
        if any(path.match(kind) for kind in PICKLES):
            raise ValueError(refusal(path.name, path.parent))
        raise ValueError(f"{path} is a file; the folder that holds it and its config.json is wanted")
    if _hub_id(text):
        return _download(text)
    raise ValueError(
        f"no model {text!r}: no such folder, and a hub id reads OWNER/NAME; {near(text, checkpoints())}"
    )


def checkpoints() -> dict[str, str]:
    """The checkpoints that ship here: "tiny/NAME" to its model_type."""
    found = sorted(ZOO.glob("*/config.json"))
    return {f"tiny/{path.parent.name}": str(read_json(path).get("model_type")) for path in found}


def _read_gguf(text: str, path: Path) -> Path:
    from .gguf import convert, folder_of, smollm2

    path = smollm2() if text == "smollm2" else path
    if not path.is_file():
        raise ValueError(f"no model {text!r}: there is no such file")
    return folder_of(path, convert)


def only_config(name: str | Path) -> Path:
    """The config.json of a checkpoint, of which a hub id's is all that is downloaded. Raises ValueError."""
    text = str(name)
    if Path(name).expanduser().is_dir() or text.startswith("tiny/") or not _hub_id(text):
        return locate(name) / "config.json"
    from huggingface_hub import hf_hub_download

    with _reached(text):
        return Path(hf_hub_download(text, "config.json"))


def _hub_id(text: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) is not None


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    with _reached(hub_id):
        folder = Path(snapshot_download(hub_id, allow_patterns=HUB_FILES, ignore_patterns=HUB_OTHERS))
    if not (folder / "config.json").is_file():
        raise ValueError(f"{hub_id!r} has no config.json on the hub: it is no model in Hugging Face's format")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{hub_id!r} has no safetensors on the hub, and pickles are not loaded: they can run any code. "
            f"`hf download {hub_id} --local-dir IN`, then `constate convert IN OUT` reads their tensors alone"
        )
    return folder


@contextmanager
def _reached(hub_id: str) -> Iterator[None]:
    """What the hub raises inside, said as a ValueError."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ValueError(
            f"{hub_id!r} is neither a folder here nor in the local Hugging Face cache, and the hub cannot be "
            "reached (no network, or HF_HUB_OFFLINE is set)"
        ) from error
    except (OSError, HFValidationError) as error:  # its HTTP errors are OSErrors: not found, gated, timed out
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{hub_id!r} could not be downloaded: {why}") from error


def near(name: str, known: Iterable[str]) -> str:
    """What there is, the likeliest first."""
    names = list(known)
    close = get_close_matches(name, names, 3, 0.6) + [n for n in names if name and name.lower() in n.lower()]
    hint = f"did you mean {' or '.join(map(repr, dict.fromkeys(close)))}? " if close else ""
    return f"{hint}known are {', '.join(names) if names else 'none'}"
