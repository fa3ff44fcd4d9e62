"""Links out of a folder that came from elsewhere: what they point to was never part of it."""

from __future__ import annotations

from pathlib import Path


def outside_target(path: Path) -> Path | None:
    """Return where a file of a folder really is, if that is outside the folder; None: within it.

    The hub's cache keeps its files in ``blobs`` beside ``snapshots``: such a link stays within the same model.
    """
    folder, target = path.parent.resolve(), path.resolve()
    home = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    return None if target.is_relative_to(folder) or target.is_relative_to(home) else target
