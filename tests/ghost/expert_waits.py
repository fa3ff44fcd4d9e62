"""What a layer of experts asks of the host and of cuBLAS for one micro-batch, from the log of the calls.

    python tests/ghost/expert_waits.py [--python ENV/bin/python] [--write]

Each case trains two steps with two and with three layers of experts, with numbers (answers.py): the difference of their
second steps, by the number of micro-batches, is what a layer costs. Waits are the runtime's, whichever operator made
them: a size that a kernel of torch reads for itself counts as one that the package reads. Exit 1: a layer waits more
often, or launches more products, than ``benchmarks/results/ghost-experts.json`` says.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass

from check import RUN
from machine import Machine, RankLog
from options import ROOT, Budgets, chosen_torch, machine, parser
from ordering import STEP_BEGINS, STEP_ENDS, between, waits_between

TABLE = ROOT / "benchmarks" / "results" / "ghost-experts.json"
LAYERS, MICRO_BATCHES = (2, 3), 2
EXPERTS = ("model.moe.num_experts=4", "precision.dtype=bf16", "training.eval_interval=0")
LOSSES = ("model.moe.balance_loss=sequence", "model.moe.balance_weight=0.01", "model.moe.z_weight=0.001",
          "model.moe.balance_bias=true")
Row = dict[str, float]


@dataclass(frozen=True)
class Case:
    """A run by its replicas, the ranks of each, and what it sets."""

    replicas: int = 1
    tp: int = 1
    settings: tuple[str, ...] = LOSSES


CASES = {
    "one rank": Case(settings=()),
    "balanced": Case(),
    "balanced, torch's ops": Case(settings=(*LOSSES, "backend.own_kernels=off")),
    "capacity and random second expert": Case(settings=(
        *LOSSES, "model.moe.capacity_factor=1.0", "model.moe.second_expert=random", "model.moe.jitter=0.01")),
    "fp16": Case(settings=(*LOSSES, "precision.dtype=fp16")),
    "ep 2": Case(2, settings=(*LOSSES, "layout.expert_parallel_size=2")),
    "ep 4, tp 2, shared block": Case(2, 2, (
        *LOSSES, "layout.expert_parallel_size=4", "model.moe.shared_ffn_hidden_size=32")),
    "ep 2, full recompute": Case(2, settings=(
        *LOSSES, "layout.expert_parallel_size=2", "activations.policy=full")),
}


def counted(log: RankLog) -> Row:
    """Return the waits, products and launches of a rank's last step."""
    step = between(log, STEP_BEGINS, STEP_ENDS)
    return {"waits": len(waits_between(log, STEP_BEGINS, STEP_ENDS)),
            "products": sum(event.kind == "product" for event in step),
            "launches": sum(event.kind in ("kernel", "product", "copy", "fill") for event in step)}


def step_of(node: Machine, case: Case, layers: int) -> list[Row]:
    """Train and return each rank's counts. Raises RuntimeError where a run does not end well."""
    shutil.rmtree(node.scratch / "runs", ignore_errors=True)
    (node.scratch / "run.toml").write_text(RUN)
    ranks = case.replicas * case.tp
    sets = (*EXPERTS, f"model.num_layers={layers}", f"batch.global_batch_size={MICRO_BATCHES * case.replicas}",
            f"layout.data_parallel_size={case.replicas}", f"layout.tensor_parallel_size={case.tp}",
            f"layout.sequence_parallel={str(case.tp > 1).lower()}", *case.settings)
    words = [word for one in sets for word in ("--set", one)]
    code, output, logs = node.compute("train", "run.toml", "--nproc", str(ranks), *words)
    if code or len(logs) != ranks:
        raise RuntimeError(f"exit {code}, {len(logs)} of {ranks} ranks: {output[-1500:]}")
    return [counted(log) for log in logs]


def of_a_layer(node: Machine, case: Case) -> Row:
    """Return what a layer costs in a micro-batch on the rank where it costs most."""
    fewer, more = (step_of(node, case, layers) for layers in LAYERS)
    return {key: max((b[key] - a[key]) / MICRO_BATCHES for a, b in zip(fewer, more)) for key in fewer[0]}


def over_budget(name: str, found: Row, allowed: Row) -> list[str]:
    """Return what exceeds the table's row, as sentences; launches, of which torch has other numbers, are shown only."""
    return [f"{name}: {found[key]:g} {key} of a layer of experts and micro-batch, {allowed[key]:g} are allowed"
            for key in ("waits", "products") if found[key] > allowed[key]]


def main() -> int:
    """Measure, print, compare or write; 1 where a layer costs more than the table says."""
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    made.add_argument("--write", action="store_true", help="make these the table's rows")
    a = made.parse_args()
    table = Budgets(TABLE, over_budget, write=a.write)
    with machine(chosen_torch(a.python)) as node:
        for name in a.only:
            row = of_a_layer(node, CASES[name])
            print(f"{name}: " + ", ".join(f"{value:g} {key}" for key, value in row.items()), flush=True)
            table.hold(name, row)
    return table.end()


if __name__ == "__main__":
    sys.exit(main())
