"""Documents of a micro-batch as kernels of variable lengths take them."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_port.core.dist.collectives import to_device_async
from megatron_port.core.dist.positions import Positions
from megatron_port.core.layers.attention import PackedDocuments, PackedKeys


def pack_documents(starts: torch.Tensor, device: torch.device, queries: Positions | None = None) -> PackedDocuments:
    """Return the documents of ``starts`` (int32 [batch, seq], on the host) as kernels of variable lengths take them.

    ``queries``: of some positions, each run of which is cut where documents start; the keys of such a piece are those
    of its document up to its own last position.
    """
    index = torch.arange(starts.shape[1]) if queries is None else queries.index(starts.device)
    low, (batch, count) = starts[:, index].to(torch.int64), (starts.shape[0], len(index))
    begins = low == index
    begins[:, [0] if queries is None else queries.first_rows] = True
    first = begins.flatten().nonzero().flatten()
    offsets = torch.cat((first, first.new_tensor([batch * count])))
    packed = PackedDocuments(_offsets(offsets, device), int(offsets.diff().max()))
    if queries is None:
        return packed
    since = low.flatten()[first]
    lengths = index.expand(batch, count).flatten()[offsets[1:] - 1] + 1 - since
    bounds = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    rows = torch.arange(int(bounds[-1])) + (first // count * starts.shape[1] + since - bounds[:-1]).repeat_interleave(
        lengths
    )
    keys = PackedKeys(to_device_async(rows, device), _offsets(bounds, device), int(lengths.max()))
    return replace(packed, keys=keys)


def _offsets(bounds: torch.Tensor, device: torch.device) -> torch.Tensor:
    return to_device_async(bounds.to(torch.int32), device)
