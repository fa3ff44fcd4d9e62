"""From a run on the command line to a job: check, keep what it needs, hand to sbatch."""

from __future__ import annotations

import contextlib
import getpass
import math
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_port.core.config.checks import problems
from megatron_port.core.config.dump import to_toml
from megatron_port.core.config.loader import Loaded, load
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.io.files import write_output
from megatron_port.core.io.variables import variables
from megatron_port.core.package import ROOT, shipped_folder
from megatron_port.ext.telemetry.console import duration
from megatron_port.run import direct_start as direct
from megatron_port.run import launch_record as records
from megatron_port.run import sources as snapshot
from megatron_port.run.config_hash import config_hash
from megatron_port.run.launch_record import SCRIPT, Planned, QueuedJob, Record, add_job, cancelled, jobs, read_record
from megatron_port.run.launchers import (
    SERIES,
    Job,
    QueueEntry,
    ask_queue,
    ask_record,
    expand_hosts,
    fate_of,
    run_tool,
)
from megatron_port.tools.launch.launch_checks import launch_problems, wall_seconds
from megatron_port.tools.launch.script import Order, render, render_shipped, site_block
from megatron_port.tools.plan.guard import memory_problem
from megatron_port.tools.plan.text import make_plan

# The job scripts that come with the program, ``launch/*.sh`` and ``launch/sites/*.sh``, made from ``configs/``.

RUNS = {run.replace("-", "_"): run for run in (
    "frontier-22b", "frontier-175b", "frontier-1t", "frontier-1t-tp4", "lumi-22b", "lumi-175b", "perlmutter-22b",
    "perlmutter-175b", "frontier-22b-zero3", "frontier-175b-16nodes", "qwen3-30b-frontier", "gpt-1t-32k-frontier",
)}
"""Script → run file under ``configs/runs``."""

_MADE = "Made by `megatron-port launch sites` from {}; edit that."
_USE = "sbatch [options] launch/{}.sh [--set a.b=value …]; options of sbatch win over the lines below."
_ANY = (
    "Any cluster with SLURM: one process per task, as many nodes and tasks as sbatch is asked for.",
    "sbatch -N 4 --ntasks-per-node=8 --gpus-per-node=8 launch/slurm.sh run.toml [--set a.b=value …]",
)


def launch_folder() -> Path:
    """Return the folder with ``common.sh``: the package's ``_launch``, in a checkout a link to ``launch/``."""
    return shipped_folder("launch")


def site_names() -> list[str]:
    """Return the clusters that have a file."""
    return sorted({p.stem for p in shipped_folder("configs").glob("clusters/*.toml")})


def shipped_scripts() -> dict[str, str]:
    """Return every generated file by its path in :func:`launch_folder`."""
    out = {}
    for name in site_names():
        source = f"clusters/{name}"
        note = f"# shellcheck shell=bash disable=SC2034,SC2154\n# {_MADE.format(f'configs/{source}.toml')}\n"
        out[f"sites/{name}.sh"] = note + site_block(load(source).config.cluster)
    out["slurm.sh"] = render_shipped(Order(run=""), site="slurm", head=[*_ANY, _MADE.format("configs/clusters")])
    for script, run in RUNS.items():
        source = f"runs/{run}"
        config = load(source).config
        head = [_USE.format(script), _MADE.format(f"configs/{source}.toml")]
        order = Order(run=source)
        out[f"{script}.sh"] = render_shipped(order, site=config.cluster.name, head=head, config=config)
    return out


def stale_scripts() -> list[str]:
    """Return the generated files that are missing, out of date, or of no cluster any more."""
    folder, wanted = launch_folder(), shipped_scripts()
    out = [name for name, text in wanted.items() if not _holds(folder / name, text)]
    return out + [f"sites/{p.name}" for p in sorted(folder.glob("sites/*.sh")) if f"sites/{p.name}" not in wanted]


def write_shipped() -> list[str]:
    """Bring the generated files up to date; return the names of those that changed. Raises EnvironmentFault."""
    folder, wanted, stale = launch_folder(), shipped_scripts(), stale_scripts()
    for name in stale:
        if name in wanted:
            write_output(folder / name, wanted[name], mode=0o644 if name.startswith("sites/") else 0o755)
        else:
            (folder / name).unlink()
    return stale


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


# Queue a job again, or hand its work to a new job: the record's script, with what was asked for at first.

OPTIONS = (
    ("JobName", "job-name"), ("NumNodes", "nodes"), ("TimeLimit", "time"), ("Partition", "partition"),
    ("Account", "account"), ("QOS", "qos"), ("Reservation", "reservation"), ("Features", "constraint"),
    ("NtasksPerN:B:S:C", "ntasks-per-node"), ("CPUs/Task", "cpus-per-task"), ("TresPerNode", "gres"),
    ("ExcNodeList", "exclude"), ("MinMemoryNode", "mem"), ("Network", "network"),
)
"""Field of a job's record, and the option of sbatch that asks for it."""
ONCE = (
    "--hold", "-H", "--wait", "-W", "--begin", "-b", "--array", "-a", "--dependency", "-d", "--parsable", "--export",
)
"""Options that were meant for the first job."""
WITH_VALUE = ("-b", "-a", "-d", "--begin", "--array", "--dependency", "--export")


def asked_fields(record: Mapping[str, str], *, tasks: bool = False) -> dict[str, str]:
    """Return what a job asked for, of SLURM's record of it as it was queued: once a node is lost it shows what is left.

    ``tasks``: their number was asked for (-n); otherwise SLURM's record has one it made up.
    """
    names = [field for field, _ in OPTIONS] + ["StdOut"] + (["NumTasks"] if tasks else [])
    return {name: record[name] for name in names if name in record}


def lasting(options: Sequence[str]) -> list[str]:
    """Return those of the first job's options that hold for every job after it."""
    out: list[str] = []
    skip = False
    for word in options:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in ONCE:
            skip = name in WITH_VALUE and not equals
        elif re.match(r"-[bad][^-]", word):  # -dafterany:1
            continue
        else:
            out.append(word)
    return out


def chain_command(folder: Path, record: Record, job: Job) -> list[str]:
    """Return the sbatch command of a job like the record's first, which starts when ``job`` has ended."""
    first = next(iter(jobs(folder)), QueuedJob(job=job.id))
    asked = dict(first.asked)
    if "NumNodes" not in asked and job.node_list:
        asked["NumNodes"] = str(len(expand_hosts(job.node_list)))
    command = ["sbatch", "--parsable", *lasting(record.options)]
    for field, option in OPTIONS:
        value = asked.get(field, "")
        if field == "NumNodes":
            value = value.partition("-")[0]
        if field == "NtasksPerN:B:S:C":
            value = value.partition(":")[0]
        if field == "TresPerNode":
            value = re.sub(r"(^|,)gres[:/]", r"\1", value)  # gres:gpu:8 or gres/gpu:8
        if value and value not in ("(null)", "N/A", "0"):
            command.append(f"--{option}={value}")
    if asked.get("NtasksPerN:B:S:C", "0").startswith("0:") and asked.get("NumTasks", "").isdigit():
        command.append(f"--ntasks={asked['NumTasks']}")
    log = asked.get("StdOut", "")
    if log:
        folder_of, slash, name = log.rpartition("/")
        name = re.sub(rf"(?<!\d){first.job.partition('_')[0]}(?!\d)", "%j", name.replace("%", "%%"))
        command.append(f"--output={folder_of.replace('%', '%%')}{slash}{name}")
    if record.sweep:
        command.append(f"--array={record.task}")
    command += [f"--dependency=afterany:{job.id}", f"--export=ALL,{SERIES}={job.series}"]
    return [*command, str(folder / SCRIPT), *record.arguments]


def continue_job(action: str, job: Job, folder: Path, *, asked: Sequence[str]) -> str:
    """Do what an action asks for: ``requeue`` or ``chain``. Return a line for the log.

    Nothing is done where the job was cancelled meanwhile, or SLURM has queued it again by itself.

    Args:
        folder: of the launch record.
        asked: signals that the job script received.

    Raises:
        EnvironmentFault: SLURM refused.
    """
    if action == "chain":  # from here on a lost node cannot make SLURM start this job again beside the next one
        run_tool(["scontrol", "update", f"JobId={job.id}", "Requeue=0"])
    record = ask_record(job.id)
    fate = fate_of(job, asked, record)
    who = cancelled(folder)
    if who:
        return f"the run was cancelled by {who}: nothing is queued again"
    if fate == "requeued":
        if action == "chain":
            run_tool(["scontrol", "update", f"JobId={job.id}", "Requeue=1"])
        return f"SLURM has queued job {job.id} again by itself"
    if fate == "cancelled":
        return f"job {job.id} was cancelled: nothing is queued again"
    if action == "requeue":
        return _requeue(job)
    if not record:
        raise EnvironmentFault(f"scontrol show job {job.id} does not answer; submit the run again by hand")
    return _chain(job, folder)


def _requeue(job: Job) -> str:
    code, text = run_tool(["scontrol", "requeue", job.id])
    if code:
        raise EnvironmentFault(
            f"job {job.id} could not be queued again: {text}; some sites do not allow it: "
            f"set launch.when_stopped and launch.when_failed to \"chain\", or submit it again by hand"
        )
    return f"job {job.id} is queued again"


def _chain(job: Job, folder: Path) -> str:
    kept = read_record(folder)
    if not (folder / SCRIPT).is_file():
        raise EnvironmentFault(f"job {job.id} has no script that sbatch could take again; submit the run again")
    code, text = run_tool(chain_command(folder, kept, job))
    if code:
        raise EnvironmentFault(f"no job could be chained: {text}; submit the run again by hand")
    number = text.splitlines()[-1].partition(";")[0]
    name = f"{number}_{kept.task}" if kept.sweep else number
    log = ask_record(name).get("StdOut", "")
    add_job(folder, QueuedJob(job=name, why="chained", time=time.time(), log=log))
    if cancelled(folder):  # between the look above and now
        run_tool(["scancel", number])
        return f"job {number} was queued and cancelled: the run was cancelled by {cancelled(folder)}"
    return f"job {number} follows"


# What a run will take: steps, node-hours, jobs, its end and its price, by the planner. Arithmetic, no measurement.

START_SECONDS = 120.0
"""Taken off each job: start of the ranks, model, checkpoint, first step. An estimate."""


def planned(config: RunConfig) -> Planned:
    """Return what is expected of a run; without the planner's numbers where it knows too little of the cluster."""
    nodes = config.cluster.nodes + config.launch.spare_nodes
    known = Planned(
        steps=config.training.steps, save_interval=config.checkpoint.save_interval, nodes=nodes,
        tokens_per_step=config.batch.global_batch_size * config.model.seq_length,
    )
    try:
        plan = make_plan(config, neighbours=False)
    except ConfigError:
        return known
    seconds = plan.step.seconds
    if not math.isfinite(seconds):
        return known
    return Planned(**{**vars(known), "seconds_per_step": seconds, "node_hours": known.steps * seconds * nodes / 3600})


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast of a run that starts at once and is never interrupted but by its time limit."""

    planned: Planned
    jobs: int
    """Jobs of ``launch.time`` that it takes, one after another; 0: not known."""
    seconds: float
    node_hours: float
    charge: float
    unit: str


def forecast(config: RunConfig) -> Forecast:
    """Return the forecast of a whole run, by jobs of ``launch.time``."""
    known = planned(config)
    limit = wall_seconds(config.launch.time) or 0
    usable = limit - START_SECONDS - config.launch.signal_seconds
    work = known.steps * known.seconds_per_step
    if not work:
        jobs, seconds = 0, 0.0
    elif work + START_SECONDS <= limit or usable <= 0:
        jobs, seconds = 1, min(work + START_SECONDS, limit)
    else:
        jobs = math.ceil(work / usable)
        seconds = work + jobs * START_SECONDS
    hours = seconds / 3600 * known.nodes
    return Forecast(planned=known, jobs=jobs, seconds=seconds, node_hours=hours, unit=config.cluster.charge_unit,
                    charge=hours * config.cluster.charge_per_node_hour)


def lines(config: RunConfig, now: float | None = None) -> list[str]:
    """Return the forecast in words, for ``launch submit --dry-run``."""
    found, plan = forecast(config), planned(config)
    nodes, spare = config.cluster.nodes, config.launch.spare_nodes
    head = f"nodes: {plan.nodes}" + (f" ({nodes} and {spare} spare)" if spare else "")
    limit = wall_seconds(config.launch.time) or 0
    most = limit / 3600 * plan.nodes
    out = [
        f"{head}, {config.cluster.gpus_per_node} ranks on each; time limit {config.launch.time}: at most {most:,.1f} "
        "node-hours for each job"
    ]
    if not found.jobs:
        return [*out, f"{plan.steps:,} steps; the planner knows too little of {config.cluster.name} to say how long "
                "they take (cluster.peak_tflops, cluster.memory_gb, [hardware])"]
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime((time.time() if now is None else now) + found.seconds))
    several = f"; {found.jobs} jobs, one after another" if found.jobs > 1 else ""
    out.append(f"{plan.steps:,} steps of {plan.seconds_per_step:.3g} s (planned): {duration(found.seconds)}{several}")
    if found.jobs > 1 and config.launch.when_stopped == "stop":
        out.append("launch.when_stopped is stop: each of these jobs has to be submitted by hand")
    price = "" if found.unit == "node-hours" else f", {found.charge:,.1f} {found.unit}"
    out.append(f"predicted: {found.node_hours:,.1f} node-hours{price}; ends {end} if it starts now and nothing fails")
    return out


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
    return render(config, order, launch_dir=launch_folder())


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
