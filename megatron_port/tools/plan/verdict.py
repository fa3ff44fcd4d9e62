"""A whole plan of a run: does it fit, how fast is it, how long does it take, and what near it is better."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_port.core.config.checks import check
from megatron_port.core.config.schema import DataConfig, RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.model.flops import parameter_count
from megatron_port.tools.plan.activation_plan import with_activation_plan
from megatron_port.tools.plan.advice import Way, ways_to_fit
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_of
from megatron_port.tools.plan.fastest import fastest
from megatron_port.tools.plan.memory import StageMemory, plan_memory
from megatron_port.tools.plan.offload import host_problem
from megatron_port.tools.plan.search import Candidate, better, flags_of, is_legal, options_of, search
from megatron_port.tools.plan.step import StepPlan, plan_step
from megatron_port.tools.plan.why import Gain, gains


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Cost of training on a number of tokens."""

    tokens: float
    steps: int
    days: float
    node_hours: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer to ``megatron-port plan``."""

    name: str
    parameters: int
    case: Case
    machine: Machine
    nodes: float
    fractional: bool
    """Every replica runs rounded-up micro-batches: no trainer does this."""
    memory: tuple[StageMemory, ...]
    step: StepPlan
    budget: Budget
    nearest: Candidate | None
    """Only where the run does not fit: the fastest of all layouts that do, on as many ranks."""
    neighbours: tuple[Candidate, ...]
    best: Candidate | None = None
    """The fastest of all layouts on these ranks that training takes, on any engine; None: the run's own."""
    gains: tuple[Gain, ...] = ()
    """Seconds saved by each change from the run's layout to the best one."""
    searched: bool = True
    """Other layouts were looked for."""
    flags: str = ""
    """The best layout, or the nearest that fits, as ``--set`` options."""
    ways: tuple[Way, ...] = ()
    """Only where the run does not fit: changes with which it does, cheapest first."""
    host_problem: str = ""
    """Why offloaded state does not fit the nodes' hosts."""
    within_documents: bool = False
    """Attention stays within documents; how long they are is the case's, if it is known."""

    @property
    def fullest(self) -> StageMemory:
        """The stage that needs most memory."""
        return max(self.memory, key=lambda m: m.total)

    @property
    def limit(self) -> float:
        """Bytes of a device."""
        return self.machine.cluster.memory_gb * 1e9

    @property
    def fits(self) -> bool:
        """Whether every stage fits its device."""
        return self.fullest.total <= self.limit and not self.host_problem


def make_plan(
    config: RunConfig, *, tokens: float | None = None, fractional: bool = False, neighbours: bool = True
) -> Plan:
    """Plan a run file.

    ``tokens``: the budget; None: what ``training.steps`` consume. ``fractional``: allow a global batch that does not
    divide by micro-batch × dp.

    Raises:
        ConfigError: a run that is not legal, a cluster that says too little, or a budget that makes no sense.
    """
    _refuse(config, tokens, fractional)
    machine = machine_of(config)
    config = with_activation_plan(config, allow_fractions=fractional)
    case, fraction = case_of(config, allow_fractions=fractional)
    memory = tuple(plan_memory(case, machine))
    step = plan_step(case, machine)
    outside = host_problem(case, machine)
    fits = max(m.total for m in memory) <= machine.cluster.memory_gb * 1e9 and not outside
    near: tuple[Candidate, ...] = ()
    best: Candidate | None = None
    if neighbours:
        found, limit = search(case, machine, options_of(config, case)), step.seconds if fits else math.inf
        near = tuple(better(case, limit, found, machine, legal=lambda c: is_legal(config, c.case)))
        best = min([*fastest(config, case, machine), *near], key=lambda c: c.step.seconds, default=None)
    faster = best if fits and best is not None and best.step.seconds < step.seconds else None
    return Plan(
        name=config.name, parameters=parameter_count(config.model), case=case, machine=machine,
        nodes=case.world / config.cluster.gpus_per_node, fractional=fraction, memory=memory, step=step,
        budget=_budget(config, case, step, tokens), nearest=None if fits else best, neighbours=near, best=faster,
        gains=tuple(gains(case, faster.case, machine)) if faster is not None else (),
        flags=flags_of(config, case, best.case) if best is not None else "",
        ways=tuple(ways_to_fit(config, case, machine)) if neighbours and not fits else (), host_problem=outside,
        searched=neighbours, within_documents=config.data.attention_documents == "within",
    )


def _refuse(config: RunConfig, tokens: float | None, fractional: bool) -> None:
    """Everything that cannot be planned, before anything is."""
    out = []
    if tokens is not None and not (tokens > 0 and math.isfinite(tokens)):
        out.append(f"--tokens {tokens:g} is no budget; give a number above 0, e.g. 300e9")
    if config.cluster.nodes < 0:
        out.append(f"cluster.nodes is {config.cluster.nodes}; a plan needs at least 1")
    if not config.cluster.nodes and not config.layout.data_parallel_size:
        out.append(
            "cluster.nodes is 0 and layout.data_parallel_size is 0, so nothing says how many devices to plan for; "
            "set one of them, e.g. --set cluster.nodes=16"
        )
    if out:
        raise ConfigError(out)
    batch, data = config.batch, DataConfig(synthetic=True)  # a plan reads no corpus
    checked = replace(config, data=data)
    if fractional and not batch.rampup_start:
        t, p = config.layout.tensor_parallel_size, config.layout.pipeline_parallel_size
        world = config.cluster.nodes * config.cluster.gpus_per_node
        dp = config.layout.data_parallel_size or max(1, world // max(1, t * p))
        unit = max(1, batch.micro_batch_size * dp)
        checked = replace(checked, batch=replace(batch, global_batch_size=-(-batch.global_batch_size // unit) * unit))
    check(checked)


def _budget(config: RunConfig, case: Case, step: StepPlan, tokens: float | None) -> Budget:
    a_step = case.global_batch * case.model.seq_length
    steps = config.training.steps if tokens is None else math.ceil(tokens / a_step)
    seconds = steps * step.seconds
    return Budget(
        tokens=float(steps * a_step if tokens is None else tokens), steps=steps, days=seconds / 86400,
        node_hours=seconds / 3600 * case.world / config.cluster.gpus_per_node,
    )
