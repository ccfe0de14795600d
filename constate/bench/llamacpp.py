"""llama.cpp as a peer: our weights written as a GGUF file, read by llama-cpp-python, called token by token.

Knows the keys of the file for the shapes that are timed (llama, mamba, mamba2) and llama.cpp's batch; names
and layouts are the inverse of how such files are loaded here. Weights stay float32, or become Q8_0 beside a
model of ours in int8.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Container, Mapping, Sequence
from copy import copy
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.int8 import restored
from ..core.model import Model
from ..core.weights import export
from ..loading.gguf.maps import MAPS
from .engine import Absent, Stepwise

BATCH = 512  # prompt tokens in one call, which is llama.cpp's own choice


class LlamaCpp(Stepwise):
    """An Engine over llama.cpp, one sequence a row, with as many threads as PyTorch has."""

    name = "llama.cpp"
    fused = True  # its attention, where it chooses: faster in prefill, and partly in float16

    def __init__(self, ours: Model, source: Model, room: int):
        try:
            llama_cpp: Any = import_module("llama_cpp")  # not one of ours: who measures installs it
        except ImportError:
            raise Absent(
                "llama.cpp is measured through llama-cpp-python, which is not installed",
                "pip install llama-cpp-python, which compiles llama.cpp for this machine",
            ) from None
        self.library, self.room = llama_cpp, room
        self.dtype = self.kind = "Q8_0" if ours.weight_dtype == "int8" else "F32"
        self.priced = ours if self.kind == "Q8_0" else source
        self.backend = f"llama.cpp {self.kind} (llama-cpp-python {llama_cpp.__version__})"
        self.vocab = source.head.out_features
        self.folder = tempfile.TemporaryDirectory(prefix="constate-")
        path = Path(self.folder.name) / "model.gguf"
        write(source, path, self.kind)
        _silenced()
        llama_cpp.llama_backend_init()
        self.model: Any = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise ValueError(f"llama.cpp {llama_cpp.__version__} could not read these weights")
        self.context: Any = None

    @property
    def exact(self) -> LlamaCpp:
        """The same weights with plain attention, which agrees with ours to 1e-6 where the fused one does to
        2e-3."""
        plain = copy(self)
        plain.fused, plain.context = False, None
        return plain

    def prefill(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        self._begin(rows, length)
        logits = torch.empty(rows, self.vocab)
        for row in range(rows):
            for start in range(0, length, BATCH):
                piece = tokens[row, start : start + BATCH].tolist()
                wanted = [len(piece) - 1] if start + len(piece) == length else []
                self._decode([(t, start + i, row) for i, t in enumerate(piece)], wanted)
            logits[row] = self._logits(-1)
        self.length = length
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        entries = [(t, self.length, row) for row, t in enumerate(tokens.tolist())]
        self._decode(entries, range(len(entries)))
        self.length += 1
        return torch.stack([self._logits(row) for row in range(len(entries))])

    def _begin(self, rows: int, length: int) -> None:
        """A context with nothing read, wide enough for this many rows."""
        c, size = self.library, rows * (length + self.room + 1)
        if self.context is not None and self.shape == (rows, size):
            c.llama_memory_clear(c.llama_get_memory(self.context), True)
            return
        if self.context is not None:
            c.llama_free(self.context)
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = size, BATCH, BATCH
        params.n_seq_max = rows
        if self.kind == "F32":  # like ours; its own choice is float16
            params.type_k = params.type_v = c.GGML_TYPE_F32
        if not self.fused:
            params.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        self.context, self.shape = c.llama_init_from_model(self.model, params), (rows, size)
        if not self.context:
            raise ValueError(f"llama.cpp could not make a context of {size} tokens in {rows} sequences")

    def _decode(self, entries: Sequence[tuple[int, int, int]], wanted: Container[int]) -> None:
        """Read (token, position, row) triples; logits come of those whose places are `wanted`."""
        c = self.library
        batch = c.llama_batch_init(len(entries), 0, 1)
        try:
            batch.n_tokens = len(entries)
            for i, (token, position, row) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, i in wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            if c.llama_decode(self.context, batch):
                raise RuntimeError("llama.cpp could not decode a batch")
        finally:
            c.llama_batch_free(batch)

    def _logits(self, at: int) -> Tensor:
        found = self.library.llama_get_logits_ith(self.context, at)
        return torch.from_numpy(np.ctypeslib.as_array(found, (self.vocab,)).copy())


@cache
def _silenced() -> Any:
    """llama.cpp's log sent nowhere; what is returned must live as long as the library."""
    llama_cpp: Any = import_module("llama_cpp")
    callback = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(None))
    return callback


# -- the file ----------------------------------------------------------------------------------


def write(model: Model, path: Path, kind: str) -> None:
    """A GGUF file of this model's weights; with kind "Q8_0" its large matrices are quantised, as llama.cpp's
    own converter does it. Raises ValueError for an architecture that is not timed here."""
    try:
        import gguf
    except ImportError:
        raise ValueError("--against llama.cpp wants the package gguf: pip install gguf") from None
    architecture = model.architecture
    assert architecture is not None
    name = architecture.model_type
    if name not in KEYS:
        raise ValueError(f"llama.cpp is measured beside {', '.join(KEYS)}; this model is a {name}")
    config = {f.name: getattr(model.config, f.name) for f in fields(model.config)}
    stored = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, name)
    KEYS[name](writer, config)
    ids = config["vocab_size"]
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if kind == "Q8_0" else gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["a", "b", "ab", *(f"<{i}>" for i in range(3, ids))])
    writer.add_token_types([gguf.TokenType.NORMAL] * ids)
    writer.add_token_merges(["a b"])
    for tensor, value in _tensors(model, config).items():
        array = value.float().contiguous().numpy()
        if kind != "F32" and value.ndim == 2 and not tensor.endswith(EXACT) and value.shape[1] % 32 == 0:
            writer.add_tensor(tensor, gguf.quants.quantize(array, stored), raw_dtype=stored)
        else:
            writer.add_tensor(tensor, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


EXACT = ("ssm_conv1d.weight", "ssm_dt.weight", "ssm_a", "ssm_d", "ssm_norm.weight")


def _tensors(model: Model, config: Mapping[str, Any]) -> dict[str, Tensor]:
    architecture = model.architecture
    assert architecture is not None
    published = export(architecture.weights(model.config), restored(model))
    raw = {"model_type": architecture.model_type, **config}
    if "num_attention_heads" in raw:
        raw["num_key_value_heads"] = raw["num_key_value_heads"] or raw["num_attention_heads"]
    return export(MAPS[architecture.model_type].rules(raw), published)


def _common(writer: Any, config: Mapping[str, Any], eps: float) -> None:
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_layer_norm_rms_eps(eps)
    writer.add_vocab_size(config["vocab_size"])


def _ssm(writer: Any, config: Mapping[str, Any], inner: int, rank: int) -> None:
    _common(writer, config, config["layer_norm_epsilon"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(rank)


def _mamba(writer: Any, config: Mapping[str, Any]) -> None:
    inner = config["intermediate_size"] or int(config["expand"] * config["hidden_size"])
    rank = config["time_step_rank"]
    _ssm(writer, config, inner, -(-config["hidden_size"] // 16) if rank == "auto" else rank)
    writer.add_ssm_dt_b_c_rms(False)


def _mamba2(writer: Any, config: Mapping[str, Any]) -> None:
    _ssm(writer, config, config["num_heads"] * config["head_dim"], config["num_heads"])
    writer.add_ssm_group_count(config["n_groups"])


def _llama(writer: Any, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    rope = config["rope_parameters"] or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"llama.cpp is measured with plain rotary positions, not {rope['rope_type']!r}")
    _common(writer, config, config["rms_norm_eps"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"] or heads)
    writer.add_rope_freq_base(float(rope.get("rope_theta", config["rope_theta"] or 10000.0)))
    writer.add_rope_dimension_count(config["head_dim"] or config["hidden_size"] // heads)


KEYS: Mapping[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "llama": _llama,
    "mamba": _mamba,
    "mamba2": _mamba2,
}
