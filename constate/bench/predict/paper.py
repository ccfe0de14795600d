"""A model on paper: what it holds and moves, from its config alone.

The config is built into an outline, the real modules with no memory behind their weights, and every number
is what those modules say they cost (`Model.cost`). No checkpoint is read and nothing that was measured is
asked, so that a prediction can be wrong. Two conventions:

"model" counts what a good implementation must do: of the embedding the rows looked up, convolution history
of w - 1 inputs, keys and values read and written, the head for the last token of a prompt.

"lecture" is the back-of-the-envelope sum (Stanford CS336, lecture 10): every parameter is read and computes
2 FLOPs a token, embedding included; the cache is read; of experts those that the batch asks count, as in
both. Convolution history is w inputs, which is what mamba_ssm allocates. A recurrent state is read and
written in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ...core.architecture import autoregressive
from ...core.experts import Experts
from ...core.mixer import Mixer
from ...core.model import Model
from ...core.short_conv import ShortConv
from ...loading import DTYPES
from ...loading.dialects import tell
from ...loading.folder import outline
from .published import positions
from .stored import stored

CONVENTIONS = ("model", "lecture")
MIXING = ("attention", "scan", "conv")  # FLOPs that touch no weight matrix
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Work:
    """What one pass over some tokens of some rows takes. FLOPs and bytes of weights, of which all rows share
    one reading; FLOPs of mixing (attention and recurrences), and the bytes moved for them by kind."""

    weight_flops: float
    weight_bytes: float
    mixing_flops: float
    moved: Mapping[str, float]

    @property
    def flops(self) -> float:
        return self.weight_flops + self.mixing_flops

    @property
    def nbytes(self) -> float:
        return self.weight_bytes + sum(self.moved.values())

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.nbytes


@dataclass(frozen=True)
class Paper:
    """An outline and how it is stored and counted; `paper` makes one."""

    model: Model
    dtype: str
    state_dtype: str
    weights: str | None
    lecture: bool
    positions: int | None = None  # the longest sequence that its config says it was made for

    @cached_property
    def params(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def active_params(self) -> int:
        """Those that one token asks."""
        sizes = {id(p): float(p.numel()) for p in self.model.parameters()}
        return round(sum(size * self._asked(1).get(key, 1.0) for key, size in sizes.items()))

    @cached_property
    def weight_bytes(self) -> int:
        return round(sum(self._stored.values()))

    @property
    def causal(self) -> bool:
        """Whether it writes one token after another."""
        architecture = self.model.architecture
        return architecture is None or architecture.decode is autoregressive

    def held(self, context: int) -> Mapping[str, int]:
        """Bytes of "kv", "state" and "conv" that one row keeps after `context` tokens."""
        if context not in self._seen:
            held = {"kv": 0, "state": 0, "conv": self._first_inputs if self.lecture else 0}
            for mixer in self._keeping:
                for kind, n in mixer.cost(0, context).stored_in(self.model.state_dtype.itemsize).held.items():
                    held[kind] += n
            self._seen[context] = held
        return self._seen[context]

    def row_bytes(self, context: int) -> int:
        return sum(self.held(context).values())

    def total_bytes(self, context: int, rows: int) -> int:
        """Weights once and what each row keeps. Activations and workspace are not counted."""
        return self.weight_bytes + rows * self.row_bytes(context)

    def work(self, new: int, past: int, rows: int, every: bool = False) -> Work:
        """A pass over `new` tokens of each of `rows` rows after `past`, with logits of each row's last token
        or of `every` one."""
        cost = self.model.cost(new, past, rows)
        mixing = sum(n for kind, n in cost.flops.items() if kind in MIXING)
        if self.lecture:
            asked = self._asked(rows * new)
            weight_bytes = sum(size * asked.get(key, 1.0) for key, size in self._stored.items())
            held = self.held(past)
            moved = {"kv": rows * held["kv"], **{k: 2 * rows * held[k] for k in ("state", "conv")}}
            return Work(2.0 * self.active_params * new * rows, weight_bytes, mixing, moved)
        further = (new - 1) * cost.flops.get("head", 0) if every and new else 0
        sizes = {id(p): p.nbytes for p in self.model.parameters()}
        weight_bytes = sum(self._stored[key] * n / sizes[key] for key, n in cost.weights.items())
        moved = {k: cost.read.get(k, 0) + cost.written.get(k, 0) for k in ("kv", "state", "conv")}
        return Work(cost.total_flops - mixing + further, weight_bytes, mixing, moved)

    def experts_touched(self, tokens: int) -> float | None:
        """How many experts of its largest layer `tokens` tokens ask, on average; None without experts."""
        layers = [mixer.spec for mixer in self.model.modules() if isinstance(mixer, Experts)]
        if not layers:
            return None
        spec = max(layers, key=lambda spec: spec.experts)
        return spec.experts * (1 - (1 - spec.per_token / spec.experts) ** tokens)

    @cached_property
    def _keeping(self) -> Sequence[Mixer]:
        """The mixers that keep anything of a row: a search over lengths asks them often."""
        return [mixer for mixer in self.model.mixers() if any(mixer.cost(1, 0).held.values())]

    @cached_property
    def _seen(self) -> dict[int, Mapping[str, int]]:
        return {}

    @cached_property
    def _stored(self) -> Mapping[int, float]:
        return stored(self.model, self.weights)

    @cached_property
    def _first_inputs(self) -> int:
        """Bytes of the one input a convolution that a history of w inputs has beside one of w - 1."""
        convs = [m for mixer in self.model.mixers() for m in mixer.modules() if isinstance(m, ShortConv)]
        return sum(conv.weight.shape[0] * conv.weight.element_size() for conv in convs)

    def _asked(self, tokens: int) -> dict[int, float]:
        """The share of each expert stack that `tokens` tokens ask."""
        layers = [mixer for mixer in self.model.modules() if isinstance(mixer, Experts)]
        share = {id(layer): 1 - (1 - layer.spec.per_token / layer.spec.experts) ** tokens for layer in layers}
        return {id(w): share[id(layer)] for layer in layers for w in (layer.up, layer.down)}


def paper(
    raw: Mapping[str, Any],
    *,
    dtype: str = "bfloat16",
    state_dtype: str = "float32",
    weights: str | None = None,
    convention: str = "model",
    shapes: Mapping[str, torch.Size] | None = None,
) -> Paper:
    """The model of this config.json on paper; `shapes` are a checkpoint's, for one that does not say by its
    config alone what it is. `dtype` is that of weights, keys, values and convolution
    history; `weights` a format of its matrices (see stored.py). Raises ValueError, also for a config that
    `constate.load` would refuse."""
    if convention not in CONVENTIONS:
        raise ValueError(f"convention {convention!r} is not known; known are {', '.join(CONVENTIONS)}")
    kept, states = _dtype("dtype", dtype), _dtype("state_dtype", state_dtype)
    told = tell(raw, shapes or {})
    model = outline(told.architecture, told.config, kept)
    model.architecture, model.state_dtype = told.architecture, states
    names = (str(kept).removeprefix("torch."), str(states).removeprefix("torch."))
    made = Paper(model, *names, weights, convention == "lecture", positions(raw))
    _ = made.weight_bytes  # refuses an unknown format now
    return made


def _dtype(what: str, name: str) -> torch.dtype:
    long = SHORT.get(name, name)
    if long not in DTYPES:
        raise ValueError(f"{what}={name!r}: one of {', '.join([*DTYPES, *SHORT])} is wanted")
    return DTYPES[long]
