"""Engine native is the default, and nothing of a run asks for DeepSpeed, which is an optional dependency."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import EXIT_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
import sys
sys.modules["deepspeed"] = None  # as where it is not installed: no import finds it
from megatron_port.__main__ import entry
sys.argv[1:] = {arguments!r}
sys.exit(entry())
"""
TINY = ("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.seq_length=16",
        "model.vocab_size=64", "batch.global_batch_size=4", "data.synthetic=true", "precision.dtype=fp32",
        "training.steps=2", "backend.device=cpu", "telemetry.replica_check_interval=1")
ONE_SENTENCE = (
    "engine deepspeed cannot be used: DeepSpeed is not installed; pip install 'megatron_port[deepspeed]' (or make "
    'setup, which also builds its ops ahead of time), or set engine = "native"'
)


def without_deepspeed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of ours in a process that cannot import deepspeed."""
    env = {k: v for k, v in os.environ.items() if not re.match(r"RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_", k)}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(arguments=list(arguments))], capture_output=True, text=True, cwd=folder,
        env=env, timeout=120, check=False,
    )


def sets(*changes: str) -> list[str]:
    return [word for change in (*TINY, *changes) for word in ("--set", change)]


def test_the_default_is_native() -> None:
    assert RunConfig().engine == "native" and load("runs/quickstart").config.engine == "native"


def test_runs_of_the_paper_name_the_other_engine_themselves() -> None:
    for name in ("1.4b", "22b", "175b", "1t", "1t-tp4"):
        text = (ROOT / "configs" / "runs" / f"frontier-{name}.toml").read_text()
        assert '\nengine = "deepspeed"\n' in text and load(f"runs/frontier-{name}").config.engine == "deepspeed"


def test_a_run_needs_no_deepspeed_and_says_nothing_of_it(tmp_path: Path) -> None:
    done = without_deepspeed(tmp_path, "train", "models/gpt-tiny", "--nproc", "2", *sets())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().count("\n") >= 2
    assert "deepspeed" not in (done.stdout + done.stderr).lower()


def test_plans_of_either_engine_need_no_deepspeed(tmp_path: Path) -> None:
    """The second one searches the layouts of both engines."""
    for engine, search in (("native", ("--no-search",)), ("deepspeed", ())):
        done = without_deepspeed(tmp_path, "plan", "runs/frontier-22b", "--set", f"engine={engine}", *search)
        assert done.returncode == 0 and f"; {engine}, 1f1b" in done.stdout, done.stderr


@pytest.mark.parametrize("ranks", [(), ("--nproc", "2")])
def test_the_other_engine_is_refused_with_the_command_that_installs_it(tmp_path: Path, ranks: tuple[str, ...]) -> None:
    done = without_deepspeed(tmp_path, "train", "models/gpt-tiny", *ranks, *sets("engine=deepspeed"))
    assert done.returncode == EXIT_ENVIRONMENT and done.stderr.strip() == f"error: {ONE_SENTENCE}"
