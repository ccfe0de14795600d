"""One model whose experts follow another's choices.

Where two scores are near, a rounded router may send a token elsewhere, which is another function: what
rounding does to the rest is then seen only if the routes stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from torch import Tensor, nn

from constate.core.experts import Router


def routers(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


@contextmanager
def same_routes(leader: nn.Module, follower: nn.Module) -> Iterator[None]:
    """The first pass of `follower` in here chooses as the first one of `leader`, which comes before, did."""
    with ExitStack() as stack:
        for ours, theirs in zip(routers(leader), routers(follower), strict=True):
            chosen: list[Tensor] = []
            stack.enter_context(patch.object(ours, "choose", _remembered(ours.choose, chosen)))
            stack.enter_context(patch.object(theirs, "choose", lambda _, chosen=chosen: chosen[0]))
        yield


def _remembered(choose: Callable[[Tensor], Tensor], chosen: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def call(scores: Tensor) -> Tensor:
        chosen.append(choose(scores))
        return chosen[-1]

    return call
