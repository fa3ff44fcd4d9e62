"""The file that measured importance is kept in: a safetensors file whose metadata says what was measured on what.

It carries a hash of its tensors and of everything else that it says, and the fingerprint of the weights: what it is
applied to must be those.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load, save

from megatron_port.core.errors import CheckpointError, EnvironmentFault
from megatron_port.core.io.atomic import write_bytes
from megatron_port.core.io.regular import read_regular
from megatron_port.core.io.typed_json import Natural, parse_json, typed

SCHEMA = "megatron_port.importance"
_MAX_BYTES = 1 << 32


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Sums over the calibration set (``compress.importance``), and what they are of."""

    scores: Mapping[str, np.ndarray]
    source: str
    """Path of the weights."""
    fingerprint: str
    """Fingerprint of the weights (``weights.base_weights``)."""
    corpus: str
    tokens: int
    loss: float
    """Nats per token of the model on the set."""

    def digest(self) -> str:
        """Return 32 hex digits of everything in the file."""
        return _digest(self.scores, self._facts())

    def _facts(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "scores"}


@dataclass(frozen=True)
class _Facts:
    """Fields of the file beside the scores."""

    source: str
    fingerprint: str
    corpus: str
    tokens: Natural
    loss: float


def _digest(scores: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> str:
    out = xxhash.xxh3_128(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(scores):
        values = np.ascontiguousarray(scores[name], dtype=np.float64)
        out.update(f"{name} {values.shape}".encode() + values.tobytes())
    return out.hexdigest()


def write_importance(path: Path, found: Importance) -> None:
    """Write ``path``, whole or not at all. Raises EnvironmentFault where the disk refuses."""
    scores = {name: np.ascontiguousarray(v, dtype=np.float64) for name, v in found.scores.items()}
    facts = json.dumps(found._facts(), sort_keys=True)
    data = save(scores, {"schema": SCHEMA, "facts": facts, "hash": found.digest()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, data)
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror or error}; give another --out") from None


def read_importance(path: Path) -> Importance:
    """Read and verify a file. Raises CheckpointError: it is another kind of file, or damaged."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes; such a file has at most {_MAX_BYTES}")
        raw = read_regular(path, _MAX_BYTES)
        scores = load(raw)
        told = parse_json(raw[8 : 8 + int.from_bytes(raw[:8], "little")]).get("__metadata__") or {}
        if told.get("schema") != SCHEMA:
            raise CheckpointError(f"{path}: no file of importance; `megatron-port compress measure` writes one")
        facts = parse_json(told["facts"])
        if _digest(scores, facts) != told["hash"]:
            raise CheckpointError(f"{path}: damaged: its content does not match its hash; measure again")
        return Importance(scores=scores, **vars(typed(_Facts, facts)))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged, or no file of importance: {error}") from None
