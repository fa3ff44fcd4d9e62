"""A plan as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from megatron_port.core.model.flops import active_count, attention_counted, counted, model_flops, trained_count
from megatron_port.tools.plan import arithmetic
from megatron_port.tools.plan.activation_plan import describe, stage_counts
from megatron_port.tools.plan.activations import layer_activation_bytes
from megatron_port.tools.plan.chunk import layer_bytes
from megatron_port.tools.plan.context_text import context_lines, explain_context
from megatron_port.tools.plan.expert_text import expert_lines, explain_experts
from megatron_port.tools.plan.links import scattered
from megatron_port.tools.plan.offload import offloaded
from megatron_port.tools.plan.rule_seconds import matrix_bytes
from megatron_port.tools.plan.search import Candidate
from megatron_port.tools.plan.starved import starved_pipeline
from megatron_port.tools.plan.step import plan_step
from megatron_port.tools.plan.verdict import Plan


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
