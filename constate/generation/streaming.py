"""Text as it comes: from one row's tokens to pieces of text that may be shown at once.

Knows a tokenizer and stop strings; nothing of models or decoding. What it hands out is never taken back:
bytes of an unfinished character, and text that could turn out to begin a stop string, wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HOLE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer puts for bytes that are no character (yet)
CONTEXT = 12  # tokens kept for what they do to their right; divides into whole characters of 1 to 4 bytes
WINDOW = 48  # tokens decoded at a time, so that the work a token is bounded


class Characters:
    """Whole characters from tokens. Special tokens have no text.

    `context`: the tokens before the first; some tokenizers drop a space where a text begins. `whole` says
    that they end with a whole character; otherwise one that they leave unfinished is shown once complete.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), whole: bool = False):
        self._tokenizer = tokenizer
        self._ids = list(context[-CONTEXT:])
        text = self._text(self._ids)
        self._sent = len(text) if whole else _settled(text)

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        self._ids.append(token)
        text = self._text(self._ids)
        settled = _settled(text)
        new = text[self._sent : settled]
        self._sent = max(self._sent, settled)
        if settled == len(text) and len(self._ids) > WINDOW:
            self._forget()
        return new

    def rest(self) -> str:
        """What is left when no token follows: holes, where a character stayed unfinished."""
        text = self._text(self._ids)
        new, self._sent = text[self._sent :], len(text)
        return new

    def _forget(self) -> None:
        """Keep the last tokens alone, if they are text by themselves."""
        last = self._ids[-CONTEXT:]
        text = self._text(last)
        if text and HOLE not in text:
            self._ids, self._sent = last, len(text)

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class TextStream:
    """One row's text up to its first stop string; `take` hands out the pieces, which join to the whole.

    The first stop string is the one completed first, whatever tokens the text comes in; of several
    completed by the same character, the longest. Without a tokenizer every text is empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        context: Sequence[int] = (),
        stop: Sequence[str] = (),
        whole: bool = False,
    ):
        self._characters = Characters(tokenizer, context, whole) if tokenizer else None
        self._stop = tuple(stop)
        self._read = 0
        self._waiting = ""
        self.stopped = False

    def read(self, tokens: Sequence[int]) -> bool:
        """Take in everything the row has written so far; whether a stop string is complete."""
        for token in tokens[self._read :]:
            if self._characters:
                self._add(self._characters.push(token))
        self._read = len(tokens)
        return self.stopped

    def take(self, last: bool = False) -> str:
        """The text that may be shown since the last call; with `last` all that is left."""
        if last and self._characters:
            self._add(self._characters.rest())
        end = len(self._waiting)
        if not (last or self.stopped):
            end -= _could_begin(self._waiting, self._stop)
        new, self._waiting = self._waiting[:end], self._waiting[end:]
        return new

    def _add(self, text: str) -> None:
        if self.stopped:
            return
        self._waiting += text
        # Text that began a stop string was never handed out, so that the whole match is still here.
        found = [(at + len(s), at) for s in self._stop if (at := self._waiting.find(s)) >= 0]
        if found:
            self._waiting = self._waiting[: min(found)[1]]
            self.stopped = True


def _settled(text: str) -> int:
    """How much of a text later tokens cannot change: all but the holes that end it. All of them, since a
    decoder with byte fallback makes holes of a whole run of bytes until its last character is complete."""
    return len(text.rstrip(HOLE))


def _could_begin(text: str, stop: Sequence[str]) -> int:
    """The length of the longest end of `text` that is the beginning of a stop string, but not all of it."""
    longest = max((len(s) - 1 for s in stop), default=0)
    for n in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-n:]) for s in stop):
            return n
    return 0
