"""Description of a family of Hugging Face models: its configuration and its names, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.fields import Fields

Rotation = Literal["halves", "first", "interleaved"]
"""Order of the elements of a head that rope rotates."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of our modules in the family's files, without ``.weight`` or ``.bias``."""

    prefix: str
    """Before every name but the head's; files of the bare model leave it out."""
    outside: Mapping[str, str]
    """Modules outside the layers, the head left out."""
    head: str
    """The whole name of the head's matrix."""
    layer: str
    """Before the names of a layer, ``{}`` for its number."""
    inside: Mapping[str, str | tuple[str, ...]]
    """Modules of a layer. Several names: the parts of a fused matrix, in our order (query, key, value; gate, up).
    Experts have ``{}`` for their number; a name without it is of one tensor [experts, in, out] that has no ``.weight``
    behind it, nor ``.bias`` but ``_bias``, and in which gate and up alternate."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Last parts of names that are neither ``weight`` nor ``bias``."""
    loaded: Mapping[str, str] = field(default_factory=dict)
    """Parts of names that transformers changes when it reads files."""
    ahead: Mapping[str, str] = field(default_factory=dict)
    """Modules of multi-token prediction, which are there as further layers, beside those of a layer; empty: the family
    has none."""
    ahead_copies: tuple[str, str] = ("", "")
    """In each of them, the copies of the token table and of the head's matrix."""
    qkv_by_group: bool = False
    """A fused projection there has each key/value head's queries, key and value together; else all queries, all keys,
    all values."""
    rotation: Rotation = "halves"
    """halves: element i of a head pairs with i + d/2, as ours; first: of r rotated elements, which come first, i with
    i + r/2; interleaved: of these 2i with 2i + 1."""
    transposed: tuple[str, ...] = ()
    """Ends of names of matrices that are stored as [in, out]."""
    buffers: tuple[str, ...] = ()
    """Ends of names that older versions saved although they are no parameters."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of transformers, in both directions."""

    name: str
    """``model_type`` in config.json."""
    architecture: str
    """transformers' class of the language model."""
    read: Callable[[Fields], dict[str, Any]]
    """Fields of :class:`ModelConfig` from those of a config.json. Raises CheckpointError for what our model cannot
    compute."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """The family's own fields of a config.json."""
    names: Names
    names_of: Callable[[ModelConfig], Names] | None = None
    """Names of a model, where modules of its layers are called by what the model has; otherwise ``names``."""
    harmless: frozenset[str] = frozenset()
    """Fields of the family that change nothing in what a language model computes."""
    twin: bool = False
    """Computes what a family before it in the registry does, under other names; a model is exported as itself."""
