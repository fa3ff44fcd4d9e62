"""Does a pruned and distilled model end below one of the same size that is trained from scratch on as many tokens?

    python benchmarks/compression_curves.py --runs DIR --out benchmarks/results/compression.jsonl [--data PREFIX]

The quick start's model on its corpus (``make quickstart`` or ``megatron-port data fetch`` makes it), on one process,
real runs of ``megatron-port``: a teacher; its importance; the pruned model of half its parameters; and models of that
size that are trained on a fifth of the teacher's tokens, pruned and distilled, pruned alone, and from scratch, and
one from scratch on all of them; each at three learning rates, of which the best counts. Each run is a line of the
file, with its held-out loss; a run that is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ALONE = {
    "engine": "native", "layout.tensor_parallel_size": 1, "layout.pipeline_parallel_size": 1,
    "layout.data_parallel_size": 1, "training.eval_batches": 16, "checkpoint.keep": 1,
}
FFN = 128
"""Rows of the MLP that are left of 512: 53 % of the parameters."""


def command(args: argparse.Namespace, log: str, *words: str) -> None:
    """Run ``megatron-port``; what it prints goes to a file. Raises CalledProcessError."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with open(args.runs / f"{log}.log", "a") as out:
        subprocess.run([sys.executable, "-m", "megatron_port", *words], stdout=out, stderr=out, env=environment,
                       cwd=ROOT, check=True)


RATES = (2e-3, 1e-3, 5e-4)
"""Learning rates that each run of a small model is tried at."""


def best(args: argparse.Namespace, name: str, steps: int, more: dict[str, Any], *extends: str) -> dict[str, Any]:
    """Train a run at each of the rates, and return the line of the one that ends lowest."""
    found = []
    for rate in RATES:
        try:
            one = trained(args, f"{name}-{rate:g}", steps, {**more, "optimizer.lr": rate}, *extends)
        except subprocess.CalledProcessError:  # it diverged, and the run's own checks ended it
            continue
        found.append({**one, "run": name, "lr": rate, "folder": one["run"]})
    return min(found, key=lambda line: float(line["held_out"]))


def trained(args: argparse.Namespace, name: str, steps: int, more: dict[str, Any], *extends: str) -> dict[str, Any]:
    """Train one run, and return its line."""
    settings = {
        **ALONE, "name": name, "output_dir": str(args.runs), "training.steps": steps, "optimizer.decay_steps": steps,
        "optimizer.warmup_steps": min(30, steps // 4), "training.eval_interval": max(steps // 10, 1),
        "checkpoint.save_interval": steps, **more,
    }
    run_file = args.runs / f"{name}.toml"
    names = ["runs/quickstart", *extends]
    run_file.write_text(f"extends = {json.dumps(names)}\n")
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command(args, name, "train", str(run_file), "--data", args.data, *sets)
    rows = [json.loads(line) for line in (args.runs / name / "metrics.jsonl").read_text().splitlines()]
    held_out = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    per_step = 32 * 128
    return {"run": name, "steps": steps, "tokens": steps * per_step,
            "held_out": round(held_out[max(held_out)], 5),
            "curve": [[step * per_step, round(loss, 5)] for step, loss in sorted(held_out.items())]}


def picture(rows: list[dict[str, Any]]) -> str:
    """Return a drawing of the held-out losses over the tokens, as a file."""
    from megatron_port.ext.telemetry.numbers import quantity
    from megatron_port.tools.charts.page import Axis, Series, line_chart, standalone

    # The beginnings from scratch, above 3.5, would leave the ends no room.
    series = [
        Series(row["run"], [(float(t), v) for t, v in row["curve"] if v < 3.5], colour=i, dots=True)
        for i, row in enumerate(rows)
    ]
    return standalone(line_chart(
        series, label="held-out loss over the tokens of each run", x=Axis(label="tokens", form=quantity),
        y=Axis(label="held-out loss, nats per token"),
    ), themed=True)


def main() -> None:
    """Make the runs that the file lacks, and print the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="a folder for the runs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", default="data/quickstart")
    parser.add_argument("--steps", type=int, default=150, help="of the teacher; the small ones take a fifth")
    parser.add_argument("--picture", type=Path, help="write the curves there too (SVG)")
    args = parser.parse_args()
    args.runs = args.runs.absolute()
    args.runs.mkdir(parents=True, exist_ok=True)
    done = {}
    if args.out.exists():
        done = {row["run"]: row for row in map(json.loads, args.out.read_text().splitlines())}
    teacher, pruned, importance = args.runs / "teacher", args.runs / "pruned", args.runs / "importance.safetensors"
    short = args.steps // 5

    def once(name: str, steps: int, more: dict[str, Any], *extends: str) -> None:
        if name not in done:
            done[name] = (trained if name == "teacher" else best)(args, name, steps, more, *extends)
            with args.out.open("a") as out:
                out.write(json.dumps(done[name]) + "\n")
        print(f"{name:<10} {done[name]['tokens']:>10,} tokens, held-out loss {done[name]['held_out']:.4f}", flush=True)

    once("teacher", args.steps, {})
    if not (pruned / "model.toml").is_file():
        command(args, "convert", "compress", "measure", str(teacher), "--data", args.data, "--samples", "512",
                "--micro-batch-size", "8", "--out", str(importance))
        command(args, "convert", "compress", "run", str(teacher), str(pruned), "--ffn", str(FFN), "--importance",
                str(importance))
    model, start = str(pruned / "model.toml"), {"checkpoint.initial_weights": str(pruned)}
    once("distilled", short, {**start, "distillation.teacher": str(teacher), "distillation.alpha": 0.1}, model)
    once("continued", short, start, model)
    once("scratch", short, {}, model)
    once("scratch-all", args.steps, {}, model)
    if args.picture is not None:
        args.picture.write_text(picture(list(done.values())))
    below = done["scratch"]["held_out"] - done["distilled"]["held_out"]
    print(f"distilled is {below:+.4f} nats per token below the same model from scratch on as many tokens")
    raise SystemExit(0 if below > 0 else 1)


if __name__ == "__main__":
    main()
