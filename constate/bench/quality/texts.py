"""Texts by name: those that ship, and any file. Knows no model."""

from __future__ import annotations

from pathlib import Path

from ...training.text import shipped

BOOK = "northanger_abbey"  # what no shipped model was trained on


def read(text: str | None) -> tuple[str, str]:
    """A text's name and content: a shipped one, or a UTF-8 file. Raises ValueError for neither."""
    name = text or BOOK
    if name in (BOOK, "shakespeare"):
        return name, shipped(name)
    try:
        return Path(name).name, Path(name).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"--text {name}: neither {BOOK}, shakespeare nor a file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {name}: not UTF-8 ({error}); plain text is wanted") from None
