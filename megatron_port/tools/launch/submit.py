"""From a run on the command line to a job: check, keep what it needs, hand to sbatch."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_port.core.config.checks import problems
from megatron_port.core.config.dump import config_hash, to_toml
from megatron_port.core.config.launch_checks import launch_problems
from megatron_port.core.config.loader import Loaded
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.job import QueueEntry, ask_queue, ask_record, run_tool
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.io.atomic import write_output
from megatron_port.core.io.variables import variables
from megatron_port.core.package import ROOT, shipped_folder
from megatron_port.tools.launch import direct, shipped, snapshot
from megatron_port.tools.launch import record as records
from megatron_port.tools.launch.continuation import asked_fields
from megatron_port.tools.launch.forecast import planned
from megatron_port.tools.launch.record import QueuedJob, Record
from megatron_port.tools.launch.script import Order, render
from megatron_port.tools.plan.guard import memory_problem

SBATCH_TIMEOUT_S = 300.0
"""A busy controller answers late; giving up earlier leaves a job that nobody knows of."""
STAGED_IMAGE = "image"
"""``launch.stage`` that stages the container's image, a file."""
CLAIM_S = SBATCH_TIMEOUT_S + 60.0
"""A record without a job is taken for one that is being submitted for so long."""


@dataclass(frozen=True)
class Submitted:
    """Answer of sbatch to a script."""

    job_id: str
    """Empty where sbatch only tested it."""
    log: str
    """File of the job's output; %-patterns filled in as far as SLURM tells."""
    said: str
    """sbatch's own words."""
    script: Path


def run_folder_of(config: RunConfig) -> Path:
    """Return the folder of a run, absolute."""
    # Links are kept: a site's short path may be one.
    return Path(os.path.abspath(Path(config.output_dir) / config.name))


def order_of(loaded: Loaded, overrides: Sequence[str], after: str = "") -> Order:
    """Return how the job's script names the run: a shipped run by its name, any other file by its absolute path.

    Raises:
        ConfigError: ``after`` is no job id.
    """
    if after and not re.fullmatch(r"[0-9]+(_[0-9]+)?", after):
        raise ConfigError(f"--after {after!r} is no job id; give the number that sbatch printed")
    path = Path(os.path.abspath(loaded.files[-1]))  # links are kept: a site's short path may be one
    shipped, real = shipped_folder("configs"), path.resolve()
    run = real.relative_to(shipped).with_suffix("").as_posix() if real.is_relative_to(shipped) else str(path)
    return Order(run=run, overrides=tuple(overrides), after=after)


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


def interpreter_of(config: RunConfig) -> str:
    """Return the job's interpreter: PYTHON, ``launch.python``, the checkout's ``.venv``, else this one."""
    beside = ROOT / ".venv" / "bin" / "python"
    given = variables(("PYTHON",)).get("PYTHON") or config.launch.python
    return given or (str(beside) if os.access(beside, os.X_OK) else sys.executable)


def recorded_script(config: RunConfig, order: Order, folder: Path) -> str:
    """Return the script of a job that reads the record in ``folder`` and nothing else. Raises ConfigError."""
    own = Order(run=str(folder / records.CONFIG), after=order.after, record=str(folder), python=interpreter_of(config))
    return render(config, own, launch_dir=folder / records.CODE / "megatron_port" / "_launch")


def command(path: Path, options: Sequence[str]) -> list[str]:
    """Return the call of sbatch."""
    return ["sbatch", "--parsable", *options, str(path)]


def shown(words: Sequence[str]) -> str:
    """Return a command as it can be typed."""
    return " ".join(shlex.quote(w) for w in words)


def next_folder(config: RunConfig) -> Path:
    """Return where the next record of a run will be."""
    folder = run_folder_of(config)
    return records.record_folder(folder, max(records.numbers(folder), default=0) + 1)


def refuse_while_queued(run_folder: Path, *, after: str = "") -> None:
    """Refuse a second submission of a run folder while a job of an earlier one is queued or runs.

    Args:
        after: a job that the new one waits for; where it is the live one, it is meant to follow it.

    Raises:
        ConfigError: naming the job and what to do.
    """
    newest = records.newest(run_folder)
    if newest is None:
        return
    process = direct.running(run_folder, newest)
    if process is not None:
        raise ConfigError(
            f"{run_folder} is being trained by process {process.holder.pid} on {process.holder.host}, which no job "
            f"script started. Wait for it, end it (megatron-port launch cancel {run_folder}), or give this run another "
            "name (--set name=NAME)"
        )
    known = records.jobs(newest)
    queue = ask_queue()
    live = [queue[entry.job] for entry in known if entry.job in queue]
    live += [e for e in queue.values() if e.command.startswith(f"{newest}/") and e not in live]
    live = [e for e in live if e.job != after]
    if live:
        raise ConfigError(_already(run_folder, live[-1]))
    if not known and not after and time.time() - _made(newest) < CLAIM_S:
        raise ConfigError(
            f"{run_folder} is being submitted by somebody else (launch record {newest.name}); wait for its job id, or "
            "give this run another name (--set name=NAME)"
        )


def _made(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime
    return time.time()


def _already(run_folder: Path, entry: QueueEntry) -> str:
    state = f"{entry.state} ({entry.reason})" if entry.reason not in ("", "None") else entry.state
    return (
        f"{run_folder} was submitted already: job {entry.job} is {state}. Wait for it, cancel it (megatron-port launch "
        f"cancel {run_folder}), queue this one behind it (--after {entry.job}), or give this run another name "
        "(--set name=NAME)"
    )


def new_folder(run_folder: Path, *, after: str = "") -> tuple[int, Path]:
    """Claim the next record of a run folder.

    Raises:
        ConfigError: another submission of it is queued, runs, or is being made.
        OSError: the file system refused.
    """
    while True:
        number = max(records.numbers(run_folder), default=0) + 1  # before the look: who is faster takes this very one
        refuse_while_queued(run_folder, after=after)
        folder = records.claim(run_folder, number)
        if folder is not None:
            return number, folder


def fill(folder: Path, number: int, config: RunConfig, order: Order, **more: object) -> Record:
    """Write everything of a record but its script and its jobs; return it. Raises OSError, RecordFault."""
    text = to_toml(config)
    made = Record(
        number=number, name=config.name, time=time.time(), run=order.run, overrides=order.overrides, cwd=os.getcwd(),
        code=snapshot.keep_code(folder, config.plugins), environment=snapshot.interpreter(interpreter_of(config)),
        image=kept_image(config), config_digest=config_hash(config), planned=planned(config),
        **{"by": "submit", **more},  # type: ignore[arg-type]
    )
    write_output(folder / records.CONFIG, text)
    records.write_record(folder, made)
    return made


def kept_image(config: RunConfig) -> dict[str, object]:
    """Return the record's ``image``: of the archive that will be staged, else of the container. Raises RecordFault."""
    given = variables(("STAGE", "IMAGE"))
    stage = given.get("STAGE", "") or config.launch.stage
    image = given.get("IMAGE", "") or config.cluster.container_image
    if stage and stage != STAGED_IMAGE:
        return snapshot.image_of(stage)
    if not stage and not config.cluster.container:
        return {}
    return snapshot.image_of(image) if stage or os.path.isfile(image) else {"name": image}


def submit(config: RunConfig, order: Order, options: Sequence[str] = ()) -> Submitted:
    """Keep what the job needs in a launch record of the run's folder, and queue it.

    Raises:
        ConfigError: a job of the folder is queued or runs already.
        EnvironmentFault: the folder cannot be written, sbatch is not here, or it refused; with its message.
    """
    run_folder = run_folder_of(config)
    try:
        number, folder = new_folder(run_folder, after=order.after)
    except OSError as error:
        raise unwritable(run_folder, error) from error
    try:
        path = folder / records.SCRIPT
        fill(folder, number, config, order, options=records.kept_options(options))
        write_output(path, recorded_script(config, order, folder), mode=0o755)
        code, said = run_tool(command(path, options), timeout_s=SBATCH_TIMEOUT_S)
        found = re.findall(r"^([0-9]+)(?:;\S+)?$", said, re.MULTILINE)
        if code or not found:
            records.discard(folder)
            return _not_queued(config, code, said, path, options)
        asked = ask_record(found[-1])
        log = asked.get("StdOut") or str(Path.cwd() / f"{config.name}-{found[-1]}.out")
        records.add_job(folder, QueuedJob(job=found[-1], time=time.time(), log=log, asked=asked_fields(asked)))
    except OSError as error:
        records.discard(folder)
        raise unwritable(run_folder, error) from error
    except BaseException:
        if not records.jobs(folder):
            records.discard(folder)
        raise
    return Submitted(found[-1], log, said, path)


def _not_queued(config: RunConfig, code: int, said: str, path: Path, options: Sequence[str]) -> Submitted:
    if code == 127:
        raise EnvironmentFault(
            f"{said}; run this on a login node of {config.cluster.name} (launch show writes the script without SLURM)"
        )
    if code and "configuration source" in said:
        raise EnvironmentFault(
            f"sbatch is here, but SLURM's configuration is not ({said.splitlines()[-1]}); run this on a login node of "
            f"{config.cluster.name} (launch show writes the script without SLURM)"
        )
    if code:
        words = shown(command(path, records.kept_options(options)))
        raise EnvironmentFault(f"sbatch refused the job (exit {code}):\n{said}\nThe command was: {words}")
    return Submitted("", "", said, path)


def unwritable(folder: Path, error: OSError) -> EnvironmentFault:
    """Return the error of a run folder that cannot be written."""
    return EnvironmentFault(
        f"{folder} cannot be written: {error.strerror or error}; give this user write permission and space there, or "
        "choose another output_dir"
    )


def who() -> str:
    """Return ``ann@login1``."""
    return f"{getpass.getuser()}@{socket.gethostname()}"
