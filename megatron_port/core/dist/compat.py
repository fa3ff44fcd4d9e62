"""What differs between builds of torch (2.11 to 2.13, CUDA, ROCm, CPU), by feature test."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renamed both and warns about the old names on every rank.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@functools.cache
def widening_addmm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether addmm of ``dtype`` matrices on the device can add its float32 product to a float32 matrix, in place."""
    try:
        total, a = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device, dtype=dtype)
        addmm: Any = torch.addmm
        addmm(total, a, a, out_dtype=torch.float32, out=total)
        return bool((total == 17.0).all())
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError: a CPU, or no such overload
        return False
