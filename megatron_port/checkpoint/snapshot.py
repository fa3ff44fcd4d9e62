"""A copy of this rank's state in host memory, laid out as the file that it will become."""

from __future__ import annotations

import numpy as np
import torch

from megatron_port.checkpoint.shard import ShardPlan
from megatron_port.errors import CheckpointError


class HostBuffer:
    """Host memory for one snapshot; kept and used again, so that only the first save pays for fresh pages.

    Bounded: there is one, of the size of this rank's largest snapshot. Pinned where the state is on a GPU.
    """

    def __init__(self) -> None:
        self._data: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._data is None else self._data.numel()

    def take(self, plan: ShardPlan) -> memoryview:
        """Copy the data of ``plan`` (not its header), in the order of the file; complete on return.

        The result is valid until the next call.

        Raises:
            CheckpointError: not so much host memory (bytes are named).
        """
        size = plan.data_bytes
        devices = {p.tensor.device for p in plan.pieces if p.tensor.is_cuda}
        if size > self.nbytes:
            self._data = None  # first let go, so that two never exist
            try:
                self._data = torch.empty(size, dtype=torch.uint8, pin_memory=bool(devices))
            except (MemoryError, RuntimeError) as error:
                raise CheckpointError(
                    f"no {size} bytes of {'pinned ' if devices else ''}host memory for a snapshot of this rank's state "
                    f"({str(error).splitlines()[0]}); set checkpoint.asynchronous = false, which needs none"
                ) from error
        if not size or self._data is None:
            return memoryview(b"")
        for piece, (start, stop) in zip(plan.pieces, plan.spans):
            _copy(self._data[start:stop], piece.tensor.detach())
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return self._data[:size].numpy().data


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """``source``'s elements into as many bytes of host memory."""
    if source.device.type == "cpu" and source.is_contiguous():
        flat = source.as_strided(source.shape, (1,)).view(torch.uint8)
        # numpy's copy is the C library's memcpy, whose streaming stores beat torch's loop on large blocks.
        np.copyto(target.numpy(), flat.numpy())
    else:
        target.view(source.dtype).copy_(source, non_blocking=True)
