"""Sets of whole numbers as text: ``10-12,20``."""

from __future__ import annotations

import re

_PART = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def parse_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Return (first, last) of each part of ``10-12,20``, in order. Raises ValueError."""
    out = []
    for part in text.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{part.strip()!r} is neither a number nor FIRST-LAST")
        out.append((int(found[1]), int(found[2] or found[1])))
    return tuple(sorted(out))


def are_ranges(text: str, *words: str) -> bool:
    """Return whether ``text`` is one of ``words`` or can be parsed."""
    if text in words:
        return True
    try:
        parse_ranges(text)
    except ValueError:
        return False
    return True


def within(number: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    """Return whether ``number`` is in one of the ranges."""
    return any(first <= number <= last for first, last in ranges)
