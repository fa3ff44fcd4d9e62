"""Saving and finding the state of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_port.checkpoint.format import SavedState
from megatron_port.checkpoint.reader import Checkpoint, find_latest, open_checkpoint
from megatron_port.checkpoint.writer import save_checkpoint
from megatron_port.config.dump import as_dict
from megatron_port.config.schema import RunConfig
from megatron_port.engine.api import Engine
from megatron_port.errors import CheckpointError, PortError
from megatron_port.model.shapes import parameter_shapes
from megatron_port.runtime.agreement import agree
from megatron_port.train.session import Session

FOLDER = "checkpoints"


def run_folder(config: RunConfig) -> Path:
    """Where a run's metrics, picture, configuration and checkpoints are."""
    return Path(config.output_dir) / config.name


def _from_rank_zero(value: Any, session: Session) -> Any:
    """Rank 0's value on every rank. At start-up only."""
    if session.cpu_group is None or session.info.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def find_checkpoint(session: Session) -> Path | None:
    """The checkpoint to start from, as ``checkpoint.resume`` says; rank 0 looks, all use what it found.

    Raises CheckpointError on every rank when a path was given and nothing whole is there.
    """
    config = session.config
    found: Path | None = None
    failure: PortError | None = None
    if session.speaker and config.checkpoint.resume != "never":
        try:
            if config.checkpoint.resume == "auto":
                found = find_latest(run_folder(config) / FOLDER, note=session.logger.log)
            else:
                asked = Path(config.checkpoint.resume)
                found = asked if (asked / "manifest.json").is_file() else find_latest(asked, note=session.logger.log)
                if found is None:
                    found = find_latest(asked / FOLDER, note=session.logger.log)
                if found is None:
                    raise CheckpointError(
                        f"checkpoint.resume = \"{asked}\": no whole checkpoint there; give a step folder, a folder of "
                        'them, "auto" or "never"'
                    )
        except PortError as error:
            failure = error
    agree(failure)
    return _from_rank_zero(found, session)


def check_same_model(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Raise CheckpointError naming the model fields that differ; a layout may differ, a model may not."""
    saved = checkpoint.manifest.state.config
    mine = as_dict(config)["model"]
    theirs = saved.get("model", {}) if isinstance(saved, dict) else {}
    free = {"name", "hidden_dropout", "attention_dropout", "init_std"}
    different = [
        f"{key} is {theirs[key]!r} there and {value!r} here"
        for key, value in mine.items()
        if key not in free and key in theirs and theirs[key] != value
    ]
    if different:
        raise CheckpointError(f"{checkpoint.path} holds another model: " + "; ".join(different))


def load_into(engine: Engine, path: Path, session: Session, *, weights_only: bool = False) -> Checkpoint:
    """Load a checkpoint of any layout into the engine. Collective; the same error on every rank."""
    failure: PortError | None = None
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = open_checkpoint(path)
        check_same_model(checkpoint, session.config)
        if weights_only:
            engine.load_weights(checkpoint.read)
        else:
            engine.load_state(checkpoint.read, dict(checkpoint.scalars))
    except PortError as error:
        failure = error
    agree(failure, where=str(session.ctx.coords))
    assert checkpoint is not None
    return checkpoint


def save_state(
    engine: Engine, session: Session, *, step: int, samples: int, skipped: int, extra: dict[str, Any] | None = None
) -> Path:
    """Commit a checkpoint of the whole run. Collective."""
    config = session.config
    state = SavedState(
        step=step, samples=samples, tokens=samples * config.model.seq_length, layout=config.layout,
        config=as_dict(config), scalars=engine.scalar_state(),
        extra={"skipped_total": skipped, **(extra or {})},
    )
    expected = parameter_shapes(config.model) if session.speaker else None
    return save_checkpoint(
        run_folder(config) / FOLDER, state, engine.state_pieces(), keep=config.checkpoint.keep,
        group=session.cpu_group if session.info.world_size > 1 else None, expected=expected, note=session.logger.log,
    )
