"""What the tiny models read: the shipped books, the tokenizer, and a user's own text.

Knows bytes, ids and what is held out; knows no model. Northanger Abbey is the test book and the
Shakespeare file the second test: no model and no tokenizer is ever trained on either.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ZOO = Path(__file__).parents[1] / "zoo"
TOKENIZER = ZOO / "tokenizer.json"
NORTHANGER_ABBEY = slice(1_766_235, 2_199_647)  # bytes of austen.txt
END, END_ID = "<|end|>", 0  # before and after every text
VOCAB = 1024
OPENING = 400_000  # characters of the Shakespeare file that are scored
HELD_OUT = 0.05  # of a user's text: its end
LEAST = 4096  # tokens to train on: a few rows of 1,024


@dataclass(frozen=True)
class Text:
    """Ids (n,) int64 and the count of UTF-8 bytes behind them, which turns nats a token into bits a byte."""

    name: str
    ids: Tensor
    nbytes: int

    @staticmethod
    def of(name: str, text: str, tokenizer: Tokenizer) -> Text:
        return Text(name, torch.tensor(tokenizer.encode(text).ids, dtype=torch.int64), len(text.encode()))


@dataclass(frozen=True)
class Corpus:
    """What is read in training, what is held out from it, and further texts to score."""

    train: Text
    held_out: Text
    others: tuple[Text, ...] = ()


def shipped(name: str) -> str:
    """A text of the package: "austen" (training books alone), "northanger_abbey" or "shakespeare"."""
    if name == "shakespeare":
        return _unpack("shakespeare.md.xz").decode()
    if name not in ("austen", "northanger_abbey"):
        raise ValueError(f"no text {name!r} ships; there are austen, northanger_abbey and shakespeare")
    before, book, after = _novels()
    return book if name == "northanger_abbey" else before + after


def austen(tokenizer: Tokenizer) -> Corpus:
    """Five novels to train on, as the two stretches around the test book; the test book; and the first
    400,000 characters of the Shakespeare file, three plays and the start of a fourth."""
    before, book, after = _novels()
    train = _joined("austen", [before, after], tokenizer)
    second = Text.of("shakespeare", shipped("shakespeare")[:OPENING], tokenizer)
    return Corpus(train, Text.of("Northanger Abbey", book, tokenizer), (second,))


def own_text(path: str | Path, tokenizer: Tokenizer) -> Corpus:
    """A UTF-8 file: its last twentieth is held out, cut at a line's end where there is one.

    Raises ValueError for a file that is absent, not UTF-8, or too short to hold one batch of each kind.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {path}: not UTF-8 ({error}); plain text is wanted") from None
    cut = int(len(text) * (1 - HELD_OUT))
    cut = text.rfind("\n", 0, cut) + 1 or cut
    name = Path(path).name
    train = _joined(name, [text[:cut]], tokenizer)
    held_out = Text.of(f"the end of {name}", text[cut:], tokenizer)
    if len(train.ids) < LEAST or not held_out.nbytes:
        raise ValueError(
            f"--text {path}: {len(train.ids):,} tokens to train on; at least {LEAST:,} are wanted (about "
            "12 KB of English), and a million reads better"
        )
    return Corpus(train, held_out)


def load_tokenizer(path: str | Path = TOKENIZER) -> Tokenizer:
    """The byte-level BPE of 1,024 ids that all tiny models share."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def train_tokenizer(text: str, vocab: int = VOCAB) -> Tokenizer:
    """A byte-level BPE of `vocab` ids: `<|end|>` is id 0, then the 256 bytes, then merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def _novels() -> tuple[str, str, str]:
    raw = _unpack("austen.txt.xz")
    book = NORTHANGER_ABBEY
    return raw[: book.start].decode(), raw[book].decode(), raw[book.stop :].decode()


def _unpack(name: str) -> bytes:
    return lzma.decompress((ZOO / "text" / name).read_bytes())


def _joined(name: str, parts: list[str], tokenizer: Tokenizer) -> Text:
    """Texts laid end to end, an end mark before the first and after each; marks are no bytes."""
    mark = torch.tensor([END_ID])
    texts = [Text.of(name, part, tokenizer) for part in parts]
    ids = torch.cat([mark, *(ids for text in texts for ids in (text.ids, mark))])
    return Text(name, ids, sum(text.nbytes for text in texts))
