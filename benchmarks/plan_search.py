"""Time and result of the search over every axis: 1T on 3,072 GCDs of Frontier, both engines.

`python benchmarks/plan_search.py` writes benchmarks/results/plan-search.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path

from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import RunConfig
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_of
from megatron_port.tools.plan.fastest import fastest
from megatron_port.tools.plan.memory import plan_memory
from megatron_port.tools.plan.search import Candidate
from megatron_port.tools.plan.step import StepPlan, plan_step

RESULT = Path(__file__).resolve().parent / "results" / "plan-search.md"
SHOWN = 8


def hardware() -> str:
    """The processor that the search ran on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [x.partition(":")[2].strip() for x in lines if "model name" in x]
    except OSError:
        names = []
    return f"{len(names)} cores of {names[0]}" if names else platform.processor() or platform.machine()


def line(case: Case, step: StepPlan, gigabytes: float) -> str:
    """A row of the table."""
    parts = step.split
    rest = parts.data + parts.optimizer + parts.jitter
    return (
        f"| {case.engine.name}: {case.label()}, {case.schedule}, ZeRO-{case.zero_stage} | {step.seconds:.1f} | "
        f"{step.hardware_tflops:.1f} | {step.model_tflops:.1f} | {parts.compute:.1f} | {parts.tensor:.1f} | "
        f"{parts.pipeline:.1f} | {parts.bubble:.1f} | {rest:.1f} | {gigabytes:.1f} |"
    )


def searched(config: RunConfig, case: Case, machine: Machine) -> tuple[list[Candidate], str]:
    """The fastest layouts of the run, and how long it took to find them."""
    start, busy = time.perf_counter(), time.process_time()
    best = fastest(config, case, machine)
    return best, (
        f"{time.process_time() - busy:.1f} s of processor time ({time.perf_counter() - start:.1f} s on the clock), "
        "simulation of the finalists with their schedules included"
    )


def reference_loop() -> float:
    """Seconds of a plain loop in the same process, to compare machines and their load by."""
    start, total = time.process_time(), 0
    for i in range(3_000_000):
        total += i * i % 7
    return time.process_time() - start


def main() -> None:
    """Search, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=384)
    args = parser.parse_args()
    run = load("runs/frontier-1t", [f"cluster.nodes={args.nodes}"]).config
    paper, machine = case_of(run)[0], machine_of(run)
    text = [
        f"# The fastest of all layouts of 1T on {paper.world:,} GCDs", "",
        f"`python benchmarks/plan_search.py`, one process on {hardware()} (no GPU), with {os.getloadavg()[0]:.0f}",
        f"processes at work on them in the minute before; a loop of 3 million steps took {reference_loop():.2f} s.",
        f"Batch {paper.global_batch}. Both engines, every schedule, tp, sp, pp, vp, cp, ep, micro-batch, recompute",
        "with plans of activations, ZeRO stage, shard groups, offload.",
        "Seconds of a step and where they go; TFLOP/s of a GCD, hardware and model; GB of the fullest GCD, of 64.", "",
    ]
    head = "| layout | s | HW | model | compute | tensor | pipeline | bubble | rest | GB |\n|" + "---|" * 10
    best, took = searched(run, paper, machine)
    step = plan_step(paper, machine)
    memory = max(m.total for m in plan_memory(paper, machine)) / 1e9
    text += [
        f"Found in {took}. The paper's layout last.", "", head,
        *(line(c.case, c.step, c.memory.total / 1e9) for c in best[:SHOWN]), line(paper, step, memory), "",
    ]
    RESULT.write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
