"""Saving: every rank writes its own file, rank 0 commits, and a crash at any moment loses no whole checkpoint.

1. Rank 0 removes leftovers (``remove_leftovers``) and makes ``step-N.eE.tmp`` (E: the epoch of this attempt's lease).
2. Every rank writes ``rank-K.safetensors`` (hashed while written, fsynced, read back and compared) and
   ``rank-K.json``, its list of pieces.
3. Rank 0 reads the lists, proves that the pieces tile every tensor, writes the manifest, fsyncs, and renames the
   directory: that rename is the commit. Then it updates ``latest`` and removes checkpoints beyond ``keep``; what
   cannot be removed fails no save.

Before each rename and each deletion rank 0 looks whether another attempt has taken the folder over (``Fence``). After
each stage the ranks agree (``together``), so a full disk on one rank ends the save on all of them.
``storage.background`` runs the same stages beside training.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_port.core.checkpoint.format import (
    LATEST,
    MANIFEST,
    REPLACED,
    FileEntry,
    Lineage,
    Manifest,
    Parent,
    PieceEntry,
    SavedState,
    check_cover,
    directory_name,
    encode_manifest,
    kinds_fault,
    plain,
    read_manifest,
    shard_name,
    step_of,
)
from megatron_port.core.checkpoint.shard import (
    ShardPlan,
    bytes_of,
    check_written,
    disk_error,
    plan_shard,
    write_planned,
    write_text,
)
from megatron_port.core.dist.agree import TEXT_CHARACTERS, broadcast_text
from megatron_port.core.dist.rank import Fence, LeaseLost
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.errors import CheckpointError, PortError
from megatron_port.core.io.files import fsync_directory, write_bytes
from megatron_port.core.package import package_versions
from megatron_port.core.registry import PARTS

_TEMPORARY = re.compile(r"step-\d{8,18}(?:\.e(\d{1,18}))?(?:\.\d{1,9})?\.tmp")


def temporary_name(name: str, epoch: int, number: int = 0) -> str:
    """Return ``step-00000120.e7.tmp``, an unfinished save of attempt 7; ``step-00000120.tmp`` without a lease.
    ``number`` makes others of it (``step-00000120.e7.1.tmp``), for what has to go."""
    return f"{name}{f'.e{epoch}' if epoch else ''}{f'.{number}' if number else ''}.tmp"


def epoch_of_temporary(name: str) -> int | None:
    """Return the epoch of a temporary name (0: it was made without a lease); None: the name is no temporary's."""
    found = _TEMPORARY.fullmatch(name)
    return int(found.group(1) or 0) if found else None


# Who commits to a folder, and the order of its commits. Clocks have no say in it.
#
# Each commit gets the number after the highest in its folder. One attempt at a time commits (``run.lease``), so the
# numbers say what came after what, whatever the clocks of its nodes said and however often the run went back to an
# earlier step.

@dataclass
class Committer:
    """Committer of an attempt: its fence, and the last commit that it made or began at.

    The default is a process alone with the folder, without a lease and without a run.
    """

    fence: Fence = field(default_factory=Fence)
    parent: Parent | None = None
    told: set[str] = field(default_factory=set)
    """Paths that could not be removed, and were named in the log."""
    _last: int = 0

    def lineage(self, directory_commits: int) -> Lineage:
        """Return the next commit's lineage. ``directory_commits``: the folder's highest number, if looked up."""
        return Lineage(
            run=self.fence.run, commit=max(self._last, directory_commits) + 1, epoch=self.fence.epoch,
            attempt=self.fence.attempt, parent=self.parent,
        )

    @property
    def counting(self) -> bool:
        """Whether it has committed: nobody else has since, so the folder need not be searched again."""
        return self._last > 0 and self.fence.epoch > 0

    def committed(self, lineage: Lineage, step: int) -> None:
        """Take note of a commit that was made."""
        self._last = lineage.commit
        self.parent = Parent(run=lineage.run, commit=lineage.commit, step=step)

    def resumed(self, lineage: Lineage, step: int) -> None:
        """Take note of the checkpoint that was loaded; ``_last`` stays: the folder may hold later ones."""
        self.parent = Parent(run=lineage.run, commit=lineage.commit, step=step)

    def owns(self, lineage: Lineage) -> bool:
        """Return whether the checkpoint is this run's, or of no known run: retention may remove it."""
        return not self.fence.run or lineage.run in ("", self.fence.run)


# Remove leftovers of saves and checkpoints that are too old, where that is possible.
#
# A checkpoint that is committed is saved. What cannot be removed (another member of a group owns it, the medium
# refuses) is told once, left alone, and tried again at the next save. Names that a save needs are made free by
# renaming.

Note = Callable[[str], None]
_UNFINISHED_LATEST = re.compile(rf"\.{LATEST}\.[0-9a-f]{{16}}\.tmp")


def work_folder(final: Path, committer: Committer, number: int = 0) -> Path:
    """Return where a checkpoint is written before it is committed as ``final``; with a ``number`` another such name."""
    return final.with_name(temporary_name(final.name, committer.fence.epoch, number))


def step_aside(path: Path, final: Path, committer: Committer) -> Path | None:
    """Give what has the name ``path`` that of a leftover of ``final``; None: nothing has it. Raises OSError."""
    if not os.path.lexists(path):
        return None
    unused = _unused(final, committer)
    os.rename(path, unused)
    if path.name in committer.told:
        committer.told.add(unused.name)
    return unused


def _unused(final: Path, committer: Committer) -> Path:
    number = 1
    while os.path.lexists(work_folder(final, committer, number)):
        number += 1
    return work_folder(final, committer, number)


def move_into_place(work: Path, final: Path, committer: Committer) -> None:
    """Commit: rename ``work`` to ``final``. Nothing is removed here. Raises OSError.

    A checkpoint of the same step steps aside first: at every instant one of the two has a checkpoint's name.
    """
    if os.path.lexists(final):
        aside = final.with_name(final.name + REPLACED)
        try:
            step_aside(aside, final, committer)
        except OSError:  # what has that name keeps it
            aside = _unused(final, committer)
        os.rename(final, aside)
    os.rename(work, final)


def remove_leftovers(directory: Path, committer: Committer, note: Note | None = None) -> None:
    """Delete what interrupted saves left: temporaries of this attempt and of those before it, ``step-*.old`` whose
    replacement is there, and a ``latest`` that was not finished. Those of a later attempt are in use.

    What cannot be deleted stays; ``note`` is told of each such path once per run.

    Raises:
        OSError: the directory cannot be listed.
        LeaseLost: it is another attempt's by now.
    """
    committer.fence.check()
    for path in list(directory.iterdir()):
        try:
            if _UNFINISHED_LATEST.fullmatch(path.name):  # of one writer, which is not writing it now
                path.unlink(missing_ok=True)
            epoch = epoch_of_temporary(path.name)
            stem = path.name.removesuffix(REPLACED)
            replaced = stem != path.name and step_of(stem) is not None and (directory / stem / MANIFEST).is_file()
            if replaced or (epoch is not None and epoch <= committer.fence.epoch):
                _remove(path)
        except OSError as error:
            _tell(path, error, committer, note)


def _remove(path: Path, tries: int = 3) -> None:
    """Delete a directory in which ranks of a dead attempt, on nodes that nobody can reach, may still write.

    Of a link only the link: what it leads to was put there by somebody else.
    """
    for left in reversed(range(tries)):
        try:
            return path.unlink(missing_ok=True) if path.is_symlink() else shutil.rmtree(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not left:
                raise


def _tell(path: Path, error: Exception, committer: Committer, note: Note | None) -> None:
    """Tell of a path that cannot be tidied, unless it was told before."""
    if note is None or path.name in committer.told:
        return
    committer.told.add(path.name)
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    note(f"{path} cannot be tidied away ({why}); it takes no part in this run, and each save tries again")


def tidy(directory: Path, final: Path, keep: int, note: Note | None, committer: Committer) -> None:
    """Rank 0, after the commit: ``latest``, leftovers, retention. Trouble here is worth a line, not the run."""
    def latest() -> None:
        write_bytes(directory / LATEST, f"{final.name}\n".encode(), guard=committer.fence.check)

    def retention() -> None:
        for path in _beyond(directory, final, keep, committer) if keep > 0 else ():
            _retire(path, committer, note)

    for what, work in (
        (LATEST, latest), ("leftovers", lambda: remove_leftovers(directory, committer, note)), ("retention", retention)
    ):
        try:
            work()
        except LeaseLost as error:
            if note is not None:
                note(f"{final.name} is saved, but cleaning up after it failed: {error}")
            return
        except (OSError, PortError) as error:
            if note is not None and what not in committer.told:
                committer.told.add(what)
                note(f"{final.name} is saved, but cleaning up after it failed ({what}): {error}; each save tries again")


def _retire(path: Path, committer: Committer, note: Note | None) -> None:
    """Remove a whole checkpoint. Raises LeaseLost."""
    try:
        if not path.is_symlink() and not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # a half of it would be no checkpoint
        committer.fence.check()
        # Renamed first: a half-deleted directory must not look like a checkpoint.
        doomed = step_aside(path, path.with_name(path.name.removesuffix(REPLACED)), committer)
        if doomed is not None:
            path = doomed
            _remove(path)
    except OSError as error:
        _tell(path, error, committer, note)


def _beyond(directory: Path, final: Path, keep: int, committer: Committer) -> list[Path]:
    """Committed checkpoints of this run other than the ``keep`` newest. ``final`` is the newest whatever its step.

    Those that a recovery made (``extra.recovered``) are among them, and count for none.
    """
    ranked: list[tuple[tuple[int, int, int], Path]] = []
    passing = ranked[:]
    for path in directory.iterdir():
        if step_of(path.name) is None or path == final:
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            # Damaged, or none: not worth a place among the kept, but not ours to delete either.
            continue
        if committer.owns(manifest.lineage):
            (passing if manifest.state.extra.get("recovered") else ranked).append((manifest.order, path))
    ranked.sort(reverse=True)
    return [path for _, path in ranked[keep - 1 :] + passing]


# The ranks that save together, and how they agree that a stage went well.
#
# A rank that failed must not leave the others waiting: after each stage all ranks
# meet in one small all-reduce; if any failed, all raise the same message, the
# first failed rank's. The text travels as bytes, not as a pickle.

T = TypeVar("T")


class Peers:
    """Ranks that save together: here a single process; derived classes meet others."""

    rank = 0
    """Number of this rank, 0 to world_size - 1."""
    world_size = 1

    def first_failure(self, message: str | None) -> str | None:
        """Meet the others. ``message``: what failed here, or None. Return the lowest failing rank's, or None."""
        return message

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise maximum of every rank's integers, as many from each."""
        return list(values)


class GroupPeers(Peers):
    """Peers of a process group whose backend takes CPU tensors (gloo, or cpu:gloo,cuda:nccl)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def first_failure(self, message: str | None) -> str | None:
        """Return the first failure by one all-reduce of an integer; on failure also its text is broadcast."""
        flag = self.maximum([self.world_size - self.rank if message is not None else 0])[0]
        if flag == 0:
            return None
        own = None if message is None else message[:TEXT_CHARACTERS]
        return broadcast_text(own, source=self.world_size - flag, group=self._group)

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the maximum by one all-reduce."""
        flags = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return [int(v) for v in flags.tolist()]


def peers_of(group: dist.ProcessGroup | None) -> Peers:
    """Return the ranks of a group, or this process alone."""
    return Peers() if group is None or dist.get_world_size(group) == 1 else GroupPeers(group)


def failure_text(peers: Peers, error: Exception) -> str:
    """Return what went wrong on this rank, for all to read."""
    text = str(error) if isinstance(error, PortError) else f"{type(error).__name__}: {error}"
    return f"rank {peers.rank} on {socket.gethostname()}: {text}" if peers.world_size > 1 else text


def together(peers: Peers, action: Callable[[], T]) -> T:
    """Run a stage on every rank, then agree on it.

    Raises:
        CheckpointError: it failed on some rank, with that rank's number, host and message.
        Exception: a bug in this rank's action comes through as it is, after the others were told.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    first = peers.first_failure(None if error is None else failure_text(peers, error))
    if error is not None and not isinstance(error, PortError):
        raise error
    if first is not None:
        raise CheckpointError(first) from error
    return result  # type: ignore[return-value]


_PACKAGES = ("megatron_port", "torch", "deepspeed", "numpy", "safetensors", "xxhash")
LONGEST_NAP = 0.5
VISIBLE_SECONDS = 30.0
"""How long one rank's file may take to appear to another; network file systems cache."""


class Cancelled(Exception):
    """Signal that another rank failed, so that this one's part is of no use."""


def save_checkpoint(
    directory: Path, state: SavedState, pieces: Iterable[StatePiece], *, keep: int = 0, peers: Peers | None = None,
    expected: Mapping[str, tuple[int, ...]] | None = None, note: Note | None = None, verify: bool = True,
    compare: bool = False, visible_seconds: float = VISIBLE_SECONDS, committer: Committer | None = None,
) -> Path:
    """Commit ``directory/step-N``, and return it. Collective over ``peers``.

    Args:
        directory: where checkpoints live; the same shared folder on every rank.
        state: step, counters and JSON state; rank 0's is written.
        pieces: what this rank saves; over all ranks every element of every kind exactly once. Tensors stay where
            they are until their turn to be written, so views cost nothing.
        keep: newest checkpoints kept, this one included; 0: all.
        peers: ranks that save; None: this process alone.
        expected: name → global shape of every parameter; a checkpoint that lacks one is not committed.
        note: called on rank 0 with things worth a line that are no failure.
        verify: read every file back before the commit. It comes from the page cache as a rule: that proves what the
            file system was given, not what the platter holds.
        compare: compare what is written with the pieces (``health.snapshot_hashes``).
        visible_seconds: how long rank 0's directory may take to appear to another rank.
        committer: of the run, where there is one; the same object for all of its saves. On every rank the same epoch.

    Raises:
        CheckpointError: on every rank, if any rank failed. Earlier checkpoints are untouched.
    """
    peers = peers or Peers()
    committer = committer or Committer()
    final = directory / directory_name(state.step)
    work = work_folder(final, committer)
    lead = peers.rank == 0
    try:
        together(peers, lambda: prepare(directory, work, state, committer) if lead else None)
        together(peers, lambda: _write_rank(peers.rank, work, pieces, verify, visible_seconds, compare))
        together(peers, lambda: commit(work, final, state, peers.world_size, expected, committer) if lead else None)
    except BaseException:
        if lead:
            shutil.rmtree(work, ignore_errors=True)
        raise
    if lead:
        tidy(directory, final, keep, note, committer)
    return final


def prepare(directory: Path, work: Path, state: SavedState, committer: Committer) -> None:
    """Rank 0: an empty ``work`` in ``directory``. Raises CheckpointError; LeaseLost: it is another attempt's by now."""
    # Found now, before gigabytes are written: state that a manifest cannot hold.
    for part in vars(state).values():
        plain(part)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory, committer)
        step_aside(work, work.with_name(directory_name(state.step)), committer)
        work.mkdir()  # durable with the commit; until then it is of no use
    except OSError as error:
        raise disk_error(error, work) from error


def _write_rank(
    rank: int, work: Path, pieces: Iterable[StatePiece], verify: bool, visible_seconds: float, compare: bool
) -> None:
    await_visible(lambda: "" if work.is_dir() else f"{work} was made by rank 0 but is not visible here",
                  visible_seconds)
    plan = plan_shard(shard_name(rank), (piece for piece in pieces if piece.tensor.numel()))
    data: Iterator[memoryview] = (bytes_of(piece.tensor) for piece in plan.pieces)
    if compare:
        data = PARTS.function("snapshot hashes")(plan.pieces).compared(data)
    write_part(rank, work, plan, data, verify=verify)


def write_part(
    rank: int, work: Path, plan: ShardPlan, data: Iterable[memoryview], *, verify: bool,
    proceed: Callable[[], None] | None = None,
) -> None:
    """A rank's data file and then its list, whose appearance says that the data are durable. Raises CheckpointError."""
    listing: dict[str, Any] = {"file": None, "pieces": []}
    if plan.pieces:
        path = work / shard_name(rank)
        entry, entries = write_planned(path, plan, data, proceed=proceed)
        if verify:
            check_written(path, entry)
        listing = {"file": asdict(entry), "pieces": [asdict(e) for e in entries]}
    unfinished = work / f"{listing_name(rank)}.tmp"
    write_text(unfinished, json.dumps(listing))
    try:
        os.replace(unfinished, work / listing_name(rank))  # the last touch: rank 0 may move the folder at once
    except OSError as error:
        raise disk_error(error, work) from error


def await_visible(
    absent: Callable[[], str], seconds: float, *, since: Event | None = None, cancel: Event | None = None
) -> None:
    """Wait until what other ranks wrote is visible here.

    Args:
        absent: says what is not there yet; empty: nothing.
        since: the ``seconds`` count from when it is set; None: from now.
        cancel: set when the save is lost anyway.

    Raises:
        CheckpointError: something was not visible in time.
        Cancelled: ``cancel`` was set.
    """
    nap, deadline, cancel = 0.002, math.inf, cancel or Event()
    while what := absent():
        now = time.monotonic()
        if since is None or since.is_set():
            deadline = min(deadline, now + seconds)
        if now >= deadline:
            raise CheckpointError(
                f"{what} after {seconds:g} s: checkpoints need a directory that all nodes share; set output_dir to a "
                "path on the shared file system"
            )
        if cancel.wait(nap):
            raise Cancelled
        nap = min(2 * nap, LONGEST_NAP)


def absent_parts(work: Path, world_size: int) -> str:
    """Say of how many ranks nothing is in the directory; empty: every rank has written its part."""
    there = set(os.listdir(work)) if work.is_dir() else set()
    missing = [rank for rank in range(world_size) if listing_name(rank) not in there]
    first = f"(first: rank {missing[0]})" if missing else ""
    return f"{work}: nothing visible from {len(missing)} of {world_size} ranks {first}" if missing else ""


def listing_name(rank: int) -> str:
    """``rank-00003.json``: what a rank wrote."""
    return f"rank-{rank:05d}.json"


def commit(
    work: Path, final: Path, state: SavedState, world_size: int, expected: Mapping[str, tuple[int, ...]] | None,
    committer: Committer,
) -> None:
    """Rank 0, when every rank has written its part: manifest, fsync, rename.

    Raises:
        CheckpointError: something is missing, or the file system refused.
        LeaseLost: the folder is another attempt's by now; nothing was renamed.
    """
    files, pieces = _gather(work, world_size)
    where = f"step {state.step} was not saved"
    check_cover(pieces, where)
    _check_complete(pieces, state, expected, where)
    lineage = committer.lineage(0 if committer.counting else _highest_commit(final.parent))
    manifest = Manifest(
        state=state, saved_at=time.time(), files=files, pieces=pieces, lineage=lineage,
        versions={"python": platform.python_version(), **package_versions(_PACKAGES)},
    )
    write_text(work / MANIFEST, encode_manifest(manifest))
    try:
        for rank in range(world_size):
            (work / listing_name(rank)).unlink()
        fsync_directory(work)
        committer.fence.check()
        move_into_place(work, final, committer)
        committer.committed(lineage, state.step)
        fsync_directory(final.parent)
    except OSError as error:
        raise disk_error(error, final) from error


def _highest_commit(directory: Path) -> int:
    """The highest commit number in a folder; 0 without any that can be read."""
    highest = 0
    for path in directory.iterdir():
        if step_of(path.name) is not None:
            with suppress(CheckpointError):
                highest = max(highest, read_manifest(path).lineage.commit)
    return highest


def _gather(work: Path, world_size: int) -> tuple[dict[str, FileEntry], tuple[PieceEntry, ...]]:
    """Read the ranks' lists from the shared directory and check each file's size on disk."""
    files: dict[str, FileEntry] = {}
    pieces: list[PieceEntry] = []
    await_visible(lambda: absent_parts(work, world_size), 0.0)
    for rank in range(world_size):
        try:
            listing = json.loads((work / listing_name(rank)).read_bytes())
            if listing["file"] is None:
                continue
            entry = FileEntry(**{**listing["file"], "blocks": tuple(listing["file"]["blocks"])})
            size = (work / shard_name(rank)).stat().st_size
        except OSError as error:
            raise disk_error(error, work / shard_name(rank)) from error
        except ValueError as error:
            path = work / listing_name(rank)
            raise CheckpointError(f"{path}: damaged right after it was written: {error}") from error
        if size != entry.size:
            raise CheckpointError(f"{work / shard_name(rank)}: {size} bytes on disk, {entry.size} were written")
        files[shard_name(rank)] = entry
        for item in listing["pieces"]:
            for name in ("global_shape", "offset", "shape"):
                item[name] = tuple(item[name])
            pieces.append(PieceEntry(**item))
    return files, tuple(pieces)


def _check_complete(
    pieces: tuple[PieceEntry, ...], state: SavedState, expected: Mapping[str, tuple[int, ...]] | None, where: str
) -> None:
    """Every name has its kinds, and all that are expected are there, with their shapes."""
    fault = kinds_fault(pieces, state.kinds)
    if fault:
        raise CheckpointError(f"{where}: {fault}")
    if expected is None:
        return
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        said = state.shapes.get(piece.name, {}).get(piece.kind)
        if said is None:
            shapes[piece.name] = piece.global_shape
        elif tuple(said) != piece.global_shape:
            raise CheckpointError(
                f"{where}: {piece.kind} of {piece.name} was saved as {piece.global_shape}; the optimizer's rule says "
                f"{tuple(said)}"
            )
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise CheckpointError(f"{where}: no rank saved {missing[0]} ({len(missing)} of {len(expected)} are missing)")
    for name, shape in expected.items():
        if tuple(shape) != shapes[name]:
            raise CheckpointError(f"{where}: {name} was saved as {shapes[name]}; the model has {tuple(shape)}")
