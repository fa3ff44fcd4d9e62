"""Waits of tensor-parallel ranks for one another, in the pattern of a layer: blocks of two linear layers as the
program runs them, forward and backward, with their collectives and without, in turn.

The difference is what a collective adds to a pass after the arithmetic of every rank, its library's threads on the same
cores and all; backward beside the product of the weight's gradient.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.collectives import Group, reduce_from_tp, reduce_scatter_sequence
from megatron_port.core.layers.linear import WgradAccumulator, linear
from megatron_port.ext.kernels.providers import Providers
from megatron_port.tools.bench.passes import DTYPES
from megatron_port.tools.plan.kernel_table import Entry
from megatron_port.tools.preflight.exchange import meet, synchronize

BLOCKS = 4
"""In a row, as layers are."""
LEAST_ROUNDS = 6
GROUPS = 3


class Blocks:
    """Blocks of a rank, [rows, 1, hidden] → the same (a share of the rows under sequence parallelism)."""

    def __init__(
        self, model: ModelConfig, providers: Providers, ranks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        h, f = model.hidden_size, model.ffn_size // ranks
        self._wide, self._gated, self.activation = f * (2 if model.gated else 1), model.gated, providers
        sums: dict[int, Tensor] = {}
        accumulator = WgradAccumulator(lambda weight: None, lambda weight: sums[id(weight)])
        self.weights: list[tuple[Tensor, Tensor]] = []
        for _ in range(BLOCKS):
            pair = [
                (torch.randn(*size, device=device) * 0.02).to(dtype).requires_grad_()
                for size in ((self._wide, h), (h, f))
            ]
            for weight in pair:
                sums[id(weight)] = torch.zeros(weight.shape, device=device)
                weight.wgrad_accumulator = accumulator  # type: ignore[attr-defined]
            self.weights.append((pair[0], pair[1]))

    def __call__(self, x: Tensor, group: Group, sequence: bool) -> Tensor:
        leave = reduce_scatter_sequence if sequence else reduce_from_tp
        for first, second in self.weights:
            y = linear(x, first, group=group, sequence_parallel=sequence and group is not None)
            y = self.activation.swiglu(y) if self._gated else self.activation.bias_gelu(y, None, approximate=False)
            x = leave(linear(y, second), group)
        return x


def _pass_times(blocks: Blocks, x: Tensor, group: Group, sequence: bool) -> tuple[float, float]:
    """Seconds of a forward and a backward pass on the slowest rank, which all begin together."""
    device = x.device
    synchronize(device)
    meet()
    started = time.perf_counter()
    out = blocks(x, group, sequence)
    synchronize(device)
    middle = time.perf_counter()
    out.backward(torch.ones_like(out))
    synchronize(device)
    times = torch.tensor([middle - started, time.perf_counter() - middle], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    forward, backward = times.tolist()
    return forward, backward


def _shown(
    blocks: Blocks, rows: int, model: ModelConfig, ranks: int, sequence: bool, dtype: torch.dtype, device: torch.device,
    budget_s: float,
) -> tuple[float, float]:
    """Seconds that a block's collectives add to its forward and to its backward pass, typical of many passes."""
    group = dist.group.WORLD
    whole = torch.randn(rows, 1, model.hidden_size, device=device).to(dtype).requires_grad_()
    share = whole.detach()[: rows // ranks].clone().requires_grad_() if sequence else whole
    for x, ours in ((whole, None), (share, group)):
        _pass_times(blocks, x, ours, sequence)
    once = sum(_pass_times(blocks, share, group, sequence)) + sum(_pass_times(blocks, whole, None, sequence))
    added = []
    for _ in range(max(LEAST_ROUNDS, int(budget_s / max(once, 1e-6)))):
        without = _pass_times(blocks, whole, None, sequence)
        added.append([a - b for a, b in zip(_pass_times(blocks, share, group, sequence), without)])
    forward, backward = (_typical(column) / BLOCKS for column in zip(*added))
    return forward, backward


def _typical(values: Sequence[float]) -> float:
    """Median of the means of a few groups: a run is judged by the median of its steps, and a step is a sum of many."""
    each = len(values) // GROUPS
    groups = [values[i * each : (i + 1) * each] for i in range(GROUPS)]
    return statistics.median(map(statistics.mean, groups))


def _times(
    model: ModelConfig, providers: Providers, dtype: str, device: torch.device, ranks: int, budget_s: float
) -> Iterator[Entry]:
    kind = DTYPES[dtype]
    blocks = Blocks(model, providers, ranks, kind, device)
    for rows in (model.seq_length, 2 * model.seq_length, 4 * model.seq_length):
        size = float(rows * model.hidden_size * kind.itemsize)
        for name, sequence in (("tensor", False), ("sequence", True)):
            shown = _shown(blocks, rows, model, ranks, sequence, kind, device, budget_s)
            for way, seconds in zip(("forward", "backward"), shown):
                yield Entry(f"{name}-{way}", "", dtype, (ranks, size), size / max(seconds, 1e-7) / 1e9)


def region_entries(
    model: ModelConfig, providers: Providers, dtype: str, device: torch.device, ranks: int, budget_s: float
) -> list[Entry]:
    """Measure waits in tensor-parallel regions of ``model`` by the bytes of an activation; the ranks are one group."""
    if ranks == 1 or model.ffn_size % ranks or model.seq_length % ranks:
        return []
    return list(_times(model, providers, dtype, device, ranks, budget_s))
