"""State of a model that no gradient changes, recorded like a parameter: a router's balance bias, a running statistic.

A buffer is float32 in every run, whatever the weights are. It is saved with the training state, loaded with the
weights, and never cast or reduced; keeping the copies of several ranks equal is up to the module that changes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.dist.state import BUFFER


class Buffered(nn.Module):
    """Module whose buffers stay as they are when it is cast."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        buffers = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._buffers.update(buffers)
        return self


def add_buffer(module: nn.Module, name: str, record: ParameterRecord, device: torch.device) -> torch.Tensor:
    """Register a buffer of ``record.local_shape`` as ``module.<name>``, zero until state is loaded; return it."""
    buffer = torch.zeros(record.local_shape, dtype=torch.float32, device=device)
    buffer.record = replace(record, kind=BUFFER, decay=False)  # type: ignore[attr-defined]
    module.register_buffer(name, buffer, persistent=False)
    return buffer


def recorded_buffers(module: nn.Module, *, below: bool = True) -> list[tuple[ParameterRecord, torch.Tensor]]:
    """Return (record, buffer) for every buffer of ``module``, and of those below it.

    Raises:
        ValueError: one has no record, as after ``module.to(dtype)``, or is not float32.
    """
    out = []
    for name, buffer in module.named_buffers(recurse=below):
        record = getattr(buffer, "record", None)
        if record is None or buffer.dtype != torch.float32:
            kind = str(buffer.dtype).removeprefix("torch.")
            raise ValueError(
                f"buffer {name} is {kind} and {'has no record' if record is None else 'was cast'}: buffers are made by "
                "parallel.buffers.add_buffer, stay float32, and a module that has one is not cast or copied"
            )
        out.append((record, buffer))
    return out
