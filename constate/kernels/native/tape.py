"""A decode step as a list of C calls, prepared once and replayed for every token.

A vector here is a float32 tensor (rows, width), a row a sequence; its memory is the tape's own, or, for a
state, the cache's. Each method appends one call and returns where its result will lie. Between calls
may stand steps that have no C form. Knows tensors and the C kernels; knows no mixer and no model.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import glue
from .attention import Attend, Enter, Turns, chunks
from .build import loaded
from .call import Entry, pointer, threads
from .gated_delta import GatedDelta
from .gated_linear import GatedLinear
from .linear import FORMATS, Matrix
from .parts import Parts
from .selective import Selective
from .short_conv import ShortConv

Step = Callable[[], object]


class Tape(Parts):
    """`rows` sequences, of which `past` (rows,) int64 tokens each have been read when a step begins.

    Everything whose address was taken is kept alive; whoever records must see to it that it stays where it
    is (a cache that grew, a weight that was replaced, wants a new tape).
    """

    def __init__(self, rows: int, past: Tensor):
        self.rows, self.past = rows, past
        self.call: Any = None  # what steps between pieces are given, anew in every step
        self.shared: dict[Any, Any] = {}  # what whoever records leaves for later calls
        self.offsets = torch.arange(rows + 1)
        self._library = loaded()
        self._kept: list[Any] = [past, self.offsets]
        self._calls: list[tuple[int, ctypes.Structure, bool]] = []
        self._apart = False
        self.pieces: list[Step] = []
        self._turns: dict[Any, Tensor] = {}

    # -- running --------------------------------------------------------------------------------

    def run(self) -> None:
        """Replay everything recorded, in order."""
        self._close()
        for piece in self.pieces:
            piece()

    def between(self, step: Step) -> None:
        """Record a step that is Python's: it runs after what was recorded before and before what comes."""
        self._close()
        self.pieces.append(step)

    def _close(self) -> None:
        """Make one C call of what was recorded since the last piece."""
        if not self._calls:
            return
        calls, self._calls = self._calls, []
        entries = (Entry * len(calls))()
        for entry, (kernel, args, apart) in zip(entries, calls, strict=True):
            entry.kernel, entry.args, entry.apart = kernel, ctypes.addressof(args), apart
        self._kept += [entries, *(args for _, args, _ in calls)]
        run, count = self._library.run, len(calls)
        self.pieces.append(lambda: run(ctypes.addressof(entries), count, threads()))

    def _call(self, kernel: str, args: type[ctypes.Structure], **given: Any) -> ctypes.Structure:
        """Append `kernel` with these fields; tensors give their address, and are kept."""
        fields = {}
        for name, value in given.items():
            if isinstance(value, Tensor):
                self._kept.append(value)
                value = pointer(value)
            fields[name] = value
        record = args(**fields)
        self._calls.append((self._library.kernel(kernel, args), record, self._apart))
        return record

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Calls recorded within read and write nothing of one another's: no thread waits between them."""
        before, self._apart = self._apart, True
        yield
        self._apart = before
        if self._calls and not before:
            self._calls[-1] = (*self._calls[-1][:2], False)

    # -- vectors --------------------------------------------------------------------------------

    def vector(self, width: int) -> Tensor:
        """Memory for a result, (rows, width)."""
        return torch.zeros(self.rows, width)

    def constant(self, value: Tensor) -> Tensor:
        """A parameter, or what is computed from one, as kernels read it: float32, contiguous."""
        return value.detach().float().contiguous()

    def matrix(
        self,
        weight: Tensor,
        x: Tensor,
        y: Tensor,
        scales: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> ctypes.Structure:
        """y = W x + bias, W (out, in) float32, bfloat16, or int8 with `scales` (see native.linear)."""
        return self._call(
            "matrix",
            Matrix,
            weight=weight,
            scales=scales,
            bias=bias,
            x=x,
            y=y,
            rows=self.rows,
            **{"in": weight.shape[1]},
            out=weight.shape[0],
            x_stride=x.stride(0),
            y_stride=y.stride(0),
            format=FORMATS[weight.dtype],
        )

    def add_norm(
        self,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor | None,
        eps: float,
        *,
        bias: Tensor | None = None,
        centred: bool = False,
        keep: float = 1.0,
        kept: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """x = keep * kept + scale * y in place (`kept` None: x itself; y None: x stays), then the norm of x:
        RMS, or with `centred` a layer norm."""
        o = self.vector(x.shape[1])
        norm = {
            "o": o,
            "weight": weight,
            "bias": bias,
            "eps": eps,
            "centred": centred,
            "o_stride": o.stride(0),
        }
        self._add(x, y, keep, kept, scale, **norm)
        return o

    def add(
        self, x: Tensor, y: Tensor, *, keep: float = 1.0, kept: Tensor | None = None, scale: float = 1.0
    ) -> None:
        """x = keep * kept + scale * y in place."""
        self._add(x, y, keep, kept, scale)

    def _add(
        self, x: Tensor, y: Tensor | None, keep: float, kept: Tensor | None, scale: float, **norm: Any
    ) -> None:
        kept = x if kept is None else kept
        self._call(
            "add_norm",
            glue.AddNorm,
            x=x,
            kept=kept,
            y=y,
            rows=self.rows,
            width=x.shape[1],
            x_stride=x.stride(0),
            kept_stride=kept.stride(0),
            y_stride=0 if y is None else y.stride(0),
            keep=keep,
            scale=scale,
            **norm,
        )

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor | None,
        weight: Tensor | None,
        eps: float,
        *,
        groups: int = 1,
        gate_first: bool = False,
        sigmoid: bool = False,
    ) -> Tensor:
        """RMS norm of each of `groups` slices, times silu(gate), or its sigmoid, before (`gate_first`) or
        after; the weight is as wide as a slice, which all share, or as x."""
        o, size = self.vector(x.shape[1]), x.shape[1] // groups
        self._call(
            "gated_norm",
            glue.GatedNorm,
            x=x,
            gate=gate,
            weight=weight,
            o=o,
            rows=self.rows,
            groups=groups,
            size=size,
            x_stride=x.stride(0),
            gate_stride=0 if gate is None else gate.stride(0),
            o_stride=o.stride(0),
            shared=weight is not None and weight.numel() == size,
            gate_first=gate_first,
            sigmoid=sigmoid,
            eps=eps,
        )
        return o

    def unit(self, x: Tensor, heads: int, eps: float = 1e-6) -> None:
        """Divide each of `heads` slices of x by its length, in place."""
        size = x.shape[1] // heads
        self._call(
            "unit", glue.Unit, x=x, rows=self.rows, heads=heads, size=size, stride=x.stride(0), eps=eps
        )

    def decays(
        self,
        x: Tensor,
        bias: Tensor,
        rate: Tensor,
        limit: tuple[float, float] = (0.0, math.inf),
        *,
        bound: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """dt = softplus(x + bias) within `limit`, and the log-decay -rate dt; with a `bound`, negative, the
        log-decay bound sigmoid(rate (x + bias)), and a dt that says nothing."""
        dt, decay = self.vector(x.shape[1]), self.vector(x.shape[1])
        self._call(
            "decays",
            glue.Decays,
            x=x,
            bias=bias,
            rate=rate,
            dt=dt,
            decay=decay,
            rows=self.rows,
            heads=x.shape[1],
            x_stride=x.stride(0),
            o_stride=dt.stride(0),
            low=limit[0],
            high=limit[1],
            bound=bound or 0.0,
        )
        return dt, decay

    def activate(
        self, kind: str, x: Tensor, y: Tensor | None = None, *, scale: float = 1.0, low: float = -math.inf
    ) -> Tensor:
        """scale * act(x), at least `low`, times y (rows, width) or (width,) where there is one; `kind` is one
        of glue.ACTIVATIONS."""
        o = self.vector(x.shape[1])
        self._call(
            "activate",
            glue.Activate,
            x=x,
            y=y,
            o=o,
            rows=self.rows,
            width=x.shape[1],
            x_stride=x.stride(0),
            y_stride=0 if y is None or y.ndim == 1 else y.stride(0),
            o_stride=o.stride(0),
            kind=glue.ACTIVATIONS[kind],
            scale=scale,
            low=low,
        )
        return o

    # -- ops ------------------------------------------------------------------------------------

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, *, silu: bool
    ) -> Tensor:
        """See reference.short_conv_step; the history is shifted in place."""
        o = self.vector(x.shape[1])
        self._call(
            "short_conv",
            ShortConv,
            x=x,
            weight=weight,
            bias=bias,
            history=history,
            o=o,
            offsets=self.offsets,
            rows=self.rows,
            channels=x.shape[1],
            width=weight.shape[1],
            x_stride=x.stride(0),
            o_stride=o.stride(0),
            silu=silu,
            history_bf16=history.dtype == torch.bfloat16,
        )
        return o

    def gated_linear(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        state: Tensor,
        *,
        heads: int,
        scale: float = 1.0,
        v_scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> Tensor:
        """See reference.gated_linear_step, `heads` of them for q and k. `v_scale` (rows, h) multiplies v
        first; `skip` (h,) adds that much of the unscaled v to the output."""
        o = self.vector(state.shape[1] * state.shape[3])
        self._call(
            "gated_linear",
            GatedLinear,
            **self._scan(q, k, v, log_decay, state, o, heads),
            v_scale=v_scale,
            skip=skip,
            v_scale_stride=0 if v_scale is None else v_scale.stride(0),
            scale=scale,
        )
        return o

    def gated_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor,
        state: Tensor,
        *,
        heads: int,
        scale: float = 1.0,
    ) -> Tensor:
        """See reference.gated_delta_step."""
        o = self.vector(state.shape[1] * state.shape[3])
        scan = self._scan(q, k, v, log_decay, state, o, heads)
        self._call("gated_delta", GatedDelta, **scan, beta=beta, beta_stride=beta.stride(0), scale=scale)
        return o

    def _scan(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor, o: Tensor, heads: int
    ) -> dict[str, Any]:
        _, h, dk, dv = state.shape
        kind = 0 if decay is None else 1 if decay.shape[1] == h else 2
        return {
            "q": q,
            "k": k,
            "v": v,
            "log_decay": decay,
            "state": state,
            "o": o,
            "offsets": self.offsets,
            "rows": self.rows,
            "hk": heads,
            "h": h,
            "dk": dk,
            "dv": dv,
            "q_stride": q.stride(0),
            "k_stride": k.stride(0),
            "v_stride": v.stride(0),
            "decay_stride": 0 if decay is None else decay.stride(0),
            "o_stride": o.stride(0),
            "decay_kind": kind,
        }

    def selective(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        state: Tensor,
        *,
        d: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
    ) -> Tensor:
        """See reference.selective_step."""
        o = self.vector(x.shape[1])
        self._call(
            "selective",
            Selective,
            x=x,
            dt=dt,
            a=a,
            b=b,
            c=c,
            d=d,
            z=z,
            dt_bias=dt_bias,
            state=state,
            o=o,
            offsets=self.offsets,
            rows=self.rows,
            channels=a.shape[0],
            states=a.shape[1],
            x_stride=x.stride(0),
            dt_stride=dt.stride(0),
            b_stride=b.stride(0),
            c_stride=c.stride(0),
            z_stride=0 if z is None else z.stride(0),
            o_stride=o.stride(0),
        )
        return o

    def turns(self, frequencies: tuple[float, ...], factor: float) -> Tensor:
        """(rows, 2 half) cosines and sines of this step's positions, times factor; made once a step."""
        key = (frequencies, factor)
        if key not in self._turns:
            half = len(frequencies)
            self._turns[key] = turns = self.vector(2 * half)
            self._call(
                "turns",
                Turns,
                frequencies=torch.tensor(frequencies),
                turns=turns,
                past=self.past,
                rows=self.rows,
                half=half,
                factor=factor,
            )
        return self._turns[key]

    def enter(
        self,
        qkv: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        *,
        turns: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Norm and rotate the queries and keys of qkv (rows, (heads + 2 hk) d) in place, then write keys and
        values to their places in k, v (rows, capacity, hk, d)."""
        self._call(
            "enter",
            Enter,
            qkv=qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            turns=turns,
            **self._buffers(k, v, heads),
            past=self.past,
            stride=qkv.stride(0),
            rotated=0 if turns is None else turns.shape[1],
            eps=eps,
        )

    def rotate(
        self, x: Tensor, heads: int, turns: Tensor | None, norm: Tensor | None = None, eps: float = 0.0
    ) -> None:
        """Norm each of `heads` slices of x where there is a norm, then rotate it, in place."""
        self._call(
            "enter",
            Enter,
            qkv=x,
            q_norm=norm,
            turns=turns,
            past=self.past,
            rows=self.rows,
            h=heads,
            dk=x.shape[1] // heads,
            capacity=1,
            stride=x.stride(0),
            rotated=0 if turns is None else turns.shape[1],
            eps=eps,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, heads: int, *, scale: float | None = None) -> Tensor:
        """Each row's query (rows, heads dk) over everything its buffers hold, this step's token included."""
        capacity, dk, dv = k.shape[1], k.shape[3], v.shape[3]
        o = self.vector(heads * dv)
        partial = torch.empty(self.rows * heads * chunks(capacity) * (2 + dv))
        given = self._buffers(k, v, heads) | {
            "q": q,
            "o": o,
            "partial": partial,
            "lengths": self.past,
            "more": 1,
            "chunks": chunks(capacity),
            "q_stride": q.stride(0),
            "o_stride": o.stride(0),
            "scale": dk**-0.5 if scale is None else scale,
        }
        self._call("attend", Attend, **given)
        self._call("combine", Attend, **given)
        return o

    def _buffers(self, k: Tensor, v: Tensor, heads: int) -> dict[str, Any]:
        return {
            "k": k,
            "v": v,
            "rows": self.rows,
            "hk": k.shape[2],
            "h": heads,
            "dk": k.shape[3],
            "dv": v.shape[3],
            "capacity": k.shape[1],
            "k_row": k.stride(0),
            "k_place": k.stride(1),
            "v_row": v.stride(0),
            "v_place": v.stride(1),
            "bf16": k.dtype == torch.bfloat16,
        }
