"""A folder that appears whole or not at all: built under a temporary name beside its place, fsynced, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_port.core.checkpoint.disk import disk_error, free_bytes
from megatron_port.core.errors import CheckpointError
from megatron_port.core.io.atomic import fsync_directory, fsync_file


def tagged_folder(source: Path, latest: str, wanted: Callable[[Path], bool]) -> Path | None:
    """Return ``source``, or the folder in it that its file ``latest`` names, whichever is ``wanted``; None: neither."""
    if wanted(source):
        return source
    path = source / latest
    if path.is_file() and path.stat().st_size < 4096:
        tag = path.read_text(errors="replace").strip()
        if tag and "/" not in tag and not tag.startswith(".") and wanted(source / tag):
            return source / tag
    return None


@contextmanager
def building(out: Path, needed: int) -> Iterator[Path]:
    """A temporary folder that becomes ``out`` when the body ends, and is removed when it fails.

    ``needed``: bytes that the body will write; checked against the free space first.

    Raises:
        CheckpointError: ``out`` exists, too little space is free, or the file system refused.
    """
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists; give a new name, or remove it first")
    free = free_bytes(out.absolute())
    if free is not None and free < needed:
        raise CheckpointError(
            f"{out}: {needed} bytes are needed, {free} are free; free some space or use another folder"
        )
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            yield part
            for folder, _, files in os.walk(part):
                for name in files:
                    fsync_file(Path(folder, name))
                fsync_directory(Path(folder))
            os.rename(part, out)
            fsync_directory(out.parent)
        except OSError as error:
            raise disk_error(error, out, needed) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def scratch(beside: Path, needed: int) -> Iterator[Path]:
    """A folder for ``needed`` bytes of intermediate files on the file system of ``beside``; removed in any case."""
    free = free_bytes(beside.absolute())
    if free is not None and free < needed:
        raise CheckpointError(
            f"{beside}: importing needs {needed} bytes of free space (a copy of the source and the result), "
            f"{free} are free; free some space or use another folder"
        )
    folder = beside.with_name(f".{beside.name}.{os.getpid()}.scratch")
    try:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise disk_error(error, folder, needed) from error
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
