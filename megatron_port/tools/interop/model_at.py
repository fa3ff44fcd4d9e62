"""Find the model at a place: a run folder, a checkpoint, an import, or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from megatron_port.core.checkpoint.reader import find_latest, open_checkpoint
from megatron_port.core.config.model import ModelConfig
from megatron_port.core.errors import CheckpointError
from megatron_port.tools.interop.hf_files import HFFolder, is_hf
from megatron_port.tools.interop.sidecar import model_of


def checkpoint_at(path: Path) -> Path | None:
    """Return the checkpoint that a path names, or the newest one of the folder or run that it names; None: there is
    none."""
    if (path / "manifest.json").is_file():
        return path
    places = (place for place in (path / "checkpoints", path) if place.is_dir())
    return next((found for place in places if (found := find_latest(place)) is not None), None)


def nothing_at(path: Path) -> CheckpointError:
    """Return the error for a path without a model."""
    return CheckpointError(
        f"{path} is neither a Hugging Face folder (config.json and safetensors), nor a checkpoint, nor a folder with "
        "one in it"
    )


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
