"""Small tensors from the host to the device, without making the host wait."""

from __future__ import annotations

import torch


def to_device_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``; where that is no GPU, a plain copy, or itself.

    A copy from ordinary memory waits for all that the GPU has been given before. From page-locked memory it only joins
    the queue; torch keeps those blocks for later calls, and gives none out again before its copy has ended.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
