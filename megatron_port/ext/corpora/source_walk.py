"""The files below input folders: each once, whatever links lead to it; what is left out is listed with the reason."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from megatron_port.core.data.format import MAGIC
from megatron_port.core.errors import DataError
from megatron_port.core.io.files import read_regular
from megatron_port.core.io.typed_json import WrongContent, parse_json
from megatron_port.ext.corpora.saved_dataset import parts_of

ASKED, HIDDEN, LINKED, SAME = "asked for (--skip)", "hidden", "link to a folder read already", "the same file again"
CORPUS, SUMMARY = "a tokenized corpus", "a summary of other files"
SUMMARIES = ("_metadata", "_common_metadata")
"""Parquet's: their rows are those of the files beside them."""


@dataclass(frozen=True)
class Skipped:
    """A file, or a hidden folder, that is not read."""

    path: Path
    reason: str
    bytes: int
    files: int = 1


@dataclass
class Walk:
    """Collector of the files below folders.

    Args:
        skip: patterns of names, or of paths below the folder, that are left out.
        split: of folders that ``datasets`` saved.
    """

    skip: Sequence[str] = ()
    split: str = "train"
    skipped: list[Skipped] = field(default_factory=list)
    _files: set[tuple[int, int]] = field(default_factory=set)
    _folders: set[tuple[int, int]] = field(default_factory=set)

    def file(self, path: Path) -> bool:
        """Return whether a file that was named is to be read: it was not skipped or met before."""
        if self._asked(path, path.parent):
            return self._leave(path, ASKED)
        return self._new(path)

    def folder(self, root: Path) -> list[Path]:
        """Return the files below a folder, sorted by path. Linked folders are followed.

        Raises:
            DataError: a folder that cannot be listed, or a link that leads nowhere.
        """
        found: list[Path] = []
        pending, links = deque([root]), deque[Path]()
        if not self._enter(root):
            self.skipped.append(Skipped(root, LINKED, 0, 0))
            return []
        while pending or links:
            if not pending:  # files and folders themselves come before links to them
                pending += self._link(links.popleft(), found)
                continue
            for path, kind in self._entries(pending.popleft(), root):
                if kind == "link":
                    links.append(path)
                elif kind == "folder":
                    if self._enter(path):
                        pending.append(path)
                elif self._new(path):
                    found.append(path)
        return sorted(found)

    def _entries(self, folder: Path, root: Path) -> Iterator[tuple[Path, str]]:
        """Yield (path, file | folder | link) of what is not left out."""
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"{folder}: cannot be listed ({error.strerror}); change its permissions, or leave it out "
                            f"with --skip {folder.name}") from error
        parts = parts_of(folder, self.split, required=folder == root)
        indices = [entry.name for entry in entries if entry.name.endswith(".idx")]
        corpora = {name[:-4] for name in indices if _is_index(folder / name)}
        for entry in entries:
            path = folder / entry.name
            left = self._reason(path, root, entry, corpora) or (parts.get(entry.name, "") if parts else "")
            if left:
                self._leave(path, left)
            else:
                yield path, "link" if entry.is_symlink() else "folder" if entry.is_dir() else "file"

    def _reason(self, path: Path, root: Path, entry: os.DirEntry[str], corpora: set[str]) -> str:
        """Why an entry is left out, by its name and type; empty: it is not."""
        if self._asked(path, root):
            return ASKED
        if entry.name.startswith("."):
            return HIDDEN
        if any(entry.name.startswith(f"{c}.") and _of_corpus(entry.name[len(c):]) for c in corpora):
            return CORPUS
        if entry.name in SUMMARIES:
            return SUMMARY
        if entry.name == "corpus.json" and _of_fetch(path):
            return "a record of data fetch"
        plain = entry.is_symlink() or entry.is_dir() or entry.is_file()
        return "" if plain else "no regular file (a pipe, a socket or a device)"

    def _link(self, path: Path, found: list[Path]) -> list[Path]:
        """Follow a link: a file is added to ``found``, a folder returned."""
        try:
            mode = os.stat(path).st_mode
        except OSError as error:
            raise DataError(f"{path}: a link that leads nowhere ({os.readlink(path)}: {error.strerror}); restore what "
                            f"it names, or leave it out with --skip {path.name}") from error
        if stat.S_ISDIR(mode):
            target = Path(os.path.realpath(path))
            if target in [(here := Path(os.path.realpath(path.parent))), *here.parents]:
                self.skipped.append(Skipped(path, "link to a folder around it", 0, 0))
            elif self._enter(path):
                return [path]
            else:
                self.skipped.append(Skipped(path, LINKED, 0, 0))
        elif not stat.S_ISREG(mode):
            self._leave(path, "no regular file (a pipe, a socket or a device)")
        elif self._new(path):
            found.append(path)
        return []

    def _asked(self, path: Path, root: Path) -> bool:
        below = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        return any(fnmatchcase(name, pattern.rstrip("/")) for pattern in self.skip for name in (path.name, below))

    def _enter(self, folder: Path) -> bool:
        return _add(self._folders, folder)

    def _new(self, path: Path) -> bool:
        return _add(self._files, path) or self._leave(path, SAME)

    def _leave(self, path: Path, reason: str) -> bool:
        if reason == ASKED and path.is_file():
            _add(self._files, path)  # nor is it read by a link to it
        if path.is_dir() and not path.is_symlink():
            sizes = [_size(Path(folder) / name) for folder, _, names in os.walk(path) for name in names]
            self.skipped.append(Skipped(path, reason, sum(sizes), len(sizes)))
        else:
            self.skipped.append(Skipped(path, reason, _size(path)))
        return False


def _add(known: set[tuple[int, int]], path: Path) -> bool:
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if (found.st_dev, found.st_ino) in known:
        return False
    known.add((found.st_dev, found.st_ino))
    return True


def _size(path: Path) -> int:
    try:
        found = os.stat(path)
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _is_index(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _of_corpus(ending: str) -> bool:
    return ending in (".bin", ".idx", ".mask", ".meta.json", ".chat.json") or ending.startswith(".tokenizer.")


def _of_fetch(path: Path) -> bool:
    """Whether a file is the record that ``data fetch`` keeps beside its texts."""
    try:
        raw = parse_json(read_regular(path, 1 << 16))
    except (OSError, WrongContent):
        return False
    return isinstance(raw, dict) and {"source", "licence", "sha256"} <= set(raw)
