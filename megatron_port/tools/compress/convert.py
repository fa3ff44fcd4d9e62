"""A new checkpoint of a compressed model: read slice by slice through a reader, staged on disk, committed at once.

It is step 0 of a new run: weights and the buffers of routers, no optimizer state. Its manifest says what it was made of
and how (``extra.compressed``); beside it lie ``model.toml``, which a run names in ``extends``, and the source's
tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_port.core.checkpoint.disk import write_text
from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.checkpoint.slices import slabs
from megatron_port.core.config.checks import problems
from megatron_port.core.config.dump import as_dict
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.dist.state import BUFFER, WEIGHT, StateReader
from megatron_port.core.dist.work import Advance, Tally, silent
from megatron_port.core.errors import ConfigError
from megatron_port.core.model.shapes import LAST_STEP, buffer_shapes, parameter_shapes
from megatron_port.run.weights import Weights
from megatron_port.tools.interop.commit import Imported, commit_import
from megatron_port.tools.interop.folder import scratch
from megatron_port.tools.interop.import_hf import KEPT, MODEL_FILE, SLAB_BYTES, copy_companions, model_toml
from megatron_port.tools.interop.staged import Stage


def convert(
    source: Weights, model: ModelConfig, read: StateReader, out: Path, *, provenance: Mapping[str, Any],
    slab_bytes: int = SLAB_BYTES, note: Callable[[str], None] = print, advance: Advance = silent,
) -> Path:
    """Write ``model``, whose weights ``read`` gives, as ``out/step-00000000``; return that folder.

    Args:
        provenance: what was done, JSON values; the source's own is kept within it.
        slab_bytes: memory that one slice takes; the whole model is never in memory.

    Raises:
        ConfigError: no run can train such a model, and what to change.
        CheckpointError: the source is damaged, a checkpoint is there already, or the disk refuses. Nothing is left.
    """
    wrong = [text for text in problems(RunConfig(model=model, engine="native")) if text.startswith("model.")]
    if wrong:
        raise ConfigError(wrong)
    shapes = {(name, WEIGHT): shape for name, shape in parameter_shapes(model).items()}
    shapes |= {(name, BUFFER): shape for name, shape in buffer_shapes(model).items()}
    size = 4 * sum(map(prod, shapes.values()))
    with scratch(out, 2 * size) as folder:
        stage = Stage(folder, put_down=Tally(advance, size).add)
        for (name, kind), shape in shapes.items():
            for offset, extent in slabs(shape, max(1, slab_bytes // 4)):
                part = torch.zeros(extent) if name.endswith(LAST_STEP) else read(name, kind, offset, extent)
                stage.put(name, kind, shape, offset, part)
        found = Imported(model=model, pieces=stage.pieces(), **_described(source, model, provenance))
        path = commit_import(found, out, source=source.path, weights_only=True, note=lambda text: None)
    if source.tokenizer_folder is not None:
        copy_companions(source.tokenizer_folder, out / KEPT)
    write_text(out / MODEL_FILE, model_toml(model))
    return path


def _described(source: Weights, model: ModelConfig, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the manifest says beside the weights: the source's configuration with the new model in it, its
    tokenizer, and the provenance."""
    made: dict[str, Any] = {"source": str(source.path), **provenance}
    config = as_dict(RunConfig(model=model))
    if not (source.path / "manifest.json").is_file():
        return {"config": config, "extra": {"compressed": made}}
    checkpoint = open_checkpoint(source.path)
    state = checkpoint.manifest.state
    checkpoint.close()
    made |= {"source_step": state.step, "source_tokens": state.tokens}
    if "compressed" in state.extra:
        made["before"] = state.extra["compressed"]
    saved = state.config if isinstance(state.config, dict) else {}
    config |= {**saved, "model": config["model"], "fine_tuning": config["fine_tuning"]}
    extra: dict[str, Any] = {"compressed": made}
    if isinstance(state.extra.get("tokenizer"), str):
        extra["tokenizer"] = state.extra["tokenizer"]
    return {"config": config, "extra": extra, "tokenizer": dict(state.tokenizer), "data": dict(state.data)}
