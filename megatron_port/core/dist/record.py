"""Records of parameters: identity, logical shape and placement on the mesh, as DTensor's spec has them.

Initialisation, gradient reduction, grad norm, ZeRO ownership, checkpoints, the Hugging Face mapping and replica checks
read a parameter's record and decide nothing themselves.

Two independent facts are stated. **Shards** say which ranks hold which part of the values. **partial_over** says along
which axes each rank's gradient is only a part of the sum. Ranks along any other axis hold copies that compute the same
gradient, so nothing is summed over it, and one of them owns the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_port.core.dist.counter import key_of, normal_from_uniform, random_bits, uniform
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS, Mesh, MeshDims
from megatron_port.core.registry import PARTS

# Slices of a run's state by canonical name: what engines yield, and the readers that they load it from.

WEIGHT = "weight"
"""Kind of a parameter itself: its fp32 master where the weights are narrower."""
BUFFER = "buffer"
"""Kind of state of the model that no gradient changes (a router's balance bias): fp32 in every run, never cast."""


@dataclass(frozen=True)
class StatePiece:
    """A contiguous range of one tensor of the training state that this rank owns.

    The box (``offset``, ``shape``) is a slice of the parameter's logical global
    tensor; ``tensor`` is the 1-D range that starts at ``flat_start`` of the
    row-major flattening of that box. ``kind``: ``WEIGHT``, ``BUFFER``, or a kind of
    state that the optimizer rule gives the parameter (``exp_avg``).
    """

    name: str
    kind: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat_start: int
    tensor: torch.Tensor


class StateReader(Protocol):
    """Source of an engine's state: a checkpoint, an initialisation, a folder of another system."""

    def __call__(
        self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the slice ``offset + shape`` of a tensor, as a tensor of that shape.

        ``out`` is memory that the reader may use: if it does, it puts the slice there and returns ``out`` itself, which
        saves a copy; otherwise it leaves ``out`` alone and returns a tensor of its own. After an error the content of
        ``out`` is undefined.
        """


@dataclass(frozen=True)
class InitSpec:
    """Initial values of a parameter: ``normal`` or ``uniform`` (mean 0, ``std``), ``zeros``, ``ones``, ``row norms``,
    which are not drawn (``weights.adapters``), or of another distribution (a part ``initial …``)."""

    kind: str
    std: float = 0.0


@dataclass(frozen=True)
class Shard:
    """Dimension ``dim`` is split over the group of ``axes``: in equal runs, unless the layer states its own."""

    dim: int
    axes: tuple[str, ...]


SEQUENCE = (*REPLICAS, "tp")
"""Axes along which gradients are partial where sequence parallelism gives each tp rank its own tokens."""


@dataclass(frozen=True)
class ParameterRecord:
    """Identity, logical shape and placement of a parameter on this rank.

    ``shape`` is the logical, unsplit, unpadded shape. The rank's tensor has shape
    ``local_shape``; its first ``extent[d]`` elements along each dimension are the
    logical elements from ``offset[d]`` on; the rest is padding (rows
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
    shards: tuple[Shard, ...]
    """Splits of the values, applied in this order; along all other axes of a stage ranks hold copies."""
    init: InitSpec
    decay: bool
    """Weight decay applies."""
    lr_factor: float = field(default=1.0, kw_only=True)
    """Factor on the learning rate (``optim.rules``)."""
    weight_decay: float | None = field(default=None, kw_only=True)
    """Weight decay of its own; None: the optimizer's where ``decay``."""
    partial_over: tuple[str, ...] = REPLICAS
    """Axes along which each rank's gradient is only its part of the sum: its samples' and positions', and with
    ``kv_copies`` its query heads'."""
    tied_key: str | None = None
    """Copies with the same key (and name) on several stages are one parameter."""
    tied_primary: bool = True
    """Whether this is the one of the tied copies that is counted in norms and saved."""
    trainable: bool = True
    """Whether updates change it. A frozen parameter has no gradient, no master and no state, and is not saved."""
    row_runs: tuple[int, ...] = ()
    """Rows of each matrix in turn, where one packs several: a pattern that repeats (queries, key and value of each
    key/value group)."""
    kind: str = WEIGHT
    """``WEIGHT``, or ``BUFFER``: state that no gradient changes, float32 in every run (``dist.collectives``)."""

    # -- on the mesh -------------------------------------------------------------------------------------------------

    def sharded_over(self, mesh: Mesh) -> MeshDims:
        """Mesh dimensions along which ranks hold different values."""
        return mesh.dims(*(axis for shard in self.shards for axis in shard.axes))

    def replicated_over(self, mesh: Mesh) -> MeshDims:
        """Mesh dimensions along which ranks of a stage hold copies, which a replica check compares."""
        return mesh.stage - self.sharded_over(mesh)

    def reduces_over(self, mesh: Mesh) -> MeshDims:
        """Mesh dimensions along which gradients are summed.

        The ranks that share a parameter exchange tokens or activations within the layer, so the gradient of each is
        whole for its slice; it is summed only over copies.
        """
        return mesh.dims(*self.partial_over) & self.replicated_over(mesh)

    def sums_query_heads(self, mesh: Mesh) -> bool:
        """Return whether the gradient is a sum over ranks that hold the same key/value heads.

        Engine deepspeed reduces them apart from others that are summed over the same ranks: with three ranks and more a
        ring rounds an element by its place in the buffer.
        """
        return "kv_copies" in self.partial_over and bool(mesh.dims("kv_copies"))

    def is_owned(self, mesh: Mesh, rank: int, *, zero_dims: MeshDims = frozenset()) -> bool:
        """Return whether this rank's copy is the one that is saved, hashed and counted in the norm.

        ``zero_dims``: mesh dimensions along which ZeRO divides optimizer state; each rank along them owns its shard.
        """
        return self.tied_primary and mesh.index(rank, self.replicated_over(mesh) - zero_dims) == 0

    @property
    def split_dim(self) -> int | None:
        """Dimension that is split over tensor-parallel ranks; None: whole on each of them."""
        return next((shard.dim for shard in self.shards if set(shard.axes) & {"tp", "kv_heads"}), None)

    # -- elements ----------------------------------------------------------------------------------------------------

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """Name and offset: unique on a rank, which may hold two slices of one name."""
        return self.name, self.offset

    @property
    def numel(self) -> int:
        """Logical elements of the whole parameter."""
        n = 1
        for d in self.shape:
            n *= d
        return n

    def local_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the logical part of a tensor of ``local_shape``, without padding. A view."""
        for d, n in enumerate(self.extent):
            if n != tensor.shape[d]:
                tensor = tensor.narrow(d, 0, n)
        return tensor

    def box(self) -> tuple[slice, ...]:
        """Return this rank's slice of the logical tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.extent))


def make_record(
    name: str, shape: tuple[int, ...], ctx: ParallelContext, *, init: InitSpec, decay: bool,
    shards: Sequence[Shard] = (), padded: int = 0, partial_over: tuple[str, ...] = REPLICAS,
    tied_key: str | None = None, tied_primary: bool = True, row_runs: tuple[int, ...] = (),
) -> ParameterRecord:
    """Return the record of this rank's slice of a parameter whose ``shards`` are equal runs.

    Args:
        shards: in the order of cutting; a second one of the same dimension cuts the runs of the first.
        padded: size of the first shard's dimension after padding (0: no padding).

    Raises:
        ValueError: a dimension does not divide by its ranks (the configuration was not checked).
    """
    mesh, local, offset = ctx.mesh, list(shape), [0] * len(shape)
    for number, shard in enumerate(shards):
        over = mesh.dims(*shard.axes)
        ranks, total = mesh.size(over), local[shard.dim]
        if number == 0 and padded:
            total = padded
        if total % ranks:
            raise ValueError(
                f"{name}: dimension {shard.dim} has {total} elements, not divisible by {' × '.join(shard.axes)} {ranks}"
            )
        local[shard.dim] = total // ranks
        offset[shard.dim] += mesh.index(ctx.rank, over) * local[shard.dim]
    start = tuple(min(o, n) for o, n in zip(offset, shape))
    stop = (min(o + n, whole) for o, n, whole in zip(offset, local, shape))
    return ParameterRecord(
        name, shape, tuple(local), start, tuple(b - a for a, b in zip(start, stop)), tuple(shards), init, decay,
        partial_over=partial_over, tied_key=tied_key, tied_primary=tied_primary, row_runs=row_runs,
    )


def record_of(parameter: torch.Tensor) -> ParameterRecord:
    """Return the record of a parameter. Raises AttributeError where it has none."""
    record: ParameterRecord | None = getattr(parameter, "record", None)
    if record is None:
        raise AttributeError(f"a parameter of shape {tuple(parameter.shape)} has no ParameterRecord")
    return record


def attach(parameter: torch.nn.Parameter, record: ParameterRecord) -> torch.nn.Parameter:
    """Put ``record`` on ``parameter`` (as ``.record``) and return it."""
    if tuple(parameter.shape) != record.local_shape:
        raise ValueError(f"{record.name}: tensor {tuple(parameter.shape)}, record {record.local_shape}")
    parameter.record = record  # type: ignore[attr-defined]
    return parameter


# Initial weights as a function of (seed, canonical name, global element position).
#
# Every layout evaluates the same function on its own slice of the logical tensor,
# so weights are equal to the bit whatever the layout; padding is never drawn.
# Temporaries stay under 256 MB however large the slice is.

_CHUNK = 1 << 20
"""Elements drawn at once; about 12 float64/int64 temporaries are alive, 100 MB."""


def _global_index(
    start: int, stop: int, shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...],
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
    *, seed: int, name: str, init: InitSpec, shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...],
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return the initial fp32 values of a slice (``offset``, ``extent``) of parameter ``name`` of logical ``shape``."""
    device = torch.device(device)
    if init.kind == "zeros":
        return torch.zeros(extent, device=device)
    if init.kind == "ones":
        return torch.ones(extent, device=device)
    if init.kind not in ("normal", "uniform") and (special := f"initial {init.kind}") not in PARTS.names:
        raise ValueError(f"{name}: unknown initialisation {init.kind!r}")
    out = torch.empty(extent, device=device)
    flat = out.view(-1)
    key, key2 = key_of("weight", seed, name), key_of("weight2", seed, name)
    for start in range(0, flat.numel(), _CHUNK):
        stop = min(start + _CHUNK, flat.numel())
        position = _global_index(start, stop, shape, offset, extent, device)
        value = uniform(random_bits(position, key, key2))
        if init.kind == "normal":
            value = normal_from_uniform(value).mul_(init.std)
        elif init.kind == "uniform":
            value = value.sub_(0.5).mul_(math.sqrt(12.0)).mul_(init.std)
        else:
            value = PARTS.function(special)(value, position)
        flat[start:stop] = value
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
