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
from .prompts import encode, listed, right_sides
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
    Of masked diffusion models alone: infill=None (text to the right of what is to be written, one for all
    prompts or one each), and those of `diffusion_lm.plan.Plan`: policy, steps, block, threshold,
    entropy_bound, confidence, order_noise, cache, refresh, guidance, eos, min_new_tokens.
    A seeded text depends on its own prompt alone, as far as the kernels give a row the same logits in
    every batch: float32 sums may differ in the last bits, which matters where two ids are that close.
    Raises ValueError for an option out of range, one that the model cannot heed, an empty prompt (but for
    masked diffusion), an id outside the vocabulary, text without a tokenizer, or a state of another model
    or with other rows; TypeError for an unknown option.
    """
    results = {e.index: e.result for e in stream(model, prompts, **options) if e.result}
    return [results[i] for i in sorted(results)]


def stream(model: Model, prompts: Prompt | Sequence[Prompt], **options: Any) -> Iterator[Event]:
    """As `generate`, but yields an Event whenever tokens are decided; the options are checked at once.

    A state is saved before the last event; if the stream is left early, none is.
    """
    settings = Settings.of(options)
    prompts = listed(prompts)
    if model.tokenizer is None and settings.stops:
        raise ValueError("stop strings need a tokenizer and this model has none; leave stop out")
    cache, note = _loaded(model, settings, len(prompts))
    requests, fresh = [], []
    for i, (prompt, right) in enumerate(
        zip(prompts, right_sides(settings.infill, len(prompts)), strict=True)
    ):
        tokens = encode(model, prompt, begins=cache is None, chat=settings.chat)
        pending = note["pending"][i] if "pending" in note else []
        after = encode(model, right, begins=False) if right else []
        fresh.append(len(tokens) + len(after))
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
                tuple(after),
                settings.plan,
            )
        )
    rows = [
        _Writing(model, prompt, count, request, request.seed - settings.seed + sample, settings.stops)
        for prompt, count, request in zip(prompts, fresh, requests, strict=True)
        for sample in range(settings.n)
    ]

    def finished(row: int, tokens: Sequence[int]) -> str | None:
        return "stop" if rows[row].text.read(tokens) else None

    decode = model.architecture.decode if model.architecture else autoregressive
    save = settings.save_state
    commits = decode(model, requests, finished, cache=cache, keep=save is not None)
    return _events(model, commits, rows, save)


def _events(
    model: Model, commits: Iterator[Commit], rows: Sequence[_Writing], save: str | Path | None
) -> Iterator[Event]:
    open_rows = len(rows)
    for commit in commits:
        row = rows[commit.row]
        delta = row.take(commit)
        result = row.result(model) if commit.finish else None
        open_rows -= bool(commit.finish)
        if save is not None and not open_rows:
            _save(save, rows)
        yield Event(commit.row, delta, commit.tokens, commit.positions, commit.finish, result)


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
        placed = chain.from_iterable(
            zip(c.positions, c.tokens, c.logprobs, strict=True) for c in self.commits
        )
        end = self.commits[-1].end
        return [(token, logprob) for place, token, logprob in sorted(placed) if end is None or place < end]

    def result(self, model: Model) -> Result:
        decided, last = self.decided, self.commits[-1]
        timed = [c for c in self.commits if c.tokens]
        gaps = [(b.seconds - a.seconds, len(b.tokens)) for a, b in pairwise(timed)]
        usage = Usage(
            prompt_tokens=self.given,
            new_tokens=len(decided),
            model_calls=last.calls,
            ttft_s=timed[0].seconds if timed else None,
            itl_s=median(gap / tokens for gap, tokens in gaps) if gaps else None,
            tokens_per_s=len(decided) / last.seconds if decided else 0.0,
            weight_bytes=model.weight_bytes,
            state_bytes=last.held["state"],
            conv_bytes=last.held["conv"],
            kv_bytes=last.held["kv"],
            kv_bytes_used=last.held["kv_used"],
            backend=model.ops.backend,
            dtype=model.weight_dtype,
            tokens_per_call=len(decided) / last.calls if decided else 0.0,
            between_commits_s=median(gap for gap, _ in gaps) if gaps else None,
            decoding=last.how,
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
