"""What a plan says of ranks that share sequences."""

from __future__ import annotations

from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.tools.plan.context import context_bytes, context_group, head_bytes
from megatron_port.tools.plan.context_balance import work_imbalance
from megatron_port.tools.plan.links import Links
from megatron_port.tools.plan.verdict import Plan


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
    layer = model_spec(case.model).layers[-1]
    own, moved = head_bytes(case, layer), sum(context_bytes(case, layer).values())
    return [
        f"  keys and values  of a layer and micro-batch: {own.keys_values / 1e6:.1f} MB of a rank's own positions, "
        f"{case.cp * own.keys_values / 1e6:.1f} MB of all; by {case.cp_method} a rank hands {moved / 1e6:.1f} MB to "
        f"collectives, forward and backward",
        f"  exposed          {plan.step.split.context:.2f} s a step of {case.micro_batches} micro-batches, on the "
        f"busiest stage",
    ]
