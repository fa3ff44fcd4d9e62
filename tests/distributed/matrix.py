"""The whole layout matrix, resumable, and the table of measured differences in benchmarks/evidence/parity.md.

``python tests/distributed/matrix.py --out FILE`` runs what FILE lacks; ``--report FILE`` prints the table.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import records
from cases import make_config
from drawing import Draw
from fuzz import run_resumable

from megatron_port.core.dist.mesh import Topology

LAYOUTS = [*itertools.product((1, 2), (1, 2), (1, 2)), (1, 4, 1), (2, 4, 1)]
"""(tp, pp, dp)"""


def matrix(own_kernels: str = "off") -> list[Draw]:
    """Every combination, in an order in which a cut-off run has still seen every layout, dtype and engine."""
    out = []
    options = itertools.product(
        (True, False), (0.1, 0.0), ("full", "none", "selective"), (True, False), ("fp32", "bf16"),
        ("deepspeed", "native"), LAYOUTS,
    )
    for tied, dropout, recompute, sequence, dtype, engine, (tp, pp, dp) in options:
        if sequence and tp == 1:
            continue
        config = make_config(
            engine=engine, dtype=dtype, own_kernels=own_kernels,
            model={"tie_embeddings": tied, "hidden_dropout": dropout, "attention_dropout": dropout,
                   "num_layers": 5 if pp == 4 else 3},
            layout={"sequence_parallel": sequence, "recompute": recompute, "pipeline_schedule": "1f1b"},
        )
        out.append(Draw(len(out), config, Topology(tp, pp, dp)))
    return out


SCHEDULES = (
    ("gpipe", 1, 1), ("1f1b", 2, 1), ("zb-h1", 1, 1), ("zb-v", 2, 1), ("gpipe", 1, 2), ("1f1b", 1, 2), ("1f1b", 2, 2),
)
"""(name, chunks a stage, ZeRO stage) beside 1F1B under ZeRO-1, which ``matrix`` covers; engine native."""


def schedule_matrix(dtypes: Sequence[str] = ("fp32", "bf16"), own_kernels: str = "off") -> list[Draw]:
    """Every schedule on every layout with a pipeline: uneven layers, tied and untied, both precisions."""
    out = []
    for tied, dtype, (name, chunks, zero), (tp, pp, dp) in itertools.product(
        (True, False), dtypes, SCHEDULES, [x for x in LAYOUTS if x[1] > 1]
    ):
        if zero == 2 and dp == 1:
            continue
        config = make_config(
            dtype=dtype, own_kernels=own_kernels, micro_batch_size=1,
            model={"tie_embeddings": tied, "hidden_dropout": 0.1, "num_layers": pp * chunks + 1},
            layout={"sequence_parallel": tp > 1 and tied, "recompute": "none" if tied else "full",
                    "pipeline_schedule": name, "virtual_pipeline_size": chunks, "reduce_bucket_size": 4000,
                    "zero_stage": zero},
        )
        out.append(Draw(len(out), config, Topology(tp, pp, dp)))
    return out


REPLICATED = ((1, 1, 4), (2, 1, 4), (1, 2, 4))
"""(tp, pp, dp) with so many replicas that optimizer state may be split within some of them only."""


def replica_matrix(dtypes: Sequence[str] = ("fp64",)) -> list[Draw]:
    """Four replicas under each ZeRO stage, state split over all of them or over two (hybrid sharding)."""
    out = []
    for dtype, (tp, pp, dp), (zero, shard), tied in itertools.product(
        dtypes, REPLICATED, ((0, 0), (1, 0), (1, 2), (2, 0), (2, 2)), (True, False)
    ):
        config = make_config(
            dtype=dtype, micro_batch_size=1, model={"tie_embeddings": tied, "num_layers": 3},
            layout={"sequence_parallel": tp > 1, "pipeline_schedule": "1f1b", "reduce_bucket_size": 4000,
                    "zero_stage": zero, "shard_size": shard},
        )
        out.append(Draw(len(out), config, Topology(tp, pp, dp)))
    return out


def zero3_matrix() -> list[Draw]:
    """ZeRO stage 3 in fp64: layouts, schedules, shard sizes, when weights are freed, recompute. Every pair of options
    meets, in the order in which a greedy choice covers most pairs first."""
    layouts = [(tp, pp, dp) for tp in (1, 2) for pp in (1, 2, 4) for dp in (2, 4) if tp * pp * dp <= 8]
    rows = []
    for (tp, pp, dp), shard, reshard, recompute in itertools.product(
        layouts, (2, 0), ("forward", "step"), ("none", "full")
    ):
        if shard == dp:
            continue
        for name, chunks in (("1f1b", 1), ("gpipe", 1), ("1f1b", 2), ("zb-h1", 1), ("zb-v", 2)):
            if pp > 1 or (name, chunks) == ("1f1b", 1):
                rows.append(((tp, pp, dp), (name, chunks), (shard, reshard), recompute))
    return [_zero3_draw(i, *row) for i, row in enumerate(_pairwise(rows))]


def _pairwise(rows: list[tuple]) -> list[tuple]:
    """A part of the rows in which every pair of values that any row has occurs."""
    def pairs(row: tuple) -> set[tuple]:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}

    missing, out = set().union(*map(pairs, rows)), []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        out.append(best)
    return out


def _zero3_draw(
    number: int, sizes: tuple[int, int, int], schedule: tuple[str, int], sharding: tuple[int, str], recompute: str
) -> Draw:
    (tp, pp, dp), (name, chunks), (shard, reshard) = sizes, schedule, sharding
    config = make_config(
        dtype="fp64", micro_batch_size=1, global_batch_size=8,
        model={"tie_embeddings": number % 2 == 0, "num_layers": pp * chunks + 1, "hidden_dropout": 0.1},
        layout={"sequence_parallel": tp > 1, "recompute": recompute, "pipeline_schedule": name,
                "virtual_pipeline_size": chunks, "reduce_bucket_size": 4000, "zero_stage": 3, "shard_size": shard,
                "reshard": reshard},
    )
    return Draw(number, config, Topology(tp, pp, dp))


def table(rows: Sequence[dict]) -> str:
    """Worst measured deviation by engine, precision and layout, as Markdown."""
    head = "| engine | schedule | dtype | tp x pp x dp | runs | loss | grad norm | gradient by name | all equal |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]

    def key(r: dict) -> tuple:
        name = r["schedule"] + (f", {r['vp']} chunks" if r.get("vp", 1) > 1 else "")
        name += f", ZeRO-{r['zero_stage']}" if r.get("zero_stage", 1) > 1 else ""
        return r["engine"], name, r["dtype"], r["tp"], r["pp"], r["dp"]

    for (engine, schedule, dtype, tp, pp, dp), group in itertools.groupby(sorted(rows, key=key), key):
        members = list(group)

        def worst(*quantities: str, members: list[dict] = members) -> str:
            found = [d for m in members for d in m["deviations"] if d["quantity"] in quantities]
            top = max(found, key=lambda d: d["value"])
            return f"{top['value']:.1e}"

        lines.append(
            f"| {engine} | {schedule} | {dtype} | {tp} x {pp} x {dp} | {len(members)} | {worst('loss', 'eval loss')} | "
            f"{worst('grad norm')} | {worst('gradient')} | {'yes' if all(m['ok'] for m in members) else 'NO'} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run or report."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--again", action="store_true", help="also what another commit made")
    parser.add_argument("--own-kernels", choices=("on", "off"), default="off")
    parser.add_argument("--schedules", action="store_true", help="the schedules beside 1F1B, instead")
    parser.add_argument("--zero3", action="store_true", help="sharded weights in fp64, instead")
    args = parser.parse_args()
    if args.report:
        rows = list(records.latest(args.report, "seed").values())
        print(table(rows), f"\nMade by: {records.made_by(args.report)}.", sep="\n")
        return 0
    if args.zero3:
        draws = zero3_matrix()
    else:
        draws = schedule_matrix(own_kernels=args.own_kernels) if args.schedules else matrix(args.own_kernels)
    return run_resumable(draws, args.out, batch_size=args.batch, seconds=args.seconds, again=args.again)


if __name__ == "__main__":
    sys.exit(main())
