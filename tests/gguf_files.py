"""Small GGUF files of random models, as llama.cpp's converter writes them.

Names come from the gguf library's own table, the rest (interleaved rows, -exp(A_log), axes) is written here
anew, so that the reader is tested against another hand. The numbers that a quantised file holds are put
back into transformers' model, which then says what the logits are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers.pre_tokenizers import ByteLevel

BYTES = sorted(ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "1 2", "Ġ w"]
TOKENS = ["<|end|>", "<|start|>", "<tool>", *BYTES, *(m.replace(" ", "") for m in MERGES)]
VOCAB = 288  # three specials, 256 bytes, six merges, and ids that only pad


def tokenizer(writer: gguf.GGUFWriter, model: str = "gpt2", pre: str | None = "smollm") -> None:
    """A byte-level BPE of few merges, with the ids up to VOCAB unused."""
    padded = TOKENS + [f"[PAD{i}]" for i in range(len(TOKENS), VOCAB)]
    kinds = [3, 3, 4] + [1] * (len(TOKENS) - 3) + [5] * (VOCAB - len(TOKENS))
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(padded)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)


def random_bytes(kind: Kind, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """A tensor of a type that the library cannot quantise to: random blocks of it."""
    draw = np.random.default_rng(seed)
    stored = gguf.quants.quant_shape_to_byte_shape(shape, kind)
    return draw.integers(0, 256, stored, dtype=np.uint8)


def q6_k(weight: np.ndarray) -> np.ndarray:
    """Random Q6_K blocks whose values are as small as weights are: only the block's scale d (its last two
    bytes) is set, so that -128..127 times -32..31 comes to hundredths."""
    blocks = random_bytes(Kind.Q6_K, weight.shape).reshape(-1, 210)
    blocks[:, 208:] = np.full((len(blocks), 1), 2e-5, np.float16).view(np.uint8)
    return blocks.reshape(weight.shape[0], -1)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama's q and k: row i + dim / 2 of a head comes right after row i. One row at a time."""
    out, dim = np.empty_like(weight), len(weight) // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weight[head * dim + i]
            out[head * dim + 2 * i + 1] = weight[head * dim + i + dim // 2]
    return out


def parted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Its inverse."""
    order = interleaved(np.arange(len(weight)), heads)
    out = np.empty_like(weight)
    out[order] = weight
    return out


def write(
    path: Path,
    twin: Any,
    arch: str,
    keys: Mapping[str, Any],
    kind: Kind = Kind.F32,
    *,
    extra: Mapping[str, np.ndarray] | None = None,
    without: Sequence[str] = (),
    model: str = "gpt2",
    pre: str | None = "smollm",
    template: str | None = None,
    add_bos: bool | None = None,
    eot: int | None = None,
) -> Path:
    """`twin`'s weights as a GGUF file, matrices in `kind`; the twin then holds what the file holds. `keys`
    are those after `{arch}.`; a tied head is left out."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        add: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add |= {str: writer.add_string, list: writer.add_array}
        add[type(value)](f"{arch}.{key}", value)
    tokenizer(writer, model, pre)
    if template is not None:
        writer.add_chat_template(template)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if eot is not None:
        writer.add_eot_token_id(eot)
    config, state = twin.config, twin.state_dict()
    known = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(known[arch], config.num_hidden_layers)
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        given = name.replace(".dt_bias", ".dt_proj.bias")
        stem, _, suffix = given.rpartition(".") if given.endswith((".weight", ".bias")) else (given, "", "")
        stored = table.get_name(stem)
        assert stored is not None, name
        stored += f".{suffix}" if suffix else ""
        heads = _heads(config, name) if arch == "llama" else 0
        array, back = _as_stored(arch, config, name, tensor.float().numpy(), heads)
        array, read = _quantised(stored, np.ascontiguousarray(array), kind, writer, skip=stored in without)
        tensor.copy_(torch.from_numpy(np.array(back(read))).reshape(tensor.shape))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _heads(config: Any, name: str) -> int:
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else 0


def _as_stored(arch: str, config: Any, name: str, array: np.ndarray, heads: int) -> tuple[np.ndarray, Any]:
    """A tensor as the converter lays it down, and the way back."""
    if heads:
        return interleaved(array, heads), lambda a: parted(a, heads)
    if name.endswith("A_log"):
        stored = -np.exp(array)
        return (stored[:, None] if arch == "mamba2" else stored), lambda a: np.log(-a)
    if name.endswith("conv1d.weight"):
        return array.squeeze(1), lambda a: a
    if arch == "mamba2" and name.endswith(".D"):
        return array[:, None], lambda a: a
    if arch == "mamba2" and name.endswith("mixer.norm.weight"):
        return array.reshape(config.n_groups, -1), lambda a: a
    return array, lambda a: a


def _quantised(
    name: str, array: np.ndarray, kind: Kind, writer: gguf.GGUFWriter, skip: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Matrices in `kind`, as llama.cpp chooses them; norms, biases and what the scan reads in float32."""
    small = array.ndim < 2 or any(part in name for part in ("ssm_a", "ssm_d.", "ssm_conv1d", "ssm_norm"))
    if small or name.endswith("ssm_d") or kind == Kind.F32:
        if not skip:
            writer.add_tensor(name, array)
        return array, array
    stored = q6_k(array) if kind == Kind.Q6_K else gguf.quantize(array, kind)
    if not skip:
        writer.add_tensor(name, stored, raw_dtype=kind)
    return stored, gguf.dequantize(stored, kind)
