"""Why one layout is better than another: what each change buys, taken one after the other.

From the layout that a user has to the best one there are a few changes: how ranks are divided, the micro-batch, what is
recomputed, sequence parallelism, the schedule, ZeRO. At each turn the change is made that saves most of what is left,
and the difference is told by cause. The last line is the better layout itself, so the seconds add up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_port.tools.plan.case import Case, Machine
from megatron_port.tools.plan.step import StepPlan, plan_step

GROUPS: dict[str, tuple[str, ...]] = {
    "engine {engine.name}": ("engine",),
    "tp {tp}, pp {pp}, cp {cp}, dp {dp}": ("tp", "pp", "cp", "dp", "vp", "split", "micro_batches", "ep", "cp_method",
                                           "cp_order", "sequence_parallel"),
    "sequence parallelism": ("sequence_parallel",),
    "micro-batch {micro_batch}": ("micro_batch", "micro_batches"),
    "recompute {recompute}": ("recompute", "dropped"),
    "{schedule}": ("schedule",),
    "ZeRO-{zero_stage}": ("zero_stage", "shard", "reshard"),
    "optimizer on {offload}": ("offload", "offload_weights", "offload_fraction"),
    "products in {tensor_chunks} parts": ("tensor_chunks",),
}
"""Name of a change → fields that change together."""


@dataclass(frozen=True)
class Gain:
    """A change, the seconds of a step after it, and what it saved by cause."""

    change: str
    seconds: float
    saved: dict[str, float]

    @property
    def reason(self) -> str:
        """The causes that make up most of it."""
        order = sorted(self.saved.items(), key=lambda item: -abs(item[1]))
        most = max((abs(s) for _, s in order), default=0.0)
        told = [(name, s) for name, s in order if abs(s) >= 0.15 * most and abs(s) > 1e-4]
        return ", ".join(f"{name} {-s:+.3g} s" for name, s in told[:3])


def _told(name: str, case: Case) -> str:
    return "recompute by plan" if case.dropped and name.startswith("recompute") else name.format(**vars(case))


def _changed(case: Case, best: Case, names: tuple[str, ...]) -> Case:
    values = {name: getattr(best, name) for name in names}
    one = replace(case, **values)
    replicas = one.micro_batch * one.dp
    return replace(one, micro_batches=max(-(-one.global_batch // replicas), 1))


def _legal(case: Case) -> bool:
    even = case.vp == 1 or case.micro_batches % case.pp == 0
    return even and not (case.sequence_parallel and case.tp == 1)


def _gain(change: str, before: StepPlan, after: StepPlan) -> Gain:
    now = after.split.parts()
    return Gain(change, after.seconds, {cause: s - now[cause] for cause, s in before.split.parts().items()})


def gains(case: Case, best: Case, machine: Machine) -> list[Gain]:
    """The changes from ``case`` to ``best`` in the order of what they save."""
    now, out = case, []
    step = plan_step(now, machine)
    open_groups = {
        name: fields for name, fields in GROUPS.items() if any(getattr(case, f) != getattr(best, f) for f in fields[:5])
    }
    while open_groups:
        names = [n for n in open_groups if n.startswith("engine")] or list(open_groups)  # what has it, depends on it
        tried: list[tuple[float, str, Case]] = []
        for name in names:
            one = best if len(open_groups) == 1 else _changed(now, best, open_groups[name])
            if one != now and _legal(one):
                tried.append((plan_step(one, machine, quick=True).seconds, name, one))
        if not tried:
            break
        _, name, one = min(tried, key=lambda t: t[0])
        found = plan_step(one, machine)
        out.append(_gain(_told(name, one), step, found))
        now, step = one, found
        del open_groups[name]
        open_groups = {n: f for n, f in open_groups.items() if any(getattr(now, x) != getattr(best, x) for x in f[:5])}
    if now != best:
        found = plan_step(best, machine)
        if abs(found.seconds - step.seconds) > 1e-6 * step.seconds:
            out.append(_gain("the rest", step, found))
    return out
