"""One record for a parameter: the single source of what it is and how it is split.

Initialisation, gradient reduction, grad norm, ZeRO ownership, checkpoints, the
Hugging Face mapping and replica checks all read this record and decide nothing
themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class InitSpec:
    """How a parameter starts: ``normal`` (mean 0, ``std``), ``zeros`` or ``ones``."""

    kind: str
    std: float = 0.0


@dataclass(frozen=True)
class ParameterRecord:
    """What is known of a parameter on this rank.

    ``shape`` is the logical, unsplit, unpadded shape. The rank's tensor has shape
    ``local_shape``; its first ``extent[d]`` elements along each dimension are the
    logical elements from ``offset[d]`` on, whatever lies behind is padding (rows
    of a padded vocabulary) and is zero.
    """

    name: str
    """Canonical name, e.g. ``layers.17.attention.qkv.weight``."""
    shape: tuple[int, ...]
    """Logical global shape."""
    local_shape: tuple[int, ...]
    """Shape of this rank's tensor, padding included."""
    offset: tuple[int, ...]
    """First logical element of this rank's slice, by dimension."""
    extent: tuple[int, ...]
    """Logical elements of this rank's slice, by dimension (may be 0)."""
    split_dim: int | None
    """Dimension that is split over tp; None: replicated on all tp ranks."""
    init: InitSpec
    decay: bool
    """Weight decay applies."""
    partial_grad_over_tp: bool = False
    """Each tp rank holds only part of the gradient (its piece of the sequence); sum over tp before use."""
    tp_copies: int = 1
    """Neighbouring tp ranks that hold this very slice (key/value heads, where there are fewer than tp ranks). Each has
    only its query heads' part of the gradient; sum over them before use."""
    tied_key: str | None = None
    """Copies with the same key (and name) on several stages are one parameter."""
    tied_primary: bool = True
    """Whether this is the tied copy that is counted in norms and saved."""

    @property
    def is_split(self) -> bool:
        """True where tp ranks hold different slices."""
        return self.split_dim is not None

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """Name and offset: what tells a rank's parameters apart. Of a split name it may hold two slices."""
        return self.name, self.offset

    @property
    def numel(self) -> int:
        """Logical elements of the whole parameter."""
        n = 1
        for d in self.shape:
            n *= d
        return n

    def local_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The logical part of a tensor of ``local_shape``: padding cut off. A view."""
        for d, n in enumerate(self.extent):
            if n != tensor.shape[d]:
                tensor = tensor.narrow(d, 0, n)
        return tensor

    def box(self) -> tuple[slice, ...]:
        """This rank's slice of the logical tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.extent))


def split_record(
    name: str,
    shape: tuple[int, ...],
    *,
    init: InitSpec,
    decay: bool,
    split_dim: int | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    padded: int = 0,
    **extra: object,
) -> ParameterRecord:
    """The record of a parameter cut into ``tp_size`` equal slices along ``split_dim``.

    ``padded``: size of ``split_dim`` after padding (0: no padding); it must divide by tp_size.
    Raises ValueError if it does not (the configuration was not checked).
    """
    if split_dim is None or (tp_size == 1 and not padded):
        record = ParameterRecord(
            name, shape, shape, (0,) * len(shape), shape,
            split_dim, init, decay,
        )
        return replace(record, **extra)  # type: ignore[arg-type]
    total = padded or shape[split_dim]
    if total % tp_size:
        raise ValueError(f"{name}: dimension {split_dim} has {total} elements, not divisible by tp {tp_size}")
    per_rank = total // tp_size
    start = min(tp_rank * per_rank, shape[split_dim])
    stop = min(start + per_rank, shape[split_dim])
    local, offset, extent = list(shape), [0] * len(shape), list(shape)
    local[split_dim], offset[split_dim], extent[split_dim] = per_rank, start, stop - start
    record = ParameterRecord(
        name, shape, tuple(local), tuple(offset), tuple(extent), split_dim, init, decay
    )
    return replace(record, **extra)  # type: ignore[arg-type]


def record_of(parameter: torch.Tensor) -> ParameterRecord:
    """The record attached to a parameter; AttributeError names what lacks one."""
    record = getattr(parameter, "record", None)
    if record is None:
        raise AttributeError(f"a parameter of shape {tuple(parameter.shape)} has no ParameterRecord")
    return record


def attach(parameter: torch.nn.Parameter, record: ParameterRecord) -> torch.nn.Parameter:
    """Put ``record`` on ``parameter`` (as ``.record``) and return it."""
    if tuple(parameter.shape) != record.local_shape:
        raise ValueError(f"{record.name}: tensor {tuple(parameter.shape)}, record {record.local_shape}")
    parameter.record = record  # type: ignore[attr-defined]
    return parameter
