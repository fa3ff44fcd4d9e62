"""Seconds and bytes of an optimizer rule's products and collectives in one rank's step."""

from __future__ import annotations

from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.links import Links, span
from megatron_port.tools.plan.rates import Rates

ROUNDS = 3
"""All-reduces of sums in a step, of rows and columns at most."""


def matrix_bytes(case: Case) -> tuple[float, float]:
    """Return the bytes that a rank sends in a step to bring matrices together and take them apart again: among ranks
    that divide state, and among tensor-parallel ones. Its share stays where it is owned."""
    width = 2 if case.width == 2 else case.wide
    held = 2.0 * case.rule.matrices / (case.pp * case.tp * case.shards) * width
    return held * (case.shards - 1) / case.shards, held * (case.tp - 1) / case.tp


def rule_seconds(case: Case, rates: Rates, links: Links) -> float:
    """Return the seconds of a step that the rule takes beyond the memory's: products, and what it moves."""
    if not (case.rule.products or case.rule.sums):
        return 0.0
    group, near = span(links.machine, case.shards, case.tp), span(links.machine, case.tp, 1)
    ranks = case.pp * case.tp * case.shards
    width = 2 if case.width == 2 else case.wide
    held = case.rule.matrices / ranks * width
    moved = 2 * (links.all_to_all(held, group) + links.all_to_all(held, near))
    sums = case.rule.sums / (case.pp * case.tp) * case.wide
    added = ROUNDS * (links.collective(sums, group) + links.collective(sums, near)) if sums else 0.0
    speed = rates.matmul if case.width == 2 else (rates.fp32 or rates.matmul / 4)
    return case.rule.products / ranks / speed + moved + added
