"""Errors that nobody foresaw: one line for the user, the traceback in a file for whoever fixes the program.

A terminal full of frames tells a user nothing, and thousands of ranks would each print theirs.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path

from megatron_port.core.errors import EnvironmentFault, PortError, shortened
from megatron_port.core.io.redact import redact

LINE_CHARACTERS = 500


class UnexpectedError(PortError):
    """Fault of the program itself: an exception that has no message for the user. ``__cause__`` is that exception."""

    is_reporter = True


def unexpected(error: Exception, folder: Path | None = None, name: str = "") -> PortError:
    """Return the error to report in place of ``error``; its traceback is written to a file that only the user reads.

    Args:
        folder: where the file goes; made if it is not there. None, or where that fails: the folder for temporary files.
        name: of the file; empty: a new one.
    """
    named = file_name_fault(error)
    if named is not None:
        return named
    text = redact("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    place = _written(text, folder, name)
    kept = f"its traceback is in {place}" if place else "its traceback could not be written"
    said = " ".join(str(error).split())
    what = f"{type(error).__name__}: {shortened(said, LINE_CHARACTERS)}" if said else type(error).__name__
    out = UnexpectedError(
        f"{what} (not foreseen: a fault of megatron_port or of a library; {kept}, and --debug prints it)"
    )
    out.__cause__ = error
    return out


def file_name_fault(error: Exception) -> EnvironmentFault | None:
    """Return what to tell of a file name that this locale cannot write; None: ``error`` is something else."""
    encoding = sys.getfilesystemencoding()
    if not isinstance(error, UnicodeEncodeError) or encoding == "utf-8" or error.encoding != encoding:
        return None
    out = EnvironmentFault(
        f"the file name {error.object!a:.200} cannot be written in this locale, whose encoding is {encoding}; "
        "export LC_ALL=C.UTF-8 (or PYTHONUTF8=1), or take a name of ASCII letters"
    )
    out.is_reporter = True
    out.__cause__ = error
    return out


def _written(text: str, folder: Path | None, name: str) -> Path | None:
    """Return the new file that holds ``text``; None where no folder takes it."""
    for place in (folder, Path(tempfile.gettempdir())):
        if place is None:
            continue
        try:
            place.mkdir(parents=True, exist_ok=True)
            handle, path = _opened(place, name)
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(text)
            return Path(path)
        except OSError:
            continue
    return None


def _opened(place: Path, name: str) -> tuple[int, str]:
    if not name:
        return tempfile.mkstemp(".txt", "megatron-port-traceback-", place)
    path = place / name
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), str(path)
