"""Hashes of state by the own kernel, where a run has own kernels."""

from __future__ import annotations

import torch

from megatron_port.core.config.schema import BackendConfig
from megatron_port.core.dist.row_hashes import ROW, RowHashes, row_factors
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.ops.hashes import row_hashes_


class OwnRowHashes(RowHashes):
    """The same hashes, to the bit, in one launch a tensor and without widened words."""

    def __init__(self, device: torch.device) -> None:
        self.factors = row_factors(device)

    @torch.no_grad()
    def of_words(self, words: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the hashes of rows of :meth:`words`."""
        if out is None:
            out = torch.empty(-(-words.numel() // ROW), dtype=torch.int64, device=words.device)
        row_hashes_(out, words, self.factors)
        return out


def row_hashes_of(config: BackendConfig, device: torch.device) -> RowHashes:
    """Return the own kernel's hashes for tensors of a device or, where own kernels are off or not built, torch's."""
    kind = "cpu" if device.type == "cpu" else "rocm" if torch.version.hip else "cuda"
    if config.own_kernels == "off" or kernels.kernels_status(kind)[1]:
        return RowHashes(device)
    kernels.load(kind)
    return OwnRowHashes(device)
