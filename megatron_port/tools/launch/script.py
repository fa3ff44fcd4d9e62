"""The job script of a run: ``#SBATCH`` lines, the job's and the site's values, then the common part.

All work is done by ``launch/common.sh``. A script that :func:`render` makes for a user carries the
site's values and the place of the common part; the scripts in ``launch/`` (:func:`render_shipped`)
source ``launch/sites/`` and look for that place when they run, because they are used from any checkout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_port.core.config.schema import LaunchConfig, RunConfig
from megatron_port.tools.launch.quote import sbatch_quote, shell_quote
from megatron_port.tools.launch.site import array, assignment, exports, function, site_block

_COUNTED = ("cluster.nodes", "cluster.gpus_per_node")
"""Settings that the job takes from its allocation: ``sbatch -N`` wins over the file."""

_FIND = r"""# sbatch runs a copy of this file, so its own place is asked last.
launch_dir=${MEGATRON_PORT_LAUNCH:-}
if [[ -z $launch_dir ]]; then
  submitted=${SLURM_JOB_ID:+$(scontrol show job "$SLURM_JOB_ID" 2> /dev/null | sed -n 's/^ *Command=//p')} || submitted=
  for launch_dir in "${SLURM_SUBMIT_DIR:-.}"{/launch,} "$(dirname "${submitted%%.sh *}")" \
    "$(dirname "${BASH_SOURCE[0]}")"; do
    if [[ -r $launch_dir/common.sh ]]; then break; fi
  done
fi
if [[ ! -r $launch_dir/common.sh ]]; then
  echo "error: no common.sh in $launch_dir; set MEGATRON_PORT_LAUNCH to the folder launch/ of megatron_port" >&2
  exit 3
fi
"""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Options of a job that are not in the configuration: how the run was named on the command line."""

    run: str
    """Run file (absolute), or the name of a shipped one; empty: the script's first argument."""
    overrides: tuple[str, ...] = ()
    """``a.b=value``, as given with --set."""
    after: str = ""
    """Job that has to end first."""
    record: str = ""
    """Folder of the launch record that the job reads; empty: its first start makes one."""
    python: str = ""
    """Interpreter, where ``launch.python`` names none."""


def sbatch_lines(config: RunConfig, after: str = "") -> list[str]:
    """Return the ``#SBATCH`` lines; a later line overrides an equal earlier one, and the command line both.

    Raises:
        ConfigError: a value that cannot be said there.
    """
    cluster, launch = config.cluster, config.launch
    lines = [f"--job-name={sbatch_quote(config.name, 'name')}"]
    lines += [f"--nodes={cluster.nodes + launch.spare_nodes}", f"--ntasks-per-node={cluster.gpus_per_node}"]
    if cluster.cores_per_task:
        lines.append(f"--cpus-per-task={cluster.cores_per_task}")
    lines.append(f"--time={sbatch_quote(launch.time, 'launch.time')}")
    for option, value, field in (
        ("partition", cluster.partition, "cluster.partition"),
        ("qos", cluster.qos, "cluster.qos"),
        ("account", launch.account, "launch.account"),
    ):
        if value:
            lines.append(f"--{option}={sbatch_quote(value, field)}")
    if launch.mail:
        lines.append(f"--mail-user={sbatch_quote(launch.mail, 'launch.mail')}")
        lines.append(f"--mail-type={sbatch_quote(','.join(launch.mail_types), 'launch.mail_types')}")
    lines += [*_ending(launch), "--output=%x-%j.out"]
    if after:
        lines.append(f"--dependency=afterany:{sbatch_quote(after, '--after')}")
    lines += [_option(o, "cluster.sbatch_options") for o in cluster.sbatch_options]
    lines += [_option(o, "launch.sbatch_options") for o in launch.sbatch_options]
    return [f"#SBATCH {line}" for line in lines]


def _ending(launch: LaunchConfig) -> list[str]:
    """Return the lines on how the job learns of its end, and whether SLURM may start it again."""
    again = "--no-requeue" if launch.when_stopped == launch.when_failed == "stop" else "--requeue"
    return [f"--signal=B:USR1@{launch.signal_seconds}", "--open-mode=append", again]


def _option(option: str, field: str) -> str:
    name, equals, value = option.partition("=")
    return sbatch_quote(name, field) + equals + (sbatch_quote(value, field) if value else "")


def job_block(launch: LaunchConfig, order: Order) -> str:
    """Return the job part of a script.

    Raises:
        ConfigError: a value that cannot be said in a script.
    """
    overrides: list[str] = []
    for text in order.overrides:
        if text.partition("=")[0].strip() not in _COUNTED:
            overrides += ["--set", text]
    record = [assignment("job_record", order.record, "the path of the launch record")] if order.record else []
    return "\n".join([
        *record,
        assignment("job_run", order.run, "the path of the run file"),
        array("job_overrides", overrides, "--set"),
        assignment("job_python", launch.python or order.python, "launch.python"),
        assignment("job_stage", launch.stage, "launch.stage"),
        f"job_spare_nodes={launch.spare_nodes}",
        f"job_preflight={int(launch.preflight)}",
        function("job_setup", exports(launch.environment, "launch.environment")),
    ]) + "\n"


def render(config: RunConfig, order: Order, *, launch_dir: Path) -> str:
    """Return a self-contained job script: it needs the run file and ``launch_dir`` on the nodes, nothing else.

    ``config`` must have passed ``check`` and ``launch_problems``.

    Raises:
        ConfigError: a value that cannot be said in a script.
    """
    return "\n".join([
        "#!/bin/bash",
        "# shellcheck disable=SC2016,SC2034,SC2154",
        "# Made by `megatron-port launch render`. Options of sbatch on its command line win over the lines here.",
        *sbatch_lines(config, order.after),
        "",
        "set -euo pipefail",
        "",
        job_block(config.launch, order),
        site_block(config.cluster),
        f"launch_dir={shell_quote(str(launch_dir), 'the place of megatron_port')}",
        _start(),
    ])


def render_shipped(order: Order, *, site: str, head: Sequence[str], config: RunConfig | None = None) -> str:
    """Return a script of ``launch/``. ``head``: its comment. Without ``config``, sbatch sets nodes, tasks and time."""
    generic = ["#SBATCH --job-name=megatron-port", *(f"#SBATCH {x}" for x in _ending(LaunchConfig()))]
    lines = sbatch_lines(config) if config else [*generic, "#SBATCH --output=%x-%j.out"]
    return "\n".join([
        "#!/bin/bash",
        "# shellcheck disable=SC2034",
        *(f"# {line}" for line in head),
        *lines,
        "",
        "set -euo pipefail",
        "",
        job_block(config.launch if config else LaunchConfig(), order),
        _FIND.rstrip("\n"),
        "# shellcheck source=/dev/null",
        f'source "$launch_dir/sites/{site}.sh"',
        _start(),
    ])


def _start() -> str:
    return '# shellcheck source=/dev/null\nsource "$launch_dir/common.sh"\nlaunch_main "$@"\n'
