"""How the planned step answers when one number of the machine, or one choice of the layout, is another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_port.tools.plan.case import Case, Machine, balanced_split
from megatron_port.tools.plan.search import RECOMPUTE, Candidate
from megatron_port.tools.plan.step import plan_step

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
"""Bar of the tornado → fields of the hardware that change together."""
CHOICES = {
    "micro-batch": "micro_batch", "tensor parallel size": "tp", "pipeline stages": "pp", "recompute": "recompute",
    "sequence parallel": "sequence_parallel", "expert parallel size": "ep",
}
"""Name of a bar → the field of the layout that changes."""


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
    fitting = [c.case for c in found if c.fits(machine)]
    out = []
    for name, field in CHOICES.items():
        value = partial(_value, field=field)
        others = [c for c in fitting if _alike(c, case, field)]
        below = max((c for c in others if value(c) < value(case)), key=value, default=None)
        above = min((c for c in others if value(c) > value(case)), key=value, default=None)
        bar = [None if c is None else plan_step(c, machine).seconds / now - 1 for c in (below, above)]
        words = ["" if c is None else _shown(c, field) for c in (below, above)]
        out.append(Bar(name, bar[0], bar[1], words[0], words[1]))
    half, double = (_replicas(case, machine, factor) for factor in (0.5, 2.0))
    out.append(Bar("devices (node-hours)", half, double, "half", "double"))
    return sorted((b for b in out if b.low is not None or b.high is not None), key=lambda b: -b.reach)


def _value(case: Case, field: str) -> int:
    """Return a choice as a number, to tell the next smaller from the next larger."""
    value = getattr(case, field)
    return RECOMPUTE.index(value) if field == "recompute" else int(value)


def _shown(case: Case, field: str) -> str:
    value = getattr(case, field)
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{field} {value}" if field in ("tp", "pp", "ep") else str(value)


def _alike(other: Case, case: Case, field: str) -> bool:
    """Return whether two layouts differ at most in ``field``; at tp 1 there is no sequence parallelism to compare."""
    fields = {"tp", "pp", "vp", "micro_batch", "recompute", "sequence_parallel", "ep"} - {field}
    if field == "tp" and other.tp == 1:
        fields.remove("sequence_parallel")
    return all(getattr(other, f) == getattr(case, f) for f in fields)


def _replicas(case: Case, machine: Machine, factor: float) -> float | None:
    """Change of device-seconds per step with more or fewer replicas, the batch kept; None where it does not divide."""
    dp = case.dp * factor
    unit = int(dp) * case.micro_batch
    if dp < 1 or dp != math.floor(dp) or case.global_batch % unit:
        return None
    other = replace(case, dp=int(dp), micro_batches=case.global_batch // unit,
                    split=case.split or balanced_split(case.model, case.pp * case.vp))
    return plan_step(other, machine).seconds * factor / plan_step(case, machine).seconds - 1
