"""From a run on the command line to a job: check, render, hand to sbatch."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_port.config.checks import problems
from megatron_port.config.launch_checks import launch_problems
from megatron_port.config.loader import Loaded, config_directories
from megatron_port.config.schema import RunConfig
from megatron_port.errors import ConfigError, EnvironmentFault
from megatron_port.launch import shipped
from megatron_port.launch.script import Order, render
from megatron_port.plan.guard import memory_problem
from megatron_port.runtime.atomic import write_output
from megatron_port.runtime.job import ask_record, run_tool

SBATCH_TIMEOUT_S = 300.0
"""A busy controller answers late; giving up earlier leaves a job that nobody knows of."""


@dataclass(frozen=True)
class Submitted:
    """Answer of sbatch to a script."""

    job_id: str
    """Empty where sbatch only tested it."""
    log: str
    """File of the job's output; %-patterns filled in as far as SLURM tells."""
    said: str
    """sbatch's own words."""


def order_of(loaded: Loaded, overrides: Sequence[str], after: str = "") -> Order:
    """Return how the job's script names the run: a shipped run by its name, any other file by its absolute path.

    Raises:
        ConfigError: ``after`` is no job id.
    """
    if after and not re.fullmatch(r"[0-9]+(_[0-9]+)?", after):
        raise ConfigError(f"--after {after!r} is no job id; give the number that sbatch printed")
    path = Path(os.path.abspath(loaded.files[-1]))  # links are kept: a site's short path may be one
    for folder in config_directories():
        if path.resolve().is_relative_to(folder):
            return Order(run=path.resolve().relative_to(folder).with_suffix("").as_posix(), overrides=tuple(overrides),
                         after=after)
    return Order(run=str(path), overrides=tuple(overrides), after=after)


def checked_script(config: RunConfig, order: Order) -> str:
    """Return the job script of a run that passes every check that needs no machine.

    Raises:
        ConfigError: every problem of the run and of the job.
    """
    ranks = config.cluster.nodes * config.cluster.gpus_per_node
    found = [*problems(config, world_size=ranks if ranks > 0 else None), *launch_problems(config)]
    if not found and config.launch.memory_check == "stop":
        found += filter(None, [memory_problem(config)])
    if found:
        raise ConfigError(list(dict.fromkeys(found)))
    return render(config, order, launch_dir=shipped.launch_folder())


def script_path(config: RunConfig) -> Path:
    """Return where ``launch submit`` leaves the script."""
    return Path(config.output_dir) / config.name / "job.sh"


def command(path: Path, options: Sequence[str]) -> list[str]:
    """Return the call of sbatch."""
    return ["sbatch", "--parsable", *options, str(path)]


def shown(words: Sequence[str]) -> str:
    """Return a command as it can be typed."""
    return " ".join(shlex.quote(w) for w in words)


def submit(config: RunConfig, text: str, options: Sequence[str] = ()) -> Submitted:
    """Write the script into the run's folder and queue it.

    Raises:
        EnvironmentFault: the folder cannot be written, sbatch is not here, or it refused; with its message.
    """
    path = script_path(config)
    write_output(path, text, mode=0o755)
    words = command(path, options)
    code, said = run_tool(words, timeout_s=SBATCH_TIMEOUT_S)
    if code == 127:
        raise EnvironmentFault(f"{said}; run this on a login node of {config.cluster.name}. The script is {path}")
    if code:
        raise EnvironmentFault(f"sbatch refused the job (exit {code}):\n{said}\nThe command was: {shown(words)}")
    found = re.findall(r"^([0-9]+)(?:;\S+)?$", said, re.MULTILINE)
    return Submitted(found[-1], _log_of(config, found[-1]), said) if found else Submitted("", "", said)


def _log_of(config: RunConfig, job_id: str) -> str:
    """Return the job's output file by SLURM's record; by the script where SLURM does not answer."""
    return ask_record(job_id).get("StdOut") or str(Path.cwd() / f"{config.name}-{job_id}.out")
