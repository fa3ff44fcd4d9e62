"""Checkpoints between sizes of ep, what it is folded over, ZeRO stages, schedules and engines: weights, moments and
what balances experts arrive to the bit.

Four ranks each; ``pairs()`` is the same list everywhere. ``python tests/faults/resharding_experts.py --out FILE``
appends a line for each pair that the file lacks. In fp32 the loss of the step after the checkpoint is compared as well:
routes are those of the same weights, and half precision decides some otherwise.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases import make_config
from offload_matrix import offloaded
from pool import RankPool
from resharding import Side, resume, state_faults, train_and_save
from resharding_zero import main

from megatron_port.core.config.schema import MoEConfig
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.model.shapes import buffer_shapes, parameter_shapes
from megatron_port.tools.parity.comparison import FP32

COUNT = 26
EXPERTS = MoEConfig(
    num_experts=8, ffn_hidden_size=12, shared_ffn_hidden_size=16, first_dense=1, balance_bias=True,
    balance_loss="previous_step",
)
"""Its routers have both buffers."""
KINDS: dict[str, tuple[Topology, dict[str, Any]]] = {
    "native dp4 ep1": (Topology(dp=4), {"zero_stage": 1}),
    "native dp4 ep2 zero-0": (Topology(dp=4, ep=2), {"zero_stage": 0}),
    "native dp4 ep2 shards of 2": (Topology(dp=4, ep=2, shard=2), {"zero_stage": 1}),
    "native dp4 ep2 zero-3": (Topology(dp=4, ep=2), {"zero_stage": 3}),
    "native dp4 ep4 zero-2": (Topology(dp=4, ep=4), {"zero_stage": 2}),
    "native dp4 ep4 zero-1 on cpu": (Topology(dp=4, ep=4), {"zero_stage": 1, "offload": "cpu"}),
    "native tp2 dp2 ep2": (Topology(tp=2, dp=2, ep=2), {"zero_stage": 1, "sequence_parallel": True}),
    "native tp2 dp2 ep4 zero-3": (Topology(tp=2, dp=2, ep=4), {"zero_stage": 3, "sequence_parallel": True}),
    "native tp4 ep2": (Topology(tp=4, ep=2), {}),
    "native pp2 dp2 ep2, two chunks": (Topology(pp=2, dp=2, ep=2, vp=2), {"virtual_pipeline_size": 2}),
    "native tp2 pp2 ep2 zb-v": (
        Topology(tp=2, pp=2, ep=2, vp=2, folded=True), {"virtual_pipeline_size": 2, "pipeline_schedule": "zb-v"}
    ),
    "deepspeed tp2 dp2": (Topology(tp=2, dp=2), {"zero_stage": 1}),
    "deepspeed pp2 dp2": (Topology(pp=2, dp=2), {"zero_stage": 1}),
}


def pairs() -> list[tuple[str, str, str]]:
    """(from, to, dtype): every kind comes and goes twice."""
    r = random.Random("experts cross")
    names, found = list(KINDS), []
    for number, turn in enumerate((1, 4)):
        targets = [names[(i + turn) % len(names)] for i in range(len(names))]
        found += [(a, b, ("fp32", "bf16")[(i + number) % 2]) for i, (a, b) in enumerate(zip(names, targets))]
    r.shuffle(found)
    return found


def side(kind: str, dtype: str, folder: Path) -> Side:
    """One side's run."""
    topology, options = KINDS[kind]
    layout, engine = dict(options), kind.split()[0]
    offload = layout.pop("offload", None)
    config = make_config(
        engine=engine, dtype=dtype, micro_batch_size=1, global_batch_size=8,
        model={"num_layers": 4, "tie_embeddings": False, "hidden_dropout": 0.1, "moe": EXPERTS},
        layout={"tensor_parallel_size": topology.tp, "pipeline_parallel_size": topology.pp,
                "data_parallel_size": topology.dp, "expert_parallel_size": topology.ep, "shard_size": topology.shard,
                "reduce_bucket_size": 4000 if engine == "native" else 1 << 25, **layout},
        own_kernels="on" if engine == "native" else "off",
    )
    return Side(offloaded(config, str(folder), optimizer=offload) if offload else config, topology)


def cross(ranks: RankPool, number: int, folder: Path) -> dict[str, Any]:
    """Run a pair; a line of the results file."""
    (source_kind, target_kind, dtype), begun = pairs()[number], time.monotonic()
    source, target = side(source_kind, dtype, folder), side(target_kind, dtype, folder)
    before, after = folder / f"{number}-before", folder / f"{number}-after"
    went_on = ranks.run(4, train_and_save, source, before, deepspeed=source.deepspeed, timeout=300)[0]
    resumed = ranks.run(4, resume, target, before, after, deepspeed=target.deepspeed, timeout=300)[0]
    model = source.config.model
    faults = state_faults(
        before, after, set(parameter_shapes(model)), same_precision=True, buffers=set(buffer_shapes(model))
    )
    off = abs(resumed[0][0] - went_on[0][0]) / abs(went_on[0][0])
    compared = dtype == "fp32"
    return {
        "number": number, "from": source_kind, "to": target_kind, "dtype": dtype, "state": faults or "equal to the bit",
        "loss": float(f"{off:.3g}") if compared else "not compared",
        "ok": not faults and (not compared or off <= FP32.loss), "seconds": round(time.monotonic() - begun, 1),
    }


if __name__ == "__main__":
    raise SystemExit(main(__doc__, cross, COUNT))
