"""llama.cpp beside us: the file that our weights are written to, and what llama.cpp makes of it."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from constate.bench import shapes
from constate.bench.llamacpp import KEYS, write
from constate.loading import load
from constate.loading.gguf.convert import convert
from constate.spans import Spans
from tests.bench.test_speed import ROOT, TINY

pytest.importorskip("gguf")
MAMBA = {
    **{"model_type": "mamba", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2},
    **{"state_size": 8, "expand": 2, "time_step_rank": 4, "tie_word_embeddings": True},
}
SMALL = {**TINY, "mamba": MAMBA}


@pytest.mark.parametrize("name", KEYS)
def test_the_file_holds_the_model(name: str, tmp_path: Path) -> None:
    """Read back by the loader of GGUF files, which is tested against llama.cpp's own converter's layout."""
    model = shapes.random_model(SMALL[name])
    write(model, tmp_path / "model.gguf", "F32")
    (tmp_path / "again").mkdir()
    convert(tmp_path / "model.gguf", tmp_path / "again")
    again, tokens = load(tmp_path / "again"), torch.randint(0, 97, (9,))
    torch.testing.assert_close(again(tokens, Spans.of([9])), model(tokens, Spans.of([9])), atol=1e-5, rtol=0)


def test_large_matrices_are_quantised_and_nothing_else(tmp_path: Path) -> None:
    import gguf

    write(shapes.random_model(SMALL["mamba"]), tmp_path / "model.gguf", "Q8_0")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    stored = {name for name, kind in kinds.items() if kind == "Q8_0"}
    layers = {f"blk.{i}.ssm_{part}.weight" for i in range(2) for part in ("in", "out", "x")}
    assert stored == layers | {"token_embd.weight"}
    assert set(kinds.values()) == {"Q8_0", "F32"}


def test_an_architecture_without_keys_is_refused_by_name(tmp_path: Path) -> None:
    raw = {**TINY["llama"], "model_type": "qwen3", "head_dim": 8}
    with pytest.raises(ValueError, match="qwen3"):
        write(shapes.random_model(raw), tmp_path / "model.gguf", "F32")


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("name", KEYS)
def test_llama_cpp_computes_the_same(name: str) -> None:
    """In a process of its own: llama.cpp keeps threads and a log of its own. Rows share nothing."""
    code = f"""
import torch
from constate.bench import shapes, speed
torch.set_num_threads(2)
model = shapes.random_model({SMALL[name]!r})
options = dict(prompt=19, new=3, rows=(1, 3), rounds=1, against=["llama.cpp"], check=True)
rows = list(speed.speed(model, "m", **options))
assert [row["dtype"] for row in rows] == ["float32", "F32"] * 2, rows
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert child.returncode == 0, child.stderr[-2000:]
