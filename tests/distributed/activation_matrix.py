"""Every policy of activations against keeping everything, compared to the bit, over layouts, schedules and ZeRO stages.

``python tests/distributed/activation_matrix.py --out FILE`` appends a line for each layout and dtype that the file
lacks. Choices: all sites recomputed, all swapped, all that can be partitioned over tensor-parallel ranks, and mixtures
of the four that differ from layer to layer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from cases import make_config
from offload_matrix import engine_of, train
from pool import RankPool
from stream_order import OrderChecker

from megatron_port.core.config.schema import ActivationsConfig, RunConfig
from megatron_port.core.dist.device_streams import observed_by
from megatron_port.core.dist.mesh import Topology
from megatron_port.ext.memory.sites import RECOMPUTED, REPLICATED, SITES, choice

STEPS = 3
LAYERS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2}, "tp2+sp": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel_size": 2}, "pp2 gpipe": {"pipeline_parallel_size": 2, "pipeline_schedule": "gpipe"},
    "pp2 interleaved": {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2},
    "pp2 zb-h1": {"pipeline_parallel_size": 2, "pipeline_schedule": "zb-h1"},
    "pp2 zb-v": {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "pipeline_schedule": "zb-v"},
    "tp2 pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp2 zero1": {"data_parallel_size": 2, "zero_stage": 1}, "dp2 zero2": {"data_parallel_size": 2, "zero_stage": 2},
    "dp2 zero3": {"data_parallel_size": 2, "zero_stage": 3},
    "tp2 dp2 zero3": {"tensor_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 3},
}


def run_of(layout: dict[str, Any], dtype: str, own: str) -> RunConfig:
    """The run that keeps everything."""
    return make_config(
        dtype=dtype, micro_batch_size=1, global_batch_size=4 * layout.get("data_parallel_size", 1), own_kernels=own,
        model={"num_layers": LAYERS, "hidden_dropout": 0.1, "attention_dropout": 0.1, "tie_embeddings": False},
        layout={"zero_stage": 0, "data_parallel_size": 1, **layout},
    )


def topology_of(layout: dict[str, Any]) -> Topology:
    """Its ranks."""
    tp, pp, dp = (layout.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "pipeline", "data"))
    chunks = layout.get("virtual_pipeline_size", 1)
    return Topology(tp, pp, dp, vp=chunks, folded=layout.get("pipeline_schedule") == "zb-v")


def mixture(seed: int) -> tuple[str, ...]:
    """For each layer, sites kept, recomputed, swapped and partitioned at random."""
    r = random.Random(seed)
    layers = []
    for _ in range(LAYERS):
        chosen = []
        for site in SITES:
            ways: list[Any] = ["keep", "swap"]
            ways += ["recompute"] * (site in RECOMPUTED) + ["partition"] * (site in REPLICATED)
            way = r.choice(ways)
            chosen += [] if way == "keep" else [choice(site, way)]
        layers.append("+".join(chosen))
    return tuple(layers)


def policies() -> dict[str, ActivationsConfig]:
    """Name → activations."""
    def alike(*choices: str) -> tuple[str, ...]:
        return ("+".join(choices),) * LAYERS

    plans = {
        "recompute": alike(*RECOMPUTED), "swap": alike(*(choice(site, "swap") for site in SITES)),
        "partition": alike(*(choice(site, "partition") for site in REPLICATED)),
        "partitioned input": alike("input:partition", "output:partition", *RECOMPUTED),
        **{f"mixture {seed}": mixture(seed) for seed in range(3)},
    }
    return {
        "selective": ActivationsConfig(policy="selective"), "full": ActivationsConfig(policy="full"),
        **{name: ActivationsConfig(policy="plan", layers=layers) for name, layers in plans.items()},
    }


def compare(
    config: RunConfig, others: list[ActivationsConfig], topology: Topology, checked: bool = False
) -> list[bool]:
    """On a rank: whether each run's steps and state equal those of ``config``; ``checked``: under the race checker."""
    wanted = train(config, topology, STEPS)
    out = []
    for other in others:
        changed = dataclasses.replace(config, activations=other)
        if checked:
            with observed_by(OrderChecker()):
                found = train(changed, topology, STEPS)
        else:
            found = train(changed, topology, STEPS)
        out.append(found == wanted)
    return out


def swapped(config: RunConfig, activations: ActivationsConfig, topology: Topology) -> list[tuple[int, int]]:
    """On a rank: bytes copied to the host, and bytes of all its buffers, after each of three steps."""
    from cases import LR, make_batches

    out = []
    with engine_of(dataclasses.replace(config, activations=activations), topology) as engine:
        space, batches = engine.chunks[0].layers[0].parking.swap, make_batches(engine.config, engine.ctx)
        for step in range(STEPS):
            engine.train_step(batches(step), step=step, lr=LR)
            out.append((space.moved, space.host_bytes))
    return out


def main() -> int:
    """Run what is missing; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; resume later")
    args = parser.parse_args()
    from activation_matrix import compare  # ranks import it by this name, not from __main__

    done = {json.loads(line)["case"] for line in args.out.read_text().splitlines()} if args.out.exists() else set()
    ranks, started, bad = RankPool(), time.monotonic(), 0
    for layout_name, layout in LAYOUTS.items():
        for dtype, own in (("fp32", "off"), ("bf16", "on"), ("fp16", "on")):
            name, names = f"{layout_name} {dtype} own kernels {own}", policies()
            if name in done or time.monotonic() - started > args.seconds:
                continue
            topology = topology_of(layout)
            found = ranks.run(
                topology.world_size, compare, run_of(layout, dtype, own), list(names.values()), topology, timeout=900.0
            )
            equal = dict(zip(names, map(all, zip(*found)), strict=True))
            bad += not all(equal.values())
            with args.out.open("a") as file:
                file.write(json.dumps({"case": name, "steps": STEPS, "equal": equal}) + "\n")
            print(name, "equal to the bit" if all(equal.values()) else f"DIFFERS {equal}", flush=True)
    ranks.close()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
