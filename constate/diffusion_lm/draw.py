"""Tokens for masked places, by Gumbel noise on log-probabilities. Knows logits and sampling rules.

The arg-max of log p + g, with g drawn from the Gumbel distribution for each id, has the distribution p.
Noise made from a uniform of 24 random bits never exceeds 16.64, and an id with e^-20 of the mass is then
never drawn. Here a uniform has 63 bits, read as a float32 near 0, where floats lie close.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from ..core.sampling import Sampling, masses, pick


def source(seed: int) -> torch.Generator:
    """A row's source of noise; any whole number is a seed. On the host, so that every device draws alike."""
    digest = blake2b(str(seed).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def gumbel(shape: Sequence[int], noise: torch.Generator) -> Tensor:
    """Standard Gumbel noise, float32 on the host, from -2.82 (what 24 bits resolve at the lower end, where
    nothing is ever the largest of many) to 44."""
    bits = torch.empty(tuple(shape), dtype=torch.int64).random_(generator=noise)
    uniform = bits.float().add_(0.5).mul_(2.0**-63).clamp_(max=1 - 2.0**-24)
    # -log(1 - u) is exponential, as -log(u) is; but small values, the large noise, come from small u.
    return uniform.neg_().log1p_().neg_().log_().neg_()


def draw(
    logits: Tensor, places: Sequence[int], rule: Sampling, noise: torch.Generator, seen: Collection[int]
) -> list[int]:
    """A token for each of these places of logits (m, vocab), real ids alone. `seen` are ids given or written.

    Noise is drawn for one place at a time, so that it never takes more than a place's logits.
    """
    if rule.plain:
        return logits.argmax(-1)[list(places)].tolist()  # the first of equals
    if rule.greedy:
        return [pick(logits[i], rule, 0.0, seen) for i in places]
    width = logits.shape[1:]
    return [int((masses(logits[i], rule, seen).log() + gumbel(width, noise)).argmax()) for i in places]


def tempered(logits: Tensor, rule: Sampling) -> Tensor:
    """Logits of the distribution that `draw` draws from, (k, vocab) float32: temperature and filters, no
    penalty. A greedy rule leaves them as they are."""
    if rule.greedy:
        return logits
    out = torch.empty_like(logits)
    for place, kept in zip(logits, out, strict=True):
        kept.copy_(masses(place, rule, ()).log())
    return out
