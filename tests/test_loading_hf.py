"""Folders as transformers 5.23 writes them, and as its earlier versions did: every key and every tensor of
mamba2 and the transformers is accounted for. That the numbers agree too is the twins' matter; here each
parameter is traced to the file, and one forward shows that the right config reached the model."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from constate.core.architecture import NO_EFFECT
from constate.loading import find, load, save
from constate.spans import Spans

transformers = pytest.importorskip("transformers")

COMMON: dict[str, Any] = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, eos_token_id=[2, 5])
MAMBA2 = COMMON | dict(state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=16)
LLAMA = COMMON | dict(intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3["original_max_position_embeddings"] = 64
SLIDING = dict(use_sliding_window=True, sliding_window=5)
TYPES = dict(layer_types=["sliding_attention", "full_attention"])
LIMITED = dict(time_step_limit=(0.01, 0.1))
MAMBA = COMMON | dict(state_size=6, intermediate_size=40)
OTHERWISE = dict(tie_word_embeddings=False, use_bias=True, use_conv_bias=False, time_step_rank=5)
CASES = {
    "mamba": ("mamba", MAMBA),
    "mamba otherwise": ("mamba", MAMBA | OTHERWISE),
    "falcon_mamba": ("falcon_mamba", MAMBA | dict(mixer_rms_eps=1e-3)),
    "falcon_mamba otherwise": ("falcon_mamba", MAMBA | OTHERWISE),
    "mamba2": ("mamba2", MAMBA2),
    "mamba2 tied": ("mamba2", MAMBA2 | dict(tie_word_embeddings=True)),
    "mamba2 biased": ("mamba2", MAMBA2 | dict(use_bias=True, use_conv_bias=False, **LIMITED)),
    "llama": ("llama", LLAMA),
    "llama tied": ("llama", LLAMA | dict(tie_word_embeddings=True)),
    "llama biased": ("llama", LLAMA | dict(attention_bias=True, mlp_bias=True, head_dim=16)),
    "mistral": ("mistral", LLAMA | dict(sliding_window=5, head_dim=16)),
    "mistral full": ("mistral", LLAMA | dict(sliding_window=None, tie_word_embeddings=True)),
    "qwen2": ("qwen2", LLAMA | dict(sliding_window=5)),
    "qwen2 tied, sliding": ("qwen2", LLAMA | SLIDING | dict(max_window_layers=1, tie_word_embeddings=True)),
    "qwen3": ("qwen3", LLAMA | dict(head_dim=16)),
    "qwen3 biased, sliding": ("qwen3", LLAMA | SLIDING | TYPES | dict(attention_bias=True)),
    "llama scaled": ("llama", LLAMA | dict(rope_parameters=LLAMA3 | dict(rope_theta=5000.0))),
}


@pytest.fixture(params=list(CASES))
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A folder written by transformers and the model it was written from, no weight at its neutral value."""
    model_type, settings = CASES[request.param]
    config = transformers.AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(1)
    twin = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(0.2 * torch.randn_like(p))
    twin.save_pretrained(tmp_path)
    return tmp_path, twin


def test_every_tensor_goes_there_and_back(written: tuple[Path, Any], tmp_path: Path):
    folder, _ = written
    model = load(folder)
    save(model, folder / "again")
    before, after = load_file(folder / "model.safetensors"), load_file(folder / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], t) for name, t in before.items())
    assert load(folder / "again").config == model.config
    assert model.eos_ids == {2, 5}


def test_what_we_write_transformers_reads(written: tuple[Path, Any]):
    folder, twin = written
    save(load(folder), folder / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "again").eval()
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, twin(ids).logits)


def test_the_config_reached_the_model(written: tuple[Path, Any]):
    folder, twin = written
    ids = torch.arange(3, 36)
    with torch.no_grad():
        want = twin(ids[None]).logits[0]
    got = load(folder).forward(ids, Spans.of([33]))
    assert (got - want).abs().max() < 1e-4 * max(1.0, want.abs().max().item())


def test_every_key_is_a_field_or_known_to_have_no_effect(written: tuple[Path, Any]):
    folder, _ = written
    raw = json.loads((folder / "config.json").read_text())
    fields = set(find(raw["model_type"]).architecture.Config.__dataclass_fields__)
    neutral_today = {"attention_bias", "mlp_bias", "use_bias"}
    assert set(raw) - fields - NO_EFFECT <= neutral_today


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (None, {"rope_type": "default"}),
        (LLAMA3, LLAMA3),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    ],
)
def test_both_dialects_of_rotary_settings(tmp_path: Path, scaling: Any, parameters: dict[str, Any]):
    """Version 4 wrote rope_theta and rope_scaling, version 5 writes rope_parameters."""
    settings = LLAMA | dict(rope_parameters={**parameters, "rope_theta": 777.0})
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("llama", **settings)
    ).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    new, ids = load(tmp_path), torch.arange(3, 36)
    old = {k: v for k, v in raw.items() if k not in ("rope_parameters", "head_dim", "dtype")}
    old |= {"rope_theta": 777.0, "rope_scaling": scaling, "torch_dtype": "float32", "_name_or_path": "x"}
    (tmp_path / "config.json").write_text(json.dumps(old))
    spans = Spans.of([33])
    assert torch.equal(load(tmp_path).forward(ids, spans), new.forward(ids, spans))
    other = old | {"rope_theta": 778.0}
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert not torch.equal(load(tmp_path).forward(ids, spans), new.forward(ids, spans))


@pytest.mark.parametrize(
    ("model_type", "settings", "key", "value"),
    [("mamba2", MAMBA2, "rms_norm_gate", False), ("llama", LLAMA, "rope_parameters", {"rope_type": "odd"})],
)
def test_a_key_that_would_change_the_maths_is_refused(
    tmp_path: Path, model_type: str, settings: dict[str, Any], key: str, value: Any
):
    config = transformers.AutoConfig.for_model(model_type, **settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
    with pytest.raises(ValueError, match="odd" if key == "rope_parameters" else key):
        load(tmp_path)


def test_transformers_shards_are_read(tmp_path: Path):
    config = transformers.AutoConfig.for_model("llama", **LLAMA)
    twin = transformers.AutoModelForCausalLM.from_config(config)
    twin.save_pretrained(tmp_path / "whole")
    twin.save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    files = [name for name in os.listdir(tmp_path / "cut") if name.endswith(".safetensors")]
    assert len(files) > 1
    assert load(tmp_path / "cut").fingerprint == load(tmp_path / "whole").fingerprint
    (tmp_path / "cut" / files[0]).unlink()
    with pytest.raises(ValueError, match=f"missing {files[0]}"):
        load(tmp_path / "cut")
