"""Layers of experts over the whole matrix of layouts: 20 steps in fp64, each combination against one process.

Preset × tp (with and without sequence parallelism) × pp × dp × ep × schedule × ZeRO stage × recompute × dropping, as
far as they are legal together. The first rows have every pair of values that any row has, the others follow in a drawn
order: wherever a run is cut off, what it has seen is spread over the matrix.

``python tests/distributed/experts_matrix.py --out benchmarks/results/experts-matrix.jsonl [--pairs]`` runs what the
file lacks; ``--report FILE`` prints the worst deviations by preset.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fuzz
import torch
from cases import make_config
from experts import PRESETS, ExpertDraw, legal_ep, run_draws

from megatron_port.core.config.schema import MoEConfig
from megatron_port.core.dist.mesh import Topology

STEPS = 20
EXPERTS = 8
SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("1f1b", 2), ("zb-h1", 1), ("zb-v", 2))


class Row(NamedTuple):
    """A combination; each field is an axis."""

    preset: str
    tensor: tuple[int, bool]
    """Size, and whether the sequence is parallel."""
    pp: int
    dp: int
    ep: int
    schedule: tuple[str, int]
    zero: int
    recompute: str
    drop: str

    @property
    def ranks(self) -> int:
        """How many."""
        return self.tensor[0] * self.pp * self.dp

    @property
    def legal(self) -> bool:
        """Whether such a run may start, and differs from the others: replicas' stages need replicas."""
        name, chunks = self.schedule
        return (
            1 < self.ranks <= 8 and self.ep in legal_ep(Topology(self.tensor[0], self.pp, self.dp), EXPERTS)
            and (self.pp > 1 or (name, chunks) == ("1f1b", 1))
            and not (name.startswith("zb-") and self.zero == 2) and (self.dp > 1 or self.zero == 1)
        )


def rows() -> tuple[list[Row], list[Row]]:
    """All legal combinations: those that have every pair, and the others."""
    axes = (
        PRESETS, ((1, False), (2, True), (2, False)), (1, 2), (1, 2, 4), (1, 2, 4), SCHEDULES, range(4),
        ("none", "selective", "full"), ("", "position", "probability"),
    )
    every = [row for row in itertools.starmap(Row, itertools.product(*axes)) if row.legal]
    random.Random("experts-matrix").shuffle(every)
    every.sort(key=lambda row: row.ranks)  # of rows that show as much, the quickest
    first = list(_pairwise(every))
    rest = sorted(set(every).difference(first))
    random.Random("the rest").shuffle(rest)
    return first, rest


def _pairs(row: Row) -> set[tuple[int, Any, int, Any]]:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def _pairwise(every: Sequence[Row]) -> Iterator[Row]:
    """Greedily, a part of the rows in which every pair of values that any row has occurs."""
    shown = {row: _pairs(row) for row in every}
    missing = set().union(*shown.values())
    while missing:
        best = max(every, key=lambda row: len(shown[row] & missing))
        missing -= shown[best]
        yield best


def draw_of(number: int, row: Row) -> ExpertDraw:
    """The run of a row."""
    (tp, sequence), (name, chunks) = row.tensor, row.schedule
    moe: dict[str, Any] = {
        **PRESETS[row.preset], "num_experts": EXPERTS, "ffn_hidden_size": 12,
        "capacity_factor": 1.0 if row.drop else 0.0, "drop_by": row.drop or "position",
    }
    config = make_config(
        dtype="fp64", micro_batch_size=1, global_batch_size=8,
        model={"hidden_size": 24, "num_layers": max(row.pp * chunks, 2) + number % 2, "hidden_dropout": 0.1,
               "tie_embeddings": number % 3 == 0, "moe": MoEConfig(**moe)},
        layout={"tensor_parallel_size": tp, "pipeline_parallel_size": row.pp, "data_parallel_size": row.dp,
                "expert_parallel_size": row.ep, "sequence_parallel": sequence, "recompute": row.recompute,
                "pipeline_schedule": name, "virtual_pipeline_size": chunks, "zero_stage": row.zero,
                "reduce_bucket_size": 4000},
    )
    return ExpertDraw(number, config, Topology(tp, row.pp, row.dp, ep=row.ep), row.preset)


def report(results: Sequence[dict[str, Any]], first: int, rest: int) -> str:
    """Worst deviations by preset, as Markdown."""
    pairs = sum(r["seed"] < first for r in results)
    lines = [
        f"{len(results)} of {first + rest} combinations, among them {pairs} of the {first} that have every pair", "",
        "| preset | combinations | other routes | other counts or buffers | loss | grad norm | gradient by name | sums "
        "| all equal |", "|---|---|---|---|---|---|---|---|---|",
    ]
    for preset in PRESETS:
        members = [r for r in results if r["preset"] == preset]

        def worst(*quantities: str, members: list[dict[str, Any]] = members) -> float:
            return max(d["value"] for m in members for d in m["deviations"] if d["quantity"] in quantities)

        losses, equal = worst("loss", "eval loss"), "yes" if all(m["ok"] for m in members) else "NO"
        lines.append(
            f"| {preset} | {len(members)} | {worst('routes'):g} | {worst('counts'):g} | {losses:.1e} | "
            f"{worst('grad norm'):.1e} | {worst('gradient'):.1e} | {worst('sums'):.1e} | {equal} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run or report."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--pairs", action="store_true", help="stop where every pair has been seen")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; resume later")
    args = parser.parse_args()
    torch.set_num_threads(1)
    first, rest = rows()
    draws = itertools.starmap(draw_of, enumerate(first if args.pairs else [*first, *rest]))
    if args.report:
        print(report([json.loads(line) for line in args.report.read_text().splitlines()], len(first), len(rest)))
        return 0
    run: Any = functools.partial(run_draws, steps=STEPS)
    return fuzz.run_resumable(list(draws), args.out, batch_size=4, seconds=args.seconds, run=run)


if __name__ == "__main__":
    import experts_matrix  # ranks take functions of modules that they can import

    sys.exit(experts_matrix.main())
