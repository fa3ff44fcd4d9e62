"""Initial weights as a function of (seed, canonical name, global element position).

Every layout evaluates the same function on its own slice of the logical tensor,
so weights are equal to the bit whatever the layout; padding is never drawn.
Temporaries stay under 256 MB however large the slice is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from megatron_port.core.dist.counter import key_of, normal_from_uniform, random_bits, uniform
from megatron_port.core.dist.record import InitSpec, ParameterRecord

_CHUNK = 1 << 20
"""Elements drawn at once; about 12 float64/int64 temporaries are alive, 100 MB."""


def _global_index(
    start: int,
    stop: int,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    extent: tuple[int, ...],
    device: torch.device,
) -> torch.Tensor:
    """Row-major positions in the global tensor of elements [start, stop) of the flattened box."""
    flat = torch.arange(start, stop, dtype=torch.int64, device=device)
    # Leading dimensions that the box covers whole, or trailing ones equal to the tensor's, need no unravelling.
    if extent[1:] == shape[1:]:
        row = 1
        for n in shape[1:]:
            row *= n
        return flat + offset[0] * row if shape else flat
    index = torch.zeros_like(flat)
    stride = 1
    for d in range(len(shape) - 1, -1, -1):
        digit = flat % extent[d]
        flat = flat // extent[d]
        index += (digit + offset[d]) * stride
        stride *= shape[d]
    return index


def initial_values(
    *,
    seed: int,
    name: str,
    init: InitSpec,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    extent: tuple[int, ...],
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return the initial fp32 values of a slice (``offset``, ``extent``) of parameter ``name`` of logical ``shape``."""
    device = torch.device(device)
    if init.kind == "zeros":
        return torch.zeros(extent, device=device)
    if init.kind == "ones":
        return torch.ones(extent, device=device)
    if init.kind not in ("normal", "uniform"):
        raise ValueError(f"{name}: unknown initialisation {init.kind!r}")
    out = torch.empty(extent, device=device)
    flat = out.view(-1)
    key, key2 = key_of("weight", seed, name), key_of("weight2", seed, name)
    for start in range(0, flat.numel(), _CHUNK):
        stop = min(start + _CHUNK, flat.numel())
        position = _global_index(start, stop, shape, offset, extent, device)
        value = uniform(random_bits(position, key, key2))
        value = normal_from_uniform(value) if init.kind == "normal" else value.sub_(0.5).mul_(math.sqrt(12.0))
        flat[start:stop] = value.mul_(init.std)
    return out


def initial_reader(
    records: dict[str, ParameterRecord], seed: int, device: torch.device | str = "cpu"
) -> Callable[..., torch.Tensor]:
    """A ``StateReader`` that serves initial weights and buffers, and zero optimizer state: a fresh start is a load like
    any other."""

    def read(
        name: str, kind: str, offset: tuple[int, ...], extent: tuple[int, ...], /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        record = records[name]
        init = record.init if kind == record.kind else InitSpec("zeros")
        return initial_values(
            seed=seed, name=name, init=init, shape=record.shape, offset=offset, extent=extent, device=device
        )

    return read
