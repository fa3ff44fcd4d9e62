"""Copies of the training state in the memory of a node, from which a run continues when one of its ranks is lost.

Every ``checkpoint.memory_interval`` steps each rank copies the pieces that it owns into a file below
``checkpoint.memory_folder``, a folder that is memory (tmpfs), and writes the list of them beside it: what a save leaves
before its commit (``core.checkpoint.writer``). The memory is the node's, so it outlives a process that is killed.

There are two copies, written in turn, and ranks agree on each step before the next copy begins. So wherever a fault
strikes, all ranks have the newer copy or all have the one before it: at most one interval is lost. At the next start
the ranks prove their files (:func:`whole_copies`), and rank 0 writes the manifest. Then a copy is a checkpoint as
any other, of any layout, and the first place to resume from. Where a node's memory holds none that is whole, those on
its disk are next (``storage.disk_copies``), which look the same.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import platform
import re
import shutil
import stat
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from megatron_port.core.checkpoint.format import (
    MANIFEST,
    FileEntry,
    Lineage,
    Manifest,
    Parent,
    PieceEntry,
    SavedState,
    encode_manifest,
    plain,
    read_manifest,
    shard_name,
)
from megatron_port.core.checkpoint.reader import checkpoints_in
from megatron_port.core.checkpoint.shard import (
    CHUNK,
    Digest,
    ShardPlan,
    block_bytes,
    bytes_of,
    plan_shard,
)
from megatron_port.core.checkpoint.writer import listing_name
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.agree import agreed, broadcast_text
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.errors import CheckpointError, DamagedCheckpoint, EnvironmentFault
from megatron_port.core.io.files import atomic_file, free_bytes, read_regular, write_text
from megatron_port.core.io.logging import Logger
from megatron_port.core.package import package_versions
from megatron_port.core.train.folders import FOLDER, run_folder
from megatron_port.core.train.hooks import Session

SLOTS = ("copy-0", "copy-1")
TIERS = {"memory": "in the nodes' memory", "disk": "on the nodes' disks"}
"""Where nodes keep copies, best first, by the first word of ``checkpoint``'s settings for them."""
_LARGEST_LIST = 1 << 28
_PACKAGES = ("megatron_port", "torch", "numpy", "xxhash")


def copies_folder(config: RunConfig, tier: str = "memory") -> Path:
    """Return the folder of a run's copies on each node. Its name follows from the run's folder alone."""
    digest = hashlib.sha256(str(run_folder(config).absolute()).encode()).hexdigest()[:16]
    place = config.checkpoint.disk_folder if tier == "disk" else config.checkpoint.memory_folder
    return Path(place) / f"megatron_port-{os.getuid()}" / digest


def remove_copies(config: RunConfig) -> None:
    """Free what a run's copies take on this node."""
    for tier in TIERS:
        shutil.rmtree(copies_folder(config, tier), ignore_errors=True)


def own_folder(path: Path, *, fresh: bool = False, tier: str = "memory") -> None:
    """Make a folder for copies that nobody else can enter. ``path``'s parent is of this user alone, too.

    ``fresh``: what is there is removed first.

    Raises:
        EnvironmentFault: it cannot be made, or is another user's.
    """
    if fresh and not _foreign(path):
        shutil.rmtree(path, ignore_errors=True)
    for place in (path.parent, path):
        try:
            place.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise EnvironmentFault(
                f"{place}: the copies of the training state cannot be kept there: {error.strerror or error}; set "
                f"checkpoint.{tier}_folder to a folder of each node that this user may write, or "
                f"checkpoint.{tier}_interval = 0"
            ) from error
        if _foreign(place):
            raise EnvironmentFault(f"{_foreign(place)}; remove it, or set checkpoint.{tier}_folder")


class CopiesNotSaved(EnvironmentFault):
    """No checkpoint can be made of copies of which every file is there. They stay on the nodes for the next start."""


@dataclass(frozen=True, order=True)
class CopyKey:
    """Which copy a rank's file belongs to: equal on all ranks that took part. Of two the larger is the later one."""

    run: int
    """Number of the run's id (:func:`run_number`)."""
    epoch: int
    """Epoch of the lease of the run's folder."""
    number: int
    """Place among the copies that this start has made, from 1."""
    step: int
    world: int
    """Ranks of the layout that wrote it."""


def no_memory(path: Path, error: OSError, size: int = 0, *, tier: str = "memory") -> CheckpointError:
    """Return the error for a copy that cannot be made, with what is free."""
    free = free_bytes(path.parent)
    return CheckpointError(
        f"{path}: no {f'{size} bytes for a ' if size else ''}copy of this rank's state ({error.strerror or error}; "
        f"{free} bytes are free there); a run keeps two of them. Set checkpoint.{tier}_folder to a larger folder, or "
        f"checkpoint.{tier}_interval = 0"
    )


def _write_list(
    path: Path, key: CopyKey, about: Mapping[str, Any], entry: FileEntry | None, pieces: str, *, durable: bool = False
) -> None:
    """Write a rank's list, behind its own hash. ``pieces``: their JSON, which is the same from copy to copy;
    ``durable``: it is whole or the one before it is there, also after a power cut."""
    body = (
        f'{{"key":{json.dumps(asdict(key))},"about":{json.dumps(about)},'
        f'"file":{json.dumps(None if entry is None else asdict(entry))},"pieces":{pieces}}}'
    )
    with atomic_file(path, durable=durable, parents=False) as stream:
        stream.write(f"{xxhash.xxh3_128_hexdigest(body.encode())}\n{body}".encode())


def run_number(run: str) -> int:
    """Return a number of 60 bits for a run's id."""
    return int(hashlib.sha256(run.encode()).hexdigest()[:15], 16)


class CopyFile:
    """One rank's file of one of the two copies; its memory is kept and used again.

    Args:
        folder: of the copy.
        rank: of this process.
        threads: that copy and hash; None: the caller's alone.
    """

    def __init__(self, folder: Path, rank: int, threads: ThreadPoolExecutor | None = None) -> None:
        self.path, self.listing, self._threads = folder / shard_name(rank), folder / listing_name(rank), threads
        self._plan: ShardPlan | None = None
        self._memory: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._pieces = ""

    def take(self, pieces: Iterable[StatePiece], key: CopyKey, about: Mapping[str, Any]) -> None:
        """Copy ``pieces``, and write their list last: a copy that was cut short has none.

        The bytes are hashed as they are read, so what changes on the way or afterwards is found. ``about``: what else
        the list says.

        Raises:
            CheckpointError: the folder has too little free space (bytes are named), or is gone.
        """
        with suppress(FileNotFoundError):
            self.listing.unlink()
        plan = plan_shard(self.path.name, (p for p in pieces if p.tensor.numel()), last=self._plan)
        entry = self._copy(plan) if plan.pieces else None
        try:
            _write_list(self.listing, key, about, entry, self._pieces if plan.pieces else "[]")
        except OSError as error:
            raise no_memory(self.listing, error) from error

    def _copy(self, plan: ShardPlan) -> FileEntry:
        if self._memory is None or self._plan is None or plan.head != self._plan.head:
            self._open(plan)
        assert self._memory is not None
        self._plan = replace(plan, pieces=())
        head, width = len(plan.head), block_bytes(plan.size)
        targets = [self._memory[head + start : head + stop] for start, stop in plan.spans]
        sources = [_host_source(piece.tensor, target) for piece, target in zip(plan.pieces, targets, strict=True)]
        for device in {piece.tensor.device for piece in plan.pieces if piece.tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

        starts, stops = [start for start, _ in plan.spans], [stop for _, stop in plan.spans]

        def copied(block: int) -> str:
            """Copy a block of the file, and return its hash; hashed while a part of it is in the core's cache."""
            first, last, digest = block * width, min((block + 1) * width, plan.size), xxhash.xxh3_128()
            digest.update(plan.head[first:last])
            inside = slice(bisect_right(stops, first - head), bisect_left(starts, last - head))
            for (start, stop), source, target in zip(plan.spans[inside], sources[inside], targets[inside], strict=True):
                low, high = max(first - head - start, 0), min(last - head, stop) - start
                for at in range(low, high, CHUNK):
                    part = source[at : min(at + CHUNK, high)]
                    if source is not target:
                        np.copyto(target[at : at + len(part)], part)
                    digest.update(part.data)
            return digest.hexdigest()

        blocks = range(-(-plan.size // width))
        hashes = list(self._threads.map(copied, blocks) if self._threads is not None else map(copied, blocks))
        return FileEntry(plan.size, "", width, tuple(hashes))  # of the whole: see _prove

    def _open(self, plan: ShardPlan) -> None:
        """Make the file at its full size, so that memory that is not there is an error here and no signal later."""
        self._memory = None
        try:
            with open(self.path, "w+b") as stream:
                os.posix_fallocate(stream.fileno(), 0, plan.size)
                self._memory = np.frombuffer(mmap.mmap(stream.fileno(), plan.size), dtype=np.uint8)
        except OSError as error:
            raise no_memory(self.path, error, plan.size) from error
        self._memory[: len(plan.head)] = np.frombuffer(plan.head, dtype=np.uint8)
        self._pieces = json.dumps([asdict(entry) for entry in plan.entries])


def _host_source(tensor: torch.Tensor, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[
        Any, np.dtype[np.uint8]]:
    """Return the bytes of a tensor, uint8 [bytes]: of one in a GPU's memory, its copy in ``buffer``."""
    if not tensor.is_cuda:
        return np.frombuffer(bytes_of(tensor), dtype=np.uint8)
    torch.from_numpy(buffer).view(tensor.dtype).copy_(tensor.detach(), non_blocking=True)
    return buffer


class CopySender(Protocol):
    """Sender of a copy to another node while training continues."""

    def begin(self, slot: int, file: Path, listing: Path) -> None:
        """Send a rank's file and list of a copy."""


class CopyReader(Protocol):
    """Reader of copies while training continues."""

    def leave(self, file: Path) -> None:
        """Wait until a file is not read any more: it is to be written over."""

    def begin(self, step: int, file: Path, listing: Path) -> None:
        """Read a rank's file and list of a copy, if that of ``step`` is asked for."""


class StateCopies:
    """The two copies of one rank's state. Not collective: ranks copy at the same steps.

    Args:
        folder: :func:`copies_folder`'s; made here.
        run: id of the run.
        epoch: of the lease of the run's folder.
        spare: the copy that the run was resumed from: it is kept until there is another. None: none of them; what the
            folder holds is then of no use any more.
        partner: sends each copy to another node (``storage.partner_copies``); None: all ranks are of one node.
        disk: writes some of them to this node's disk (``storage.disk_copies``).
    """

    def __init__(
        self, folder: Path, *, rank: int, world: int, run: str, epoch: int, spare: int | None = None,
        partner: CopySender | None = None, disk: CopyReader | None = None,
    ) -> None:
        own_folder(folder)
        count, self._files = torch.get_num_threads(), []  # this rank's share of the cores
        threads = ThreadPoolExecutor(count, thread_name_prefix="copy") if count > 1 else None
        for name in SLOTS:
            (folder / name).mkdir(mode=0o700, exist_ok=True)
            self._files.append(CopyFile(folder / name, rank, threads))
        self._run, self._epoch, self._world, self._partner, self._disk = run_number(run), epoch, world, partner, disk
        self._number = 0 if spare is None else 1 - spare
        for slot, file in enumerate(self._files):
            if slot != spare:
                file.listing.unlink(missing_ok=True)
        self.last_step: int | None = None
        """Step of the last copy of this start."""

    def take(self, pieces: Iterable[StatePiece], step: int, about: Mapping[str, Any]) -> None:
        """Copy the state of ``step`` over the older of the two copies. Raises CheckpointError.

        Before, all ranks have the newer one where it is to be (``partner.finish``).
        """
        slot = self._number % len(SLOTS)
        self._number += 1
        file = self._files[slot]
        if self._disk is not None:
            self._disk.leave(file.path)
        file.take(pieces, CopyKey(self._run, self._epoch, self._number, step, self._world), about)
        self.last_step = step
        if self._partner is not None:
            self._partner.begin(slot, file.path, file.listing)
        if self._disk is not None:
            self._disk.begin(step, file.path, file.listing)

    def forget(self, *, newest_alone: bool = False) -> None:
        """Drop both copies: the run goes back behind them. ``newest_alone``: drop the last one only."""
        newest = (self._number - 1) % len(SLOTS)
        for slot, file in enumerate(self._files):
            if slot == newest or not newest_alone:
                with suppress(FileNotFoundError):
                    file.listing.unlink()


def described(state: SavedState, lineage: Lineage) -> dict[str, Any]:
    """Return what rank 0 adds to its list: all of a manifest that is neither a file nor a piece, as JSON types."""
    return {"state": {name: plain(value) for name, value in vars(state).items()}, "lineage": lineage.body()}


# At the next start: which copies do all ranks have, and are they what was copied?

@dataclass(frozen=True)
class CopyList:
    """One rank's file of a copy, by its list."""

    key: CopyKey
    about: Mapping[str, Any]
    entry: FileEntry | None
    pieces: tuple[PieceEntry, ...]


Whole = tuple[CopyKey, int, Mapping[int, int]]
"""A copy of which every file is there: its place among the two, and the process that holds each rank's file."""


def copy_list(folder: Path, rank: int) -> CopyList:
    """Return a list that was there a moment ago. Raises CheckpointError."""
    found = _found(folder, rank)
    if found is None:
        raise CheckpointError(f"{folder / listing_name(rank)} is gone")
    return found


def _found(folder: Path, rank: int) -> CopyList | None:
    """Return what a rank's list says; None: it has none. Raises DamagedCheckpoint."""
    path = folder / listing_name(rank)
    try:
        digest, _, body = read_regular(path, _LARGEST_LIST).decode("utf-8", "replace").partition("\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
    if xxhash.xxh3_128_hexdigest(body.encode()) != digest:
        raise DamagedCheckpoint(f"{path} is not what was written")
    made = json.loads(body)  # by this user's ranks alone, and unchanged since: see own_folder
    entry = made["file"] and FileEntry(**{**made["file"], "blocks": tuple(made["file"]["blocks"])})
    pieces = []
    for item in made["pieces"]:
        pieces.append(PieceEntry(**{
            **item, **{name: tuple(item[name]) for name in ("global_shape", "offset", "shape")}}))
    return CopyList(CopyKey(**made["key"]), made["about"], entry, tuple(pieces))


def _prove(path: Path, entry: FileEntry) -> FileEntry:
    """Return the entry with the hash of the whole file. Raises DamagedCheckpoint unless it has what was copied."""
    digest = Digest(entry.block_bytes)
    try:
        with open(path, "rb", buffering=0) as stream:
            while part := stream.read(CHUNK):
                digest.update(part)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
    now = digest.entry()
    if now.size != entry.size:
        raise DamagedCheckpoint(f"{path} has {now.size} bytes, and {entry.size} were copied")
    for number, (block, was) in enumerate(zip(now.blocks, entry.blocks, strict=True)):
        if block != was:
            raise DamagedCheckpoint(
                f"{path}: block {number} (bytes {number * entry.block_bytes} and on) is not what was copied"
            )
    return now


def _proved(folder: Path, rank: int) -> tuple[CopyKey | None, str]:
    """Return which copy a rank's file is of; or what is wrong with it."""
    try:
        found = _found(folder, rank)
        if found is None:
            return None, ""
        if found.entry is not None:
            proved = _prove(folder / shard_name(rank), found.entry)
            pieces = json.dumps([asdict(piece) for piece in found.pieces])
            if proved != found.entry:
                with suppress(OSError):  # full, or read-only: the copy is whole, and is read again (whole_entry)
                    _write_list(folder / listing_name(rank), found.key, found.about, proved, pieces, durable=True)
    except DamagedCheckpoint as error:
        return None, str(error)
    return found.key, ""


def _listed(folder: Path, rank: int) -> tuple[CopyKey | None, str]:
    """Return which copy a rank's list is of, as :func:`_proved` without reading the file."""
    try:
        found = _found(folder, rank)
    except DamagedCheckpoint as error:
        return None, str(error)
    return (None if found is None else found.key), ""


def whole_entry(folder: Path, rank: int, entry: FileEntry) -> FileEntry:
    """Return a proved file's entry with the hash of the whole, which its list lacks where that could not be written.

    Raises DamagedCheckpoint.
    """
    return entry if entry.hash else _prove(folder / shard_name(rank), entry)


def remove_old_copies(config: RunConfig) -> bool:
    """Free what a run's copies take on this node if no start would resume from them; return whether none is left.

    For a node that the run may have left behind. A start resumes from a copy only where no checkpoint of its run is
    newer, by epoch and step (``partner_copies.commit_from_nodes``). Ranks that train on without this node have first
    committed a checkpoint of a later epoch, so nobody needs its copies then; until they have, and where they do not get
    so far, there is no such checkpoint and the copies stay. Damage in that checkpoint changes nothing: the copies that
    it was made of have been removed on every other node by then.
    """
    freed = [_removed_if_old(copies_folder(config, tier), config) for tier in TIERS]
    return all(freed)


def _removed_if_old(folder: Path, config: RunConfig) -> bool:
    if not folder.is_dir() or _foreign(folder):
        return True
    newest = _newest(folder)
    try:
        saved = [manifest for _, manifest in checkpoints_in(run_folder(config) / FOLDER)]
    except CheckpointError:  # not reachable from here, for now
        return False
    own = [(m.lineage.epoch, m.state.step) for m in saved if newest and run_number(m.lineage.run) == newest.run]
    if newest is not None and max(own, default=(-1, -1)) <= (newest.epoch, newest.step):
        return False
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")
    with suppress(OSError):
        if _newest(folder) == newest:  # no other start is at work here
            os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)
    return not folder.exists()


def _newest(folder: Path) -> CopyKey | None:
    """Return the newest copy of which a file is on this node; None: there is none."""
    keys = []
    for path in folder.glob("copy-[01]/rank-*.json"):
        listed = _LISTING.fullmatch(path.name)
        with suppress(DamagedCheckpoint):
            found = _found(path.parent, int(listed.group(1))) if listed else None
            keys += [found.key] if found is not None else []
    return max(keys, default=None)


def forget_damaged(config: RunConfig, below: int) -> None:
    """Drop what this node holds of copies of step ``below`` and of later ones; negative: of none."""
    for path in (p for tier in TIERS if below >= 0 for p in copies_folder(config, tier).glob("copy-[01]/rank-*.json")):
        listed = _LISTING.fullmatch(path.name)
        with suppress(DamagedCheckpoint, OSError):
            found = _found(path.parent, int(listed.group(1))) if listed else None
            if found is not None and found.key.step >= below:
                path.unlink()


_LISTING = re.compile(r"rank-(\d{5,})\.json")
_ROW = len(astuple(CopyKey(0, 0, 0, 0, 0))) + 2
"""Numbers of a file that is proved: its place among the two copies, its rank, and its key."""


def _held(folder: Path, share: slice, read: bool) -> tuple[list[tuple[int, ...]], list[str]]:
    """Prove this process's share of the files that its node holds. Return a row for each, and what is wrong."""
    look = _proved if read else _listed
    rows, faults = [], []
    for slot, name in enumerate(SLOTS):
        listed = (_LISTING.fullmatch(path.name) for path in (folder / name).glob("rank-*.json"))
        for rank in sorted(int(found.group(1)) for found in listed if found)[share]:
            key, fault = look(folder / name, rank)
            if key is not None:
                rows.append((slot, rank, *astuple(key)))
            elif fault:
                faults.append(fault)
    return rows, faults


def _gathered(session: Session, rows: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Return every rank's rows. Collective."""
    if session.info.world_size == 1:
        return [rows]
    most = torch.tensor([len(rows)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=session.cpu_group)
    own = torch.full((int(most), _ROW), -1, dtype=torch.int64)
    if rows:
        own[: len(rows)] = torch.tensor(rows)
    every = [torch.empty_like(own) for _ in range(session.info.world_size)]
    dist.all_gather(every, own, group=session.cpu_group)
    return [[tuple(row) for row in found.tolist() if row[0] >= 0] for found in every]


def whole_copies(
    session: Session, run: str, below: int = -1, tier: str = "memory", *, read: bool = True
) -> list[Whole]:
    """Return the run's copies of which every file is there and proved, newest first. Collective.

    A file that is not what was copied is named in the log, and its copy passed over.

    Args:
        run: id of the folder's run, on rank 0; empty: none has begun there.
        below: copies of this step and of later ones are not used, as something other than an update may be in them.
            Negative: all are.
        tier: of ``TIERS``, where they are looked for.
        read: files are read through; else their lists alone say what is there.
    """
    folder, info = copies_folder(session.config, tier), session.info
    said = Logger(info.rank, info.world_size, info.hostname).log_any
    rows: list[tuple[int, ...]] = []
    faults: list[str] = []
    if folder.is_dir() or folder.is_symlink():
        faults = list(filter(None, map(_foreign, (folder.parent, folder, *(folder / name for name in SLOTS)))))[:1]
        if not faults:
            rows, faults = _held(folder, slice(info.local_rank, None, info.local_world_size), read)
    for fault in faults:
        said(f"{fault}: the {tier} is faulty, or something else wrote there; this copy is passed over")
    holders: dict[tuple[CopyKey, int], dict[int, int]] = {}
    for process, found in enumerate(_gathered(session, rows)):
        for slot, rank, *key in found:
            holders.setdefault((CopyKey(*key), slot), {}).setdefault(rank, process)
    whole: list[Whole] = [(key, slot, writers) for (key, slot), writers in holders.items()
                          if len(writers) == key.world and (below < 0 or key.step < below)]
    return _of_run(session, run, sorted(whole, key=lambda found: found[0], reverse=True), tier)


def committed_here(session: Session, whole: Sequence[Whole], tier: str) -> list[tuple[Path, Manifest]]:
    """Return copies whose files are all on this node, on rank 0: each has a manifest then. Collective.

    Raises CopiesNotSaved: there is no space for a manifest.
    """
    folder = copies_folder(session.config, tier)
    try:
        made = agreed(lambda: [_committed(folder / SLOTS[slot], key, tier) for key, slot, _ in whole]
                      if session.is_rank_zero else [])
    except CheckpointError as error:
        raise CopiesNotSaved(f"{error}. The copies of steps {', '.join(str(key.step) for key, _, _ in whole)} stay "
                             "there, for the next start") from error
    return [found for found in made if found is not None]


def _of_run(session: Session, run: str, whole: Sequence[Whole], tier: str) -> list[Whole]:
    """Return the copies that are of the run; others are named. Collective."""
    told = broadcast_text(run if session.is_rank_zero else None)
    own = [found for found in whole if told and found[0].run == run_number(told)]
    for key, _, _ in (found for found in whole if found not in own):
        session.logger.log(f"the copy of step {key.step} {TIERS[tier]} is of another run, and is passed over")
    return own


def _foreign(path: Path) -> str:
    """Return why a folder is not this user's alone; empty: it is."""
    try:
        found = path.lstat()
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return "" if own else f"{path} is not a folder of this user alone"


def _committed(folder: Path, key: CopyKey, tier: str) -> tuple[Path, Manifest] | None:
    """Write the manifest of a copy that is proved, on rank 0, and return it as read back."""
    files: dict[str, FileEntry] = {}
    pieces: list[PieceEntry] = []
    about: Mapping[str, Any] = {}
    for rank in range(key.world):
        found = _found(folder, rank)
        if found is None or found.key != key:
            return None
        about = about or found.about
        if found.entry is not None:
            files[shard_name(rank)] = whole_entry(folder, rank, found.entry)
            pieces += found.pieces
    told = dict(about["lineage"])
    parent = told.pop("parent", None)
    manifest = Manifest(
        state=SavedState(**about["state"]), saved_at=time.time(), files=files, pieces=tuple(pieces),
        lineage=Lineage(**told, parent=None if parent is None else Parent(**parent)),
        versions={"python": platform.python_version(), **package_versions(_PACKAGES)},
    )
    try:
        write_text(folder / MANIFEST, encode_manifest(manifest), durable=False)
    except OSError as error:
        raise no_memory(folder / MANIFEST, error, tier=tier) from error
    return folder, read_manifest(folder)
