"""Texts by name: those that ship, and any file. Knows models by name alone."""

from __future__ import annotations

import re
from pathlib import Path

from ...loading import checkpoints
from ...training.text import shipped

BOOK = "northanger_abbey"  # what no shipped model was trained on
SECOND = "shakespeare"
SHIPPED = (BOOK, SECOND)
WEB = ("smollm2",)  # trained on the open web, where both shipped texts stand many times over


def read(text: str | None) -> tuple[str, str]:
    """A text's name and content: a shipped one, or a UTF-8 file. Raises ValueError for neither.

    A file that is called as a shipped text keeps a dot before its name, so that it does not pass for that.
    """
    name = BOOK if text is None else text
    if name in SHIPPED:
        return name, shipped(name)
    title = Path(name).name
    if of(title) in SHIPPED:
        title = f"./{title}"
    try:
        return title, Path(name).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"--text {name}: neither {BOOK}, {SECOND} nor a file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {name}: not UTF-8 ({error}); plain text is wanted") from None


def sentences(content: str) -> list[str]:
    """A text's sentences, each on one line: split behind every ., ! and ? that a blank follows."""
    return [" ".join(s.split()) for s in re.split(r"(?<=[.!?])\s+", content)]


def of(setting: str) -> str:
    """The name of the text that a row's `setting` begins with."""
    return setting.partition(", ")[0]


def met(model: str, title: str) -> bool | None:
    """Whether the model read this text when it was trained, so that a score says little: None where that is
    not known."""
    if title not in SHIPPED:
        return None
    return True if model in WEB else False if model in checkpoints() else None
