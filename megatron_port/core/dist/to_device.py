"""Copies of small tensors from the host to the device that do not block the host."""

from __future__ import annotations

import torch


def to_device_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device`` without blocking the host; off the GPU a plain copy, or the tensor itself.

    A copy from pageable memory waits for all work queued on the GPU. From page-locked memory it only joins
    the queue; torch keeps those blocks for later calls, and gives none out again before its copy has ended.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
