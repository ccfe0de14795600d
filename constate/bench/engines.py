"""A model of ours, and transformers' with the same weights, behind the same two calls.

Knows both calling conventions. A peer is written from our own parameters by the inverse of the
architecture's weight rules.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ..core.architecture import write_config
from ..core.decode import PIECE
from ..core.int8 import restored
from ..core.model import Model
from ..core.recording import recorded
from ..core.weights import export
from ..spans import Spans
from .engine import Stepwise


class Ours(Stepwise):
    """A `Model`, called as generation calls it: the prompt in pieces, then one step a token."""

    name = "constate"

    def __init__(self, model: Model, room: int):
        self.model = self.priced = model
        self.room, self.backend, self.dtype = room, model.ops.backend, model.weight_dtype
        self.state_dtype = str(model.state_dtype).removeprefix("torch.")

    @property
    def graph(self) -> str:
        return "plain" if recorded(self.model, self.model.init_cache(1, 1)) is None else "recorded"

    def prefill(self, tokens: Tensor) -> Tensor:
        self.cache = self.model.init_cache(tokens.shape[0], tokens.shape[1] + self.room)
        logits = tokens.new_empty(0)
        for start in range(0, tokens.shape[1], PIECE):
            piece = tokens[:, start : start + PIECE]
            spans = Spans.of([piece.shape[1]] * piece.shape[0], piece.device)
            logits = self.model.forward(piece.flatten(), spans, self.cache, at="last")
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        return self.model.step(tokens, self.cache)


class Transformers(Stepwise):
    """Hugging Face's model of the same config and weights, its torch path, logits of the last token alone.
    Beside weights that it cannot run, or runs at a hundredth of the speed (16 bits on a CPU), it has those of
    the `source` in float32."""

    name = "transformers"

    def __init__(self, ours: Model, source: Model, room: int):
        import transformers

        transformers.logging.set_verbosity_error()  # it would say that it runs in plain torch: so we want it
        transformers.logging.disable_progress_bar()
        model = source if ours.device.type == "cpu" or ours.weight_dtype == "int8" else ours
        self.priced, self.dtype = model, model.weight_dtype
        architecture = model.architecture
        assert architecture is not None
        if architecture.model_type not in transformers.CONFIG_MAPPING:
            raise ValueError(
                f"transformers has no model_type {architecture.model_type!r}: it can be measured against "
                "models of Hugging Face's own families (--shape names some), not our own format"
            )
        Config: Any = transformers.CONFIG_MAPPING[architecture.model_type]
        raw = write_config(model.config, architecture.model_type)
        # JSON knows one kind of number, and transformers is strict about which is meant.
        whole = {f.name for f in fields(Config) if f.type in (int, "int")}
        given = {k: int(v) if k in whole else plain(v) for k, v in raw.items() if k != "model_type"}
        config = Config(**{**given, "pad_token_id": 0})  # a default may lie outside this vocabulary
        dtype, device = model.dtype, model.device
        exported = export(architecture.weights(model.config), restored(model))
        Peer: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[Config]
        with torch.random.fork_rng(devices=[]):  # as from a file, whose names are not always those in memory
            peer, told = Peer.from_pretrained(
                None, config=config, state_dict=exported, dtype=dtype, output_loading_info=True
            )
        absent = missing(peer, set(told["missing_keys"]))
        if told["unexpected_keys"] or told["mismatched_keys"] or absent:
            raise ValueError(f"these weights do not fit transformers' model: {absent or told}")
        self.backend = f"torch (transformers {transformers.__version__})"
        self.hold(peer.to(device).eval())

    def hold(self, peer: Any) -> None:
        """Call this model from now on."""
        self.peer, self.past = peer, dict[str, Any]()
        self.read, self.counts = 0, "position_ids" in signature(peer.forward).parameters
        self.hands_back = True
        with torch.no_grad():
            self.prefill(torch.zeros(1, 1, dtype=torch.int64, device=peer.device))
        self.hands_back = bool(self.past)

    def prefill(self, tokens: Tensor) -> Tensor:
        from transformers import DynamicCache

        self.read = 0  # one that makes a cache and keeps it to itself is given one to fill
        own = {} if self.hands_back else {"past_key_values": DynamicCache(config=self.peer.config)}
        return self._call(tokens, own)

    def step(self, tokens: Tensor) -> Tensor:
        return self._call(tokens.unsqueeze(1), self.past)

    def _call(self, tokens: Tensor, past: Mapping[str, Any]) -> Tensor:
        if self.counts:  # said aloud: a hybrid may look for them in a layer that has none
            rows, new = tokens.shape
            ids = torch.arange(self.read, self.read + new, device=tokens.device).expand(rows, -1)
            past = {**past, "position_ids": ids}
            self.read += new
        out = self.peer(tokens, use_cache=True, logits_to_keep=1, **past)
        kept = {**past, **out}
        self.past = {key: kept[key] for key in ("cache_params", "past_key_values") if key in kept}
        return out.logits[:, -1].float()


DERIVED = ("slope_rate", "_decay")  # what a file may leave out, since the config says it
OPTIONAL = ("fla", "mamba_ssm", "causal_conv1d")


@contextmanager
def plain_peers() -> Iterator[None]:
    """Hide the optional kernel packages while a peer is built: transformers would call their GPU kernels
    for tensors on a CPU too. What it has imported by then stays with its torch path."""
    before = {name: sys.modules.get(name) for name in OPTIONAL}
    try:
        for name in OPTIONAL:
            sys.modules[name] = None  # pyright: ignore[reportArgumentType]  # None makes an import fail
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def missing(peer: torch.nn.Module, names: set[str]) -> set[str]:
    """Of `names`, which the file did not have, those that are no second name of what it had."""
    tied: dict[int, set[str]] = {}
    for name, p in peer.named_parameters(remove_duplicate=False):
        tied.setdefault(id(p), set()).add(name)
    filled = set[str]().union(*(group for group in tied.values() if group - names))
    return {name for name in names - filled if not name.endswith(DERIVED)}


def plain(value: Any) -> Any:
    """Tuples back to the lists of JSON."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, tuple) else value
