"""What a command that reads a run may be given: its folder, its run file, or the name of a shipped one."""

from __future__ import annotations

from pathlib import Path

from megatron_port.core.config.loader import RUN_CONFIG, did_you_mean, find_config, load, shipped_names
from megatron_port.core.config.ranges import local_path
from megatron_port.core.errors import ConfigError


def run_folder_of(name: str, *, exists: bool = True) -> Path:
    """Return the folder of the run that ``name`` stands for: a folder, a run file, or the name of a shipped one.

    ``exists``: it must be there.

    Raises:
        ConfigError: none of the three, a file that is no run, or a run that has not been started.
    """
    path = local_path(name)
    if path.is_dir():
        return path
    found = find_config(name)
    if found is None:
        near = did_you_mean(name.removesuffix(".toml"), shipped_names())
        raise ConfigError(
            f"{name!r} is neither the folder of a run, nor a run file, nor the name of a shipped one{near}"
        )
    if found.name == RUN_CONFIG and (found.parent / "run.json").is_file():  # in a run's folder, which may have moved
        return found.parent
    config = load(name).config
    folder = Path(config.output_dir) / config.name
    if exists and not folder.is_dir():
        raise ConfigError(f"{name}: the run has no folder {folder} yet: nothing was trained there. "
                          f"Start it with `megatron-port train {name}`")
    return folder
