"""The launch record: what a submission keeps, who is refused, and what a job says when it is not there any more."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from test_launch_submit import here, tool  # noqa: F401 - here is a fixture

from megatron_port.cli.main import main
from megatron_port.core.config.loader import load
from megatron_port.core.errors import ConfigError
from megatron_port.core.package import FOLDER
from megatron_port.run import launch_record as records
from megatron_port.run import sources as snapshot
from megatron_port.run.launch_record import QueuedJob, RecordFault
from megatron_port.run.launchers import Job
from megatron_port.tools.launch.opening import open_record, with_record
from megatron_port.tools.launch.submit import new_folder, order_of

SBATCH = 'echo "$@" >> sbatched; echo 123\n'
SCONTROL = """\
case "$1" in
  show) echo "   NumNodes=4 TimeLimit=01:00:00 Partition=batch"; echo "   StdOut=$PWD/x-123.out" ;;
  write) printf '#!/bin/bash\\n#SBATCH --requeue\\n\\nset -eu\\njob_run=x\\n' ;;
esac
"""
JOB = Job("123", 0, "123", "n[1-4]")


def squeue(folder: Path, *lines: str) -> None:
    (folder / "queue.txt").write_text("".join(f"{line}\n" for line in lines))
    tool(folder, "squeue", 'cat "$(dirname "$0")/../queue.txt"\n')


@pytest.fixture
def queue(here: Path) -> Path:  # noqa: F811
    """A login node whose sbatch takes everything."""
    tool(here, "sbatch", SBATCH)
    tool(here, "scontrol", SCONTROL)
    squeue(here)
    return here


def submit(*arguments: str) -> int:
    return main(["launch", "submit", "run.toml", *arguments])


def record(folder: Path, number: int = 1) -> Path:
    return folder / "runs" / "my run" / "launch" / f"{number:04d}"


def start(folder: Path, job: Job = JOB, given: Path | None = None) -> tuple[Path, list[str]]:
    """What ``launch before`` does with the record."""
    source = given / "config.toml" if given else folder / "run.toml"
    return open_record(load(source), ["seed=3"], job, given, ["run.toml", "--set", "seed=3"])


def test_a_submission_keeps_all_that_the_job_reads(queue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--set", "seed=3", "--", "--comment=x") == 0
    place = record(queue)
    assert capsys.readouterr().out == f"job 123, script {place}/job.sh, log {queue}/x-123.out\n"
    (queue / "run.toml").write_text("nonsense")
    kept, script = records.read_record(place), (place / "job.sh").read_text()
    assert load(place / "config.toml").config.seed == 3 and kept.options == ("--comment=x",)
    assert kept.planned.nodes == 4 and kept.planned.steps > 0 and kept.environment["packages"]["torch"]
    [job] = records.jobs(place)
    assert job.job == "123" and job.asked["NumNodes"] == "4" and job.log == f"{queue}/x-123.out"
    quoted = str(place).replace("'", "'\\''")
    assert f"job_record='{quoted}'" in script and f"launch_dir='{quoted}/code/megatron_port/_launch'" in script
    assert f"job_run='{quoted}/config.toml'" in script and "job_overrides=()" in script
    own = FOLDER / "run" / "launch_record.py"
    assert (place / "code" / "megatron_port" / "run" / "launch_record.py").read_text() == own.read_text()
    assert not [p for p in place.rglob("*") if p.name.endswith(".tmp")]


@pytest.mark.parametrize(("options", "kept"), [
    (["--export=ALL,KEY=s3cretvalue"], ["--export=ALL,KEY=***"]),
    (["-N4", "--export", "KEY=s3cretvalue,more", "--exclusive"], ["-N4", "--export", "KEY=***,***", "--exclusive"]),
    (["--export=A,B='x=s3cretvalue,c=s3cretvalue',HOME"], ["--export=A,B=***,***"]),
    (["--comment=s3cretvalue", "--export=NONE"], ["--comment=***", "--export=NONE"]),
    (["--comment=password=s3cretvalue"], ["--comment=password=***"]),
])
def test_no_secret_of_sbatchs_options_is_kept(
    queue: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str],
    kept: list[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cretvalue")
    assert submit("--dry-run", "--", *options) == 0 and submit("--", *options) == 0
    assert "s3cretvalue" not in "".join(capsys.readouterr())
    assert records.read_record(record(queue)).options == tuple(kept)
    assert (queue / "sbatched").read_text().splitlines()[-1].startswith(f"--parsable {' '.join(options)} ")
    code = record(queue) / "code"
    files = [f for f in (queue / "runs").rglob("*") if f.is_file() and code not in f.parents]
    assert files and not [f for f in files if b"s3cretvalue" in f.read_bytes()]
    tool(queue, "sbatch", "echo refused; exit 1\n")
    assert submit("--set", "name=other", "--", *options) == 3
    assert "s3cretvalue" not in "".join(capsys.readouterr())


def test_a_second_submission_is_refused_while_the_first_lives(queue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit() == 0
    squeue(queue, "99|99|RUNNING|None|2|N/A|/elsewhere", "123|123|PENDING|Priority|4|N/A|job.sh")
    assert submit() == 2
    err = capsys.readouterr().err
    assert "was submitted already: job 123 is PENDING (Priority)" in err and "launch cancel" in err
    assert not record(queue, 2).exists()
    assert submit("--after", "123") == 0, "behind it is what was asked for"
    assert "--dependency=afterany:123" in (record(queue, 2) / "job.sh").read_text()
    squeue(queue)
    assert submit() == 0 and record(queue, 3).exists(), "it has ended"


def test_a_job_that_nobody_could_note_is_found_by_its_script(queue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """sbatch took it, and the submission ended before its id was written."""
    assert submit() == 0
    (record(queue) / "jobs.jsonl").unlink()
    assert submit() == 2 and "is being submitted" in capsys.readouterr().err
    os.utime(record(queue), (0, 0))
    squeue(queue, f"77|77|RUNNING|None|4|N/A|{record(queue)}/job.sh")
    assert submit() == 2 and "job 77 is RUNNING" in capsys.readouterr().err


def test_where_slurm_does_not_answer_nothing_is_queued_twice(queue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit() == 0
    tool(queue, "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n")
    assert submit() == 3 and "squeue does not say" in capsys.readouterr().err
    assert (queue / "sbatched").read_text().count("job.sh") == 1


def test_of_many_submissions_at_once_one_has_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_port.tools.launch.submit.ask_queue", dict)
    won, lost = [], []

    def one() -> None:
        try:
            won.append(new_folder(tmp_path))
        except ConfigError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=one) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [number for number, _ in won] == [1] and len(lost) == 15, won
    assert all("is being submitted by somebody else" in text for text in lost)


def test_what_sbatch_refuses_leaves_nothing(queue: Path) -> None:
    tool(queue, "sbatch", "exit 1\n")
    assert submit() == 3
    assert records.numbers(queue / "runs" / "my run") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_one_message(queue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (queue / "runs").mkdir(mode=0o500)
    assert submit() == 3 and "give this user write permission" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder_is_one_message(queue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (queue / "runs").write_text("")
    assert submit() == 3
    err = capsys.readouterr().err
    assert "cannot be written: Not a directory" in err and "Traceback" not in err


def test_a_job_reads_its_record_and_says_what_has_changed(queue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert submit() == 0
    place = record(queue)
    assert start(queue, given=place) == (place, [f"launch record {place}"])
    assert start(queue, replace(JOB, id="124", series="123"))[0] == place, "a chained job, by its series"

    packages = {**snapshot.packages(), "torch": "1.0"}
    monkeypatch.setattr(snapshot, "packages", lambda: packages)
    with pytest.raises(RecordFault, match=r"packages are others .*torch .* → 1\.0.*changed_environment"):
        start(queue, given=place)
    (place / "config.toml").write_text((place / "config.toml").read_text().replace(
        'changed_environment = "stop"', 'changed_environment = "warn"'))
    assert "torch" in start(queue, given=place)[1][-1]
    monkeypatch.undo()

    (place / "code" / "megatron_port" / "core" / "errors.py").unlink()
    with pytest.raises(RecordFault, match="is not what was submitted"):
        start(queue, given=place)


def test_a_cancelled_record_starts_nothing(queue: Path) -> None:
    assert submit() == 0
    records.cancel(record(queue), "ann@login1")
    with pytest.raises(ConfigError, match="was cancelled by ann@login1"):
        start(queue, given=record(queue))


@pytest.mark.parametrize(("stage", "image", "name"), [
    ("image", "box.sif", "box.sif"), ("", "box.sif", "box.sif"), ("", "registry/box:1", ""),
    ("env.tar", "box.sif", "env.tar"),
])
def test_the_image_that_ranks_run_from_is_kept(
    queue: Path, monkeypatch: pytest.MonkeyPatch, stage: str, image: str, name: str
) -> None:
    """A container's file, staged or not, and an archive are known by their digests; a registry's image by its name."""
    for number, file in enumerate(("box.sif", "env.tar")):
        (queue / file).write_bytes(bytes([number]))
    monkeypatch.setenv("STAGE", stage)
    assert submit("--set", "cluster.container=apptainer", "--set", f"cluster.container_image={image}") == 0
    kept = records.read_record(record(queue)).image
    assert (Path(kept["path"]).name, len(kept["digest"])) == (name, 32) if name else kept == {"name": image}, kept


def test_an_archive_that_was_replaced_is_refused(queue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = queue / "env.tar"
    archive.write_bytes(bytes(1000))
    monkeypatch.setenv("STAGE", str(archive))
    assert submit() == 0
    os.utime(archive)
    assert start(queue, given=record(queue))[0] == record(queue), "touched, and the same"
    archive.write_bytes(bytes(999) + b"x")
    with pytest.raises(RecordFault, match="is not the one that was submitted"):
        start(queue, given=record(queue))


def test_a_script_without_a_record_makes_one_at_its_first_start(queue: Path) -> None:
    place, lines = start(queue)
    assert place == record(queue) and lines == [f"launch record {place}"]
    kept, script = records.read_record(place), (place / "job.sh").read_text().splitlines()
    assert (kept.by, kept.arguments) == ("script", ("run.toml", "--set", "seed=3"))
    own = with_record("x", place).splitlines()[:3]
    assert script == ["#!/bin/bash", "#SBATCH --requeue", "", *own, "set -eu", "job_run=x"], script
    assert own[0].startswith("job_record='") and own[1] == "job_arguments=kept"
    (queue / "run.toml").write_text((queue / "run.toml").read_text() + "signal_seconds = 7\n")
    assert start(queue, replace(JOB, restart=1))[0] == place, "a requeue"
    assert load(place / "config.toml").config.launch.signal_seconds == 300
    assert start(queue, Job("200", 0, "200", "n1"))[0] == record(queue, 2), "somebody's next job"


def test_torn_and_damaged_files(tmp_path: Path) -> None:
    place = records.claim(tmp_path, 1)
    assert place is not None and records.claim(tmp_path, 1) is None
    records.add_job(place, QueuedJob(job="1"))
    with open(place / "jobs.jsonl", "a") as stream:
        stream.write('{"job": "2')
    assert [j.job for j in records.jobs(place)] == ["1"]
    for text in ("", "[]", "{}", json.dumps({"number": 1, "format": 99, "name": "", "time": 0, "by": "", "run": ""})):
        (place / "record.json").write_text(text)
        with pytest.raises(RecordFault):
            records.read_record(place)


def test_dry_run_says_what_it_will_take(queue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "submit", "runs/frontier-1t", "--dry-run", "--set", "training.steps=100", "--set",
                 "cluster.charge_per_node_hour=4", "--set", 'cluster.charge_unit="GPU-hours"']) == 0
    out = capsys.readouterr().out
    assert "nodes: 384, 8 ranks on each" in out and "node-hours" in out and "GPU-hours" in out and "jobs, one" in out
    assert not (queue / "runs").exists()
    assert submit("--dry-run") == 0 and "the planner knows too little of slurm" in capsys.readouterr().out


def test_order_names_the_run(queue: Path) -> None:
    assert order_of(load(queue / "run.toml"), []).run == str(queue / "run.toml")
