"""What a user asks compression for, and the model, its reader and its provenance that follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_port.compress.importance_file import Importance, read_importance
from megatron_port.compress.pruned_reader import PrunedWeights
from megatron_port.compress.selection import Selection, select
from megatron_port.compress.sizes import Sizes
from megatron_port.config.schema import ModelConfig
from megatron_port.errors import CheckpointError, ConfigError
from megatron_port.parallel.state import StateReader
from megatron_port.session.base_weights import fingerprint
from megatron_port.session.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Request:
    """One method with its arguments."""

    sizes: Sizes = field(default_factory=Sizes)
    drop: tuple[int, ...] = ()
    """Layers that go."""
    importance: Path | None = None

    def planned(self, model: ModelConfig) -> ModelConfig:
        """Return the model that would be made of ``model``, without its weights. Raises ConfigError.

        Without measured importance the first of everything stays, which has the same sizes.
        """
        self._check()
        measured = read_importance(self.importance).scores if self.importance is not None else _any(model)
        return select(model, self.sizes, measured, self.drop).model

    def made_of(self, source: Weights) -> tuple[ModelConfig, StateReader, dict[str, Any]]:
        """Return the smaller model, the reader of its weights, and what was done.

        Raises:
            ConfigError: what is asked for cannot be had.
            CheckpointError: the importance is of other weights.
        """
        self._check()
        measured = None if self.importance is None else read_importance(self.importance)
        if measured is not None:
            self._check_source(measured, source)
        chosen = select(source.model, self.sizes, {} if measured is None else measured.scores, self.drop)
        return chosen.model, PrunedWeights(chosen, source.read), self._provenance(chosen, measured)

    def _check(self) -> None:
        if not self.sizes.asked and not self.drop:
            raise ConfigError(
                "nothing is to become smaller: give --layers, --drop-layers, --heads, --groups, --ffn, --experts or "
                "--hidden"
            )

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
