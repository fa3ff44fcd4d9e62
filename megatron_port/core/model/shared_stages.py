"""Which stages hold layers that share weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.mesh import Topology


@dataclass(frozen=True)
class SharedLayers:
    """Which stages hold each group's weights; by the first layer of the group."""

    stages: dict[int, tuple[int, ...]]
    primary: dict[int, int]
    """The stage whose copy is saved and counted."""

    @property
    def spanning(self) -> tuple[tuple[int, ...], ...]:
        """Sets of stages that hold copies of the same weights, each once."""
        return tuple(sorted({stages for stages in self.stages.values() if len(stages) > 1}))


def stages_of_shared_layers(
    model: ModelConfig, topology: Topology, layers_by_chunk: Sequence[int]
) -> SharedLayers:
    """Return which stages hold each group's weights, for a split of the layers over the virtual stages."""
    found: dict[int, set[int]] = {}
    primary: dict[int, int] = {}
    layer = 0
    for virtual, count in enumerate(layers_by_chunk):
        stage, _ = topology.holder(virtual)
        for _ in range(count):
            owner = model.owner_of(layer)
            found.setdefault(owner, set()).add(stage)
            primary.setdefault(owner, stage)
            layer += 1
    return SharedLayers({owner: tuple(sorted(stages)) for owner, stages in found.items()}, primary)
