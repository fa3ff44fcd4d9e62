"""Every optimizer rule on every layout of ``test_rules``, and ZeRO stages and schedules beside them; resumable.

``python tests/distributed/rules_matrix.py --out benchmarks/results/rules.jsonl`` runs what the file lacks.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from drawing import Draw
from fuzz import run_resumable
from test_rules import EXPERTS, LAYOUTS, LLAMA, RULES, TIED, config_of

from megatron_port.core.config.features import FineTuningConfig
from megatron_port.core.dist.mesh import Topology

MORE: dict[str, tuple[dict[str, Any], Topology, dict[str, Any]]] = {
    "one process": (LLAMA, Topology(), {}),
    "zero2-tp2-dp2": (LLAMA, Topology(tp=2, dp=2), {"zero_stage": 2, "sequence_parallel": True}),
    "zero3-tp2-pp2-dp2": (TIED, Topology(tp=2, pp=2, dp=2), {"zero_stage": 3, "reshard": "step"}),
    "zero0-dp2": (TIED, Topology(dp=2), {"zero_stage": 0}),
    "small buckets": (LLAMA, Topology(tp=2, dp=2), {"zero_stage": 1, "reduce_bucket_size": 1000}),
    "interleaved": (TIED, Topology(pp=2, dp=2), {"zero_stage": 1, "virtual_pipeline_size": 2}),
    "zb-v": (LLAMA, Topology(pp=2, tp=2), {
        "zero_stage": 1, "virtual_pipeline_size": 2, "pipeline_schedule": "zb-v"}),
    "kv copies, dp2": (LLAMA, Topology(tp=4, dp=2), {"zero_stage": 1, "sequence_parallel": True}),
    "ep4, dp4": (EXPERTS, Topology(dp=4, ep=4), {"zero_stage": 3, "expert_parallel_size": 4}),
    "lora": ({**LLAMA, "fine_tuning": True}, Topology(tp=2, dp=2), {"zero_stage": 1}),
}
"""Beside those of ``test_rules``."""
LAST = "zero1-tp2-one-head"


def draws() -> list[Draw]:
    """All rules of one layout, then of the next; of the layout that came last, last: the file numbers them."""
    out, layouts = [], {**LAYOUTS, **MORE}
    layouts[LAST] = layouts.pop(LAST)
    for model, topology, layout in layouts.values():
        for rule in RULES:
            plain = {key: value for key, value in model.items() if key != "fine_tuning"}
            if layout.get("virtual_pipeline_size") == 2:
                plain["num_layers"] = 5
            config = config_of(rule, plain, layout, topology)
            if "fine_tuning" in model:
                config = dataclasses.replace(config, fine_tuning=FineTuningConfig(method="lora", rank=3, alpha=8.0))
            out.append(Draw(len(out), config, topology))
    return out


def main() -> int:
    """Run what a file lacks."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; resume later")
    args = parser.parse_args()
    return run_resumable(draws(), args.out, batch_size=args.batch, seconds=args.seconds)


if __name__ == "__main__":
    sys.exit(main())
