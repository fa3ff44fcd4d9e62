"""Copies of checkpoints in a store: pushed beside training, pulled to resume elsewhere.

::

    URL/latest                                          the name of the newest copy
    URL/step-00000120.commit-00000007.run-8f3a…/        one for each commit of a run: a step that was reached again is
        rank-00000.safetensors …                        another copy
        manifest.json                                   uploaded last: a copy without it is not whole

A place is of one run, that of its ``latest``: another's copies are refused there, unless it began at one of those.
Every rank uploads its own file from a thread, without any collective; rank 0 waits until the store lists all of them,
then adds the manifest. The hashes are those of the checkpoint. Nothing in the store is ever removed: set the bucket's
own rules for that.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from megatron_port.core.checkpoint.format import (
    LATEST,
    MANIFEST,
    FileEntry,
    Manifest,
    decode_manifest,
    directory_name,
    read_manifest,
)
from megatron_port.core.errors import CheckpointError, DamagedCheckpoint, PortError
from megatron_port.core.io.files import fsync_directory, fsync_file
from megatron_port.core.io.logging import Advance, Tally, silent
from megatron_port.ext.storage.store import Store

Note = Callable[[str], None]

THREADS = 8
"""Files of a checkpoint that are downloaded at a time."""
PATIENCE = 600.0
"""Seconds that rank 0 waits, at least, for the files of the others once its own is there."""
LARGEST_NAP = 5.0
_RUN = ".run-"
_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


def copy_name(manifest: Manifest) -> str:
    """Return the name of a checkpoint's copy: its step, which commit of the run's folder it is, and the run's id."""
    return f"{directory_name(manifest.state.step)}.commit-{manifest.lineage.commit:08d}{_suffix(manifest.lineage.run)}"


def _suffix(run: str) -> str:
    """Return what a run adds to the names of its copies; nothing, where it has no id."""
    safe = run if _ID.fullmatch(run) else xxhash.xxh3_128_hexdigest(run.encode())
    return f"{_RUN}{safe}" if run else ""


def owner_suffix(store: Store) -> str:
    """Return the suffix of the run that a place is of; empty: of none, or it has no id.

    Copies of versions that did not name the run are asked by their manifest.
    """
    name = _latest(store)
    if not name or _RUN in name:
        return _run_of(name)
    try:
        manifest = decode_manifest(b"".join(store.pieces(f"{name}/{MANIFEST}")), store.place(f"{name}/{MANIFEST}"))
    except (FileNotFoundError, CheckpointError):
        return ""
    return _suffix(manifest.lineage.run)


def refuse_another_runs(store: Store, run: str, origin: str = "") -> None:
    """Raise CheckpointError if a place is of another run.

    Args:
        run: id of the run whose copy is to come there; empty: unknown, nothing is refused.
        origin: id of the run at whose checkpoint it began, whose place it may take over.
    """
    there = owner_suffix(store)
    if run and there and there not in (_suffix(run), _suffix(origin)):
        raise CheckpointError(
            f"{store.url} holds copies of another run (id {there.removeprefix(_RUN)}; this one is {run}): two runs of "
            "one name would take turns as the newest there. Choose another name or another checkpoint.mirror; to "
            f'continue that run, start with checkpoint.resume = "{store.url}"'
        )


def _latest(store: Store) -> str:
    """Return the name in ``latest``; empty: there is none."""
    try:
        return b"".join(store.pieces(LATEST)).decode("utf-8", "replace").strip()[:200]
    except FileNotFoundError:
        return ""


def push_file(store: Store, name: str, path: Path, entry: FileEntry, *, verify: bool) -> None:
    """Upload one data file; ``verify``: read it back and compare it with its hash.

    Raises:
        CheckpointError: the store refused, or what it gives back is something else.
    """
    store.put(path, name)
    found = store.info(name).size
    if found != entry.size:
        raise CheckpointError(f"{store.place(name)}: {found} bytes arrived of {entry.size}")
    if verify and (got := _hash(store.pieces(name))) != entry.hash:
        raise CheckpointError(f"{store.place(name)}: reads back with hash {got}, and {path} has {entry.hash}")


def push(path: Path, url: str, *, verify: bool = True, advance: Advance = silent) -> str:
    """Copy a whole checkpoint into a store; return the URL of the copy. Raises CheckpointError.

    ``advance`` is called with the bytes of the files that are there.
    """
    store, manifest = Store(url, CheckpointError), read_manifest(path)
    name, parent = copy_name(manifest), manifest.lineage.parent
    refuse_another_runs(store, manifest.lineage.run, "" if parent is None else parent.run)
    total, done = sum(entry.size for entry in manifest.files.values()), 0
    for file, entry in manifest.files.items():
        push_file(store, f"{name}/{file}", path / file, entry, verify=verify)
        done += entry.size
        advance(done, total)
    _seal(store, name, path)
    return store.place(name)


def _seal(store: Store, name: str, path: Path) -> None:
    """All files are there: add the manifest, which makes a checkpoint of them, and name the copy as the newest."""
    store.put(path / MANIFEST, f"{name}/{MANIFEST}")
    store.write(LATEST, name.encode())


def pull(url: str, folder: Path, note: Note = lambda line: None, *, advance: Advance = silent) -> Path:
    """Copy a checkpoint from a store into ``folder``; return its directory. One that is there already is kept.

    Args:
        url: of one copy, or of what they were pushed to, whose newest is taken.
        advance: called with the bytes that have arrived.

    Raises:
        CheckpointError: none is there, the store cannot be reached, or ``folder`` cannot be written.
        DamagedCheckpoint: a file is not what the manifest records.
    """
    store = _one(url)
    work = folder / f".pull-{os.getpid()}.tmp"
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        _download(store, MANIFEST, work / MANIFEST)
        manifest = read_manifest(work)
        target = folder / directory_name(manifest.state.step)
        if _same(work / MANIFEST, target / MANIFEST):
            return target
        began = time.monotonic()
        with ThreadPoolExecutor(THREADS) as pool:
            arrived = Tally(advance, sum(e.size for e in manifest.files.values())).add
            for done in [pool.submit(_download, store, name, work / name, e, arrived)
                         for name, e in manifest.files.items()]:
                done.result()
        fsync_directory(work)
        aside = folder / f".pull-{os.getpid()}.old.tmp"
        if os.path.lexists(target):  # not removed first: it may be a link, or another's
            os.rename(target, aside)
        os.rename(work, target)
        shutil.rmtree(aside, ignore_errors=True)
        fsync_directory(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot hold a copy of {url} ({error.strerror or error})") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    size = sum(entry.size for entry in manifest.files.values())
    note(f"copied {store.url} to {target}: {size / 1e6:.1f} MB in {time.monotonic() - began:.1f} s, hashes right")
    return target


def _one(url: str) -> Store:
    """The store of one copy, which is there as far as its manifest says."""
    store = Store(url, CheckpointError)
    for name in _candidates(store):
        one = Store(store.place(name), CheckpointError)
        try:
            one.info(MANIFEST)
        except FileNotFoundError:
            continue
        return one
    raise CheckpointError(f"{url}: no whole checkpoint there (step-NNNNNNNN.commit-NNNNNNNN.run-ID with {MANIFEST})")


def copies(url: str) -> list[tuple[str, str]]:
    """Return (name, URL) of the copies below a URL, newest first. Raises CheckpointError: there is none."""
    store = Store(url, CheckpointError)
    names = [name.partition(".commit-") for name in store.names() if name.startswith("step-")]
    found = ["".join(parts) for parts in sorted(names, key=lambda p: (p[2], p[0]), reverse=True)]
    if not found:
        raise CheckpointError(f"{url}: no checkpoint there (step-NNNNNNNN.commit-NNNNNNNN.run-ID)")
    return [(name, store.place(name)) for name in found]


def _candidates(store: Store) -> Iterator[str]:
    """Names of what may be a copy, best first: the URL itself, what ``latest`` names, all by commit and step."""
    yield ""
    newest, names = _latest(store), [name for name in store.names() if name.startswith("step-")]
    if newest:
        yield newest
        names = [name for name in names if _run_of(name) == _run_of(newest)] or names
    if len(runs := {_run_of(name) for name in names}) > 1:
        raise CheckpointError(
            f"{store.url} holds copies of {len(runs)} runs, and none that is whole is named as the newest; give the "
            f"URL of one copy, e.g. {store.place(max(names))}"
        )
    copies = [name.partition(".commit-") for name in names]
    yield from ("".join(parts) for parts in sorted(copies, key=lambda p: (p[2], p[0]), reverse=True))


def _run_of(name: str) -> str:
    """Return the suffix of a copy's run; empty: its name has none."""
    return name[name.find(_RUN):] if _RUN in name else ""


def _download(
    store: Store, name: str, path: Path, entry: FileEntry | None = None, arrived: Callable[[int], None] | None = None
) -> None:
    digest = xxhash.xxh3_128()
    try:
        with open(path, "xb") as stream:
            for piece in store.pieces(name):
                digest.update(piece)
                stream.write(piece)
                if arrived is not None:
                    arrived(len(piece))
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{store.place(name)}: no such object; the copy is not whole") from error
    fsync_file(path)
    if entry is not None and (path.stat().st_size, digest.hexdigest()) != (entry.size, entry.hash):
        raise DamagedCheckpoint(
            f"{store.place(name)}: {path.stat().st_size} bytes with hash {digest.hexdigest()}, the manifest says "
            f"{entry.size} with {entry.hash}; take another copy (checkpoint.resume = its URL)"
        )


def _same(a: Path, b: Path) -> bool:
    return b.is_file() and a.read_bytes() == b.read_bytes()


def _hash(pieces: Iterator[bytes]) -> str:
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _writer(file: str) -> int:
    """Return the rank that wrote a data file."""
    return int(file.removeprefix("rank-").partition(".")[0])


class Mirror:
    """The pushing side of one rank: a thread that copies one checkpoint after the other.

    Args:
        world: ranks that copy; a checkpoint of more ranks is shared out among them.
        note: called on rank 0, from the thread, once for each checkpoint.
        run, origin: ids of the run, and of the one at whose checkpoint it began; on rank 0.

    Raises:
        CheckpointError: the store cannot be reached or is another run's, before anything was trained.
    """

    def __init__(
        self, url: str, rank: int, world: int, *, verify: bool, note: Note, run: str = "", origin: str = ""
    ) -> None:
        self._world, self._given_up = world, threading.Event()
        self._store, self._rank, self._verify, self._note = Store(url, CheckpointError), rank, verify, note
        self._run_id, self._origin = run, origin
        if rank == 0:
            self._store.names()
            refuse_another_runs(self._store, run, origin)
        self._queue: queue.Queue[Path | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def add(self, path: Path) -> None:
        """Copy a committed checkpoint after those that were added before, unless it is there."""
        self._queue.put(path)

    def abandon(self) -> None:
        """End the thread after the file that it copies: the ranks start again, and copy what is left."""
        self._given_up.set()
        self._queue.put(None)

    def finish(self) -> None:
        """Wait until all that was added is copied, or was given up."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (path := self._queue.get()) is not None and not self._given_up.is_set():
            began = time.monotonic()
            try:
                place = self._copy(path)
            except (PortError, OSError) as error:
                if self._rank == 0 and not self._given_up.is_set():
                    self._note(f"{path.name} was not copied to {self._store.url}: {error}\ntraining continues")
                continue
            if self._rank == 0 and place:
                self._note(f"copied {path.name} to {place} in {time.monotonic() - began:.1f} s")

    def _copy(self, path: Path) -> str:
        """Return where the copy is; empty: it was there already."""
        manifest, began = read_manifest(path), time.monotonic()
        name = copy_name(manifest)
        with contextlib.suppress(FileNotFoundError):
            self._store.info(f"{name}/{MANIFEST}")  # comes last but for its name
            if self._rank == 0 and _latest(self._store) != name:
                self._store.write(LATEST, name.encode())
            return ""
        if self._rank == 0:
            refuse_another_runs(self._store, self._run_id, self._origin)
        for file, entry in manifest.files.items():
            if _writer(file) % self._world == self._rank:
                push_file(self._store, f"{name}/{file}", path / file, entry, verify=self._verify)
        if self._rank == 0:
            self._await_others(name, manifest, max(PATIENCE, 4 * (time.monotonic() - began)))
            _seal(self._store, name, path)
            self._origin = ""  # the place is this run's by now
        return self._store.place(name)

    def _await_others(self, name: str, manifest: Manifest, seconds: float) -> None:
        """Wait until the store lists every file in its size. Raises CheckpointError where one does not come."""
        store, nap, until = Store(self._store.place(name), CheckpointError), 0.1, time.monotonic() + seconds
        while True:
            there = store.names()
            absent = [file for file, entry in manifest.files.items() if there.get(file) != entry.size]
            if not absent:
                return
            if time.monotonic() > until or self._given_up.is_set():
                raise CheckpointError(
                    f"{len(absent)} of {len(manifest.files)} files did not come in {seconds:.0f} s, {absent[0]} among "
                    "them: a rank has lost the store, or is slower than its peers"
                )
            time.sleep(nap)
            nap = min(2 * nap, LARGEST_NAP)
