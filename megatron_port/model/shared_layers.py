"""Layers that use one set of weights (ALBERT, Lan et al., arXiv 1909.11942), over stages too.

The weights of a group have the names of its first layer. On one rank its layers hold the same parameters; where a group
spans stages, each has a copy, whose record is tied: gradients are summed over those stages, and the copy of the first
layer's stage is saved and counted, as of a tied embedding. Dropout stays the layer's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from megatron_port.config.schema import ModelConfig
from megatron_port.model.layers import TransformerLayer
from megatron_port.parallel.mesh import shared_name
from megatron_port.parallel.record import record_of
from megatron_port.parallel.topology import Topology

Held = dict[tuple[str, tuple[int, ...]], nn.Parameter]
"""Parameters of groups that this rank has built, by name and offset."""


@dataclass(frozen=True)
class SharedLayers:
    """Which stages hold each group's weights; by the first layer of the group."""

    stages: dict[int, tuple[int, ...]]
    primary: dict[int, int]
    """The stage whose copy is saved and counted."""

    @classmethod
    def of(cls, model: ModelConfig, topology: Topology, layers_by_chunk: Sequence[int]) -> SharedLayers:
        """Return them for a split of the layers over the virtual stages."""
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
        return cls({owner: tuple(sorted(stages)) for owner, stages in found.items()}, primary)

    @property
    def spanning(self) -> tuple[tuple[int, ...], ...]:
        """Sets of stages that hold copies of the same weights, each once."""
        return tuple(sorted({stages for stages in self.stages.values() if len(stages) > 1}))


def shared_layers(model: ModelConfig, topology: Topology, layers_by_chunk: Sequence[int]) -> SharedLayers | None:
    """Return which stages hold each group's weights; None: every layer has its own."""
    return SharedLayers.of(model, topology, layers_by_chunk) if model.shared_layers > 1 else None


def share_weights(
    layers: Iterable[nn.Module], model: ModelConfig, shared: SharedLayers | None, stage: int, held: Held
) -> None:
    """Give the layers of each group one set of parameters: those in ``held``, or their own, which join it.

    ``shared``: None: all layers are on this stage.
    """
    for layer in layers:
        assert isinstance(layer, TransformerLayer)
        owner = model.owner_of(layer.index)
        stages = () if shared is None else shared.stages[owner]
        tied = shared_name(stages) if len(stages) > 1 else None
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                record = record_of(parameter)
                record = replace(
                    record, name=f"layers.{owner}{record.name.removeprefix(layer.name)}", tied_key=tied,
                    tied_primary=shared is None or shared.primary[owner] == stage,
                )
                parameter.record = record  # type: ignore[attr-defined]
                module._parameters[name] = held.setdefault(record.place, parameter)
