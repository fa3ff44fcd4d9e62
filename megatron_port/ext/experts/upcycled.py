"""A reader of a model with experts over the weights of a dense one (Komatsuzaki et al., arXiv 2212.05055).

Each expert begins as a copy of the dense MLP of its layer, the router is drawn. Where the shares of a token's experts
add up to one, the model computes at first what the dense one does.
"""

from __future__ import annotations

import torch

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.record import BUFFER, InitSpec, StateReader, initial_values
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.experts.spec import moe_of

Box = tuple[int, ...]


class UpcycledWeights:
    """A reader of ``model``, which has experts, over ``dense``, which reads the model without them.

    Any slice of any expert is read by itself, so a rank reads the dense MLP once for the experts that it holds.
    """

    def __init__(self, model: ModelConfig, seed: int, dense: StateReader) -> None:
        self._seed, self._dense = seed, dense
        layers = [(f"layers.{i}.", moe_of(layer)) for i, layer in enumerate(model_spec(model).layers)]
        with_experts = [(name, moe) for name, moe in layers if moe is not None]
        self._drawn = {f"{name}{p.name}": p for name, moe in with_experts for p in moe.router.parameters}
        self._copied = {f"{name}{p.name}" for name, moe in with_experts for p in moe.experts.parameters}

    def __call__(
        self, name: str, kind: str, offset: Box, shape: Box, /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a slice of a tensor (``dist.record.StateReader``)."""
        if kind == BUFFER:
            return torch.zeros(shape)
        if name in self._drawn:
            spec = self._drawn[name]
            init = InitSpec(spec.init, spec.std)
            return initial_values(
                seed=self._seed, name=name, init=init, shape=spec.shape, offset=offset, extent=shape
            )
        if name in self._copied:
            one = self._dense(name.replace(".mlp.experts.", ".mlp."), kind, offset[1:], shape[1:])
            return one.expand(shape).contiguous()
        return self._dense(name, kind, offset, shape, out=out)
