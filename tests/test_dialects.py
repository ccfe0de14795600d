"""Checkpoints in mamba_ssm's own dialect beside the same weights in Hugging Face's, and dialects that cannot
be told (cases H1, H2). That the Hugging Face form is right is the twins' matter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from constate.core.architecture import read_config
from constate.loading import find, load
from constate.loading.dialects import tell
from constate.spans import Spans
from tests.models import spread

VOCAB = 93  # 96 rows once padded to a multiple of 8
LAYER = {"layer": "Mamba2", "d_state": 16, "headdim": 16, "ngroups": 2, "d_conv": 3, "dt_limit": [0.01, 0.2]}
SSM = {
    "d_state": 6,
    "d_conv": 3,
    "expand": 3,
    "dt_rank": 5,
    "bias": True,
    "conv_bias": False,
    "dt_min": 0.002,
}
HF1 = {"model_type": "mamba", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}
HF2 = {**HF1, "model_type": "mamba2", "tie_word_embeddings": True, "n_groups": 1, "head_dim": 64}

# What mamba_ssm wrote and what the same model is to Hugging Face. The first is case H1 as reported.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "H1": (
        {"d_model": 64, "n_layer": 2, "ssm_cfg": {"layer": "Mamba2"}},
        {**HF2, "hidden_size": 64, "state_size": 128, "num_heads": 2},
    ),
    "mamba2, grouped and limited": (
        {"d_model": 64, "n_layer": 2, "vocab_size": VOCAB, "ssm_cfg": LAYER, "d_intermediate": 0},
        {
            **HF2,
            **{"hidden_size": 64, "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2},
            **{"conv_kernel": 3, "time_step_limit": [0.01, 0.2]},
        },
    ),
    "mamba": ({"d_model": 32, "n_layer": 2, "vocab_size": VOCAB, "ssm_cfg": None, "attn_layer_idx": []}, HF1),
    "mamba, every argument": (
        {"d_model": 32, "n_layer": 2, "vocab_size": 90, "ssm_cfg": {"layer": "Mamba1", **SSM},
         "pad_vocab_size_multiple": 16, "tie_embeddings": False, "fused_add_norm": True, "rms_norm": True},
        {**HF1, "state_size": 6, "conv_kernel": 3, "expand": 3, "time_step_rank": 5, "use_bias": True,
         "use_conv_bias": False, "tie_word_embeddings": False},
    ),
}  # fmt: skip


def published(raw: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors of this Hugging Face config under its names, no weight at its neutral value."""
    from constate.core.weights import export

    architecture = find(raw["model_type"]).architecture
    config = read_config(architecture.Config, raw)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = architecture.build(config).requires_grad_(False)
    spread(model, 3)
    return export(architecture.weights(config), dict(model.named_parameters()))


def original(raw: dict[str, Any]) -> dict[str, Tensor]:
    """The same under mamba_ssm's names, whose files hold a tied head too."""
    tensors = {name.replace("embeddings", "embedding"): t for name, t in published(raw).items()}
    return {"lm_head.weight": tensors["backbone.embedding.weight"].clone(), **tensors}


def write(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def logits(folder: Path) -> Tensor:
    ids = torch.arange(1, 41)
    return load(folder, backend="torch").forward(ids, Spans.of([40]))


def refusal(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    with pytest.raises(ValueError) as raised:
        load(write(folder, raw, tensors))
    return str(raised.value)


@pytest.mark.parametrize("name", FORMS)
def test_both_forms_of_the_same_weights_are_the_same_model(name: str, tmp_path: Path) -> None:
    """Case H1."""
    theirs, hf = FORMS[name]
    one = logits(write(tmp_path / "original", theirs, original(hf)))
    two = logits(write(tmp_path / "hf", hf, published(hf)))
    assert torch.equal(one, two)
    assert one.shape == (40, 96) and float(one.std()) > 0.1


def test_a_tied_head_may_be_absent(tmp_path: Path) -> None:
    theirs, hf = FORMS["H1"]
    tensors = original(hf)
    whole = logits(write(tmp_path / "whole", theirs, tensors))
    del tensors["lm_head.weight"]
    assert torch.equal(logits(write(tmp_path / "bare", theirs, tensors)), whole)
    tensors["lm_head.weight"] = tensors["backbone.embedding.weight"] + 1
    text = refusal(tmp_path / "clash", theirs, tensors)
    assert "filled twice with different values: embed.weight" in text


@pytest.mark.parametrize("name", ["mamba", "H1"])
def test_folders_between_the_dialects(name: str, tmp_path: Path) -> None:
    """As the hub has them: Hugging Face's config over the old names, or with the old keys beside its own."""
    theirs, hf = FORMS[name]
    want = logits(write(tmp_path / "hf", hf, published(hf)))
    assert torch.equal(logits(write(tmp_path / "names", hf, original(hf))), want)
    both = {"rms_norm": True, "fused_add_norm": True, "d_inner": 128, **theirs, **hf}
    assert torch.equal(logits(write(tmp_path / "keys", both, published(hf))), want)
    text = refusal(tmp_path / "torn", {**both, "d_model": 48}, published(hf))
    assert f"d_model 48 and hidden_size {hf['hidden_size']}: which?" in text
    assert "rms_norm false" in refusal(tmp_path / "norm", {**both, "rms_norm": False}, published(hf))


@pytest.mark.parametrize(
    ("over", "wanted"),
    [
        ({"d_model": None}, "hidden size is ever assumed"),
        ({"n_layer": None}, "missing: n_layer"),
        ({"n_layers": 2}, "n_layers = 2 is not understood (near 'n_layer', which is known)"),
        ({"attn_layer_idx": [1]}, "attn_layer_idx [1]"),
        ({"attn_cfg": {"num_heads": 4}}, "hybrids with attention layers are not read"),
        ({"d_intermediate": 64}, "d_intermediate 64: layers with an MLP"),
        ({"rms_norm": False}, "LayerNorm is not read here"),
        ({"ssm_cfg": {"layer": "Mamba2", "d_stat": 128}}, "d_stat = 128 is not understood. What is read: d_"),
        ({"ssm_cfg": {"layer": "Mamba2", "D_has_hdim": True}}, "D_has_hdim = True is not supported"),
        ({"ssm_cfg": {"layer": "Mamba2", "d_ssm": 64}}, "d_ssm = 64 is not supported"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 48}}, "num_heads * head_dim is 96"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "ssm_cfg.layer 'Mamba2'"),
        ({"ssm_cfg": {}}, "backbone.layers.{0-1}.mixer.dt_bias"),  # then it is a Mamba1, whose names differ
        ({"vocab_size": 60}, "(96, 64) for embed.weight (64, 64)"),
        ({"tie_embeddings": False, "n_layer": 3}, "backbone.layers.2."),
    ],
)
def test_what_mamba_ssm_wrote_and_is_not_understood(
    over: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    theirs, hf = FORMS["H1"]
    raw = {key: value for key, value in {**theirs, **over}.items() if value is not None}
    text = refusal(tmp_path, raw, original(hf))
    assert ("missing: d_model" if "assumed" in wanted else wanted) in text
    assert str(tmp_path) in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"ssm_cfg": {"dt_limit": [0.0, 0.1]}}, "ssm_cfg.dt_limit .* and time_step_limit .*: which"),
        ({"ssm_cfg": {"d_state": 64}}, "ssm_cfg.d_state 64 and state_size 16: which"),
        ({"ssm_cfg": {"activation": "gelu"}}, "activation = 'gelu' is not understood"),
        ({"tie_embeddings": False}, "tie_embeddings False and tie_word_embeddings True: which"),
    ],
)
def test_a_config_of_both_dialects_must_agree(more: dict[str, Any], message: str) -> None:
    """A limit on dt has no shape that would betray it."""
    _, hf = FORMS["mamba2, grouped and limited"]
    with pytest.raises(ValueError, match=message):
        tell({**hf, "d_model": 64, "n_layer": 2, **more}, {})


def test_what_only_one_dialect_of_a_config_says_counts() -> None:
    hf = {key: value for key, value in FORMS["mamba2, grouped and limited"][1].items() if "tie" not in key}
    del hf["time_step_limit"]
    both = {**hf, "d_model": 64, "ssm_cfg": {"dt_limit": [0.01, 0.2], "d_state": 16}, "tie_embeddings": True}
    config = tell(both, {}).config
    assert (config.time_step_limit, config.tie_word_embeddings) == ((0.01, 0.2), True)


@pytest.mark.parametrize("ssm_cfg", ["Mamba2", ["Mamba2"], 2])
def test_an_ssm_cfg_that_is_no_object_is_refused(ssm_cfg: Any) -> None:
    with pytest.raises(ValueError, match=r"ssm_cfg: .* where object or null is wanted"):
        tell({"d_model": 64, "n_layer": 2, "ssm_cfg": ssm_cfg}, {})


def test_tensors_that_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    theirs, hf = FORMS["mamba"]
    tensors = original(hf)
    tensors["backbone.layers.0.mixer.E"] = tensors.pop("backbone.layers.0.mixer.D")
    text = refusal(tmp_path, theirs, tensors)
    assert "no rule takes: backbone.layers.0.mixer.E" in text
    assert "blocks.0.mixer.d (from backbone.layers.0.mixer.D)" in text


@pytest.mark.parametrize(("form", "kind"), [("H1", "mamba2"), ("mamba", "mamba")])
def test_names_alone_tell_the_dialect_and_then_the_config_is_wanted(form: str, kind: str) -> None:
    shapes = {name: t.shape for name, t in original(FORMS[form][1]).items()}
    with pytest.raises(ValueError, match=f"{kind}, mamba_ssm's dialect\": missing: d_model, n_layer"):
        tell({}, shapes)


def test_a_dialect_that_cannot_be_told_says_what_was_looked_for() -> None:
    odd = {"transformer.h.0.attn.weight": torch.Size([4])}
    for raw, start in (({}, "there is no config.json"), ({"width": 4}, "no model_type, only width")):
        with pytest.raises(ValueError, match="speak a dialect that is known") as raised:
            tell(raw, odd)
        text = str(raised.value)
        assert start in text
        assert "transformer.h.0.attn.weight" in text
        assert (
            "mamba_ssm's for mamba2 (d_model and n_layer in config.json with ssm_cfg.layer 'Mamba2'" in text
        )


def test_two_dialects_at_once_are_not_guessed_between() -> None:
    names = ["backbone.embedding.weight", "backbone.layers.0.mixer.x_proj.weight"]
    names.append("backbone.layers.1.mixer.dt_bias")
    with pytest.raises(ValueError, match=r"reads as mamba \(mamba_ssm\) and mamba2 \(mamba_ssm\)"):
        tell({}, {name: torch.Size([4]) for name in names})


@pytest.mark.parametrize(
    ("hidden", "heads", "groups", "rows"), [(4096, 128, 8, 18560), (1024, 32, 1, 4384), (4096, 128, 1, 16768)]
)
def test_groups_count_in_the_in_projection(hidden: int, heads: int, groups: int, rows: int) -> None:
    """Case H2: 2 * inner + 2 * groups * N + heads rows, from either dialect's config."""
    layer = {"layer": "Mamba2", "ngroups": groups}
    theirs = {"d_model": hidden, "n_layer": 1, "vocab_size": 8, "ssm_cfg": layer}
    hf = {
        **{"model_type": "mamba2", "vocab_size": 8, "hidden_size": hidden, "num_hidden_layers": 1},
        **{"num_heads": heads, "head_dim": 64, "state_size": 128, "n_groups": groups},
    }
    for raw in (theirs, hf):
        told = tell(raw, {})
        with torch.device("meta"):
            params = dict(told.architecture.build(told.config).named_parameters())
        assert params["blocks.0.mixer.in_proj.weight"].shape == (rows, hidden)
