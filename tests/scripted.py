"""A model whose next token is a function of everything it has read, written in the test.

It has the interface that decoding uses and no weights. Its state is the very history, so that a wrong row,
a lost or repeated token, or a state shared by two rows changes what it says next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from constate.core.cache import Cache
from constate.core.state import State, leaf
from constate.spans import Spans

Rule = Callable[[tuple[int, ...]], Sequence[float]]


@dataclass
class History(State):
    """ids (rows, capacity, 1) int64: all tokens; total (rows, 1) int64: their sum."""

    ids: Tensor = leaf("kv", grows=True)
    total: Tensor = leaf("state")


class Scripted:
    """`rule(history)` gives the logits after that history; `calls` records the span lengths of each call,
    `steps` how many of them were steps."""

    def __init__(self, rule: Rule, vocab: int, tokenizer: Tokenizer | None = None, eos: Sequence[int] = ()):
        self.rule, self.vocab, self.tokenizer, self.eos_ids = rule, vocab, tokenizer, frozenset(eos)
        self.calls: list[tuple[int, ...]] = []
        self.steps = 0
        self.architecture = None
        self.chat_template: str | None = None
        self.special_tokens: dict[str, str] = {}
        self.weight_bytes, self.weight_dtype = 1234, "float32"
        self.ops = SimpleNamespace(backend="scripted")
        self.fingerprint = "scripted"

    def init_cache(self, rows: int, capacity: int | None = None) -> Cache:
        room = capacity or 0
        ids = torch.zeros(rows, room, 1, dtype=torch.int64)
        states = (History(ids, torch.zeros(rows, 1, dtype=torch.int64)),)
        past = torch.zeros(rows, dtype=torch.int64)
        return Cache(states, (0,) * rows, room, capacity is not None, self.fingerprint, past)

    def forward(self, tokens: Tensor, spans: Spans, cache: Cache, *, at: str = "all") -> Tensor:
        assert at == "last", "decoding needs the last logits alone"
        assert spans.total > 0, "a call without a token"
        return self._absorb(tokens, spans, cache)

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        self.steps += 1
        return self._absorb(tokens, Spans.ones(cache.rows), cache)

    def _absorb(self, tokens: Tensor, spans: Spans, cache: Cache) -> Tensor:
        assert spans.rows == cache.rows
        cache.reserve(spans.lengths)
        self.calls.append(spans.lengths)
        state = cache.states[0]
        assert isinstance(state, History)
        logits = []
        for r, (part, length) in enumerate(zip(spans.slices(), cache.lengths, strict=True)):
            new = tokens[part]
            state.ids[r, length : length + len(new), 0] = new
            state.total[r] += new.sum()
            history = tuple(state.ids[r, : length + len(new), 0].tolist())
            assert sum(history) == int(state.total[r])
            logits.append(list(self.rule(history)) if len(new) else [torch.nan] * self.vocab)
        cache.advance(spans.lengths)
        return torch.tensor(logits, dtype=torch.float32)

    @property
    def any(self) -> Any:
        """Itself, where a Model is asked for."""
        return self


def histories(model: Scripted, cache: Cache) -> list[list[int]]:
    state = cache.states[0]
    assert isinstance(state, History)
    return [state.ids[r, :n, 0].tolist() for r, n in enumerate(cache.lengths)]


def chaotic(vocab: int, spread: float = 3.0) -> Rule:
    """Logits drawn anew for every history."""

    def rule(history: tuple[int, ...]) -> list[float]:
        source = Random(str(history))
        return [source.gauss(0.0, spread) for _ in range(vocab)]

    return rule


def speaker(script: Sequence[int], after: int, vocab: int) -> Rule:
    """Says `script` after `after` tokens, then its last id for ever."""

    def rule(history: tuple[int, ...]) -> list[float]:
        said = len(history) - after
        logits = [0.0] * vocab
        logits[script[min(said, len(script) - 1)]] = 5.0
        return logits

    return rule


def byte_bpe(vocab: int = 300, text: str = "the cat and the other hat; then that") -> Tokenizer:
    """A byte-level BPE: <|end|> is id 0, then the 256 bytes, then a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer
