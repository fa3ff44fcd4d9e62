"""What looks like a password or a key, in a name or in a text: such things are refused in configurations, and taken
out of diagnostics (``io.logging``). Pure; it knows shapes, not the secrets of this environment.
"""

from __future__ import annotations

import re

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
    """The same, and without what is assigned to a name that looks like a secret's."""
    text = _BEARER.sub(rf"\g<how> {HIDDEN}", shaped(text))
    return _ASSIGNED.sub(rf"\g<name>\g<sign>\g<quote>{HIDDEN}\g<quote>", text)
