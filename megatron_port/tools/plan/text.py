"""A plan as text and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from megatron_port.core.config.checks import check
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.experts.spec import MoESpec, moe_of
from megatron_port.ext.telemetry.flops import (
    active_count,
    attention_counted,
    counted,
    model_flops,
    parameter_count,
    trained_count,
)
from megatron_port.run.elastic import starved_pipeline
from megatron_port.tools.plan import arithmetic
from megatron_port.tools.plan.activation_plan import describe, stage_counts, with_activation_plan
from megatron_port.tools.plan.case import Case, Machine, case_of, checked_data, machine_of
from megatron_port.tools.plan.chunk import layer_activation_bytes, layer_bytes
from megatron_port.tools.plan.exchanges import (
    context_bytes,
    context_group,
    exchange_seconds,
    group_of,
    head_bytes,
    routed,
    work_imbalance,
)
from megatron_port.tools.plan.fastest import Gain, Way, fastest, gains, ways_to_fit
from megatron_port.tools.plan.memory import (
    Copied,
    StageMemory,
    copied,
    held_bytes,
    host_problem,
    offloaded,
    plan_memory,
)
from megatron_port.tools.plan.rates import Links, scattered
from megatron_port.tools.plan.search import Candidate, better, flags_of, is_legal, options_of, search
from megatron_port.tools.plan.step import StepPlan, matrix_bytes, plan_step

# A whole plan of a run: does it fit, how fast is it, how long does it take, and what near it is better.

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
    batch, checked = config.batch, replace(config, data=checked_data(config))
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


# What a plan says of ranks that share sequences.

def context_lines(plan: Plan) -> list[str]:
    """Lines of ``plan`` about context parallelism: who shares a sequence, and how evenly; none without it."""
    case = plan.case
    if case.cp == 1:
        return []
    seq, nodes = case.model.seq_length, context_group(case, Links.of(plan.machine)).nodes
    layer = model_spec(case.model).layers[-1]
    even = "each has all positions of as many heads"
    if case.cp_method != "heads":
        most = work_imbalance(
            case.cp_order, case.cp, seq, layer.mixer.window, case.document, case.micro_batch
        )
        even = f"attention of the busiest takes {most:.2f} x the mean (cp_order {case.cp_order})"
    return [
        f"context   {case.cp} ranks on {nodes} node{'' if nodes == 1 else 's'} share a sequence, {seq // case.cp:,} of "
        f"its {seq:,} positions each; {even}"
    ]


def explain_context(plan: Plan) -> list[str]:
    """Lines of ``plan --explain`` about context parallelism."""
    case = plan.case
    if case.cp == 1:
        return []
    kinds = [layer for layer, _ in model_spec(case.model).kinds()]
    out, layers = [], [replace(layer, mixer=part) for layer in kinds for part in layer.mixer.parts]
    with_keys = [layer for layer in layers if layer.mixer.attention is not None]
    with_states = [layer for layer in layers if layer.mixer.attention is None]
    if with_keys:
        own, moved = head_bytes(case, with_keys[-1]), sum(context_bytes(case, with_keys[-1]).values())
        out.append(
            f"  keys and values  of a layer and micro-batch: {own.keys_values / 1e6:.1f} MB of a rank's own positions, "
            f"{case.cp * own.keys_values / 1e6:.1f} MB of all; by {case.cp_method} a rank hands {moved / 1e6:.1f} MB "
            f"to collectives, forward and backward"
        )
    if with_states:
        moved = sum(context_bytes(case, with_states[-1]).values())
        out.append(f"  states           of a layer and micro-batch: a rank hands {moved / 1e6:.1f} MB to collectives, "
                   f"forward and backward")
    return [
        *out,
        f"  exposed          {plan.step.split.context:.2f} s a step of {case.micro_batches} micro-batches, on the "
        f"busiest stage",
    ]


# What a plan says of layers of experts.

def _layers(plan: Plan) -> list[tuple[MoESpec, int]]:
    """The kinds of layers of experts, and how many there are of each."""
    return [(moe, count) for layer, count in model_spec(plan.case.model).kinds() if (moe := moe_of(layer)) is not None]


def expert_lines(plan: Plan) -> list[str]:
    """Lines of ``plan`` about experts: where they are, and the bytes of their state; none for a dense model."""
    case = plan.case
    if not case.model.moe.enabled:
        return []
    moe, worst = case.model.moe, plan.fullest
    layers, nodes = sum(count for _, count in _layers(plan)), group_of(case, Links.of(plan.machine)).nodes
    held = held_bytes(case, worst.experts, worst.experts, worst.experts)
    names = ("weights", "gradients", "optimizer")
    state = "  ".join(f"{name} {size / 1e9:.1f}" for name, size in zip(names, held))
    span = f"{case.ep} rank{'' if case.ep == 1 else 's'}, {nodes} node{'' if nodes == 1 else 's'}"
    return [
        f"experts   {layers} layers of {moe.num_experts} on {span}: {moe.num_experts // case.ep} on each; a token goes "
        f"to {moe.top_k}; the busiest rank has {case.imbalance:g} x the mean (moe.imbalance)",
        f"          their part of stage {worst.stage}: {state}  (GB)",
    ]


def explain_experts(plan: Plan) -> list[str]:
    """Lines of ``plan --explain`` about experts."""
    case, links = plan.case, Links.of(plan.machine)
    if not case.model.moe.enabled:
        return []
    kinds, hidden, m = _layers(plan), case.model.hidden_size, case.micro_batches
    moe, layers = kinds[-1][0], sum(count for _, count in kinds)
    sizes = routed(case, moe)
    each = 4 * moe.top_k * hidden * case.width
    once = exchange_seconds(case, moe, links)
    forced = plan_step(replace(case, imbalance=1.0), plan.machine).seconds
    rest = (case.ep - 1) / case.ep
    return [
        f"  all-to-all       4·k·h·w = 4 · {moe.top_k} · {hidden} · {case.width} = {each:,} bytes per token and layer, "
        f"{each * layers / 1e6:.1f} MB over {layers} layers; {rest:.1%} of them go to other ranks. One of a "
        f"micro-batch's four takes {once * 1e3:.2f} ms in each layer",
        f"  exposed          {plan.step.split.experts:.2f} s a step of {m} micro-batches, on the busiest stage",
        f"  rows             an expert of the busiest rank takes {sizes.each:,.0f} a micro-batch: {sizes.tokens:,.0f} "
        f"tokens · {moe.top_k} experts · {case.imbalance:g} / {sizes.experts:g} on a rank",
        f"  imbalance        {plan.step.seconds:.2f} s a step at {case.imbalance:g} x the mean, {forced:.2f} s with "
        f"forced balance",
    ]


def render(plan: Plan) -> str:
    """Return what ``megatron-port plan`` prints."""
    parts = _head(plan), _memory(plan), expert_lines(plan), context_lines(plan), _time(plan)
    return "\n".join(line for part in (*parts, _neighbours(plan), best(plan)) for line in part)


def _head(plan: Plan) -> list[str]:
    case, cluster = plan.case, plan.machine.cluster
    lines = [
        f"{plan.name}: {counted(case.model, case.fine_tuning)} on {case.world} {cluster.device_label}s "
        f"({plan.nodes:g} node{'' if plan.nodes == 1 else 's'} of {cluster.name})",
        f"layout    {case.label()}; {case.engine.name}, {case.schedule}, ZeRO-{case.zero_stage}, {case.dtype}, "
        f"{'fused' if case.flash else 'unfused'} attention; batch {case.global_batch} = {case.micro_batch} x "
        f"{case.micro_batches} x dp {case.dp}",
    ]
    if starved := starved_pipeline(case.pp, case.micro_batches):
        lines.append(f"          {starved}")
    if plan.within_documents:
        lines.append("          attention within documents " + (
            f"of {case.document:,.0f} tokens (that a token is in, in the mean)" if case.document else
            "is planned, and its FLOPs counted, as over whole samples, the most that it can take: neither a corpus "
            "that is here nor data.document_length says how long they are"
        ))
    if plan.fractional:
        lines.append(
            f"          fractional accumulation: {case.global_batch} / (micro-batch {case.micro_batch} x dp {case.dp}) "
            f"is not whole, planned with {case.micro_batches}; no trainer runs this"
        )
    return lines


def _memory(plan: Plan) -> list[str]:
    worst, limit = plan.fullest, plan.limit
    gap = abs(limit - worst.total) / 1e9
    verdict = f"fits, {gap:.1f} GB to spare" if plan.fits else f"DOES NOT FIT: memory is over by {gap:.1f} GB"
    parts = "  ".join(f"{name} {size / 1e9:.1f}" for name, size in worst.parts().items() if size > 5e7)
    lines = [
        f"memory    {verdict}: stage {worst.stage} needs {worst.total / 1e9:.1f} of {limit / 1e9:.1f} GB at "
        f"{worst.peak_at}",
        f"          {parts}  (GB)",
    ]
    if case_pp := len(plan.memory) - 1:
        shown = plan.memory if case_pp < 8 else (*plan.memory[:3], *plan.memory[-3:])
        lines.append("          by stage, GB: " + "  ".join(f"{m.stage}: {m.total / 1e9:.1f}" for m in shown))
    if plan.case.dropped:
        shown_plan = describe(plan.case)
        more = [f"and {len(shown_plan) - 8} more"] if len(shown_plan) > 8 else []
        lines += [f"          not kept, {line}" for line in [*shown_plan[:8], *more]]
    if host := max(m.host for m in plan.memory):
        lines.append(f"          swapped activations of a rank: at most {host / 1e9:.1f} GB of host memory")
    if plan.host_problem:
        lines.append(f"          DOES NOT FIT: {plan.host_problem}")
    away = offloaded(plan.case, plan.machine)
    if away.host or away.disk:
        lines.append(
            f"          offloaded by a rank, GB: host {away.host / 1e9:.1f}  disk {away.disk / 1e9:.1f}; "
            f"{away.seconds:.2f} s a step"
        )
    lines += _copies(plan)
    for i, way in enumerate(plan.ways):
        change = way.seconds / plan.step.seconds - 1
        lines.append(
            f"          {'ways to fit, cheapest first:' if i == 0 else '':28} {way.flags}: "
            f"{way.memory.total / 1e9:.1f} GB, {_figure(way.seconds)} s ({change:+.1%})"
        )
    if not plan.fits and plan.searched:
        lines += [
            f"          fastest layout that fits: {_candidate(plan, plan.nearest)}", f"          {plan.flags}",
        ] if plan.nearest else [f"          no layout on {plan.case.world} devices fits; use more nodes"]
    return lines


def _copies(plan: Plan) -> list[str]:
    """The line about copies of the state, and where there are several nodes one about what they send."""
    copies, interval = copied(plan.case, plan.machine), plan.case.copy_interval
    if not copies.node:
        return []
    every = "step" if interval == 1 else f"{interval} steps"
    where = "local disks" if plan.case.copies_on_disk and plan.machine.hardware.nvme_gb else "memory"
    lines = [
        f"          copies of the state: {copies.node / 1e9:.2f} GB of each node's {where}; every {every}, "
        f"{copies.seconds:.3g} s a step ({copies.seconds / plan.step.seconds:.2%})"
    ]
    paced = copies.sending >= interval * plan.step.seconds * (1 - 1e-9)  # the step has been lengthened to it
    if copies.sent:
        lines.append(
            f"          with the neighbour's: per copy a node sends {copies.sent / 1e9:.2f} GB, which takes "
            f"{copies.sending:.3g} s, " + (
                "longer than the steps between copies, which wait for it: raise checkpoint.memory_interval" if paced
                else "behind the steps"
            )
        )
    return [*lines, _on_disks(plan, copies)] if copies.disk else lines


def _on_disks(plan: Plan, copies: Copied) -> str:
    """The line about copies that are also written to the nodes' disks."""
    pace = plan.case.disk_interval
    way = "at a rate that is not known (hardware.nvme_write_gb)"
    if copies.writing:
        paced = copies.writing >= pace * plan.step.seconds * (1 - 1e-9)
        way = f"written in {copies.writing:.3g} s, " + (
            "longer than these steps, which wait for it: raise checkpoint.disk_interval" if paced
            else "behind the steps")
    return (f"          also on each node's disk: {copies.disk / 1e9:.2f} GB, two of its own copies; one every "
            f"{'step' if pace == 1 else f'{pace} steps'}, {way}")


def _time(plan: Plan) -> list[str]:
    step, budget, label = plan.step, plan.budget, plan.machine.cluster.device_label
    unused = {"experts": not plan.case.model.moe.enabled, "context": plan.case.cp == 1}
    shown = {name: s for name, s in step.split.parts().items() if not unused.get(name)}
    parts = "  ".join(f"{name} {s / step.seconds:.1%}" for name, s in shown.items())
    model, causal, hardware = (_figure(x, 1) for x in (step.model_tflops, step.causal_tflops, step.hardware_tflops))
    return [
        f"step      {_figure(step.seconds)} s: {parts}",
        f"rate      model {model} TFLOP/s per {label} (MFU {step.mfu:.1%}), hardware, recompute "
        f"counted, {hardware} (HFU {step.hfu:.1%}); {step.tokens_per_second:,.0f} tokens/s",
        f"          {attention_counted(plan.case.model, plan.case.document)}; with the causal half of it model "
        f"{causal} TFLOP/s (MFU {step.mfu * step.causal_tflops / step.model_tflops:.1%})",
        f"budget    {budget.tokens:.4g} tokens: {budget.steps:,} steps, {span(budget.days)}, "
        f"{hours(budget.node_hours)} node-hours",
    ]


def _figure(value: float, digits: int = 2) -> str:
    """A number with so many digits after the point; below 1 with three that count."""
    return f"{value:.{digits}f}" if value >= 1 else f"{value:.3g}"


def span(days: float) -> str:
    """A time in the unit in which it is at least 1, minutes at the least."""
    if days >= 1:
        return f"{days:.3g} days"
    return f"{days * 24:.3g} hours" if days * 24 >= 1 else f"{days * 1440:.2g} minutes"


def hours(value: float) -> str:
    """Node-hours: whole ones, below 10 with two digits that count."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _neighbours(plan: Plan) -> list[str]:
    if not plan.searched:
        return []
    if not plan.neighbours:
        return ["better     nothing near this layout"] if plan.fits else []
    lines = ["better    near this layout, planned:" if plan.fits else "faster    of those that fit:"]
    return lines + [f"          {_candidate(plan, c)}" for c in plan.neighbours]


def best(plan: Plan) -> list[str]:
    """The fastest of all layouts, how to have it, and what each change buys."""
    if plan.best is None:
        return ["best      this layout, of all on as many devices"] if plan.fits and plan.searched else []
    lines = [f"best      of all layouts, engines and schedules: {_candidate(plan, plan.best)}"]
    lines += [f"          {plan.flags}"]
    lines.append("          because, one change after the other:")
    return lines + [f"          {g.change}: {_figure(g.seconds)} s ({g.reason})" for g in plan.gains]


def _candidate(plan: Plan, candidate: Candidate | None) -> str:
    if candidate is None:
        return ""
    change = candidate.step.seconds / plan.step.seconds - 1
    more = (candidate.memory.total - plan.fullest.total) / 1e9
    own, other = plan.case, candidate.case
    also = [x for x, y in ((other.engine.name, own.engine.name), (other.schedule, own.schedule)) if x != y]
    also += [f"ZeRO-{other.zero_stage}"] if other.zero_stage != own.zero_stage and other.zero_stage != 3 else []
    return (
        f"{', '.join([other.label(), *also])}: {_figure(candidate.step.seconds)} s ({change:+.1%}), "
        f"{candidate.memory.total / 1e9:.1f} GB ({more:+.1f})"
    )


def explain(plan: Plan) -> str:
    """The arithmetic of an envelope for this run, formula by formula, beside what the planner found."""
    case, model, machine = plan.case, plan.case.model, plan.machine
    n, tokens = plan.parameters, plan.budget.tokens
    peak = machine.cluster.peak_tflops * 1e12
    link = machine.hardware.node_gb * 1e9
    active = active_count(model)
    rough = arithmetic.training_flops(active, tokens)
    exact = model_flops(model, case.fine_tuning, case.document) / model.seq_length * tokens
    whole = arithmetic.simple_memory(
        n, layers=model.num_layers, hidden=model.hidden_size, sequence=model.seq_length,
        batch=case.micro_batch,
    )
    bubble = arithmetic.bubble_fraction(case.pp, case.micro_batches, case.vp)
    formula = arithmetic.layer_activations(
        sequence=model.seq_length, batch=case.micro_batch, hidden=model.hidden_size, heads=model.num_attention_heads,
        tensor=case.tp, sequence_parallel=case.sequence_parallel, scores=not case.flash,
    )
    keeps = layer_bytes(case, model.num_layers - 1) if model.moe.enabled else layer_activation_bytes(case)
    days = partial(arithmetic.days, peak=peak, utilisation=plan.step.mfu, devices=case.world)
    waits = plan.step.split.bubble
    lines = [
        "arithmetic",
        f"  training FLOPs   6·N·T = 6 · {active:.4g} · {tokens:.4g} = {rough:.4g}; with attention and head "
        f"72·B·s·L·h²·(1 + s/6h + V/12Lh) a batch: {exact:.4g}",
        f"  days             FLOPs / (peak · MFU · devices) = {rough:.4g} / ({peak:.4g} · {plan.step.mfu:.3f} · "
        f"{case.world}) = {days(rough):.4g}; with attention {days(exact):.4g}",
        f"  bubble           (p − 1) / (m·v) = ({case.pp} − 1) / ({case.micro_batches}·{case.vp}) = {bubble:.2%} of "
        f"the useful time; simulated {waits / (plan.step.seconds - waits):.2%} of the rest",
        f"  activations      a layer and micro-batch, Korthikanti: {formula / 1e6:.1f} MB; kept here, recompute "
        f"{case.recompute}: {keeps / 1e6:.1f} MB; {plan.memory[0].in_flight:.4g} micro-batches in flight on stage 0",
        f"  the whole model  weights {whole.weights / 1e9:.4g} + gradients {whole.gradients / 1e9:.4g} + optimizer "
        f"{whole.optimizer / 1e9:.4g} + activations {whole.activations / 1e9:.4g} = {whole.total / 1e9:.4g} GB: "
        f"{whole.devices(plan.limit)} devices of {plan.limit / 1e9:g} GB at least",
        _rule_line(plan), _state_line(plan), *_placement(plan),
    ]
    if link:
        node, adapters = machine.cluster.gpus_per_node, machine.hardware.nics * machine.hardware.nic_gb * 1e9
        widest = arithmetic.widest_tensor_parallelism(model.hidden_size, peak=peak, link=link)
        lines.append(
            f"  tensor parallel  (2·3·h/t) / 2 bytes ≥ peak / link: t ≤ 6 · {model.hidden_size} / 2 · {link:.4g} / "
            f"{peak:.4g} (the datasheet's peak) = {widest:.1f} keeps the node's links ahead of the products (one "
            f"direction); a node has {node}: at most {min(max(int(widest), 1), node)}" + (
                f"; over the adapters, {adapters / node / 1e9:.4g} GB/s for each device, t ≤ "
                f"{arithmetic.widest_tensor_parallelism(model.hidden_size, peak=peak, link=adapters / node):.2g}"
                if adapters else ""
            )
        )
    return "\n".join([*lines, *explain_experts(plan), *explain_context(plan)])


def _placement(plan: Plan) -> list[str]:
    """The step where the job's nodes lie side by side in the network, as it is planned, and where they lie anywhere."""
    hardware, far = plan.machine.hardware, scattered(plan.machine)
    if plan.nodes <= 1 or hardware.group_taper == 1 or far == plan.machine:
        return []
    seconds = plan_step(plan.case, far).seconds
    return [
        f"  placement        nodes side by side in groups of {hardware.nodes_per_group}, as planned: "
        f"{_figure(plan.step.seconds)} s; scattered over the network's groups, whose links out carry "
        f"{hardware.group_taper:.0%} of the adapters' bandwidth: {_figure(seconds)} s "
        f"({seconds / plan.step.seconds - 1:+.1%})"
    ]


def _state_line(plan: Plan) -> str:
    """Weights, gradients and optimizer of the whole model by each convention in print, and as this run's engine has
    them."""
    case, n = plan.case, plan.parameters
    own = case.width + case.engine.gradient_bytes + 4 * (case.width != case.wide) + 4 * case.rule.state
    kinds = {
        "14 (Dash et al., arXiv 2312.12705: 6 + 4 + 4)": 14.0, "16 (ZeRO, arXiv 1910.02054: 2 + 2 + 12)": 16.0,
        f"{own:.4g} ({case.engine.name} here)": own,
    }
    said = ", ".join(f"{name}: {n * size / 1e12:.4g} TB" for name, size in kinds.items())
    return f"  its state        bytes a parameter of {n:.4g}: {said}"


def _rule_line(plan: Plan) -> str:
    """Return the line of the optimizer's state and traffic."""
    case = plan.case
    state, master = 4 * case.rule.state, 4 * (case.width != case.wide)
    fullest = max(stage.optimizer for stage in plan.memory)
    among, near = matrix_bytes(case)
    moves = f"; a rank moves {among / 1e9:.4g} GB of matrices among them and {near / 1e9:.4g} GB over tp in a step"
    return (
        f"  optimizer        {case.rule.name}: {master} (masters) + {state:.4g} bytes a parameter, "
        f"{(master + state) * plan.parameters / 1e9:.4g} GB of the whole model over pp {case.pp} · tp {case.tp} · "
        f"{case.shards} shards: {fullest / 1e9:.4g} GB on the fullest rank" + (moves if among + near else "")
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values; bytes, seconds, FLOP/s in 10^12."""
    def candidate(c: Candidate | None) -> dict[str, Any] | None:
        if c is None:
            return None
        return {**_layout(c.case), "seconds": c.step.seconds, "bytes": c.memory.total}

    step, case = plan.step, plan.case
    return {
        "name": plan.name, "cluster": plan.machine.cluster.name, "devices": case.world, "nodes": plan.nodes,
        "parameters": plan.parameters, "trained": trained_count(case.model, case.fine_tuning),
        "layout": _layout(case), "fractional": plan.fractional, "fits": plan.fits,
        "limit_bytes": plan.limit, "over_bytes": max(0.0, plan.fullest.total - plan.limit),
        "recomputed": [stage_counts(case, stage) for stage in range(case.pp)] if case.dropped else [],
        "stages": [
            {"stage": m.stage, "elements": m.elements, "total": m.total, "allocated": m.allocated, "peak_at": m.peak_at,
             "host": m.host, **m.parts()} for m in plan.memory
        ],
        "step": {
            "seconds": step.seconds, "split": step.split.parts(), "model_tflops": step.model_tflops,
            "causal_tflops": step.causal_tflops, "hardware_tflops": step.hardware_tflops, "mfu": step.mfu,
            "hfu": step.hfu, "tokens_per_second": step.tokens_per_second,
        },
        "budget": asdict(plan.budget),
        "ways": [{"set": way.change, "seconds": way.seconds, "bytes": way.memory.total} for way in plan.ways],
        "nearest": candidate(plan.nearest), "better": [candidate(c) for c in plan.neighbours],
        "best": candidate(plan.best), "flags": plan.flags,
        "gains": [{"change": g.change, "seconds": g.seconds, "saved": g.saved} for g in plan.gains],
    }


def _layout(case: Any) -> dict[str, Any]:
    keys = (
        "tp", "pp", "vp", "dp", "cp", "sequence_parallel", "recompute", "micro_batch", "micro_batches", "zero_stage",
        "schedule", "shard", "reshard", "offload", "offload_weights", "ep", "imbalance", "cp_method", "cp_order",
    )
    rule = {"rule": case.rule.name, "state_tensors": case.rule.state, "matrix_bytes": sum(matrix_bytes(case))}
    named = {"engine": case.engine.name, "split": list(case.split)}
    return {key: getattr(case, key) for key in keys} | rule | named
