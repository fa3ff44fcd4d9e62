"""Values as JSON holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from megatron_port.errors import CheckpointError


def plain(value: Any) -> Any:
    """``value`` as JSON holds it: dataclasses and mappings become dicts, tuples lists.

    Raises:
        CheckpointError: something in it is not a JSON value; the message names where it is.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    return _plain(value, "")


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and value - value == 0.0:
        return float(value)
    raise CheckpointError(
        f"{where.lstrip('.') or 'value'} is {value!r:.80} ({type(value).__name__}); a manifest holds only finite "
        "numbers, strings, booleans, lists and dicts: convert it before saving"
    )
