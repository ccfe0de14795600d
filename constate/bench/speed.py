"""How fast a model reads and writes, alone or against peers that hold the same weights.

All engines run in one process, on the same prompts, greedy, taking turns (A B A B), so that whatever
else the machine does falls on all alike: the ratios are of neighbours in time. Knows engines and the
model's own price; prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.model import Model
from ..diffusion_lm.plan import Plan
from .agreement import Agreement, Disagreement, agreement, compare
from .decoding import decoded, one_by_one
from .engine import Engine, Run
from .engines import Ours
from .machine import measured
from .peers import Missing, alone, made, missed
from .speed_rows import absent_row, row, timed_row

WARM = (64, 2)  # tokens of prompt and steps before the clock counts: threads, buffers, what is compiled


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
    plan: Plan | None = None,
    positions: int | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for each number of rows and each engine, ours first, with the KEYS of speed_rows.py.

    `ttft_s` is the median of the rounds; `itl_s`, `itl_p90_s` and `itl_p99_s` are percentiles of the seconds
    of all `steps_timed`, `new` in each round. `bytes_per_token` and `flops_per_token` are what a decode step
    takes by `model.cost`, per row; `bandwidth_fraction` and `flops_fraction` are its bytes a second and the
    prefill's FLOPs a second over `machine_bandwidth` and `machine_flops`, which were measured at the start.
    `prefill_ratio` and `decode_ratio`: how many times as long as ours this engine takes, the median of the
    rounds' own ratios, between the lowest and the highest. `tokens_equal` is the share of greedy tokens that
    were ours, compared before anything was timed, and `logits_differ` by how much logits did, over the
    largest; `check` compares the whole prompt and holds both to account. `model_calls` after the prompt's,
    `tokens_per_call` and `between_commits_s` are for comparison with models that decide several tokens a
    call; those are decoded by `plan` (see decoding.py), which others refuse. `source` is the same model in
    float32, which peers are made from where `model` is not. A peer that is absent, cannot hold the model or
    fails has a row with the `error`, and how to `install` it. `positions` are those that the model was made
    for. Raises ValueError for a peer that is not known, and Disagreement where `check` finds one.
    """
    if min(prompt, new, rounds, *rows) < 1:
        raise ValueError(f"prompt {prompt}, new {new}, rows {list(rows)}, rounds {rounds}: at least 1 each")
    flags = []
    if positions is not None and prompt + new > positions:
        flags.append(f"beyond the {positions:,} positions that the model was made for")
    if not one_by_one(model):
        if against or check:
            raise ValueError(
                f"{name} decides its tokens in any order, and no peer is set beside such a model: leave "
                "--against and --check out"
            )
        about = {"flags": flags, "device": str(model.device), "rounds": rounds, "warmup": 1, "graph": "plain"}
        about["state_dtype"] = str(model.state_dtype).removeprefix("torch.")
        for found in decoded(model, name, plan or Plan(), prompt, new, rows, rounds):
            yield row(**found, **about)
        return
    if plan is not None:
        raise ValueError(
            f"{name} writes one token after another: policy, steps, block and cache mean nothing"
        )
    if check and model.weight_dtype != "float32":
        raise ValueError(
            "--check holds float32 engines to 1e-4; in a narrower dtype each rounds in its own way"
        )
    with alone(model):
        peers, failed = made(against, model, source or model, new)
        engines = [Ours(model, new), *peers]
        # A CPU computes in float32, whatever the weights are stored as.
        machine = measured(str(model.device), torch.float32 if model.device.type == "cpu" else model.dtype)
        for count in rows:
            told = {"model": name, "rows": count, "prompt": prompt, "new": new, "rounds": rounds}
            told |= {"device": str(model.device), "threads": torch.get_num_threads(), "flags": flags}
            tokens = _prompts(model, count, prompt)
            agreed, lost = _agreed(engines, tokens, new, check)
            runs = _turns(engines, tokens, new, rounds, lost)
            for engine in engines:
                if engine.name in lost:
                    yield absent_row(lost[engine.name], told)
                else:
                    yield timed_row(engine, runs[engine.name], runs[engines[0].name], told, machine) | {
                        "tokens_equal": agreed[engine.name].tokens,
                        "logits_differ": agreed[engine.name].logits,
                    }
            for missing in failed:
                yield absent_row(missing, told)


def _prompts(model: Model, rows: int, prompt: int) -> Tensor:
    source = torch.Generator().manual_seed(0)
    return torch.randint(0, model.vocab, (rows, prompt), generator=source).to(model.device)


@torch.inference_mode()
def _agreed(
    engines: Sequence[Engine], tokens: Tensor, new: int, check: bool
) -> tuple[dict[str, Agreement], dict[str, Missing]]:
    """How far each engine writes what the first does, and those that could not be run at all."""
    ours = engines[0]
    agreed, lost = {ours.name: Agreement(None, None)}, {}
    for engine in engines[1:]:
        length, steps = (tokens.shape[1], new) if check else (min(WARM[0], tokens.shape[1]), min(8, new))
        try:
            if check:
                compare(ours.exact, engine.exact, tokens, new)
            agreed[engine.name] = agreement(ours, engine, tokens[:, :length], steps)
        except Disagreement:
            raise
        except Exception as error:  # its own, of whatever kind
            lost[engine.name] = missed(engine.name, error)
    return agreed, lost


@torch.inference_mode()
def _turns(
    engines: Sequence[Engine], tokens: Tensor, new: int, rounds: int, lost: dict[str, Missing]
) -> Mapping[str, list[Run]]:
    """Every engine's runs, one a round, after one to warm up. What fails on the way joins `lost`."""
    runs: dict[str, list[Run]] = {engine.name: [] for engine in engines}
    for turn in range(rounds + 1):
        prompts, steps = (tokens, new) if turn else (tokens[:, : WARM[0]], min(WARM[1], new))
        for engine in engines:
            if engine.name in lost:
                continue
            try:
                ran = engine.write(prompts, steps)
            except Exception as error:
                if engine is engines[0]:  # ours fails loudly
                    raise
                lost[engine.name] = missed(engine.name, error)
            else:
                runs[engine.name] += [ran] * bool(turn)
    return runs
