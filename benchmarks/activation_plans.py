"""Planned step times of the shipped runs under each policy of activations: ``python benchmarks/activation_plans.py``.

Writes ``results/activation-plans.md``: at the memory that full and selective recompute need, and on the device.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_port.core.config.loader import load, shipped_names
from megatron_port.tools.plan.activation_plan import plan_activations
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_of
from megatron_port.tools.plan.memory import plan_memory
from megatron_port.tools.plan.step import plan_step

EQUAL = 1.001
"""Memory that counts as equal: full recompute drops the statistics of norms too, which plans keep."""
OUT = Path(__file__).parent / "results" / "activation-plans.md"


def most(case: Case, machine: Machine) -> float:
    """Return the bytes of the fullest stage."""
    return max(stage.total for stage in plan_memory(case, machine))


def planned(case: Case, machine: Machine, limit: float) -> Case:
    """Return the case with the plan for devices of ``limit`` bytes."""
    device = replace(machine, cluster=replace(machine.cluster, memory_gb=limit / 1e9))
    return replace(case, dropped=plan_activations(case, device))


def row(name: str) -> str | None:
    """Return a run's line of the table; None: its cluster says too little to plan, or it has experts, whose activations
    are not planned by site (``config.features``)."""
    config = load(name).config
    known = config.cluster.memory_gb and config.hardware.device and config.cluster.nodes
    if config.model.moe.num_experts or not known:
        return None
    machine = machine_of(config)
    case = replace(case_of(config)[0], recompute="none", dropped=())
    device = machine.cluster.memory_gb * 1e9
    cells = []
    for policy in ("full", "selective"):
        other = replace(case, recompute=policy)
        limit = most(other, machine)
        plan = planned(case, machine, limit * EQUAL)
        assert most(plan, machine) <= limit * EQUAL, name
        theirs, ours = (plan_step(c, machine).seconds for c in (other, plan))
        cells += [f"{limit / 1e9:.1f}{'' if limit <= device else ' (does not fit)'}", f"{theirs:.2f}", f"{ours:.2f}"]
    plan = planned(case, machine, device)
    cells += [f"{device / 1e9:g}", f"{plan_step(plan, machine).seconds:.2f}"]
    return f"| {name.removeprefix('runs/')} | {' | '.join(cells)} |"


def main() -> None:
    """Write the table."""
    rows = [line for name in shipped_names() if name.startswith("runs/") and (line := row(name))]
    OUT.write_text("\n".join([
        "# Planned seconds per step under `activations.policy`", "",
        "By `python benchmarks/activation_plans.py`. At the memory of the fullest stage under full and under selective",
        "recompute: their seconds, and those of a plan for devices of that memory (within 0.1 %). Last: the plan for",
        "the device.", "",
        "| run | GB | full | plan | GB | selective | plan | device, GB | plan |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows, "",
    ]))
    print(OUT.read_text())


if __name__ == "__main__":
    main()
