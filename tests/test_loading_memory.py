"""What loading holds: the weights once, in the dtype that was asked for, and nothing of what cannot fit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from constate.core import checkpoint
from constate.core.checkpoint import write_json, write_tensors
from constate.core.weights import export
from constate.loading import find, load, memory
from tests.kernels.memory import peak_bytes

CONFIG: dict[str, Any] = dict(
    vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
    tie_word_embeddings=True,
)  # fmt: skip
LARGEST = 2 * 768 * 256 * 4  # gate and up, joined before they are copied into the model


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A llama's folder, and how many weights it has."""
    folder, architecture = tmp_path_factory.mktemp("llama"), find("llama").architecture
    config = architecture.Config(**CONFIG)
    params = {name: torch.rand_like(p) for name, p in architecture.build(config).named_parameters()}
    write_json(folder / "config.json", {"model_type": "llama", **CONFIG})
    write_tensors(folder / "model.safetensors", export(architecture.weights(config), params))
    return folder, sum(p.numel() for p in params.values())


def mapped(folder: Path) -> int:
    """The profiler counts the file's mapping too, which is no memory of ours: its pages are the system's."""
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_weights_are_held_once_in_their_own_dtype(stored: tuple[Path, int], dtype: str, size: int):
    folder, count = stored
    load(folder, dtype=dtype)  # imports
    kept: list[Any] = []
    peak = peak_bytes(lambda: kept.append(load(folder, dtype=dtype))) - mapped(folder)
    assert sum(p.numel() for p in kept[0].parameters()) == count
    assert peak < size * count + 1.1 * LARGEST + 100_000
    assert kept[0].weight_bytes < size * count + 20_000  # norms stay float32


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_room(nbytes: int | None) -> None:
        monkeypatch.setattr(memory, "available", lambda device: nbytes)

    return set_room


def test_a_checkpoint_larger_than_memory(stored: tuple[Path, int], room: Any):
    folder, count = stored
    room(3 * count)
    with pytest.raises(ValueError) as raised:
        load(folder)
    text = str(raised.value)
    assert f"{count:,} weights in float32 are {4 * count / 1e6:.1f} MB" in text
    assert f"and {3 * count / 1e6:.1f} MB of memory are free on cpu" in text
    assert f"bfloat16 and float16 would fit ({2 * count / 1e6:.1f} MB)" in text
    load(folder, dtype="bfloat16")
    room(count)
    with pytest.raises(ValueError, match="no dtype would fit"):
        load(folder, dtype="bfloat16")


def test_nothing_is_taken_before_it_is_known_to_fit(stored: tuple[Path, int], room: Any):
    folder, _ = stored
    room(1000)

    def refused() -> None:
        with pytest.raises(ValueError, match="would fit"):
            load(folder)

    assert peak_bytes(refused) - mapped(folder) < 100_000


def test_a_system_that_does_not_say(stored: tuple[Path, int], room: Any):
    room(None)
    load(stored[0])


def test_what_is_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    here = memory.available(torch.device("cpu"))
    assert here is not None
    assert 1e6 < here < 1e15
    assert memory.available(torch.device("meta")) is None
    (tmp_path / "max").write_text("123456\n")
    monkeypatch.setattr(memory, "_LIMIT", tmp_path / "max")
    assert memory.available(torch.device("cpu")) == 123456
    (tmp_path / "max").write_text("max\n")
    assert (memory.available(torch.device("cpu")) or 0) > 1e6


def test_a_file_larger_than_this_machine_can_map(stored: tuple[Path, int], monkeypatch: pytest.MonkeyPatch):
    """Systems differ in whether they map a file that is larger than their memory; this one does not."""

    def refused(path: Path, framework: str) -> Any:
        raise RuntimeError(f"unable to mmap 98248288520 bytes from file <{path}>: Cannot allocate memory")

    monkeypatch.setattr(checkpoint, "safe_open", refused)
    folder, count = stored
    with pytest.raises(ValueError, match=rf"GB, more than .* {count:,} weights, of which 16 bits each are"):
        load(folder)
