"""Values of settings: paths and URLs as users write them, ranges stated in a field's type, what looks like a secret."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from megatron_port.core.errors import ConfigError

# Paths and URLs as users write them: what a shell would expand in a path, and what a URL must look like.
PACKAGES = {"s3": "s3fs", "http": "aiohttp", "https": "aiohttp"}
"""Scheme → the package that fsspec needs for it."""


TOKENIZER_FILES = ("hf", "sentencepiece")
"""Kinds of tokenizers that name a file, as in ``hf:FILE``."""
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([^}]*)\})", re.ASCII)
_HOME = re.compile(r"~([\w.-]*)(?=/|$)")


def expanded(place: str) -> str:
    """Return a path with a leading ``~`` or ``~user``, and ``$NAME`` and ``${NAME}``, replaced as a shell does.

    In a URL only variables are. Other dollar signs stand for themselves.

    Raises:
        ConfigError: a variable that is not set or empty, or a user without a home.
    """
    def value(found: re.Match[str]) -> str:
        text = os.path.expandvars(found[0])
        if text in ("", found[0]):  # a folder of the variable's name, or one at the root, is never meant
            raise ConfigError(f"{place!r}: the environment variable {(found[1] or found[2])!r} is "
                              f"{'not set' if text else 'empty'}; set it, or write the path out")
        return text

    home = _HOME.match(place)
    if not home:
        return _VARIABLE.sub(value, place)
    folder = os.path.expanduser(home[0])
    if folder.startswith("~"):
        raise ConfigError(f"{place!r}: the home of {home[1] or 'this user'!r} is not known; write the path out, or "
                          f"./{place} for a folder of that name")
    return folder + _VARIABLE.sub(value, place[home.end():])


def expanded_tokenizer(name: str) -> str:
    """Return a tokenizer's name with its file :func:`expanded`, where it names one. Raises ConfigError."""
    kind, _, file = name.partition(":")
    return f"{kind}:{expanded(file)}" if kind in TOKENIZER_FILES else name


def is_remote(place: object) -> bool:
    """Whether ``place`` is a URL, and not a path of this machine."""
    return "://" in str(place)


def url_fault(url: str, *, writable: bool = False) -> str:
    """Return what is wrong with a URL, for the configuration; empty: nothing."""
    scheme, _, rest = url.partition("://")
    known = [s for s in PACKAGES if not writable or not s.startswith("http")]
    if scheme not in known:
        return f"{url!r} must start with {' or '.join(f'{s}://' for s in known)}"
    if not rest.strip("/"):
        return f"{url!r} names no {'bucket' if scheme == 's3' else 'server'}"
    if scheme.startswith("http") and ("@" in rest.partition("/")[0] or "?" in rest):
        return f"{scheme}://… with credentials or a query; only plain addresses are read"
    return ""


def local_path(name: str) -> Path:
    """Return ``name``, :func:`expanded`, as a path of this machine.

    Raises:
        ConfigError: it is a URL, which a path would cut short, or names a variable that is not set.
    """
    if is_remote(name):
        raise ConfigError(
            f"{name}: a store is not supported here: this command reads and writes files of this machine; copy it here "
            "first (`megatron-port checkpoint pull URL FOLDER` and `checkpoint push` do that for checkpoints)"
        )
    return Path(expanded(name))


# Ranges of values, stated in a field's type: ``num_layers: Size``. ``config.choices`` collects them.

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


# What looks like a password or a key, in a name or in a text: such things are refused in configurations, and taken
# out of diagnostics (``io.logging``). Pure; it knows shapes, not the secrets of this environment.

_NAME = re.compile(
    r"(^|_)(PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIALS?|TOKEN|WEBHOOK)(_|$)|(API|ACCESS|PRIVATE|SECRET|AUTH)_?KEY"
)
HIDDEN = "***"
_URL = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]{0,20}://)(?:[^\s/@'\"]*:[^\s/@'\"]*|[^\s/@:'\"]{16,})@", re.IGNORECASE
)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|pypi-[\w-]{40,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL,
)
_BEARER = re.compile(r"\b(?P<how>Bearer|Basic)\s+[\w.~+/=-]{8,}")
# name=value and "name": "value"; a plain number is a token's id or a count.
_ASSIGNED = re.compile(
    r"(?P<name>(?:token|secret|passw(?:or)?d|passphrase|credentials?|(?:api|access|private|secret|auth)[_-]?key"
    r"|signature))(?P<sign>=|[\"']\s*:\s*)"
    r"(?!\d{1,9}(?![\w.-]))(?P<quote>[\"']?)[^\s&;,'\"]+(?P=quote)", re.IGNORECASE,
)


def secret_name(name: str) -> bool:
    """An environment variable of this name holds a secret, as far as its name says."""
    return bool(_NAME.search(name.upper()))


def shaped(text: str) -> str:
    """Return ``text`` without passwords in URLs and without keys that their form gives away."""
    text = _URL.sub(rf"\g<scheme>{HIDDEN}@", text) if "://" in text else text
    return _SHAPES.sub(HIDDEN, text)


def masked(text: str) -> str:
    """Return :func:`shaped` text, with the values of names that look like a secret's hidden too."""
    text = _BEARER.sub(rf"\g<how> {HIDDEN}", shaped(text))
    return _ASSIGNED.sub(rf"\g<name>\g<sign>\g<quote>{HIDDEN}\g<quote>", text)
