"""What weights take where their matrices are quantised, on paper. Knows formats and outlines, no values.

int8 is this package's own (core/int8.py) to the byte. fp8 and int4 are what servers run: all matrices, the
experts' stacks among them, with the embedding, the head and what gates or decays are made of left in the
model's dtype; int4 has a 16-bit scale and a 4-bit zero point for each 128 weights of a row (Lin et al.,
AWQ, 2306.00978), fp8 a float32 scale a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ...core.experts import Experts
from ...core.int8 import plan
from ...core.model import Model
from ...kernels.shapes import GROUP


@dataclass(frozen=True)
class Format:
    """`row(columns)` is the bytes of one quantised row; `ends` whether embedding and head are quantised,
    `experts` whether their stacks are; rows that stay exact take `exact` bytes a number, None the
    model's."""

    row: Callable[[int], float]
    ends: bool
    experts: bool
    exact: int | None = None


FORMATS: Mapping[str, Format] = {
    "int8": Format(lambda n: n + 4 * -(-n // GROUP), ends=True, experts=False, exact=4),
    "fp8": Format(lambda n: n + 4, ends=False, experts=True),
    "int4": Format(lambda n: n / 2 + 2.5 * -(-n // 128), ends=False, experts=True),
}


def stored(model: Model, weights: str | None) -> dict[int, float]:
    """Bytes of each parameter by identity, a shared one once. `weights`: a name of FORMATS, None for the
    dtype that the outline has. Raises ValueError for another."""
    plain = {id(p): float(p.nbytes) for p in model.parameters()}
    if weights is None:
        return plain
    if weights not in FORMATS:
        raise ValueError(f"weights={weights!r} is not known; known are {', '.join(FORMATS)}")
    form, named = FORMATS[weights], dict(model.named_parameters())
    ends = {id(model.embed.weight), id(model.head.weight)}
    for name, exact in plan(model).items():
        p = named[name]
        if id(p) in ends and not form.ends:
            continue
        kept = sum(len(range(*rows.indices(p.shape[0]))) for rows in exact)
        itemsize = form.exact or p.element_size()
        plain[id(p)] = (p.shape[0] - kept) * form.row(p.shape[1]) + kept * p.shape[1] * itemsize
    for stack in _stacks(model) if form.experts else ():
        plain[id(stack)] = stack.shape[0] * stack.shape[1] * form.row(stack.shape[2])
    return plain


def _stacks(model: Model) -> list[Tensor]:
    layers = (mixer for mixer in model.modules() if isinstance(mixer, Experts))
    return [stack for layer in layers for stack in (layer.up, layer.down)]
