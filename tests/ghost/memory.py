"""The planner's memory of every rank, against the allocator's peak of ranks on the ghost machine, by layout.

    python tests/ghost/memory.py [--python ENV/bin/python] [--only tp2]

Each layout trains three steps of a GPT of 8 layers, hidden 1,024, 1,024 positions, bf16, through the command line, with
torch's caching allocator for CUDA and NCCL's process groups. Of every rank the peak of the last step is held to what
``plan`` says of its stage, within 3 %. cuBLAS gets small workspaces: the usual ones, 64 MiB on Hopper, are part of the
cluster's ``reserved_gb``. A line per layout in benchmarks/results/ghost-memory.jsonl; exit 1 where one is farther off.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import Machine, RankLog
from options import ROOT, chosen_torch, commit, machine, parser
from ordering import PEAK

RECORD = ROOT / "benchmarks" / "results" / "ghost-memory.jsonl"
TOLERANCE = 0.03
WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
RUN = """
name = "run"
engine = "native"
[model]
num_layers = 8
hidden_size = 1024
num_attention_heads = 16
vocab_size = 32000
seq_length = 1024
[batch]
micro_batch_size = 2
[data]
synthetic = true
tokenizer = "byte"
[precision]
dtype = "bf16"
[training]
steps = 3
[checkpoint]
save_interval = 1000
[backend]
graphs = "off"
device = "cuda"
attention = "sdpa"
[watch]
enabled = false
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp1": {},
    "dp2": {"data": 2},
    "dp2-zero2": {"data": 2, "layout.zero_stage": 2},
    "dp2-zero3": {"data": 2, "layout.zero_stage": 3},
    "dp4-zero3-step": {"data": 4, "layout.zero_stage": 3, "layout.reshard": "step"},
    "tp2": {"tensor": 2},
    "tp2sp": {"tensor": 2, "layout.sequence_parallel": "true"},
    "pp2": {"pipeline": 2},
    "pp2-gpipe": {"pipeline": 2, "layout.pipeline_schedule": "gpipe"},
    "pp2-interleaved": {"pipeline": 2, "layout.virtual_pipeline_size": 2},
    "pp2-zb-h1": {"pipeline": 2, "layout.pipeline_schedule": "zb-h1"},
    "tp2sp-pp2-dp2": {"tensor": 2, "pipeline": 2, "data": 2, "layout.sequence_parallel": "true"},
    "dp2-full": {"data": 2, "activations.policy": "full"},
    "dp2-selective": {"data": 2, "activations.policy": "selective"},
    "cp2": {"context": 2},
    "cp2-heads": {"context": 2, "layout.cp_method": "heads"},
    "cp2-ring": {"context": 2, "layout.cp_method": "ring"},
    "cp2-ring-zigzag-4k": {
        "context": 2, "layout.cp_method": "ring", "layout.cp_order": "zigzag", "model.seq_length": 4096,
    },
    "cp2-ring-math": {"context": 2, "layout.cp_method": "ring", "backend.attention": "math"},
    "dp1-torch": {"backend.own_kernels": "off"},
}
"""Name → sizes of the layout and settings."""


def settings(layout: dict[str, Any]) -> tuple[int, list[str]]:
    """Return a layout's ranks and its settings, four micro-batches a replica."""
    sizes = {name: layout.get(name, 1) for name in ("tensor", "pipeline", "data", "context")}
    world = 1
    for size in sizes.values():
        world *= size
    found = {f"layout.{name}_parallel_size": size for name, size in sizes.items()}
    found |= {"batch.global_batch_size": 8 * sizes["data"]} | {k: v for k, v in layout.items() if "." in k}
    return world, [f"{key}={value}" for key, value in found.items()]


def planned(run: Path, sets: list[str], world: int) -> list[float]:
    """Return the planner's peak of the allocator by stage, on H200."""
    from megatron_port.core.config.loader import load
    from megatron_port.tools.plan.case import case_of, machine_of
    from megatron_port.tools.plan.memory import plan_memory

    described, config = load("clusters/h200").config, load(run, sets).config
    config = replace(config, cluster=replace(described.cluster, nodes=0), hardware=described.hardware,
                     calibration=described.calibration)
    case, _ = case_of(config, world)
    return [stage.allocated for stage in plan_memory(case, machine_of(config))]


def peak_of(log: RankLog) -> int:
    """Return a rank's peak in the last step. Raises IndexError where it took none."""
    return [int(e.detail.removeprefix(PEAK)) for e in log.events if e.kind == "mark" and e.detail.startswith(PEAK)][-1]


def measure(made: Machine, name: str) -> dict[str, Any]:
    """Return the record's line of a layout."""
    run = made.scratch / "run.toml"
    run.write_text(RUN)
    world, sets = settings(LAYOUTS[name])
    words = [word for one in sets for word in ("--set", one)]
    ended = made.run("train", "run.toml", "--nproc", str(world), *words, "--set", f"output_dir={name}/runs",
                     settings=WORKSPACES, seconds=600.0)
    row: dict[str, Any] = {"layout": name, "ranks": world, "ok": False}
    if ended.code or len(ended.logs) != world:
        return row | {"wrong": ended.output[-600:]}
    stages = planned(run, sets, world)
    inside = world // len(stages)  # ranks of a stage: the pipeline's are farthest apart
    peaks = [peak_of(log) for log in ended.logs]
    off = [stages[rank // inside] / peak - 1 for rank, peak in enumerate(peaks)]
    worst = max(off, key=lambda one: abs(one))
    return row | {"ok": abs(worst) <= TOLERANCE, "worst": round(worst, 4), "peaks": peaks,
                  "planned": [round(stage) for stage in stages]}


def main() -> int:
    """Measure the layouts; 1 where the planner is off by more than the tolerance."""
    made = parser(__doc__)
    made.add_argument("--only", default="", help="layouts whose name contains this")
    a = made.parse_args()
    torch = chosen_torch(a.python)
    rows = {row["layout"]: row for row in map(json.loads, RECORD.read_text().splitlines() if RECORD.exists() else ())}
    bad = 0
    with machine(torch) as node:
        for name in (name for name in LAYOUTS if a.only in name):
            rows[name] = measure(node, name) | {"commit": commit(), "torch": torch.version}
            print(json.dumps(rows[name]), flush=True)
            bad += not rows[name]["ok"]
            RECORD.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
