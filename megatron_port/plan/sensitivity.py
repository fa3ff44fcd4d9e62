"""How the planned step answers when one number of the machine, or one choice of the layout, is another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_port.plan.case import Case, Machine, balanced_split
from megatron_port.plan.search import Candidate
from megatron_port.plan.step import plan_step

SHARE = 0.2
RATES = {
    "matmul rate": ("matmul_tflops", "attention_forward_tflops", "attention_backward_tflops", "fp8_matmul_tflops"),
    "memory bandwidth": ("memory_bandwidth_gb",),
    "links within a node": ("node_gb", "package_gb"),
    "network adapters": ("nic_gb",),
    "network out of a group": ("group_taper",),
    "latency within a node": ("node_latency_us",),
    "latency between nodes": ("network_latency_us",),
    "kernel launch": ("launch_us",),
    "jitter": ("jitter",),
}
"""What a bar of the tornado is called → the fields of the hardware that change together."""


@dataclass(frozen=True)
class Bar:
    """One row of a tornado: relative change of the step's time."""

    name: str
    low: float | None
    """With the smaller value; None: there is no such layout, or it does not fit."""
    high: float | None
    low_label: str = ""
    high_label: str = ""

    @property
    def reach(self) -> float:
        """The larger of the two, by size."""
        return max((abs(x) for x in (self.low, self.high) if x is not None), default=0.0)


def machine_bars(case: Case, machine: Machine) -> list[Bar]:
    """Each rate and latency ``SHARE`` lower and higher (the case's layout kept), largest first."""
    now = plan_step(case, machine).seconds
    out = []
    for name, names in RATES.items():
        changes = []
        for factor in (1 - SHARE, 1 + SHARE):
            values = {n: getattr(machine.hardware, n) * factor for n in names}
            if "group_taper" in values:
                values["group_taper"] = min(1.0, values["group_taper"])
            other = replace(machine, hardware=replace(machine.hardware, **values))
            changes.append(plan_step(case, other).seconds / now - 1)
        out.append(Bar(name, changes[0], changes[1], f"−{SHARE:.0%}", f"+{SHARE:.0%}"))
    return sorted((b for b in out if b.reach > 5e-5), key=lambda b: -b.reach)


def choice_bars(case: Case, machine: Machine, found: Sequence[Candidate]) -> list[Bar]:
    """Each choice of the layout one step down and up, on the same devices and for the same batch; largest first.

    ``found``: the planned layouts (``search`` with ``keep_unfit``); a neighbour that does not fit has no bar.
    """
    now = plan_step(case, machine).seconds
    same: dict[str, Callable[[Case], tuple[object, ...]]] = {
        "micro-batch": lambda c: (c.tp, c.pp, c.vp, c.sequence_parallel, c.recompute),
        "tensor parallel size": lambda c: (
            c.pp, c.vp, c.micro_batch, c.recompute, c.sequence_parallel if c.tp > 1 else case.sequence_parallel
        ),
        "pipeline stages": lambda c: (c.tp, c.vp, c.micro_batch, c.sequence_parallel, c.recompute),
        "recompute": lambda c: (c.tp, c.pp, c.vp, c.micro_batch, c.sequence_parallel),
        "sequence parallel": lambda c: (c.tp, c.pp, c.vp, c.micro_batch, c.recompute),
    }
    order = {"none": 0, "selective": 1, "full": 2}
    value: dict[str, Callable[[Case], int]] = {
        "micro-batch": lambda c: c.micro_batch, "tensor parallel size": lambda c: c.tp,
        "pipeline stages": lambda c: c.pp, "recompute": lambda c: order[c.recompute],
        "sequence parallel": lambda c: int(c.sequence_parallel),
    }
    fitting = [c.case for c in found if c.fits(machine)]
    out = []
    for name, key in same.items():
        others = [c for c in fitting if key(c) == key(case) and value[name](c) != value[name](case)]
        below = max((c for c in others if value[name](c) < value[name](case)), key=value[name], default=None)
        above = min((c for c in others if value[name](c) > value[name](case)), key=value[name], default=None)
        bar = [None if c is None else plan_step(c, machine).seconds / now - 1 for c in (below, above)]
        words = ["" if c is None else _shown(name, c) for c in (below, above)]
        out.append(Bar(name, bar[0], bar[1], words[0], words[1]))
    half, double = (_replicas(case, machine, factor) for factor in (0.5, 2.0))
    out.append(Bar("devices (node-hours)", half, double, "half", "double"))
    return sorted((b for b in out if b.low is not None or b.high is not None), key=lambda b: -b.reach)


def _shown(name: str, case: Case) -> str:
    found = {
        "micro-batch": case.micro_batch, "tensor parallel size": f"tp {case.tp}", "pipeline stages": f"pp {case.pp}",
        "recompute": case.recompute, "sequence parallel": "on" if case.sequence_parallel else "off",
    }[name]
    return str(found)


def _replicas(case: Case, machine: Machine, factor: float) -> float | None:
    """Change of device-seconds per step with more or fewer replicas, the batch kept; None where it does not divide."""
    dp = case.dp * factor
    unit = int(dp) * case.micro_batch
    if dp < 1 or dp != math.floor(dp) or case.global_batch % unit:
        return None
    other = replace(case, dp=int(dp), micro_batches=case.global_batch // unit,
                    split=case.split or balanced_split(case.model, case.pp * case.vp))
    return plan_step(other, machine).seconds * factor / plan_step(case, machine).seconds - 1
