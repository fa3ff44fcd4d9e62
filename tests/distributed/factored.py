"""Factored and shared models on every kind of layout, and in random combinations, each against one process in fp64;
resumable.

``python tests/distributed/factored.py --out benchmarks/results/factored.jsonl`` runs what the file lacks of the
matrix, ``--seeds 0-99`` of the draws (rows from 10,000 on).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from dataclasses import dataclass
from typing import Any

import drawing
from cases import make_config
from drawing import Draw
from fuzz import record, record_parser

from megatron_port.core.config.checks import problems
from megatron_port.core.config.schema import MoEConfig
from megatron_port.core.dist.mesh import Topology
from megatron_port.ext.weights.settings import factored_shapes

LLAMA: dict[str, Any] = {
    "position_embedding": "rope", "normalization": "rmsnorm", "activation": "swiglu", "add_bias": False,
    "num_query_groups": 2, "ffn_hidden_size": 48, "tie_embeddings": False,
}
RANKS = {"qkv_rank": 7, "output_rank": 9, "up_rank": 11, "down_rank": 10}
MODELS: dict[str, dict[str, Any]] = {
    "factored gpt": {"num_layers": 4, "hidden_dropout": 0.1, **RANKS},
    "factored llama": {**LLAMA, "num_layers": 4, **RANKS, "up_rank": 0},
    "factored experts": {**LLAMA, **RANKS, "num_layers": 4, "moe": MoEConfig(
        num_experts=4, top_k=2, ffn_hidden_size=24, first_dense=1, every=2, balance_loss="sequence")},
    "shared gpt": {"num_layers": 4, "hidden_dropout": 0.1, "shared_layers": 4},
    "shared llama": {**LLAMA, "num_layers": 5, "shared_layers": 3, "qkv_rank": 6},
}


@dataclass(frozen=True)
class CompressedDraw(Draw):
    """A combination with factors or shared layers."""

    def describe(self) -> dict[str, object]:
        """For the results file."""
        m = self.config.model
        return {**super().describe(), "ep": self.topology.ep, "ranks": m.ranks, "shared_layers": m.shared_layers,
                "experts": m.moe.num_experts}


def matrix() -> list[CompressedDraw]:
    """Every layout of {1, 2}³, ZeRO stage and model; cp 2 and ep 2 beside them; schedules and recompute in turn."""
    out: list[CompressedDraw] = []
    schedules = itertools.cycle((("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("1f1b", 2), ("zb-v", 2)))
    recompute = itertools.cycle(("none", "full", "selective"))
    for name, tp, pp, dp, zero in itertools.product(MODELS, (1, 2), (1, 2), (1, 2), range(4)):
        for cp, ep in ((1, 1), (2, 1), (1, 2)):
            experts = "experts" in name
            alone = tp * pp * dp * cp == 1
            if tp * pp * dp * cp > 8 or alone or (dp * cp == 1 and zero != 1):
                continue
            if ep > 1 and (not experts or tp * dp < 2):
                continue
            schedule, chunks = next(schedules) if pp > 1 else ("1f1b", 1)
            if schedule.startswith("zb-") and zero == 2:
                schedule, chunks = "1f1b", 1
            config = make_config(dtype="fp64", model=MODELS[name], layout={
                "tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp,
                "context_parallel_size": cp, "expert_parallel_size": ep, "zero_stage": zero,
                "pipeline_schedule": schedule, "virtual_pipeline_size": chunks, "recompute": next(recompute),
                "sequence_parallel": tp > 1 and len(out) % 2 == 0, "reshard": ("forward", "step")[zero == 3],
            })
            out.append(CompressedDraw(len(out), config, Topology(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)))
    return out


def draw(seed: int) -> CompressedDraw:
    """A run of the fuzz in engine native, fp64 or fp32, with factors, shared layers or both."""
    r = random.Random(f"compression-{seed}")
    while True:
        one = drawing.draw(r.randrange(10_000_000))
        config, model = one.config, one.config.model
        if config.engine != "native" or config.precision.dtype not in ("fp64", "fp32") or config.fine_tuning.enabled:
            continue
        kind = r.choice(("factored", "shared", "both"))
        if kind != "shared":
            most = {name: a * b // (a + b) for name, (a, b) in factored_shapes(model).items()}
            chosen = r.sample(sorted(most), r.randint(1, len(most))) if most else []
            ranks: dict[str, Any] = {f"{name}_rank": r.randint(1, most[name]) for name in chosen}
            model = dataclasses.replace(model, **ranks)
        if kind != "factored" and not model.moe.enabled:
            model = dataclasses.replace(model, shared_layers=r.randint(1, model.num_layers))
        config = dataclasses.replace(config, model=model)
        changed = model.ranks or model.shared_layers > 1
        if changed and not [text for text in problems(config, world_size=one.topology.world_size) if "model." in text]:
            return CompressedDraw(10_000 + seed, config, one.topology)


def main() -> int:
    """Run what a file lacks."""
    args = record_parser(main.__doc__).parse_args()
    return record([draw(seed) for seed in args.seeds] or matrix(), args, "compression",
                  lambda c: "shared" if c.model.shared_layers > 1 else "factored")


if __name__ == "__main__":
    sys.exit(main())
