"""Denoisers' configs: what is read and how it is asked, what is refused, and that nothing is lost on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models

from constate.core.architecture import autoregressive, read_config
from constate.diffusion_lm.denoiser import Denoiser, denoiser
from constate.loading import find, load, save
from constate.spans import Spans
from tests.denoisers import DENOISERS, LAYERS, MASK, make
from tests.models import GLA
from tests.models import make as make_causal
from tests.routes import same_routes


@pytest.mark.parametrize("name", DENOISERS)
def test_what_is_saved_is_what_is_loaded(name: str, tmp_path: Path) -> None:
    model = make(name)
    save(model, tmp_path)
    loaded = load(tmp_path, backend="torch")
    row = torch.arange(9) * 11 % MASK
    assert torch.equal(loaded(row, Spans.of([9])), model(row, Spans.of([9])))
    assert denoiser(loaded) == denoiser(model) and loaded.fingerprint == model.fingerprint
    half = load(tmp_path, backend="torch", dtype="bfloat16")
    with same_routes(model, half):
        want = model(row, Spans.of([9]))
        moved = float((half(row, Spans.of([9])) - want).abs().max())
    assert 0 < moved < 2, f"{name} in bfloat16 is off by {moved}"


def test_how_each_is_asked() -> None:
    asked = {name: denoiser(make(name)) for name in DENOISERS}
    assert asked == {
        "both sides": Denoiser(MASK),
        "both sides, shifted": Denoiser(MASK, shift=True),
        "blocks": Denoiser(MASK, block=4),
        "blocks, shifted": Denoiser(MASK, shift=True, block=5),
        "llada": Denoiser(MASK),
        "dream": Denoiser(MASK, shift=True),
        "mdlm": Denoiser(MASK),
        "mdlm, timed": Denoiser(MASK, time_conditioned=True),
        "bd3lm": Denoiser(MASK, block=4),
        "bd3lm, bare": Denoiser(MASK, block=3),
        "sdar": Denoiser(MASK, block=6),
        "llada2_moe": Denoiser(MASK, block=7),
    }
    assert {name for name, about in asked.items() if about.exact_cache} == {
        "blocks", "blocks, shifted", "bd3lm", "bd3lm, bare", "sdar", "llada2_moe",
    }  # fmt: skip
    decoders = {find(str(raw["model_type"])).architecture.decode for raw in DENOISERS.values()}
    assert len(decoders) == 1 and autoregressive not in decoders


def test_a_model_without_a_mask_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="llama model writes one token after another"):
        model = make_causal("llama")
        model.architecture = find("llama").architecture
        denoiser(model)
    model = make("llada", mask_token_id=None)
    with pytest.raises(ValueError, match="names a mask, and nothing else says which places"):
        denoiser(model)
    with pytest.raises(ValueError, match="mask_token_id 97 is outside the embedding of 97 rows"):
        denoiser(make("llada", mask_token_id=97))
    # As SDAR's first checkpoints have it: in the tokenizer alone.
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(90)}, unk_token="w0"))
    tokenizer.add_special_tokens([AddedToken("<|MASK|>")])
    save(make("sdar", mask_token_id=None), tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<|MASK|>"}))
    assert denoiser(load(tmp_path)).mask_id == 90


def _read(name: str, **over: Any) -> Any:
    raw = {**DENOISERS[name], **over}
    architecture = find(str(raw["model_type"])).architecture
    return architecture.build(read_config(architecture.Config, raw))


@pytest.mark.parametrize(
    ("name", "over", "said"),
    [
        ("both sides", {"layers": [{"mixer": GLA, "mlp": None}]}, "'gla', which reads one way"),
        ("both sides", {"layers": [{"mixer": {**LAYERS[0], "window": 5}}]}, "a window looks back alone"),
        ("both sides", {"layers": [{"mixer": {**LAYERS[0], "block": 5}}]}, "'block' is the whole model's"),
        ("blocks", {"block": 0}, "block 0: at least 1"),
        ("sdar", {"block_size": 0}, "block 0: at least 1"),
        ("sdar", {"use_sliding_window": True, "max_window_layers": 0}, "a window looks back alone"),
        ("llada2_moe", {"norm_head": True}, "norm_head = True: no published model is such"),
        ("llada2_moe", {"rotary_dim": 6}, "rotary_dim 6, and partial_rotary_factor 0.5 of 8 channels is 4"),
        ("llada2_moe", {"topk_group": 5}, "8 experts in 4 groups, 5 of them kept"),
        ("dream", {"use_mrope": True}, "use_mrope = True is not supported"),
        ("llada", {"alibi": True}, "alibi = True: of OLMo's options"),
        ("llada", {"block_type": "sequential"}, "block_type = 'sequential'"),
        ("llada", {"n_heads": 3}, "not a multiple of num_key_value_heads"),
        ("llada", {"embedding_size": 90}, "embedding_size 90 is less than vocab_size 97"),
        ("llada", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not understood"),
        ("mdlm", {"n_heads": 5}, "hidden_dim 32 is not a multiple of n_heads 5"),
        ("bd3lm", {"time_conditioning": True}, "no published model is such"),
        ("bd3lm", {"cross_attn": False}, "trained block by block"),
        ("bd3lm", {"causal": True}, "trained block by block"),
    ],
)
def test_what_is_not_understood_is_refused(name: str, over: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _read(name, **over)


def test_a_causal_list_of_layers_has_no_block() -> None:
    raw = {"model_type": "composed", "vocab_size": 9, "hidden_size": 32}
    architecture = find("composed").architecture
    config = read_config(architecture.Config, {**raw, "layers": [{"mixer": {**LAYERS[0], "block": 4}}]})
    with pytest.raises(ValueError, match="of model_type 'composed_diffusion'"):
        architecture.build(config)


def test_mdlm_as_published() -> None:
    """config.json of its authors' OpenWebText release, whose mask is one id beyond GPT-2's."""
    raw = {
        "model_type": "mdlm", "architectures": ["MDLM"], "auto_map": {}, "cond_dim": 128, "dropout": 0.1,
        "hidden_dim": 768, "model_length": 1024, "n_blocks": 12, "n_heads": 12, "time_conditioning": False,
        "torch_dtype": "float32", "transformers_version": "4.38.2", "vocab_size": 50258,
    }  # fmt: skip
    config = read_config(find("mdlm").architecture.Config, raw)
    assert config.mask == 50257
    assert not config.asked(config.mask).time_conditioned
