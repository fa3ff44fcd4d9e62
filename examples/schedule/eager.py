"""A pipeline schedule from outside the package: eager 1F1B (Zhuang et al., arXiv 2211.05322).

1F1B runs p - s - 1 forward passes ahead on stage s of p; the eager variant runs twice as many. A stage then computes
the next micro-batch while an activation is on its way, at the price of holding up to 2 (p - s) - 1 micro-batches.

A schedule says only what a stage computes and in which order: sends and receives follow from it. The package checks the
lists before they run: every pass once, in an order that can be, and no messages that wait for one another.
"""

from megatron_port.core.pipeline.schedules import Action, Kind
from megatron_port.core.registry import SCHEDULES


def eager_1f1b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Return the passes of one stage, in order."""
    forwards = [Action(Kind.FORWARD, m) for m in range(micro_batches)]
    backwards = [Action(Kind.BACKWARD, m) for m in range(micro_batches)]
    ahead = min(2 * (stages - stage - 1), micro_batches)
    plan = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        plan += [forward, backward]
    return plan + backwards[micro_batches - ahead :]


SCHEDULES.add("eager-1f1b", eager_1f1b)
