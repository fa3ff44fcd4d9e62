"""Tensors that all ranks of a group hold alike, of which each keeps its part for a while (ZeRO-R's P_a).

Rajbhandari et al., arXiv 1910.02054, section 6.1.
"""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

from megatron_port.core.dist.compat import all_gather_single


class PartitionedBytes:
    """This rank's part of ``whole``, flat bytes that are the same on every rank of the group."""

    def __init__(self, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._group, self._numel, ranks = group, whole.numel(), dist.get_world_size(group)
        each = -(-whole.numel() // ranks)
        start = dist.get_rank(group) * each
        self._part: torch.Tensor | None = whole.new_zeros(each)
        mine = whole[start : start + each]
        self._part[: mine.numel()] = mine

    def take(self) -> torch.Tensor:
        """Return the whole, once. Collective over the group, whose ranks ask in the same order."""
        part, self._part = self._part, None
        assert part is not None
        whole = part.new_empty(part.numel() * dist.get_world_size(self._group))
        all_gather_single(whole, part, group=self._group)
        return whole[: self._numel]


def measured_gather(device: torch.device, nbytes: int, group: dist.ProcessGroup, times: int = 3) -> float:
    """Return the seconds per byte of what the ranks of a group gather, at its fastest. Collective."""
    best = math.inf
    for _ in range(times):
        share = PartitionedBytes(torch.zeros(nbytes, dtype=torch.uint8, device=device), group)
        started = time.perf_counter()
        share.take()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best / nbytes
