"""Mixers of positions that plugins register, and what the package cannot do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_port.core.config.conflicts import Table
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.registry import MIXERS

ATTENTION = "attention"
"""The package's own mixer."""


ATTENTION_SETTINGS = (
    "attention_dropout", "attention_pattern", "attention_scale", "attention_sinks", "attention_softcap",
    "kv_lora_rank", "num_query_groups", "output_rank", "q_lora_rank", "qk_norm", "qk_rope_head_dim", "qkv_bias",
    "qkv_rank", "rope_pattern", "sliding_window", "v_head_dim",
)
"""Settings of a model that only attention reads, unless a mixer says that it does too."""


@dataclass(frozen=True)
class MixerKind:
    """A mixer that ``model.mixer`` may name.

    Args:
        spec: (model, number of the layer) → its ``model.mixer_spec.MixerSpec``. Layers that it leaves to attention have
            ``model.decoder_spec.attention_spec``. It is called often and must not depend on anything else.
        context: context-parallel ranks may divide the positions.
        documents: it stays within documents (``data.attention_documents = "within"``).
        settings: those of attention (``ATTENTION_SETTINGS``) that it reads.
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


def _unable(config: RunConfig) -> list[str]:
    """Name what a plugin's mixer cannot do."""
    name = config.model.mixer
    known = name != ATTENTION and name in MIXERS.names  # config.checks names an unknown one
    return list(_refused(config, name)) if known else []


def _refused(config: RunConfig, name: str) -> Iterator[str]:
    kind, layout, plain = MIXERS.get(name, MixerKind), config.layout, ModelConfig()
    for setting in ATTENTION_SETTINGS:
        if setting not in kind.settings and getattr(config.model, setting) != getattr(plain, setting):
            yield f"model.{setting} is of attention, and model.mixer {name!r} does not read it; leave it out"
    if layout.context_parallel_size > 1 and not kind.context:
        yield (
            f"model.mixer {name!r} does not divide positions over context-parallel ranks; set "
            "layout.context_parallel_size = 1"
        )
    if config.data.attention_documents == "within" and not kind.documents:
        yield (
            f"model.mixer {name!r} does not stop at the start of a document; set data.attention_documents = \"across\""
        )


CONFLICTS = (Table(more=(_unable,)),)
