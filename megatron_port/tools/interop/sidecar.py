"""``megatron_port.json``: what an export holds beyond tensors, so that importing it back loses nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_port.core.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.core.checkpoint.shard import write_text
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import CheckpointError
from megatron_port.core.io.files import read_regular
from megatron_port.core.io.typed_json import parse_json
from megatron_port.run.saved_model import checkpoint_at, model_of, nothing_at
from megatron_port.tools.interop.hf_files import is_hf, open_sampled

NAME = "megatron_port.json"
SCHEMA = "megatron_port.export"
_MAX_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """Counters, scalars and configuration of the exported checkpoint."""

    step: int
    samples: int
    tokens: int
    scalars: dict[str, float | int]
    extra: dict[str, Any]
    config: dict[str, Any]
    names: str
    """``canonical`` or ``megatron``: how tensors are called."""


def write_sidecar(folder: Path, checkpoint: Checkpoint, names: str) -> None:
    """Write :data:`NAME` into ``folder``."""
    state = checkpoint.manifest.state
    body = {
        "schema": SCHEMA, "version": 1, "names": names, "step": state.step, "samples": state.samples,
        "tokens": state.tokens, "scalars": dict(state.scalars), "extra": dict(state.extra), "config": state.config,
    }
    write_text(folder / NAME, json.dumps(body, indent=1, sort_keys=True) + "\n")


def read_sidecar(folder: Path) -> Sidecar | None:
    """The export's sidecar; None if it has none. Raises CheckpointError where it is damaged."""
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes; such a file has at most {_MAX_BYTES}")
        body = parse_json(read_regular(path, _MAX_BYTES))
        if body["schema"] != SCHEMA or body["version"] != 1:
            raise CheckpointError(f"{path}: schema {body['schema']!r} version {body['version']!r} is not known here")
        counters = [body[key] for key in ("step", "samples", "tokens")]
        parts = [body[key] for key in ("scalars", "extra", "config")]
        whole = all(isinstance(n, int) and n >= 0 for n in counters) and all(isinstance(p, dict) for p in parts)
        if not whole or body["names"] not in ("canonical", "megatron"):
            raise ValueError("a field has another type than it should")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: {type(error).__name__}: {error}") from None
    return Sidecar(**{key: body[key] for key in Sidecar.__dataclass_fields__})


# Find the model at a place: a run folder, a checkpoint, an import, or a Hugging Face folder.

def model_at(path: Path | str) -> ModelConfig:
    """Return the model of the weights at ``path``, of which none is read.

    Raises:
        CheckpointError: nothing with weights is there, or its description is damaged.
    """
    path = Path(path)
    if is_hf(path):
        return open_sampled(path).model
    found = checkpoint_at(path)
    if found is None:
        raise nothing_at(path)
    checkpoint = open_checkpoint(found)
    try:
        saved = checkpoint.manifest.state.config
        return model_of(saved if isinstance(saved, dict) else {}, str(found))
    finally:
        checkpoint.close()
