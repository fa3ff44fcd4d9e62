"""Coordinates of a rank in the layout, and the model chunks of its stage. Pure; no processes, no torch.

``mesh`` has the ranks and their axes: the tensor axis varies fastest, so a tensor-parallel group sits on neighbouring
ranks (one node), then context, then data; stages are farthest apart, since they exchange least. This is also the order
in which DeepSpeed's ``PipeModelDataParallelTopology(pp, mp, dp)`` numbers ranks.

With virtual stages (Narayanan et al., arXiv 2104.04473) a rank holds ``vp`` chunks
of the model. Chunk c of stage s is virtual stage ``c * pp + s``; in a folded
pipeline (two chunks, Qi et al., arXiv 2401.10241) the second run of chunks goes back
from the last stage to the first, so that one rank has both ends of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_port.core.config.layout_name import sizes_text
from megatron_port.core.errors import ConfigError
from megatron_port.core.dist.mesh import Mesh


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
        _ = self.mesh  # refuses what makes no grid

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
        return Coordinates(**{axis: self.mesh.index(rank, self.mesh.factors(axis)) for axis in axes})

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
