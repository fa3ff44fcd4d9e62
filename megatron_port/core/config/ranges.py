"""Ranges of values, stated in a field's type: ``num_layers: Size``. ``config.choices`` collects them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from megatron_port.core.config.urls import expanded, expanded_tokenizer

_PART = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
LONGEST_NAME = 200
"""Bytes of a run's name: file systems take 255 for a folder's, of which names made from it (NAME-tune) need some."""


@dataclass(frozen=True)
class Range:
    """The values of a field."""

    holds: Callable[[Any], bool]
    words: str
    """End of a sentence: it must be …"""
    least: int = 0
    """Smallest legal value of a size."""
    is_size: bool = False
    """A size of the split: while one of them is out of range, no layout can be judged."""


@dataclass(frozen=True)
class IsPath:
    """Marks a setting that is a path or URL: ``expand`` replaces ``~`` and variables when it is read."""

    expand: Callable[[str], str] = expanded


def path_mark(kind: Any) -> IsPath | None:
    """Return the mark of a type with its annotations: that of a path, or of an array of paths; None: another type."""
    if get_origin(kind) is tuple:
        return path_mark(get_args(kind)[0])
    return next((note for note in getattr(kind, "__metadata__", ()) if isinstance(note, IsPath)), None)


def at_least(least: int, *, is_size: bool = False) -> Range:
    """Return the range of numbers from ``least`` on."""
    return Range(lambda x: x >= least, f"at least {least}", least, is_size)


def between(low: int, high: int) -> Range:
    """Return the range from ``low`` to ``high``, both included."""
    return Range(lambda x: low <= x <= high, f"from {low} to {high}")


def _is_folder_name(text: str) -> bool:
    plain = bool(text.strip()) and text.isprintable() and not set(text) & set("/\\")
    return plain and text not in (".", "..") and len(text.encode()) <= LONGEST_NAME


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


Size = Annotated[int, at_least(1, is_size=True)]
SizeOrZero = Annotated[int, at_least(0, is_size=True)]
Count = Annotated[int, at_least(1)]
CountOrZero = Annotated[int, at_least(0)]
Positive = Annotated[float, Range(lambda x: x > 0, "above 0")]
NonNegative = Annotated[float, at_least(0)]
Ratio = Annotated[float, at_least(1)]
Fraction = Annotated[float, Range(lambda x: 0 <= x < 1, "at least 0 and below 1")]
Share = Annotated[float, Range(lambda x: 0 < x <= 1, "a share, above 0 and at most 1")]
SpikeFactor = Annotated[float, Range(lambda x: x == 0 or x > 1, "0 (off) or above 1")]
FolderName = Annotated[str, Range(_is_folder_name, "a folder name of at most 200 bytes, all of them printable")]
PathSetting = Annotated[str, IsPath()]
TokenizerName = Annotated[str, IsPath(expanded_tokenizer)]
PathText = Annotated[
    str, IsPath(),
    Range(lambda x: x.strip() and "\0" not in x and len(x.encode()) < 4096, "a path of at most 4095 bytes"),
]
AbsolutePath = Annotated[str, IsPath(), Range(lambda x: x.startswith("/"), "an absolute path")]
StepSet = Annotated[str, Range(lambda x: are_ranges(x, "", "next"), "empty, next, or steps as in 10-12,20")]
RankSet = Annotated[str, Range(lambda x: are_ranges(x, "all"), "all, or ranks as in 0,8-15")]
Text = Annotated[str, Range(lambda x: bool(x.strip()), "a non-empty string")]
