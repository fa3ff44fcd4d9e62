"""Values that few bits can say: the grid on which weights compute while they are trained for it.

A group is ``group_size`` neighbours along the inputs of a row of the logical matrix, and has one scale, in float32. For
b bits the scale is the smallest at which nothing lies beyond [-2^(b-1), 2^(b-1) - 1]: torchao's
``SYMMETRIC_NO_CLIPPING_ERR``, so that post-training quantisation of what was trained gives the weights that it was
trained with. As nothing is clipped, the straight-through gradient (Bengio et al., arXiv 1308.3432) is the identity.
"""

from __future__ import annotations

import torch

BITS = {"int8": 8, "int4": 4}


def on_grid(weight: torch.Tensor, kind: str, group_size: int) -> torch.Tensor:
    """Return a matrix [rows, inputs] with each element at the nearest value that ``kind`` can say, in its dtype.

    ``kind``: int8 | int4 | binary. ``group_size`` divides the inputs.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    groups = weight.detach().to(wide).unflatten(-1, (-1, group_size))
    if kind == "binary":
        size = groups.abs().mean(dim=-1, keepdim=True)
        found = torch.where(groups < 0, -size, size)
    else:
        most = 1 << BITS[kind] - 1
        low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
        scale = torch.maximum(low / -most, high / (most - 1)).clamp_(min=torch.finfo(wide).tiny)
        found = (groups * (1.0 / scale)).round_().clamp_(-most, most - 1).mul_(scale)
    return found.flatten(-2).to(weight.dtype)
