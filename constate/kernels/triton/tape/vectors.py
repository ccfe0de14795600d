"""What lies between the products and the scans: matrices, sums and norms, gates. All but the products are
jobs."""

from __future__ import annotations

import math

from torch import Tensor

from .drafts import Draft, activation
from .recorder import Recorder
from .works import Product, region


class Vectors(Recorder):
    """Matrices, residual sums and norms, gates, on vectors (rows, width)."""

    def matrix(
        self,
        weight: Tensor,
        x: Tensor,
        y: Tensor,
        scales: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Product:
        """y = W x + bias, W (out, in) float32, bfloat16, float16, or int8 with `scales`."""
        reads = [t for t in (x, bias) if t is not None]
        given = {"x": x, "y": y, "weight": weight.detach(), "bias": bias, "scales": scales}
        work = Product("product", reads, [y], product=True, **given, exact=scales is not None)
        self.works.append(work)
        return work

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
        """As on native's tape."""
        o = self.vector(x.shape[1])
        tensors = {"x": x if y is None else y, "o": o}
        options = {"norm": "centred" if centred else "rms", "eps": eps}
        tensors |= {} if weight is None else {"weight": weight}
        tensors |= {} if bias is None else {"norm_bias": bias}
        if y is not None:
            tensors |= {"kept": x if kept is None else kept, "sum": x}
            options |= {"keep": keep, "said": scale}
        self.note(Draft(tensors, x.shape[1], options))
        return o

    def add(
        self, x: Tensor, y: Tensor, *, keep: float = 1.0, kept: Tensor | None = None, scale: float = 1.0
    ) -> None:
        """x = keep * kept + scale * y in place."""
        last = self.works[-1]
        plain = kept is None and keep == scale == 1.0
        if plain and isinstance(last, Product) and last.bias is None and region(last.y) == region(y):
            last.y, last.added, last.writes = x, not last.exact, [x]
            last.reads.append(x)
            if last.added:
                return
            last.y, last.writes = y, [y]
        if keep == 0.0:
            self.note(Draft({"x": y, "o": x}, options={} if scale == 1.0 else {"scale": scale}))
            return
        tensors = {"x": y, "kept": x if kept is None else kept, "sum": x}
        self.note(Draft(tensors, options={"keep": keep, "said": scale}))

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
        """As on native's tape."""
        o, size = self.vector(x.shape[1]), x.shape[1] // groups
        tensors, options = {"x": x, "o": o}, {"norm": "rms", "eps": eps}
        if weight is not None:
            tensors["weight"] = weight
            options["shared"] = weight.numel() == size
        if gate is not None:
            where = "first" if gate_first else "by"
            tensors[where], options[where] = gate, "sigmoid" if sigmoid else "silu"
        self.note(Draft(tensors, size, options))
        return o

    def unit(self, x: Tensor, heads: int, eps: float = 1e-6) -> None:
        """Divide each of `heads` slices of x by its length, in place."""
        self.note(Draft({"x": x, "o": x}, x.shape[1] // heads, {"norm": "length", "eps": eps}))

    def decays(
        self,
        x: Tensor,
        bias: Tensor,
        rate: Tensor,
        limit: tuple[float, float] = (0.0, math.inf),
        *,
        bound: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As on native's tape."""
        dt, decay = self.vector(x.shape[1]), self.vector(x.shape[1])
        tensors = {"x": x, "bias": bias, "rate": rate, "o": dt, "second": decay}
        options = {"kind": "decays", "least": float(limit[0]), "most": float(limit[1])}
        if bound is not None:
            options = {"kind": "bounded", "bound": float(bound)}
        self.note(Draft(tensors, options=options))
        return dt, decay

    def activate(
        self, kind: str, x: Tensor, y: Tensor | None = None, *, scale: float = 1.0, low: float = -math.inf
    ) -> Tensor:
        """scale * act(x), at least `low`, times y (rows, width) or (width,) where there is one; `kind` is one
        of job.activated's."""
        o = self.vector(x.shape[1])
        plain = scale == 1.0 and low == -math.inf
        if y is not None and plain and y.ndim == 1 and kind == "identity":
            self.note(Draft({"x": x, "scales": y, "o": o}))
            return o
        if y is not None and plain and y.ndim == 2:  # y is what a scan or a norm left, for x to gate
            self.note(Draft({"x": y, "by": x, "o": o}, options={"by": kind}))
            return o
        draft = activation(x, kind, o)
        draft.options |= ({} if scale == 1.0 else {"scale": scale}) | (
            {} if low == -math.inf else {"low": low}
        )
        if y is not None:
            draft.tensors["by"] = y
            draft.options["by"] = "identity"
        self.note(draft)
        return o
