"""One call for every model: prompts in, text out. How tokens are decided is the architecture's `decode`;
nothing here asks which kind that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..core.cache import Cache, read_header
from ..core.decode import Commit, Request, autoregressive
from .prompts import encode, listed
from .records import Event, Prompt, Result, Settings, Usage
from .streaming import TextStream

if TYPE_CHECKING:
    from ..core.model import Model


def generate(model: Model, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[Result]:
    """Text after each prompt, `n` results a prompt, in the order of the prompts.

    prompts: a string, or a list of strings or of token lists, of any lengths. They are decoded as one
    batch, with one model call a step for all.
    options, with their defaults: max_new_tokens=64, temperature=0.0 (greedy), top_k=0, top_p=1.0,
    min_p=0.0, repetition_penalty=1.0, seed=0 (sample j of any prompt draws from seed + j), n=1,
    stop=() (a string or several), ignore_eos=False, chat=False (each prompt is a user's message, put
    into the model's chat template), load_state=None and save_state=None (files; a state has a row for
    each result, and what follows continues as if there had been no break).
    A seeded text depends on its own prompt alone, as far as the kernels give a row the same logits in
    every batch: float32 sums may differ in the last bits, which matters where two ids are that close.
    Raises ValueError for an option out of range, an empty prompt, an id outside the vocabulary, text
    without a tokenizer, or a state of another model or with other rows; TypeError for an unknown option.
    """
    results = {e.index: e.result for e in stream(model, prompts, **options) if e.result}
    return [results[i] for i in sorted(results)]


def stream(model: Model, prompts: Prompt | Sequence[Prompt], **options: Any) -> Iterator[Event]:
    """As `generate`, but yields an Event whenever tokens are decided; the options are checked at once.

    A state is saved before the last event; if the stream is left early, none is.
    """
    settings = Settings(**options)
    prompts = listed(prompts)
    if model.tokenizer is None and settings.stops:
        raise ValueError("stop strings need a tokenizer and this model has none; leave stop out")
    cache, note = _loaded(model, settings, len(prompts))
    requests, fresh = [], []
    for i, prompt in enumerate(prompts):
        tokens = encode(model, prompt, begins=cache is None, chat=settings.chat)
        pending = note["pending"][i] if "pending" in note else []
        if not tokens and not pending:
            raise ValueError(f"prompt {i} is empty: a model writes after something, one token at the least")
        fresh.append(len(tokens))
        requests.append(
            Request(
                (*pending, *tokens),
                settings.max_new_tokens,
                settings.sampling,
                settings.seed + (note["sample"][i] if "sample" in note else 0),
                frozenset() if settings.ignore_eos else model.eos_ids,
                settings.n,
                frozenset(note["seen"][i]) if "seen" in note else frozenset(),
                note["drawn"][i] if "drawn" in note else 0,
            )
        )
    rows = [
        _Writing(model, prompt, count, request, request.seed - settings.seed + sample, settings.stops)
        for prompt, count, request in zip(prompts, fresh, requests, strict=True)
        for sample in range(settings.n)
    ]
    return _events(model, requests, rows, cache, settings.save_state)


def _events(
    model: Model,
    requests: Sequence[Request],
    rows: Sequence[_Writing],
    cache: Cache | None,
    save: str | Path | None,
) -> Iterator[Event]:
    decode = model.architecture.decode if model.architecture else autoregressive
    open_rows = len(rows)

    def finished(row: int, tokens: Sequence[int]) -> str | None:
        return "stop" if rows[row].text.read(tokens) else None

    for commit in decode(model, requests, finished, cache=cache, keep=save is not None):
        row = rows[commit.row]
        delta = row.take(commit)
        result = row.result(model) if commit.finish else None
        open_rows -= bool(commit.finish)
        if save is not None and not open_rows:
            _save(save, rows)
        yield Event(commit.row, delta, commit.tokens, commit.finish, result)


class _Writing:
    """One result in the making."""

    def __init__(
        self, model: Model, prompt: Prompt, given: int, request: Request, sample: int, stops: Sequence[str]
    ):
        whole = isinstance(prompt, str) and bool(prompt)
        self.prompt, self.given, self.request, self.sample = prompt, given, request, sample
        self.text = TextStream(model.tokenizer, request.tokens, stops, whole)
        self.pieces: list[str] = []
        self.commits: list[Commit] = []

    def take(self, commit: Commit) -> str:
        """Note a commit; the text that it lets out."""
        self.commits.append(commit)
        self.pieces.append(self.text.take(last=commit.finish is not None))
        return self.pieces[-1]

    @property
    def decided(self) -> list[tuple[int, float]]:
        """Tokens with their log-probabilities in the order of their places, whatever order they came in."""
        placed = (zip(c.positions, c.tokens, c.logprobs, strict=True) for c in self.commits)
        return [(token, logprob) for _, token, logprob in sorted(chain.from_iterable(placed))]

    def result(self, model: Model) -> Result:
        decided, last = self.decided, self.commits[-1]
        timed = [c for c in self.commits if c.tokens]
        gaps = [(b.seconds - a.seconds) / len(b.tokens) for a, b in pairwise(timed)]
        usage = Usage(
            prompt_tokens=self.given,
            new_tokens=len(decided),
            model_calls=last.calls,
            ttft_s=timed[0].seconds if timed else None,
            itl_s=median(gaps) if gaps else None,
            tokens_per_s=len(decided) / last.seconds if decided else 0.0,
            weight_bytes=model.weight_bytes,
            state_bytes=last.held["state"],
            conv_bytes=last.held["conv"],
            kv_bytes=last.held["kv"],
            kv_bytes_used=last.held["kv_used"],
            backend=model.ops.backend,
        )
        tokens, logprobs = [t for t, _ in decided], [p for _, p in decided]
        return Result(self.prompt, "".join(self.pieces), tokens, logprobs, last.finish or "length", usage)


def _loaded(model: Model, settings: Settings, prompts: int) -> tuple[Cache | None, dict[str, Any]]:
    """The starting state and its note, if one is asked for."""
    if settings.load_state is None:
        return None, {}
    cache = Cache.load(settings.load_state, model)
    if cache.rows != prompts:
        raise ValueError(
            f"{settings.load_state} holds the state of {cache.rows} rows and {prompts} prompts were given: "
            "give one for each row, in order; an empty one goes on where the row stopped"
        )
    return cache, read_header(settings.load_state)["note"]


def _save(path: str | Path, rows: Sequence[_Writing]) -> None:
    """Store the rows' states in order, and what continuing needs beside them: the last token of each row,
    which no state has absorbed, the ids it has met, which sample it is and how many uniforms that drew."""
    read = [(*row.request.tokens, *(token for token, _ in row.decided)) for row in rows]
    note = {
        "pending": [tokens[-1:] for tokens in read],
        "seen": [sorted({*row.request.seen, *tokens}) for row, tokens in zip(rows, read, strict=True)],
        "sample": [row.sample for row in rows],
        "drawn": [row.request.drawn + len(row.decided) for row in rows],
    }
    ends = [row.commits[-1].cache for row in rows]
    Cache.merge([cache for cache in ends if cache]).save(path, note)
