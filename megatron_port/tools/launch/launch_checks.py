"""What can be wrong with a job before SLURM sees it: wall time, queue limits, options, environment.

Needed by ``launch render`` and ``launch submit`` only; ``config.checks`` says what is wrong with the run itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from megatron_port.core.config.loader import did_you_mean
from megatron_port.core.config.ranges import secret_name
from megatron_port.core.config.schema import ClusterConfig, RunConfig

PLACEHOLDERS = ("job_id", "user", "local_disk")
"""Names that may stand in braces in an environment value."""

_ELSEWHERE = ("--partition", "--qos", "--reservation", "--nodes", "--time")
"""With one of these among launch.sbatch_options, the queue classes of the cluster file need not hold."""


def wall_seconds(text: str) -> int | None:
    """Seconds of ``MM``, ``HH:MM:SS``, ``D-HH``, ``D-HH:MM`` or ``D-HH:MM:SS``; None for anything else.

    SLURM takes ``HH:MM`` for minutes and seconds. That is never what is meant, so it is not taken here.
    """
    if re.fullmatch(r"\d{1,3}-\d{1,4}(:\d{2})?", text, re.ASCII):
        text += ":00:00" if ":" not in text else ":00"
    found = re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,4}):(\d{2}):(\d{2})", text, re.ASCII)
    if found:
        days, hours, minutes, seconds = (int(x or 0) for x in found.groups())
        return None if minutes > 59 or seconds > 59 else ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return int(text) * 60 if re.fullmatch(r"\d{1,6}", text, re.ASCII) else None


def wall_text(seconds: float) -> str:
    """Return ``HH:MM:SS``, rounded down."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def launch_problems(config: RunConfig) -> list[str]:
    """Every reason why the job could not be queued, or would not do what it should; each with a value that works."""
    cluster, launch = config.cluster, config.launch
    out = []
    if cluster.nodes < 1:
        out.append("cluster.nodes is 0; a job needs a number: set it in the run file, or pass --set cluster.nodes=N")
    classes = _class_problems(cluster)
    out += [*classes, *_time_problems(config), *([] if classes else _queue_problems(config))]
    if launch.spare_nodes and not launch.preflight and launch.when_lost != "replace":
        out.append(
            f"launch.spare_nodes {launch.spare_nodes} take the place of nodes that preflight finds bad or that are "
            'lost; both are off: set launch.preflight = true, launch.when_lost = "replace", or spare_nodes = 0'
        )
    for name, options in (
        ("cluster.sbatch_options", cluster.sbatch_options),
        ("cluster.srun_options", cluster.srun_options),
        ("launch.sbatch_options", launch.sbatch_options),
    ):
        out += [
            f"{name}: {o!r} is not one option of the form --name or --name=value"
            for o in options if not re.fullmatch(r"--[A-Za-z][\w-]*(=.*)?", o, re.ASCII | re.DOTALL)
        ]
    out += _container_problems(cluster)
    for name, entries in (("cluster.environment", cluster.environment), ("launch.environment", launch.environment)):
        for entry in entries:
            out += _environment_problems(name, entry)
    out += _placeholder_problems("cluster.local_disk", cluster.local_disk, PLACEHOLDERS[:2])
    if any(not m.strip() or m.startswith("-") for m in cluster.modules):
        out.append(f"cluster.modules {list(cluster.modules)}: each must be the name of a module")
    return out


def _container_problems(cluster: ClusterConfig) -> list[str]:
    out = [
        f"cluster.container_mounts: {mount!r} is not of the form SOURCE or SOURCE:TARGET[:ro], with absolute paths"
        for mount in cluster.container_mounts
        if not re.fullmatch(r"[/{][^:,]*(:/[^:,]*(:(ro|rw))?)?", mount)
    ]
    for mount in cluster.container_mounts:
        out += _placeholder_problems("cluster.container_mounts", mount, PLACEHOLDERS)
    out += [
        f"cluster.container_options: {o!r} is not one option of the form --name or --name=value"
        for o in cluster.container_options if not re.fullmatch(r"--?[A-Za-z][\w-]*(=.*)?", o, re.ASCII | re.DOTALL)
    ]
    if not cluster.container and (cluster.container_image or cluster.container_mounts or cluster.container_options):
        out.append("cluster.container is empty, and an image, mounts or options are given for one; name the runtime, "
                   "e.g. cluster.container = \"apptainer\"")
    return out


def _environment_problems(name: str, entry: str) -> list[str]:
    variable, equals, value = entry.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        return [f"{name}: {entry!r} is not of the form NAME=value"]
    if secret_name(variable):
        return [
            f"{name}: {variable} looks like a secret, and run files are copied into job scripts, config.toml and every "
            f"checkpoint; export it in the shell that submits the job instead (it is handed on), and take it out here"
        ]
    return _placeholder_problems(f"{name} {variable}", value, PLACEHOLDERS)


def _placeholder_problems(name: str, value: str, known: Sequence[str]) -> list[str]:
    return [
        f"{name}: {{{word}}} is unknown; in braces may stand {', '.join(known)}{did_you_mean(word, known)}. "
        "Variables of the shell are not expanded"
        for word in re.findall(r"\{([A-Za-z_]\w*)\}", value) if word not in known
    ]


def _class_problems(cluster: ClusterConfig) -> list[str]:
    """Return what is wrong with the queue's description itself."""
    nodes, hours = cluster.queue_nodes, cluster.queue_hours
    if len(nodes) != len(hours):
        return [f"cluster.queue_nodes has {len(nodes)} classes and queue_hours {len(hours)}; each class needs both"]
    if any(a >= b for a, b in pairwise((0, *nodes))):
        return [f"cluster.queue_nodes {list(nodes)} must rise, from at least 1"]
    if any(h <= 0 for h in hours):
        return [f"cluster.queue_hours {list(hours)}: each must be above 0"]
    return []


def _time_problems(config: RunConfig) -> list[str]:
    launch, seconds = config.launch, wall_seconds(config.launch.time)
    if not seconds:
        fields = launch.time.split(":")
        hint = ""
        if len(fields) == 2 and all(f.isdecimal() for f in fields):
            hint = f"; SLURM would take it for minutes and seconds, write {launch.time}:00"
        return [f"launch.time {launch.time!r} must be MM, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS, above 0{hint}"]
    if launch.signal_seconds >= seconds:
        return [
            f"launch.signal_seconds {launch.signal_seconds} is not below launch.time {launch.time} ({seconds} s): the "
            f"job would be told to save before it starts; use e.g. {max(seconds // 4, 1)}"
        ]
    return []


def _queue_problems(config: RunConfig) -> list[str]:
    """Whether the cluster's own queue takes so many nodes for so long."""
    cluster, launch = config.cluster, config.launch
    seconds = wall_seconds(launch.time)
    elsewhere = any(o.partition("=")[0] in _ELSEWHERE for o in launch.sbatch_options)
    if not cluster.queue_nodes or not seconds or elsewhere or cluster.nodes < 1:
        return []
    nodes = cluster.nodes + launch.spare_nodes
    count = f"{nodes} nodes" + (f" ({cluster.nodes} and {launch.spare_nodes} spare)" if launch.spare_nodes else "")
    rows = list(zip(cluster.queue_nodes, cluster.queue_hours))
    classes = "classes: " + ", ".join(f"up to {n:,} nodes {h:g} h" for n, h in rows)
    if nodes > rows[-1][0]:
        return [
            f"{count} are more than {cluster.name} gives to one job ({classes}); "
            f"use at most {rows[-1][0]:,} with the spares counted"
        ]
    limit = next(h for n, h in rows if nodes <= n)
    if seconds <= limit * 3600:
        return []
    bounds = zip((1, *(n + 1 for n in cluster.queue_nodes)), rows)
    longer = next((least for least, (_, h) in bounds if seconds <= h * 3600), None)
    other = ""
    if longer:
        other = f" or at least {longer:,} nodes" if longer > nodes else f" or at most {rows[0][0]:,} nodes"
    return [
        f"{count} may run {limit:g} h on {cluster.name} ({classes}), launch.time is {launch.time}; "
        f"use {wall_text(limit * 3600)}{other}"
    ]
