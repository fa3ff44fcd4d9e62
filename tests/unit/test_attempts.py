"""The starts of a run: what the next one is told, and what follows the end of one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.config.schema import LaunchConfig
from megatron_port.core.errors import DataError, EnvironmentFault, LauncherFault
from megatron_port.ext.telemetry.metrics import MetricsWriter
from megatron_port.run import launch_record as records
from megatron_port.run.launchers import Fate, Job, attempt_name, clock_seconds, current_job, fate_of, job_record
from megatron_port.run.run_files import (
    HISTORY,
    Attempt,
    AttemptOutcome,
    read_failure,
    read_history,
    read_outcome,
    record_failure,
    steps_done,
    write_outcome,
)
from megatron_port.tools.launch import submit as continuation
from megatron_port.tools.launch.attempts import after, before, first_srun_failure, fruitless, refused_by_srun
from megatron_port.tools.launch.submit import asked_fields, chain_command, continue_job

LAUNCH = LaunchConfig()
JOB = Job("12", 0, "12", "n[1-4]")
AGAIN = replace(JOB, restart=1)


def healthy(node_list: str) -> list[str]:
    return []


def n3_down(node_list: str) -> list[str]:
    return ["n3 (down*: Not responding)"] if node_list else []


def reach(folder: Path, step: int) -> None:
    writer = MetricsWriter(folder / "metrics.jsonl", steps_done(folder))
    for number in range(steps_done(folder) + 1, step + 1):
        writer.write({"step": number, "loss": 1.0})
    writer.close()


def end(folder: Path, job: Job, code: int = 0, log: str = "", asked: str = "", launch: LaunchConfig = LAUNCH,
        fate: Fate = "running", nodes_down=healthy):
    return after(folder, job, launch, code=code, srun_log=log, asked=asked, fate=fate, nodes_down=nodes_down)


def test_job_of_an_environment() -> None:
    assert current_job({}) is None and attempt_name({}) == "local"
    job = current_job({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_NODELIST": "n[1-2]"})
    assert job == Job("7", 2, "7", "n[1-2]") and job.attempt == "7.2"
    assert current_job({"SLURM_JOB_ID": "9", "MEGATRON_PORT_SERIES": "7"}).series == "7"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:01:00", 60), ("2-01:00:05", 176405), ("UNLIMITED", None), ("", None), ("x-00:00:01", None)],
)
def test_scontrols_clock(text: str, seconds: int | None) -> None:
    assert clock_seconds(text) == seconds


def test_finished(tmp_path: Path) -> None:
    before(tmp_path, JOB, LAUNCH, nodes_down=healthy)
    reach(tmp_path, 10)
    write_outcome(tmp_path, AttemptOutcome(JOB.attempt, "finished", 10))
    # srun may say 143 for reasons of its own; what the ranks committed counts.
    assert end(tmp_path, JOB, code=143).action == "done"
    assert read_history(tmp_path)[-1].status == "finished"


@pytest.mark.parametrize(
    ("signal", "asked", "fate", "action", "code"),
    [("SIGUSR1", "USR1", "running", "requeue", 0), ("SIGTERM", "TERM", "cancelled", "stop", 0),
     ("SIGTERM", "TERM", "limit", "requeue", 0), ("SIGUSR1", "USR1 and TERM", "limit", "requeue", 0),
     ("SIGUSR1", "USR1 and TERM", "cancelled", "stop", 0), ("SIGUSR1", "USR1", "requeued", "stop", 0)],
)
def test_saved(tmp_path: Path, signal: str, asked: str, fate: Fate, action: str, code: int) -> None:
    before(tmp_path, JOB, LAUNCH, nodes_down=healthy)
    write_outcome(tmp_path, AttemptOutcome(JOB.attempt, "saved", 5, signal))
    verdict = end(tmp_path, JOB, asked=asked, fate=fate)
    assert (verdict.action, verdict.exit_code) == (action, code) and "step 5" in verdict.lines[0]
    said = " ".join(verdict.lines)
    assert ("cancelled" in said, "by itself" in said) == (fate == "cancelled", fate == "requeued"), said
    assert ("resumes from" in said) is (action == "requeue"), said
    lines = before(tmp_path, AGAIN, LAUNCH, nodes_down=healthy)
    assert "saved step 5" in lines[0] and signal in lines[0]


@pytest.mark.parametrize("launch", [LAUNCH, LaunchConfig(when_failed="chain")])
@pytest.mark.parametrize("fate", ["cancelled", "requeued"])
def test_a_failed_job_that_slurm_has_disposed_of_is_left_alone(
    tmp_path: Path, launch: LaunchConfig, fate: Fate
) -> None:
    """scancel while the ranks start: SIGTERM ends them before there is anything to save."""
    before(tmp_path, JOB, launch, nodes_down=healthy)
    verdict = end(tmp_path, JOB, code=143, asked="TERM", launch=launch, fate=fate)
    assert verdict.action == "stop" and verdict.lines[-1].startswith("first failure: TERM came before"), verdict
    assert {"cancelled": "cancelled", "requeued": "by itself"}[fate] in verdict.lines[-2]
    no_ranks = after(tmp_path, JOB, launch, code=3, srun_log="", asked="TERM", fate=fate, nodes_down=healthy,
                     not_started="nodes")
    assert no_ranks.action == "stop"


RUNNING = {"JobState": "RUNNING", "Restarts": "0", "RunTime": "00:00:20", "TimeLimit": "00:01:00"}


@pytest.mark.parametrize(
    ("asked", "change", "fate"),
    [
        ("", {}, "running"), ("USR1", {}, "running"), ("USR1", {"RunTime": "00:01:01"}, "running"),
        ("USR1 TERM", {"JobState": "COMPLETING"}, "cancelled"), ("USR1", {"JobState": "COMPLETING"}, "cancelled"),
        ("USR1 TERM", {}, "cancelled"), ("TERM", {"JobState": "COMPLETING", "RunTime": "00:01:00"}, "limit"),
        ("USR1 TERM", {"JobState": "COMPLETING", "RunTime": "00:01:03"}, "limit"),
        ("TERM", {"JobState": "COMPLETING", "RunTime": "00:00:00", "Restarts": "1"}, "requeued"),
        ("", {"JobState": "PENDING", "Restarts": "1"}, "requeued"),
        ("TERM", {"JobState": "COMPLETING", "TimeLimit": "UNLIMITED"}, "cancelled"),
    ],
)
def test_what_becomes_of_a_job(asked: str, change: dict[str, str], fate: Fate) -> None:
    """Records as SLURM 22.05 showed them: after scancel, at the limit, and after a node was lost."""
    assert fate_of(JOB, asked.split(), {**RUNNING, **change}) == fate
    assert fate_of(JOB, asked.split(), {}) == ("cancelled" if "TERM" in asked else "running")


def test_a_second_start_of_a_job_is_not_taken_for_a_third() -> None:
    assert fate_of(AGAIN, [], {**RUNNING, "Restarts": "1"}) == "running"
    assert fate_of(AGAIN, ["TERM"], {**RUNNING, "Restarts": "2", "JobState": "COMPLETING"}) == "requeued"


GRES = """\
srun: error: Step requested gres_per_node=gpu:99 is more than the job's gres_per_node=gpu:8
srun: error: Unable to create step for job 2: Invalid generic resource (gres) specification
"""


@pytest.mark.parametrize(
    ("log", "says", "permanent"),
    [
        (GRES, "gpu:99 is more than the job's.*Invalid generic resource", True),
        ("srun: error: Only allocated 3 nodes asked for 9\n", "Only allocated 3 nodes", True),
        ("srun: unrecognized option '--foo'\nTry \"srun --help\" for more information\n", "option '--foo'", True),
        ('srun: error: Invalid numeric value "x" for --ntasks.\n', 'value "x"', True),
        ("srun: error: Unable to create step for job 2: More processors requested than permitted\n", "More proc", True),
        ("srun: error: cannot find mpi plugin for mpi/foo\n", "mpi/foo", True),
        ("srun: error: Unable to create step for job 2: Socket timed out on send/recv operation\n", "timed out", False),
        ("srun: error: Task launch for StepId=3.0 failed on node n2: Invalid job credential\n", "node n2", False),
        ("srun: error: Unable to create step for job 2: Job/step already completing or completed\n", "already", False),
        ("srun: error: Unable to contact slurm controller (connect failure)\n", "controller", False),
    ],
)
def test_a_step_that_srun_refuses_is_asked_for_once(tmp_path: Path, log: str, says: str, permanent: bool) -> None:
    before(tmp_path, JOB, LAUNCH, nodes_down=healthy)
    verdict = end(tmp_path, JOB, code=1, log=log)
    assert verdict.action == ("stop" if permanent else "requeue"), verdict
    assert re.search(f"first failure: srun did not start the ranks: .*{says}", verdict.lines[-1]), verdict
    assert end(tmp_path, JOB, code=1, log=log, nodes_down=n3_down).action == "requeue", "a smaller allocation"


def test_srun_lines_that_refuse_nothing() -> None:
    text = "srun: got SIGCONT\nsrun: forcing job termination\nsrun: Job step aborted: Waiting up to 7 seconds\n"
    assert refused_by_srun(text) is None


def test_a_fault_of_the_launcher_is_not_tried_again(tmp_path: Path) -> None:
    record_failure(tmp_path, JOB.attempt, 0, LauncherFault("this looks like torchrun, but RANK is not set"))
    verdict = end(tmp_path, JOB, code=3, log="srun: error: n1: tasks 0-3: Exited with exit code 3\n")
    assert (verdict.action, verdict.exit_code) == ("stop", 3) and "looks like torchrun" in verdict.lines[-1]


def test_saved_and_no_requeue_wanted_asks_by_its_exit_code(tmp_path: Path) -> None:
    write_outcome(tmp_path, AttemptOutcome(JOB.attempt, "saved", 5, "SIGUSR1"))
    verdict = end(tmp_path, JOB, asked="USR1", launch=LaunchConfig(when_stopped="stop"))
    assert (verdict.action, verdict.exit_code) == ("stop", 85) and "submit" in " ".join(verdict.lines)


def test_an_outcome_of_an_earlier_attempt_does_not_count(tmp_path: Path) -> None:
    write_outcome(tmp_path, AttemptOutcome(JOB.attempt, "finished", 10))
    verdict = end(tmp_path, AGAIN, code=1, log="srun: error: n2: task 3: Killed\n")
    assert verdict.action == "requeue" and "n2: task 3: Killed" in verdict.lines[-1]


def test_the_first_failure_is_told_not_its_victims(tmp_path: Path) -> None:
    record_failure(tmp_path, JOB.attempt, 0, EnvironmentFault("rank 0 on n1: lost a peer"), lost_peer=True)
    log = (
        "srun: error: n2: task 3: Killed\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=12.0\n"
        "srun: error: n1: tasks 0-1: Exited with exit code 3\n"
    )
    verdict = end(tmp_path, JOB, code=137, log=log)
    assert verdict.lines[-1] == "first failure: n2: task 3: Killed"


def test_srun_says_why_a_rank_is_gone_and_the_watch_where(tmp_path: Path) -> None:
    gone = EnvironmentFault("rank 3 on n2 (pp 0, dp 3, tp 0) is gone at step 7, data")
    record_failure(tmp_path, JOB.attempt, 3, gone, lost_peer=True, host="n2")
    verdict = end(tmp_path, JOB, code=137, log="srun: error: n2: task 3: Out Of Memory\n")
    assert verdict.lines[-1] == f"first failure: n2: task 3: Out Of Memory; {gone}"


def test_faults_that_would_come_again_stop_the_run(tmp_path: Path) -> None:
    record_failure(tmp_path, JOB.attempt, 5, DataError("a.idx is cut short"))
    record_failure(tmp_path, JOB.attempt, 6, DataError("too late"))
    verdict = end(tmp_path, JOB, code=143)
    assert (verdict.action, verdict.exit_code) == ("stop", 4)
    assert "rank 5" in verdict.lines[-1] and "a.idx is cut short" in verdict.lines[-1]


def test_nothing_is_recorded_outside_of_a_job(tmp_path: Path) -> None:
    record_failure(tmp_path, "local", 0, DataError("x"))
    assert not list(tmp_path.iterdir())


def test_a_node_that_took_its_script_along(tmp_path: Path) -> None:
    before(tmp_path, JOB, LAUNCH, nodes_down=healthy)
    reach(tmp_path, 3)
    lines = before(tmp_path, AGAIN, LAUNCH, nodes_down=n3_down)
    assert "failed after step 3" in lines[0] and "n3 (down*: Not responding)" in lines[0]


def test_three_attempts_at_the_same_step_are_enough(tmp_path: Path) -> None:
    reach(tmp_path, 7)
    for restart in range(3):
        job = replace(JOB, restart=restart)
        before(tmp_path, job, LAUNCH, nodes_down=healthy)
        verdict = end(tmp_path, job, code=1, log="srun: error: n2: task 3: Segmentation fault\n")
        assert verdict.action == ("stop" if restart == 2 else "requeue"), verdict
    assert "step 7" in verdict.lines[1]
    with pytest.raises(EnvironmentFault, match=r"(?s)3 attempts in a row.*step 7.*n2: task 3: Segmentation fault"):
        before(tmp_path, replace(JOB, restart=3), LAUNCH, nodes_down=healthy)
    before(tmp_path, Job("13", 0, "13", "n[1-4]"), LAUNCH, nodes_down=healthy)  # submitted anew by a person


def test_failures_with_progress_between_them_do_not_add_up(tmp_path: Path) -> None:
    for restart in range(6):
        job = replace(JOB, restart=restart)
        reach(tmp_path, 2 * (restart + 1))
        before(tmp_path, job, LAUNCH, nodes_down=healthy)
        assert end(tmp_path, job, code=1).action == "requeue"


@given(st.lists(st.tuples(st.sampled_from(["failed", "saved", "finished"]), st.integers(0, 5)), max_size=12))
@settings(max_examples=200, deadline=None)
def test_fruitless_is_the_tail_that_got_no_further(ends: list[tuple[str, int]]) -> None:
    history = [Attempt(f"1.{i}", "1", "n1", status, step) for i, (status, step) in enumerate(ends)]
    found = fruitless(history, "1")
    first = len(history) - len(found)
    assert found == history[first:] and all(a.status != "finished" for a in found)

    def further(at: int) -> bool:
        return history[at].step > max((a.step for a in history[:at]), default=-1)

    for at in range(first, len(history)):
        assert not further(at) or (at == first and history[at].status == "failed")
    if 0 < first < len(history):
        before_it = history[first - 1]
        good = before_it.status == "finished" or (before_it.status == "saved" and further(first - 1))
        assert good or further(first)
    if not found and history:
        assert history[-1].status == "finished" or (history[-1].status == "saved" and further(len(history) - 1))


def test_saves_that_bring_nothing_stop_the_run(tmp_path: Path) -> None:
    """A signal that comes at once, each time: the time limit is shorter than launch.signal_seconds."""
    actions = []
    for restart in range(4):
        job = replace(JOB, restart=restart)
        before(tmp_path, job, LAUNCH, nodes_down=healthy)
        write_outcome(tmp_path, AttemptOutcome(job.attempt, "saved", 0, "SIGUSR1"))
        verdict = end(tmp_path, job, asked="USR1")
        actions.append(verdict.action)
    assert actions == ["requeue", "requeue", "requeue", "stop"]
    assert "before the first step" in verdict.lines[0] and "signal_seconds" in verdict.lines[1]


def test_a_rank_that_only_noticed_is_told_when_nobody_else_is(tmp_path: Path) -> None:
    noticed = EnvironmentFault("rank 0 on n1: rank 2 does not answer")
    record_failure(tmp_path, JOB.attempt, 0, noticed, lost_peer=True)
    verdict = end(tmp_path, JOB, code=3, log="srun: error: n1: task 0: Exited with exit code 3\n")
    assert "rank 2 does not answer" in verdict.lines[-1]


@pytest.mark.parametrize(("why", "action"), [("setup", "stop"), ("signal", "stop"), ("nodes", "requeue")])
def test_ranks_that_were_never_started(tmp_path: Path, why: str, action: str) -> None:
    before(tmp_path, JOB, LAUNCH, nodes_down=healthy)
    verdict = after(tmp_path, JOB, LAUNCH, code=3, srun_log="", asked="", fate="running", nodes_down=healthy,
                    not_started=why)
    assert (verdict.action, verdict.exit_code) == (action, 3)
    assert read_history(tmp_path)[-1].status == "failed"


def test_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    before(tmp_path, JOB, LAUNCH, nodes_down=healthy)
    with open(tmp_path / HISTORY, "a") as stream:
        stream.write('{"attempt": "12.')
    assert [a.attempt for a in read_history(tmp_path)] == ["12.0"]


def test_the_first_writer_of_a_failure_wins(tmp_path: Path) -> None:
    for rank in range(5):
        record_failure(tmp_path, "3.0", rank, ZeroDivisionError(f"no {rank}"))
    failure = read_failure(tmp_path, "3.0")
    assert failure is not None and failure.rank == 0 and "ZeroDivisionError: no 0" in failure.message
    assert [p.name for p in (tmp_path / "failures").iterdir()] == ["3.0.json"]


def test_a_damaged_outcome_is_none(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text(json.dumps({"attempt": "1.0"})[:-3])
    assert read_outcome(tmp_path) is None
    (tmp_path / "outcome.json").write_text('{"other": 1}')
    assert read_outcome(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("srun: error: n2: tasks 2-3: Exited with exit code 3", "n2: task 2-3: Exited with exit code 3"),
        ("srun: error: Node failure on n3", "n3: Node failure on n3"),
        ("srun: Job step aborted: Waiting up to 7 seconds for job step to finish.", ""),
        ("", ""),
    ],
)
def test_srun_lines(text: str, found: str) -> None:
    assert first_srun_failure(f"noise\n{text}\nsrun: error: n9: task 9: Killed\n" if found else text) == found


RECORD = """JobId=12 JobName=a run
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=1 Nice=0 Account=abc QOS=(null)
   RunTime=00:00:05 TimeLimit=02:00:00 TimeMin=N/A
   Partition=batch AllocNode:Sid=login1:9
   NumNodes=4-4 NumCPUs=8 NumTasks=8 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   Socks/Node=* NtasksPerN:B:S:C=2:0:*:* CoreSpec=*
   Features=nvme DelayBoot=00:00:00
   TresPerNode=gres:gpu:8 ExcNodeList=n9
   Command=/a place/launch/slurm.sh my run.toml --set a=1
   WorkDir=/a place
   StdOut=/a place 12/a run-12.out
"""


def recorded(folder: Path, asked: str = RECORD, job: str = "12", **changes: object) -> Path:
    """A launch record with its script and its first job."""
    made = records.claim(folder, 1)
    assert made is not None
    values: dict = {"number": 1, "name": "a run", "time": 0.0, "by": "script", "run": "my run.toml", **changes}
    records.write_record(made, records.Record(**values))
    (made / "job.sh").write_text("#!/bin/bash\n")
    fields = asked_fields(job_record(asked), tasks=True) if asked else {}
    records.add_job(made, records.QueuedJob(job=job, asked=fields))
    return made


def test_a_chained_job_keeps_what_the_command_line_gave(tmp_path: Path) -> None:
    arguments = ("my run.toml", "--set", "a=1")
    options = ("--signal=B:USR1@20", "-d", "afterok:1", "--hold", "--array=1-2", "-dafterok:3", "--mail-type=END")
    folder = recorded(tmp_path, arguments=arguments, options=options)
    command = chain_command(folder, records.read_record(folder), replace(JOB, series="9"))
    assert command[0] == "sbatch" and command[-4:] == [str(folder / "job.sh"), *arguments]
    for option in ("--dependency=afterany:12", "--export=ALL,MEGATRON_PORT_SERIES=9", "--nodes=4", "--time=02:00:00",
                   "--partition=batch", "--account=abc", "--constraint=nvme", "--ntasks-per-node=2",
                   "--gres=gpu:8", "--exclude=n9", "--cpus-per-task=1", "--signal=B:USR1@20", "--mail-type=END",
                   "--output=/a place 12/a run-%j.out", "--job-name=a run"):
        assert option in command
    assert not any(o.startswith(("--qos", "--hold", "--array", "-d", "afterok", "--ntasks=")) for o in command), command


@pytest.mark.parametrize("name", ["a run", "x NumNodes=99", "x\n   UserId= Account=evil", "JobName=y", " ", "é –"])
@pytest.mark.parametrize("array", ["", "ArrayJobId=12 ArrayTaskId=3 ArrayTaskThrottle=1 "])
def test_a_job_s_name_is_all_of_it_and_no_other_field(name: str, array: str) -> None:
    fields = job_record(RECORD.replace("JobName=a run", f"{array}JobName={name}"))
    assert (fields["JobName"], fields["NumNodes"], fields["Account"]) == (name, "4-4", "abc")
    assert fields.get("ArrayTaskId") == ("3" if array else None)


def test_a_chained_job_asks_for_the_tasks_of_n(tmp_path: Path) -> None:
    """-N 4 -n 8: SLURM's record has no tasks for each node."""
    folder = recorded(tmp_path, RECORD.replace("C=2:0", "C=0:0"), sweep="", job="12")
    assert "--ntasks=8" in chain_command(folder, records.read_record(folder), JOB)


def test_a_task_of_a_sweep_is_chained_alone(tmp_path: Path) -> None:
    folder = recorded(tmp_path, sweep="/x", task=3, job="12_3")
    command = chain_command(folder, records.read_record(folder), JOB)
    assert "--array=3" in command and "--output=/a place 12/a run-%j.out" in command


def test_without_a_kept_request_the_nodes_are_those_of_the_start(tmp_path: Path) -> None:
    folder = recorded(tmp_path, "")
    assert "--nodes=4" in chain_command(folder, records.read_record(folder), JOB)


class Slurm:
    """scontrol and sbatch of a test: the records that ``scontrol show job`` gives in turn, and what was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *records: str) -> None:
        self.records, self.calls = list(records), []
        monkeypatch.setattr(continuation, "run_tool", self.run)
        monkeypatch.setattr("megatron_port.run.launchers.run_tool", self.run)

    def run(self, command, **_: object) -> tuple[int, str]:
        self.calls.append(list(command))
        if command[:2] == ["scontrol", "show"]:
            return 0, self.records.pop(0) if len(self.records) > 1 else self.records[0]
        return 0, "13"

    def did(self) -> list[str]:
        return [" ".join(call[:2]) for call in self.calls if call[1] != "show"]


HEALTHY = RECORD + "   JobState=RUNNING Restarts=0 Requeue=1\n"
LOST = RECORD.replace("NumNodes=4-4", "NumNodes=3").replace("02:00:00", "01:00:00")


def test_a_chained_job_asks_for_what_the_first_one_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun notices a lost node first: SLURM still has the job running, with a node less."""
    folder = recorded(tmp_path)
    slurm = Slurm(monkeypatch, LOST + "   JobState=RUNNING Restarts=0 Requeue=0\n")
    line = continue_job("chain", JOB, folder, asked=[])
    assert line == "job 13 follows" and slurm.did() == ["scontrol update", "sbatch --parsable"]
    assert slurm.calls[0] == ["scontrol", "update", "JobId=12", "Requeue=0"], "before it looks"
    assert {"--nodes=4", "--time=02:00:00"} <= set(slurm.calls[-2])
    assert [(j.job, j.why) for j in records.jobs(folder)] == [("12", "submitted"), ("13", "chained")]
    # The next job of the series keeps the first one's wishes, also where it began with less.
    continue_job("chain", replace(JOB, id="13", series="12", node_list="n[1-3]"), folder, asked=[])
    assert {"--nodes=4", "--time=02:00:00"} <= set(next(c for c in reversed(slurm.calls) if c[0] == "sbatch"))


def test_a_job_without_a_script_cannot_be_chained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recorded(tmp_path)
    (folder / "job.sh").unlink()
    Slurm(monkeypatch, HEALTHY)
    with pytest.raises(EnvironmentFault, match="submit the run again"):
        continue_job("chain", JOB, folder, asked=[])


def test_no_second_job_beside_slurms_own_requeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recorded(tmp_path)
    slurm = Slurm(monkeypatch, LOST + "   JobState=COMPLETING Restarts=1 Requeue=0\n")
    for action in ("chain", "requeue"):
        line = continue_job(action, JOB, folder, asked=["TERM"])
        assert line == "SLURM has queued job 12 again by itself"
    assert [c[-1] for c in slurm.calls if c[1] == "update"] == ["Requeue=0", "Requeue=1"]
    assert not any(c[0] == "sbatch" or c[1] == "requeue" for c in slurm.calls)


@pytest.mark.parametrize("action", ["chain", "requeue"])
def test_a_cancel_that_comes_last_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    """scancel after the verdict: the script's trap cannot run while it waits for Python."""
    slurm = Slurm(monkeypatch, RECORD + "   JobState=COMPLETING Restarts=0\n")
    folder = recorded(tmp_path)
    assert "was cancelled" in continue_job(action, JOB, folder, asked=["USR1"])
    assert not any(c[0] == "sbatch" or c[1] == "requeue" for c in slurm.calls)
    slurm.records = [HEALTHY]
    records.cancel(folder, "ann@login1")
    assert "cancelled by ann@login1" in continue_job(action, JOB, folder, asked=["USR1"])
    assert not any(c[0] == "sbatch" or c[1] == "requeue" for c in slurm.calls)
