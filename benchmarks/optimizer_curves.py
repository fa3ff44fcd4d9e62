"""Does each optimizer rule end where AdamW does, at a learning rate tuned for it?

    python benchmarks/optimizer_curves.py --out benchmarks/results/optimizer-curves.jsonl [--steps 2000] [--rules …]

The quick start's corpus (``make quickstart`` or ``megatron-port data fetch`` makes it), a small GPT on one process,
real runs of ``megatron-port train``. For each rule a search over learning rates half a decade apart, of
``--search-steps`` steps each, moves to where the loss on held-out text is least; then one run of ``--steps`` steps at
that rate. Each run is a line of the file: what is there is not run again, and a run that was interrupted resumes from
its last checkpoint.

A rule passes if its held-out loss after the last step is at most 1 % above AdamW's; Muon, if it is below it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
START = {
    "adamw": 4e-3, "lion": 4e-4, "sgd": 0.3, "adagrad": 1e-2, "adafactor": 3e-2, "came": 1e-3, "sm3": 3e-2,
    "lamb": 1e-2, "muon": 4e-3,
}
"""Learning rate at which the search begins."""
FACTOR = math.sqrt(10.0)
MOST = 9
"""Rates that are tried of a rule at most."""
MARGIN = 1.01
SHAPE = {
    "engine": "native", "model.name": "optimizer-curves", "model.num_layers": 2, "model.hidden_size": 64,
    "model.num_attention_heads": 4, "layout.tensor_parallel_size": 1, "layout.pipeline_parallel_size": 1,
    "layout.data_parallel_size": 1, "batch.micro_batch_size": 8, "batch.global_batch_size": 8,
    "precision.dtype": "fp32", "training.eval_batches": 8, "training.log_interval": 100,
    "checkpoint.save_interval": 500, "checkpoint.keep": 1, "optimizer.min_lr": 0.0,
    "optimizer.decay_steps": 0, "numerics.on_anomaly": "skip", "numerics.max_anomalies": 1_000_000,
}


def trained(rule: str, rate: float, steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run and what came of it; a run that leaves with an error has no loss."""
    name = f"{rule}-{rate:.3g}-{steps}"
    settings: dict[str, Any] = {
        **SHAPE, "name": name, "output_dir": str(args.runs), "training.steps": steps,
        "training.eval_interval": max(steps // 20, 1), "optimizer.warmup_steps": min(50, steps // 10),
        "optimizer.name": rule, "optimizer.lr": rate,
        **dict(one.split("=", 1) for one in args.set),
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-W", "ignore::FutureWarning", "-m", "megatron_port", "train", "runs/quickstart",
               "--data", args.data, *sets]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with open(args.runs / f"{name}.log", "a") as log:
        done = subprocess.run(command, stdout=log, stderr=log, env=environment, cwd=ROOT, check=False)
    path = args.runs / name / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    held_out = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    curve = [[step, round(value, 5)] for step, value in sorted(held_out.items())]
    ended = done.returncode == 0 and bool(curve)
    return {
        "rule": rule, "lr": rate, "steps": steps, "exit": done.returncode,
        "held_out": curve[-1][1] if ended else None, "held_out_curve": curve,
        "training_curve": [[step, round(loss, 5)] for step, loss in sorted(losses.items()) if step % 20 == 0],
    }


class Record:
    """The runs of a file, and those that it lacks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rows = args, []
        if args.out.exists():
            self.rows = [json.loads(line) for line in args.out.read_text().splitlines()]

    def run(self, rule: str, rate: float, steps: int) -> dict[str, Any]:
        """Return a run, from the file or made now."""
        for row in self.rows:
            if (row["rule"], row["steps"]) == (rule, steps) and math.isclose(row["lr"], rate, rel_tol=1e-6):
                return row
        row = {**trained(rule, rate, steps, self.args), "torch": torch.__version__, "hardware": self.args.hardware}
        self.rows.append(row)
        with self.args.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(f"{rule:<10} lr {rate:<10.4g} {steps:>6} steps: {row['held_out']}", flush=True)
        return row


def loss_of(row: dict[str, Any]) -> float:
    """The held-out loss of a run; infinite where it has none."""
    value = row["held_out"]
    return math.inf if value is None or not math.isfinite(value) else float(value)


def tuned(rule: str, record: Record) -> float:
    """Return the learning rate with the least held-out loss of those tried, one lower and one higher among them."""
    found: dict[int, float] = {}
    at = 0
    for _ in range(MOST):
        for place in (at - 1, at, at + 1):
            if place not in found:
                found[place] = loss_of(record.run(rule, START[rule] * FACTOR**place, record.args.search_steps))
        best = min(found, key=found.__getitem__)
        if best == at or len(found) >= MOST:
            return START[rule] * FACTOR**best
        at = best
    return START[rule] * FACTOR**at


def main() -> int:
    """Search and train, print a table; 0 if all rules pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=list(START), choices=list(START))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--search-steps", type=int, default=300)
    parser.add_argument("--data", default=str(ROOT / "data" / "quickstart"), help="prefix of the corpus")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "optimizer-curves", help="where run folders go")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", help="of every run, repeatable")
    parser.add_argument("--hardware", default=platform.processor() or platform.machine(), help="named in the record")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.runs = args.runs.resolve()
    args.runs.mkdir(parents=True, exist_ok=True)
    record, ended = Record(args), {}
    for rule in dict.fromkeys(["adamw", *args.rules]):
        rate = tuned(rule, record)
        ended[rule] = rate, loss_of(record.run(rule, rate, args.steps))
    reference, failed = ended["adamw"][1], 0
    for rule, (rate, loss) in ended.items():
        passed = loss < reference if rule == "muon" else loss <= MARGIN * reference
        failed += not passed
        print(f"{rule:<10} lr {rate:<10.4g} held out {loss:.5f}  {loss / reference - 1:+.2%} of AdamW's  "
              f"{'passes' if passed else 'FAILS'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
