"""Any checkpoint that is understood to a safetensors folder in its architecture's published names.

Pickles, other dialects and GGUF come in; out goes what `load`, and transformers where it knows the family,
reads. Our own `composed` models leave under published names where a published architecture is the same
model. Numbers keep their dtype and value. Knows folders; no command line.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.architecture import Architecture, read_config, write_config
from ..core.checkpoint import PICKLES, WHOLE, Checkpoint, read_json, write_json, writing
from ..core.weights import export, fill
from .dialects import tell
from .families import find
from .names import locate
from .pickles import Pickled

TEXT_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model"),
)


@dataclass(frozen=True)
class Converted:
    """What was written: `tensors` of `bytes` together, of which architecture, and the dialect it came in
    (None: the architecture's primary one)."""

    model_type: str
    tensors: int
    bytes: int
    dialect: str | None


def convert(source: str | Path, out: str | Path, to: str | None = None) -> Converted:
    """Write the checkpoint `source` as config.json, model.safetensors and its tokenizer's files into `out`.

    `source`: a pickled, GGUF or safetensors file, a folder of such, or a name that `load` takes.
    `to="hf"` demands published names also of a `composed` model, which is otherwise left as it is
    where no published architecture is the same. `out` is made as a whole or not at all. Raises ValueError
    for an `out` that holds something, pickles that need code, and what is not understood.
    """
    out = Path(out).expanduser()
    if to not in (None, "hf"):
        raise ValueError(f"to={to!r}: 'hf' is the one dialect that is written besides a model's own")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists already and is not an empty folder: nothing is overwritten")
    with _new_folder(out) as folder:
        path = Path(source).expanduser()
        if path.suffix.lower() == ".gguf" and path.is_file():
            from .gguf import convert as convert_gguf  # needs a library that few have

            convert_gguf(path, folder)
            model_type, dialect = str(read_json(folder / "config.json")["model_type"]), "gguf"
        else:
            model_type, dialect = _rewrite(path if path.exists() else locate(source), folder, to)
        return Converted(model_type, len(Checkpoint(folder)), (folder / WHOLE).stat().st_size, dialect)


def _rewrite(path: Path, folder: Path, to: str | None) -> tuple[str, str | None]:
    home = path if path.is_dir() else path.parent
    raw, source = read_json(home / "config.json"), _tensors(path)
    try:
        told = tell(raw, source.shapes())
        architecture, config = told.architecture, told.config
        with torch.device("meta"):
            shapes = {name: p.shape for name, p in architecture.build(config).named_parameters()}
        params = fill(told.rules, source, shapes)
        if architecture.model_type == "composed":
            architecture, config, params = _published(architecture, config, params, to)
        tensors = export(architecture.weights(config), params)
        if odd := [f"{name} ({t.dtype})" for name, t in tensors.items() if t.dtype not in _STORED]:
            raise ValueError(f"only float32, bfloat16 and float16 are written, not {', '.join(odd[:4])}")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    with writing(folder / WHOLE, {n: torch.empty_like(t, device="meta") for n, t in tensors.items()}) as put:
        for name, t in tensors.items():
            put(name, t.detach())
    ids = {key: value for key, value in raw.items() if key.endswith("_token_id")}
    dtype = str(params["embed.weight"].dtype).removeprefix("torch.")
    write_json(folder / "config.json", write_config(config, architecture.model_type) | ids | {"dtype": dtype})
    for name in TEXT_FILES:
        if (home / name).is_file():
            shutil.copyfile(home / name, folder / name)
    return architecture.model_type, told.dialect


_STORED = (torch.float32, torch.bfloat16, torch.float16)


def _published(
    architecture: Architecture, config: Any, params: Mapping[str, Tensor], to: str | None
) -> tuple[Architecture, Any, Mapping[str, Tensor]]:
    """A composed model as the published architecture that it is; as it stands where there is none and
    none is demanded."""
    from ..hybrid.published import published

    try:
        raw = published(config)
        known = find(raw["model_type"]).architecture
        given = read_config(known.Config, raw)
    except ValueError:
        if to == "hf":
            raise
        return architecture, config, params
    if config.embed_scale != 1.0:  # the product that the model would make, in the same precision
        embed = params["embed.weight"]
        scaled = {"embed.weight": embed.float() * config.embed_scale}
        params = {**params, "head.weight": params.get("head.weight", embed), **scaled}
    return known, given, params


def _tensors(path: Path) -> Checkpoint | Pickled:
    if path.is_dir():
        return Checkpoint(path) if any(path.glob("*.safetensors")) else Pickled(path)
    if any(path.match(kind) for kind in PICKLES):
        return Pickled(path)
    if path.suffix == ".safetensors" and list(path.parent.glob("*.safetensors")) == [path]:
        return Checkpoint(path.parent)
    raise ValueError(
        f"{path} is neither a folder of weights nor a file of {', '.join(PICKLES)}, *.gguf or, alone in its "
        "folder, *.safetensors"
    )


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` if all goes well, and is gone if not."""
    new = out.with_name(f".{out.name}.{os.getpid()}.new")
    out.parent.mkdir(parents=True, exist_ok=True)
    new.mkdir()
    try:
        yield new
        if out.exists():
            out.rmdir()
        new.rename(out)
    finally:
        shutil.rmtree(new, ignore_errors=True)
