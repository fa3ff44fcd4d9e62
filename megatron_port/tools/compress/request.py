"""Request for a smaller model, and the model, reader and provenance that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.record import StateReader
from megatron_port.core.errors import CheckpointError, ConfigError
from megatron_port.core.model.shapes import buffer_shapes, fingerprint, parameter_shapes
from megatron_port.run.weights import Weights
from megatron_port.tools.compress.convert import (
    Axis,
    FactoredWeights,
    MeanWeights,
    axes_of,
    layer_of,
    ranks_by_budget,
    ranks_by_energy,
    with_ranks,
)
from megatron_port.tools.compress.importance import Importance, read_importance
from megatron_port.tools.compress.selection import Selection, Sizes, select

# A reader of the pruned model over the weights of the whole one: any slice, without the rest in memory.

Box = tuple[int, ...]


class PrunedWeights:
    """A reader (``dist.record.StateReader``) of what ``selection`` keeps of the weights and buffers that ``read``
    gives.

    A slice is read as one slice of the source from its first to its last index along every dimension, a run of the
    first dimension at a time, so that no more than the source's part of the slice is in memory.
    """

    def __init__(self, selection: Selection, read: StateReader) -> None:
        self._selection, self._read = selection, read
        model = selection.source
        self._shapes = parameter_shapes(model) | buffer_shapes(model)
        self._gated = model.gated
        self._over_heads = model.qk_norm and model.qk_norm_over == "projection"

    def __call__(
        self, name: str, kind: str, offset: Box, shape: Box, /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a slice of a tensor of the pruned model.

        Raises:
            CheckpointError: the parameter is not known to pruning, or the source lacks it.
        """
        layer, relative = layer_of(name)
        source = name if layer is None else f"layers.{self._selection.layers[layer]}.{relative}"
        place = None if layer is None else self._selection.layers[layer]
        axes = axes_of(source, self._shapes[source], gated=self._gated, norm_over_heads=self._over_heads)
        kept = [
            self._indices(axis, place, first, count) for axis, first, count in zip(axes, offset, shape, strict=True)
        ]
        parts = [self._slab(source, kind, [rows, *kept[1:]]) for rows in _runs(kept[0])]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _indices(self, axis: Axis, layer: int | None, first: int, count: int) -> np.ndarray:
        """Return the source's indices of a range of the pruned model's."""
        found = self._selection.of(axis, layer)
        return np.arange(first, first + count) if found is None else found[first : first + count]

    def _slab(self, name: str, kind: str, kept: list[np.ndarray]) -> torch.Tensor:
        low = tuple(int(rows[0]) for rows in kept)
        read = self._read(name, kind, low, tuple(int(rows[-1]) - a + 1 for rows, a in zip(kept, low)))
        for dim, (rows, a) in enumerate(zip(kept, low)):
            if len(rows) != read.shape[dim]:
                read = read.index_select(dim, torch.from_numpy(rows - a))
        return read


def _runs(indices: np.ndarray) -> list[np.ndarray]:
    """Cut ascending indices wherever more is left out than is kept, so that little is read in vain."""
    gaps = np.flatnonzero(np.diff(indices) > 64) + 1
    return [part for part in np.split(indices, gaps) if len(part)]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One method with its arguments."""

    sizes: Sizes = field(default_factory=Sizes)
    drop: tuple[int, ...] = ()
    """Layers that go."""
    importance: Path | None = None
    factor: Mapping[str, int] | None = None
    """Linears that become two factors, and their ranks, 0 where ``energy`` or ``budget`` says it; empty: all."""
    energy: float = 0.0
    budget: float = 0.0
    share: int = 0
    """Consecutive layers that come to use one set of weights."""

    def planned(self, model: ModelConfig) -> ModelConfig:
        """Return the model that would be made of ``model``, without its weights. Raises ConfigError.

        Without measured importance the first of everything stays, which has the same sizes.
        """
        self._check(model)
        if self.share:
            return self._shared(model)
        if self.factor is not None:
            if self.energy:
                raise ConfigError("--energy needs the weights' singular values, which `compress run` computes; plan "
                                  "with --budget, or ranks")
            return with_ranks(model, self._ranks(model, None, lambda name: None))
        measured = read_importance(self.importance).scores if self.importance is not None else _any(model)
        return select(model, self.sizes, measured, self.drop).model

    def made_of(
        self, source: Weights, note: Callable[[str], None] = lambda text: None
    ) -> tuple[ModelConfig, StateReader, dict[str, Any]]:
        """Return the smaller model, the reader of its weights, and what was done.

        Raises:
            ConfigError: what is asked for cannot be had.
            CheckpointError: the importance is of other weights.
        """
        self._check(source.model)
        if self.share:
            model = self._shared(source.model)
            return model, MeanWeights(model, source.read), {"method": "share", "layers_of_a_group": self.share}
        if self.factor is not None:
            ranks = self._ranks(source.model, source.read, note)
            model = with_ranks(source.model, ranks)
            return model, FactoredWeights(model, source.read), {
                "method": "factor", "ranks": ranks, "energy": self.energy, "budget": self.budget
            }
        measured = None if self.importance is None else read_importance(self.importance)
        if measured is not None:
            self._check_source(measured, source)
        chosen = select(source.model, self.sizes, {} if measured is None else measured.scores, self.drop)
        return chosen.model, PrunedWeights(chosen, source.read), self._provenance(chosen, measured)

    def _check(self, model: ModelConfig) -> None:
        prunes = bool(self.sizes.asked or self.drop)
        if self.factor is None and (self.energy or self.budget):
            raise ConfigError("--energy and --budget are of --factor; name the linears with it, or `all`")
        methods = [prunes, self.factor is not None, bool(self.share)]
        if not any(methods):
            raise ConfigError(
                "nothing is to become smaller: give --layers, --drop-layers, --heads, --groups, --ffn, --experts, "
                "--hidden, --factor or --share"
            )
        if sum(methods) > 1:
            raise ConfigError("sizes to prune, --factor and --share are conversions of their own: make one after the "
                              "other, the pruning first")
        if model.ranks or model.shared_layers > 1:
            what = f"factored linears ({', '.join(model.ranks)})" if model.ranks else "layers that share weights"
            raise ConfigError(f"the source has {what} already: prune before factoring or sharing, and do each once")

    def _shared(self, model: ModelConfig) -> ModelConfig:
        if not 1 < self.share <= model.num_layers or model.moe.enabled:
            raise ConfigError(f"--share {self.share}: the model has {model.num_layers} layers" + (
                ", some of them with experts, which do not share weights" if model.moe.enabled else
                f"; give 2 to {model.num_layers}"
            ))
        return replace(model, shared_layers=self.share)

    def _ranks(
        self, model: ModelConfig, read: StateReader | None, note: Callable[[str], None]
    ) -> dict[str, int]:
        """Return the ranks asked for, found by energy or by budget."""
        asked = dict(self.factor or {})
        if all(asked.values()) and asked:
            if self.energy or self.budget:
                raise ConfigError("--factor with ranks and --energy or --budget: give one of the two")
            return asked
        if any(asked.values()) or bool(self.energy) == bool(self.budget):
            raise ConfigError("--factor: give each linear a rank (qkv=64,up=128), or all of them none and either "
                              "--energy or --budget")
        if not 0 < (self.energy or self.budget) < 1:
            raise ConfigError(f"--energy {self.energy}, --budget {self.budget}: a share is between 0 and 1")
        if self.budget or read is None:
            return ranks_by_budget(model, tuple(asked), self.budget)
        return ranks_by_energy(model, tuple(asked), self.energy, read, note)

    def _check_source(self, measured: Importance, source: Weights) -> None:
        found = fingerprint(source.model, source.read)
        if found != measured.fingerprint:
            raise CheckpointError(
                f"{self.importance} was measured on other weights ({measured.source}, fingerprint "
                f"{measured.fingerprint[:12]}) than those of {source.path} ({found[:12]}); measure these"
            )

    def _provenance(self, chosen: Selection, measured: Importance | None) -> dict[str, Any]:
        out: dict[str, Any] = {
            "method": "prune", "sizes": {k: v for k, v in asdict(self.sizes).items() if v},
            "layers": list(chosen.layers), "kept": chosen.digest(),
        }
        if measured is not None:
            out["importance"] = {
                "file": str(self.importance), "hash": measured.digest(), "corpus": measured.corpus,
                "tokens": measured.tokens,
            }
        return out


def _any(model: ModelConfig) -> Mapping[str, np.ndarray]:
    """Equal importance of everything."""
    layers, moe = model.num_layers, model.moe
    return {
        "layers": np.zeros(layers), "heads": np.zeros((layers, model.num_attention_heads)),
        "ffn": np.zeros((layers, model.ffn_size)), "experts": np.zeros((layers, moe.num_experts)),
        "hidden": np.zeros(model.hidden_size),
    }
