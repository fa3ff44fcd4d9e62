"""Arrays that are built once in a shared folder, and memory-mapped by all processes: indices of samples.

Whoever holds the lock builds; the others wait for the files. The files appear by a rename, whole, and every writer
would write the same bytes, so where a file system has no locks several build at once and nothing is lost but time.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import xxhash
from numpy.lib.format import open_memmap

from megatron_port.core.data.indexed import CHUNK
from megatron_port.core.errors import DataError
from megatron_port.core.io.files import fsync_directory, fsync_file, read_regular, too_many_open, write_bytes
from megatron_port.core.io.typed_json import LARGEST, WrongContent, parse_json
from megatron_port.ext.corpora.checked_tokens import file_xxh3

POLL_S = 0.2
Make = Callable[[str, Any, tuple[int, ...]], np.ndarray]
"""``make(name, dtype, shape)``: an array to fill; backed by a file, so it costs no anonymous memory."""


def in_memory(name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Allocate in memory: a ``Make`` without files."""
    return np.empty(shape, dtype)


def content_key(*parts: object, arrays: Sequence[np.ndarray] = ()) -> str:
    """Return a file name that is a hash of ``parts`` and of the contents of ``arrays``."""
    digest = xxhash.xxh3_128(repr(parts).encode())
    for values in arrays:
        for start in range(0, len(values), CHUNK):
            digest.update(np.ascontiguousarray(values[start:start + CHUNK]).tobytes())
    return digest.hexdigest()


class IndexCache(NamedTuple):
    """Folder of arrays. ``check``: compare the files with their hashes first, and make them anew where they differ."""

    folder: Path
    check: bool = False


def cached_arrays(
    cache: IndexCache, key: str, names: Sequence[str], build: Callable[[Make], object]
) -> list[np.ndarray]:
    """Return the arrays of ``build``, memory-mapped from ``<folder>/<key>-<name>.npy`` and built when absent.

    Raises:
        DataError: the folder cannot be written.
    """
    directory, check = cache
    paths = [directory / f"{key}-{name}.npy" for name in names]
    found = None if check and not _whole(directory, key, paths) else _loaded(paths)
    if found is not None:
        return found
    if check:
        for path in paths:
            path.unlink(missing_ok=True)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / f".{key}.lock", "ab") as lock:
            while (found := _loaded(paths)) is None and not _locked(lock):
                time.sleep(POLL_S)
            if found is None and (found := _loaded(paths)) is None:
                _build(directory, key, paths, names, build)
                found = _loaded(paths)
    except OSError as error:
        raise DataError(f"{directory}: the sample index cannot be written ({error.strerror or error}); choose another "
                        "place with data.index_cache") from error
    if found is None:
        raise DataError(f"{directory}: the sample index {key} was written and cannot be read")
    return found


def _loaded(paths: Sequence[Path]) -> list[np.ndarray] | None:
    try:
        return [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, OSError) and (advice := too_many_open(error)):
            raise DataError(f"{paths[0].parent}: the sample index cannot be opened; {advice}") from error
        return None  # absent, or damaged: made anew


def _locked(lock: IO[bytes]) -> bool:
    """Take the lock; False while another process has it. True also where there are no locks."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        pass
    return True


def _build(directory: Path, key: str, paths: Sequence[Path], names: Sequence[str],
           build: Callable[[Make], object]) -> None:
    parts = {name: path.with_name(f".{path.name}.{os.getpid()}.tmp") for name, path in zip(names, paths)}
    made: dict[str, np.memmap] = {}

    def make(name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        made[name] = open_memmap(parts[name], mode="w+", dtype=dtype, shape=shape)
        with open(parts[name], "r+b") as stream:
            # A full disk is an error now, not a signal when a page is written.
            os.posix_fallocate(stream.fileno(), 0, os.fstat(stream.fileno()).st_size)
        return np.asarray(made[name])

    try:
        build(make)
        hashes = {}
        for name, path in zip(names, paths):
            made[name].flush()
            fsync_file(parts[name])
            hashes[path.name] = file_xxh3(parts[name])
        for name, path in zip(names, paths):
            os.replace(parts[name], path)
        fsync_directory(directory)
        write_bytes(directory / f"{key}.json", (json.dumps(hashes, indent=2) + "\n").encode())
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def _whole(directory: Path, key: str, paths: Sequence[Path]) -> bool:
    """Whether the files are what was written."""
    try:
        expected = parse_json(read_regular(directory / f"{key}.json", LARGEST))
        return all(file_xxh3(path) == expected.get(path.name) for path in paths)
    except (OSError, WrongContent, AttributeError):  # AttributeError: no table
        return False
