"""How fast a model reads and writes, alone or against peers that hold the same weights.

All engines run in one process, on the same prompts, greedy, taking turns (A B A B), so that whatever
else the machine does falls on all alike: the ratios are of neighbours in time. Knows engines and the
model's own price; prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..core.model import Model
from ..diffusion_lm.plan import Plan
from .decoding import decoded, one_by_one
from .engines import PEERS, Engine, Ours, plain_peers
from .machine import Machine, measure, timed

CLOSE, UNDECIDED = 1e-4, 1e-3  # logits' bound of max(1, largest); best two closer than this may swap


@dataclass(frozen=True)
class Run:
    """One engine's turn: seconds until the first token, median seconds for each further one."""

    ttft: float
    itl: float


class Disagreement(Exception):
    """A peer with the same weights computed something else; its speed would mean nothing."""


def speed(
    model: Model,
    name: str,
    *,
    prompt: int = 512,
    new: int = 20,
    rows: Sequence[int] = (1,),
    against: Sequence[str] = (),
    rounds: int = 3,
    check: bool = False,
    source: Model | None = None,
    refused: Callable[[str, ValueError], None] | None = None,
    plan: Plan | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for each engine and number of rows, ours first, with the keys of `bench speed`.

    Seconds are medians over the rounds, and within a round over `new` steps. `bytes_per_token` is what a
    decode step must move by `model.cost`, per row; `bandwidth_fraction` and `flops_fraction` are that and
    the prefill's FLOPs a second over what this machine was measured to do at the start. `prefill_ratio`
    and `decode_ratio`: how many times as long as ours this engine takes, the median of the rounds' own
    ratios. `model_calls` after the prompt's, `tokens_per_call` and `between_commits_s` are for comparison
    with models that decide several tokens a call; those are decoded by `plan` (see decoding.py), which
    others refuse. `check` compares logits and greedy tokens before anything is timed. `source` is the same
    model in float32, which peers are made from where `model` is not. A peer that cannot hold the model is
    told to `refused`, where there is one, and left out. Raises ValueError for a peer that is not known or
    cannot hold this model, and Disagreement.
    """
    if min(prompt, new, rounds, *rows) < 1:
        raise ValueError(f"prompt {prompt}, new {new}, rows {list(rows)}, rounds {rounds}: at least 1 each")
    if unknown := [peer for peer in against if peer not in PEERS]:
        raise ValueError(f"--against {unknown[0]!r} is not known; known are {', '.join(PEERS)}")
    if not one_by_one(model):
        if against or check:
            raise ValueError(
                f"{name} decides its tokens in any order, and no peer is set beside such a model: leave "
                "--against and --check out"
            )
        yield from decoded(model, name, plan or Plan(), prompt, new, rows, rounds)
        return
    if plan is not None:
        raise ValueError(
            f"{name} writes one token after another: policy, steps, block and cache mean nothing"
        )
    if check and model.weight_dtype != "float32":
        raise ValueError(
            "--check holds float32 engines to 1e-4; in a narrower dtype each rounds in its own way"
        )
    with plain_peers():
        engines: list[Engine] = [Ours(model, new)]
        for peer in against:
            try:
                engines.append(PEERS[peer](model, source or model, new))
            except ValueError as error:
                if refused is None:
                    raise
                refused(peer, error)
        yield from _speed(model, name, engines, prompt, new, rows, rounds, check)


def _speed(
    model: Model,
    name: str,
    engines: Sequence[Engine],
    prompt: int,
    new: int,
    rows: Sequence[int],
    rounds: int,
    check: bool,
) -> Iterator[dict[str, Any]]:
    # A CPU computes in float32, whatever the weights are stored as.
    machine = measure(str(model.device), torch.float32 if model.device.type == "cpu" else model.dtype)
    for count in rows:
        source = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, model.vocab, (count, prompt), generator=source).to(model.device)
        with torch.inference_mode():
            for engine in engines[1:] if check else ():
                compare(engines[0], engine.exact, tokens, new)
            for engine in engines:  # warm up: threads, buffers, whatever is compiled on first use
                run(engine, tokens[:, : min(64, prompt)], 2)
            runs = [[run(engine, tokens, new) for engine in engines] for _ in range(rounds)]
        for i, engine in enumerate(engines):
            ratios = {
                "prefill_ratio": median(turn[i].ttft / turn[0].ttft for turn in runs),
                "decode_ratio": median(turn[i].itl / turn[0].itl for turn in runs),
            }
            mine = Run(median(turn[i].ttft for turn in runs), median(turn[i].itl for turn in runs))
            yield {
                "model": name,
                "engine": engine.name,
                "rows": count,
                "prompt": prompt,
                "new": new,
                **rates(engine.priced, mine, count, prompt, new, machine),
                **ratios,
                "backend": engine.backend,
                "dtype": engine.dtype,
                "threads": torch.get_num_threads(),
                "model_calls": new,
                "tokens_per_call": 1.0,
                "between_commits_s": mine.itl,
                "decoding": None,
                "cache_differs": None,
            }


def run(engine: Engine, tokens: Tensor, new: int) -> Run:
    """Time one greedy generation: the prompt to its first token, then `new` more."""
    device = str(tokens.device)
    ttft, ids = timed(lambda: engine.prefill(tokens).argmax(-1), device)
    steps = []
    for _ in range(new):
        seconds, ids = timed(lambda ids=ids: engine.step(ids).argmax(-1), device)
        steps.append(seconds)
    return Run(ttft, median(steps))


def rates(model: Model, mine: Run, rows: int, prompt: int, new: int, machine: Machine) -> Mapping[str, Any]:
    """Times as rates, and as fractions of what the machine can do."""
    step = model.cost(1, prompt + new // 2, rows)
    return {
        "ttft_s": mine.ttft,
        "itl_s": mine.itl,
        "prefill_tokens_per_s": rows * prompt / mine.ttft,
        "decode_tokens_per_s": rows / mine.itl,
        "bytes_per_token": step.traffic // rows,
        "bandwidth_fraction": step.traffic / mine.itl / machine.bandwidth,
        "flops_fraction": model.cost(prompt, 0, rows).total_flops / mine.ttft / machine.flops,
    }


def compare(ours: Engine, peer: Engine, tokens: Tensor, new: int) -> None:
    """Both engines on the same tokens, ours choosing. Raises Disagreement where logits or choices differ."""
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
