"""Patterns of weight names: `blocks.{i}.norm.weight`, and `*` for any name.

A mark such as `{i}` stands for a whole number, the same wherever it comes again. Knows no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

Binding = tuple[tuple[str, str], ...]  # what the marks stand for: (("i", "3"),)


def match(pattern: str, name: str) -> Binding | None:
    """What the pattern's marks stand for in this name; None where it does not fit."""
    found = _compiled(pattern).fullmatch(name)
    return tuple(sorted(found.groupdict().items())) if found else None


def write(patterns: Sequence[str], binding: Binding) -> list[str]:
    """The names that these patterns stand for."""
    values = dict(binding)
    return [re.sub(r"\{(\w+)\}|\*", lambda m: values[m[1] or "rest"], pattern) for pattern in patterns]


def folded(names: Sequence[str]) -> list[str]:
    """Names that differ in their first number alone as one: `blocks.{0-23}.norm.weight`."""
    groups: dict[tuple[str, str, bool], list[int]] = {}
    for name in names:
        head, *rest = re.split(r"\b(\d+)\b", name, maxsplit=1)
        number, tail = rest or ("", "")
        # A later mention of the same number means the same layer.
        tail = re.sub(rf"(?<=\.){number}(?=\.)", "{}", tail) if number else tail
        groups.setdefault((head, tail, bool(number)), []).append(int(number or 0))
    lines = []
    for (head, tail, numbered), numbers in groups.items():
        low, high = min(numbers), max(numbers)
        if len(numbers) == 1:
            mark = str(low)
        elif sorted(numbers) == list(range(low, high + 1)):
            mark = f"{{{low}-{high}}}"
        else:
            mark = f"{{{','.join(map(str, numbers))}}}"
        lines.append(head + mark + tail.replace("{}", mark) if numbered else head)
    return lines


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    seen: set[str] = set()

    def mark(found: re.Match[str]) -> str:
        first = found[1] not in seen
        seen.add(found[1])
        return f"(?P<{found[1]}>[0-9]+)" if first else f"(?P={found[1]})"

    text = re.escape(pattern).replace(r"\*", "(?P<rest>.+)")
    return re.compile(re.sub(r"\\\{(\w+)\\\}", mark, text))
