"""Where the files of a run are: can the folder be written, and does a checkpoint fit into it?"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from megatron_port.core.checkpoint.shard import free_bytes
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import EnvironmentFault

FOLDER = "checkpoints"
"""Name of the folder of checkpoints within a run's."""


def run_folder(config: RunConfig) -> Path:
    """Return the folder of a run: metrics, chart, configuration and checkpoints."""
    return Path(config.output_dir) / config.name


_PROBE = 1 << 16
"""Size of the write probe; it exceeds the slack of blocks that a full file system has already allocated."""


def check_output(config: RunConfig, trained: int) -> None:
    """Check the run's folder by writing and removing a file; rank 0 calls this before it meets the others.

    A folder that refuses would be found hours later, by the first save. ``trained``: the parameters that updates
    change. One checkpoint has a master and two moments of each, beside headers and manifest.

    Raises:
        EnvironmentFault: the folder cannot be made or written, or has no room for one checkpoint.
    """
    folder = run_folder(config)
    probe = folder / f".write-check-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with open(probe, "wb", buffering=0) as stream:
                written = stream.write(bytes(_PROBE))
                os.fsync(stream.fileno())
            if written != _PROBE:
                raise OSError(28, os.strerror(28))
        finally:
            with suppress(OSError):
                probe.unlink()
    except OSError as error:
        raise EnvironmentFault(
            f"{folder}: cannot be written ({error.strerror or error}), so nothing of this run could be saved; make "
            "room or give this user write permission there, or choose another output_dir"
        ) from error
    needed, free = 3 * (8 if config.precision.dtype == "fp64" else 4) * trained, free_bytes(folder)
    if free is not None and free < needed:
        raise EnvironmentFault(
            f"{folder}: {free} bytes are free, and one checkpoint of this run takes {needed}; make room, or choose "
            "another output_dir"
        )
