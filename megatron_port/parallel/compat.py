"""Names that differ between torch 2.11 and 2.13, by feature test."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# torch 2.13 renamed both and warns about the old names on every rank.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
