"""Find the model at a place: a run folder, a checkpoint, an import, or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.config.schema import ModelConfig
from megatron_port.run.saved_model import checkpoint_at, model_of, nothing_at
from megatron_port.tools.interop.hf_files import HFFolder, is_hf


def model_at(path: Path | str) -> ModelConfig:
    """Return the model of the weights at ``path``, of which none is read.

    Raises:
        CheckpointError: nothing with weights is there, or its description is damaged.
    """
    path = Path(path)
    if is_hf(path):
        return HFFolder(path).model
    found = checkpoint_at(path)
    if found is None:
        raise nothing_at(path)
    checkpoint = open_checkpoint(found)
    try:
        saved = checkpoint.manifest.state.config
        return model_of(saved if isinstance(saved, dict) else {}, str(found))
    finally:
        checkpoint.close()
