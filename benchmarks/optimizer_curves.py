"""Does each optimizer rule end where AdamW does, with settings tuned for it?

    python benchmarks/optimizer_curves.py --out benchmarks/results/optimizer-curves.jsonl [--rules …]
    python benchmarks/optimizer_curves.py --out benchmarks/results/optimizer-curves.jsonl --report
    python benchmarks/optimizer_curves.py --out benchmarks/results/optimizer-plateau.jsonl --plateau

The quick start's corpus (``make quickstart`` or ``megatron-port data fetch`` makes it) and a small GPT on one process,
through the library. Of each rule, runs of half the ``--steps``, each with a whole schedule, look for the rate, a third
of a decade apart, until the one with the least loss on held-out text has a worse one on either side; then for the
options that its papers tune (``SEARCHED``), and where one of these helps, for the rate again. AdamW with narrow moments
takes what is best for AdamW. The best setting is run for all steps with each of ``SEEDS``, of which the search has seen
the first alone. Schedule, batch and clipping are those of all. Each run is a line of the file; what is there is not run
again.

A rule passes if its held-out loss after the last step is at most 1 % above AdamW's with the same seed, in the mean over
seeds; Muon, if it is below it.

``--plateau`` shows what keeps a model at the loss of one that sees a single byte: it undoes, one by one, what
``SHAPE`` has against that.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_port import build_engine, build_loaders, load_config, open_session
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.engine.api import Engine
from megatron_port.core.optim.schedules import learning_rate

ROOT = Path(__file__).resolve().parent.parent
Options = dict[str, Any]
FACTOR = 10.0 ** (1.0 / 3.0)
MOST = 9
"""Rates that are tried of one set of options at most."""
MARGIN = 0.01
SEEDS = (1234, 1, 2)
BATCH = 8
SHAPE: Options = {
    "engine": "native", "model.name": "optimizer-curves", "model.num_layers": 1, "model.hidden_size": 128,
    "model.num_attention_heads": 4, "model.num_query_groups": 2, "model.ffn_hidden_size": 256, "model.seq_length": 64,
    "model.position_embedding": "rope", "model.normalization": "rmsnorm", "model.qk_norm": True,
    "model.add_bias": False, "model.init_std": 0.08,
    "layout.tensor_parallel_size": 1, "layout.pipeline_parallel_size": 1, "layout.data_parallel_size": 1,
    "batch.micro_batch_size": BATCH, "batch.global_batch_size": BATCH, "precision.dtype": "fp32",
    "optimizer.beta2": 0.99, "optimizer.min_lr": 0.0, "optimizer.decay_steps": 0, "numerics.state_check_interval": 0,
}
EVALUATED, AT_THE_END = 8, 96
"""Batches of held-out text during the run and after it."""


@dataclass(frozen=True)
class Search:
    """Where the search for a rule's setting begins, and what it tries."""

    lr: float
    options: Options = field(default_factory=dict)
    tried: tuple[tuple[float, Options], ...] = ()
    """Options to try one after the other, each with a factor on the rate; what helps is kept."""
    like: str = ""
    """Rule whose best setting is taken in place of a search."""


DECAY, BETA1, BETA2 = "optimizer.weight_decay", "optimizer.beta1", "optimizer.beta2"
SEARCHED = {
    "adamw": Search(4.64e-3, {DECAY: 0.1}, ((1.0, {BETA2: 0.95}), (1.0, {DECAY: 0.3}))),
    "adamw-bf16": Search(4.64e-3, like="adamw"),
    "adamw-8bit": Search(4.64e-3, like="adamw"),
    "muon": Search(1e-2, {DECAY: 0.1}, ((1.0, {"optimizer.muon.lr_factor": 2.0}),)),
    "adafactor": Search(
        4.64e-3, {DECAY: 0.1, "optimizer.adafactor.momentum": 0.9, "optimizer.adafactor.relative": False},
        ((1.0, {"optimizer.adafactor.momentum": 0.0}), (10.0, {"optimizer.adafactor.relative": True, DECAY: 0.0})),
    ),
    "lamb": Search(2.15e-2, {DECAY: 0.1}, ((1.0, {DECAY: 0.01}),)),
    "came": Search(
        1e-3, {DECAY: 0.1, "optimizer.came.beta3": 0.999},
        ((1 / FACTOR, {"optimizer.came.beta3": 0.9999}), (1.0, {"optimizer.came.beta3": 0.99}))),
    "lion": Search(
        4.64e-4, {DECAY: 1.0},
        ((1.0, {BETA1: 0.95, BETA2: 0.98}), (1.0, {DECAY: 0.1}), (1.0, {DECAY: 3.0}), (1.0, {DECAY: 10.0}))),
    "adagrad": Search(
        2.15e-2, {DECAY: 0.0, "optimizer.adagrad.momentum": 0.9}, ((1.0, {"optimizer.adagrad.momentum": 0.0}),)),
    "sm3": Search(0.1, {DECAY: 0.0}, ((1.0, {BETA1: 0.95}), (1.0, {BETA1: 0.0}), (1.0, {DECAY: 0.005}))),
    "sgd": Search(
        0.464, {DECAY: 0.0}, ((1.0, {"optimizer.sgd.nesterov": True}), (0.464, {"optimizer.sgd.momentum": 0.95}))),
}
UNDONE: dict[str, Options] = {
    "as in SHAPE": {},
    "no norms of queries and keys": {"model.qk_norm": False},
    "init_std 0.02": {"model.qk_norm": False, "model.init_std": 0.02},
    "learned positions": {"model.qk_norm": False, "model.init_std": 0.02, "model.position_embedding": "learned"},
}
"""With ``--plateau``: each also lacks what the one before lacks."""
PLATEAU = {"adamw": 4.64e-3, "sgd": 0.464}
"""Rules and rates of ``--plateau``."""


def configured(rule: str, rate: float, steps: int, seed: int, options: Options, args: argparse.Namespace) -> RunConfig:
    """The run: the quick start's, smaller, on one process."""
    settings: Options = {
        **SHAPE, "training.steps": steps, "optimizer.warmup_steps": steps // 10, "optimizer.name": rule,
        "optimizer.lr": rate, "seed": seed, "data.train": json.dumps([args.data]), **options,
        **dict(one.split("=", 1) for one in args.set),
    }
    return load_config("runs/quickstart", *(f"{key}={_toml(value)}" for key, value in settings.items()))


def _toml(value: Any) -> str:
    """Return a value as a run file has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def trained(rule: str, rate: float, steps: int, seed: int, options: Options, args: argparse.Namespace) -> Options:
    """One run and what came of it; one that diverges has no held-out loss."""
    config, began = configured(rule, rate, steps, seed, options, args), time.process_time()
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
        "rule": rule, "lr": float(f"{rate:.3g}"), "options": options, "steps": steps, "seed": seed,
        "held_out": round(at_the_end, 5) if finite else None,
        "held_out_curve": [(step, round(loss, 4)) for step, loss in held_out],
        "training_loss_of_each_100_steps": [round(loss, 4) for loss in means],
        "cpu_seconds": round(time.process_time() - began, 1), "torch": torch.__version__, "hardware": args.hardware,
    }


class Record:
    """The runs of a file, and those that it lacks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    @property
    def rows(self) -> list[Options]:
        """All of them."""
        out: Path = self.args.out
        return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    def run(self, rule: str, rate: float, options: Options, steps: int, seed: int = SEEDS[0]) -> Options:
        """Return a run, from the file or made now."""
        wanted = (rule, steps, seed, options)
        for row in self.rows:
            if tuple(row[k] for k in ("rule", "steps", "seed", "options")) == wanted and math.isclose(
                row["lr"], rate, rel_tol=0.01
            ):
                return row
        row = trained(rule, rate, steps, seed, options, self.args)
        with self.args.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(f"{rule:<10} lr {row['lr']:<8.3g} {steps:>5} steps, seed {seed}, {words(options)}: {row['held_out']}",
              flush=True)
        return row

    def ended(self, rule: str) -> dict[int, float]:
        """Return the held-out losses, by seed, of the setting that a rule's search chose."""
        chosen = min((r for r in self.of(rule, self.args.steps) if r["seed"] == SEEDS[0]), key=loss_of, default=None)
        return {
            row["seed"]: loss_of(row) for row in self.of(rule, self.args.steps)
            if chosen and (row["lr"], row["options"]) == (chosen["lr"], chosen["options"])
        }

    def setting(self, rule: str) -> str:
        """Return that setting as a table has it."""
        chosen = min(self.of(rule, self.args.steps), key=lambda r: (r["seed"] != SEEDS[0], loss_of(r)))
        return f"{chosen['lr']:g} | {words(chosen['options'])}"

    def of(self, rule: str, steps: int) -> list[Options]:
        """Return the runs of a rule of that length."""
        return [row for row in self.rows if (row["rule"], row["steps"]) == (rule, steps)]


def loss_of(row: Options) -> float:
    """The held-out loss of a run; infinite where it has none."""
    return math.inf if row["held_out"] is None else float(row["held_out"])


def climb(run: Callable[[float], Options], rate: float) -> Options:
    """Run rates around the best until that is between two others; return its run."""
    found: dict[int, Options] = {}
    best = 0
    while len(found) < MOST:
        at = best
        for place in (at, at - 1, at + 1):
            if place not in found:
                found[place] = run(rate * FACTOR**place)
        best = min(found, key=lambda place: loss_of(found[place]))
        if best == at:
            break
    return found[best]


def tune(rule: str, record: Record) -> Options:
    """Search a rule's setting by runs of half the length, and return the best of them."""
    search, steps = SEARCHED[rule], record.args.steps // 2
    if search.like:
        return tune(search.like, record)
    best = climb(lambda rate: record.run(rule, rate, search.options, steps), search.lr)
    searched = best["options"]
    for factor, changes in search.tried:
        row = record.run(rule, best["lr"] * factor, {**best["options"], **changes}, steps)
        best = min(best, row, key=loss_of)
    if best["options"] != searched:
        options = best["options"]
        best = climb(lambda rate: record.run(rule, rate, options, steps), best["lr"])
    return best


def passes(rule: str, gap: float) -> bool:
    """Return whether a rule ends where it should, by its relative distance from AdamW."""
    return gap < 0.0 if rule == "muon" else gap <= MARGIN


def words(options: Options) -> str:
    """Return options as a table has them."""
    return ", ".join(f"{key.removeprefix('optimizer.')} {_toml(value)}" for key, value in options.items())


def report(record: Record) -> int:
    """Print how each rule of the record ends and what its search saw; return how many do not pass."""
    reference, failed = record.ended("adamw"), 0
    print(f"| rule | lr | options | {' | '.join(f'seed {seed}' for seed in SEEDS)} | against AdamW |")
    print(f"|---|---|---|{'---|' * len(SEEDS)}---|")
    for rule in SEARCHED:
        losses = record.ended(rule)
        gaps = [losses[seed] / reference[seed] - 1.0 for seed in losses.keys() & reference.keys()]
        if not gaps:
            continue
        gap = statistics.fmean(gaps)
        failed += not (rule == "adamw" or passes(rule, gap))
        each = " | ".join(f"{losses[seed]:.3f}" if seed in losses else "" for seed in SEEDS)
        spread = f" ({min(gaps):+.1%} to {max(gaps):+.1%})" if rule != "adamw" else ""
        print(f"| `{rule}` | {record.setting(rule)} | {each} | {gap:+.1%}{spread} |")
    print("\n| rule | options | held-out loss by lr, half the steps |\n|---|---|---|")
    for rule in SEARCHED:
        seen: dict[str, dict[float, float]] = {}
        for row in record.of(rule, record.args.steps // 2):
            seen.setdefault(words(row["options"]), {})[row["lr"]] = loss_of(row)
        for options, by_rate in seen.items():
            print(f"| `{rule}` | {options} | {', '.join(f'{lr:g}: {by_rate[lr]:.3f}' for lr in sorted(by_rate))} |")
    return failed


def plateau(record: Record) -> None:
    """Run, or take from the record, what shows the cause of the plateau; print a table."""
    names = " | ".join(f"`{rule}`, lr {rate:g}" for rule, rate in PLATEAU.items())
    print(f"| | {names} |\n|---|{'---|' * len(PLATEAU)}")
    for name, undone in UNDONE.items():
        rows = [record.run(rule, rate, {DECAY: 0.0, **undone}, record.args.steps) for rule, rate in PLATEAU.items()]
        print(f"| {name} | {' | '.join(f'{loss_of(row):.3f}' for row in rows)} |")


def main() -> int:
    """Search and train, print a table; 0 if all rules of the record pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=list(SEARCHED), choices=list(SEARCHED))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--report", action="store_true", help="run nothing; print the table of the record")
    parser.add_argument("--plateau", action="store_true", help="run what shows the cause of the plateau, and end")
    parser.add_argument("--data", default=str(ROOT / "data" / "quickstart"), help="prefix of the corpus")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", help="of every run, repeatable")
    parser.add_argument("--hardware", default=platform.processor() or platform.machine(), help="named in the record")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    record = Record(args)
    if args.plateau:
        plateau(record)
        return 0
    best = {rule: tune(rule, record) for rule in (() if args.report else args.rules)}
    for seed in SEEDS:
        for rule, row in best.items():
            record.run(rule, row["lr"], row["options"], args.steps, seed)
    return int(bool(report(record)))


if __name__ == "__main__":
    sys.exit(main())
