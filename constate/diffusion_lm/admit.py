"""From a request to the row that a masked diffusion model fills: what the model can heed, and what it cannot.

Everything that a request may ask in vain is refused here, before the first call. Knows requests, plans and
the model's Denoiser; no tensor.
"""

from __future__ import annotations

from itertools import pairwise

from ..core.decode import Request
from .cache import Reading
from .denoiser import Denoiser
from .draw import source
from .plan import APPROXIMATE, Plan, shares
from .row import Row

BLOCK = 32  # places filled at a time where neither the model nor the request says


def admit(
    about: Denoiser, ending: frozenset[int], request: Request, prompt: int, index: int, sample: int
) -> Row:
    """The row of one sample of the request that is number `prompt` of its batch. Raises ValueError for a
    request that this model cannot heed."""
    plan = Plan() if request.plan is None else request.plan
    assert isinstance(plan, Plan), f"a Plan is wanted, not {request.plan!r}"
    if about.mask_id in (*request.tokens, *request.after):
        raise ValueError(
            f"prompt {prompt} holds the mask id {about.mask_id}: places to fill are asked for by "
            "max_new_tokens, and given text on their right by infill"
        )
    if request.after and about.block:
        raise ValueError(
            f"infill: this model sees whole blocks of {about.block} places and nothing beyond, so that text "
            "to the right would not be heeded; a model that sees both sides is wanted"
        )
    if about.block and (plan.block or 0) > about.block:
        raise ValueError(
            f"block={plan.block} with a model of blocks of {about.block} places, each of which it writes "
            "before it begins the next: at most that is wanted"
        )
    left = request.tokens
    if not left and about.shift and ending:
        left = (min(ending),)  # the logits for the first place come from the one before it
    first, stop = len(left), len(left) + request.max_new
    cut = plan.block or about.block or BLOCK
    # A model's blocks are counted from the row's start, others from the output's; what does not divide the
    # model's leaves a shorter stretch at the end of each.
    inner = range(first + 1, stop)
    edges = (
        [p for p in inner if p % about.block % cut == 0] if about.block else [*range(first + cut, stop, cut)]
    )
    edges = [first, *edges, stop]
    blocks = [range(a, b) for a, b in pairwise(edges) if b > a]
    sizes = [len(block) for block in blocks]
    return Row(
        index,
        request,
        plan,
        about,
        ending,
        canvas=[*left, *[about.mask_id] * request.max_new, *request.after],
        first=first,
        end=stop,
        size=cut,
        blocks=blocks,
        steps=sizes if plan.steps is None or not sizes else shares(sizes, plan.steps),
        reading=Reading(_way(plan, about), int(about.shift), plan.refresh),
        noise=source(request.seed + sample),
        seen={*request.seen, *request.tokens, *request.after},
    )


def _way(plan: Plan, about: Denoiser) -> str:
    """Which cache: "auto" resolved, and a refusal where the model does not allow it."""
    if plan.cache == "auto":
        return "exact" if about.exact_cache else "none"
    if plan.cache == "exact" and not about.exact_cache:
        raise ValueError(
            "cache='exact': in a model that sees both sides every key changes with each place filled; "
            f"leave the cache out, or ask for an approximate one: {', '.join(APPROXIMATE)}"
        )
    if plan.cache in APPROXIMATE and about.exact_cache:
        raise ValueError(
            f"cache={plan.cache!r} is an approximation, and this model's cache is exact: leave it out"
        )
    if plan.cache in APPROXIMATE and about.time_conditioned:
        raise ValueError(
            f"cache={plan.cache!r}: this model hears what share of a row is masked, and would mishear a part"
        )
    return "none" if plan.refresh == 1 else plan.cache
