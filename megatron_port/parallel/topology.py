"""Rank arithmetic: who am I, and who are my peers. Pure; no processes, no torch.

A rank is a point of a grid with axes ``(pp, dp, tp)``, slowest first: the tensor
axis varies fastest, so a tensor-parallel group sits on neighbouring ranks (one
node), and replicas of a stage are ``tp`` ranks apart. Stages are farthest apart:
they exchange least. This is also the order in which DeepSpeed's
``PipeModelDataParallelTopology(pp, mp, dp)`` numbers ranks.

With virtual stages (Narayanan et al., arXiv 2104.04473) a rank holds ``vp`` chunks
of the model. Chunk c of stage s is virtual stage ``c * pp + s``; in a folded
pipeline (two chunks, Qi et al., arXiv 2401.10241) the second run of chunks goes back
from the last stage to the first, so that one rank has both ends of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_port.errors import ConfigError


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands on each axis."""

    pp: int
    dp: int
    tp: int

    def __str__(self) -> str:
        return f"pp {self.pp}, dp {self.dp}, tp {self.tp}"


@dataclass(frozen=True)
class Topology:
    """The grid of a run.

    ``vp``: chunks of the model on each stage; ``folded``: the pipeline turns round at the last stage (``vp`` 2);
    ``kv_copies``: neighbouring tp ranks that hold the same key/value heads, where there are fewer heads than tp ranks.

    Raises:
        ConfigError: a size is below one, a folded pipeline has not two chunks per stage, or ``kv_copies`` does not
            divide tp.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vp: int = 1
    folded: bool = False
    kv_copies: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dp", "vp"):
            if getattr(self, axis) < 1:
                raise ConfigError(f"layout: {axis} is {getattr(self, axis)}; each parallel size must be at least 1")
        if self.folded and self.vp != 2:
            raise ConfigError(f"layout: a folded pipeline has 2 chunks a stage, not {self.vp}")
        if self.kv_copies < 1 or self.tp % self.kv_copies:
            raise ConfigError(f"layout: {self.kv_copies} copies of key/value heads do not divide tp {self.tp}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """The grid point of a global rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(pp=pp, dp=dp, tp=tp)

    def rank(self, *, pp: int, dp: int, tp: int) -> int:
        """The global rank of a grid point."""
        return (pp * self.dp + dp) * self.tp + tp

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Global ranks that differ from ``rank`` only along ``axis`` (``tp``, ``pp`` or ``dp``), in order."""
        at = self.coordinates(rank)
        point = {"pp": at.pp, "dp": at.dp, "tp": at.tp}
        return tuple(self.rank(**{**point, axis: i}) for i in range(getattr(self, axis)))

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """All groups along ``axis``, in the fixed order in which every rank creates them."""
        for rank in range(self.world_size):
            members = self.group(axis, rank)
            if members[0] == rank:
                yield members

    def stage_peer(self, rank: int, stage: int) -> int:
        """The rank of another stage with the same dp and tp coordinates."""
        at = self.coordinates(rank)
        return self.rank(pp=stage % self.pp, dp=at.dp, tp=at.tp)

    @property
    def virtual_stages(self) -> int:
        """Chunks of the model, over all stages."""
        return self.pp * self.vp

    @property
    def last_stage(self) -> int:
        """The stage that holds the head and computes the loss; the embedding is on stage 0."""
        return 0 if self.folded else self.pp - 1

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Which chunk of the model, counted from the embedding, is ``chunk`` of a stage."""
        if self.folded and chunk == 1:
            return 2 * self.pp - 1 - stage
        return chunk * self.pp + stage

    def holder(self, virtual: int) -> tuple[int, int]:
        """(stage, chunk) of a virtual stage."""
        chunk, stage = divmod(virtual, self.pp)
        return (self.pp - 1 - stage if self.folded and chunk == 1 else stage), chunk
