"""How long a full search takes and what it finds: 1T on 3,072 GCDs of Frontier, for both engines.

`python benchmarks/plan_search.py` writes benchmarks/results/plan-search.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import replace
from pathlib import Path

from megatron_port.config.loader import load
from megatron_port.plan.case import Case, case_of, machine_of
from megatron_port.plan.engines import ENGINES
from megatron_port.plan.memory import plan_memory
from megatron_port.plan.search import Candidate, finalists
from megatron_port.plan.step import StepPlan, plan_step
from megatron_port.tune.space import Space, make_space

RESULT = Path(__file__).resolve().parent / "results" / "plan-search.md"
SHOWN = 5


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
        f"| {case.label()}, {case.schedule}, ZeRO-{case.zero_stage} | {step.seconds:.1f} | "
        f"{step.hardware_tflops:.1f} | {step.model_tflops:.1f} | {parts.compute:.1f} | {parts.tensor:.1f} | "
        f"{parts.pipeline:.1f} | {parts.bubble:.1f} | {rest:.1f} | {gigabytes:.1f} |"
    )


def searched(engine: str, nodes: int) -> tuple[Space, list[Candidate], str]:
    """The space of an engine, its finalists, and how long both took."""
    config = load("runs/frontier-1t", [f"engine={engine}", f"cluster.nodes={nodes}"]).config
    start, busy = time.perf_counter(), time.process_time()
    space = make_space(config)
    planned = time.perf_counter()
    best = finalists(space.fitting, space.machine, legal=space.legal)
    end = time.perf_counter()
    return space, best, (
        f"planned in {planned - start:.2f} s, the best {len(best)} simulated with their schedules in "
        f"{end - planned:.2f} s ({time.process_time() - busy:.2f} s of processor time together)"
    )


def main() -> None:
    """Search, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=384)
    args = parser.parse_args()
    run = load("runs/frontier-1t", [f"cluster.nodes={args.nodes}"]).config
    paper, machine = case_of(run)[0], machine_of(run)
    text = [
        f"# Every layout of 1T on {paper.world:,} GCDs", "",
        f"`python benchmarks/plan_search.py`, one process on {hardware()} (no GPU), with {os.getloadavg()[0]:.0f}",
        f"processes at work on them in the minute before. Batch {paper.global_batch}.",
        "Seconds of a step and where they go; TFLOP/s of a GCD, hardware and model; GB of the fullest GCD, of 64.", "",
    ]
    head = "| layout | s | HW | model | compute | tensor | pipeline | bubble | rest | GB |\n|" + "---|" * 10
    for engine in ENGINES:
        space, best, took = searched(engine, args.nodes)
        case = replace(paper, engine=ENGINES[engine])
        step = plan_step(case, machine)
        memory = max(m.total for m in plan_memory(case, machine)) / 1e9
        text += [
            f"## Engine {engine}", "",
            f"{len(space.candidates):,} legal layouts, {len(space.fitting):,} fit; {took}.",
            "The paper's layout last.", "", head,
            *(line(c.case, c.step, c.memory.total / 1e9) for c in best[:SHOWN]), line(case, step, memory), "",
        ]
    RESULT.write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
