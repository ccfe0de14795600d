"""One token through a convolution or a recurrence, its state updated in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from .. import gated_delta_step, gated_linear_step, selective
from .drafts import Draft
from .recorder import Recorder
from .works import Run, Scan


class Scans(Recorder):
    """The steps of ops whose states several families share."""

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, *, silu: bool
    ) -> Tensor:
        """See reference.short_conv_step; the history is shifted in place."""
        o = self.vector(x.shape[1])
        tensors = {"x": x, "taps": weight, "history": history, "o": o}
        tensors |= {} if bias is None else {"conv_bias": bias}
        self.note(Draft(tensors, options={"conv_silu": True} if silu else {}))
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
        """As on native's tape."""
        h = state.shape[1]
        given = (_heads(q, heads), _heads(k, heads), _heads(v, h), _decay(log_decay, h))

        def start(scan: Scan) -> Run:
            o, ends = _heads(scan.o, h), self.leaving(scan)
            return gated_linear_step.step(*given, state, o, scale, v_scale=v_scale, skip=skip, **ends)

        return self._scan("gated_linear", [q, k, v, log_decay, v_scale], state, start)

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
        h = state.shape[1]
        given = (_heads(q, heads), _heads(k, heads), _heads(v, h), _decay(log_decay, h))

        def start(scan: Scan) -> Run:
            o, ends = _heads(scan.o, h), self.leaving(scan)
            return gated_delta_step.step(*given, state, o, scale, beta=beta, **ends)

        return self._scan("gated_delta", [q, k, v, log_decay, beta], state, start)

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

        def start(scan: Scan) -> Run:
            given = {"d": d, "z": z, "dt_bias": dt_bias}
            return partial(selective.launch_step, x, dt, a, b, c, state, scan.result, **given)

        reads = [x, dt, b, c, z]
        return self._scan("selective", reads, state, start, width=x.shape[1], ends=False)

    def _scan(
        self,
        name: str,
        reads: list[Tensor | None],
        state: Tensor,
        start: Callable[[Scan], Run],
        *,
        width: int | None = None,
        ends: bool = True,
    ) -> Tensor:
        heads = 1 if width else state.shape[1]
        o = self.vector(width or heads * state.shape[3])
        given = [t for t in reads if t is not None]
        scan = Scan(name, given, [state, o], lambda: start(scan), o=o, heads=heads, ends=ends)
        self.works.append(scan)
        return o


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(1, (heads, -1))


def _decay(log_decay: Tensor | None, h: int) -> Tensor | None:
    if log_decay is None or log_decay.shape[1] == h:
        return log_decay
    return _heads(log_decay, h)
