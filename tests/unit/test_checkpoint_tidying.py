"""What cannot be removed fails no save: links, folders of another member of a group, files where folders should be."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_roundtrip import ThreadPeers, over_threads, state, whole

from megatron_port.core.checkpoint.format import step_of
from megatron_port.core.checkpoint.reader import find_latest, open_checkpoint
from megatron_port.core.checkpoint.writer import Committer, save_checkpoint
from megatron_port.ext.storage.background import BackgroundSave

OTHERS = "of-another-member"
"""A file that marks a folder which cannot be removed."""


def link(name: str) -> Callable[[Path, Path], None]:
    return lambda folder, archive: (folder / name).symlink_to(archive, target_is_directory=True)


def dangling(name: str) -> Callable[[Path, Path], None]:
    return lambda folder, archive: (folder / name).symlink_to(archive / "gone")


def another(name: str) -> Callable[[Path, Path], None]:
    def make(folder: Path, archive: Path) -> None:
        shutil.copytree(archive, folder / name)
        (folder / name / OTHERS).touch()
    return make


def file(name: str) -> Callable[[Path, Path], None]:
    return lambda folder, archive: (folder / name).touch()


def directory(name: str) -> Callable[[Path, Path], None]:
    return lambda folder, archive: (folder / name).mkdir()


LEFT: dict[str, tuple[Callable[[Path, Path], None], int]] = {
    "linked-old": (link("step-00000001.old"), 0),
    "linked-temporary": (link("step-00000009.tmp"), 0),
    "linked-work": (link("step-00000002.tmp"), 0),
    "linked-checkpoint": (link("step-00000000"), 0),
    "dangling-checkpoint": (dangling("step-00000003"), 0),
    "another-old": (another("step-00000002.old"), 1),
    "another-temporary": (another("step-00000009.tmp"), 1),
    "another-work": (another("step-00000002.tmp"), 1),
    "another-checkpoint": (another("step-00000000"), 1),
    "another-same-step": (another("step-00000003"), 1),
    "file-temporary": (file("step-00000009.tmp"), 1),
    "file-work": (file("step-00000003.tmp"), 1),
    "directory-latest": (directory("latest"), 1),
    "directory-unfinished-latest": (directory(".latest.0123456789abcdef.tmp"), 1),
}
"""What lies there, and of how many paths a line is said."""


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("left", LEFT)
def test_what_cannot_be_removed_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str, asynchronous: bool
) -> None:
    """Five saves with retention succeed; what it is about is told once, and what a link leads to stays."""
    folder, said = tmp_path / "checkpoints", list[str]()
    save_checkpoint(tmp_path / "archive", state(0), [whole("w", torch.zeros(4))])
    archive = tmp_path / "archive" / "step-00000000"
    folder.mkdir()
    make, lines = LEFT[left]
    make(folder, archive)
    real = shutil.rmtree

    def refuses(path: Path, *args: Any, **kwargs: Any) -> None:
        if (Path(path) / OTHERS).exists() and not kwargs.get("ignore_errors"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        real(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", refuses)

    def act(peers: ThreadPeers) -> None:
        committer = Committer()
        saver = BackgroundSave(peers, folder, keep=2, note=said.append, committer=committer)
        for step in (1, 2, 3, 4, 2):
            pieces = [whole("w", torch.full((4,), float(step)))]
            if asynchronous:
                saver.start(state(step), pieces)
                done = saver.finish()
                assert done is not None and done.failure is None, done
            else:
                save_checkpoint(folder, state(step), pieces, keep=2, note=said.append, committer=committer)

    over_threads(1, act)
    newest = find_latest(folder)
    assert newest == folder / "step-00000002"
    assert open_checkpoint(newest).read("w", "weight", (0,), (4,)).tolist() == [2.0] * 4
    kept = sorted(p.name for p in folder.glob("step-*") if p.suffix not in (".tmp", ".old"))
    assert kept == ["step-00000002", "step-00000004"]
    # A folder that had a name which was wanted is told under the other one that it was given.
    assert len(said) == lines, said
    assert all("cannot be tidied away" in line or "cleaning up" in line for line in said)
    open_checkpoint(archive).verify()


def test_what_was_made_of_copies_takes_no_place_and_goes_with_the_next(tmp_path: Path) -> None:
    """Steps 3, 4 and 7 are recoveries. Two saves are kept."""
    committer, kept = Committer(), []
    for step, recovered in ((2, 0), (3, 1), (4, 1), (5, 0), (7, 1), (8, 0), (9, 0)):
        made = replace(state(step), extra={"recovered": True} if recovered else {})
        save_checkpoint(tmp_path, made, [whole("w", torch.zeros(4))], keep=2 + recovered, committer=committer)
        kept.append([step_of(p.name) for p in sorted(tmp_path.glob("step-*"))])
    assert kept == [[2], [2, 3], [2, 4], [2, 5], [2, 5, 7], [5, 8], [8, 9]]
