"""What a plan says of layers of experts."""

from __future__ import annotations

from dataclasses import replace

from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.moe_spec import MoESpec, moe_of
from megatron_port.tools.plan.experts import exchange_seconds, group_of, routed
from megatron_port.tools.plan.links import Links
from megatron_port.tools.plan.memory import held_bytes
from megatron_port.tools.plan.step import plan_step
from megatron_port.tools.plan.verdict import Plan


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
