"""Mixers of positions that plugins register."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_port.core.config.model import ModelConfig
from megatron_port.core.registry import MIXERS

ATTENTION = "attention"
"""The package's own mixer."""


@dataclass(frozen=True)
class MixerKind:
    """A mixer that ``model.mixer`` may name.

    Args:
        spec: (model, number of the layer) → its ``model.mixer_spec.MixerSpec``. Layers that it leaves to attention have
            ``model.decoder_spec.attention_spec``. It is called often and must not depend on anything else.
        context: context-parallel ranks may divide the positions.
        documents: it stays within documents (``data.attention_documents = "within"``).
        settings: those of attention that it reads (``ext.mixers.settings.ATTENTION_SETTINGS``).
    """

    spec: Callable[[ModelConfig, int], Any]
    context: bool = False
    documents: bool = False
    settings: frozenset[str] = frozenset()


def mixer_kind(model: ModelConfig) -> MixerKind | None:
    """Return the mixer that a plugin has registered; None: the model has attention.

    Raises:
        ConfigError: nobody has registered a mixer of that name.
    """
    return None if model.mixer == ATTENTION else MIXERS.get(model.mixer, MixerKind)
