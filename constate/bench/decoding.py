"""One generation by a model that does not write one token after another, in the units of all others.

Called as generation calls it, through its architecture's decoder. Knows commits and their clock; knows no
policy. What such a model must move for a token depends on its plan: no price stands beside its speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..core.architecture import autoregressive
from ..core.decode import Commit, Request
from ..core.model import Model
from ..diffusion_lm.denoiser import denoiser
from ..diffusion_lm.plan import Plan


@dataclass(frozen=True)
class Written:
    """`ttft` seconds to the first commit of all rows, `itl` a token after it, `between` commits (median),
    after `calls` model calls for `new` tokens a row; `how` it was decoded; the rows' `tokens`."""

    ttft: float
    itl: float
    between: float | None
    calls: int
    how: str
    tokens: list[list[int]]


def one_by_one(model: Model) -> bool:
    """Whether the model writes one token after another, so that a prefill and a step can be timed."""
    return model.architecture is None or model.architecture.decode is autoregressive


class Decoder:
    """The model under a plan."""

    def __init__(self, model: Model, plan: Plan):
        self.model, self.plan, self.backend = model, plan, model.ops.backend
        self.name = "constate"

    def uncached(self) -> Decoder:
        """What a cache is compared with."""
        other = Decoder(self.model, replace(self.plan, cache="none", refresh=None))
        other.name = "constate, no cache"
        return other

    def write(self, tokens: Tensor, new: int) -> Written:
        """`new` tokens after each of the equally long prompts (rows, prompt), greedy, ends not heeded."""
        assert self.model.architecture is not None
        requests = [Request(tuple(row), new, plan=self.plan) for row in tokens.tolist()]
        rows: list[list[Commit]] = [[] for _ in requests]
        for commit in self.model.architecture.decode(self.model, requests, lambda row, tokens: None):
            rows[commit.row].append(commit)
        last = max((commits[-1] for commits in rows), key=lambda commit: commit.seconds)
        first = max(commits[0].seconds for commits in rows)
        after = new - max(len(commits[0].tokens) for commits in rows)
        gaps = [b.seconds - a.seconds for commits in rows for a, b in pairwise(commits)]
        return Written(
            first,
            (last.seconds - first) / max(after, 1),
            median(gaps) if gaps else None,
            last.calls,
            ", ".join(f"{key} {value}" for key, value in last.how.items()),
            [_in_order(commits) for commits in rows],
        )


def decoded(
    model: Model, name: str, plan: Plan, prompt: int, new: int, rows: Sequence[int], rounds: int
) -> Iterator[dict[str, Any]]:
    """Rows of `bench speed`, with its keys: None where a key means nothing here. A plan with a cache is
    followed by the same without one, in turns with it, so that the ratios are the cache's: what a row's
    `prefill_ratio` and `decode_ratio` say of its time to the first commit and for each token after it.
    `cache_differs` is the share of tokens that differ from the run without a cache."""
    engines, mask = [Decoder(model, plan)], denoiser(model).mask_id
    for count in rows:
        source = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, model.vocab, (count, prompt), generator=source)
        tokens[tokens == mask] = (mask + 1) % model.vocab  # a prompt with the mask id is refused
        runs: list[list[Written]] = []
        with torch.inference_mode():
            first = engines[0].write(tokens[:, : min(64, prompt)], min(new, 8))
            if "cache none" not in first.how and len(engines) == 1:
                engines.append(engines[0].uncached())
            for _ in range(rounds):
                runs.append([engine.write(tokens, new) for engine in engines])
        for i, engine in enumerate(engines):
            mine = [turn[i] for turn in runs]
            gaps = [run.between for run in mine if run.between is not None]
            ttft, itl = median(run.ttft for run in mine), median(run.itl for run in mine)
            yield {
                "model": name,
                "engine": engine.name,
                "rows": count,
                "prompt": prompt,
                "new": new,
                "ttft_s": ttft,
                "itl_s": itl,
                "prefill_tokens_per_s": count * prompt / ttft,
                "decode_tokens_per_s": count / itl if itl else None,
                "bytes_per_token": None,
                "bandwidth_fraction": None,
                "flops_fraction": None,
                "prefill_ratio": median(turn[i].ttft / turn[0].ttft for turn in runs),
                "decode_ratio": median(turn[i].itl / turn[0].itl for turn in runs) if itl else None,
                "backend": engine.backend,
                "dtype": model.weight_dtype,
                "threads": torch.get_num_threads(),
                "model_calls": mine[0].calls,
                "tokens_per_call": new / mine[0].calls,
                "between_commits_s": median(gaps) if gaps else None,
                "decoding": mine[0].how,
                "cache_differs": differs(runs[0][0].tokens, runs[0][-1].tokens) if i == 0 else 0.0,
            }


def differs(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> float:
    """The share of places at which two runs wrote different tokens."""
    pairs = [x != y for mine, theirs in zip(a, b, strict=True) for x, y in zip(mine, theirs, strict=True)]
    return sum(pairs) / len(pairs)


def _in_order(commits: Sequence[Commit]) -> list[int]:
    placed = {p: t for c in commits for p, t in zip(c.positions, c.tokens, strict=True)}
    return [placed[p] for p in sorted(placed)]
