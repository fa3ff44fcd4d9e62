"""The script for Flux, in a real Flux instance of two brokers on this machine (flux-core, from source)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = """\
extends = ["runs/quickstart"]
name = "ours"
engine = "native"
[model]
num_layers = 1
seq_length = 16
[layout]
tensor_parallel_size = 1
pipeline_parallel_size = 1
data_parallel_size = 0
[batch]
micro_batch_size = 1
global_batch_size = 8
[training]
steps = 200
eval_interval = 0
[data]
synthetic = true
[cluster]
nodes = 2
gpus_per_node = 1
[launch]
time = "00:20:00"
"""
SCRIPT = """\
set -eu
megatron_port() { "$PYTHON" -m megatron_port "$@"; }
megatron_port launch show run.toml --for flux -o job.sh
# Both brokers are on this host, whose name may mean the loopback interface.
sed -i "s/^MASTER_ADDR=.*/MASTER_ADDR=$ADDRESS/" job.sh
id=$(flux batch --flags=waitable job.sh)
until [ -s runs/ours/metrics.jsonl ]; do sleep 0.2; done
megatron_port launch status --json > status.json
megatron_port launch cancel runs/ours
flux job wait "$id"
id=$(flux batch --flags=waitable job.sh)
flux job wait "$id"
"""
"""The job is cancelled once, and resumes when the same script is submitted again."""


@pytest.mark.slow
def test_the_script_trains_is_cancelled_and_resumes(tmp_path: Path) -> None:
    """On two nodes of two cores and a GPU each, on paper; the losses are those of two ranks without Flux."""
    if not shutil.which("flux"):
        pytest.skip("no flux here (flux-core)")
    address = next(iter(subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()), "")
    if not address:
        pytest.skip("this host has no address but the loopback one")
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {
        "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "ADDRESS": address, "OMP_NUM_THREADS": "1",
        "LANG": "C.UTF-8"}
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "script.sh").write_text(SCRIPT)
    nodes = ["flux", "R", "encode", "-r", "0-1", "-c", "0-1", "-g", "0", "-H", "a,b"]
    (tmp_path / "R").write_bytes(subprocess.run(nodes, capture_output=True, check=True, env=env).stdout)
    done = subprocess.run(
        ["flux", "start", "-s", "2", f"--conf=resource.path={tmp_path}/R", "--conf=resource.noverify=true", "bash",
         "script.sh"], cwd=tmp_path, env=env, text=True, capture_output=True, timeout=300, check=False)
    said = done.stdout + done.stderr + "".join(f.read_text() for f in tmp_path.glob("ours-*.out"))
    assert done.returncode == 0, said
    [row] = json.loads((tmp_path / "status.json").read_text())
    assert row["job"] == "flux.1" and row["state"].startswith("running ("), row
    assert "resumed from" in said and "launcher: flux" in said, said
    alone = [sys.executable, "-m", "megatron_port", "train", "run.toml", "--nproc", "2", "--set", "name=alone"]
    subprocess.run(alone, cwd=tmp_path, env=env, capture_output=True, check=True, timeout=200)
    assert losses(tmp_path / "runs" / "ours") == losses(tmp_path / "runs" / "alone")


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]
