"""The tensors of a checkpoint folder: one safetensors file or several, read one tensor at a time.

Knows files and names; no model. Pickled weights are refused, since reading them can run any code.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Size, Tensor, bfloat16, float16, float32, uint8

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_CODES = {float32: "F32", float16: "F16", bfloat16: "BF16"}
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")


class Checkpoint(Mapping[str, Tensor]):
    """Names to tensors, each read when asked for. A tensor may share memory with the mapped file."""

    def __init__(self, folder: Path):
        """Opens the files. Raises ValueError for missing shards (named), broken files, pickled weights."""
        self.folder, self._mapped = folder, set[int]()
        listed = _listed(folder)
        files = sorted(set(listed.values())) if listed else _files(folder)
        if absent := [name for name in files if not (folder / name).is_file()]:
            raise ValueError(
                f"{folder}: missing {', '.join(absent)}, of {len(files)} files of weights. Was the download "
                "or copy interrupted?"
            )
        opened = {name: _open(folder / name) for name in files}
        self._home = {key: file for file in opened.values() for key in file.keys()}  # noqa: SIM118  (no mapping)
        if absent := [f"{key} (in {name})" for key, name in listed.items() if key not in opened[name].keys()]:  # noqa: SIM118
            raise ValueError(f"{folder}: {INDEX} lists tensors that its files lack: {', '.join(absent[:8])}")

    def shapes(self) -> dict[str, Size]:
        """The shape of every tensor; none is read."""
        return {name: Size(file.get_slice(name).get_shape()) for name, file in self._home.items()}

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._home[name].get_tensor(name)
        self._mapped.add(tensor.untyped_storage().data_ptr())
        return tensor

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is the mapped file's, which may be misaligned and goes away."""
        return tensor.untyped_storage().data_ptr() in self._mapped

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, which is whole or not there at all."""
    own = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    whole(path, lambda new: save_file(own, new, metadata={"format": "pt"}))


@contextmanager
def writing(path: Path, outlines: Mapping[str, Tensor]) -> Iterator[Callable[[str, Tensor], Tensor]]:
    """One safetensors file written tensor by tensor, for models that memory should not hold as a whole.

    `outlines` (on the meta device) name the tensors. What is yielded takes a name and its tensor, once for
    each in any order, and returns the outline; the file is whole in the end or not there at all.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, t in outlines.items():
        start, end = end, end + t.numel() * t.element_size()
        header[name] = {"dtype": _CODES[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)  # so that a mapped tensor is aligned where its length allows
    begin, awaited, new = len(text) + 8, set(outlines), path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:

            def put(name: str, tensor: Tensor) -> Tensor:
                outline = outlines[name]
                assert (tensor.dtype, tensor.shape) == (outline.dtype, outline.shape), name
                awaited.remove(name)
                file.seek(begin + header[name]["data_offsets"][0])
                file.write(tensor.contiguous().flatten().view(uint8).numpy().data)
                return outline

            file.write(len(text).to_bytes(8, "little") + text)
            yield put
            assert not awaited, awaited
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file. Raises ValueError for anything else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, an object is wanted")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    whole(path, lambda new: new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8"))


def whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside the place and move in, so that an interruption or an error leaves what was there before.
    Whoever may read a new file may read this one: safetensors alone would keep it to its owner."""
    new = path.with_name(path.name + ".new")
    try:
        new.touch()
        mode = new.stat().st_mode
        write(new)
        new.chmod(mode)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _listed(folder: Path) -> dict[str, str]:
    """The index of a sharded checkpoint: tensor to file; empty where there is none."""
    if (folder / WHOLE).is_file():
        return {}
    listed = read_json(folder / INDEX).get("weight_map", {})
    if outside := sorted({name for name in listed.values() if Path(name).name != name}):
        raise ValueError(f"{folder / INDEX} names files outside its folder: {', '.join(outside[:4])}")
    return listed


def _files(folder: Path) -> list[str]:
    """The files of weights in a folder without an index, those that its shards' names promise included."""
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if WHOLE in found:
        return [WHOLE]
    shards = {(m[1], len(m[2]), m[3]) for name in found if (m := _SHARD.fullmatch(name))}
    if len(shards) == 1:
        stem, digits, count = shards.pop()
        return [f"{stem}-{i:0{digits}}-of-{count}.safetensors" for i in range(1, int(count) + 1)]
    if len(found) == 1:
        return found
    if found:
        raise ValueError(f"{folder}: which of {', '.join(found)}? One {WHOLE} or an {INDEX} is wanted")
    if pickled := sorted(path.name for kind in PICKLES for path in folder.glob(kind)):
        raise ValueError(refusal(", ".join(pickled), folder))
    raise ValueError(f"{folder} holds no weights: a {WHOLE} is wanted, or shards with an {INDEX}")


def refusal(names: str, folder: Path) -> str:
    """Why pickled weights are not read, and the way out."""
    return (
        f"{folder} holds pickled weights ({names}), which are not loaded: a pickle can run any code. "
        f"`constate convert {folder} OUT` reads the tensors alone and writes safetensors; then load OUT"
    )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        with path.open("rb") as file:
            pointer = file.read(64).startswith(b"version https://git-lfs")
        why = "it is a Git LFS pointer: run `git lfs pull`" if pointer else "an interrupted download or copy?"
        size = path.stat().st_size
        raise ValueError(f"{path} ({size} bytes) is not a whole safetensors file ({error}); {why}") from error
    except RuntimeError as error:  # PyTorch's, of a system that maps no file larger than its memory
        if "mmap" not in str(error):
            raise
        stored, count = path.stat().st_size / 1e9, _count(path)
        raise ValueError(
            f"{path} is {stored:,.1f} GB, more than this machine maps into memory: {count:,} weights, of "
            f"which 16 bits each are {2 * count / 1e9:,.1f} GB. More memory is wanted, or shards if those fit"
        ) from error


def _count(path: Path) -> int:
    """How many numbers a safetensors file holds, by its header, which is not mapped."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(Size(entry["shape"]).numel() for key, entry in header.items() if key != "__metadata__")
