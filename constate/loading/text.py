"""What a checkpoint's folder says about text: its tokenizer, which ids are real, which end a text, how a
chat is laid out. The tokenizer is read by the tokenizers library itself. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.checkpoint import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class TextSide:
    """`vocab` counts the real ids: head rows from there on are padding. `eos_ids` is the union of what
    config.json, generation_config.json and the tokenizer's files name. `special_tokens` maps roles such
    as "bos_token" to their text, which chat templates print."""

    tokenizer: Tokenizer | None
    vocab: int
    eos_ids: frozenset[int]
    chat_template: str | None
    special_tokens: dict[str, str]


def read_text_side(folder: Path, config: Mapping[str, Any], rows: int) -> TextSide:
    """From the folder's files; `config` is config.json's content, `rows` how many ids the head scores.
    Raises ValueError for a file that cannot be understood."""
    tokenizer = _tokenizer(folder / "tokenizer.json")
    settings = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    special = {role: text for role, value in settings.items() if (text := _special(role, value)) is not None}
    eos = _eos(config) | _eos(read_json(folder / "generation_config.json"))
    if tokenizer is not None and "eos_token" in special:
        known = tokenizer.token_to_id(special["eos_token"])
        eos |= set() if known is None else {known}
    template = _template(folder / "chat_template.jinja", settings.get("chat_template"))
    return TextSide(tokenizer, _real_ids(tokenizer, rows), eos, template, special)


def _tokenizer(path: Path) -> Tokenizer | None:
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not read as a tokenizer ({error})") from error
    tokenizer.no_padding()  # a file may hold its training's settings, which would change prompts unseen
    tokenizer.no_truncation()
    return tokenizer


def _real_ids(tokenizer: Tokenizer | None, rows: int) -> int:
    if tokenizer is None or tokenizer.get_vocab_size(with_added_tokens=True) >= rows:
        return rows
    return min(rows, 1 + max(tokenizer.get_vocab(with_added_tokens=True).values()))  # ids may have holes


def _eos(config: Mapping[str, Any]) -> frozenset[int]:
    ids = config.get("eos_token_id")
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def _special(role: str, value: Any) -> str | None:
    """A special token's text, from either of the ways to write one."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if role.endswith("_token") and isinstance(text, str) else None


def _template(file: Path, setting: Any) -> str | None:
    """The chat template: its own file first, as newer folders have it, then the tokenizer's settings."""
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if isinstance(setting, list):  # several, by name
        setting = {each["name"]: each["template"] for each in setting}.get("default")
    return setting
