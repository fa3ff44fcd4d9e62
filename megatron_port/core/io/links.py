"""Links out of a folder that came from elsewhere: what they point to was never part of it."""

from __future__ import annotations

from pathlib import Path


def outside_target(path: Path) -> Path | None:
    """Return where a file of a folder really is, if that is outside the folder; None: within it.

    The hub's cache keeps the files of a model in ``models--OWNER--NAME/blobs``. Its snapshots link there, and so do
    folders that older versions of huggingface_hub downloaded to (``local_dir``).
    """
    folder, target = path.parent.resolve(), path.resolve()
    of_hub = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    return None if of_hub or target.is_relative_to(folder) else target
