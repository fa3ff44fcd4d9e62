"""The ranks of a run as a grid, and the groups of ranks along any of its axes. Pure: no processes, no torch.

A pipeline stage has dp · cp · tp ranks, and two kinds of layer divide them differently. Dense layers see
``dp × cp × tp``, tp fastest; experts see ``edp × ep`` over the same ranks (parallel folding, Liu et al.,
arXiv 2504.14960). Cut a stage at every boundary of either division. Where the cuts form a chain, each dividing the
next, the ratios of neighbouring cuts are the sizes of the *dimensions* of one refined grid, the mesh, and every axis is
a run of neighbouring dimensions. With tp 4, cp 2, dp 6 and ep 16 the cuts are 1, 4, 8, 16, 48 and the mesh is
3 × 2 × 2 × 4, slowest first: ``dp`` is its first two dimensions, ``cp`` the third, ``tp`` the last, ``ep`` the last
three, ``edp`` the first.

A set of axes is a set of mesh dimensions. Groups, replicas and owners are arithmetic on such sets, and need to know
neither how many axes there are nor what they are called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod

from megatron_port.core.config.layout import sizes_text
from megatron_port.core.errors import ConfigError

MeshDims = frozenset[int]
"""Indices of mesh dimensions, slowest first. Sizes of 1 make no dimension: an axis of one rank is the empty set."""

DENSE = ("tp", "cp", "dp_shard", "dp_replicate")
"""Axes of a stage for dense layers, fastest first: tensor-parallel ranks are neighbours, so they share a node."""
JOINED: Mapping[str, tuple[str, ...]] = {"dp": ("dp_shard", "dp_replicate")}
"""Axes that are runs of others: with hybrid sharding (Zhao et al., arXiv 2304.11277) optimizer state is split within
``dp_shard`` and repeated along ``dp_replicate``."""

BEYOND_EXPERTS: Mapping[str, tuple[str, ...]] = {
    "expert_tp": ("tp",), "expert_shard": ("dp_shard", "cp"), "expert_replicate": ("dp_replicate",),
}
"""Axes that ep leaves: along these, ranks hold copies of the same experts."""


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks.

    ``sizes``: of its dimensions, slowest first; ``axes``: the dimensions that each axis is made of.
    """

    sizes: tuple[int, ...]
    axes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(
        cls, sizes: Mapping[str, int], *, pp: int = 1, ep: int = 1, kv_copies: int = 1, order: tuple[str, ...] = DENSE,
    ) -> Mesh:
        """Return the mesh of a layout.

        Axes: pp, those of ``order``, dp, ep, edp, and the two parts of tp: ``kv_copies``, neighbours that hold the same
        key/value heads, and ``kv_heads``, ranks that hold different ones; and those of ``BEYOND_EXPERTS``.

        Args:
            sizes: of the axes of ``order``; 1 where one is not named.
            ep: ranks among which the experts of a layer are divided, a run of neighbours in the stage.
            kv_copies: tp ranks that hold the same key/value heads.
            order: the dense layers' axes of a stage, fastest first.

        Raises:
            ConfigError: a size is below one, kv_copies does not divide tp, or the experts' division and the dense
                layers' have no common refinement (tp 4 with ep 6).
        """
        for name, size in {"pp": pp, **sizes, "ep": ep, "kv_copies": kv_copies}.items():
            if size < 1:
                raise ConfigError(f"layout: {name} is {size}; each parallel size must be at least 1")
        unknown = sorted(set(sizes) - set(order))
        if unknown:
            raise ConfigError(f"layout: no axis {', '.join(unknown)}; the axes of a stage are {', '.join(order)}")
        spans = _spans([(name, sizes.get(name, 1)) for name in order])
        stage = prod(sizes.values())
        tp = sizes.get("tp", 1)
        if tp % kv_copies:
            raise ConfigError(f"layout: {kv_copies} copies of key/value heads do not divide tp {tp}")
        if stage % ep:
            raise ConfigError(f"layout: ep {ep} does not divide the {stage} ranks of a stage")
        spans |= _spans([("ep", ep), ("edp", stage // ep)])
        spans |= _spans([("kv_copies", kv_copies), ("kv_heads", tp // kv_copies)])
        spans["pp"] = (stage, stage * pp)
        cuts = sorted({cut for span in spans.values() for cut in span})
        for low, high in pairwise(cuts):
            if high % low:
                raise ConfigError(
                    f"layout: ep {ep} and {' × '.join(f'{n} {sizes.get(n, 1)}' for n in order)} divide the {stage} "
                    f"ranks of a stage at {low} and at {high}, and {low} does not divide {high}; choose an ep that "
                    f"divides, or is a multiple of, each product of the other sizes"
                )
        cuts.reverse()
        axes = {
            name: tuple(i for i, cut in enumerate(cuts[1:]) if low <= cut < high)
            for name, (low, high) in spans.items()
        }
        for name, parts in JOINED.items():
            axes[name] = tuple(sorted(i for part in parts for i in axes.get(part, ())))
        for name, parts in BEYOND_EXPERTS.items():
            axes[name] = tuple(sorted(i for part in parts for i in axes.get(part, ()) if i not in axes["ep"]))
        return cls(tuple(high // low for high, low in pairwise(cuts)), axes)

    @cached_property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Distance between neighbours along each dimension, in ranks."""
        return tuple(prod(self.sizes[i + 1 :]) for i in range(len(self.sizes)))

    def dims(self, *axes: str) -> MeshDims:
        """Return the mesh dimensions of a set of axes. Raises KeyError for an axis that the mesh does not have."""
        return frozenset(i for axis in axes for i in self.axes[axis])

    @cached_property
    def everything(self) -> MeshDims:
        """All dimensions; their group is the world."""
        return frozenset(range(len(self.sizes)))

    @cached_property
    def stage(self) -> MeshDims:
        """All dimensions except the pipeline's; their group is a stage."""
        return self.everything - self.dims("pp")

    def size(self, over: MeshDims) -> int:
        """Return the number of ranks of a group over these dimensions."""
        return prod(self.sizes[i] for i in over)

    def index(self, rank: int, over: MeshDims) -> int:
        """Return the position of a rank in its group over these dimensions; 0 is the first."""
        at = 0
        for i in sorted(over):
            at = at * self.sizes[i] + rank // self.strides[i] % self.sizes[i]
        return at

    def first(self, rank: int, over: MeshDims) -> int:
        """Return the first rank of a rank's group over these dimensions."""
        return rank - sum(rank // self.strides[i] % self.sizes[i] * self.strides[i] for i in over)

    def _steps(self, over: MeshDims) -> list[int]:
        """Distances of a group's members from its first, in order."""
        spans = (range(0, self.sizes[i] * self.strides[i], self.strides[i]) for i in sorted(over))
        return [sum(point) for point in product(*spans)]

    def members(self, rank: int, over: MeshDims) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` along these dimensions only, itself among them, in order."""
        first = self.first(rank, over)
        return tuple(first + step for step in self._steps(over))

    def groups(self, over: MeshDims) -> Iterator[tuple[int, ...]]:
        """Yield all groups over these dimensions by their first ranks: the order in which every rank creates them."""
        steps = self._steps(over)
        for first in self._steps(self.everything - over):
            yield tuple(first + step for step in steps)

    def peer(self, rank: int, axis: str, position: int) -> int:
        """Return the rank at another position along one axis, with the other coordinates unchanged."""
        over = self.dims(axis)
        return self.first(rank, over) + self._steps(over)[position]


def _spans(axes: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """(distance between neighbours, that times the size) of nested axes, fastest first."""
    spans, low = {}, 1
    for name, size in axes:
        spans[name] = (low, low * size)
        low *= size
    return spans


@dataclass(frozen=True)
class Purpose:
    """Use of a set of communicators, e.g. the pipeline's transfers.

    ``ends``: include only the members at these positions of each group, e.g. the stages that share a tied embedding;
    ``queue``: groups of the same ranks with another queue are another communicator, because the operations of one run
    in order (gradients on their way back).
    """

    name: str
    over: MeshDims
    ends: tuple[int, ...] = ()
    queue: int = 0


@dataclass(frozen=True)
class Communicator:
    """Communicators that every rank creates in the same order, one for each of ``groups``."""

    names: tuple[str, ...]
    """The purposes that share this communicator."""
    groups: tuple[tuple[int, ...], ...]


def communicators(mesh: Mesh, purposes: Iterable[Purpose]) -> list[Communicator]:
    """Return the communicators of these purposes, in the order in which every rank creates them.

    The list is a function of mesh and purposes alone, so all ranks walk the same one. Purposes over the same ranks
    share a communicator; groups of one rank need none.
    """
    found: dict[tuple[MeshDims, tuple[int, ...], int], list[str]] = {}
    for purpose in purposes:
        size = mesh.size(purpose.over)
        ends = tuple(sorted({end % size for end in purpose.ends}))
        if size > 1 and len(ends) != 1:  # one stage shares its embedding with no other
            found.setdefault((purpose.over, ends, purpose.queue), []).append(purpose.name)
    return [
        Communicator(tuple(names), tuple(tuple(g[e] for e in ends) if ends else g for g in mesh.groups(over)))
        for (over, ends, _), names in found.items()
    ]


REPLICAS = ("dp", "cp")
"""Axes along which ranks see different tokens and hold copies of dense layers."""
SHARDED = ("dp_shard", "cp")
"""Axes over which ZeRO splits optimizer state; a part of ``REPLICAS``."""
SETS = (
    ("tp",), ("dp",), ("pp",), ("cp",), REPLICAS, SHARDED, ("kv_copies",), ("ep",),
    ("dp_replicate",), ("expert_shard",), ("expert_replicate",), ("expert_tp",),
)
"""Sets of axes that some code asks for a group over; see ``ParallelContext.over``."""
EMBEDDING, REVERSE, WORLD = "embedding", "pp_reverse", "world"
SHARED = "layers of stages "
"""Before the stages in the names of groups that hold copies of the same layers."""


def shared_name(stages: Sequence[int]) -> str:
    """Return the name of the group of stages that hold copies of the same layers."""
    return SHARED + ",".join(map(str, stages))


def purposes(mesh: Mesh, *, tied_ends: bool, reverse: bool, shared: Iterable[tuple[int, ...]] = ()) -> list[Purpose]:
    """Return the communicators of a run, from the layout alone.

    They must not be taken from a rank's parameter records: stages hold different ones, and ranks that create different
    lists deadlock.

    Args:
        tied_ends: the first and the last stage may hold copies of one embedding.
        reverse: a second queue between stages, for gradients.
        shared: sets of stages that hold copies of the same layers.
    """
    pipeline = mesh.dims("pp")
    # With cp the copies of the weights are on dp × cp, and nothing is summed over dp alone.
    left_out = [("dp",)] if mesh.dims("cp") else []
    # The order of this list is the order in which every rank creates them: tp, dp and pp first, the other sets last.
    listed = [Purpose("+".join(axes), mesh.dims(*axes)) for axes in SETS[:3] if axes not in left_out]
    if tied_ends:
        listed.append(Purpose(EMBEDDING, pipeline, ends=(0, -1), queue=2))  # its own, even with two stages
    listed += [Purpose(shared_name(stages), pipeline, ends=stages, queue=3) for stages in shared]
    if reverse:
        listed.append(Purpose(REVERSE, pipeline, queue=1))
    listed += [Purpose("+".join(axes), mesh.dims(*axes)) for axes in SETS[3:]]
    return [*listed, Purpose(WORLD, mesh.everything)]


# Coordinates of a rank in the layout, and the model chunks of its stage. Pure; no processes, no torch.
#
# ``mesh`` has the ranks and their axes: the tensor axis varies fastest, so a tensor-parallel group sits on
# neighbouring ranks (one node), then context, then data; stages are farthest apart, since they exchange least. This
# is also the order in which DeepSpeed's ``PipeModelDataParallelTopology(pp, mp, dp)`` numbers ranks.
#
# With virtual stages (Narayanan et al., arXiv 2104.04473) a rank holds ``vp`` chunks
# of the model. Chunk c of stage s is virtual stage ``c * pp + s``; in a folded
# pipeline (two chunks, Qi et al., arXiv 2401.10241) the second run of chunks goes back
# from the last stage to the first, so that one rank has both ends of the model.

@dataclass(frozen=True)
class Coordinates:
    """Coordinates of a rank on the axes that every layout has, for messages and logs."""

    pp: int
    dp: int
    tp: int
    cp: int | None = None
    """None: every rank has whole sequences."""

    def __str__(self) -> str:
        context = "" if self.cp is None else f"cp {self.cp}, "
        return f"pp {self.pp}, dp {self.dp}, {context}tp {self.tp}"


@dataclass(frozen=True)
class Topology:
    """The parallel sizes of a run.

    ``vp``: chunks of the model on each stage; ``folded``: the pipeline turns round at the last stage (``vp`` 2);
    ``kv_copies``: neighbouring tp ranks that hold the same key/value heads, where there are fewer heads than tp ranks;
    ``cp``: ranks that share the positions of a sequence; ``ep``: ranks that share the experts of a layer;
    ``shard``: data-parallel ranks among which optimizer state is split (0: all of them).

    Raises:
        ConfigError: a size is below one, a folded pipeline has not two chunks per stage, ``kv_copies`` does not
            divide tp, ``shard`` does not divide dp, or ``ep`` cannot be laid over the others.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vp: int = 1
    folded: bool = False
    kv_copies: int = 1
    cp: int = 1
    ep: int = 1
    shard: int = 0
    shared: tuple[tuple[int, ...], ...] = ()
    """Sets of stages that hold copies of the same layers (``model.shared_layers``)."""

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dp", "vp", "cp", "ep"):
            if getattr(self, axis) < 1:
                raise ConfigError(f"layout: {axis} is {getattr(self, axis)}; each parallel size must be at least 1")
        if self.folded and self.vp != 2:
            raise ConfigError(f"layout: a folded pipeline has 2 chunks a stage, not {self.vp}")
        if self.shard < 0 or (self.shard and self.dp % self.shard):
            raise ConfigError(f"layout: shard size {self.shard} does not divide dp {self.dp}")
        _ = self.mesh  # raises for sizes that make no grid

    def sizes(self, times: str = "x") -> str:
        """Return ``tp 2 x pp 4 x dp 8``, with cp where it divides sequences: the product is the number of ranks."""
        return sizes_text(self.tp, self.pp, self.dp, self.cp, times)

    @cached_property
    def mesh(self) -> Mesh:
        """Mesh of the layout."""
        shard = self.shard or self.dp
        sizes = {"tp": self.tp, "cp": self.cp, "dp_shard": shard, "dp_replicate": self.dp // shard}
        return Mesh.of(sizes, pp=self.pp, ep=self.ep, kv_copies=self.kv_copies)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.mesh.world

    def coordinates(self, rank: int) -> Coordinates:
        """Return the grid point of a global rank. Raises ValueError outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        axes = ("pp", "dp", "tp", "cp") if self.cp > 1 else ("pp", "dp", "tp")
        return Coordinates(**{axis: self.mesh.index(rank, self.mesh.dims(axis)) for axis in axes})

    def first_rank(self, **at: int) -> int:
        """Return the first rank at these positions, e.g. ``first_rank(pp=1, tp=3)``; axes not named are at 0."""
        rank = 0
        for axis, position in at.items():
            rank = self.mesh.peer(rank, axis, position)
        return rank

    def stage_peer(self, rank: int, stage: int) -> int:
        """Return the rank of another stage that holds the same slice and sees the same samples."""
        return self.mesh.peer(rank, "pp", stage % self.pp)

    @property
    def virtual_stages(self) -> int:
        """Number of chunks of the model, over all stages."""
        return self.pp * self.vp

    @property
    def last_stage(self) -> int:
        """The stage that holds the head and computes the loss; the embedding is on stage 0."""
        return 0 if self.folded else self.pp - 1

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Return the number, counted from the embedding, of the model chunk that is ``chunk`` of a stage."""
        if self.folded and chunk == 1:
            return 2 * self.pp - 1 - stage
        return chunk * self.pp + stage

    def holder(self, virtual: int) -> tuple[int, int]:
        """Return the (stage, chunk) that holds a virtual stage."""
        chunk, stage = divmod(virtual, self.pp)
        return (self.pp - 1 - stage if self.folded and chunk == 1 else stage), chunk
