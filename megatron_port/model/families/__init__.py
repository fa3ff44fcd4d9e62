"""Families of Hugging Face: one folder each, with its configuration, its names and its shipped shapes.

To add one: write the folder (``qwen3/`` is the shortest example) and its line in ``_REGISTERED``. Import, export, the
logits' check, the planner and the tests in ``tests/unit/test_families.py`` go over the registry. What a family needs
of a layer that no other has is a spec (``model/spec.py``) and the code that computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from megatron_port.model.families.family import Family

_REGISTERED = (
    "gpt2",
    "gpt_neox",
    "llama",
    "qwen3",
)

FAMILIES: Mapping[str, Family] = {name: import_module(f"{__name__}.{name}").FAMILY for name in _REGISTERED}
"""By ``model_type``; the first that computes a model is the one it is exported as."""
