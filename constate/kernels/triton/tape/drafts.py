"""A job as it is while a tape is recorded: tensors by name, and options. Drafts can be cut into columns and
put behind one another; what comes of it is made a `Job` and its pointers. Knows jobs and no work.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..described import POINTERS, Job
from ..launch import power

TILE = 256
"""Channels of a slice where a job is the same for every channel."""

WIDEST = 16384
"""Channels of the widest slice that a program holds."""

_STAGES = (
    *("scales", "divide", "taps", "kind", "first", "kept", "norm", "turned", "clip", "bonus", "by", "placed"),
)
OUTPUTS = ("o", "second", "sum", "narrow", "history")
_ROWS = ("x", "first", "kept", "sum", "value", "o", "second", "narrow")  # (rows, width)
_CHANNELS = ("scales", "conv_bias", "bias", "rate", "weight", "norm_bias", "taps")  # (width, ...)


@dataclass(eq=False)
class Draft:
    """`size` channels are a slice, 0 where every channel is one by itself. `tensors` by the names of
    POINTERS, vectors (rows, width); `options`, fields of Job; `slots` where o is a cache's buffer; `since` is
    the place on the tape of the work that last became a part of it."""

    tensors: dict[str, Tensor]
    size: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    slots: tuple[int, int, int] | None = None
    since: int = -1

    def read(self) -> list[Tensor]:
        return [t for name, t in self.tensors.items() if name not in OUTPUTS or name == "history"]

    def written(self) -> list[Tensor]:
        return [self.tensors[name] for name in OUTPUTS if name in self.tensors]

    @property
    def x(self) -> Tensor:
        return self.tensors["x"]

    @property
    def result(self) -> Tensor | None:
        """What a later job may go on with."""
        return self.tensors.get("o", self.tensors.get("sum"))

    @property
    def out(self) -> int:
        """Channels that a slice leaves: fewer than it reads with a divisor, more in features of Taylor's."""
        if self.options.get("kind") == "taylor":
            return self.tensors["scales"].numel()
        return self.size - ("divide" in self.options)

    @property
    def stages(self) -> list[int]:
        """Which of a job's steps it takes, by their places in the order of steps."""
        has, options = self.tensors, self.options
        taken = {
            "scales": "scales" in has,
            "divide": "divide" in options,
            "taps": "taps" in has,
            "kind": "kind" in options,
            "first": "first" in has,
            "kept": "kept" in has,
            "norm": "norm" in options or "weight" in has,
            "turned": "turned" in options,
            "clip": "scale" in options or "low" in options,
            "bonus": "bonus" in has,
            "by": "by" in has,
            "placed": options.get("copies", 1) > 1 or "ones" in options or self.slots is not None,
        }
        return [i for i, name in enumerate(_STAGES) if taken[name]]

    @property
    def raw(self) -> bool:
        """Whether it reads x at other channels than its own, so that nothing can be done to x before."""
        return "turned" in self.options or self.options.get("kind") == "taylor"

    def columns(self, first: int, last: int) -> Draft | None:
        """The part for these channels of x, None where a slice would be cut or the result lies elsewhere."""
        if (first, last) == (0, self.x.shape[1]):
            return self
        if self.size and (first % self.size or last % self.size):
            return None
        if self.slots or "units" in self.options or "bonus" in self.tensors or self.out != self.size:
            return None
        if self.options.get("copies", 1) > 1 or "ones" in self.options:
            return None
        cut = {}
        for name, t in self.tensors.items():
            shared = self.options.get("shared") and name in ("weight", "norm_bias")
            if name in _ROWS or (name == "by" and t.ndim == 2):
                t = t[:, first:last]
            elif name == "history":
                t = t[:, :, first:last]
            elif (name in _CHANNELS and not shared) or name == "by":
                t = t[first:last]
            cut[name] = t
        return replace(self, tensors=cut, options=dict(self.options))

    def then(self, other: Draft) -> Draft | None:
        """This and behind it `other`, which reads what this leaves, as one; None where that is no job."""
        ends, begins = self.stages, other.stages
        if (ends and begins and ends[-1] >= begins[0]) or other.raw or "second" in self.tensors:
            return None
        if "units" in other.options or (self.size and other.size and self.out != other.size):
            return None
        if self.slots or self.options.get("copies", 1) > 1 or {"ones", "units"} & self.options.keys():
            return None
        if self.options.get("kind") == "taylor" and other.stages != []:
            return None
        mine = {name: t for name, t in self.tensors.items() if name != "o"}
        theirs = {name: t for name, t in other.tensors.items() if name != "x"}
        if mine.keys() & theirs.keys():
            return None
        size = self.size or other.size
        return Draft(mine | theirs, size, self.options | other.options, other.slots, other.since)

    def made(self, past: Tensor, heads: int = 1, arrivals: Tensor | None = None) -> tuple[Job, int, tuple]:
        """The job, how many slices it has a row, and its pointers. For a scan's end `arrivals` count."""
        has = self.tensors
        size = self.size or min(TILE, self.x.shape[1])
        out = self.out if self.size else size
        units = self.options.get("units", -(-self.x.shape[1] // size))
        whole = (out + self.options.get("ones", 0)) * self.options.get("copies", 1)
        strides = {f"{name}_stride": has[name].stride(0) for name in _STRIDED if name in has}
        if self.slots:  # a cache's rows lie as far apart as it has room: no kernel is compiled for that
            del strides["o_stride"]
        if "by" in has:
            strides["by_stride"] = has["by"].stride(0) if has["by"].ndim == 2 else 0
        if "history" in has:
            history = has["history"]
            strides |= {"history_row": history.stride(0), "history_tap": history.stride(1)}
        if "bonus" in has:
            strides |= {"key_stride": has["key"].stride(0), "value_stride": has["value"].stride(0)}
        given = {name: value for name, value in self.options.items() if name not in _STEPS}
        if "taps" in has:
            given["taps"] = has["taps"].shape[1]
        made = Job(
            size=size,
            width=units * out if self.size else self.x.shape[1],
            out=out,
            block=power(out + self.options.get("ones", 0)),
            x_step=self.options.get("x_step", size),
            o_step=self.options.get("o_step", whole),
            heads=heads,
            cache="" if arrivals is None else ".cg",
            **strides,
            **given,
        )
        named = has | {"slots": self.slots, "arrivals": arrivals}
        return made, units, tuple(named.get(name) for name in POINTERS)


_STEPS = ("x_step", "o_step", "units")
_STRIDED = ("x", "o", "first", "kept", "sum", "second", "narrow")


def activation(x: Tensor, kind: str, o: Tensor) -> Draft:
    return Draft({"x": x, "o": o}, options={} if kind == "identity" else {"kind": kind})


def fresh(rows: int, width: int, like: Tensor) -> Tensor:
    """Memory for a result, (rows, width) float32: NaN until something writes it, so that nothing that was
    forgotten passes for a zero."""
    return torch.full((rows, width), torch.nan, dtype=torch.float32, device=like.device)
