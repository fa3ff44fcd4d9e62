"""Which layers each stage holds."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_port.errors import ConfigError


def balanced_layers(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Transformer layers on each stage so that the costliest stage is as cheap as can be.

    ``costs``: of [embedding, layer 0, …, layer L-1, head]; the embedding stays
    on the first stage and the head on the last. Every stage gets at least one
    layer. Among equal optima later stages are the smaller ones, as they hold
    fewer micro-batches in flight but the head's logits.

    Raises:
        ConfigError: fewer layers than stages.
    """
    layers = list(costs[1:-1])
    count = len(layers)
    if count < stages:
        raise ConfigError(
            f"num_layers {count} is less than pipeline_parallel_size {stages}: each stage needs a layer; "
            f"use pipeline_parallel_size {count} or fewer"
        )
    prefix = [0.0]
    for c in layers:
        prefix.append(prefix[-1] + c)

    def cost(stage: int, start: int, stop: int) -> float:
        extra = (costs[0] if stage == 0 else 0.0) + (costs[-1] if stage == stages - 1 else 0.0)
        return prefix[stop] - prefix[start] + extra

    # best[k][i]: least possible maximum over stages k… holding layers i…; and where stage k ends.
    infinity = float("inf")
    best = [[infinity] * (count + 1) for _ in range(stages + 1)]
    ends = [[0] * (count + 1) for _ in range(stages)]
    best[stages][count] = 0.0
    for k in range(stages - 1, -1, -1):
        remaining = stages - k - 1
        for i in range(count):
            for j in range(count - remaining, i, -1):
                value = max(cost(k, i, j), best[k + 1][j])
                if value < best[k][i]:
                    best[k][i], ends[k][i] = value, j
    split, at = [], 0
    for k in range(stages):
        split.append(ends[k][at] - at)
        at = ends[k][at]
    return tuple(split)
