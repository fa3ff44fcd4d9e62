"""The model of a saved checkpoint: where the checkpoint is, and what its configuration says of model and adapters."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

from megatron_port.core.checkpoint.reader import find_latest
from megatron_port.core.config.features import FineTuningConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import CheckpointError


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


def model_of(config: dict[str, Any], where: str) -> ModelConfig:
    """The ``model`` table of a saved configuration.

    Raises:
        CheckpointError: it has none, or one that this version does not understand; says how to give it.
    """
    table = config.get("model")
    if not isinstance(table, dict):
        raise CheckpointError(f"{where}: no model configuration is saved with it; give --model FILE.toml")
    try:
        model: ModelConfig = _typed(ModelConfig(), table, "model")
        return model
    except TypeError as error:
        raise CheckpointError(f"{where}: damaged model configuration ({error}); give --model FILE.toml") from None


def _typed(defaults: Any, table: dict[str, Any], name: str) -> Any:
    """Return ``defaults`` with the fields of a table; others of it are left out. TypeError: a value of another type."""
    known: dict[str, Any] = {}
    for key in table.keys() & type(defaults).__dataclass_fields__.keys():
        value, default = table[key], getattr(defaults, key)
        if is_dataclass(default) and isinstance(value, dict):
            value = _typed(default, value, f"{name}.{key}")
        elif isinstance(value, list) and all(isinstance(entry, str | int | float) for entry in value):
            value = tuple(value)  # JSON and TOML have arrays alone
        if type(value) is not type(default) and not (isinstance(value, int) and isinstance(default, float)):
            raise TypeError(f"{name}.{key} is {value!r}")
        known[key] = value
    return replace(defaults, **known)


def tuning_of(config: Any, where: str) -> FineTuningConfig:
    """Return the ``fine_tuning`` table of a saved configuration; without one no weights were frozen.

    Raises:
        CheckpointError: one that this version does not understand.
    """
    table = config.get("fine_tuning") if isinstance(config, dict) else None
    if table is None:
        return FineTuningConfig()
    try:
        values = {**table, "targets": tuple(map(str, table["targets"]))}
        return FineTuningConfig(
            method=values["method"], rank=int(values["rank"]), alpha=float(values["alpha"]),
            rslora=bool(values["rslora"]), dropout=float(values["dropout"]), targets=values["targets"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: damaged fine_tuning configuration ({error})") from None
