"""Does each optimizer rule end where AdamW does, at a learning rate tuned for it?

    python benchmarks/optimizer_curves.py --out benchmarks/results/optimizer-curves.jsonl [--rules …]
    python benchmarks/optimizer_curves.py --out benchmarks/results/optimizer-curves.jsonl --report

The quick start's corpus (``make quickstart`` or ``megatron-port data fetch`` makes it) and a small GPT on one process,
through the library. Every rate that is tried is run for all ``--steps``, since a shorter run prefers another one. The
search goes over rates a third of a decade apart until the one with the least loss on held-out text has a worse one on
either side; for AdamW then to the two in the middle between these. Of other rules than AdamW and Muon it ends as soon
as the rule passes. All have one schedule, batch, seed and weight decay, but for rules that add weight decay to the
gradient (``COUPLED``). Each run is a line of the file; what is there is not run again.

A rule passes if its held-out loss after the last step is at most 1 % above AdamW's least; Muon, if it is below it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from megatron_port import build_engine, build_loaders, load_config, open_session
from megatron_port.config.schema import RunConfig
from megatron_port.engine.api import Engine
from megatron_port.optim.schedules import learning_rate

ROOT = Path(__file__).resolve().parent.parent
START = {
    "adamw": 2.15e-3, "adamw-bf16": 2.15e-3, "adamw-8bit": 2.15e-3, "muon": 1e-2, "lion": 4.64e-4,
    "adafactor": 2.15e-2, "lamb": 2.15e-2, "came": 1e-3, "adagrad": 2.15e-2, "sm3": 0.1, "sgd": 1.0,
}
"""Learning rate at which the search begins."""
FACTOR = 10.0 ** (1.0 / 3.0)
COUPLED = ("sgd", "adagrad")
"""Rules that add weight decay to the gradient, where the others' value would outweigh it."""
MOST = 9
"""Rates that are tried of a rule at most."""
MARGIN = 1.01
BATCH = 4
SHAPE = {
    "engine": "native", "model.name": "optimizer-curves", "model.num_layers": 1, "model.hidden_size": 128,
    "model.num_attention_heads": 4, "model.ffn_hidden_size": 256, "model.seq_length": 64,
    "layout.tensor_parallel_size": 1, "layout.pipeline_parallel_size": 1, "layout.data_parallel_size": 1,
    "batch.micro_batch_size": BATCH, "batch.global_batch_size": BATCH, "precision.dtype": "fp32",
    "optimizer.min_lr": 0.0, "optimizer.decay_steps": 0, "numerics.state_check_interval": 0,
}
EVALUATED, AT_THE_END = 16, 192
"""Batches of held-out text during the run and after it."""


def configured(rule: str, rate: float, steps: int, args: argparse.Namespace) -> RunConfig:
    """The run: the quick start's, smaller, on one process."""
    settings: dict[str, Any] = {
        **SHAPE, "training.steps": steps, "optimizer.warmup_steps": steps // 20, "optimizer.name": rule,
        "optimizer.lr": rate, "optimizer.weight_decay": 0.0 if rule in COUPLED else 0.1,
        "data.train": json.dumps([args.data]), **dict(one.split("=", 1) for one in args.set),
    }
    return load_config("runs/quickstart", *(f"{key}={value}" for key, value in settings.items()))


def trained(rule: str, rate: float, steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run and what came of it; one that diverges has no held-out loss."""
    config, began = configured(rule, rate, steps, args), time.process_time()
    held_out: list[tuple[int, float]] = []
    losses: list[float] = []
    with open_session(config, quiet=True) as session:
        engine, loaders = build_engine(session), build_loaders(session)

        def evaluate(engine: Engine, batches: int) -> float:
            found = [engine.eval_step(b).loss for b in loaders.eval_batches("valid", batches, BATCH)]
            return sum(found) / len(found)

        for step in range(steps):
            if step % (steps // 10) == 0:
                held_out.append((step, evaluate(engine, EVALUATED)))
            lr = learning_rate(config.optimizer, step, steps)
            losses.append(engine.train_step(loaders.train.step(step * BATCH, BATCH), step=step, lr=lr).loss)
            if not math.isfinite(losses[-1]):
                break
        at_the_end = evaluate(engine, AT_THE_END)
    finite = math.isfinite(at_the_end)
    means = [sum(losses[at : at + 100]) / len(losses[at : at + 100]) for at in range(0, len(losses), 100)]
    return {
        "rule": rule, "lr": float(f"{rate:.3g}"), "steps": steps, "held_out": round(at_the_end, 5) if finite else None,
        "held_out_curve": [(step, round(loss, 4)) for step, loss in held_out],
        "training_loss_of_each_100_steps": [round(loss, 4) for loss in means],
        "cpu_seconds": round(time.process_time() - began, 1), "torch": torch.__version__, "hardware": args.hardware,
    }


class Record:
    """The runs of a file, and those that it lacks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All of them."""
        out: Path = self.args.out
        return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    def run(self, rule: str, rate: float, steps: int) -> float:
        """Return the held-out loss of a run, from the file or made now; infinite where it has none."""
        for row in self.rows:
            if (row["rule"], row["steps"]) == (rule, steps) and math.isclose(row["lr"], rate, rel_tol=0.01):
                return loss_of(row)
        row = trained(rule, rate, steps, self.args)
        with self.args.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(f"{rule:<10} lr {row['lr']:<8.3g} {steps:>6} steps: {row['held_out']}", flush=True)
        return loss_of(row)

    def best(self, rule: str) -> float:
        """Return the least held-out loss of a rule's runs of full length."""
        found = [loss_of(r) for r in self.rows if (r["rule"], r["steps"]) == (rule, self.args.steps)]
        return min(found, default=math.inf)


def loss_of(row: dict[str, Any]) -> float:
    """The held-out loss of a run; infinite where it has none."""
    return math.inf if row["held_out"] is None else float(row["held_out"])


def passes(rule: str, loss: float, reference: float) -> bool:
    """Return whether a rule ends where it should."""
    return loss < reference if rule == "muon" else loss <= MARGIN * reference


def tune(rule: str, record: Record) -> None:
    """Run a rule at rates around the best until that is between two others."""
    found: dict[int, float] = {}
    best = 0
    while len(found) < MOST:
        at = best
        for place in (at, at - 1, at + 1):
            if place not in found:
                found[place] = record.run(rule, START[rule] * FACTOR**place, record.args.steps)
            if rule not in ("adamw", "muon") and passes(rule, record.best(rule), record.best("adamw")):
                return
        best = min(found, key=found.__getitem__)
        if best == at:
            break
    for place in (best - 0.5, best + 0.5) if rule == "adamw" else ():
        record.run(rule, START[rule] * FACTOR**place, record.args.steps)


def report(record: Record) -> int:
    """Print how each rule of the record ends; return how many do not pass."""
    reference, failed = record.best("adamw"), 0
    for rule in START:
        rows = sorted((r for r in record.rows if r["rule"] == rule), key=lambda r: r["lr"])
        ended = [r for r in rows if r["steps"] == record.args.steps]
        if not ended:
            continue
        best = min(ended, key=loss_of)
        passed = rule == "adamw" or passes(rule, loss_of(best), reference)
        failed += not passed
        tried = ", ".join(f"{r['lr']:g}: {loss_of(r):.3f}" for r in ended)
        print(f"| `{rule}` | {best['lr']:g} | {loss_of(best):.3f} | {loss_of(best) / reference - 1:+.1%} | {tried} |")
    return failed


def main() -> int:
    """Search and train, print a table; 0 if all rules of the record pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=list(START), choices=list(START))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--report", action="store_true", help="run nothing; print the table of the record")
    parser.add_argument("--data", default=str(ROOT / "data" / "quickstart"), help="prefix of the corpus")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", help="of every run, repeatable")
    parser.add_argument("--hardware", default=platform.processor() or platform.machine(), help="named in the record")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    record = Record(args)
    for rule in () if args.report else dict.fromkeys(args.rules):
        tune(rule, record)
    return int(bool(report(record)))


if __name__ == "__main__":
    sys.exit(main())
