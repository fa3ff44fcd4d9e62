"""Remove leftovers of saves and checkpoints that are too old, where that is possible.

A checkpoint that is committed is saved. What cannot be removed (another member of a group owns it, the medium refuses)
is told once, left alone, and tried again at the next save. Names that a save needs are made free by renaming.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron_port.core.checkpoint.format import LATEST, MANIFEST, REPLACED, read_manifest, step_of
from megatron_port.core.checkpoint.lineage import Committer, epoch_of_temporary, temporary_name
from megatron_port.core.dist.lease import LeaseLost
from megatron_port.core.errors import CheckpointError, PortError
from megatron_port.core.io.atomic import write_bytes

Note = Callable[[str], None]
_UNFINISHED_LATEST = re.compile(rf"\.{LATEST}\.[0-9a-f]{{16}}\.tmp")


def work_folder(final: Path, committer: Committer, number: int = 0) -> Path:
    """Return where a checkpoint is written before it is committed as ``final``; with a ``number`` another such name."""
    return final.with_name(temporary_name(final.name, committer.fence.epoch, number))


def step_aside(path: Path, final: Path, committer: Committer) -> Path | None:
    """Give what has the name ``path`` that of a leftover of ``final``; None: nothing has it. Raises OSError."""
    if not os.path.lexists(path):
        return None
    unused = _unused(final, committer)
    os.rename(path, unused)
    if path.name in committer.told:
        committer.told.add(unused.name)
    return unused


def _unused(final: Path, committer: Committer) -> Path:
    number = 1
    while os.path.lexists(work_folder(final, committer, number)):
        number += 1
    return work_folder(final, committer, number)


def move_into_place(work: Path, final: Path, committer: Committer) -> None:
    """Commit: rename ``work`` to ``final``. Nothing is removed here. Raises OSError.

    A checkpoint of the same step steps aside first: at every instant one of the two has a checkpoint's name.
    """
    if os.path.lexists(final):
        aside = final.with_name(final.name + REPLACED)
        try:
            step_aside(aside, final, committer)
        except OSError:  # what has that name keeps it
            aside = _unused(final, committer)
        os.rename(final, aside)
    os.rename(work, final)


def remove_leftovers(directory: Path, committer: Committer, note: Note | None = None) -> None:
    """Delete what interrupted saves left: temporaries of this attempt and of those before it, ``step-*.old`` whose
    replacement is there, and a ``latest`` that was not finished. Those of a later attempt are in use.

    What cannot be deleted stays; ``note`` is told of each such path once per run.

    Raises:
        OSError: the directory cannot be listed.
        LeaseLost: it is another attempt's by now.
    """
    committer.fence.check()
    for path in list(directory.iterdir()):
        try:
            if _UNFINISHED_LATEST.fullmatch(path.name):  # of one writer, which is not writing it now
                path.unlink(missing_ok=True)
            epoch = epoch_of_temporary(path.name)
            stem = path.name.removesuffix(REPLACED)
            replaced = stem != path.name and step_of(stem) is not None and (directory / stem / MANIFEST).is_file()
            if replaced or (epoch is not None and epoch <= committer.fence.epoch):
                _remove(path)
        except OSError as error:
            _tell(path, error, committer, note)


def _remove(path: Path, tries: int = 3) -> None:
    """Delete a directory in which ranks of a dead attempt, on nodes that nobody can reach, may still write.

    Of a link only the link: what it leads to was put there by somebody else.
    """
    for left in reversed(range(tries)):
        try:
            return path.unlink(missing_ok=True) if path.is_symlink() else shutil.rmtree(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not left:
                raise


def _tell(path: Path, error: Exception, committer: Committer, note: Note | None) -> None:
    """Tell of a path that cannot be tidied, unless it was told before."""
    if note is None or path.name in committer.told:
        return
    committer.told.add(path.name)
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    note(f"{path} cannot be tidied away ({why}); it takes no part in this run, and each save tries again")


def tidy(directory: Path, final: Path, keep: int, note: Note | None, committer: Committer) -> None:
    """Rank 0, after the commit: ``latest``, leftovers, retention. Trouble here is worth a line, not the run."""
    def latest() -> None:
        write_bytes(directory / LATEST, f"{final.name}\n".encode(), guard=committer.fence.check)

    def retention() -> None:
        for path in _beyond(directory, final, keep, committer) if keep > 0 else ():
            _retire(path, committer, note)

    for what, work in (
        (LATEST, latest), ("leftovers", lambda: remove_leftovers(directory, committer, note)), ("retention", retention)
    ):
        try:
            work()
        except LeaseLost as error:
            if note is not None:
                note(f"{final.name} is saved, but cleaning up after it failed: {error}")
            return
        except (OSError, PortError) as error:
            if note is not None and what not in committer.told:
                committer.told.add(what)
                note(f"{final.name} is saved, but cleaning up after it failed ({what}): {error}; each save tries again")


def _retire(path: Path, committer: Committer, note: Note | None) -> None:
    """Remove a whole checkpoint. Raises LeaseLost."""
    try:
        if not path.is_symlink() and not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # a half of it would be no checkpoint
        committer.fence.check()
        # Renamed first: a half-deleted directory must not look like a checkpoint.
        doomed = step_aside(path, path.with_name(path.name.removesuffix(REPLACED)), committer)
        if doomed is not None:
            path = doomed
            _remove(path)
    except OSError as error:
        _tell(path, error, committer, note)


def _beyond(directory: Path, final: Path, keep: int, committer: Committer) -> list[Path]:
    """Committed checkpoints of this run other than the ``keep`` newest. ``final`` is the newest whatever its step."""
    ranked: list[tuple[tuple[int, int, int], Path]] = []
    for path in directory.iterdir():
        if step_of(path.name) is None or path == final:
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            # Damaged, or none: not worth a place among the kept, but not ours to delete either.
            continue
        if committer.owns(manifest.lineage):
            ranked.append((manifest.order, path))
    ranked.sort(reverse=True)
    return [path for _, path in ranked[keep - 1 :]]
