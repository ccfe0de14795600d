"""Whether two engines with the same weights compute the same. A speed of something else means nothing.

Ours chooses the tokens and both read them, so that one early difference is not counted for ever after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .engine import Engine, Stepwise

CLOSE, UNDECIDED = 1e-4, 1e-3  # logits' bound of max(1, largest); best two closer than this may swap


class Disagreement(Exception):
    """A peer with the same weights computed something else."""


@dataclass(frozen=True)
class Agreement:
    """`tokens`: the share of greedy choices that are ours, of those where our best two logits are more than
    UNDECIDED apart. `logits`: the largest difference over the largest logit, or over 1 where all are less;
    None where an engine shows none. Both None: not compared."""

    tokens: float | None
    logits: float | None


def agreement(ours: Engine, peer: Engine, tokens: Tensor, new: int) -> Agreement:
    """Of the peer, over the prompts (rows, prompt) and `new` steps."""
    if not (isinstance(ours, Stepwise) and isinstance(peer, Stepwise)):
        same = ours.write(tokens, new).tokens.cpu() == peer.write(tokens, new).tokens.cpu()
        return Agreement(same.float().mean().item(), None)
    mine, theirs = ours.prefill(tokens), peer.prefill(tokens)
    decided = right = 0
    off = 0.0
    for at in range(new + 1):
        off = max(off, (mine - theirs).abs().max().item() / max(1.0, theirs.abs().max().item()))
        best = mine.topk(2).values
        clear = best[:, 0] - best[:, 1] > UNDECIDED
        decided += int(clear.sum())
        right += int((mine.argmax(-1) == theirs.argmax(-1))[clear].sum())
        if at < new:
            ids = mine.argmax(-1)
            mine, theirs = ours.step(ids), peer.step(ids)
    return Agreement(right / decided if decided else 1.0, off)


def compare(ours: Engine, peer: Engine, tokens: Tensor, new: int) -> None:
    """Raises Disagreement where logits or choices differ. One without logits is held to its tokens."""
    if not (isinstance(ours, Stepwise) and isinstance(peer, Stepwise)):
        if (agreed := agreement(ours, peer, tokens, new)).tokens != 1.0:
            raise Disagreement(f"{peer.name}: {agreed.tokens:.0%} of its greedy tokens are the same")
        return
    mine, theirs = ours.prefill(tokens), peer.prefill(tokens)
    for at in range(new + 1):
        bound = CLOSE * max(1.0, theirs.abs().max().item())
        off = (mine - theirs).abs().max().item()
        if not off <= bound:
            raise Disagreement(
                f"{peer.name}: logits differ by {off:.2e} after token {at}, allowed {bound:.2e}"
            )
        best = theirs.topk(2).values
        decided = best[:, 0] - best[:, 1] > UNDECIDED
        if not torch.equal(mine.argmax(-1)[decided], theirs.argmax(-1)[decided]):
            raise Disagreement(f"{peer.name}: another greedy token after token {at}")
        if at < new:
            ids = mine.argmax(-1)
            mine, theirs = ours.step(ids), peer.step(ids)
