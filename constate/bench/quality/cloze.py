"""Cloze: which word ends this passage? It stood in the passage before, as the others did that are offered.

After LAMBADA (Paperno et al., 1606.06031), whose last words can be told from the whole passage but not from
the last sentence; made here from any book, without a download. Departures: four words to choose from, of
which every one has been read in the passage; no person has checked that a reader would find it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...core.model import Model
from .intervals import share
from .reading import book, fits
from .row import row
from .scorer import Scorer
from .texts import read, sentences

CHOICES = 4
PASSAGES = 200
WORDS = 120  # of a passage, at least
LEAST = 5  # letters of a word that is asked for


@dataclass(frozen=True)
class Question:
    """A passage without its last word, and words that might be it, the right one first."""

    passage: str
    words: tuple[str, ...]


def cloze(
    model: Model, name: str, text: str | None = None, *, most: int = PASSAGES, seed: int = 0
) -> dict[str, Any]:
    """One row: `score` is the share of passages whose own last word is the likeliest of CHOICES.

    A word's likelihood is that of all its tokens behind the passage. Raises ValueError for a model without
    a tokenizer and for a text that holds no such passage.
    """
    book(model, name, text)
    title, content = read(text)
    asked = list(questions(content, most, seed))
    if not asked:
        raise ValueError(f"{title}: no passage of {WORDS} words ends in one that it holds before, {name}")
    scorer = Scorer(model, name)
    right = torch.tensor([_chosen(scorer, q) == 0 for q in asked], dtype=torch.int64)
    score, low, high = share(right, torch.ones_like(right))
    return row(
        "cloze",
        model,
        name,
        seed=seed,
        setting=f"{title}, {CHOICES} words of the passage, passages of {WORDS} words and more",
        score=score,
        chance=1 / CHOICES,
        n=len(asked),
        low=low,
        high=high,
        text=title,
    )


def questions(content: str, most: int, seed: int) -> Iterator[Question]:
    """At most `most` passages spread over the text, the same for the same seed: whole sentences, the last of
    which ends in a lower-case word of LEAST letters that stands in an earlier sentence."""
    draw = random.Random(seed)
    told = sentences(content)
    sizes = [len(s.split()) for s in told]
    found: list[Question] = []
    for last in range(len(told)):
        first, count = last, sizes[last]
        while first and count < WORDS:
            first -= 1
            count += sizes[first]
        if count >= WORDS and (question := _question(told[first : last + 1], draw)):
            found.append(question)
    rows = min(most, len(found))
    return (found[i * len(found) // rows] for i in range(rows))


def _question(told: list[str], draw: random.Random) -> Question | None:
    ending = re.fullmatch(rf"(.*\s)?([a-z]{{{LEAST},}})[.!?]", told[-1])
    if not ending or not ending[1]:
        return None
    before = " ".join(told[:-1])
    earlier = sorted({w for w in re.findall(r"[a-z]+", before) if len(w) >= LEAST})
    word = ending[2]
    others = [w for w in earlier if w != word]
    if word not in earlier or len(others) < CHOICES - 1:
        return None
    return Question(f"{before} {ending[1].rstrip()}", (word, *draw.sample(others, CHOICES - 1)))


def _chosen(scorer: Scorer, question: Question) -> int:
    """Which of the words the model finds likelier than every other, of all tokens of each behind the passage;
    -1 where it prefers none: the right one stands first and would win each tie."""
    passage = [scorer.start, *scorer.ids(question.passage)]
    words = [scorer.ids(" " + word) for word in question.words]
    fits(scorer.model, scorer.name, len(passage) + max(map(len, words)))
    scores = [likelihood for likelihood, _ in scorer.after([(passage, word) for word in words])]
    best = max(scores)
    return scores.index(best) if sum(not each < best for each in scores) == 1 else -1
