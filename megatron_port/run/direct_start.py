"""The launch record of a run that no job script of ours started: by hand, torchrun, Flux, PBS, LSF or Kubernetes.

Rank 0 writes it once it holds the run's folder, in the form of a submitted job's (``run.launch_record``), with the
process that it is: host, process id, time of its start. So ``launch status | list | logs | cancel`` see such a run and
stop it. Nothing is started from this record, so it keeps the configuration and the versions, and no copy of the code.

A process is signalled only while it is the same one: its id names another after a while. One of another host is not
signalled at all: rank 0 looks for the record's mark at every heartbeat of its lease.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_port import __version__
from megatron_port.core.config.dump import to_toml
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.rank import LeaseLost, ProcessInfo
from megatron_port.core.errors import PortError
from megatron_port.core.io.files import write_output
from megatron_port.core.io.logging import redact
from megatron_port.run import launch_record as records
from megatron_port.run import processes
from megatron_port.run import sources as snapshot
from megatron_port.run.config_hash import config_hash
from megatron_port.run.launch_record import Planned, QueuedJob, Record
from megatron_port.run.launchers import current_job
from megatron_port.run.lease import Holder, Life, lease_file, look, newest_epoch, read_holder, this_process
from megatron_port.run.run_files import FAILED, Attempt, add_attempt, close_lost, read_outcome, steps_done

BY = "command"
"""``Record.by`` of these records."""
CAUSE_CHARACTERS = 300


@dataclass
class DirectStart:
    """One start of rank 0, from the lease of the folder to its release."""

    run_folder: Path
    record: Path
    attempt: Attempt
    told: bool = False
    """The process has been sent the SIGTERM of ``launch cancel``."""

    def look(self) -> None:
        """Stop this process, once, where the record has been cancelled; called at every heartbeat of the lease.

        The signal is the one that ``launch cancel`` sends on this host: the ranks agree on it, save and end.
        """
        if not self.told and records.cancelled(self.record):
            self.told = True
            os.kill(os.getpid(), signal.SIGTERM)

    def end(self, error: BaseException | None) -> None:
        """Note how the attempt ended. A disk that refuses the line is passed over: the end is in the run's events."""
        if isinstance(error, LeaseLost):
            return  # the attempt that holds the folder now has noted it
        outcome, step = read_outcome(self.run_folder), steps_done(self.run_folder)
        text = str(error) if isinstance(error, PortError) else f"{type(error).__name__}: {error}"
        status, cause = FAILED, redact(text.partition("\n")[0])[:CAUSE_CHARACTERS]
        if error is None:
            status, step, cause = (outcome.status, outcome.step, outcome.signal) if outcome else ("", step, "")
        began = self.attempt
        ended = Attempt(began.attempt, began.series, began.nodes, status, step, cause, time.time(),
                        node_count=began.node_count)
        with contextlib.suppress(OSError):
            add_attempt(self.run_folder, ended)


def note_start(run_folder: Path, config: RunConfig, info: ProcessInfo, holder: Holder) -> DirectStart | None:
    """Write the record of a start, and its line in ``attempts.jsonl``; for rank 0, which holds the folder.

    A start with the configuration and code of the one before joins its record. None: a job script has made a record of
    this job, and notes its ends.

    Raises OSError.
    """
    job = current_job()
    if job is not None and records.record_of(run_folder, job.series, *job.names) is not None:
        return None
    attempt, log = f"{info.launcher}.{holder.epoch}", stdout_file()
    close_lost(run_folder, asking=attempt, nodes_down=lambda _: [])
    folder = _record_for(run_folder, config, info)
    records.add_job(folder, QueuedJob(
        job=attempt, why="started", time=holder.since, log=log, process={
            "host": holder.host, "pid": holder.pid, "born": holder.born, "space": holder.space, "epoch": holder.epoch},
    ))
    started = Attempt(attempt, attempt, holder.host, time=holder.since, began=holder.since, record=folder.name, log=log,
                      node_count=info.num_nodes)
    add_attempt(run_folder, started)
    return DirectStart(run_folder, folder, started)


def _record_for(run_folder: Path, config: RunConfig, info: ProcessInfo) -> Path:
    """Return the newest record if it is of the same configuration and code, otherwise a new one. Raises OSError."""
    code = {"version": __version__, "commit": snapshot.commit()}
    newest, digest = records.newest(run_folder), config_hash(config)
    if newest is not None and not records.cancelled(newest):
        with contextlib.suppress(records.RecordFault):
            made = records.read_record(newest)
            if made.by == BY and made.config_digest == digest and dict(made.code) == code:
                return newest
    number, folder = 0, None
    while folder is None:
        number = max(records.numbers(run_folder), default=0) + 1
        folder = records.claim(run_folder, number)
    steps, batch = config.training.steps, config.batch.global_batch_size
    planned = Planned(steps=steps, save_interval=config.checkpoint.save_interval, nodes=info.num_nodes,
                      tokens_per_step=batch * config.model.seq_length)
    write_output(folder / records.CONFIG, to_toml(config))
    records.write_record(folder, Record(
        number=number, name=config.name, time=time.time(), by=BY, run=config.name,
        arguments=tuple(redact(word) for word in sys.argv[1:]),
        cwd=os.getcwd(), scheduler=info.launcher, code=code, environment=snapshot.interpreter(sys.executable),
        config_digest=digest, planned=planned,
    ))
    return folder


def stdout_file() -> str:
    """Return the file that this process's output goes to; empty: a terminal, a pipe, or nothing."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.fstat(1).st_mode):
            path = os.readlink("/proc/self/fd/1")
            return path if os.path.isfile(path) else ""
    return ""


def only(run_folder: Path) -> bool:
    """No scheduler knows the run: all that its records hold are direct starts."""
    every = [records.jobs(folder) for folder in records.newest_first(run_folder)]
    return bool(every) and all(jobs and all(job.process for job in jobs) for jobs in every)


@dataclass(frozen=True)
class RunningProcess:
    """The process of rank 0 of a run that was started directly."""

    job: str
    """As in the record."""
    record: Path
    holder: Holder
    here: bool
    """This host can look it up and signal it."""


def running(run_folder: Path, record: Path | None = None) -> RunningProcess | None:
    """Return the process that trains in a folder, if its newest record is of a direct start; None: none runs.

    One on a host that cannot be asked counts as running while its lease is renewed, by the file's time.

    Args:
        record: the newest record, where it is known.
    """
    record = record or records.newest(run_folder)
    found = next((j for j in reversed(records.jobs(record)) if j.process), None) if record is not None else None
    if record is None or found is None:
        return None
    with contextlib.suppress(OSError):
        epoch = newest_epoch(run_folder)
        holder, _ = read_holder(run_folder, epoch)
        mine = this_process()
        if epoch != found.process.get("epoch") or not holder.pid:
            return None
        life = look(holder, mine).life
        silent = time.time() - lease_file(run_folder, epoch).stat().st_mtime
        if life is Life.RUNS or (life is Life.UNKNOWN and silent < holder.silence):
            return RunningProcess(found.job, record, holder, here=life is Life.RUNS and holder.space == mine.space)
    return None


def stop(found: RunningProcess, who: str) -> str:
    """Cancel a run that was started directly; return a line on what was done. The mark comes first.

    Raises OSError: the mark cannot be written, or the process is another user's.
    """
    records.cancel(found.record, who)
    holder = found.holder
    name = f"process {holder.pid} on {holder.host}"
    if not found.here:
        return (f"{name} is told by a mark in {found.record}, which it reads within {holder.silence:.0f} s; then it "
                "saves and ends")
    if not processes.signal_same(holder.pid, holder.born, signal.SIGTERM):
        return f"{name} has ended"
    return f"{name}: SIGTERM sent; it saves after its step and ends"
