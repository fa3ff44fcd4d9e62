"""Does training in 8 bits end where bf16 does? python benchmarks/fp8_loss.py [--steps 500] [--out FILE] [--set a.b=…]

The quick start's corpus (``make quickstart`` or ``megatron-port data fetch`` makes it), a small GPT, real runs of
``megatron-port train``: bf16 with three seeds, each recipe of precision.fp8 with two of them, and bf16 once more with
other micro-batches, which changes nothing but the order of sums. A run that is finished is not done again, one that
was interrupted resumes from its last checkpoint.

Compared are the loss on held-out text after the last step and the mean of the last 50 training losses. An 8-bit run
passes if it ends no farther from the bf16 run of its own seed than bf16 runs of different seeds end from one another.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (1, 2, 3)
LAST = 50
"""Steps whose training losses are averaged."""
SHAPE = {
    "engine": "native", "model.name": "fp8-loss", "model.num_layers": 2, "model.hidden_size": 64,
    "model.num_attention_heads": 4, "layout.tensor_parallel_size": 1, "layout.pipeline_parallel_size": 1,
    "layout.data_parallel_size": 1, "batch.micro_batch_size": 8, "batch.global_batch_size": 8,
    "precision.dtype": "bf16", "training.eval_interval": 100, "training.eval_batches": 32, "training.log_interval": 100,
    "checkpoint.save_interval": 100, "checkpoint.keep": 1,
    "optimizer.lr": 4e-3, "optimizer.min_lr": 4e-4, "optimizer.warmup_steps": 15, "optimizer.decay_steps": 0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, other micro-batches": {"batch.micro_batch_size": 4},
    "tensorwise": {"precision.fp8": "tensorwise"},
    "rowwise": {"precision.fp8": "rowwise"},
}

FEWER = {"bf16, other micro-batches": 1, "tensorwise": 2, "rowwise": 2}
"""Seeds of a variant."""


def command(settings: dict[str, Any], data: str) -> list[str]:
    """``megatron-port train`` with the quick start's run file and these settings."""
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return [sys.executable, "-W", "ignore::FutureWarning", "-m", "megatron_port", "train", "runs/quickstart",
            "--data", data, *sets]


def train(variant: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run and what came of it."""
    name = f"{variant.replace(', ', '-').replace(' ', '-')}-{seed}"
    settings = {
        **SHAPE, **VARIANTS[variant], "seed": seed, "name": name, "output_dir": str(args.runs),
        "training.steps": args.steps, **dict(s.split("=", 1) for s in args.set),
    }
    metrics = args.runs / name / "metrics.jsonl"
    if not metrics.exists() or read(metrics)[-1]["step"] < args.steps:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with open(args.runs / f"{name}.log", "a") as log:
            subprocess.run(command(settings, args.data), check=True, stdout=log, stderr=log, env=environment, cwd=ROOT)
    rows = {row["step"]: row for row in read(metrics)}  # of a step that was done twice, the later
    losses = [row["loss"] for step, row in sorted(rows.items()) if "loss" in row]
    held_out = [row["validation_loss"] for _, row in sorted(all_of(metrics, "validation_loss").items())]
    if len(losses) != args.steps:
        raise SystemExit(f"{metrics} has {len(losses)} training losses of {args.steps}")
    return {
        "variant": variant, "seed": seed, "held_out": held_out[-1],
        "last_losses": sum(losses[-LAST:]) / len(losses[-LAST:]),
        "held_out_every_100": [round(v, 5) for v in held_out],
        "skipped": sum(r.get("skipped", 0) for r in rows.values()),
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics that hold a training loss."""
    return [row for row in map(json.loads, path.read_text().splitlines()) if "loss" in row]


def all_of(path: Path, key: str) -> dict[int, dict[str, Any]]:
    """Step → the last line with a key."""
    return {row["step"]: row for row in map(json.loads, path.read_text().splitlines()) if key in row}


def judge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Spread of bf16's seeds and the largest difference of each variant from bf16 at its own seed, by quantity."""
    out: dict[str, Any] = {}
    for what in ("held_out", "last_losses"):
        bf16 = {r["seed"]: r[what] for r in rows if r["variant"] == "bf16"}
        spread = max(bf16.values()) - min(bf16.values())
        off = {
            v: max(abs(r[what] - bf16[r["seed"]]) for r in rows if r["variant"] == v)
            for v in VARIANTS if v != "bf16" and any(r["variant"] == v for r in rows)
        }
        out[what] = {
            "bf16_seeds": bf16, "spread_of_bf16_seeds": spread, "largest_difference_from_own_seed": off,
            "within": all(off[v] <= spread for v in ("tensorwise", "rowwise")),
        }
    return out


def main() -> int:
    """Run all, print a table, write the result; 0 if both recipes pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--data", default=str(ROOT / "data" / "quickstart"), help="prefix of the corpus")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "fp8-loss", help="where run folders go")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", help="of every run, repeatable")
    parser.add_argument("--hardware", default=platform.processor() or platform.machine(), help="named in the result")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.runs = args.runs.resolve()
    args.runs.mkdir(parents=True, exist_ok=True)
    rows = []
    for variant in VARIANTS:
        for seed in args.seeds[:FEWER.get(variant, len(args.seeds))]:
            rows.append(train(variant, seed, args))
            r = rows[-1]
            print(f"{variant:<25} seed {seed}  held out {r['held_out']:.5f}  last {LAST} losses {r['last_losses']:.5f}",
                  flush=True)
    found = judge(rows)
    for what, numbers in found.items():
        off = ", ".join(f"{v} {d:.5f}" for v, d in numbers["largest_difference_from_own_seed"].items())
        print(f"{what}: bf16's seeds spread {numbers['spread_of_bf16_seeds']:.5f}; from bf16 at the same seed: {off}")
    if args.out:
        words = [f"--steps {args.steps}", *(f"--set {s}" for s in args.set)]
        document = {
            "command": "python benchmarks/fp8_loss.py " + " ".join(words), "hardware": args.hardware,
            "torch": torch.__version__, "shape": SHAPE, "steps": args.steps, "judged": found, "runs": rows,
        }
        temporary = args.out.with_name(args.out.name + ".tmp")
        temporary.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(temporary, args.out)
        print(f"written: {args.out}")
    return int(not all(numbers["within"] for numbers in found.values()))


if __name__ == "__main__":
    sys.exit(main())
