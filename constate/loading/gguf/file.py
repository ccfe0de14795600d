"""A GGUF file through the `gguf` library: its metadata as plain values, its tensors one at a time.

Knows the format (ggml's spec, version 3) and its quantisations; no architecture. What the file stores in
16 bits comes as it is, every quantised type as float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFFile(Mapping[str, Tensor]):
    """Names to tensors, each read and dequantised when asked for, with `metadata` beside them."""

    def __init__(self, path: Path):
        """Raises ValueError for a file that is cut short, of another kind or of an unknown type, and where
        the library is not installed."""
        self.path, self._library = path, library()
        reader, self.metadata = _opened(self._library, path)
        if self.metadata.get("split.count", 1) > 1:
            raise ValueError(
                f"{path} is one of {self.metadata['split.count']} pieces: join them first, with llama.cpp's "
                "`llama-gguf-split --merge`"
            )
        self._tensors = {each.name: each for each in reader.tensors}
        self._check_types()

    def __getitem__(self, name: str) -> Tensor:
        """The tensor, in the file's order of axes as PyTorch has it: (out, in) for a matrix."""
        stored = self._tensors[name]
        kind = stored.tensor_type.name
        if kind not in FLOATS:
            return torch.from_numpy(self._library.dequantize(stored.data, stored.tensor_type))
        copied = torch.from_numpy(np.array(stored.data))
        return copied.view(torch.bfloat16) if kind == "BF16" else copied  # bytes to the library

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def outlines(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype, without its numbers: tensors on the meta device."""
        return {
            name: torch.empty(
                [int(n) for n in reversed(stored.shape)],
                dtype=FLOATS.get(stored.tensor_type.name, torch.float32),
                device="meta",
            )
            for name, stored in self._tensors.items()
        }

    def _check_types(self) -> None:
        """Before anything is read: a type that the library lacks is known by trying one block of it."""
        unknown: dict[str, str] = {}
        for name, stored in self._tensors.items():
            kind = stored.tensor_type
            if kind.name in FLOATS or kind.name in unknown:
                continue
            block = np.zeros((1, self._library.GGML_QUANT_SIZES[kind][1]), np.uint8)
            try:
                self._library.dequantize(block, kind)
            except NotImplementedError:
                unknown[kind.name] = name
        if unknown:
            found = ", ".join(f"{kind} ({name})" for kind, name in unknown.items())
            raise ValueError(
                f"{self.path} has tensors of type {found}, which the gguf library cannot dequantise: a newer "
                "library may (pip install -U gguf), or take the file in another quantisation"
            )


def library() -> ModuleType:
    """The gguf library, imported when a file is first read. Raises ValueError that says how to install it."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            f"reading a GGUF file needs the gguf library, which is not here ({error}): "
            "pip install 'constate[gguf]', or pip install gguf"
        ) from error
    return gguf


def _opened(gguf: ModuleType, path: Path) -> tuple[Any, dict[str, Any]]:
    """The library's reader and the metadata, once both are known to be whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull`")
    if not start.startswith(b"GGUF"):
        raise ValueError(f"{path} ({size} bytes) is no GGUF file: it does not begin with GGUF")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: _plain(field.contents()) for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        if "GGMLQuantizationType" in str(error):
            raise ValueError(
                f"{path} has a tensor of a type that the gguf library does not know ({error})"
            ) from error
        raise ValueError(
            f"{path} ({size} bytes) is not a whole GGUF file ({error}); an interrupted download or copy?"
        ) from error
    if reader.byte_order != "I":
        raise ValueError(f"{path} is written in the other byte order; a file of this machine's is wanted")
    return reader, metadata


def _plain(value: Any) -> Any:
    """A value as the file means it: its floats are 32 bits, so that 1e-05 is 9.9999997e-06 as 64."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
