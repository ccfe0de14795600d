"""Pickled checkpoints, read by PyTorch's restricted unpickler: tensors alone, and no code is run.

A file is mapped where its format allows, so that a tensor's bytes are read when they are used. Only
`convert` reads these; models are loaded from safetensors. Knows files and names; no model.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor

from ..core.checkpoint import PICKLES, read_json

WHOLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.(?:bin|pt|pth)")
# What training frameworks call the weights where they store other things beside them.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


class Pickled(Mapping[str, Tensor]):
    """Names to tensors of one pickled file, or of several that are one checkpoint."""

    def __init__(self, path: Path):
        """`path`: a file, or a folder with `pytorch_model.bin`, shards of it, or one pickled file. Raises
        ValueError for files that are missing, cut short, need code, or hold something else than tensors."""
        self._tensors: dict[str, Tensor] = {}
        for file in [path] if path.is_file() else _files(path):
            new = _read(file)
            if twice := sorted(self._tensors.keys() & new.keys()):
                raise ValueError(f"{path}: {', '.join(twice[:4])} in more than one file")
            self._tensors |= new

    def shapes(self) -> dict[str, Size]:
        """The shape of every tensor."""
        return {name: t.shape for name, t in self._tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _files(folder: Path) -> list[Path]:
    found = sorted(path.name for kind in PICKLES for path in folder.glob(kind))
    if WHOLE in found:
        names = [WHOLE]
    elif listed := read_json(folder / INDEX).get("weight_map"):
        names = sorted(set(listed.values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{folder / INDEX} names files outside its folder: {', '.join(outside[:4])}")
    elif shards := [m for name in found if (m := _SHARD.fullmatch(name))]:
        one, count = shards[0], int(shards[0][3])
        stem, end, digits = one[1], Path(one[0]).suffix, len(one[2])
        names = [f"{stem}-{i:0{digits}}-of-{one[3]}{end}" for i in range(1, count + 1)]
    else:
        names = found
        if len(found) != 1:
            raise ValueError(f"{folder}: which of {', '.join(found) or 'no files'}? Give the file itself")
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(
            f"{folder}: missing {', '.join(absent)}, of {len(names)} files of weights. Was the download or "
            "copy interrupted?"
        )
    return [folder / name for name in names]


def _read(path: Path) -> dict[str, Tensor]:
    content = _unpickled(path)
    if isinstance(content, Mapping) and not any(isinstance(v, Tensor) for v in content.values()):
        inner = [content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)]
        content = inner[0] if inner else content
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{path} holds a {type(content).__name__}; names with tensors are wanted")
    if other := [str(key) for key, value in content.items() if not isinstance(value, Tensor)]:
        raise ValueError(
            f"{path} holds more than tensors ({', '.join(other[:4])}): a state_dict is wanted, by itself or "
            f"under {', '.join(_WRAPPERS)}"
        )
    return {str(name): t for name, t in content.items()}


def _unpickled(path: Path) -> Any:
    with path.open("rb") as file:
        if file.read(64).startswith(b"version https://git-lfs"):
            raise ValueError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull`")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of pickle protocols that it may not read: it says so if it cannot
            return _restricted(path)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f": it asks for {asked[1]}" if asked else ""
        raise ValueError(
            f"{path} cannot be read without running code of its own, and is refused{what}. A pickle of that "
            "kind can do anything; safetensors or a plain state_dict, which is tensors alone, is wanted"
        ) from error
    except Exception as error:  # a damaged pickle makes the unpickler fail in any way
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is not a whole pickled checkpoint ({why}); an interrupted "
            "download or copy?"
        ) from error


def _restricted(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)  # the format before PyTorch 1.6
