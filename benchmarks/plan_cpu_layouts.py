"""A machine's own calibration table against its own runs: eight layouts on two processes of this machine.

    python benchmarks/plan_cpu_layouts.py [--work FOLDER] [--out FILE.json] [--again]

`bench calibrate` measures the machine with one rank at work and with two, and writes a table of each; then each layout
trains for some steps and is planned with the table of as many ranks. Nothing is taken from the layouts' runs. The goal
is 10 % each, on a machine that does nothing else: the record names the load. ``--again`` leaves nothing of an earlier
start in the folder; without it what is there is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megatron_port.core.io.files import write_text
from megatron_port.tools.plan.compare import compare_run

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "plan-cpu-layouts.json"
RANKS, STEPS, GOAL = 2, 14, 0.10
MODEL = """
[model]
name = "planned-on-cpu"
num_layers = 8
hidden_size = 256
num_attention_heads = 4
vocab_size = 2048
seq_length = 128
hidden_dropout = 0.0
attention_dropout = 0.0
"""
RUN = """
extends = ["{model}", "{machine}"]
name = "{name}"
engine = "native"
output_dir = "{runs}"
[batch]
micro_batch_size = 2
global_batch_size = 8
[precision]
dtype = "fp32"
[data]
synthetic = true
[training]
steps = {steps}
log_interval = 1
[checkpoint]
save_final = false
[layout]
zero_stage = 1
"""
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (1, ()),
    "micro-batch 8": (1, ("batch.micro_batch_size=8",)),
    "full recompute": (1, ("activations.policy=full",)),
    "tp 2": (2, ("layout.tensor_parallel_size=2",)),
    "tp 2, sequence parallel": (2, ("layout.tensor_parallel_size=2", "layout.sequence_parallel=true")),
    "pp 2": (2, ("layout.pipeline_parallel_size=2",)),
    "pp 2, vp 2": (2, ("layout.pipeline_parallel_size=2", "layout.virtual_pipeline_size=2")),
    "dp 2, ZeRO-3": (2, ("layout.zero_stage=3",)),
}
"""Name → processes, and settings."""


def command(*words: str) -> str:
    """Run ``megatron-port`` on one thread for each process; its output. Raises CalledProcessError."""
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_port", *words], env={**os.environ, **threads}, capture_output=True, text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"megatron-port {' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def measured(work: Path, name: str) -> dict[str, object]:
    """Train a layout unless that has been done, and plan it with the machine's table."""
    ranks, settings = LAYOUTS[name]
    short = "".join(c if c.isalnum() else "-" for c in name)
    folder = work / "runs" / short
    if not (folder / "finished").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run = work / f"{short}.toml"
        run.write_text(RUN.format(
            model=work / "model.toml", machine=work / f"machine-{ranks}.toml", name=short, runs=work / "runs",
            steps=STEPS,
        ))
        sets = [word for one in settings for word in ("--set", one)]
        command("train", str(run), "--nproc", str(ranks), *sets)
        (folder / "finished").touch()
    found = compare_run(folder, warm_up=2)
    assert found.seconds is not None and found.low is not None and found.high is not None
    return {
        "layout": name, "ranks": ranks, "planned_s": found.plan.seconds, "measured_s": found.seconds,
        "quartiles_s": [found.low, found.high], "steps": found.steps, "error": found.time_error,
        "split": found.plan.split.parts(),
    }


def main() -> int:
    """Calibrate, run, compare; 1 where a layout is off by more than the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "plan-cpu-layouts")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--seconds", default="0.3", help="of each measurement of the calibration")
    args = parser.parse_args()
    if args.again:
        shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True, exist_ok=True)
    (args.work / "model.toml").write_text(MODEL)
    started, load = time.strftime("%Y-%m-%d"), [os.getloadavg()[0]]
    for ranks in (1, RANKS):
        machine = args.work / f"machine-{ranks}.toml"
        if not machine.exists():
            print(command(
                "bench", "calibrate", "clusters/cpu", "-o", str(machine), "--nproc", str(ranks),
                "--model", str(args.work / "model.toml"), "--seconds", args.seconds,
            ))
    rows = []
    for name in LAYOUTS:
        rows.append(measured(args.work, name))
        load.append(os.getloadavg()[0])
        print(f"{name:26} planned {rows[-1]['planned_s']:.3f} s, measured {rows[-1]['measured_s']:.3f}: "
              f"{rows[-1]['error']:+.1%}", flush=True)
    errors = [abs(float(str(row["error"]))) for row in rows]
    print(f"mean {statistics.mean(errors):.1%}, most {max(errors):.1%} (goal {GOAL:.0%}); load {min(load):.1f} to "
          f"{max(load):.1f}")
    write_text(args.out, json.dumps({"date": started, "load": load, "cores": os.cpu_count(), "rows": rows}, indent=1))
    return int(max(errors) > GOAL)


if __name__ == "__main__":
    raise SystemExit(main())
