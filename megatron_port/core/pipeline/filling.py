"""Weight passes beside the exchanges of rows of a forward pass, where experts are divided over ranks.

A layer of experts sends each token's rows to other ranks and takes the results back. Meanwhile a rank computes products
that need nothing new: those of a weight pass (zero bubble). ``zb-h1`` puts most of its weight passes right before a
forward pass. Here such a pair changes places, and the weight pass ``fills`` the exchanges of the forward pass:

* Its products are computed while rows are on their way, in their order and in equal parts, one for each exchange; the
  rest follows in the pass's own turn, when the result of the forward pass has left. So no message leaves later than
  without it, and a pair takes F + W - min(W, exchanges of F).
* A forward pass adds to no gradient, so every sum of gradients has the same terms in the same order, bit by bit.
* The operands of its products are freed one after the other while the forward pass saves its activations, so a stage
  needs the memory of before (``tests/unit/test_plan_ranks.py``). Where a chunk has no experts, the engine computes the
  products before the forward pass.

Weight passes before an ``INPUT`` keep their place: the end of that pass is what the stage before waits for, and they
fill the gap until its gradient arrives. So does ``zb-v``, whose two chunks wait for one another in both directions: in
a simulation with F = I = W and exchanges of a quarter to all of that, pairs that change places lengthen its steps by up
to 9 % and shorten those of zb-h1 by 5 to 17 % (``tests/unit/test_pipeline_filling.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_port.core.pipeline.actions import Action, Kind


def filled(plan: Sequence[Action]) -> list[Action]:
    """Return a stage's plan in which each weight pass right before a forward pass comes after it and fills it."""
    out = list(plan)
    at = 0
    while at + 1 < len(out):
        weight, forward = out[at : at + 2]
        if weight.kind is Kind.WEIGHT and forward.kind is Kind.FORWARD:
            out[at : at + 2] = [forward, replace(weight, fills=True)]
            at += 1
        at += 1
    return out


def fillers(plan: Sequence[Action]) -> dict[Action, Action]:
    """Return, by pass, the weight pass that fills its exchanges."""
    return {host: action for host, action in zip(plan, plan[1:]) if action.fills}


def check_fills(plan: Sequence[Action]) -> None:
    """Check that each pass that fills exchanges is a weight pass right after a forward pass. Where it comes after its
    ``INPUT`` pass, its products are then known before the forward pass.

    Raises:
        ValueError: naming the pass.
    """
    for at, action in enumerate(plan):
        if action.fills and (action.kind is not Kind.WEIGHT or not at or plan[at - 1].kind is not Kind.FORWARD):
            raise ValueError(f"{action} fills no exchange: it must be a weight pass right after a forward pass")
