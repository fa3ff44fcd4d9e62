"""A job that comes back with half its ranks: the same run, on another layout."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from pool import RankPool
from test_numerics import config_of, train

from megatron_port.core.config.layout import topology_sizes
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.errors import EXIT_CONFIG, EXIT_ENVIRONMENT, EXIT_REQUEUE
from megatron_port.run.elastic import elastic_layout

ROOT = Path(__file__).resolve().parents[2]
AFTER = 5
RUN = """
name = "elastic"
engine = "native"
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 4
vocab_size = 53
seq_length = 16
hidden_dropout = 0.1
[layout]
tensor_parallel_size = 2
data_parallel_size = 2
sequence_parallel = true
zero_stage = 0
elastic = true
[batch]
micro_batch_size = 1
global_batch_size = 32
[precision]
dtype = "fp32"
[optimizer]
lr = 1e-3
eps = 1e-5
decay = "constant"
warmup_steps = 2
[data]
synthetic = true
[backend]
device = "cpu"
own_kernels = "off"
attention = "math"
"""


@pytest.fixture(scope="module")
def worlds() -> Iterator[RankPool]:
    """Ranks of this module's own: signal handlers are changed in them."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.mark.slow
def test_half_the_ranks_go_on(worlds: RankPool, tmp_path: Path) -> None:
    """The same through the loop alone, without launchers: tp 2 x dp 2, a checkpoint, tp 2 x dp 1; and pp 2 x dp 2."""
    for layout, asked, chosen in (
        ({"tensor_parallel_size": 2}, Topology(tp=2, dp=2), Topology(tp=2)),
        ({"pipeline_parallel_size": 2}, Topology(pp=2, dp=2), Topology(pp=2)),
    ):
        name = "-".join(layout)
        config = config_of(tmp_path, name, save_interval=3, layout={**layout, "elastic": True})
        fitted = elastic_layout(config, 2).config
        assert topology_sizes(fitted, 2) == (chosen.tp, chosen.pp, chosen.dp)
        whole = worlds.run(4, train, config, asked, None, fresh=True)[0].losses
        for path in (tmp_path / name / "checkpoints").iterdir():
            if path.is_dir() and not path.name.endswith("3"):
                shutil.rmtree(path)
        two = worlds.run(2, train, fitted, chosen, None, fresh=True)[0].losses
        assert len(two) == len(whole) == 6 and two[:3] == whole[:3]
        assert two[3:] == pytest.approx(whole[3:], rel=1e-5) and len(set(two)) == 6


def start(folder: Path, ranks: int, *options: str) -> subprocess.Popen[str]:
    (folder / "run.toml").write_text(RUN)
    sets = [x for option in options for x in ("--set", option)]
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_port", "train", str(folder / "run.toml"), "--nproc", str(ranks), *sets],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


def losses(folder: Path) -> list[float]:
    path = folder / "elastic" / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line)["loss"] for line in path.read_text().splitlines() if line.endswith("}")]


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=240)
    return process.returncode, out


@pytest.mark.slow
def test_four_ranks_stop_and_two_go_on(tmp_path: Path) -> None:
    """tp 2 x dp 2, SIGUSR1 in the middle (exit 85), then tp 2 x dp 1: every loss as in the unbroken run."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    process = start(broken, 4, f"output_dir={broken}", "training.steps=100000")
    deadline = time.monotonic() + 200
    while len(losses(broken)) < 3 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    code, out = finish(process)
    assert code == EXIT_REQUEUE and "elastic:" not in out, out
    done = len(losses(broken))
    assert done >= 3
    steps = f"training.steps={done + AFTER}"

    code, out = finish(start(broken, 2, f"output_dir={broken}", steps, "layout.elastic=false"))
    assert code in (EXIT_CONFIG, EXIT_ENVIRONMENT) and "but the world has 2" in out, out

    code, out = finish(start(broken, 2, f"output_dir={broken}", steps))
    assert code == 0, out
    line = (
        "elastic: 2 ranks came, and the run asks for tp 2 x pp 1 x dp 2; continuing with tp 2 x pp 1 x dp 1; global "
        "batch 32 as before"
    )
    assert out.count(line) == 1 and f"at step {done}, {done * 32} samples" in out, out

    code, out = finish(start(whole, 4, f"output_dir={whole}", steps))
    assert code == 0, out
    assert len(losses(broken)) == done + AFTER and len(set(losses(broken))) == done + AFTER
    # Free-running: the fp32 tolerance of one step, and some more for rounding that grows.
    assert losses(broken) == pytest.approx(losses(whole), rel=1e-4)
