"""Peers that run on an NVIDIA GPU alone, with our weights: flash-linear-attention and mamba_ssm.

Each is written from our own parameters by the inverse of the architecture's weight rules, and called as its
own generation calls it. Knows the conventions of flash-linear-attention 0.3 to 0.6 and of mamba_ssm 2.2.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..core.architecture import write_config
from ..core.int8 import restored
from ..core.model import Model
from ..core.weights import export
from ..loading import find
from .engine import Absent, Stepwise
from .engines import Transformers, missing, plain

HUB_EMBEDDING, OWN_EMBEDDING = "backbone.embeddings.weight", "backbone.embedding.weight"


class Fla(Transformers):
    """flash-linear-attention's model of the same config and weights, its Triton kernels."""

    name = "fla"

    def __init__(self, ours: Model, source: Model, room: int):
        fla = there("fla", "fla.models", ours, "pip install flash-linear-attention")
        self.priced, self.dtype = ours, ours.weight_dtype
        kind, exported = named(ours)
        if find(kind).family != "linear_attn":
            raise ValueError(f"flash-linear-attention is measured beside the linear attentions, not {kind!r}")
        transformers: Any = import_module("transformers")
        raw = {key: plain(value) for key, value in write_config(ours.config, kind).items()}
        config = transformers.AutoConfig.for_model(
            kind, **{k: v for k, v in raw.items() if k != "model_type"}
        )
        peer = transformers.AutoModelForCausalLM.from_config(config)
        told = peer.load_state_dict(exported, strict=False)
        absent = missing(peer, set(told.missing_keys))
        if told.unexpected_keys or absent:
            raise ValueError(f"these weights do not fit fla's model: {absent or told.unexpected_keys}")
        self.backend = f"triton (fla {version(fla)})"
        self.hold(peer.to(device=ours.device, dtype=ours.dtype).eval())

    def prefill(self, tokens: Tensor) -> Tensor:
        self.read = 0
        return self._call(tokens, {})


class MambaSSM(Stepwise):
    """The first authors' model of the same config and weights. Its steps run as a captured CUDA graph, which
    is how its own generation runs them where speed is asked for."""

    name = "mamba_ssm"

    def __init__(self, ours: Model, source: Model, room: int):
        package = there("mamba_ssm", "mamba_ssm", ours, "pip install 'constate[cuda]' --no-build-isolation")
        self.generation: Any = import_module("mamba_ssm.utils.generation")
        head: Any = import_module("mamba_ssm.models.mixer_seq_simple").MambaLMHeadModel
        config: Any = import_module("mamba_ssm.models.config_mamba").MambaConfig
        self.priced, self.dtype, self.room = ours, ours.weight_dtype, room
        exported = named(ours)[1]
        exported[OWN_EMBEDDING] = exported.pop(HUB_EMBEDDING)
        peer = head(config(**original_config(ours)), device=ours.device, dtype=ours.dtype)
        told = peer.load_state_dict(exported, strict=False)
        absent = missing(peer, set(told.missing_keys))
        if told.unexpected_keys or absent:
            raise ValueError(f"these weights do not fit mamba_ssm's model: {absent or told.unexpected_keys}")
        self.peer, self.backend = peer.eval(), f"cuda (mamba_ssm {version(package)})"
        self.cache: Any = None

    @property
    def graph(self) -> str:
        return "captured"

    def prefill(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        update, most = self.generation.update_graph_cache, length + self.room + 1
        self.cache = update(self.peer, self.cache, rows, length, most)
        self.past = self.cache.inference_params
        self.past.reset(most, rows)
        out = self.peer(tokens, inference_params=self.past, num_last_tokens=1).logits
        self.past.seqlen_offset = length
        return out[:, -1].float()

    def step(self, tokens: Tensor) -> Tensor:
        at = self.past.seqlen_offset
        places = torch.full((len(tokens), 1), at, dtype=torch.int64, device=tokens.device)
        out = self.cache.run(tokens[:, None], places, at)
        self.past.seqlen_offset = at + 1
        return out.reshape(len(tokens), -1).float()


def original_config(ours: Model) -> dict[str, Any]:
    """mamba_ssm's arguments for one of our Mamba or Mamba-2 models. Raises ValueError for another, or one
    with an eps that its layers cannot have."""
    assert ours.architecture is not None
    kind, c = ours.architecture.model_type, ours.config
    if kind not in ("mamba", "mamba2"):
        raise ValueError(f"mamba_ssm is measured beside mamba and mamba2, not {kind!r}")
    if c.layer_norm_epsilon != 1e-5:
        raise ValueError(f"mamba_ssm's norms have an eps of 1e-5, this model's {c.layer_norm_epsilon}")
    layer = {
        "d_state": c.state_size,
        "d_conv": c.conv_kernel,
        "bias": c.use_bias,
        "conv_bias": c.use_conv_bias,
    }
    if kind == "mamba":
        layer |= {"layer": "Mamba1", "dt_rank": c.time_step_rank}
        layer["expand"] = c.intermediate_size / c.hidden_size if c.intermediate_size else c.expand
    else:
        layer |= {"layer": "Mamba2", "headdim": c.head_dim, "ngroups": c.n_groups, "expand": c.expand}
        layer["dt_limit"] = c.time_step_limit
    return {
        "d_model": c.hidden_size,
        "n_layer": c.num_hidden_layers,
        "vocab_size": c.vocab_size,
        "ssm_cfg": layer,
        "rms_norm": True,
        "residual_in_fp32": c.residual_in_fp32,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": c.tie_word_embeddings,
    }


def there(name: str, module: str, ours: Model, install: str) -> Any:
    """The peer's module. Raises Absent where it cannot be imported or `ours` is not on a GPU."""
    if ours.device.type != "cuda":
        raise Absent(f"{name} runs on an NVIDIA GPU, and this model is on {ours.device}", "--device cuda")
    try:
        return import_module(module)
    except ImportError as error:
        raise Absent(f"the package {name} cannot be imported ({error})", install) from None


def named(ours: Model) -> tuple[str, dict[str, Tensor]]:
    """The architecture's model_type, and the weights by their published names."""
    assert ours.architecture is not None
    if ours.weight_dtype == "int8":
        raise ValueError("our int8 is no format of this peer's: measure beside bfloat16 or float32")
    return ours.architecture.model_type, dict(export(ours.architecture.weights(ours.config), restored(ours)))


def version(module: Any) -> str:
    root = import_module(module.__name__.split(".")[0])
    return str(getattr(root, "__version__", "of unknown version"))
