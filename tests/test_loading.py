"""From names and folders to models: what is read, what is refused and how it says so.

The architecture is a toy written into a family's folder for the test, so that the walk, the rules and the
files are tested for themselves. transformers' own files are read in test_loading_hf.py.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

import constate.hybrid
from constate.core.model import Model
from constate.loading import architectures, checkpoints, find, load, locate, names, save
from constate.spans import Spans

TOY = """
from dataclasses import dataclass

import torch

from ..core.architecture import Architecture
from ..core.mlp import GatedMLP
from ..core.model import Block, Model
from ..core.norms import RMSNorm
from ..core.weights import fuse, same


@dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int
    num_layers: int
    tie_word_embeddings: bool = False


class Tabled(GatedMLP):
    def __init__(self, d):
        super().__init__(d, 2 * d)
        self.register_buffer("table", torch.arange(4.0).exp(), persistent=False)


def build(config):
    d = config.hidden_size
    blocks = [Block(mlp=(RMSNorm(d), Tabled(d))) for _ in range(config.num_layers)]
    return Model(config, blocks, RMSNorm(d), vocab=config.vocab_size, d=d, tied=config.tie_word_embeddings)


def weights(config):
    head = "embed.weight" if config.tie_word_embeddings else "head.weight"
    return [
        same("tok.weight", "embed.weight"),
        same("lm_head.weight", head, optional=config.tie_word_embeddings),
        same("final.weight", "norm.weight"),
        same("layers.{i}.norm.weight", "blocks.{i}.mlp_norm.weight"),
        fuse(["layers.{i}.gate.weight", "layers.{i}.up.weight"], "blocks.{i}.mlp.gate_up.weight"),
        same("layers.{i}.down.weight", "blocks.{i}.mlp.down.weight"),
    ]


ARCHITECTURE = Architecture("toy-net", Config, build, weights)
"""
CONFIG = {"model_type": "toy-net", "vocab_size": 11, "hidden_size": 4, "num_layers": 2, "eos_token_id": 7}


@pytest.fixture(autouse=True)
def toy_family(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The toy's file, and one of mixers alone, as if they lay in hybrid/."""
    folder = tmp_path_factory.mktemp("family")
    (folder / "toy_net.py").write_text(TOY)
    (folder / "toy_mixers.py").write_text("WIDTH = 4\n")
    monkeypatch.setattr(constate.hybrid, "__path__", [*constate.hybrid.__path__, str(folder)])
    yield
    for module in ("toy_net", "toy_mixers"):
        sys.modules.pop(f"constate.hybrid.{module}", None)
        if hasattr(constate.hybrid, module):
            delattr(constate.hybrid, module)


def tensors(layers: int = 2, d: int = 4, vocab: int = 11) -> dict[str, Tensor]:
    made = {
        "tok.weight": torch.randn(vocab, d),
        "lm_head.weight": torch.randn(vocab, d),
        "final.weight": torch.rand(d),
    }
    for i in range(layers):
        made |= {f"layers.{i}.norm.weight": torch.rand(d), f"layers.{i}.down.weight": torch.randn(d, 2 * d)}
        made |= {f"layers.{i}.{part}.weight": torch.randn(2 * d, d) for part in ("gate", "up")}
    return made


def write(folder: Path, config: dict[str, Any] = CONFIG, weights: dict[str, Tensor] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors() if weights is None else weights, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, weights: dict[str, Tensor], count: int, index: bool) -> list[str]:
    write(folder, weights={})
    (folder / "model.safetensors").unlink()
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    home = {name: files[i % count] for i, name in enumerate(weights)}
    for file in files:
        save_file({name: t for name, t in weights.items() if home[name] == file}, folder / file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))
    return files


def write_tokenizer(folder: Path, size: int) -> None:
    Tokenizer(WordLevel({f"w{i}": i for i in range(size)}, "w0")).save(str(folder / "tokenizer.json"))


def logits(model: Model) -> Tensor:
    return model.forward(torch.tensor([1, 2, 3]), Spans.of([3]))


def message(name: str | Path, **options: Any) -> str:
    with pytest.raises(ValueError) as raised:
        load(name, **options)
    return str(raised.value)


# -- what is read ---------------------------------------------------------------------------------------


def test_a_folder_becomes_a_model_ready_to_run(tmp_path: Path):
    given = tensors()
    model = load(write(tmp_path, weights=given), backend="reference")
    params = dict(model.named_parameters())
    assert torch.equal(params["head.weight"], given["lm_head.weight"])
    both = torch.cat([given["layers.1.gate.weight"], given["layers.1.up.weight"]])
    assert torch.equal(params["blocks.1.mlp.gate_up.weight"], both)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert model.ops.backend == "reference"
    assert model.architecture is find("toy-net").architecture
    assert (model.tokenizer, model.vocab, model.eos_ids) == (None, 11, {7})
    assert logits(model).shape == (3, 11)


def test_buffers_that_no_file_holds_are_computed(tmp_path: Path):
    model = load(write(tmp_path))
    want = torch.tensor([0.0, 1.0, 2.0, 3.0]).exp()
    assert [torch.equal(table, want) for table in model.buffers()] == [True, True]


def test_dtypes(tmp_path: Path):
    folder = write(tmp_path)
    model = load(folder, dtype="bfloat16", state_dtype="float16")
    kept = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {"norm.weight", "blocks.0.mlp_norm.weight", "blocks.1.mlp_norm.weight"}
    assert model.head.weight.dtype == torch.bfloat16
    assert model.state_dtype == torch.float16
    assert torch.equal(model.head.weight, load(folder).head.weight.bfloat16())


def test_the_model_does_not_live_in_the_file(tmp_path: Path):
    model = load(write(tmp_path))
    before = logits(model)
    with (tmp_path / "model.safetensors").open("r+b") as file:  # in place: a mapping would see it
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(b"\0" * (size - size // 2))
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_one_checkpoint(tmp_path: Path, index: bool):
    given = tensors()
    whole = logits(load(write(tmp_path / "whole", weights=given)))
    write_shards(tmp_path / "cut", given, 3, index)
    assert torch.equal(logits(load(tmp_path / "cut")), whole)


def test_tied_and_untied_heads(tmp_path: Path):
    """Case H3: tied+absent, tied+equal, tied+different, untied+absent."""
    given = tensors()
    tied = {**CONFIG, "tie_word_embeddings": True}
    absent = {name: t for name, t in given.items() if name != "lm_head.weight"}
    equal = absent | {"lm_head.weight": given["tok.weight"].clone()}
    one, two = (load(write(tmp_path / n, tied, w)) for n, w in (("absent", absent), ("equal", equal)))
    assert one.head.weight is one.embed.weight
    assert torch.equal(logits(one), logits(two))
    assert "filled twice with different values: embed.weight" in message(
        write(tmp_path / "clash", tied, given)
    )
    assert "missing: head.weight (from lm_head.weight)" in message(write(tmp_path / "bare", CONFIG, absent))


# -- the side of text -----------------------------------------------------------------------------------


def test_end_of_text_is_what_any_file_says(tmp_path: Path):
    """Case H7: config 7, generation_config [7, 9], tokenizer 5."""
    write(tmp_path)
    write_tokenizer(tmp_path, 11)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "w5"}, "bos_token": "w1"}')
    model = load(tmp_path)
    assert model.eos_ids == {5, 7, 9}
    assert model.special_tokens == {"eos_token": "w5", "bos_token": "w1"}
    assert model.tokenizer is not None
    assert model.tokenizer.encode("w3").ids == [3]


@pytest.mark.parametrize(("size", "real"), [(7, 7), (11, 11), (15, 11)])
def test_head_rows_beyond_the_tokenizer_are_padding(tmp_path: Path, size: int, real: int):
    """Case H4."""
    write(tmp_path)
    write_tokenizer(tmp_path, size)
    assert load(tmp_path).vocab == real


def test_ids_with_holes_count_to_the_highest(tmp_path: Path):
    write(tmp_path)
    Tokenizer(WordLevel({"a": 0, "b": 8}, "a")).save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).vocab == 9


def test_chat_templates(tmp_path: Path):
    settings = write(tmp_path) / "tokenizer_config.json"
    assert load(tmp_path).chat_template is None
    settings.write_text(json.dumps({"chat_template": "one"}))
    assert load(tmp_path).chat_template == "one"
    named = [{"name": "rag", "template": "two"}, {"name": "default", "template": "three"}]
    settings.write_text(json.dumps({"chat_template": named}))
    assert load(tmp_path).chat_template == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    assert load(tmp_path).chat_template == "four"


def test_a_tokenizer_s_padding_and_truncation_do_not_reach_prompts(tmp_path: Path):
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(11)}, "w0"))
    tokenizer.enable_padding(length=8, pad_id=2)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(write(tmp_path) / "tokenizer.json"))
    loaded = load(tmp_path).tokenizer
    assert loaded is not None
    assert loaded.encode("w5").ids == [5]
    assert len(loaded.encode_batch(["w5", "w1"])[0].ids) == 1
    assert loaded.truncation is None


def test_a_broken_tokenizer(tmp_path: Path):
    write(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    assert "tokenizer.json is not read as a tokenizer" in message(tmp_path)


# -- faults of a folder ---------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [True, False])
def test_missing_shards_are_named(tmp_path: Path, index: bool):
    files = write_shards(tmp_path, tensors(), 3, index)
    (tmp_path / files[1]).unlink()
    assert f"missing {files[1]}, of 3 files" in message(tmp_path)


def test_an_index_that_promises_too_much_or_leads_outside(tmp_path: Path):
    write_shards(tmp_path, tensors(), 2, True)
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    first = next(iter(listed.values()))
    index.write_text(json.dumps({"weight_map": listed | {"ghost.weight": first}}))
    assert f"ghost.weight (in {first})" in message(tmp_path)
    index.write_text(json.dumps({"weight_map": listed | {"ghost.weight": "../x.safetensors"}}))
    assert "outside its folder: ../x.safetensors" in message(tmp_path)


def test_a_truncated_file(tmp_path: Path):
    file = write(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    text = message(tmp_path)
    assert "model.safetensors" in text
    assert "is not a whole safetensors file" in text
    assert "interrupted download" in text
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in message(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused(tmp_path: Path, name: str):
    (write(tmp_path) / "model.safetensors").unlink()
    torch.save({"a": torch.ones(1)}, tmp_path / name)
    for given in (tmp_path, tmp_path / name):
        text = message(given)
        assert name in text
        assert "a pickle can run any code" in text
        assert f"`constate convert {tmp_path} OUT`" in text


def test_a_folder_without_what_is_needed(tmp_path: Path):
    assert "has no config.json" in message(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "holds no weights" in message(tmp_path)
    for name in ("a", "b"):
        save_file(tensors(), tmp_path / f"{name}.safetensors")
    assert "which of a.safetensors, b.safetensors?" in message(tmp_path)
    assert "is a file; the folder" in message(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ("{", "config.json is no JSON"),
        ("[1]", "holds a JSON list, an object is wanted"),
        ('{"vocab_size": 11}', "config.json has no model_type"),
        ('{"d_model": 4, "n_layer": 2}', "no vocab_size and there is no backbone.embedding.weight"),
        ('{"d_model": 4, "n_layer": 2, "vocab_size": 11}', "(from backbone.layers.{0-1}.mixer.dt_proj.bias)"),
        ('{"model_type": "toy-nett"}', "model_type 'toy-nett' is not known; did you mean 'toy-net'?"),
        ('{"model_type": "toy_mixers"}', "model_type 'toy_mixers' is not known"),
        ('{"model_type": "../core/model"}', "is not known"),
        (json.dumps(CONFIG | {"logit_softcap": 30.0}), "logit_softcap = 30.0 is not understood"),
        ('{"model_type": "toy-net", "vocab_size": 11}', "missing: hidden_size, num_layers"),
    ],
)
def test_a_config_that_is_not_understood(tmp_path: Path, config: str, wanted: str):
    (write(tmp_path) / "config.json").write_text(config)
    text = message(tmp_path)
    assert wanted in text
    assert str(tmp_path) in text


def test_weights_that_do_not_fit_name_the_folder_and_every_fault(tmp_path: Path):
    given = tensors(layers=3)
    given["odd.bias"] = given.pop("final.weight")
    text = message(write(tmp_path, weights=given))
    assert text.startswith(str(tmp_path))
    assert "no rule takes: odd.bias" in text
    assert "missing: norm.weight (from final.weight)" in text
    assert "layers.2.down.weight (for blocks.2.mlp.down.weight)" in text
    assert "tok.weight (12, 4) for embed.weight (11, 4)" in message(
        write(tmp_path, weights=tensors(vocab=12))
    )


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"dtype": "int8"}, "dtype='int8': one of float32, bfloat16, float16"),
        ({"state_dtype": "double"}, "state_dtype='double'"),
        ({"device": "quantum"}, "device='quantum' cannot be used here"),
        ({"backend": "magic"}, "magic"),
    ],
)
def test_options_that_mean_nothing(tmp_path: Path, options: dict[str, str], wanted: str):
    assert wanted in message(write(tmp_path), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_here(tmp_path: Path):
    assert "device='cuda' cannot be used here" in message(write(tmp_path), device="cuda")


# -- names ----------------------------------------------------------------------------------------------


def test_what_ships_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(names, "ZOO", tmp_path)
    write(tmp_path / "hybrid")
    write(tmp_path / "mamba2")
    (tmp_path / "text").mkdir()
    assert checkpoints() == {"tiny/hybrid": "toy-net", "tiny/mamba2": "toy-net"}
    assert load("tiny/mamba2").vocab == 11
    assert "known are tiny/hybrid, tiny/mamba2" in message("tiny/nothing")
    assert "did you mean 'tiny/mamba2'?" in message("tiny/mamba")
    assert "did you mean 'tiny/mamba2'?" in message("mamba2")
    assert "'tiny/../secret' does not ship here" in message("tiny/../secret")


def test_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.append((repo_id, options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    assert load("someone/some-model_1.5").vocab == 11
    (tmp_path / "config.json").unlink()
    assert "'someone/other' has no config.json on the hub" in message("someone/other")
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "'someone/pickled' has no safetensors on the hub" in message("someone/pickled")
    assert [repo for repo, _ in asked] == ["someone/some-model_1.5", "someone/other", "someone/pickled"]
    assert not any("bin" in pattern or "py" in pattern for _, patterns in asked for pattern in patterns)


def test_a_folder_comes_before_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "someone").mkdir()
    write(tmp_path / "someone" / "model")
    monkeypatch.chdir(tmp_path)
    assert locate("someone/model") == Path("someone/model")


def test_the_hub_out_of_reach_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """conftest sets HF_HUB_OFFLINE before anything reads it, so this is huggingface_hub's own behaviour."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    text = message("nobody-at-all/no-such-model-here")
    assert "neither a folder here nor in the local Hugging Face cache" in text
    assert "\n" not in text


def test_the_hub_s_own_errors_give_one_line(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any, **__: Any) -> str:
        raise OSError("401 Client Error.\nRepository Not Found\nfor url")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    assert message("someone/gone") == "'someone/gone' could not be downloaded: 401 Client Error."


@pytest.mark.parametrize("name", ["nowhere", "./not/here", "a/b/c", "-x/y", ""])
def test_a_name_that_is_nothing(name: str):
    assert f"no model {name!r}" in message(name)


def test_every_architecture_file_is_met_and_files_of_mixers_alone_are_not():
    found = architectures()
    assert found["toy-net"].family == "hybrid"
    assert found["toy-net"].file == "hybrid/toy_net.py"
    assert found["llama"].architecture.model_type == "llama"
    assert {"mamba2", "llama", "composed"} <= set(found)
    assert "toy_mixers" not in found


def test_finding_one_architecture_imports_its_file_alone():
    find("toy-net")
    code = "import sys; from constate.loading import find; find('mamba2'); print(*sys.modules, sep='\\n')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr == ""
    imported = set(run.stdout.split())
    assert "constate.ssm.mamba2" in imported
    assert not any(name.startswith(("constate.hybrid", "constate.linear_attn")) for name in imported)


def test_loading_imports_neither_transformers_nor_the_hub(tmp_path: Path):
    model = tiny_composed()
    save(model, tmp_path)
    code = (
        f"import sys, constate; constate.load({str(tmp_path)!r}); "
        "print([m for m in ('transformers', 'huggingface_hub', 'tokenizers', 'jinja2') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.stdout.strip(), run.stderr) == ("[]", "")


# -- saving ---------------------------------------------------------------------------------------------


def tiny_composed() -> Model:
    layer = {"mixer": {"type": "attention", "heads": 2, "head_dim": 4}, "mlp": {"width": 8}}
    architecture = find("composed").architecture
    config = architecture.Config(11, 8, (layer, layer), tie_word_embeddings=True)
    model = architecture.build(config)
    model.architecture = architecture
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_save_then_load_is_the_same_model(tmp_path: Path, tied: bool):
    given = tensors()
    if tied:
        del given["lm_head.weight"]
    config = CONFIG | {"tie_word_embeddings": tied, "eos_token_id": [3, 7]}
    write(tmp_path / "a", config, given)
    write_tokenizer(tmp_path / "a", 9)
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "a" / "tokenizer_config.json").write_text('{"bos_token": "w1"}')
    first = load(tmp_path / "a")
    save(first, tmp_path / "b")
    second = load(tmp_path / "b")
    assert second.config == first.config
    assert second.fingerprint == first.fingerprint
    assert (second.eos_ids, second.vocab, second.chat_template) == ({3, 7}, 9, "{{ messages }}")
    assert second.special_tokens == {"bos_token": "w1"}
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert written.keys() == given.keys()
    assert all(torch.equal(written[name], t) for name, t in given.items())
    assert not list((tmp_path / "b").glob("*.new"))


def test_save_in_bfloat16_keeps_what_must_stay(tmp_path: Path):
    model = load(write(tmp_path / "a"))
    save(model, tmp_path / "b", "bfloat16")
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert {name for name, t in written.items() if t.dtype == torch.float32} == {
        "final.weight",
        "layers.0.norm.weight",
        "layers.1.norm.weight",
    }
    assert torch.equal(load(tmp_path / "b").head.weight, model.head.weight.bfloat16().float())


def test_an_own_model_without_an_architecture_cannot_be_saved(tmp_path: Path):
    model = load(write(tmp_path / "a"))
    model.architecture = None
    with pytest.raises(ValueError, match=r"no \.architecture"):
        save(model, tmp_path / "b")
