"""Copies of the training state on a second node, and the way back from them where a node is lost.

Each rank sends its copy to the rank in the same place of the next node, which keeps it beside its own under the
sender's name. What travels is what a node's memory holds: the file and its list (``storage.copies``). It goes over a
connection of its own while the next steps are taken; the next copy waits until all ranks have this one on both nodes.
So wherever a fault strikes, all files of the last copy but one are on two nodes: two intervals are lost at most.

After the loss of a node no folder in memory holds all files. The ranks tell one another what their nodes hold, and each
file of the newest copy that is whole is written by one of its holders into the run's checkpoints, where rank 0 commits
it: the run continues from it as from any checkpoint, of any layout.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import os
import secrets
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.distributed import Store

from megatron_port.core.checkpoint.format import (
    Manifest,
    Parent,
    SavedState,
    directory_name,
    read_manifest,
    shard_name,
)
from megatron_port.core.checkpoint.reader import checkpoints_in
from megatron_port.core.checkpoint.shard import check_written, disk_error
from megatron_port.core.checkpoint.writer import (
    VISIBLE_SECONDS,
    Committer,
    await_visible,
    commit,
    listing_name,
    peers_of,
    prepare,
    tidy,
    together,
    work_folder,
)
from megatron_port.core.dist.agree import agreed, broadcast_text
from megatron_port.core.errors import CheckpointError, PeerLost
from megatron_port.core.io.files import fsync_file, write_text
from megatron_port.core.train.folders import FOLDER, run_folder
from megatron_port.core.train.hooks import Session
from megatron_port.ext.storage.copies import (
    SLOTS,
    TIERS,
    CopiesNotSaved,
    CopyKey,
    Whole,
    committed_here,
    copies_folder,
    copy_list,
    forget_damaged,
    no_memory,
    whole_copies,
    whole_entry,
)

_HEADER = struct.Struct("!BQQ")
"""Place among the two copies, bytes of the file, bytes of the list."""
_CONNECT_S, _TOKEN_S = 60.0, 5.0
_CLOSE_S = 2.0
_AGAIN_S = 3.0
"""After this time a copy that could not be saved is tried once more."""
_STORED = b"+"


class Partner:
    """Connections of one rank: to the next node's rank, which keeps its copies, and from the rank whose it keeps.

    Args:
        folder: of the copies on this node.
        rank: of this process; ``step`` ranks further on is the one that keeps its copies.
        master: address of rank 0's node, by which this host's own is found.
    """

    def __init__(self, folder: Path, store: Store, *, rank: int, world: int, step: int, master: str) -> None:
        self._folder, self._rank = folder, rank
        self.keeps = (rank - step) % world
        """Rank whose copies are kept here."""
        self._to = (rank + step) % world
        self._threads: list[threading.Thread] = []
        self._errors: list[tuple[int, Exception]] = []
        self._memory: dict[int, mmap.mmap] = {}
        token = secrets.token_hex(16)
        with _listener(master) as listener:
            address, port = listener.getsockname()[:2]
            store.set(f"partner/{rank}", json.dumps([address, port, token]))
            self._out = _connected(json.loads(store.get(f"partner/{self._to}")), self._to)
            self._in = _accepted(listener, token, self.keeps)

    def begin(self, slot: int, file: Path, listing: Path) -> None:
        """Send a copy that this rank has taken, and take the other's, while this returns."""
        self._run(self._to, lambda: self._send(slot, file, listing))
        self._run(self.keeps, self._receive)

    def _run(self, other: int, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except (OSError, CheckpointError) as error:
                self._errors.append((other, error))

        thread = threading.Thread(target=run, name=f"copies of rank {other}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _send(self, slot: int, file: Path, listing: Path) -> None:
        text = listing.read_bytes()
        size = file.stat().st_size if json.loads(text.partition(b"\n")[2])["file"] else 0
        self._out.sendall(_HEADER.pack(slot, size, len(text)))
        if size:
            with open(file, "rb") as stream:
                self._out.sendfile(stream, count=size)
        self._out.sendall(text)
        if self._out.recv(1) != _STORED:
            raise ConnectionError("its connection has ended")

    def _receive(self) -> None:
        slot, size, length = _HEADER.unpack(_exactly(self._in, _HEADER.size))
        folder = self._folder / SLOTS[slot]
        folder.mkdir(mode=0o700, exist_ok=True)
        listing = folder / listing_name(self.keeps)
        with contextlib.suppress(FileNotFoundError):
            listing.unlink()
        if size:
            _fill(self._in, memoryview(self._mapped(slot, folder / shard_name(self.keeps), size)))
        text = _exactly(self._in, length)
        unfinished = listing.with_suffix(".tmp")
        try:
            unfinished.write_bytes(text)
            os.replace(unfinished, listing)
        except OSError as error:
            raise no_memory(listing, error) from error
        self._in.sendall(_STORED)

    def _mapped(self, slot: int, path: Path, size: int) -> mmap.mmap:
        """Return the memory of a file of ``size`` bytes. It is used again for the next copy."""
        held = self._memory.get(slot)
        if held is None or len(held) != size:
            try:
                with open(path, "w+b") as stream:
                    os.posix_fallocate(stream.fileno(), 0, size)
                    held = self._memory[slot] = mmap.mmap(stream.fileno(), size)
            except OSError as error:
                raise no_memory(path, error, size) from error
        return held

    def finish(self) -> CheckpointError | None:
        """Wait until the last copy is on both nodes. Return what this node's memory refused.

        Raises:
            PeerLost: the other rank's connection has ended.
        """
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        for other, error in self._errors:
            if isinstance(error, CheckpointError):
                return error
            raise PeerLost(f"rank {self._rank} on {socket.gethostname()} lost contact with rank {other} while copies "
                           f"of the state were exchanged: {error.args[-1] if error.args else error}")
        return None

    def forget(self) -> None:
        """Drop the other rank's copies: the run goes back behind them."""
        for name in SLOTS:
            (self._folder / name / listing_name(self.keeps)).unlink(missing_ok=True)

    def close(self) -> None:
        """End the connections; what is under way on them ends too, before a later start writes there."""
        for sock in (self._out, self._in):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self._out.close()
        self._in.close()


def _listener(master: str) -> socket.socket:
    """Return a socket that listens on the address from which this host reaches the master's."""
    family = socket.AF_INET6 if ":" in master else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing, only chooses a route
        address = probe.getsockname()[0]
    listener = socket.socket(family)
    listener.bind((address, 0))
    listener.listen(8)
    listener.settimeout(_CONNECT_S)
    return listener


def _connected(where: list[Any], rank: int) -> socket.socket:
    address, port, token = where
    try:
        sock = socket.create_connection((address, port), timeout=_CONNECT_S)
        sock.sendall(token.encode())
        sock.settimeout(None)
        return sock
    except OSError as error:
        raise PeerLost(f"rank {rank} at {address}:{port} does not take copies of the state: {error}") from error


def _accepted(listener: socket.socket, token: str, rank: int) -> socket.socket:
    """Return the connection whose first bytes are the token; others are closed."""
    while True:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            raise PeerLost(f"rank {rank} does not send copies of its state: {error}") from error
        with contextlib.suppress(OSError):  # a stranger that says nothing, or goes
            sock.settimeout(_TOKEN_S)
            if hmac.compare_digest(_exactly(sock, len(token)), token.encode()):
                sock.settimeout(None)
                return sock
        sock.close()


def _fill(sock: socket.socket, target: memoryview) -> None:
    while target:
        count = sock.recv_into(target)
        if not count:
            raise ConnectionError("its connection has ended")
        target = target[count:]


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(sock, memoryview(data))
    return bytes(data)


# The way back: a copy whose files are on several nodes becomes a checkpoint of the run.

def committed_copies(session: Session, run: str, below: int = -1) -> list[tuple[Path, Manifest]]:
    """Return the run's copies to resume from, newest first, on rank 0; of several nodes one at most. Collective.

    Those on disks are looked at, and read through, only where none in memory is whole: they are not newer.
    ``run``, ``below``: as in ``storage.copies.whole_copies``.
    """
    tier, whole = "memory", whole_copies(session, run, below)
    if not whole and session.config.checkpoint.disk_interval:
        tier, whole = "disk", whole_copies(session, run, below, "disk")
    if session.info.num_nodes == 1:
        return committed_here(session, whole, tier)
    try:
        return commit_from_nodes(session, run, tier, whole)
    except CopiesNotSaved:
        if session.info.local_rank == 0:
            forget_damaged(session.config, below)  # the next start does not know of them
        raise


def commit_from_nodes(
    session: Session, run: str, tier: str, found: Sequence[Whole]
) -> list[tuple[Path, Manifest]]:
    """Commit the newest copy that no checkpoint of the run is newer than. Collective; returns it on rank 0.

    Of a copy and a checkpoint of one step the copy is taken: it has just been proved.

    Args:
        run: its id, on rank 0.
        tier: where they are (``storage.copies.TIERS``).
        found: the copies that are whole, newest first. One that cannot be committed, tried twice, is named in the log,
            and the next one is taken.

    Raises:
        CopiesNotSaved: none of them could be committed. A start without them would take the run back.
    """
    directory, folder, where = run_folder(session.config) / FOLDER, copies_folder(session.config, tier), TIERS[tier]
    saved = [-1, -1]
    if session.is_rank_zero:
        session.fence.run = run  # whose the commit is
    whole = agreed(lambda: checkpoints_in(directory, session.logger.log) if session.is_rank_zero else [])
    saved = list(max(((m.lineage.epoch, m.state.step) for _, m in whole if m.lineage.run == run), default=saved))
    saved = json.loads(broadcast_text(json.dumps(saved)) or "[]")
    newer = [copy for copy in found if [copy[0].epoch, copy[0].step] >= saved]
    why = ""
    for key, slot, writers in newer:
        for last in (False, True):
            try:
                path = _commit(session, directory, folder / SLOTS[slot], key, writers)
            except CheckpointError as error:
                why = str(error)
                session.logger.log(f"the copy of step {key.step} {where} was not saved: {why}")
                if not last:
                    time.sleep(_AGAIN_S)
            else:
                session.logger.log(f"saved {path} from {where.partition(' ')[2]}")
                return _read_back(session, path)
    if not newer:
        return []
    step, before = newer[0][0].step, f"step {saved[1]}, its last checkpoint" if saved[1] > 0 else "its beginning"
    raise CopiesNotSaved(
        f"the copy of step {step} {where} was not saved, and the run would go back to {before}: {why}. "
        f"The copies stay {where}: repair that, start the run again on the same nodes, and it resumes at "
        f"step {step}; on others, or with checkpoint.memory_interval = 0, the steps since then are lost"
    )


def _read_back(session: Session, path: Path) -> list[tuple[Path, Manifest]]:
    return agreed(lambda: [(path, read_manifest(path))] if session.is_rank_zero else [])


def _commit(session: Session, directory: Path, folder: Path, key: CopyKey, writers: Mapping[int, int]) -> Path:
    peers, committer, lead = peers_of(session.cpu_group), Committer(session.fence), session.is_rank_zero
    final = directory / directory_name(key.step)
    work = work_folder(final, committer)
    about, keep, interval = work / "about.json", session.config.checkpoint.keep, session.config.checkpoint.save_interval
    passing = not interval or key.step % interval != 0  # a save of this step was due, and is made up for otherwise

    def write() -> None:
        await_visible(lambda: "" if work.is_dir() else f"{work} was made by rank 0 but is not visible here",
                      VISIBLE_SECONDS)
        for rank in (rank for rank, holder in writers.items() if holder == session.info.rank):
            _write(work, folder, rank, verify=session.config.checkpoint.verify_saves)
            if rank == 0:
                write_text(about, json.dumps(copy_list(folder, 0).about))

    def commit_all() -> None:
        await_visible(lambda: "" if about.exists() else f"{about} is not visible here", VISIBLE_SECONDS)
        told = json.loads(about.read_bytes())
        about.unlink()
        parent = told["lineage"].get("parent")
        committer.parent = None if parent is None else Parent(**parent)
        state = SavedState(**told["state"])
        if passing:
            state = replace(state, extra={**state.extra, "recovered": True})
        commit(work, final, state, key.world, None, committer)

    empty = SavedState(step=key.step, samples=0, tokens=0, layout=session.config.layout, config={}, scalars={},
                       extra={})
    try:
        together(peers, lambda: prepare(directory, work, empty, committer) if lead else None)
        together(peers, write)
        together(peers, lambda: commit_all() if lead else None)
    except CheckpointError:
        if lead:
            shutil.rmtree(work, ignore_errors=True)
        raise
    if lead:
        tidy(directory, final, keep + passing if keep else 0, session.logger.log, committer)
    return final


def _write(work: Path, folder: Path, rank: int, *, verify: bool) -> None:
    """Write one rank's file and list, as a save does (``checkpoint.writer``). Its bytes have been proved."""
    listed = copy_list(folder, rank)
    entry = listed.entry and whole_entry(folder, rank, listed.entry)
    target = work / shard_name(rank)
    try:
        if entry is not None:
            shutil.copyfile(folder / shard_name(rank), target)
            fsync_file(target)
            if verify:
                check_written(target, entry)
    except OSError as error:
        raise disk_error(error, target) from error
    body = {"file": entry and asdict(entry), "pieces": [asdict(piece) for piece in listed.pieces]}
    write_text(work / listing_name(rank), json.dumps(body))
