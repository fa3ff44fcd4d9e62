"""Strategies of ``tune`` at equal numbers of trials, on machines that are not what the planner takes them for.

    python benchmarks/tune_strategies.py [--trials 8] [--machines 16] [--out benchmarks/results/tune-strategies.json]

Nothing is trained. A trial's seconds are planned for another machine than the strategies plan with. Each rate
(products, attention, memory, links, network, host) is off by a factor of its own, exp of a normal value with σ 0.3, and
each layout by one more with σ 0.1. So the planner's order is wrong in the ways in which it can be. A strategy's
result is the best model FLOP/s of a device among its trials. Random is drawn from the layouts that fit, as
``--strategy random`` does. DeepHyper takes part where it is installed (``pip install 'megatron_port[tune]'``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_port.core.config.loader import load
from megatron_port.tools.plan.case import Machine
from megatron_port.tools.plan.search import Candidate
from megatron_port.tools.plan.step import plan_step
from megatron_port.tools.tune.strategies import OK, Space, Trial, key_of, make_space, make_strategy, parameters

OUT = Path(__file__).resolve().parent / "results" / "tune-strategies.json"
PROBLEMS = {
    "22B on 16 GCDs, native": ("runs/frontier-22b", ["engine=native"]),
    "175B on 128 GCDs, deepspeed": ("runs/frontier-175b", []),
    "Mixtral on 8 H200": ("runs/mixtral-h200-8gpu", []),
}
RATES = ("matmul_tflops", "fp32_matmul_tflops", "attention_forward_tflops", "attention_backward_tflops",
         "memory_bandwidth_gb", "package_gb", "node_gb", "nic_gb", "host_us", "launch_us", "network_latency_us")
MACHINE_SIGMA, LAYOUT_SIGMA = 0.3, 0.1


def other_machine(machine: Machine, seed: int) -> Machine:
    """A machine whose rates are off by a factor each."""
    draw = random.Random(f"machine {seed}")
    changed = {name: getattr(machine.hardware, name) * math.exp(draw.gauss(0, MACHINE_SIGMA)) for name in RATES}
    return replace(machine, hardware=replace(machine.hardware, **changed))


def measured(space: Space, truth: Machine, candidate: Candidate, seed: int) -> Trial:
    """A trial of a layout on that machine."""
    settings = space.settings(candidate)
    key = key_of(settings, candidate.case.world)
    luck = random.Random(int(hashlib.sha256(f"{seed} {key}".encode()).hexdigest(), 16)).gauss(0, LAYOUT_SIGMA)
    step = plan_step(candidate.case, truth, quick=True)
    seconds = step.seconds * math.exp(luck)
    return Trial(
        key=key, world=candidate.case.world, parameters=parameters(candidate.case), settings=settings,
        planned_seconds=candidate.step.seconds, planned_bytes=candidate.memory.total, status=OK, seconds=seconds,
        model_tflops=step.model_tflops * step.seconds / seconds,
    )


def best_found(space: Space, name: str, truth: Machine, seed: int, trials: int) -> float:
    """Model TFLOP/s of the best of so many trials."""
    with tempfile.TemporaryDirectory() as folder:
        strategy, best = make_strategy(name, space, count=trials, seed=seed, folder=folder), 0.0
        for _ in range(trials):
            candidate = strategy.ask()
            if candidate is None:
                break
            trial = measured(space, truth, candidate, seed)
            strategy.tell(candidate, trial)
            best = max(best, trial.model_tflops or 0.0)
    return best


def sign_test(better: int, worse: int) -> float:
    """Probability of at least so many better ones if better and worse were equally likely; ties are left out."""
    n = better + worse
    return sum(math.comb(n, k) for k in range(better, n + 1)) / 2**n


def compared(space: Space, trials: int, machines: int, names: list[str]) -> dict[str, Any]:
    """What each strategy found on each machine, beside random."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(machines):
        truth = other_machine(space.machine, seed)
        for name in names:
            found[name].append(best_found(space, name, truth, seed, trials))
    rows: dict[str, Any] = {"fitting": len(space.fitting), "found": found}
    for name in names:
        if name != "random":
            pairs = list(zip(found[name], found["random"]))
            better, worse = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
            rows[name] = {
                "better": better, "worse": worse, "p": sign_test(better, worse),
                "median_ratio": sorted(a / b for a, b in pairs)[len(pairs) // 2],
            }
    return rows


def main() -> None:
    """Compare, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--machines", type=int, default=16)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    names = ["random", "model"] + (["deephyper"] if find_spec("deephyper") else [])
    record: dict[str, Any] = {"trials": args.trials, "machines": args.machines, "strategies": names, "problems": {}}
    for title, (run, overrides) in PROBLEMS.items():
        space = make_space(load(run, overrides).config)
        record["problems"][title] = rows = compared(space, args.trials, args.machines, names)
        for name in names[1:]:
            row = rows[name]
            print(f"{title}, {rows['fitting']} layouts fit: {name} beats random on {row['better']} of {args.machines} "
                  f"machines (p {row['p']:.2g}), median {row['median_ratio'] - 1:+.1%}", flush=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
