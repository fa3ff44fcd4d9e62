"""Where the files of a run are."""

from __future__ import annotations

from pathlib import Path

from megatron_port.core.config.schema import RunConfig

FOLDER = "checkpoints"
"""Name of the folder of checkpoints within a run's."""


def run_folder(config: RunConfig) -> Path:
    """Return the folder of a run: metrics, chart, configuration and checkpoints."""
    return Path(config.output_dir) / config.name
