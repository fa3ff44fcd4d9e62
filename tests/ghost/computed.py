"""Train 20 steps "on CUDA" with numbers, and compare every loss and gradient norm with the CPU's in one process.

    python tests/ghost/computed.py [--python ENV/bin/python] [--only tp2pp2dp2]

The reference is this interpreter's: CPU build of torch, one rank, no own kernels, no ghost machine. A case that ended
stays in benchmarks/results/ghost-computed.jsonl and is not run again while it is there. Exit 1: numbers differ by more
than the precision's bound, the run failed, or its calls show a fault (analyse.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analyse import faults
from answers import CPU_DRAWS
from check import own_launches
from machine import Machine, RankLog
from options import ROOT, chosen_torch, commit, machine, parser
from ordering import STEP_ENDS
from recorded import capture_faults

from benchmarks.compare.devices import PEERS

RECORD = ROOT / "benchmarks" / "results" / "ghost-computed.jsonl"
RUN = """
name = "{name}"
engine = "native"
[model]
num_layers = {layers}
hidden_size = 64
num_attention_heads = 4
vocab_size = 500
seq_length = 32
[precision]
dtype = "{dtype}"
[batch]
micro_batch_size = 1
global_batch_size = 8
[data]
synthetic = true
tokenizer = "byte"
[training]
steps = 20
[checkpoint]
save_interval = 1000
[watch]
enabled = false
[backend]
graphs = "off"
attention = "math"
"""
BOUNDS = {"fp32": (5e-7, 5e-6), "bf16": (2e-4, 5e-3), "fp16": (3e-5, 1e-3)}
"""Precision → largest relative difference of a loss, and of a gradient norm. 2^-23 is 1.2e-7.
The norm's difference grows with the steps, as the weights move apart."""
RECORDED = "backend.graphs=step"
CANDIDATES = 8
LT = "backend.products=lt"
ON_DEVICE = "batches-on-the-device"
Step = tuple[float, float]


@dataclass(frozen=True)
class Case:
    """A run, by what it sets beside the common run file."""

    name: str
    ranks: int = 1
    dtype: str = "fp32"
    layers: int = 2
    settings: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    """Settings of the CPU's run, too."""


def layout(tp: int, pp: int, dp: int, *more: str) -> tuple[str, ...]:
    """Return the settings of a layout."""
    sizes = {"tensor": tp, "pipeline": pp, "data": dp}
    found = [f"layout.{name}_parallel_size={size}" for name, size in sizes.items()]
    return (*found, f"layout.sequence_parallel={str(tp > 1).lower()}", *more)


CASES = (
    Case("one-rank"),
    Case("tp2pp2dp2", 8, settings=layout(2, 2, 2)),
    Case("tp2pp2dp2-torch-kernels", 8, settings=layout(2, 2, 2, "backend.own_kernels=off")),
    Case("one-rank-bf16", dtype="bf16"),
    Case("one-rank-fp16", dtype="fp16"),
    Case("tp2dp2-zero2-bf16", 4, "bf16", settings=layout(2, 1, 2, "layout.zero_stage=2")),
    Case("dp2-zero3", 2, settings=layout(1, 1, 2, "layout.zero_stage=3")),
    Case("pp2dp2-zb-v", 4, layers=4, settings=layout(1, 2, 2, "layout.pipeline_schedule=zb-v",
                                                     "layout.virtual_pipeline_size=2")),
    Case("tp2pp2-interleaved-recompute", 4, layers=4,
         settings=layout(2, 2, 1, "layout.virtual_pipeline_size=2", "activations.policy=full")),
    Case("one-rank-recorded-bf16", dtype="bf16", settings=(RECORDED,)),
    Case("tp2pp2dp2-recorded", 8, settings=layout(2, 2, 2, RECORDED)),
    Case("dp2-zero2-fp16-recorded", 2, "fp16", settings=layout(1, 1, 2, "layout.zero_stage=2", RECORDED)),
    Case("pp2dp2-zb-v-recorded", 4, layers=4,
         settings=layout(1, 2, 2, "layout.pipeline_schedule=zb-v", "layout.virtual_pipeline_size=2",
                         RECORDED)),
    Case("tp2dp2-lt-bf16", 4, "bf16", settings=layout(2, 1, 2, LT)),
    Case("tp2-lt-recorded-fp16", 2, "fp16", settings=layout(2, 1, 1, LT, RECORDED)),
    Case("tp2dp2-attention-dropout-bf16", 4, "bf16", model=("model.attention_dropout=0.1",),
         settings=layout(2, 1, 2, "backend.attention=own")),
    Case("cp2-ring-fused-bf16", 2, "bf16",
         settings=("layout.context_parallel_size=2", "layout.cp_method=ring", "layout.cp_order=zigzag",
                   "backend.attention=auto")),
)


def steps_of(folder: Path) -> list[Step]:
    """Read loss and gradient norm of every step."""
    (path,) = folder.glob("runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row and "grad_norm" in row]


def set_options(settings: Sequence[str]) -> list[str]:
    """Return the command line's words for settings."""
    return [word for setting in settings for word in ("--set", setting)]


def reference(case: Case, folder: Path) -> list[Step]:
    """Train on the CPU. Raises CalledProcessError."""
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(RUN.format(name=case.name, dtype=case.dtype, layers=case.layers))
    command = [sys.executable, "-m", "megatron_port", "train", "run.toml", "--nproc", "1",
               "--set", "backend.device=cpu", "--set", "backend.own_kernels=off", *set_options(case.model)]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    return steps_of(folder)


def largest(found: list[Step], expected: list[Step]) -> Step:
    """Return the largest relative difference of the losses and of the norms. Raises ValueError on other lengths."""
    pairs = list(zip(found, expected, strict=True))
    return max(abs(f[0] / e[0] - 1) for f, e in pairs), max(abs(f[1] / e[1] - 1) for f, e in pairs)


def counted(logs: list[RankLog]) -> dict[str, int]:
    """Return what all ranks launched."""
    kinds = sum((log.counts() for log in logs), Counter[str]())
    own = sum(own_launches(log) for log in logs)
    return {"own_kernels": own, "torch_kernels": kinds["kernel"] - own, "products": kinds["product"],
            "nccl": kinds["nccl"]}


def asked_again(log: RankLog) -> list[str]:
    """Return how often own products asked cuBLASLt for algorithms (8; torch's ask for one) after a rank's first step,
    or that they never did."""
    asks = [i for i, e in enumerate(log.events) if e.kind == "heuristic" and e.detail == str(CANDIDATES)]
    first = next((i for i, e in enumerate(log.events) if e.kind == "mark" and e.detail == STEP_ENDS), 0)
    late = sum(i > first for i in asks)
    return ([] if asks else [f"rank {log.rank} has no own product"]) + (
        [f"rank {log.rank} asks {late} times after its first step"] if late else [])


def run_case(made: Machine, case: Case) -> dict[str, Any]:
    """Return the record's line."""
    expected = reference(case, made.scratch / f"cpu-{case.name}")
    (made.scratch / "run.toml").write_text(RUN.format(name=case.name, dtype=case.dtype, layers=case.layers))
    sets = set_options((*case.model, *case.settings))
    ended = made.compute("train", "run.toml", "--nproc", str(case.ranks), "--set", "backend.device=cuda", *sets,
                         "--set", f"output_dir={case.name}/runs", seconds=1200.0)
    # torch's AdamW waits for the clipping factor, and a recording for the device.
    most = None if {"backend.own_kernels=off", RECORDED} & set(case.settings) else 1
    wrong = [ended.output[-800:]] if ended.code else faults(ended.logs, most_waits=most) if case.ranks > 1 else []
    if RECORDED in case.settings and not ended.code:
        wrong += [fault for log in ended.logs for fault in capture_faults(log)]
        wrong += [f"rank {log.rank} replayed nothing" for log in ended.logs if not log.counts()["graph begins"]]
    if LT in case.settings and not ended.code:
        wrong += [fault for log in ended.logs for fault in asked_again(log)]
    row = {"case": case.name, "ranks": case.ranks, "dtype": case.dtype, "steps": len(expected), "ok": False,
           "cpu_s": ended.cpu_s}
    if not ended.code:
        found = steps_of(made.scratch / case.name)
        loss, norm = largest(found, expected)
        row |= {"loss_difference": loss, "norm_difference": norm, "last_loss": found[-1][0],
                "last_loss_cpu": expected[-1][0],
                **counted(ended.logs)}
        bounds = BOUNDS[case.dtype]
        row["ok"] = not wrong and loss <= bounds[0] and norm <= bounds[1]
    return row | ({"wrong": wrong[:3]} if wrong else {})


def run_device_batches(made: Machine) -> dict[str, Any]:
    """Return the line of the comparison's peers, whose batches are on the GPU: steps recorded and not, against the
    CPU's by the comparison's own tolerances."""
    out = made.scratch / "devices.json"
    ended = made.start("benchmarks.compare.devices", "--device", "cuda", "--sizes", "tiny", "tiny-bf16", "--out",
                       str(out), settings={"GHOST_COMPUTE": "1", CPU_DRAWS: "1"}, seconds=300.0)
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    off = {f"{row['size']} {row['peer']}": row.get("difference_over_tolerance") for row in rows}
    plain, recorded = ([row.get("losses", 0) for row in rows if row["peer"] == name] for name in PEERS[:2])
    wrong = [ended.output[-800:]] if ended.code or None in off.values() else []
    wrong += [] if recorded == plain else [f"recorded steps have losses {recorded}, others {plain}"]
    return {"case": ON_DEVICE, "tolerances": off, "ok": not wrong, "cpu_s": ended.cpu_s} | (
        {"wrong": wrong} if wrong else {})


def main() -> int:
    """Run the cases that the record lacks."""
    made = parser(__doc__)
    made.add_argument("--only", default="", help="cases whose name contains this")
    made.add_argument("--out", type=Path, default=RECORD)
    a = made.parse_args()
    torch = chosen_torch(a.python)
    done = {json.loads(line)["case"] for line in a.out.read_text().splitlines()} if a.out.exists() else set()
    bad = 0
    with machine(torch) as node:
        names = {case.name: case for case in CASES}
        for name in (name for name in (*names, ON_DEVICE) if name not in done and a.only in name):
            row = run_case(node, names[name]) if name in names else run_device_batches(node)
            row |= {"commit": commit(), "torch": torch.version}
            print(json.dumps(row), flush=True)
            bad += not row["ok"]
            if row["ok"]:
                with a.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
