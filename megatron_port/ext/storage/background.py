"""Asynchronous saves: the step pays for a copy, a thread on every rank does the rest.

1. At a step's end all ranks call :meth:`BackgroundSave.start`: each copies its pieces into its host buffer, and
   training continues. The first time rank 0 also removes what a killed run left and makes ``step-N.eE.tmp``, and one
   all-reduce says whether it went well everywhere; later no rank waits for another's copy.
2. Rank 0's thread makes ``step-N.eE.tmp``; the others' wait until they see it. Every rank's thread writes, hashes,
   fsyncs and reads back its file, then its list. Rank 0's waits until all lists are there, in the shared directory,
   and commits as ``writer`` does. Threads use no collective, so nothing can interleave with training's, and a rank that
   hangs in training does not keep a written checkpoint from its commit.
3. While a save is in flight all ranks call :meth:`BackgroundSave.poll` at each step's end: one all-reduce of three
   integers tells them alike whether it is still running, was committed, or failed and why.

One save is in flight at a time; ``finish`` waits for it. Memory: one snapshot a rank, reused. A process that dies
takes its threads along and leaves a ``.tmp``, which the next save removes.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_port.core.checkpoint.format import SavedState, directory_name, shard_name
from megatron_port.core.checkpoint.shard import ShardPlan, plan_shard
from megatron_port.core.checkpoint.writer import (
    LONGEST_NAP,
    VISIBLE_SECONDS,
    Cancelled,
    Committer,
    Note,
    Peers,
    absent_parts,
    await_visible,
    commit,
    failure_text,
    prepare,
    tidy,
    together,
    work_folder,
    write_part,
)
from megatron_port.core.dist.device_streams import COMPUTE, HOST, Event, access, host_waits_for
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.errors import CheckpointError
from megatron_port.core.registry import PARTS

_NICE = 10
_THREAD = "saving thread"
"""The stream of a save's accesses, for an observer of ``dist.device_streams``."""


class HostBuffer:
    """Host memory for one snapshot; kept and used again, so that only the first save pays for fresh pages.

    Bounded: there is one, of the size of this rank's largest snapshot. Pinned where the state is on a GPU.
    """

    def __init__(self) -> None:
        self._data: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._data is None else self._data.numel()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The memory, where there is any."""
        return [] if self._data is None else [self._data]

    def take(self, plan: ShardPlan) -> memoryview:
        """Copy the data of ``plan`` (not its header), in the order of the file; complete on return.

        The result is valid until the next call.

        Raises:
            CheckpointError: not so much host memory (bytes are named).
        """
        size = plan.data_bytes
        devices = {p.tensor.device for p in plan.pieces if p.tensor.is_cuda}
        if size > self.nbytes:
            self._data = None  # first let go, so that two never exist
            try:
                self._data = PARTS.function("host memory")(size, pinned=bool(devices))
            except (MemoryError, OSError, RuntimeError) as error:
                raise CheckpointError(
                    f"no {size} bytes of {'pinned ' if devices else ''}host memory for a snapshot of this rank's state "
                    f"({str(error).splitlines()[0]}); set checkpoint.asynchronous = false, which needs none"
                ) from error
        if not size or self._data is None:
            return memoryview(b"")
        for piece, (start, stop) in zip(plan.pieces, plan.spans):
            access(COMPUTE, "snapshot", reads=[piece.tensor], writes=[self._data[start:stop]])
            _copy(self._data[start:stop], piece.tensor.detach())
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        host_waits_for(COMPUTE)
        return self._data[:size].numpy().data


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """``source``'s elements into as many bytes of host memory."""
    if source.device.type == "cpu" and source.is_contiguous():
        flat = source.as_strided(source.shape, (1,)).view(torch.uint8)
        # numpy's copy is the C library's memcpy, whose streaming stores beat torch's loop on large blocks.
        np.copyto(target.numpy(), flat.numpy())
    else:
        target.view(source.dtype).copy_(source, non_blocking=True)


@dataclass(frozen=True)
class Finished:
    """Result of a save that has ended; the same on every rank but for the seconds."""

    step: int
    path: Path
    """The committed directory, or the one that was not made."""
    failure: str | None
    """None: committed. Else the message of the first rank that failed."""
    stall_seconds: float
    """How long the step was held up on this rank."""
    seconds: float
    """From the start of the copy until it was seen to have ended."""


@dataclass
class _Job:
    state: SavedState
    expected: Mapping[str, tuple[int, ...]] | None
    work: Path
    final: Path
    began: float
    plan: ShardPlan | None = None
    image: memoryview = field(default_factory=lambda: memoryview(b""))
    hashes: Any = None
    prepared: bool = False
    """``work`` is there."""
    stall: float = 0.0
    cancel: threading.Event = field(default_factory=threading.Event)
    others_done: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    """Every rank has called ``start``."""
    failed: bool = False
    message: str | None = None
    thread: threading.Thread | None = None
    written: Event = field(default_factory=Event)
    """The thread has read the snapshot for the last time."""

    def data(self) -> Iterable[memoryview]:
        """The snapshot, to be written."""
        if self.hashes is None or self.plan is None:
            return [self.image] if len(self.image) else []
        compared: Iterable[memoryview] = self.hashes.compared(self.image[a:z] for a, z in self.plan.spans)
        return compared

    def proceed(self) -> None:
        """Raise if the save is lost anyway."""
        if self.cancel.is_set():
            raise Cancelled


class BackgroundSave:
    """Background saves on one rank. All methods but ``in_flight`` and ``abandon`` are collective over ``peers``.

    Args:
        peers: the ranks that save; used in the caller's thread only.
        directory: where checkpoints live; the same shared folder on every rank.
        keep: newest checkpoints kept, after a commit; 0: all.
        verify: read every file back before the commit.
        compare: compare what is written with the state that was copied (``snapshot_hashes``).
        note: called on rank 0, from its thread, with things worth a line.
        visible_seconds: how long a file may take to appear to another rank.
        committer: of the run, as in ``writer.save_checkpoint``.
    """

    def __init__(
        self,
        peers: Peers,
        directory: Path,
        *,
        keep: int = 0,
        verify: bool = True,
        compare: bool = False,
        note: Note | None = None,
        visible_seconds: float = VISIBLE_SECONDS,
        committer: Committer | None = None,
    ) -> None:
        self._committer = committer or Committer()
        self._peers, self._directory, self._keep, self._verify = peers, directory, keep, verify
        self._note, self._visible, self._compare = note, visible_seconds, compare
        self._buffer = HostBuffer()
        self._plan: ShardPlan | None = None
        self._job: _Job | None = None
        self._clean = False  # nothing of an earlier run is left in the directory

    @property
    def in_flight(self) -> int | None:
        """Step that is being saved; None: nothing is."""
        return None if self._job is None else self._job.state.step

    def start(
        self,
        state: SavedState,
        pieces: Iterable[StatePiece],
        *,
        expected: Mapping[str, tuple[int, ...]] | None = None,
    ) -> float:
        """Copy the state and begin to save it; the arguments are those of ``writer.save_checkpoint``.

        Only the first call meets the other ranks; what fails in a later one comes up in ``poll``.

        Returns:
            Seconds that this call held up the caller.

        Raises:
            CheckpointError: on every rank, if the first save could not begin on one: nothing is in flight then.
            ValueError: a save is in flight; ``finish`` it first.
        """
        if self._job is not None:
            raise ValueError(f"the save of step {self.in_flight} is in flight; finish() it first")
        began = time.perf_counter()
        final = self._directory / directory_name(state.step)
        job = _Job(state, expected, work_folder(final, self._committer), final, began)
        if self._clean:
            try:
                self._copy(job, pieces)
            except Exception as error:  # the others hear of it at the next poll
                self._give_up(job, error)
        else:
            self._begin_together(job, pieces)
        job.thread = threading.Thread(target=self._run, args=(job,), name=f"save-{state.step}", daemon=True)
        job.stall = time.perf_counter() - began
        self._job = job
        access(_THREAD, "a snapshot is written to its file", reads=self._buffer.tensors)
        job.written.record(_THREAD)
        job.thread.start()
        return job.stall

    def _copy(self, job: _Job, pieces: Iterable[StatePiece]) -> None:
        plan = plan_shard(shard_name(self._peers.rank), (p for p in pieces if p.tensor.numel()), last=self._plan)
        self._plan = replace(plan, pieces=())
        job.hashes = PARTS.function("snapshot hashes")(plan.pieces) if self._compare else None
        job.plan, job.image = plan, self._buffer.take(plan)

    def _begin_together(self, job: _Job, pieces: Iterable[StatePiece]) -> None:
        """Begin without what an earlier run left: a rank must not take that run's directory for this save's."""

        def begin() -> None:
            self._copy(job, pieces)
            if self._peers.rank == 0:
                prepare(self._directory, job.work, job.state, self._committer)

        try:
            together(self._peers, begin)
        except BaseException:
            if self._peers.rank == 0:
                shutil.rmtree(job.work, ignore_errors=True)
            raise
        self._clean = job.prepared = True

    def _give_up(self, job: _Job, error: Exception) -> None:
        job.message, job.failed = failure_text(self._peers, error), True

    def poll(self) -> Finished | None:
        """Meet the others if a save is in flight; return its result once it has ended on every rank, else None."""
        job = self._job
        if job is None or job.thread is None:
            return None
        rank, world = self._peers.rank, self._peers.world_size
        running = job.thread.is_alive()
        some, others, worst = self._peers.maximum(
            [int(running), int(running and rank != 0), world - rank if job.failed and not running else 0]
        )
        job.begun.set()
        if worst:
            job.cancel.set()
        elif not others:
            job.others_done.set()
        if some:
            return None
        job.thread.join()
        job.written.wait(HOST)
        self._job = None
        failure = self._peers.first_failure(job.message)
        if failure is not None and rank == 0:
            shutil.rmtree(job.work, ignore_errors=True)
        return Finished(job.state.step, job.final, failure, job.stall, time.perf_counter() - job.began)

    def finish(self) -> Finished | None:
        """Wait for the save in flight, if there is one."""
        while self._job is not None:
            assert self._job.thread is not None
            # The nap bounds how late a failure elsewhere reaches this rank's thread.
            self._job.thread.join(LONGEST_NAP)
            done = self.poll()
            if done is not None:
                return done
        return None

    def abandon(self, seconds: float) -> None:
        """Give this rank's thread a moment to end, on the way out after an error. Not collective."""
        if self._job is not None and self._job.thread is not None:
            self._job.thread.join(seconds)
            self._job.cancel.set()  # the process may live on, and nobody waits for the others' parts any more

    def _run(self, job: _Job) -> None:
        """Save this rank's part, in its thread."""
        _yield_to_training()
        if job.plan is None or job.failed:
            return
        try:
            if not job.prepared:
                self._open_work(job)
            write_part(
                self._peers.rank, job.work, job.plan, job.data(), verify=self._verify, proceed=job.proceed
            )
            if self._peers.rank == 0:
                # Once the others have written, what is missing is not visible from here.
                await_visible(
                    lambda: absent_parts(job.work, self._peers.world_size), self._visible, since=job.others_done,
                    cancel=job.cancel,
                )
                commit(job.work, job.final, job.state, self._peers.world_size, job.expected, self._committer)
                tidy(self._directory, job.final, self._keep, self._note, self._committer)
        except Cancelled:
            job.failed = True
        except Exception as error:  # whatever it is, it must come up in every rank's main thread
            self._give_up(job, error)

    def _open_work(self, job: _Job) -> None:
        """Make the directory on rank 0; wait until it is visible on the others."""
        if self._peers.rank == 0:
            prepare(self._directory, job.work, job.state, self._committer)
            return
        await_visible(
            lambda: "" if job.work.is_dir() else f"{job.work}: not visible", self._visible, since=job.begun,
            cancel=job.cancel,
        )


def _yield_to_training() -> None:
    """Give the calling thread a lower priority than training. Linux has one per thread; otherwise nothing happens."""
    if sys.platform == "linux":
        with suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + _NICE, 19))
