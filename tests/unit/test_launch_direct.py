"""The launch record of runs that no job script started: by hand, torchrun, or a scheduler that starts the ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_lease import no_job  # noqa: F401 - a fixture for every test here

from megatron_port.api import load_config
from megatron_port.cli.main import main
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.rank import LeaseLost, ProcessInfo
from megatron_port.core.errors import ConfigError, DataError
from megatron_port.run import direct_start as direct
from megatron_port.run import launch_record as records
from megatron_port.run import processes
from megatron_port.run.lease import FOLDER, Holder, lease_file, this_process
from megatron_port.run.run_files import AttemptOutcome, read_history, write_outcome
from megatron_port.tools.launch import status, submit
from megatron_port.tools.launch import status as control
from megatron_port.tools.launch.script import Order

INFO = ProcessInfo(0, 8, 0, 4, 0, 2, "n1", 1, "torchrun", "n1")
WHO = "ann@login1"


def config_of(folder: Path, *changes: str) -> RunConfig:
    return load_config("runs/quickstart", f"output_dir={folder.parent}", f"name={folder.name}", *changes)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that plays rank 0."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def held(folder: Path, *, epoch: int = 1, **change: object) -> Holder:
    """The folder's lease, as a process has written it; this one unless ``change`` says otherwise."""
    values = this_process().to_json() | {"epoch": epoch, "silence": 60.0} | change
    holder = Holder(**values)
    (folder / FOLDER).mkdir(exist_ok=True)
    lease_file(folder, epoch).write_text(json.dumps(holder.to_json()))
    return holder


def started(folder: Path, *changes: str, epoch: int = 1, **change: object) -> direct.DirectStart:
    found = direct.note_start(folder, config_of(folder, *changes), INFO, held(folder, epoch=epoch, **change))
    assert found is not None
    return found


def test_a_start_is_recorded_as_a_job_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = started(run)
    row = status.status_of(run, {})
    assert row.live and row.state == f"running ({this_process().host}:{os.getpid()})" and row.attempts == 1
    assert (row.job, row.steps) == ("torchrun.1", config_of(run).training.steps)
    kept = records.read_record(made.record)
    assert (kept.by, kept.scheduler, kept.planned.nodes) == ("command", "torchrun", 2) and kept.environment["packages"]
    assert (made.record / "config.toml").is_file() and not (made.record / "code").exists()
    write_outcome(run, AttemptOutcome("local", "saved", 7, "SIGUSR1", time.time()))
    made.end(None)
    row = status.status_of(run, {})
    assert (row.live, row.state, row.cause, row.node_hours > 0) == (False, "saved", "SIGUSR1", True)
    text = status.attempts_table(run)
    assert f"torchrun.1 (started) on {this_process().host}, process {os.getpid()}" in text and "2 nodes" in text
    assert "saved at step 7: SIGUSR1" in text
    assert main(["launch", "logs", str(run)]) == 2 and "started on a terminal" in capsys.readouterr().err


def test_starts_of_one_configuration_share_a_record(run: Path) -> None:
    first = started(run)
    first.end(DataError("the corpus is gone\nand more"))
    again = started(run, epoch=2)
    assert again.record == first.record and [j.job for j in records.jobs(first.record)] == ["torchrun.1", "torchrun.2"]
    again.end(LeaseLost("another has it"))  # which has noted it
    lost = started(run, "seed=5", epoch=3)
    assert lost.record.name == "0002"
    assert [(a.status, a.cause) for a in read_history(run)] == [
        ("failed", "the corpus is gone"), ("failed", "its process was ended from outside"), ("", "")]
    records.cancel(lost.record, WHO)
    assert started(run, "seed=5", epoch=4).record.name == "0003", "a cancelled record is not gone on with"


def test_a_job_with_a_record_is_left_to_its_script(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = records.claim(run, 1)
    assert place is not None
    records.add_job(place, records.QueuedJob(job="7"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert direct.note_start(run, config_of(run), INFO, held(run)) is None
    monkeypatch.setenv("SLURM_JOB_ID", "8")  # a script of one's own
    assert direct.note_start(run, config_of(run), INFO, held(run)) is not None


def test_cancel_signals_the_process_that_was_recorded(run: Path, sleeper: subprocess.Popen[bytes]) -> None:
    birth = processes.born(sleeper.pid)
    made = started(run, pid=sleeper.pid, born=birth)
    order = Order(run="x")
    with pytest.raises(ConfigError, match=f"is being trained by process {sleeper.pid} on .*launch cancel"):
        submit.submit(config_of(run), order)
    [line] = control.cancel(run)
    assert "SIGTERM sent" in line and sleeper.wait(10) == -signal.SIGTERM
    assert records.cancelled(made.record) and status.status_of(run, {}).state == "cancelled"
    assert "marked as cancelled" in control.cancel(run)[0]


def test_another_process_with_the_number_is_not_signalled(run: Path, sleeper: subprocess.Popen[bytes]) -> None:
    started(run, pid=sleeper.pid, born=processes.born(sleeper.pid) - 1)
    assert direct.running(run) is None and not status.status_of(run, {}).live
    assert "nothing waits or runs" in control.cancel(run)[0]
    assert not processes.signal_same(sleeper.pid, processes.born(sleeper.pid) - 1, signal.SIGTERM)
    assert sleeper.poll() is None


def test_a_process_of_another_host_reads_the_mark(run: Path) -> None:
    made = started(run, space="elsewhere", host="n9", pid=4242)
    assert status.status_of(run, {}).state == "running (n9:4242)"
    [line] = control.cancel(run)
    assert "process 4242 on n9 is told by a mark" in line
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        made.look()
        made.look()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [signal.SIGTERM]
    old = time.time() - 61
    os.utime(lease_file(run, 1), (old, old))
    assert direct.running(run) is None, "its lease is not renewed"
    held(run, epoch=2, space="elsewhere")
    assert direct.running(run) is None, "another attempt has the folder"


def test_output_in_a_file_is_the_log(run: Path, tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    code = "from megatron_port.run.direct_start import stdout_file; print(stdout_file())"
    with log.open("w") as stream:
        subprocess.run([sys.executable, "-c", code], stdout=stream, check=True)
    assert log.read_text().strip() == str(log)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == ""
    made = replace(started(run), attempt=replace(read_history(run)[-1], log=str(log)))
    records.add_job(made.record, records.QueuedJob(job="x", log=str(log), process={"host": "n1"}))
    assert control.log_files(run) == [log]
