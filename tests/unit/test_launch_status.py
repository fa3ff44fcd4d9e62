"""``launch status | logs | cancel | sweep``, and the webhook: without SLURM, with stand-ins for its tools."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_launch_record import SBATCH, queue, squeue, submit, tool  # noqa: F401 - queue is a fixture
from test_launch_submit import here  # noqa: F401 - a fixture that queue needs

from megatron_port.cli.main import main
from megatron_port.core.config.schema import LaunchConfig
from megatron_port.core.errors import ConfigError
from megatron_port.run import launch_record as records
from megatron_port.run.launch_record import Planned, QueuedJob, Record
from megatron_port.run.launchers import Job, QueueEntry
from megatron_port.run.run_files import AttemptOutcome, write_outcome
from megatron_port.tools.launch import attempts as notify
from megatron_port.tools.launch import status, sweep
from megatron_port.tools.launch import status as control
from megatron_port.tools.launch.attempts import after, before

NOW = 1e9
RUNNING = {"7": QueueEntry("7", "RUNNING", nodes="2")}


def made(folder: Path, job: str = "7", **plan: float) -> Path:
    """A run of two nodes that was submitted as a job."""
    place = records.claim(folder, 1)
    assert place is not None
    values: dict = {"steps": 100, "save_interval": 20, "nodes": 2, "seconds_per_step": 3.0, **plan}
    planned = Planned(**values)
    packages = {f"package-{n}": "1.2.3" for n in range(110)}
    records.write_record(place, Record(number=1, name=folder.name, time=NOW, by="submit", run="x.toml", planned=planned,
                                       environment={"packages": packages}))
    records.add_job(place, QueuedJob(job=job, log=str(folder / "log.out")))
    return place


def trained(folder: Path, steps: int, seconds: float = 2.0) -> None:
    lines = [{"step": n, "loss": 5 - n / 1000, "tokens_per_second": 1500.0, "seconds": seconds}
             for n in range(1, steps + 1)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 9999, "lo')


def test_a_row_of_a_running_job(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    made(folder)
    job = Job("7", 0, "7", "n[1-2]")
    before(folder, job, LaunchConfig(), nodes_down=lambda _: [], record="0001", now=NOW - 3600)
    trained(folder, 30)
    row = status.status_of(folder, RUNNING, NOW)
    assert (row.state, row.step, row.steps, row.loss, row.tokens_per_second) == ("RUNNING", 30, 100, 4.97, 1500.0)
    assert (row.seconds_left, row.seconds_to_save, row.attempts) == (140.0, 20.0, 1)
    assert row.node_hours == pytest.approx(2.0) and row.node_hours_predicted == pytest.approx(2 + 2 * 140 / 3600)
    write_outcome(folder, AttemptOutcome("7.0", "saved", 30, "SIGTERM"))
    after(folder, job, LaunchConfig(), code=0, srun_log="", asked="TERM", fate="cancelled", nodes_down=lambda _: [],
          now=NOW - 1800)
    row = status.status_of(folder, {}, NOW)
    assert (row.state, row.node_hours, row.cause) == ("saved", pytest.approx(1.0), "SIGTERM")
    assert "30/100" in status.cells(row) and len(status.cells(row)) == len(status.COLUMNS)


@pytest.mark.parametrize(("entry", "mark", "state"), [
    (QueueEntry("7", "PENDING", "Priority"), False, "PENDING (Priority)"), (None, False, "ended"),
    (None, True, "cancelled"), (QueueEntry("7", "COMPLETING"), True, "COMPLETING"),
])
def test_states_without_a_step(tmp_path: Path, entry: QueueEntry | None, mark: bool, state: str) -> None:
    place = made(tmp_path / "a")
    if mark:
        records.cancel(place, "ann@login1")
    row = status.status_of(tmp_path / "a", {"7": entry} if entry else {}, NOW)
    assert (row.state, row.step) == (state, 0)
    assert row.seconds_left == (None if state == "cancelled" else 300.0), "the planner's, before there is a step"


def test_a_thousand_runs_in_a_second(tmp_path: Path) -> None:
    for n in range(1000):
        folder = tmp_path / f"run-{n:04d}"
        made(folder, job=str(n))
        before(folder, Job(str(n), 0, str(n), "n[1-384]"), LaunchConfig(), nodes_down=lambda _: [], record="0001")
        trained(folder, 40)
    queue = {str(n): QueueEntry(str(n), "RUNNING") for n in range(0, 1000, 2)}  # noqa: F811
    begun = time.process_time()
    rows = list(status.rows(status.run_folders([tmp_path]), queue))
    texts = [status.cells(row) for row in rows]
    took = time.process_time() - begun
    assert len(rows) == 1000 and sum("RUNNING" in text for text in texts) == 500 and took < 1.0, took


def test_folders_that_hold_no_run(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="give the folder of a run"):
            status.run_folders([path])


def test_logs_are_followed_from_one_job_to_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    place = made(folder)
    first, second = folder / "log.out", folder / "next.out"
    first.write_text("".join(f"line {n}\n" for n in range(100)))
    said, waits = [], []

    def wait(_: float) -> None:
        waits.append(1)
        if len(waits) == 1:
            with first.open("a") as stream:
                stream.write("line 100\n")
        elif len(waits) == 2:
            records.add_job(place, QueuedJob(job="8", why="chained", log=str(second)))
            second.write_text("hello\n")
        control.ASK_S = -1.0 if len(waits) > 3 else 10.0

    for text in control.follow(folder, count=2, alive=lambda: False, wait=wait):
        said.append(text)
    assert said == [f"==> {first} <==\nline 98\nline 99\n", "line 100\n", f"==> {second} <==\nhello\n"]
    assert control.last_lines(first, 0)[0].startswith("line 0\n")


def test_cancel_marks_first_and_catches_what_is_queued_meanwhile(
    queue: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    assert submit() == 0
    run, place = queue / "runs" / "my run", queue / "runs" / "my run" / "launch" / "0001"
    squeue(queue, "123|123|RUNNING|None|4|N/A|job.sh")
    tool(queue, "scancel", f'[ -e "$PWD/runs/my run/launch/0001/cancelled" ] && echo "$@" >> {"scancelled"}\n')

    def wait(_: float) -> None:
        done = (queue / "scancelled").read_text().split()
        if done == ["123"]:
            records.add_job(place, QueuedJob(job="124", why="chained"))
            squeue(queue, "123|123|COMPLETING|None|4|N/A|job.sh", "124|124|PENDING|Dependency|4|N/A|job.sh")
        else:
            squeue(queue)

    assert control.cancel(run, wait=wait) == ["job 123 (RUNNING) cancelled", "job 124 (PENDING) cancelled"]
    assert (queue / "scancelled").read_text().split() == ["123", "124"]
    assert main(["launch", "cancel", "runs/my run"]) == 0
    assert "nothing waits or runs" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no launch record"):
        control.cancel(queue)


@pytest.mark.parametrize(("text", "values"), [
    ("a.b=1,2", ["1", "2"]), ("a.b=[1, 2],[3]", ["[1, 2]", "[3]"]), ('a="x,y",z', ['"x,y"', "z"]), ("a.b=1", ["1"]),
])
def test_values_of_a_sweep(text: str, values: list[str]) -> None:
    assert sweep.values_of(text)[1] == values


def test_a_sweep_has_a_record_for_each_task(queue: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    words = ["launch", "sweep", "run.toml", "--vary", "seed=1,2", "--vary", "optimizer.lr=1e-3,1e-2"]
    assert main([*words, "--dry-run"]) == 0 and not (queue / "runs").exists()
    assert main([*words, "--at-once", "3"]) == 0
    assert "job array 123, 4 tasks" in capsys.readouterr().out
    folder = queue / "runs" / "my run" / "sweep" / "0001"
    script = (folder / "job.sh").read_text()
    assert "#SBATCH --array=0-3%3" in script and "job_record=${job_records[$SLURM_ARRAY_TASK_ID]}" in script
    place = queue / "runs" / "my run-003" / "launch" / "0001"
    kept = records.read_record(place)
    assert (kept.task, kept.sweep, records.jobs(place)[0].job) == (3, str(folder), "123_3")
    assert "seed = 2" in (place / "config.toml").read_text() and (place / "code" / "megatron_port").is_dir()
    assert main(words) == 2 and "are there already" in capsys.readouterr().err
    for bad, says in (("cluster.nodes=2,4", "ask for the same nodes"), ("name=a,b", "neither name"), ("seed", "form")):
        assert main(["launch", "sweep", "run.toml", "--set", "name=other", "--vary", bad]) == 2
        assert says in capsys.readouterr().err
    tool(queue, "sbatch", "exit 1\n")
    assert main([*words, "--set", "name=third"]) == 3 and not (queue / "runs" / "third-000").exists()


class Hook(http.server.BaseHTTPRequestHandler):
    """Answers with the code in its path, and keeps what was posted."""

    posted: list[dict]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.posted.append(json.loads(body))
        self.send_response(int(self.path.rpartition("/")[2]))
        self.send_header("Location", "/200")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[str]:
    Hook.posted = []
    server = http.server.HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_webhook_is_told_and_never_named(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert notify.notify("started", "x") == "", "nobody asked for it"
    for path, says in (("200", ""), ("500", "answered 500"), ("302", "answered 302")):
        url = f"{hook}/T0KEN/{path}"
        monkeypatch.setenv(notify.VARIABLE, url)
        line = notify.notify("finished", f"a: done, see {url}", run="a")
        assert says in line and "T0KEN" not in line and bool(line) == bool(says)
    assert Hook.posted == [{"text": "a: done, see ***", "event": "finished", "run": "a"}] * 3
    for url in ("file:///etc/passwd", "http://127.0.0.1:1/T0KEN", "http://[T0KEN/"):
        monkeypatch.setenv(notify.VARIABLE, url)
        line = notify.notify("finished", "x")
        assert "nobody was told" in line and "T0KEN" not in line
