"""Changes that make a run fit: single ones of how state and activations are kept, each with its memory and seconds.

Each way changes one thing on the same devices (or two, where none is enough alone): the recompute policy, the
micro-batch, ZeRO's stage or the size of its shards, offload, one step more of tensor or pipeline parallelism. What
remains to be fitted is planned as the run would be, and the cheapest comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from megatron_port.core.config.checks import problems
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.schema import DataConfig, RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.tools.plan.case import Case, Machine, case_of
from megatron_port.tools.plan.memory import StageMemory
from megatron_port.tools.plan.offload import host_problem
from megatron_port.tools.plan.search import LEAST_HELD, fullest
from megatron_port.tools.plan.step import plan_step

Change = dict[str, Any]
"""Leaves of a run file by dotted name."""
POLICIES = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Way:
    """A change after which a run fits."""

    change: Change
    case: Case
    memory: StageMemory
    """Bytes of the fullest stage."""
    seconds: float
    """Duration of a step."""

    @property
    def flags(self) -> str:
        """The change as ``--set`` options."""
        return " ".join(f"--set {name}={_text(value)}" for name, value in self.change.items())


def ways_to_fit(config: RunConfig, case: Case, machine: Machine, *, count: int = 4) -> list[Way]:
    """Return up to ``count`` changes with which the run fits its devices, fewest seconds per step first; those of two
    changes only where none is enough alone."""
    single = list(_changes(config, case, machine))
    found = _fitting(config, single, machine)
    if not found:
        found = _fitting(config, [a | b for a, b in combinations(single, 2) if not a.keys() & b.keys()], machine)
    return sorted(found, key=lambda way: way.seconds)[:count]


def _changes(config: RunConfig, case: Case, machine: Machine) -> Iterator[Change]:
    """Every single change that saves memory, legal or not."""
    for policy in POLICIES[POLICIES.index(case.recompute) + 1 :] if case.recompute in POLICIES else ():
        if policy != "selective" or not case.flash:
            yield {"activations.policy": policy}
    micro = case.micro_batch // 2
    while micro:
        yield {"batch.micro_batch_size": micro}
        micro //= 2
    for stage in range(max(case.zero_stage, 1) + (case.zero_stage > 0), 4):
        yield {"layout.zero_stage": stage}
    if 0 < case.shard < case.dp:
        yield {"layout.shard_size": 0}
    if case.zero_stage == 3 and case.reshard == "step":
        yield {"layout.reshard": "forward"}
    if case.offload == "none":
        shards = {} if case.zero_stage else {"layout.zero_stage": 1}
        yield {"offload.optimizer": "cpu", **shards}
        if machine.hardware.nvme_gb:
            yield {"offload.optimizer": "nvme", "offload.nvme_path": config.cluster.local_disk, **shards}
    if case.tp > 1 and not case.sequence_parallel:
        yield {"layout.sequence_parallel": True}
    if config.model.moe.enabled:
        yield {"layout.expert_parallel_size": 2 * case.ep}
    longer = case.model.seq_length // (2 * case.cp) >= LEAST_HELD
    context = (("context", case.cp),) if longer else ()
    for name, size in (("tensor", case.tp), ("pipeline", case.pp), *context):
        dp = config.layout.data_parallel_size
        halved = {"layout.data_parallel_size": dp // 2} if dp > 1 else {}
        split = {"layout.pipeline_split": ()} if name == "pipeline" and config.layout.pipeline_split else {}
        yield {f"layout.{name}_parallel_size": 2 * size, **halved, **split}


def _fitting(config: RunConfig, changes: list[Change], machine: Machine) -> list[Way]:
    out = []
    for change in changes:
        changed = replace(with_values(config, change), data=DataConfig(synthetic=True))
        try:
            if problems(changed):
                continue
            case, _ = case_of(changed)
        except ConfigError:
            continue
        memory = fullest(case, machine)
        if memory.total <= machine.cluster.memory_gb * 1e9 and not host_problem(case, machine):
            seconds = plan_step(case, machine, quick=True).seconds
            out.append(Way(change=change, case=case, memory=memory, seconds=seconds))
    return out


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "[]" if value == () else str(value)
