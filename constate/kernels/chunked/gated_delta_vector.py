"""The matrices of a gated delta tile whose decay is a channel's own: Kimi Delta Attention.

With decays a channel nothing factors into one ratio a pair: what token i reads, with its key to erase and
with its query for the output, of what token j <= i wrote is sum_d x_id k_jd exp(g_{j+1,d} + ... + g_id). Both
come out of one tree of halves (`gated_linear_vector.join`, two queries and one key to a token), whose factors
are products of decays: nothing overflows, and a decay of 0 is an ordinary number. From there on it is the WY
form that gated_delta describes, with the tile's decay a vector (Kimi Team 2025, arXiv 2510.26692, section 3).
Knows one tile at a time; the chain of tiles, checks and single tokens are gated_delta's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .gated_linear_vector import join


def matrices(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """From q, k (m, hk, C, dk), v (m, h, C, dv), g (m, h, C, dk) and beta (m, h, C), float32 but g, all that
    a tile is before it meets S: u (m, h, C, dv), w (m, h, C, dk), k decayed to the tile's end, the whole
    decay (m, h, dk, 1), what a query reads of each write (m, h, C, C), and q decayed from the tile's
    start."""
    h = v.shape[1]
    if k.shape[1] != h:  # every value head decays the keys of its group in its own way
        q, k = (x.repeat_interleave(h // k.shape[1], 1) for x in (q, k))
    decay = g.float().exp()
    own = (q * k).sum(-1)  # a query reads what its own token writes, an erasing key does not
    pairs = torch.stack([torch.zeros_like(own), own], -1)[..., None]
    readers = torch.stack([k, q], 3) * decay[..., None, :]
    pairs, readers, keys, whole = join(pairs, readers, k[..., None, :], decay[..., None, :])
    (kk, reads), (k, q) = (x.unflatten(2, (-1, 2)).unbind(3) for x in (pairs, readers))
    # "unitriangular" takes the diagonal for ones and reads strictly below it.
    rate = beta[..., None]
    right = torch.cat([v, k], -1) * rate
    solved = torch.linalg.solve_triangular(kk * rate, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    return u, w, keys, whole.mT, reads, q
