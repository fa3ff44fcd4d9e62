"""Importance of a tuning's free parameters: the share of the rates' variance that each explains by itself.

Omega squared of a one-way analysis of variance (Hays 1963): between the values of a parameter, less what chance would
give, over all. Trials that failed or ran out of memory count with a rate of 0, as the tuner was told (arXiv 2312.12705,
section IV): a choice that makes half of the layouts fail is the one that matters most.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

LEAST_TRIALS = 8
"""Fewer say nothing."""


def importance(rows: Sequence[tuple[Mapping[str, Hashable], float]]) -> dict[str, float]:
    """Return parameter → share of the variance of the rates, largest first.

    ``rows``: (parameters, rate, 0 where there is none) of each trial. Parameters of one value are left out, and those
    with a value for nearly every trial: their groups have no spread to compare with.
    """
    rates = [rate for _, rate in rows]
    if len(rows) < LEAST_TRIALS or len(set(rates)) == 1:
        return {}
    middle = statistics.fmean(rates)
    total = sum((rate - middle) ** 2 for rate in rates)
    out = {}
    for name in rows[0][0]:
        groups: dict[Hashable, list[float]] = defaultdict(list)
        for parameters, rate in rows:
            groups[parameters[name]].append(rate)
        inside = len(rows) - len(groups)  # degrees of freedom
        if len(groups) == 1 or 2 * len(groups) > len(rows):
            continue
        between = sum(len(group) * (statistics.fmean(group) - middle) ** 2 for group in groups.values())
        noise = (total - between) / inside
        out[name] = max(0.0, (between - (len(groups) - 1) * noise) / (total + noise))
    return dict(sorted(out.items(), key=lambda item: -item[1]))


def importance_line(rows: Sequence[tuple[Mapping[str, Hashable], float]]) -> str:
    """Return the shares in one line; empty where too few trials say anything."""
    found = importance(rows)
    shares = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in found.items())
    return f"rates' variance by each choice alone ({len(rows)} trials, failures as 0): {shares}" if found else ""
