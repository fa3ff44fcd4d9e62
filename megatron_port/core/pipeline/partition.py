"""Partition of the layers over the stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from megatron_port.core.errors import ConfigError


def balanced_layers(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the number of transformer layers per stage that makes the costliest stage as cheap as possible.

    ``costs``: of [embedding, layer 0, …, layer L-1, head]; the embedding stays
    on the first stage and the head on the last. Every stage gets at least one
    layer. Among equal optima the most even split is taken (least sum of squared
    costs, then the smaller stages last): a heavy head alone sets the maximum, and
    raising the others to that maximum would cost memory and save no time.

    Raises:
        ConfigError: fewer layers than stages.
    """
    count = len(costs) - 2
    if count < stages:
        raise ConfigError(
            f"num_layers {count} is less than pipeline_parallel_size {stages}: each stage needs a layer; "
            f"use pipeline_parallel_size {count} or fewer"
        )
    if stages == 1:
        return (count,)
    whole = float(costs[1]).is_integer() and float(costs[-1]).is_integer()
    if whole and costs[0] == 0 and len(set(costs[1:-1])) == 1:
        return _split_equal_layers(count, round(costs[1]), round(costs[-1]), stages)
    return search_split(costs, stages)


@lru_cache(maxsize=4096)
def _split_equal_layers(count: int, layer: int, head: int, stages: int) -> tuple[int, ...]:
    """Split layers of equal cost, with a free embedding, by a search over the number of layers on the last stage.

    The other stages get an even share of the rest, the larger first.
    """
    best: tuple[tuple[int, int], tuple[int, ...]] | None = None
    for last in range(1, count - stages + 2):
        each, extra = divmod(count - last, stages - 1)
        most = max((each + (extra > 0)) * layer, last * layer + head)
        squares = extra * ((each + 1) * layer) ** 2 + (stages - 1 - extra) * (each * layer) ** 2
        key = (most, squares + (last * layer + head) ** 2)
        if best is None or key < best[0]:
            best = key, (*(each + (i < extra) for i in range(stages - 1)), last)
    assert best is not None
    return best[1]


def search_split(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Solve :func:`balanced_layers` for units of any cost by dynamic programming over stages and layers."""
    layers = list(costs[1:-1])
    count = len(layers)
    prefix = [0.0]
    for c in layers:
        prefix.append(prefix[-1] + c)

    def cost(stage: int, start: int, stop: int) -> float:
        extra = (costs[0] if stage == 0 else 0.0) + (costs[-1] if stage == stages - 1 else 0.0)
        return prefix[stop] - prefix[start] + extra

    # best[k][i]: least possible maximum (then: sum of squares) over stages k… holding layers i…; and where k ends.
    limit = infinity = float("inf")
    for even in (False, True):
        best: list[list[float]] = [[infinity] * (count + 1) for _ in range(stages + 1)]
        ends = [[0] * (count + 1) for _ in range(stages)]
        best[stages][count] = 0
        for k in range(stages - 1, -1, -1):
            for i in range(count):
                for j in range(count - (stages - k - 1), i, -1):
                    one, rest = cost(k, i, j), best[k + 1][j]
                    # Whole numbers: the squares of FLOP counts stay exact, so equal sums are equal.
                    value = round(one) ** 2 + rest if even else max(one, rest)
                    if one <= limit and value < best[k][i]:
                        best[k][i], ends[k][i] = value, j
        limit = best[0][0]
    split, at = [], 0
    for k in range(stages):
        split.append(ends[k][at] - at)
        at = ends[k][at]
    return tuple(split)
