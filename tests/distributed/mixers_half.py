"""Hybrids in half precision over 300 steps, on layouts, within the bounds of the half-precision oracle.

``python tests/distributed/mixers_half.py --out benchmarks/results/mixers-half.jsonl`` runs what the file lacks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import records
from cases import Order, cycled_batches, make_config, run_cycled, single_run, within_rounding
from pool import RankPool

from megatron_port.core.config.model import RecurrentConfig
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.mesh import Topology
from megatron_port.tools.parity.comparison import Run

STEPS = 300
MODEL: dict[str, Any] = {
    "activation": "swiglu", "normalization": "rmsnorm", "add_bias": False, "position_embedding": "rope",
}
SIZES: dict[str, Any] = {"heads": 4, "key_size": 8, "value_size": 8, "chunk": 8}


def _case(dtype: str, pattern: tuple[str, ...], key_heads: int, **layout: Any) -> RunConfig:
    recurrent = RecurrentConfig(**SIZES, key_heads=key_heads)
    model = {**MODEL, "num_layers": 2, "mixer_pattern": pattern, "recurrent": recurrent}
    config = make_config(dtype=dtype, model=model, layout=layout, global_batch_size=4)
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=2e-3))


CASES = {
    name: (_case("bf16", pattern, keys, **layout), topology) for name, pattern, topology, keys, layout in (
        ("kda and mamba2 share rows, tp 2, sp", ("kda", "mamba2"), Topology(2, 1, 1), 1, {"sequence_parallel": True}),
        ("gated_delta and attention, tp 2, pp 2", ("gated_delta", "attention"), Topology(2, 2, 1), 2,
         {"pipeline_schedule": "zb-h1"}),
    )
}


def record(ranks: RankPool, name: str) -> dict[str, object]:
    """Return the row of a case."""
    (config, topology), started = CASES[name], time.monotonic()
    run = Run.of(ranks.run(topology.world_size, run_cycled, config, topology, STEPS, timeout=3600.0))
    orders: dict[Order, Run] = {}

    def single(order: Order) -> Run:
        if order not in orders:
            orders[order] = single_run(config, steps=STEPS, order=order, make=cycled_batches)
        return orders[order]

    found = within_rounding(config, topology, run, single)
    worst = {(d.quantity, d.rule): d for d in sorted(found, key=lambda d: d.value / d.bound)}
    return {
        "name": name, "steps": STEPS, "ok": all(d.ok for d in found), "commit": records.commit(),
        "orders": len(orders), "seconds": round(time.monotonic() - started),
        "losses": {step: round(run.losses[step], 4) for step in (0, 99, 199, STEPS - 1)},
        "deviations": [{**dataclasses.asdict(d), "value": float(f"{d.value:.3g}"), "bound": float(f"{d.bound:.3g}")}
                       for d in worst.values()],
    }


def main() -> int:
    """Run the cases that a file lacks."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose name has a word")
    args = parser.parse_args()
    done, ranks, bad = records.latest(args.out, "name"), RankPool(), False
    try:
        for name in CASES:
            if name in done or args.only not in name:
                continue
            row = record(ranks, name)
            with args.out.open("a") as f:
                f.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
            bad |= not row["ok"]
    finally:
        ranks.close()
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
