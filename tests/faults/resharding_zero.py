"""Checkpoints between ZeRO stages, shard sizes, offload and engines: masters and moments arrive to the bit.

Four replicas each; ``pairs()`` is the same list everywhere. ``python tests/faults/resharding_zero.py --out FILE``
appends a line for each pair that the file lacks. Where both sides are engine native and sum gradients in the same order
over the same ranks, the steps after the checkpoint are compared as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases import make_config
from offload_matrix import offloaded
from pool import RankPool
from resharding import Side, resume, state_faults, train_and_save

from megatron_port.core.dist.mesh import Topology
from megatron_port.core.model.shapes import parameter_shapes

COUNT = 30
Cross = Callable[[RankPool, int, Path], dict[str, Any]]
"""(ranks, number of the pair, folder) → a line of the results file"""
KINDS: dict[str, dict[str, Any]] = {
    "native zero-0": {"zero_stage": 0}, "native zero-1": {"zero_stage": 1}, "native zero-2": {"zero_stage": 2},
    "native zero-3": {"zero_stage": 3}, "native zero-3 step": {"zero_stage": 3, "reshard": "step"},
    "native zero-1 shards of 2": {"zero_stage": 1, "shard_size": 2},
    "native zero-3 shards of 2": {"zero_stage": 3, "shard_size": 2},
    "native zero-1 on cpu": {"zero_stage": 1, "offload": {"optimizer": "cpu"}},
    "native zero-2 on nvme": {"zero_stage": 2, "offload": {"optimizer": "nvme", "fraction": 0.5}},
    "native zero-3 on nvme, weights on cpu": {"zero_stage": 3, "offload": {"optimizer": "nvme", "weights": "cpu"}},
    "native zero-2 shards of 2": {"zero_stage": 2, "shard_size": 2}, "deepspeed zero-1": {"zero_stage": 1},
}


def pairs() -> list[tuple[str, str, str]]:
    """(from, to, dtype): every kind comes and goes, at least one of the two is sharded further than by ZeRO-1."""
    r = random.Random("crossings")
    found: list[tuple[str, str, str]] = []
    names = list(KINDS)
    for number in range(COUNT):
        source = names[number % len(names)]
        target = r.choice([n for n in names if n != source and (source, n) not in {p[:2] for p in found}])
        dtype = r.choice(("fp32", "bf16"))
        found.append((source, target, dtype))
    return found


def side(kind: str, dtype: str, folder: Path) -> Side:
    """One side's run."""
    layout = dict(KINDS[kind])
    offload, engine = layout.pop("offload", None), kind.split()[0]
    shard = layout.get("shard_size", 0)
    config = make_config(
        engine=engine, dtype=dtype, micro_batch_size=1, global_batch_size=8,
        model={"num_layers": 3, "tie_embeddings": False, "hidden_dropout": 0.1},
        layout={"data_parallel_size": 4, "reduce_bucket_size": 4000 if engine == "native" else 1 << 25, **layout},
        own_kernels="on" if engine == "native" else "off",
    )
    if offload is not None:
        config = offloaded(config, str(folder), **offload)
    return Side(config, dataclasses.replace(Topology(1, 1, 4), shard=shard))


def cross(ranks: RankPool, number: int, folder: Path) -> dict[str, Any]:
    """Run a pair; a line of the results file."""
    (source_kind, target_kind, dtype), begun = pairs()[number], time.monotonic()
    source, target = side(source_kind, dtype, folder), side(target_kind, dtype, folder)
    before, after = folder / f"{number}-before", folder / f"{number}-after"
    went_on = ranks.run(4, train_and_save, source, before, deepspeed=source.deepspeed, timeout=300)[0]
    resumed = ranks.run(4, resume, target, before, after, deepspeed=target.deepspeed, timeout=300)[0]
    faults = state_faults(before, after, set(parameter_shapes(source.config.model)), same_precision=True)
    # From stage 2 on each micro-batch's gradients are reduced, before that the step's: the same sum in another order.
    sums = {(KINDS[kind]["zero_stage"] > 1, KINDS[kind].get("shard_size", 0)) for kind in (source_kind, target_kind)}
    whole = any(KINDS[kind]["zero_stage"] == 0 for kind in (source_kind, target_kind))
    comparable = not source.deepspeed and not target.deepspeed and len(sums) == 1 and not whole
    steps = ("equal to the bit" if went_on == resumed else "differ") if comparable else "not compared"
    return {
        "number": number, "from": source_kind, "to": target_kind, "dtype": dtype, "state": faults or "equal to the bit",
        "steps": steps, "ok": not faults and steps != "differ", "seconds": round(time.monotonic() - begun, 1),
    }


def main(doc: str | None, cross: Cross, count: int) -> int:
    """Make the round trips that the file lacks, each by ``cross``; 1 if one of them is bad."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=count, help="how many of the list")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; resume later")
    args = parser.parse_args()
    done = {json.loads(line)["number"] for line in args.out.read_text().splitlines()} if args.out.exists() else set()
    until, bad, ranks = time.monotonic() + args.seconds, 0, RankPool()
    try:
        with tempfile.TemporaryDirectory(prefix="resharding-") as folder:
            for number in (n for n in range(args.times) if n not in done):
                if time.monotonic() > until:
                    break
                row = cross(ranks, number, Path(folder))
                bad += not row["ok"]
                print(number, "ok" if row["ok"] else "BAD", row["from"], "->", row["to"], row["dtype"], flush=True)
                with args.out.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
    finally:
        ranks.close()
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main(__doc__, cross, COUNT))
