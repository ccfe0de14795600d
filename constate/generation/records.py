"""What goes into a generation and what comes out of it: options, events, results. Knows no model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import index
from pathlib import Path
from typing import Any, Self

from ..core.sampling import Sampling
from ..diffusion_lm.plan import Plan

Prompt = str | Sequence[int]
PLANNED = frozenset(f.name for f in fields(Plan))


@dataclass(frozen=True)
class Settings:
    """The options of `generate` and `stream`, checked. Raises ValueError for a value out of range.

    `infill` is text to the right of what is to be written: one for all prompts, or one for each. `plan`
    gathers the options of masked diffusion, None where none is given.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    n: int = 1
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    chat: bool = False
    load_state: str | Path | None = None
    save_state: str | Path | None = None
    infill: Prompt | Sequence[Prompt] | None = None
    plan: Plan | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Settings with the options of a Plan set apart; those that are None stay at their defaults."""
        planned = {name: options[name] for name in PLANNED & options.keys() if options[name] is not None}
        others = {name: value for name, value in options.items() if name not in PLANNED}
        return cls(**others, plan=Plan(**planned) if planned else None)

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "seed", "n"):
            try:
                object.__setattr__(self, name, index(getattr(self, name)))
            except TypeError:
                raise ValueError(f"{name}={getattr(self, name)!r}: a whole number is wanted") from None
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: at least 0 is wanted")
        if self.n < 1:
            raise ValueError(f"n={self.n}: at least one sample of each prompt is wanted")
        if "" in self.stops:
            raise ValueError("stop: an empty string would end every text before it begins; leave it out")
        if self.save_state is not None:
            _check_place(Path(self.save_state))
        _ = self.sampling

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)


def _check_place(path: Path) -> None:
    """That a file can be written there, before the work whose result it is to hold."""
    folder = path.absolute().parent
    if path.exists() and not path.is_file():  # a device would be replaced, not written to
        raise ValueError(f"save_state={str(path)!r} is there and no file: the name of a file is wanted")
    if not folder.is_dir():
        raise ValueError(f"save_state={str(path)!r}: there is no such folder; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"save_state={str(path)!r}: nothing can be written in that folder")


@dataclass(frozen=True)
class Usage:
    """What one result cost. Bytes, seconds, tokens.

    `prompt_tokens` were given, infill included (a loaded state's are not among them). `model_calls` were
    made until this row ended, and `tokens_per_call` is new tokens over that; the calls of a batch serve all
    its rows. `ttft_s` is the time to the first token, wherever it stands, `itl_s` the median time between
    tokens, each an equal share of its commit's, `between_commits_s` the median time between commits of one
    or more tokens; None where there are not that many. `tokens_per_s` is new tokens over the whole time to
    the last. State, conv and KV bytes are this row's own, as held at its end; `kv_bytes_used` is what its
    tokens need of them. `decoding` says in words what was a matter of choice: the policy, the block and
    whether the cache was exact or approximate; nothing for one token after another. `dtype` is what the
    weights are stored in.
    """

    prompt_tokens: int
    new_tokens: int
    model_calls: int
    ttft_s: float | None
    itl_s: float | None
    tokens_per_s: float
    weight_bytes: int
    state_bytes: int
    conv_bytes: int
    kv_bytes: int
    kv_bytes_used: int
    backend: str
    dtype: str
    tokens_per_call: float
    between_commits_s: float | None
    decoding: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What was written after one prompt, one sample of it.

    `text` ends before a stop string and holds no end-of-text token; without a tokenizer it is empty.
    `tokens` are all that were decided up to its end: the end-of-text id that ended it and the tokens of a
    stop string included. `logprobs` (nats) belong to them, of the raw distribution over real ids at the
    time each was decided. `finish_reason` is "stop" (an end-of-text id or a stop string) or "length".
    """

    prompt: Prompt
    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    usage: Usage


@dataclass(frozen=True)
class Event:
    """News of one result: `index` counts prompts, and within a prompt its samples.

    `text` may be empty: part of a character, or what could begin a stop string, waits, and so does what
    stands behind a place that is not decided yet. The texts of one index join to its result's text.
    `tokens` are those just decided, at `positions` of the row's output, from 0. `finish_reason` and
    `result` come with the last.
    """

    index: int
    text: str
    tokens: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    finish_reason: str | None = None
    result: Result | None = None
