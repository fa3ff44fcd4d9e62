"""One attempt at a time in a run folder: who holds it, when it may be taken over, and what stops the one before.

Holders are real processes (forked), or files written as another host's process would write them.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_port.core.dist.rank import LeaseLost
from megatron_port.core.errors import EXIT_CONFIG, ConfigError, EnvironmentFault
from megatron_port.ext.telemetry.metrics import MetricsWriter, read_metrics
from megatron_port.ext.telemetry.sinks import MetricsSink
from megatron_port.run import lease as leases
from megatron_port.run.launchers import AGENT_VARIABLE
from megatron_port.run.lease import (
    FOLDER,
    FolderInUse,
    Holder,
    Life,
    acquire,
    lease_file,
    look,
    newest_epoch,
    read_holder,
    refuse_array_in_one_folder,
    refuse_if_held,
    this_process,
)

QUICK = 0.6
"""Seconds of silence after which these tests call a holder dead."""
SLURM = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID",
         "SLURM_CLUSTER_NAME", "MEGATRON_PORT_SERIES")


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SLURM:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def forks() -> Iterator[Callable[[Callable[[], None]], int]]:
    """Run a function in a child; its process id. What is left is killed."""
    children: list[int] = []

    def fork(body: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                body()
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
        return pid

    yield fork
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue


def held_by_a_child(folder: Path, fork: Callable[[Callable[[], None]], int]) -> int:
    read, write = os.pipe()

    def hold() -> None:
        acquire(folder)
        os.write(write, b"held")  # its temporary files are gone too
        time.sleep(60)

    pid = fork(hold)
    os.close(write)
    with open(read, "rb") as told:
        assert told.read(4) == b"held"
    return pid


def elsewhere(folder: Path, **changes: object) -> Holder:
    """A holder on a host that cannot be asked, in the folder's next epoch."""
    values = {"host": "node7", "space": "another boot/pid:[1]", "pid": 4242, "born": 99, "since": 1.0} | changes
    holder = Holder(epoch=newest_epoch(folder) + 1, **values)  # type: ignore[arg-type]
    (folder / leases.FOLDER).mkdir(parents=True, exist_ok=True)
    lease_file(folder, holder.epoch).write_text(json.dumps(holder.to_json()))
    return holder


def squeue(folder: Path, monkeypatch: pytest.MonkeyPatch, job: str, steps: str = "", code: int = 0) -> Path:
    """A ``squeue`` that answers so for any job, first on PATH; each call is a line of the file that is returned."""
    tools, calls = folder / "bin", folder / "calls"
    tools.mkdir(exist_ok=True)
    (tools / "squeue").write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\ncase "$*" in *--steps*) printf "{steps}";; *) printf "{job}";; esac\n'
        f"exit {code}\n"
    )
    (tools / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    return calls


# ---------------------------------------------------------------- a process of this host


def test_a_second_start_is_refused_with_one_message(tmp_path: Path, forks: Callable) -> None:
    folder = tmp_path / "run"
    pid = held_by_a_child(folder, forks)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(FolderInUse) as caught:
        acquire(folder)
    assert caught.value.exit_code == EXIT_CONFIG == 2
    text = str(caught.value)
    for said in (str(folder), f"process {pid}", socket.gethostname(), time.strftime("since %Y-%m-%d"),
                 "its process runs on this host", "--set name=run-2", "wait until", f"kill {pid}"):
        assert said in text, (said, text)
    assert "\n" not in text
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    assert newest_epoch(folder) == 1


@pytest.mark.parametrize("stopped", [False, True], ids=["alive", "stopped"])
def test_a_killed_holder_is_replaced_at_once(tmp_path: Path, forks: Callable, stopped: bool) -> None:
    """Also one whose process number lives on in another process. A stopped process is not dead."""
    folder = tmp_path / "run"
    pid = held_by_a_child(folder, forks)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(FolderInUse, match=f"kill {pid}"):
            acquire(folder, silence_seconds=QUICK)
    os.kill(pid, signal.SIGKILL)  # not reaped: a zombie is dead
    begun = time.monotonic()
    lease = acquire(folder)
    assert time.monotonic() - begun < 20  # of the 60 s that a silent one would get
    assert lease.epoch == 2 and f"process {pid} is gone" in lease.taken_from
    lease.check()
    lease.release()
    again = acquire(folder)
    assert again.epoch == 3 and again.taken_from == ""  # it was released: nothing to tell
    again.release()
    reused = replace(read_holder(folder, 3)[0], born=1, pid=os.getpid(), released=False)
    assert look(reused, this_process()).life is Life.ENDED


def test_a_rank_that_this_runs_agent_has_replaced_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was on a node that is lost: nobody here can look its process up."""
    monkeypatch.setenv(AGENT_VARIABLE, "a1")
    there = replace(this_process(), space="another/space")
    assert look(there, this_process()).life is Life.ENDED
    for agent in ("", "a2"):
        monkeypatch.setenv(AGENT_VARIABLE, agent)
        assert look(there, this_process()).life is Life.UNKNOWN
        assert look(replace(there, agent=""), this_process()).life is Life.UNKNOWN


def test_of_many_that_start_at_once_one_gets_it(tmp_path: Path, forks: Callable) -> None:
    """Twelve children take the folder from a dead holder; who holds it makes a file that must not be there."""
    folder = tmp_path / "run"
    os.kill(held_by_a_child(folder, forks), signal.SIGKILL)
    go, inside, leave = tmp_path / "go", tmp_path / "inside", tmp_path / "leave"

    def start() -> None:
        while not go.exists():
            time.sleep(0.001)
        try:
            lease = acquire(folder)
        except FolderInUse:
            os._exit(7)
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
        while not leave.exists():
            time.sleep(0.01)
        lease.check()

    children = {forks(start) for _ in range(12)}
    go.touch()
    codes = []
    until = time.monotonic() + 50
    while children:
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                codes.append(os.waitstatus_to_exitcode(status))
        if len(codes) == 11 or time.monotonic() > until:
            leave.touch()
        time.sleep(0.01)
    assert sorted(codes) == [0] + [7] * 11, codes
    assert newest_epoch(folder) == 2


# ---------------------------------------------------------------- another host


def test_a_heartbeat_that_moves_is_alive_whatever_the_clocks_say(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    holder = elsewhere(folder, since=4e9)
    stop = threading.Event()

    def beat() -> None:
        for n in range(1, 1000):
            if stop.wait(0.1):
                return
            part = folder / "part"
            part.write_text(json.dumps(replace(holder, heartbeat=n).to_json()))
            os.utime(part, (10000.0 - n, 10000.0 - n))  # a clock that runs backwards
            os.replace(part, lease_file(folder, 1))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(FolderInUse, match=r"on node7, process 4242.*its heartbeat moves.*kill 4242 on node7"):
            acquire(folder, silence_seconds=30.0)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("mtime", [1.0, 4e9], ids=["long ago", "in the future"])
def test_a_heartbeat_that_stands_still_is_waited_for(tmp_path: Path, mtime: float) -> None:
    """By this process's own clock: how old the file says it is has no say."""
    folder = tmp_path / "run"
    elsewhere(folder)
    os.utime(lease_file(folder, 1), (mtime, mtime))
    begun, notes = time.monotonic(), []
    lease = acquire(folder, silence_seconds=QUICK, note=notes.append)
    waited = time.monotonic() - begun
    assert QUICK <= waited < 20
    assert lease.epoch == 2 and "its heartbeat has stood still" in lease.taken_from and "node7" in notes[0]
    lease.release()


def test_a_holder_that_beats_slowly_is_given_its_own_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    elsewhere(folder, silence=1.5)
    begun = time.monotonic()
    acquire(folder, silence_seconds=0.3).release()
    assert time.monotonic() - begun >= 1.5 and read_holder(folder, 2)[0].silence == 0.3


def test_a_torn_file_names_nobody_and_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    elsewhere(folder)
    lease_file(folder, 1).write_text('{"epoch": 1, "pid"')
    lease = acquire(folder, silence_seconds=QUICK)
    assert lease.epoch == 2
    lease.release()


# ---------------------------------------------------------------- SLURM


@pytest.mark.parametrize(
    ("state", "steps", "code", "refused"),
    [
        ("RUNNING\\n", "12.3\\n12.batch\\n", 0, True),
        ("SUSPENDED\\n", "12.3\\n", 0, True),
        ("COMPLETING\\n", "", 0, True),
        ("RUNNING\\n", "12.batch\\n12.4\\n", 0, False),  # its step has ended
        ("PENDING\\n", "", 0, False),  # it waits to be started again
        ("", "", 0, False),
        ("slurm_load_jobs error: Invalid job id specified\\n", "", 1, False),
    ],
    ids=["running", "suspended", "completing", "step gone", "pending", "gone", "unknown job"],
)
def test_squeue_is_asked_before_a_job_is_called_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, steps: str, code: int, refused: bool
) -> None:
    """A silent job that SLURM says runs keeps its folder; one that SLURM does not know is not waited for."""
    folder = tmp_path / "run"
    elsewhere(folder, job="12", attempt="12.0", step="12.3")
    calls = squeue(tmp_path, monkeypatch, state, steps, code)
    begun = time.monotonic()
    if refused:
        with pytest.raises(FolderInUse, match=r"SLURM job 12\) on node7.*squeue says that job 12 is.*scancel 12"):
            acquire(folder, silence_seconds=QUICK)
    else:
        lease = acquire(folder, silence_seconds=60.0)
        assert lease.epoch == 2 and time.monotonic() - begun < 30
        lease.release()
    assert "--jobs 12" in calls.read_text()


def test_a_slurm_that_does_not_answer_leaves_the_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    elsewhere(folder, job="12", step="12.0")
    squeue(tmp_path, monkeypatch, "Unable to contact slurm controller\\n", code=1)
    begun = time.monotonic()
    lease = acquire(folder, silence_seconds=QUICK)
    assert time.monotonic() - begun >= QUICK and "squeue does not say" in lease.taken_from
    lease.release()


def test_a_requeued_job_takes_its_own_folder_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    elsewhere(folder, job="12", restart=0, step="12.0")
    calls = squeue(tmp_path, monkeypatch, "RUNNING\\n", "12.0\\n")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    lease = acquire(folder)
    assert lease.epoch == 2 and lease.attempt == "12.1" and "SLURM has started job 12 again" in lease.taken_from
    lease.release()
    assert not calls.exists()


def test_the_next_job_of_a_chain_waits_for_the_end_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    elsewhere(folder, job="12", series="12", step="12.0")
    squeue(tmp_path, monkeypatch, "RUNNING\\n", "12.0\\n")
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    monkeypatch.setenv("MEGATRON_PORT_SERIES", "12")
    refuse_if_held(folder)
    timer = threading.Timer(1.0, lambda: squeue(tmp_path, monkeypatch, "COMPLETED\\n"))
    timer.start()
    lease = acquire(folder, silence_seconds=30.0)
    timer.join()
    assert lease.epoch == 2
    lease.release()


def test_a_job_script_is_refused_ahead_of_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    refuse_if_held(folder)  # nobody was ever there
    elsewhere(folder, job="12", step="12.0")
    squeue(tmp_path, monkeypatch, "RUNNING\\n", "12.0\\n")
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    with pytest.raises(FolderInUse, match="scancel 12"):
        refuse_if_held(folder)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    refuse_if_held(folder)  # its own
    assert newest_epoch(folder) == 1


@pytest.mark.parametrize(
    ("name", "throttle", "refused"),
    [("run", "", True), ("run-3", "", False), ("run-03", "", False), ("run-31", "", True),
     ("run", "ArrayTaskThrottle=1", False), ("run", "ArrayTaskThrottle=10", True)],
)
def test_tasks_of_a_job_array_need_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, throttle: str, refused: bool
) -> None:
    """Unless they run one after another, which is a way to chain jobs."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tmp_path / "project-3").mkdir()
    monkeypatch.chdir(tmp_path / "project-3")  # what all tasks have in common tells none of them
    run_folder = Path.cwd() / "runs" / name
    (tools / "scontrol").write_text(f'#!/bin/sh\n[ "$4" = "" ] && echo "JobId=9 ArrayTaskId=3 {throttle} X=1"\n')
    (tools / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    refuse_array_in_one_folder(run_folder)  # no array
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    if refused:
        with pytest.raises(ConfigError, match=r"task 3 of the job array 7.*-\$SLURM_ARRAY_TASK_ID"):
            refuse_array_in_one_folder(run_folder)
    else:
        refuse_array_in_one_folder(run_folder)


# ---------------------------------------------------------------- fencing


def test_whoever_was_taken_for_dead_stops(tmp_path: Path) -> None:
    """Found by the next look, and by the heartbeat alone; what it would write then is not written."""
    folder = tmp_path / "run"
    lease = acquire(folder, silence_seconds=0.3)
    writer = MetricsWriter(folder / "metrics.jsonl", guard=lease.check)
    writer.write({"step": 1, "loss": 1.0})
    lease.check()
    elsewhere(folder, attempt="77.0", job="77")
    with pytest.raises(LeaseLost) as caught:
        writer.write({"step": 2, "loss": 1.0})
    assert caught.value.exit_code == EXIT_CONFIG
    for said in ("attempt 77.0", "node7", "epoch 2", "epoch 1", "stops here"):
        assert said in str(caught.value), said
    with pytest.raises(LeaseLost):
        MetricsWriter(folder / "metrics.jsonl", resumed_step=0, guard=lease.check)
    warned: list[str] = []
    sink = MetricsSink(folder / "metrics.jsonl", 0, warned.append, lease.check)
    sink.write({"step": 2, "loss": 1.0})
    sink.close()
    assert [r["step"] for r in read_metrics(folder / "metrics.jsonl")] == [1] and not warned
    lease.release()
    assert not read_holder(folder, 2)[0].released and not read_holder(folder, 1)[0].released

    other = acquire(tmp_path / "other", silence_seconds=0.3)
    elsewhere(tmp_path / "other")
    until = time.monotonic() + 10
    while not other.lost:
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(LeaseLost):
        other.check()


def test_the_heartbeat_moves_also_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    lease = acquire(folder, silence_seconds=0.3)

    def moved(since: object) -> object:
        until = time.monotonic() + 10
        while (mark := read_holder(folder, 1)[1]) == since:
            assert time.monotonic() < until
            time.sleep(0.01)
        return mark

    first = moved(read_holder(folder, 1)[1])
    beats = read_holder(folder, 1)[0].heartbeat

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    moved(moved(first))
    monkeypatch.undo()
    assert beats > 0 and not lease.lost
    # A person who removes the folder does not end the run: the file comes back.
    for path in (folder / leases.FOLDER).iterdir():
        path.unlink()
    (folder / leases.FOLDER).rmdir()
    until = time.monotonic() + 10
    while newest_epoch(folder) != 1:
        assert time.monotonic() < until
        time.sleep(0.01)
    lease.check()
    lease.release()
    assert read_holder(folder, 1)[0].released


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O_EXCL decides there; on NFS an answer that was lost is told from a refusal by the number of names."""
    def none(*args: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(leases.os, "link", none)  # type: ignore[attr-defined]
    folder = tmp_path / "run"
    acquire(folder).release()
    lease = acquire(folder)
    assert lease.epoch == 2
    assert not leases._claim(folder, Holder(epoch=2)) and read_holder(folder, 2)[0].pid == os.getpid()
    monkeypatch.undo()
    real = os.link

    def answer_lost(a: Path, b: Path) -> None:
        real(a, b)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(leases.os, "link", answer_lost)  # type: ignore[attr-defined]
    assert leases._claim(folder, Holder(epoch=3))
    assert not leases._claim(folder, Holder(epoch=3))
    assert not [p for p in (folder / leases.FOLDER).iterdir() if p.name.startswith(".")]


def test_old_files_are_forgotten_and_a_late_claim_of_a_forgotten_epoch_fails(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for _ in range(leases.KEPT + 5):
        acquire(folder).release()
    names = sorted(p.name for p in (folder / leases.FOLDER).iterdir())
    assert len(names) == leases.KEPT and names[-1] == f"epoch-{leases.KEPT + 5:08d}.json"
    assert leases._claim(folder, Holder(epoch=1))  # its file is gone, so it can be made; and it is not the newest
    assert newest_epoch(folder) == leases.KEPT + 5


@pytest.mark.parametrize("epoch", [10**18 - 1, 10**18, 10**30])
def test_a_number_that_no_run_reaches_is_refused_or_passed_over(tmp_path: Path, epoch: int) -> None:
    """The next number would have more digits than the names of these files have."""
    place = tmp_path / FOLDER / f"epoch-{epoch}.json"
    place.parent.mkdir()
    place.write_text(json.dumps({"epoch": epoch, "released": True}))
    if len(str(epoch)) == 18:
        with pytest.raises(EnvironmentFault, match=rf"no epoch can follow {epoch}, which no run reaches; remove that"):
            acquire(tmp_path, silence_seconds=0.2)
    else:
        acquire(tmp_path, silence_seconds=0.2).release()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_in_the_place_of_a_lease_names_nobody_and_is_not_opened(
    tmp_path: Path, make: Callable[[Path], None],
) -> None:
    (tmp_path / FOLDER).mkdir()
    make(tmp_path / FOLDER / "epoch-00000004.json")
    refuse_if_held(tmp_path)
    held = acquire(tmp_path, silence_seconds=0.3)
    assert held.epoch == 5
    held.release()


@pytest.mark.parametrize("silence", [1e300, 1e9, "x", -1, float("inf")])
def test_nobody_waits_for_ever_for_a_holder(tmp_path: Path, silence: object) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "epoch-00000001.json").write_text(json.dumps({"epoch": 1, "host": "n", "silence": silence}))
    assert read_holder(tmp_path, 1)[0].silence == 0
    acquire(tmp_path, silence_seconds=0.3).release()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(EnvironmentFault, match=r"lease cannot be written: .*output_dir"):
        acquire(tmp_path / "run")
