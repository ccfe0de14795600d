"""The calls that are timed: each op at the sizes of a published model of about a billion parameters.

A case makes the inputs of one call, and says what it must at least move and compute. Knows the ops'
signatures and prices; knows no backend and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...core import cost
from ...core.int8 import GROUP
from ...spans import Spans

CONTEXT = 8192  # tokens that a step of attention looks back on


@dataclass(frozen=True)
class Call:
    """`op` with its arguments by name; `flops` in the op's token-by-token form, `nbytes` of every input read
    once, every output written once, and a state read and written."""

    op: str
    given: Mapping[str, Any]
    flops: int
    out: int
    held: str | None = None

    @property
    def nbytes(self) -> int:
        tensors = {name: x for name, x in self.given.items() if isinstance(x, Tensor)}
        state = tensors[self.held].nbytes if self.held else 0  # read with the others, and written here
        return sum(x.nbytes for x in tensors.values()) + state + self.out


@dataclass(frozen=True)
class Draw:
    """Random inputs of one dtype on one device: `n` tokens in `rows` rows. `small` shrinks every model."""

    n: int
    rows: int
    dtype: torch.dtype
    device: str
    small: bool = False

    @cached_property
    def source(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.n + self.rows)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(*shape, generator=self.source, device=self.device)
        return drawn.to(dtype or self.dtype)

    def state(self, *shape: int) -> Tensor:
        return self.normal(self.rows, *shape, dtype=torch.float32)

    def decay(self, *shape: int) -> Tensor:
        """log(sigmoid) of numbers around 3: from a tenth to a thousandth is lost a token."""
        return torch.nn.functional.logsigmoid(self.normal(*shape, dtype=torch.float32) + 3)

    def size(self, large: int, little: int) -> int:
        return little if self.small else large

    @property
    def spans(self) -> Spans:
        return Spans.of([self.n // self.rows] * self.rows, self.device)


def _heads(draw: Draw, hk: int, h: int, dk: int, dv: int) -> dict[str, Any]:
    n = draw.n
    k = normalize(draw.normal(n, hk, dk, dtype=torch.float32), dim=-1).to(draw.dtype)
    return {"q": draw.normal(n, hk, dk), "k": k, "v": draw.normal(n, h, dv), "scale": dk**-0.5}


def _whole(
    op: str, draw: Draw, step: bool, given: dict[str, Any], state: tuple[int, ...], flops: int, like: str
) -> Call:
    """The step of an op, or its scan over the draw's rows."""
    held = "history" if op == "short_conv" and step else "state" if step else "initial"
    start = draw.normal(draw.rows, *state) if op == "short_conv" else draw.state(*state)
    rest = {} if step else {"spans": draw.spans}
    name = op if op == "short_conv" and not step else f"{op}_{'step' if step else 'scan'}"
    return Call(name, {**given, held: start, **rest}, flops, given[like].nbytes, held)


def mamba2(draw: Draw, step: bool) -> Call:
    """Mamba-2, 1.3 billion: 64 heads of 64, a state of 128, one group."""
    hk, h, dk, dv = 1, draw.size(64, 2), draw.size(128, 16), draw.size(64, 16)
    given = {**_heads(draw, hk, h, dk, dv), "log_decay": draw.decay(draw.n, h)}
    return _whole("gated_linear", draw, step, given, (h, dk, dv), cost.linear_scan(draw.n, h, dk, dv), "v")


def gla(draw: Draw, step: bool) -> Call:
    """Gated linear attention: 16 heads of 128, a decay a channel."""
    h, d = draw.size(16, 2), draw.size(128, 16)
    given = {**_heads(draw, h, h, d, d), "log_decay": draw.decay(draw.n, h, d)}
    return _whole("gated_linear", draw, step, given, (h, d, d), cost.linear_scan(draw.n, h, d, d), "v")


def gated_deltanet(draw: Draw, step: bool) -> Call:
    """Gated DeltaNet as Qwen3-Next has it: 16 key heads and 32 value heads of 128."""
    hk, h, d = draw.size(16, 1), draw.size(32, 2), draw.size(128, 16)
    given = {**_heads(draw, hk, h, d, d), "log_decay": draw.decay(draw.n, h)}
    given["beta"] = draw.normal(draw.n, h).sigmoid()
    return _whole("gated_delta", draw, step, given, (h, d, d), cost.delta_scan(draw.n, h, d, d), "v")


def kda(draw: Draw, step: bool) -> Call:
    """Kimi Delta Attention: 32 heads of 128, a decay a channel."""
    h, d = draw.size(32, 2), draw.size(128, 16)
    given = {**_heads(draw, h, h, d, d), "log_decay": draw.decay(draw.n, h, d)}
    given["beta"] = draw.normal(draw.n, h).sigmoid()
    return _whole("gated_delta", draw, step, given, (h, d, d), cost.delta_scan(draw.n, h, d, d), "v")


def rwkv7(draw: Draw, step: bool) -> Call:
    """RWKV-7, 1.5 billion: 32 heads of 64."""
    h, d = draw.size(32, 2), draw.size(64, 16)
    kappa = normalize(draw.normal(draw.n, h, d, dtype=torch.float32), dim=-1)
    rate = draw.normal(draw.n, h, d, dtype=torch.float32).sigmoid()
    given = {**_heads(draw, h, h, d, d), "log_decay": draw.decay(draw.n, h, d)}
    given |= {"a": (-kappa).to(draw.dtype), "b": (kappa * rate).to(draw.dtype)}
    return _whole("dplr_delta", draw, step, given, (h, d, d), cost.dplr_scan(draw.n, h, d, d), "v")


def mamba(draw: Draw, step: bool) -> Call:
    """Mamba, 1.4 billion: 4,096 channels, a state of 16."""
    c, s = draw.size(4096, 24), draw.size(16, 8)
    token = {name: draw.normal(draw.n, c) for name in ("x", "dt", "z")}
    a = -torch.arange(1.0, s + 1, device=draw.device).repeat(c, 1)
    weights = {"d": torch.ones(c, device=draw.device), "dt_bias": draw.normal(c, dtype=torch.float32) - 4}
    given = {**token, "a": a, "b": draw.normal(draw.n, s), "c": draw.normal(draw.n, s), **weights}
    return _whole("selective", draw, step, given, (c, s), cost.selective_scan(draw.n, c, s), "x")


def rg_lru(draw: Draw, step: bool) -> Call:
    """RecurrentGemma's recurrence: 2,560 channels."""
    c = draw.size(2560, 24)
    given = {"x": draw.normal(draw.n, c), "log_a": draw.decay(draw.n, c)}
    return _whole("linear_recurrence", draw, step, given, (c,), cost.recurrence_scan(draw.n, c), "x")


def conv(draw: Draw, step: bool) -> Call:
    """Mamba-2's convolution: 4,352 channels, four taps."""
    c, w = draw.size(4352, 24), 4
    given = {"x": draw.normal(draw.n, c), "weight": draw.normal(c, w), "bias": draw.normal(c)}
    return _whole("short_conv", draw, step, given, (w - 1, c), 2 * draw.n * c * w, "x")


def attention(draw: Draw, step: bool) -> Call:
    """Grouped attention of an 8 billion transformer: 32 query heads, 8 of keys, 128 wide; a step looks back
    on CONTEXT tokens."""
    h, hk, d, n = draw.size(32, 4), draw.size(8, 2), draw.size(128, 16), draw.n
    q = draw.normal(n, h, d)
    if not step:
        k, v, spans = draw.normal(n, hk, d), draw.normal(n, hk, d), draw.spans
        pairs = draw.rows * cost.seen_pairs(n // draw.rows, 0)
        given = {"q": q, "k": k, "v": v, "spans": spans, "context": spans}
        return Call("attention", given, 4 * pairs * h * d, q.nbytes)
    held = draw.size(CONTEXT, 40)
    k, v = draw.normal(n, held, hk, d), draw.normal(n, held, hk, d)
    lengths = torch.full((n,), held, device=draw.device)
    given = {"q": q, "k": k, "v": v, "lengths": lengths, "longest": held}
    return Call("attention_step", given, 4 * n * held * h * d, q.nbytes)


def int8(draw: Draw, step: bool) -> Call:
    """A product with a weight of 8 bits, 4,096 by 4,096, and a scale for every GROUP of a row."""
    side = draw.size(4096, 2 * GROUP)
    weight = torch.randint(-127, 128, (side, side), generator=draw.source, device=draw.device).to(torch.int8)
    scales = draw.normal(side, side // GROUP, dtype=torch.float32).abs() / 127
    given = {"x": draw.normal(draw.n, side), "weight": weight, "scales": scales}
    return Call("linear", given, 2 * draw.n * prod(weight.shape), given["x"].nbytes)


def norm(draw: Draw, step: bool) -> Call:
    """Mamba-2's gated norm over 4,096 channels."""
    c = draw.size(4096, 24)
    x, gate, weight = draw.normal(draw.n, c), draw.normal(draw.n, c), draw.normal(c)
    given = {"x": x, "weight": weight, "eps": 1e-5, "gate": gate, "gate_first": True}
    return Call("rms_norm", given, 0, x.nbytes)


Case = Callable[[Draw, bool], Call]
RECURRENT: Mapping[str, Case] = {
    "mamba2": mamba2,
    "gated_deltanet": gated_deltanet,
    "gla": gla,
    "kda": kda,
    "mamba": mamba,
    "rwkv7": rwkv7,
    "short_conv": conv,
    "rg_lru": rg_lru,
}
SCANS: Mapping[str, Case] = {**RECURRENT, "attention": attention, "rms_norm": norm}
STEPS: Mapping[str, Case] = {**RECURRENT, "attention": attention, "int8": int8, "rms_norm": norm}


def prompt(case: str, length: int, dtype: torch.dtype, device: str, small: bool = False) -> Call:
    """One row of `length` tokens."""
    return SCANS[case](Draw(length, 1, dtype, device, small), False)


def token(case: str, rows: int, dtype: torch.dtype, device: str, small: bool = False) -> Call:
    """One token of each of `rows` rows."""
    return STEPS[case](Draw(rows, rows, dtype, device, small), True)
