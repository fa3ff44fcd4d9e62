"""A sweep: one job array, one run folder and one launch record for each of its tasks.

    runs/NAME/sweep/0001/   code/, job.sh, sweep.json
    runs/NAME-000/launch/0001/   the record of task 0; its code and script are those of the sweep
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_port.core.config.dump import to_toml
from megatron_port.core.config.loader import Loaded, load
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.io.files import write_output
from megatron_port.run import launch_record as records
from megatron_port.run import sources as snapshot
from megatron_port.run.launch_record import QueuedJob, Record
from megatron_port.run.launchers import ask_record, run_tool
from megatron_port.tools.launch import submit
from megatron_port.tools.launch.script import Order, render, sbatch_lines, sbatch_quote, shell_quote
from megatron_port.tools.launch.submit import asked_fields, planned

FOLDER, FILE = "sweep", "sweep.json"
MOST_TASKS = 1000
"""As many as most sites allow in an array."""


@dataclass(frozen=True)
class SweepTask:
    """One run of a sweep."""

    index: int
    loaded: Loaded
    changes: tuple[str, ...]
    """``a.b=value``."""

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return submit.run_folder_of(self.loaded.config)


def values_of(text: str) -> tuple[str, list[str]]:
    """Split ``a.b=1,2,3``; commas within brackets or quotes do not count.

    Raises:
        ConfigError: it has another form.
    """
    name, equals, rest = text.partition("=")
    pieces = re.findall(r"""(?:\[[^\]]*\]|"[^"]*"|'[^']*'|[^,])+""", rest)
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", name.strip()) or not pieces:
        raise ConfigError(f"--vary {text!r} is not of the form a.b=VALUE,VALUE, e.g. --vary optimizer.lr=1e-4,3e-4")
    return name.strip(), [p.strip() for p in pieces]


def tasks_of(run_file: str, overrides: Sequence[str], vary: Sequence[str]) -> list[SweepTask]:
    """Return one task for each combination, named NAME-000 and so on.

    Raises:
        ConfigError: a combination is not legal, or the tasks ask SLURM for different things.
    """
    axes = [values_of(text) for text in vary]
    if not axes:
        raise ConfigError("a sweep needs --vary a.b=VALUE,VALUE at least once")
    names = [name for name, _ in axes]
    bad = [n for n in names if n in ("name", "output_dir") or names.count(n) > 1]
    if bad:
        raise ConfigError(f"--vary {bad[0]}: each setting once, and neither name nor output_dir")
    combinations = list(itertools.product(*(values for _, values in axes)))
    if len(combinations) > MOST_TASKS:
        raise ConfigError(f"{len(combinations)} combinations; a sweep has at most {MOST_TASKS}")
    base = load(run_file, overrides).config.name
    out = []
    for index, chosen in enumerate(combinations):
        changes = tuple(f"{name}={value}" for name, value in zip(names, chosen))
        loaded = load(run_file, [*overrides, *changes, f'name="{base}-{index:03d}"'])
        submit.checked_script(loaded.config, Order(run=run_file))
        out.append(SweepTask(index, loaded, changes))
    asked = {tuple(sbatch_lines(t.loaded.config)[1:]) for t in out}
    if len(asked) > 1:
        raise ConfigError(
            "the tasks of an array ask for the same nodes, tasks, time and options, and these settings change them; "
            "give each value a sweep of its own"
        )
    return out


def script_of(tasks: Sequence[SweepTask], folder: Path, name: str, at_once: int) -> str:
    """Return the array's script. ``at_once``: tasks that may run at a time; 0: all."""
    config = tasks[0].loaded.config
    place = folder / records.CODE / "megatron_port" / "_launch"
    text = render(config, Order(run="-", python=submit.interpreter_of(config)), launch_dir=place)
    limit = f"%{at_once}" if at_once else ""
    lines = [
        line for line in text.removesuffix("\n").split("\n")  # splitlines would cut at U+2028, too, within a value
        if not line.startswith(("#SBATCH --job-name", "#SBATCH --output"))
    ]
    own = [shell_quote(str(records.record_folder(t.folder, 1)), "the folder of a task") for t in tasks]
    output = "#SBATCH --output=%x-%A_%a.out"
    array = [f"#SBATCH --array=0-{len(tasks) - 1}{limit}", f"#SBATCH --job-name={sbatch_quote(name, 'name')}", output]
    at = lines.index("set -euo pipefail")
    chosen = ["job_records=(", *(f"  {word}" for word in own), ")", "job_record=${job_records[$SLURM_ARRAY_TASK_ID]}"]
    return "\n".join([*lines[: at - 1], *array, "", lines[at], "", *chosen, *lines[at + 1 :]]) + "\n"


def submit_sweep(
    tasks: Sequence[SweepTask], run_file: str, overrides: Sequence[str], options: Sequence[str], at_once: int
) -> tuple[str, Path]:
    """Make the records and queue the array; return its job id and the sweep's folder.

    Raises:
        ConfigError: a task's folder has been used already.
        EnvironmentFault: a folder cannot be written, or sbatch refused.
    """
    base = tasks[0].folder.name.rpartition("-")[0]
    root = tasks[0].folder.parent / base / FOLDER
    used = [t.folder for t in tasks if t.folder.exists() and any(t.folder.iterdir())]
    if used:
        raise ConfigError(
            f"{len(used)} of the tasks' folders are there already, e.g. {used[0]}; give the sweep another name"
        )
    made: list[Path] = []
    try:
        folder = _claimed(root)
        made.append(folder)
        code = snapshot.keep_code(folder, tasks[0].loaded.config.plugins)
        environment = snapshot.interpreter(submit.interpreter_of(tasks[0].loaded.config))
        name = f"{base}-sweep"
        write_output(folder / records.SCRIPT, script_of(tasks, folder, name, at_once), mode=0o755)
        about = [{"task": t.index, "folder": str(t.folder), "set": list(t.changes)} for t in tasks]
        write_output(folder / FILE, json.dumps({"run": run_file, "tasks": about}, indent=1) + "\n")
        for task in tasks:
            made.append(_task_record(task, folder, run_file, overrides, options, code, environment))
        code_, said = run_tool(submit.command(folder / records.SCRIPT, options), timeout_s=submit.SBATCH_TIMEOUT_S)
        found = re.findall(r"^([0-9]+)(?:;\S+)?$", said, re.MULTILINE)
        if code_ or not found:
            raise EnvironmentFault(f"sbatch refused the array (exit {code_}):\n{said}")
    except OSError as error:
        _undo(made)
        raise submit.unwritable(root, error) from error
    except BaseException:
        _undo(made)
        raise
    _note_jobs(tasks, found[-1])
    return found[-1], folder


def _claimed(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    while True:
        numbers = [int(n) for n in os.listdir(root) if n.isdigit()]
        folder = root / f"{max(numbers, default=0) + 1:04d}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue


def _task_record(
    task: SweepTask, folder: Path, run_file: str, overrides: Sequence[str], options: Sequence[str],
    code: dict[str, object], environment: dict[str, object],
) -> Path:
    place = records.claim(task.folder, 1)
    if place is None:
        raise ConfigError(f"{task.folder} is being used by somebody else; give the sweep another name")
    config = task.loaded.config
    for name in (records.CODE, records.SCRIPT):
        (place / name).symlink_to(os.path.relpath(folder / name, place))
    write_output(place / records.CONFIG, to_toml(config))
    records.write_record(place, Record(
        number=1, name=config.name, time=time.time(), by="submit", run=run_file, overrides=(*overrides, *task.changes),
        options=records.kept_options(options), cwd=os.getcwd(), sweep=str(folder), task=task.index, code=code,
        environment=environment, image=submit.kept_image(config), planned=planned(config),
    ))
    return place


def _undo(made: Sequence[Path]) -> None:
    for folder in made:
        records.discard(folder)
        for parent in (folder.parent, folder.parent.parent):
            try:
                parent.rmdir()
            except OSError:
                break


def _note_jobs(tasks: Sequence[SweepTask], job: str) -> None:
    asked = ask_record(f"{job}_{tasks[0].index}")
    log = asked.get("StdOut", "")
    kept = asked_fields(asked)
    for task in tasks:
        own = re.sub(rf"{job}_(4294967294|{tasks[0].index}|\[[^\]]*\])", f"{job}_{task.index}", log)
        place = records.record_folder(task.folder, 1)
        records.add_job(place, QueuedJob(job=f"{job}_{task.index}", time=time.time(), log=own, asked=kept))
