"""What a training step asks of a GPU and of Python, by size of model, against a committed table: launches, waits,
memory, calls.

    python tests/ghost/budgets.py --python ENV/bin/python            # against benchmarks/results/ghost-budgets.json
    python tests/ghost/budgets.py --python ENV/bin/python --write    # after a change that is meant

One process takes three steps on the ghost machine; the last one's calls are counted. Launches, products and waits may
not exceed the table's, the allocator's peak may not differ by more than 0.5 %, and the planner's prediction of that
peak is printed beside it and may not be off by more than the table says. The host's processor seconds are recorded, not
compared: they are the machine's; the calls that Python makes are the code's, and counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from check import OWN_KERNEL
from machine import Machine, RankLog
from options import HERE, ROOT, Budgets, chosen_torch, machine, parser
from ordering import STEP_BEGINS, STEP_ENDS, between, race_faults, waits_between

TABLE = ROOT / "benchmarks" / "results" / "ghost-budgets.json"
CASES = {"gpt2-124m": (12, 16, 32), "gpt2-xl": (48, 8, 16), "6.7b": (8, 2, 4), "llama-8b": (8, 1, 2)}
"""Size → layers, micro-batch, global batch."""
COUNTS = ("kernels", "own_kernels", "products", "copies", "waits", "early_waits", "allocations", "host_calls")
PEAK_TOLERANCE = 0.005
Row = dict[str, Any]


def counted(log: RankLog) -> Row:
    """Calls of the last step by kind."""
    step = between(log, STEP_BEGINS, STEP_ENDS)
    kinds = {"kernels": "kernel", "products": "product", "copies": "copy", "allocations": "allocate"}
    found: Row = {name: sum(event.kind == kind for event in step) for name, kind in kinds.items()}
    found["own_kernels"] = sum(event.kind == "kernel" and OWN_KERNEL in event.detail for event in step)
    # A wait after which the step goes on keeps the device idle until the host has queued more.
    last = max((i for i, event in enumerate(step) if event.kind in ("kernel", "product")), default=0)
    found["early_waits"] = sum(event.kind == "wait" for event in step[:last])
    return found | {"waits": len(waits_between(log, STEP_BEGINS, STEP_ENDS))}


def planned_bytes(name: str, layers: int, micro: int, batch: int) -> float:
    """Return the allocator's peak as the planner predicts it for this size on an H200."""
    from benchmarks.compare.sizes import sizes
    from benchmarks.compare.worker import settled
    from megatron_port.core.config.loader import load
    from megatron_port.tools.plan.case import case_of, machine_of
    from megatron_port.tools.plan.memory import stage_memory

    described = load("clusters/h200").config
    size = settled(sizes()[name], {"layers": layers, "micro_batch": micro, "global_batch": batch})
    config = replace(size.run_config(), cluster=replace(described.cluster, nodes=0), hardware=described.hardware,
                     calibration=described.calibration)
    case, _ = case_of(config, 1)
    return stage_memory(case, machine_of(config), 0).allocated


def measure(made: Machine, name: str) -> Row:
    """Return a size's row. Raises RuntimeError where the step does not end or its streams race."""
    case = CASES[name]
    code, output, logs = made.start(str(HERE / "budget_step.py"), name, *map(str, case), seconds=600.0)
    if code or len(logs) != 1:
        raise RuntimeError(f"{name}: exit {code}: {output[-1000:]}")
    if races := race_faults(logs[0]):
        raise RuntimeError(f"{name}: {races[0]}")
    said = json.loads(output.splitlines()[-1])
    planned = planned_bytes(name, *case)
    return {**dict(zip(("layers", "micro_batch", "global_batch"), case)), **counted(logs[0]), **said,
            "planned_bytes": planned, "planned_over_measured": planned / said["peak_bytes"]}


def over_budget(name: str, found: Mapping[str, Any], allowed: Mapping[str, Any]) -> list[str]:
    """Return what exceeds the table's row, as sentences."""
    out = [f"{name}: {found[key]} {key.replace('_', ' ')} a step, {allowed[key]} are allowed"
           for key in COUNTS if found[key] > allowed[key]]
    if abs(found["peak_bytes"] / allowed["peak_bytes"] - 1) > PEAK_TOLERANCE:
        out.append(f"{name}: the allocator's peak is {found['peak_bytes']:,} bytes, {allowed['peak_bytes']:,} in the "
                   "table")
    off, before = (abs(row["planned_over_measured"] - 1) for row in (found, allowed))
    if off > before + PEAK_TOLERANCE:
        out.append(f"{name}: the planner is off by {off:.1%} of the peak, {before:.1%} in the table")
    return out


def main() -> int:
    """Measure, print, compare or write; 1 where a budget is exceeded."""
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="SIZE")
    made.add_argument("--write", action="store_true", help="make these the table's rows")
    a = made.parse_args()
    torch = chosen_torch(a.python)
    table = Budgets(TABLE, over_budget, write=a.write)
    with machine(torch, devices=1) as node:
        for name in a.only:
            row = measure(node, name) | {"torch": torch.version}
            print(f"{name}: " + ", ".join(f"{row[key]} {key.replace('_', ' ')}" for key in COUNTS)
                  + f"; host {row['host_seconds']:.3f} s; peak {row['peak_bytes'] / 1e9:.3f} GB, planned "
                  f"{row['planned_bytes'] / 1e9:.3f} ({row['planned_over_measured'] - 1:+.1%})", flush=True)
            table.hold(name, row)
    return table.end()


if __name__ == "__main__":
    sys.exit(main())
