"""`constate convert`: pickles and dialects to safetensors folders, and our own models to published names."""

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from constate.core.architecture import read_config
from constate.core.model import Model
from constate.loading import convert, find, load, save
from constate.spans import Spans
from tests.models import MODELS, make, spread
from tests.test_dialects import FORMS, original, published

THEIRS, HF = FORMS["mamba2, grouped and limited"]


def pickled(
    folder: Path, tensors: Mapping[str, Any], file: str, config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / file)
    return folder


def cut(tensors: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    return [{n: t for j, (n, t) in enumerate(tensors.items()) if j % count == i} for i in range(count)]


def written(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def same_tensors(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert got[name].dtype == t.dtype and torch.equal(got[name], t), name


def logits(model: Model) -> Tensor:
    return model.forward(torch.arange(1, 41), Spans.of([40]))


def refusal(source: Path, out: Path, **options: Any) -> str:
    """What convert says, having left nothing behind."""
    around = {path.name for path in out.parent.iterdir()}
    with pytest.raises(ValueError) as raised:
        convert(source, out, **options)
    assert {path.name for path in out.parent.iterdir()} == around
    return str(raised.value)


# -- pickles --------------------------------------------------------------------------------------------


def whole(folder: Path, tensors: dict[str, Tensor]) -> Path:
    return pickled(folder, tensors, "pytorch_model.bin")


def one_file(folder: Path, tensors: dict[str, Tensor]) -> Path:
    return pickled(folder, tensors, "weights.pth") / "weights.pth"


def before_1_6(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    torch.save(tensors, folder / "weights.pt", _use_new_zipfile_serialization=False)
    return folder


def wrapped(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    torch.save({"state_dict": tensors, "epoch": 3, "optimizer": {"state": {}}}, folder / "last.ckpt")
    return folder


def shards(folder: Path, tensors: dict[str, Tensor]) -> Path:
    for i, part in enumerate(cut(tensors, 3)):
        pickled(folder, part, f"pytorch_model-{i + 1:05}-of-00003.bin")
    return folder


def indexed(folder: Path, tensors: dict[str, Tensor]) -> Path:
    home = {}
    for i, part in enumerate(cut(tensors, 2)):
        pickled(folder, part, f"part{i}.bin")
        home |= dict.fromkeys(part, f"part{i}.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": home}))
    return folder


@pytest.mark.parametrize("form", [whole, one_file, before_1_6, wrapped, shards, indexed])
def test_every_form_of_pickle_becomes_the_same_folder(
    form: Callable[[Path, dict[str, Tensor]], Path], tmp_path: Path
) -> None:
    tensors = published(HF)
    source = form(tmp_path / "in", tensors)
    home = source if source.is_dir() else source.parent
    (home / "config.json").write_text(json.dumps({**HF, "eos_token_id": [3, 5]}))
    for name in ("tokenizer_config.json", "generation_config.json"):
        (home / name).write_text('{"eos_token_id": 7}')
    done = convert(source, tmp_path / "out")
    assert done.model_type == "mamba2" and done.dialect is None and done.tensors == len(tensors)
    assert done.bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    same_tensors(written(tmp_path / "out"), tensors)
    assert load(tmp_path / "out").eos_ids == {3, 5, 7}
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


@pytest.mark.parametrize("name", FORMS)
def test_mamba_ssm_s_pickles_become_hugging_face_s_folders(name: str, tmp_path: Path) -> None:
    """Case H1, and back again: converted once more nothing changes."""
    theirs, hf = FORMS[name]
    source = pickled(tmp_path / "in", original(hf), "pytorch_model.bin", theirs)
    done = convert(source, tmp_path / "out")
    assert done.model_type == hf["model_type"] and done.dialect == "mamba_ssm"
    same_tensors(written(tmp_path / "out"), published(hf))
    convert(tmp_path / "out", tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()


@pytest.mark.parametrize("name", FORMS)
def test_transformers_reads_what_mamba_ssm_wrote(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, hf = FORMS[name]
    convert(pickled(tmp_path / "in", original(hf), "pytorch_model.bin", theirs), tmp_path / "out")
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        want = twin(torch.arange(1, 41)[None]).logits[0]
    got = logits(load(tmp_path / "out"))
    assert float((got - want).abs().max()) <= 1e-4 * max(1.0, float(want.abs().max()))


def test_dtypes_are_kept(tmp_path: Path) -> None:
    tensors = {n: t if n.endswith(("A_log", "D")) else t.bfloat16() for n, t in published(HF).items()}
    convert(pickled(tmp_path / "in", tensors, "pytorch_model.bin", HF), tmp_path / "out")
    same_tensors(written(tmp_path / "out"), tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    doubled = {name: t.double() for name, t in tensors.items()}
    text = refusal(pickled(tmp_path / "wide", doubled, "m.pt", HF), tmp_path / "out2")
    assert "(torch.float64)" in text


class _Harm:
    """What a pickle can do: this one makes a folder."""

    def __init__(self, place: Path):
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def test_a_pickle_that_needs_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    harm = _Harm(tmp_path / "harm")
    pickled(tmp_path / "in", {"a": harm, **published(HF)}, "pytorch_model.bin", HF)
    text = refusal(tmp_path / "in", tmp_path / "out")
    assert "cannot be read without running code" in text
    assert "mkdir" in text
    (tmp_path / "plain.bin").write_bytes(pickle.dumps({"a": harm}))
    assert "cannot be read without running code" in refusal(tmp_path / "plain.bin", tmp_path / "out")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    assert "it asks for torch.nn.modules.linear.Linear" in refusal(tmp_path / "module.pt", tmp_path / "out")
    assert not harm.place.exists()


def test_files_that_are_damaged_absent_or_something_else(tmp_path: Path) -> None:
    source, out = pickled(tmp_path / "in", published(HF), "pytorch_model.bin", HF), tmp_path / "out"
    file = source / "pytorch_model.bin"
    good = file.read_bytes()
    file.write_bytes(good[:-200])
    assert f"({len(good) - 200} bytes) is not a whole pickled checkpoint" in refusal(source, out)
    file.write_bytes(b"")
    assert "(0 bytes) is not a whole pickled checkpoint" in refusal(source, out)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in refusal(source, out)
    torch.save([torch.ones(2)], file)
    assert "holds a list; names with tensors are wanted" in refusal(source, out)
    torch.save({"a": torch.ones(2), "step": 4}, file)
    assert "holds more than tensors (step)" in refusal(source, out)
    file.rename(source / "pytorch_model-00002-of-00003.bin")
    text = refusal(source, out)
    assert "missing pytorch_model-00001-of-00003.bin, pytorch_model-00003-of-00003.bin, of 3 files" in text
    assert "no such folder" in refusal(tmp_path / "nowhere", out)
    (tmp_path / "notes.txt").write_text("x")
    assert "neither a folder of weights nor a file of *.bin" in refusal(tmp_path / "notes.txt", out)
    for name in ("a.pt", "b.pt"):
        pickled(tmp_path / "two", {name: torch.ones(1)}, name)
    assert "which of a.pt, b.pt? Give the file itself" in refusal(tmp_path / "two", out)


def test_two_shards_with_one_name(tmp_path: Path) -> None:
    for i in (1, 2):
        pickled(tmp_path / "in", {"a": torch.ones(1)}, f"m-{i}-of-2.pth", HF)
    assert "a in more than one file" in refusal(tmp_path / "in", tmp_path / "out")


def test_what_is_not_understood_leaves_nothing(tmp_path: Path) -> None:
    source = pickled(tmp_path / "in", {"x": torch.ones(1), **published(HF)}, "pytorch_model.bin", HF)
    assert "no rule takes: x" in refusal(source, tmp_path / "out")


# -- where it is written --------------------------------------------------------------------------------


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source = pickled(tmp_path / "in", published(HF), "pytorch_model.bin", HF)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()
    for name in ("full", "file", "in"):
        assert "nothing is overwritten" in refusal(source, tmp_path / name)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty")
    convert(source, tmp_path / "deep" / "er")
    assert load(tmp_path / "empty").fingerprint == load(tmp_path / "deep" / "er").fingerprint


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = pickled(tmp_path / "in", published(HF), "pytorch_model.bin", HF)

    def stops(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("constate.loading.folder.write_json", stops)
    monkeypatch.setitem(convert.__globals__, "write_json", stops)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


# -- our own, in published names ------------------------------------------------------------------------

ATTENTION = {"type": "attention", "heads": 4, "kv_heads": 2, "head_dim": 8, "rope": {"rope_theta": 100.0}}
MLP = {"width": 24}
OWN: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "llama": (ATTENTION, MLP, "llama"),
    "llama, biased": ({**ATTENTION, "bias": True, "out_bias": True, "kv_heads": None}, MLP, "llama"),
    "qwen2": ({**ATTENTION, "bias": True}, MLP, "qwen2"),
    "qwen3": ({**ATTENTION, "qk_norm": True, "norm_eps": 1e-3}, MLP, "qwen3"),
    "mistral": ({**ATTENTION, "window": 5}, MLP, "mistral"),
    "mamba": ({"type": "mamba", "inner": 48, "state_size": 6, "conv": 3}, None, "mamba"),
    "mamba, biased": (
        {"type": "mamba", "inner": 40, "rank": 5, "bias": True, "conv_bias": False}, None, "mamba"
    ),
    "falcon": ({"type": "mamba", "inner": 48, "state_size": 6, "norm_eps": 1e-2}, None, "falcon_mamba"),
    "mamba2": (
        {"type": "mamba2", "heads": 4, "head_dim": 16, "state_size": 8, "groups": 2, "norm_eps": 1e-3,
         "dt_limit": [0.01, 2.0]},
        None,
        "mamba2",
    ),
}  # fmt: skip


def composed(folder: Path, *layers: tuple[dict[str, Any], dict[str, Any] | None], **over: Any) -> Model:
    raw = {
        **{"model_type": "composed", "vocab_size": 97, "hidden_size": 32, "norm_eps": 1e-3},
        "layers": [{"mixer": mixer, "mlp": mlp} for mixer, mlp in layers],
        **over,
    }
    architecture = find("composed").architecture
    model = architecture.build(read_config(architecture.Config, raw)).requires_grad_(False)
    spread(model, 1)
    model.architecture, model.eos_ids = architecture, frozenset({4})
    save(model, folder)
    return load(folder)


@pytest.mark.parametrize(("tied", "scale"), [(True, 1.0), (False, 1.0), (True, 1.7), (False, 1.7)])
@pytest.mark.parametrize("name", OWN)
def test_a_composed_model_leaves_as_the_published_one_that_it_is(
    name: str, tied: bool, scale: float, tmp_path: Path
) -> None:
    mixer, mlp, model_type = OWN[name]
    layer = (mixer, mlp)
    ours = composed(tmp_path / "own", layer, layer, tie_word_embeddings=tied, embed_scale=scale)
    done = convert(tmp_path / "own", tmp_path / "hf", to="hf")
    assert done.model_type == model_type
    again = load(tmp_path / "hf")
    assert again.architecture is find(model_type).architecture
    assert again.eos_ids == {4}
    assert torch.equal(logits(again), logits(ours))
    transformers = pytest.importorskip("transformers")
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        want = twin(torch.arange(1, 41)[None]).logits[0]
    assert float((logits(ours) - want).abs().max()) <= 1e-4 * max(1.0, float(want.abs().max()))


DELTA = {"type": "gated_deltanet", "heads": 2, "key_dim": 12, "value_dim": 8, "norm_eps": 1e-3}
GLA = {"type": "gla", "heads": 4, "key_dim": 4, "value_dim": 12, "norm_eps": 1e-3}
FLA: dict[str, dict[str, Any]] = {
    "gated_deltanet": {**DELTA, "value_heads": 4, "negative": True, "conv": 3},
    "gated_deltanet, no gate, no convolution": {**DELTA, "gate": False, "conv": 0},
    "gla": {**GLA, "kv_heads": 2, "decay_min": -4.0},
    "gla, no gate, convolution": {**GLA, "conv": 4, "gate": False},
}


@pytest.mark.parametrize(("tied", "scale"), [(True, 1.0), (False, 1.7)])
@pytest.mark.parametrize("name", FLA)
def test_a_composed_model_leaves_in_flash_linear_attention_s_names(
    name: str, tied: bool, scale: float, tmp_path: Path
) -> None:
    layer = (FLA[name], MLP)
    ours = composed(tmp_path / "own", layer, layer, tie_word_embeddings=tied, embed_scale=scale)
    done = convert(tmp_path / "own", tmp_path / "fla", to="hf")
    assert done.model_type == FLA[name]["type"]
    assert "model.layers.1.attn.o_proj.weight" in written(tmp_path / "fla")
    assert torch.equal(logits(load(tmp_path / "fla")), logits(ours))


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        ([(OWN["mamba"][0], None), (OWN["mamba2"][0], None)], "its layers differ"),
        ([(OWN["mamba"][0], MLP)], "they have an MLP"),
        ([(ATTENTION, None)], "they have no MLP"),
        ([(DELTA, None)], "they have no MLP"),
        ([(DELTA, {"width": 24, "act": "gelu"})], "activation is gelu"),
        ([({**GLA, "rank": 5}, MLP)], "rank and temperature are not 16 and 16"),
        ([({**GLA, "norm_eps": 1e-5}, MLP)], "their norm_eps 1e-05 is not the model's 0.001"),
        ([({**ATTENTION, "rope": None}, MLP)], "no rotary positions"),
        ([({**ATTENTION, "rope": {"partial_rotary_factor": 0.5}}, MLP)], "turn a part of a head"),
        ([({**ATTENTION, "out_bias": True}, MLP)], "output has a bias and q, k, v have none"),
        ([({**ATTENTION, "window": 5, "bias": True}, MLP)], "a window and biases"),
        ([({**ATTENTION, "qk_norm": True}, MLP)], "their norm_eps 1e-05 is not the model's 0.001"),
        ([({**OWN["mamba2"][0], "head_dim": 12}, None)], "48 inner channels are no multiple of"),
        ([({**OWN["mamba2"][0], "norm_eps": 1e-5}, None)], "their norm_eps 1e-05 is not the model's 0.001"),
        ([({**OWN["mamba2"][0], "norm": False}, None)], "they do not norm what was gated"),
        ([({**OWN["mamba2"][0], "norm_before": True}, None)], "they do not norm what was gated"),
        ([({**OWN["mamba2"][0], "scales": [1, 1, 1, 1, 2]}, None)], "they scale what their in-projection"),
        ([({**OWN["mamba2"][0], "out_bias": True}, None)], "a bias and the other none"),
        ([({**OWN["mamba"][0], "norm_eps": 1e-3, "norm_weight": True}, None)], "dt, B and C with weights"),
        ([({**ATTENTION, "gate": True}, MLP)], "they gate their output"),
        ([(ATTENTION, {**MLP, "experts": 3, "per_token": 2})], "its layers have experts"),
        ([({**ATTENTION, "scale": 0.3}, MLP)], "they scale the products of queries and keys"),
    ],
)
def test_what_nobody_published_stays_our_own(
    layers: list[tuple[dict[str, Any], dict[str, Any] | None]], wanted: str, tmp_path: Path
) -> None:
    ours = composed(tmp_path / "own", *layers)
    assert wanted in refusal(tmp_path / "own", tmp_path / "out", to="hf")
    assert convert(tmp_path / "own", tmp_path / "out").model_type == "composed"
    same_tensors(written(tmp_path / "out"), written(tmp_path / "own"))
    assert load(tmp_path / "out").config == ours.config


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_goes_through_unchanged(name: str, tmp_path: Path) -> None:
    """What `save` writes of each, converted, is the same file under the same names."""
    model = make(name)
    model.architecture = find(MODELS[name].raw["model_type"]).architecture
    save(model, tmp_path / "in")
    done = convert(tmp_path / "in", tmp_path / "out")
    if done.model_type == model.architecture.model_type:
        same_tensors(written(tmp_path / "out"), written(tmp_path / "in"))
    assert torch.equal(logits(load(tmp_path / "out")), logits(load(tmp_path / "in")))


# -- the command ----------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from constate.cli import main

    source = pickled(tmp_path / "in", original(HF), "pytorch_model.bin", THEIRS)
    assert main(["convert", str(source), str(tmp_path / "out"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "has no tokenizer.json" in err
    row = json.loads(out)
    assert {"model_type", "tensors", "bytes"} <= row.keys()
    assert (row["model_type"], row["tensors"]) == ("mamba2", len(published(HF)))
    assert main(["convert", str(source), str(tmp_path / "out")]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "new"), "--to", "gguf"]) == 2
    assert "'hf' is the one" in capsys.readouterr().err
    assert main(["convert", "tiny/nothing", str(tmp_path / "new")]) == 2
    assert "does not ship here" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "stays"), [("tiny/hybrid", True), ("tiny/transformer", False)])
def test_what_has_no_published_form_is_said_to_stay_composed(
    name: str, stays: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from constate.cli import main

    assert main(["convert", name, str(tmp_path / "out")]) == 0
    assert ("stays composed" in capsys.readouterr().err) is stays


def test_a_gguf_file_goes_to_its_own_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def converts(path: Path, folder: Path) -> None:
        assert path == tmp_path / "model.gguf"
        (folder / "config.json").write_text(json.dumps(HF))
        save_file({n: t.contiguous() for n, t in published(HF).items()}, folder / "model.safetensors")

    monkeypatch.setattr("constate.loading.gguf.convert", converts)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    done = convert(tmp_path / "model.gguf", tmp_path / "out")
    assert (done.model_type, done.dialect, done.tensors) == ("mamba2", "gguf", len(published(HF)))
    assert done.bytes == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_one_safetensors_file_by_its_name(tmp_path: Path) -> None:
    tensors = {n: t.contiguous() for n, t in original(HF).items()}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(THEIRS))
    save_file(tensors, tmp_path / "in" / "mine.safetensors")
    assert convert(tmp_path / "in" / "mine.safetensors", tmp_path / "out").dialect == "mamba_ssm"
    save_file(tensors, tmp_path / "in" / "other.safetensors")
    assert "alone in its folder" in refusal(tmp_path / "in" / "mine.safetensors", tmp_path / "out2")


def test_safetensors_come_before_pickles(tmp_path: Path) -> None:
    tensors = published(HF)
    source = pickled(tmp_path / "in", {"x": torch.ones(1)}, "pytorch_model.bin", HF)
    save_file({n: t.contiguous() for n, t in tensors.items()}, source / "model.safetensors")
    convert(source, tmp_path / "out")
    same_tensors(written(tmp_path / "out"), tensors)
