"""Layers that use one set of weights (ALBERT, Lan et al., arXiv 1909.11942), over stages too.

The weights of a group have the names of its first layer. On one rank its layers hold the same parameters; where a group
spans stages, each has a copy, whose record is tied: gradients are summed over those stages, and the copy of the first
layer's stage is saved and counted, as of a tied embedding. Dropout stays the layer's own.

The gradients of a group's layers are added in the engine's sums. Those of matrices always are
(``layers.linear``). Those of biases, norms and sinks autograd would first add in the compute dtype, on each stage by
itself, so each layer's use of them gives its gradient to the sum directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.mesh import Topology, shared_name
from megatron_port.core.dist.record import record_of
from megatron_port.core.layers.linear import WgradAccumulator
from megatron_port.core.model.decoder import Held
from megatron_port.core.model.layers import TransformerLayer

# Which stages hold layers that share weights.

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
            if any(p is not None and not record_of(p).decay for p in module._parameters.values()):
                module.__class__ = _with_uses_apart(type(module))  # type: ignore[arg-type]  # a class is hashable


def separate_use(parameter: torch.Tensor, add: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """Return a leaf that shares the parameter's memory, whose gradient goes to ``add`` by itself and is rounded only if
    the parameter's is. Own kernels find the parameter (``parameter``) and where its gradient waits (``slot_sums``)."""
    use = parameter.detach().requires_grad_()
    use.parameter = parameter  # type: ignore[attr-defined]
    if hasattr(torch.Tensor, "grad_dtype"):
        use.grad_dtype = parameter.grad_dtype
    if sums := getattr(parameter, "use_sums", None):
        use.slot_sums = sums  # type: ignore[attr-defined]

    def took(use: torch.Tensor) -> None:
        grad, use.grad = use.grad, None
        if grad is not None:
            add(grad)

    use.register_post_accumulate_grad_hook(took)
    return use


def _add(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    accumulator: WgradAccumulator = parameter.wgrad_accumulator  # type: ignore[attr-defined]
    accumulator.main_grad_of(parameter).add_(grad)
    accumulator.on_added(parameter)


@cache
def _with_uses_apart(module: type[nn.Module]) -> type[nn.Module]:
    """Return a class of modules whose parameters without weight decay (biases, norms, sinks) are read as uses of their
    own."""

    def read(self: nn.Module, name: str) -> Any:
        found = nn.Module.__getattr__(self, name)
        if not isinstance(found, nn.Parameter) or record_of(found).decay or not hasattr(found, "wgrad_accumulator"):
            return found
        if not (found.requires_grad and torch.is_grad_enabled()):
            return found
        return separate_use(found, partial(_add, found))

    return type(module.__name__, (module,), {"__getattr__": read, "__module__": module.__module__})
