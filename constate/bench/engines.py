"""What is timed: a model of ours, and peers that hold the same weights, behind the same two calls.

An Engine reads a batch of equally long prompts, then steps. Knows each peer's calling convention; knows
no clock. A peer is written from our own parameters by the inverse of the architecture's weight rules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.architecture import write_config
from ..core.decode import PIECE
from ..core.model import Model
from ..core.weights import export
from ..spans import Spans


class Engine(Protocol):
    """prefill (rows, prompt) int64 from nothing, then step (rows,) int64: logits (rows, vocab), of each
    row's last token alone."""

    name: str
    backend: str

    def prefill(self, tokens: Tensor) -> Tensor: ...
    def step(self, tokens: Tensor) -> Tensor: ...


class Ours:
    """A `Model`, called as generation calls it: the prompt in pieces, then one step a token."""

    name = "constate"

    def __init__(self, model: Model, room: int):
        self.model, self.room, self.backend = model, room, model.ops.backend

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


class Transformers:
    """Hugging Face's model of the same config and weights, its torch path, logits of the last token alone."""

    name = "transformers"

    def __init__(self, model: Model, room: int):
        import transformers

        transformers.logging.set_verbosity_error()  # it would say that it runs in plain torch: so we want it
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
        given = {k: int(v) if k in whole else _plain(v) for k, v in raw.items() if k != "model_type"}
        config = Config(**given)
        dtype, device = model.embed.weight.dtype, model.embed.weight.device
        with torch.random.fork_rng(devices=[]):
            peer = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
        exported = export(architecture.weights(model.config), dict(model.named_parameters()))
        missing, unexpected = peer.load_state_dict(exported, strict=False)
        peer.tie_weights()
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"these weights do not fit transformers' model: {missing} {unexpected}")
        self.peer: Any = peer
        self.backend = f"torch (transformers {transformers.__version__})"
        self.past: dict[str, Any] = {}

    def prefill(self, tokens: Tensor) -> Tensor:
        return self._call(tokens, {})

    def step(self, tokens: Tensor) -> Tensor:
        return self._call(tokens.unsqueeze(1), self.past)

    def _call(self, tokens: Tensor, past: Mapping[str, Any]) -> Tensor:
        out = self.peer(tokens, use_cache=True, logits_to_keep=1, **past)
        key = "cache_params" if getattr(out, "cache_params", None) is not None else "past_key_values"
        self.past = {key: getattr(out, key)}
        return out.logits[:, -1].float()


PEERS: Mapping[str, Callable[[Model, int], Engine]] = {"transformers": Transformers}
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


def _plain(value: Any) -> Any:
    """Tuples back to the lists of JSON."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value
