"""Rules of a job: wall time, queue classes, options, environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_port.core.config.checks import problems
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.tools.launch import script as quote
from megatron_port.tools.launch.launch_checks import PLACEHOLDERS, launch_problems, wall_seconds, wall_text
from megatron_port.tools.launch.submit import RUNS

BASE = with_values(RunConfig(), {
    "data.synthetic": True, "cluster.name": "frontier", "cluster.nodes": 64, "cluster.queue_nodes": (91, 183, 9472),
    "cluster.queue_hours": (2.0, 6.0, 12.0),
})


def found(**changes: object) -> list[str]:
    return launch_problems(with_values(BASE, {k.replace("__", "."): v for k, v in changes.items()}))


@pytest.mark.parametrize(("text", "seconds"), [
    ("30", 1800), ("02:00:00", 7200), ("2:00:00", 7200), ("1-00:00:00", 86400), ("00:00:01", 1), ("100:00:00", 360000),
    ("02:00", None), ("", None), ("2h", None), ("00:60:00", None), ("00:00:60", None), ("-1", None),
    ("1-2", 93600), ("1-2:30", 95400), ("1-2:3", None), ("1-", None),
    ("02:00:00\n", None), ("٣٠", None), (" 30", None),
])
def test_wall_time(text: str, seconds: int | None) -> None:
    assert wall_seconds(text) == seconds


@given(st.integers(1, 10**6))
def test_wall_time_round_trips(seconds: int) -> None:
    assert wall_seconds(wall_text(seconds)) == seconds


CLASSES = "(classes: up to 91 nodes 2 h, up to 183 nodes 6 h, up to 9,472 nodes 12 h)"


@pytest.mark.parametrize(("nodes", "spare", "time", "words"), [
    (64, 0, "02:00:00", None),
    (92, 0, "06:00:00", None),
    (183, 1, "12:00:00", None),
    (9472, 0, "12:00:00", None),
    (64, 0, "06:00:00", f"64 nodes may run 2 h on frontier {CLASSES}, launch.time is 06:00:00; "
                        "use 02:00:00 or at least 92 nodes"),
    (64, 0, "06:00:01", "use 02:00:00 or at least 184 nodes"),
    (91, 0, "121", "91 nodes may run 2 h on frontier"),
    (100, 0, "1-00:00:00", "launch.time is 1-00:00:00; use 06:00:00"),
    (90, 1, "03:00:00", "91 nodes (90 and 1 spare) may run 2 h"),
    (9470, 3, "01:00:00", "9473 nodes (9470 and 3 spare) are more than frontier gives to one job"),
])
def test_queue_classes(nodes: int, spare: int, time: str, words: str | None) -> None:
    out = found(cluster__nodes=nodes, launch__spare_nodes=spare, launch__preflight=bool(spare), launch__time=time)
    assert len(out) == bool(words) and (not words or words in out[0]), out


def test_the_value_in_the_message_is_legal() -> None:
    assert not found(launch__time="02:00:00") and not found(launch__time="06:00:00", cluster__nodes=92)
    few = found(launch__time="3-00:00:00", cluster__queue_nodes=(4, 100), cluster__queue_hours=(72.0, 24.0))
    assert "use 24:00:00 or at most 4 nodes" in few[0]
    assert found(launch__time="100:00:00")[0].endswith("use 02:00:00"), "no class allows it"


@pytest.mark.parametrize("option", ["--partition=extended", "--qos=x", "--reservation=y"])
def test_classes_hold_for_the_clusters_own_queue_only(option: str) -> None:
    assert not found(launch__time="24:00:00", launch__sbatch_options=(option,))
    assert not found(launch__time="24:00:00", cluster__queue_nodes=(), cluster__queue_hours=())


@pytest.mark.parametrize(("changes", "words"), [
    ({"cluster__nodes": 0}, "--set cluster.nodes=N"),
    ({"launch__time": "02:00"}, "SLURM would take it for minutes and seconds, write 02:00:00"),
    ({"launch__time": "0"}, "must be MM, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS, above 0"),
    ({"launch__time": "$(touch x)"}, "must be MM"),
    ({"launch__time": "5", "launch__signal_seconds": 300}, "(300 s): the job would be told to save before it starts"),
    ({"launch__spare_nodes": 1}, "set launch.preflight = true"),
    ({"cluster__queue_hours": (2.0,)}, "queue_nodes has 3 classes and queue_hours 1"),
    ({"cluster__queue_nodes": (91, 91, 100)}, "must rise"),
    ({"cluster__queue_nodes": (0, 91, 100)}, "must rise, from at least 1"),
    ({"cluster__queue_hours": (2.0, 0.0, 1.0)}, "each must be above 0"),
    ({"launch__sbatch_options": ("-p x",)}, "launch.sbatch_options: '-p x' is not one option"),
    ({"launch__sbatch_options": ("--",)}, "is not one option"),
    ({"launch__sbatch_options": ("--a b",)}, "is not one option"),
    ({"cluster__srun_options": ("gpus",)}, "cluster.srun_options"),
    ({"launch__environment": ("A",)}, "'A' is not of the form NAME=value"),
    ({"launch__environment": ("A B=1",)}, "not of the form NAME=value"),
    ({"launch__environment": ("1A=1",)}, "not of the form NAME=value"),
    ({"launch__environment": ("A;touch x=1",)}, "not of the form NAME=value"),
    ({"launch__environment": ("WANDB_API_KEY=x",)}, "WANDB_API_KEY looks like a secret"),
    ({"cluster__environment": ("HF_TOKEN=x",)}, "export it in the shell that submits the job"),
    ({"cluster__environment": ("A={jobid}",)}, "cluster.environment A: {jobid} is unknown"),
    ({"cluster__environment": ("A={jobid}",)}, "did you mean 'job_id'?"),
    ({"cluster__environment": ("A=${HOME}",)}, "Variables of the shell are not expanded"),
    ({"cluster__local_disk": "/x/{local_disk}"}, "cluster.local_disk: {local_disk} is unknown"),
    ({"cluster__modules": ("rocm", " ")}, "each must be the name of a module"),
])
def test_one_message_a_fault(changes: dict[str, object], words: str) -> None:
    out = found(**changes)
    assert len(out) == 1 and words in out[0], out


@pytest.mark.parametrize(("toml", "text", "seconds"), [
    ("3", "3", 180), ('"3"', "3", 180), ("02:30:00", "02:30:00", 9000), ('"1-0"', "1-0", 86400),
    ('"2-12:30"', "2-12:30", 217800), ('"1-00:00:10"', "1-00:00:10", 86410),
])
def test_wall_times_as_slurm_and_toml_write_them(tmp_path: Path, toml: str, text: str, seconds: int) -> None:
    """Minutes, HH:MM:SS and days, in a file and by --set. sbatch(1), --time."""
    (tmp_path / "run.toml").write_text(f"[launch]\ntime = {toml}\n")
    for config in (load(tmp_path / "run.toml").config, load(None, [f"launch.time={toml}"]).config):
        assert config.launch.time == text and wall_seconds(text) == seconds


@pytest.mark.parametrize("toml", ["true", "-3", "1.5", "[3]", "02:30:00.5", "1979-05-27"])
def test_what_is_no_wall_time(tmp_path: Path, toml: str) -> None:
    (tmp_path / "run.toml").write_text(f"[launch]\ntime = {toml}\n")
    with pytest.raises(ConfigError, match="launch.time must be a string"):
        load(tmp_path / "run.toml")


def test_what_may_stand_there() -> None:
    assert not found(
        launch__environment=("A=", "_b=x=y {} {0} {job_id}{user}{local_disk}", "TOKENIZERS_PARALLELISM=false"),
        cluster__local_disk="/x/{user}/{job_id}",
        launch__sbatch_options=("--exclusive", "--constraint=a&b c", "--comment="),
    )


def test_the_names_of_placeholders_are_those_that_are_filled() -> None:
    assert tuple(quote.PLACEHOLDERS) == PLACEHOLDERS


@pytest.mark.parametrize(("change", "words"), [
    ("launch.when_failed=again", "launch.when_failed 'again' is unknown; use requeue, chain, stop"),
    ("launch.when_stopped=chains", "did you mean 'chain'?"),
    ("launch.max_attempts=0", "at least 1"), ("launch.signal_seconds=0", "from 1 to 65535"),
    ("launch.spare_nodes=-1", "at least 0"), ("launch.rendezvous_timeout=0", "above 0"),
    ("cluster.local_disk=tmp", "an absolute path"), ("preflight.share_of_median=1.5", "from 0 to 1"),
    ("cluster.cores_per_task=-1", "at least 0"), ("telemetry.published_tflops=-1.0", "at least 0"),
])
def test_ranges_are_checked_for_every_run(change: str, words: str) -> None:
    out = problems(load("runs/quickstart", [change]).config)
    assert len(out) == 1 and change.partition("=")[0] in out[0] and words in out[0], out


@pytest.mark.parametrize("run", RUNS.values())
def test_shipped_runs_can_be_queued(run: str) -> None:
    config = load(f"runs/{run}").config
    assert not launch_problems(config)
    for factor in (1, 2):  # `sbatch -N` more: the replicas follow
        nodes = factor * config.cluster.nodes
        wider = with_values(config, {"cluster.nodes": nodes})
        assert not problems(wider, world_size=nodes * config.cluster.gpus_per_node)
