"""Which places are unmasked at a step: one small pure function a policy, all over the same `Look`.

Knows one row's block at one step and nothing of models, tokens or other rows. Every policy chooses at least
one place, so that no threshold can hang; of equals the lowest place comes first. What is chosen depends on
the distributions and never on tokens drawn from them, which would favour places whose draw was a likely one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .draw import gumbel

PLACES = 4  # whose probabilities are held at a time: a bound on memory alone
EQUAL = 1e-4  # scores are compared in steps of this. Where all is masked, every place may say the same, and
# without it the last bits, which depend on how a batch was computed, would choose among them.


@dataclass(frozen=True)
class Look:
    """What a policy sees.

    logits (m, vocab) float32 of the block's m masked places in reading order, clean or tempered. `budget`
    places are due at this step, at least 1 and at most m; `left` steps remain, this one included. `noise`
    is the row's own source. `standing` (f,) are the log-probabilities with which the f places of the block
    that are filled by now were filled. `threshold`, `bound` and `blur` are the plan's.
    """

    logits: Tensor
    budget: int
    left: int
    noise: torch.Generator
    standing: Tensor
    threshold: float = 0.9
    bound: float = 0.5
    blur: float = 0.0


class Choice(NamedTuple):
    """Masked places to fill, and filled ones to mask again: indices into `logits` and `standing`."""

    fill: list[int]
    clear: list[int] = []  # noqa: RUF012  # of a NamedTuple: never changed


def confidence(look: Look) -> Choice:
    """The `budget` places whose likeliest token is the most probable (LLaDA, Nie et al., 2502.09992;
    MaskGIT, Chang et al., 2202.04200). There it is the drawn token's probability, at temperature 0 the
    same."""
    return _best(top(look.logits), look)


def margin(look: Look) -> Choice:
    """Those where the two likeliest tokens lie furthest apart in probability (Kim et al., 2502.06768)."""
    return _best(_each(look.logits, lambda p: p.exp().topk(2).values.diff(dim=-1)[:, 0].neg()), look)


def entropy(look: Look) -> Choice:
    """Those whose distribution has the least entropy (Dream, Ye et al., 2508.15487)."""
    return _best(-entropies(look.logits), look)


def random(look: Look) -> Choice:
    """`budget` places, all equally likely."""
    order = torch.randperm(len(look.logits), generator=look.noise)
    return Choice(sorted(order[: look.budget].tolist()))


def ancestral(look: Look) -> Choice:
    """Each place by itself with probability 1 / left, which is MDLM's reverse process (Sahoo et al.,
    2406.07524) on a linear schedule in even steps; where none comes up, one at random."""
    chances = torch.rand(len(look.logits), generator=look.noise, dtype=torch.float64)
    fill = [i for i, chance in enumerate(chances.tolist()) if chance * look.left < 1]
    return Choice(fill or [int(chances.argmin())])


def threshold(look: Look) -> Choice:
    """Every place whose likeliest token has at least the threshold's probability (Fast-dLLM, Wu et al.,
    2505.22618), and no fewer than the budget's best."""
    scores = top(look.logits)
    trusted = int((scores.exp() >= look.threshold).sum())
    return _best(scores, replace(look, budget=max(trusted, look.budget)))


def entropy_bound(look: Look) -> Choice:
    """As many as keep the sum of their entropies within the bound, the surest first, and no fewer than the
    budget. Ben-Hamu et al. (2505.24857) leave the largest of the entropies out of the sum: here it counts.
    """
    scores = -entropies(look.logits)
    within = int((scores.sort(descending=True).values.neg().cumsum(0) <= look.bound).sum())
    return _best(scores, replace(look, budget=max(within, look.budget)))


def remask(look: Look) -> Choice:
    """As confidence, but filled places compete too, with the probability they were filled with: what then
    falls behind is masked again, and as many more places are filled. At the last step nothing can fall
    behind (a deterministic form of Wang et al.'s remasking by confidence, 2503.00307)."""
    scores = torch.cat([look.standing.to(look.logits.device), top(look.logits)])
    filled = len(look.standing)
    hold = set(_ranked(scores)[: filled + look.budget])
    fill = [i for i in range(len(look.logits)) if i + filled in hold]
    return Choice(fill, [i for i in range(filled) if i not in hold])


POLICIES: dict[str, Callable[[Look], Choice]] = {
    policy.__name__: policy
    for policy in (confidence, margin, entropy, random, ancestral, threshold, entropy_bound, remask)
}


def late(policy: Callable[[Look], Choice], look: Look, ending: Iterable[int]) -> Choice:
    """The policy among the places whose likeliest token does not end the text; the others only where these
    do not make up the budget."""
    ends = torch.isin(look.logits.argmax(-1).cpu(), torch.tensor(sorted(ending)))
    first, last = (torch.nonzero(which)[:, 0].tolist() for which in (~ends, ends))
    if not first or not last:
        return policy(look)
    chosen = policy(replace(look, logits=look.logits[first], budget=min(look.budget, len(first))))
    fill = [first[i] for i in chosen.fill]
    missing = look.budget - len(first)
    if missing > 0:
        empty = look.standing[:0]  # none of the filled is to compete a second time
        more = policy(replace(look, logits=look.logits[last], budget=missing, standing=empty))
        fill += [last[i] for i in more.fill]
    return Choice(sorted(fill), chosen.clear)


def top(logits: Tensor) -> Tensor:
    """The log-probability of each place's likeliest token, (m,)."""
    return _each(logits, lambda p: p.amax(-1))


def entropies(logits: Tensor) -> Tensor:
    """The entropy of each place's distribution in nats, (m,); ids without mass add nothing."""
    return _each(logits, lambda p: torch.special.entr(p.exp()).sum(-1))


def _each(logits: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """measure(log-probabilities), some places at a time."""
    return torch.cat([measure(some.log_softmax(-1)) for some in logits.split(PLACES)])


def _best(scores: Tensor, look: Look) -> Choice:
    if look.blur:
        scores = scores + look.blur * gumbel(scores.shape, look.noise).to(scores.device)
    return Choice(sorted(_ranked(scores)[: look.budget]))


def _ranked(scores: Tensor) -> list[int]:
    """Indices from the best to the worst, of equals the lower first."""
    return (scores / EQUAL).round().sort(descending=True, stable=True).indices.tolist()
