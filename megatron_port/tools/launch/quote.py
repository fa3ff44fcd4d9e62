"""Saying a value in a job script so that nothing but that value comes out.

A job script is read twice: by its scheduler, whose directives have rules of their own, and by bash. SLURM's rules are
known (:func:`sbatch_quote`). Those of the others differ between versions, so a value stands in their directives as one
plain word or not at all: :func:`directive_name` makes a word of a run's name, :func:`directive_word` refuses what is
none.
"""

from __future__ import annotations

import re
import unicodedata

from megatron_port.core.errors import ConfigError

PLACEHOLDER = re.compile(r"\{(\w*)\}")
PLACEHOLDERS = {"job_id": '"$SLURM_JOB_ID"', "user": '"$port_user"', "local_disk": '"$site_local_disk"'}
"""``{name}`` in an environment value → quoted variable that is set on the node."""

LONGEST_NAME = 100
"""Characters of a job's name."""
_PLAIN = re.compile(r"[\w./:@%+=-]+", re.ASCII)
"""Text that both readers take as it stands. A comma would do too, but not for shellcheck within an array."""


def shell_quote(text: str, field: str) -> str:
    """Return ``text`` as one word of bash, in single quotes unless it is plain.

    Raises:
        ConfigError: naming ``field``, for text that holds a control character or cannot be written as UTF-8.
    """
    _refuse(text, field)
    return text if _PLAIN.fullmatch(text) else "'" + text.replace("'", "'\\''") + "'"


def shell_fill(text: str, field: str, known: dict[str, str] | None = None) -> str:
    """Return ``text`` as one word of bash with its placeholders replaced by variables; everything else is literal.

    Raises:
        ConfigError: as :func:`shell_quote`.
    """
    known = PLACEHOLDERS if known is None else known
    pieces, start = [], 0
    for found in PLACEHOLDER.finditer(text):
        if found.group(1) in known:
            pieces += [text[start : found.start()], known[found.group(1)]]
            start = found.end()
    pieces.append(text[start:])
    quoted = [shell_quote(p, field) if i % 2 == 0 else p for i, p in enumerate(pieces) if p]
    return "".join(quoted) or "''"


def sbatch_quote(text: str, field: str) -> str:
    """Return ``text`` as (part of) one argument of an ``#SBATCH`` line.

    sbatch reads both kinds of quotes, takes a backslash as an escape anywhere, even within single
    quotes, and ends a line at an unquoted ``#``. Within double quotes with ``\\`` and ``"`` escaped
    every printable character survives (tested against sbatch's own parser); a line feed cannot be said.

    Raises:
        ConfigError: as :func:`shell_quote`.
    """
    _refuse(text, field)
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def directive_word(text: str, field: str) -> str:
    """Return ``text``, a plain word, for a directive of Flux, PBS or LSF.

    Raises:
        ConfigError: naming ``field``; it is no word of letters, digits and ``_ . / : @ % + = -``, or begins with ``-``.
    """
    _refuse(text, field)
    if not _PLAIN.fullmatch(text) or text.startswith("-"):
        raise ConfigError(
            f"{field} is {text!r}; a directive of this scheduler holds letters, digits and _./:@%+=- only, and does "
            "not begin with -"
        )
    return text


def directive_name(text: str) -> str:
    """Return a run's name as a word of such a directive, and of file names: other characters become ``-``."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")[:LONGEST_NAME] or "run"


def kubernetes_value(text: str) -> str:
    """Return the value of a pod's variable: Kubernetes replaces ``$(NAME)``, and ``$$`` stands for ``$``."""
    return text.replace("$", "$$")


def _refuse(text: str, field: str) -> None:
    for at, char in enumerate(text):
        if unicodedata.category(char) in ("Cc", "Cs"):  # controls; surrogates stand for bytes that are no UTF-8
            raise ConfigError(
                f"{field} has the character U+{ord(char):04X} at position {at + 1} of {text!r}; "
                "a job script cannot hold control characters or bytes that are no UTF-8"
            )
