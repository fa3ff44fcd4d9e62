"""The job script of a run: ``#SBATCH`` lines, the job's and the site's values, then the common part.

All work is done by ``launch/common.sh``. A script that :func:`render` makes for a user carries the
site's values and the place of the common part; the scripts in ``launch/`` (:func:`render_shipped`)
source ``launch/sites/`` and look for that place when they run, because they are used from any checkout.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_port.core.config.dump import to_toml
from megatron_port.core.config.schema import ClusterConfig, LaunchConfig, RunConfig
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.tools.launch.launch_checks import wall_seconds, wall_text

# Saying a value in a job script so that nothing but that value comes out.
#
# A job script is read twice: by its scheduler, whose directives have rules of their own, and by bash. SLURM's rules
# are known (:func:`sbatch_quote`). Those of the others differ between versions, so a value stands in their directives
# as one plain word or not at all: :func:`directive_name` makes a word of a run's name, :func:`directive_word` refuses
# what is none.

PLACEHOLDER = re.compile(r"\{(\w*)\}")
PLACEHOLDERS = {"job_id": '"$SLURM_JOB_ID"', "user": '"$port_user"', "local_disk": '"$site_local_disk"'}
"""``{name}`` in an environment value → quoted variable that is set on the node."""

LONGEST_NAME = 100
"""Characters of a job's name."""
_PLAIN = re.compile(r"[\w./:@%+=-]+", re.ASCII)
"""Text that both readers take as it stands. A comma would do too, but not for shellcheck within an array."""


def shell_quote(text: str, field: str) -> str:
    """Return ``text`` as one word of bash, in single quotes unless it is plain.

    Raises:
        ConfigError: naming ``field``, for text that holds a control character or cannot be written as UTF-8.
    """
    _refuse(text, field)
    return text if _PLAIN.fullmatch(text) else "'" + text.replace("'", "'\\''") + "'"


def shell_fill(text: str, field: str, known: dict[str, str] | None = None) -> str:
    """Return ``text`` as one word of bash with its placeholders replaced by variables; everything else is literal.

    Raises:
        ConfigError: as :func:`shell_quote`.
    """
    known = PLACEHOLDERS if known is None else known
    pieces, start = [], 0
    for found in PLACEHOLDER.finditer(text):
        if found.group(1) in known:
            pieces += [text[start : found.start()], known[found.group(1)]]
            start = found.end()
    pieces.append(text[start:])
    quoted = [shell_quote(p, field) if i % 2 == 0 else p for i, p in enumerate(pieces) if p]
    return "".join(quoted) or "''"


def sbatch_quote(text: str, field: str) -> str:
    """Return ``text`` as (part of) one argument of an ``#SBATCH`` line.

    sbatch reads both kinds of quotes, takes a backslash as an escape anywhere, even within single
    quotes, and ends a line at an unquoted ``#``. Within double quotes with ``\\`` and ``"`` escaped
    every printable character survives (tested against sbatch's own parser); a line feed cannot be said.

    Raises:
        ConfigError: as :func:`shell_quote`.
    """
    _refuse(text, field)
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def directive_word(text: str, field: str) -> str:
    """Return ``text``, a plain word, for a directive of Flux, PBS or LSF.

    Raises:
        ConfigError: naming ``field``; it is no word of letters, digits and ``_ . / : @ % + = -``, or begins with ``-``.
    """
    _refuse(text, field)
    if not _PLAIN.fullmatch(text) or text.startswith("-"):
        raise ConfigError(
            f"{field} is {text!r}; a directive of this scheduler holds letters, digits and _./:@%+=- only, and does "
            "not begin with -"
        )
    return text


def directive_name(text: str) -> str:
    """Return a run's name as a word of such a directive, and of file names: other characters become ``-``."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")[:LONGEST_NAME] or "run"


def kubernetes_value(text: str) -> str:
    """Return the value of a pod's variable: Kubernetes replaces ``$(NAME)``, and ``$$`` stands for ``$``."""
    return text.replace("$", "$$")


def _refuse(text: str, field: str) -> None:
    for at, char in enumerate(text):
        if unicodedata.category(char) in ("Cc", "Cs"):  # controls; surrogates stand for bytes that are no UTF-8
            raise ConfigError(
                f"{field} has the character U+{ord(char):04X} at position {at + 1} of {text!r}; "
                "a job script cannot hold control characters or bytes that are no UTF-8"
            )


# What a job script has to know of a cluster, as assignments of bash.
#
# ``launch/common.sh`` reads them; its head lists the names. ``site_setup`` runs first in the job,
# when the job's id and the user are known: all that holds a placeholder is set there.

def assignment(name: str, value: str, field: str) -> str:
    """Return ``name=value``."""
    return f"{name}={shell_quote(value, field)}"


def array(name: str, values: Sequence[str], field: str) -> str:
    """Return ``name=(a b c)``, with one element per line where the line would be long."""
    words = [shell_quote(v, field) for v in values]
    line = f"{name}=({' '.join(words)})"
    return line if len(line) <= 110 else f"{name}=(\n" + "".join(f"  {w}\n" for w in words) + ")"


def exports(entries: Sequence[str], field: str) -> list[str]:
    """Return ``export NAME=value`` for every NAME=value; placeholders become variables."""
    out = []
    for entry in entries:
        name, _, value = entry.partition("=")
        out.append(f"export {name}={shell_fill(value, f'{field} {name}')}")
    return out


def function(name: str, body: Sequence[str]) -> str:
    """Return a bash function; an empty one does nothing."""
    return f"{name}() {{\n" + "".join(f"  {line}\n" for line in body or [":"]) + "}"


def _container(cluster: ClusterConfig) -> list[str]:
    """Return what is said of the container, where the ranks run in one."""
    if not cluster.container:
        return []
    return [
        assignment("site_container", cluster.container, "cluster.container"),
        assignment("site_image", cluster.container_image, "cluster.container_image"),
        assignment("site_container_python", cluster.container_python, "cluster.container_python"),
        array("site_container_options", cluster.container_options, "cluster.container_options"),
    ]


def site_block(cluster: ClusterConfig) -> str:
    """Return the site part of a job script.

    Raises:
        ConfigError: a value that cannot be said in a script.
    """
    disk = {name: word for name, word in PLACEHOLDERS.items() if name != "local_disk"}
    setup = [f"site_local_disk={shell_fill(cluster.local_disk, 'cluster.local_disk', disk)}"]
    if cluster.modules:
        setup.append("load_modules " + " ".join(shell_quote(m, "cluster.modules") for m in cluster.modules))
    setup += exports(cluster.environment, "cluster.environment")
    if cluster.container:
        mounts = [shell_fill(m, "cluster.container_mounts") for m in cluster.container_mounts]
        setup.append(f"site_mounts=({' '.join(mounts)})")
    return "\n".join([
        assignment("site_name", cluster.name, "cluster.name"),
        assignment("site_interface", cluster.interface, "cluster.interface"),
        f"site_cores_per_task={cluster.cores_per_task}",
        array("site_srun", cluster.srun_options, "cluster.srun_options"),
        *_container(cluster),
        function("site_setup", setup),
    ]) + "\n"


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
    kill = ["--no-kill"] if launch.when_lost == "replace" else []
    return [f"--signal=B:USR1@{launch.signal_seconds}", "--open-mode=append", again, *kill]


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
        *(["job_no_kill=1"] if launch.when_lost == "replace" else []),
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


# A relocatable image of an environment: interpreter, standard library, packages. ``STAGE`` copies it to the nodes.
#
# The archive is a tar of parts (``parts/00.tar.zst`` …) of about equal size, so that a node unpacks it with all its
# cores (launch/stage.sh). Python finds its own library beside its executable, wherever that is; what a virtual
# environment's links and ``pyvenv.cfg`` would pin to a path is left behind. Nothing is compiled: the modules'
# compiled forms go along.

PARTS = 32
"""More than most unpack at once, so that the last one is short."""
SKIPPED = {"test", "tests", "idlelib", "turtledemo", "ensurepip", "lib2to3"}
"""Folders of the standard library that no rank imports."""


@dataclass(frozen=True)
class ImageFile:
    """A file of the image."""

    source: Path
    name: str
    """Path in the image."""
    size: int


@dataclass(frozen=True)
class Image:
    """Archive that was written, and its size."""

    path: Path
    files: int
    unpacked: int
    """Bytes."""
    packed: int


def environment_files() -> Iterator[ImageFile]:
    """Yield all files of this interpreter's environment: links are followed, so nothing leads out of the image."""
    base, version = Path(sys.base_prefix), f"python{sys.version_info[0]}.{sys.version_info[1]}"
    executable = (base / "bin" / version).resolve()
    if not executable.is_file():
        raise EnvironmentFault(f"{executable} is not there: this Python has no bin/{version} to take along")
    yield ImageFile(executable, f"bin/{version}", executable.stat().st_size)
    library = sysconfig.get_config_var("INSTSONAME") or ""
    for folder in (base / "lib", Path(sysconfig.get_config_var("LIBDIR") or base / "lib")):
        if ".so" in library and (folder / library).is_file():
            found = (folder / library).resolve()
            yield ImageFile(found, f"lib/{library}", found.stat().st_size)
            break
    stdlib = Path(sysconfig.get_path("stdlib"))
    yield from _below(stdlib, f"lib/{version}", skip=SKIPPED | {"site-packages", "dist-packages"})
    places = dict.fromkeys(Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib"))
    for place in places:
        yield from _below(place, f"lib/{version}/site-packages", skip=set())


def _below(root: Path, name: str, *, skip: set[str]) -> Iterator[ImageFile]:
    for folder, names, files in os.walk(root, followlinks=True):
        names[:] = sorted(n for n in names if not (n in skip and Path(folder) == root))
        inside = os.path.relpath(folder, root)
        for file in sorted(files):
            source = Path(folder) / file
            if "__editable__" in file:  # leads to a checkout; the launch record brings the code
                continue
            with contextlib.suppress(OSError):
                yield ImageFile(source, os.path.normpath(f"{name}/{inside}/{file}"), source.stat().st_size)


def parts_of(files: list[ImageFile], count: int = PARTS) -> list[list[ImageFile]]:
    """Deal files out so that the parts are about equally large: the largest first, each to the smallest part."""
    parts: list[list[ImageFile]] = [[] for _ in range(count)]
    sizes = [0] * count
    for file in sorted(files, key=lambda f: (-f.size, f.name)):
        at = sizes.index(min(sizes))
        parts[at].append(file)
        sizes[at] += file.size + 512
    return [part for part in parts if part]


def compressor() -> tuple[list[str], str]:
    """Return the command that compresses and the ending of its files: zstd, otherwise gzip."""
    if shutil.which("zstd"):
        return ["zstd", "-q", "-3", "-T1", "-c"], "zst"
    return ["gzip", "-c", "-4"], "gz"


def make_image(target: Path) -> Image:
    """Write the image of this interpreter's environment to ``target``, and its unpacked size beside it.

    Raises:
        ConfigError: the target's name has another ending than .tar.
        EnvironmentFault: the environment cannot be read, or the target not written.
    """
    if target.suffix != ".tar":
        raise ConfigError(f"{target}: an image is a .tar of compressed parts; name it so, e.g. {target.stem}.tar")
    files = list({file.name: file for file in environment_files()}.values())
    part = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    command, ending = compressor()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".image-") as folder:
            made = [Path(folder) / f"{i:02d}.tar.{ending}" for i in range(len(parts_of(files)))]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(_write_part, parts_of(files), made, [command] * len(made)))
            with tarfile.open(part, "w") as archive:
                _add_link(archive)
                for path in made:
                    archive.add(path, f"parts/{path.name}")
        with open(part, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(part, target)
        unpacked = sum(f.size for f in files)
        target.with_name(f"{target.name}.bytes").write_text(f"{unpacked + 4096 * len(files)}\n")
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise EnvironmentFault(f"{target} cannot be written: {error.strerror or error}") from error
    return Image(target, len(files), unpacked, target.stat().st_size)


def _write_part(files: list[ImageFile], path: Path, command: list[str]) -> None:
    with open(path, "wb") as out, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out) as process:
        assert process.stdin is not None
        with tarfile.open(fileobj=process.stdin, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for file in files:
                info = archive.gettarinfo(str(file.source), file.name)
                if info.islnk() or info.issym():
                    info = _as_file(file)
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                info.mode |= 0o600
                with open(file.source, "rb") as stream:
                    archive.addfile(info, stream)
        process.stdin.close()
        code = process.wait()
    if code:
        raise OSError(0, f"{command[0]} ended with {code}")


def _as_file(file: ImageFile) -> tarfile.TarInfo:
    about = file.source.stat()
    info = tarfile.TarInfo(file.name)
    info.size, info.mtime, info.mode = about.st_size, int(about.st_mtime), about.st_mode & 0o777
    return info


def _add_link(archive: tarfile.TarFile) -> None:
    """bin/python, and Debian's name of site-packages; relative links within the image."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    links = (("bin/python", version), ("bin/python3", version), (f"lib/{version}/dist-packages", "site-packages"))
    for name, to in links:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = tarfile.SYMTYPE, to
        archive.addfile(info, io.BytesIO())


# The same run for other schedulers: a script for Flux, PBS or LSF, a JobSet for Kubernetes, a task for SkyPilot.
#
# Thin templates: one job that starts the ranks through the scheduler's own launcher, which ``run.launchers`` and
# torchrun understand. What needs a scheduler's answers (requeue, chain, preflight, staging) is SLURM's only; elsewhere
# the run resumes from its newest checkpoint when the same job is submitted again.

PORT = 29500
CLAIM = "megatron-port"
"""Persistent volume claim that holds the runs."""


def emit(kind: str, config: RunConfig, order: Order, python: str, gpu: str) -> str:
    """Return the text for one of ``KINDS``; ``gpu``: SkyPilot's name of the accelerator.

    Raises:
        ConfigError: a value that cannot be said there, an image that is missing, or ranks that are to be replaced.
    """
    if config.launch.when_lost == "replace":
        raise ConfigError(
            f'launch.when_lost "replace": the script for {kind} starts each rank by itself, and only `train --nproc` '
            'on each node can replace one; set when_lost = "stop", or start that by hand (docs/recovery.md)'
        )
    return KINDS[kind](config, order, python, gpu)


def _script(config: RunConfig, head: list[str], body: list[str]) -> str:
    environment = exports(config.cluster.environment, "cluster.environment")
    environment += exports(config.launch.environment, "launch.environment")
    return "\n".join([
        "#!/bin/bash", *head, "",
        "set -euo pipefail", "# shellcheck disable=SC2034", 'port_user=${USER:-$(id -un)}',
        "# shellcheck disable=SC2034",
        f"site_local_disk={shell_quote(config.cluster.local_disk, 'cluster.local_disk')}",
        *(f"module load {shell_quote(m, 'cluster.modules')}" for m in config.cluster.modules), *environment,
        f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{max(1, config.cluster.cores_per_task)}}}", *body,
    ]) + "\n"


def _train(order: Order, python: str) -> str:
    words = [python, "-m", "megatron_port", "train", order.run]
    for text in order.overrides:
        words += ["--set", text]
    return " ".join(shell_quote(w, "the command") for w in words)


def _minutes(config: RunConfig) -> int:
    return -(-(wall_seconds(config.launch.time) or 0) // 60)


def flux(config: RunConfig, order: Order, python: str, gpu: str) -> str:
    """Return a script for ``flux batch``."""
    c, ranks = config.cluster, config.cluster.nodes * config.cluster.gpus_per_node
    name = directive_name(config.name)
    options = [f"-N {c.nodes}", f"-n {ranks}", f"-t {_minutes(config)}m", "--exclusive", f"--job-name={name}",
               f"--output={name}-{{{{id}}}}.out"]
    if c.partition:
        options.append(f"--queue={directive_word(c.partition, 'cluster.partition')}")
    if config.launch.account:
        options.append(f"--bank={directive_word(config.launch.account, 'launch.account')}")
    cores = f" --cores-per-task={c.cores_per_task}" if c.cores_per_task else ""
    return _script(config, [f"#flux: {o}" for o in options], [
        "MASTER_ADDR=$(flux hostlist --nth=0 local)", "export MASTER_ADDR",
        f"exec flux run -N {c.nodes} -n {ranks}{cores} --gpus-per-task=1 -o gpu-affinity=per-task \\",
        f"  {_train(order, python)}",
    ])


def pbs(config: RunConfig, order: Order, python: str, gpu: str) -> str:
    """Return a script for ``qsub``, whose ``mpiexec`` is PALS' or Hydra's."""
    c = config.cluster
    head = [f"#PBS -N {directive_name(config.name)}",
            f"#PBS -l select={c.nodes}:ngpus={c.gpus_per_node}:mpiprocs={c.gpus_per_node}",
            f"#PBS -l walltime={wall_text(wall_seconds(config.launch.time) or 0)}", "#PBS -j oe", "#PBS -r y"]
    if c.partition:
        head.append(f"#PBS -q {directive_word(c.partition, 'cluster.partition')}")
    if config.launch.account:
        head.append(f"#PBS -A {directive_word(config.launch.account, 'launch.account')}")
    return _script(config, head, [
        'cd "$PBS_O_WORKDIR"', 'MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")', "export MASTER_ADDR",
        f"exec mpiexec -n {c.nodes * c.gpus_per_node} --ppn {c.gpus_per_node} --env MASTER_ADDR=\"$MASTER_ADDR\" \\",
        f"  {_train(order, python)}",
    ])


def lsf(config: RunConfig, order: Order, python: str, gpu: str) -> str:
    """Return a script for ``bsub``, whose launcher is jsrun."""
    c = config.cluster
    name = directive_name(config.name)
    head = [f"#BSUB -J {name}", f"#BSUB -nnodes {c.nodes}", f"#BSUB -W {_minutes(config)}",
            f"#BSUB -o {name}-%J.out", "#BSUB -r"]
    if c.partition:
        head.append(f"#BSUB -q {directive_word(c.partition, 'cluster.partition')}")
    if config.launch.account:
        head.append(f"#BSUB -P {directive_word(config.launch.account, 'launch.account')}")
    cores = f" -c {c.cores_per_task}" if c.cores_per_task else ""
    return _script(config, head, [
        "# The first host of the list is the one of this script.",
        'MASTER_ADDR=$(sort -u "$LSB_DJOB_HOSTFILE" | grep -v -F -x "$(hostname)" | head -n 1)', "export MASTER_ADDR",
        f"exec jsrun -n {c.nodes * c.gpus_per_node} -r {c.gpus_per_node} -a 1 -g 1{cores} -E MASTER_ADDR \\",
        f"  {_train(order, python)}",
    ])


def _dns(name: str) -> str:
    text = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    if not text or not text[0].isalpha():
        raise ConfigError(f"name {name!r} makes no name for Kubernetes; begin it with a letter")
    return text


def _torchrun(config: RunConfig, node_rank: str, master: str, path: str) -> str:
    c = config.cluster
    return (
        f"exec torchrun --nnodes={c.nodes} --nproc-per-node={c.gpus_per_node} --node-rank={node_rank} "
        f"--master-addr={master} --master-port={PORT} -m megatron_port train {path}"
    )


def jobset(config: RunConfig, order: Order, python: str, gpu: str) -> str:
    """Return a ConfigMap with the configuration and a JobSet (jobset.x-k8s.io/v1alpha2), for ``kubectl apply -f``."""
    c, name = config.cluster, _dns(config.name)
    if not c.container_image:
        raise ConfigError("cluster.container_image is empty: the pods need an image; docker/cuda.Dockerfile makes one")
    pairs = (entry.partition("=") for entry in config.launch.environment)
    environment = [{"name": k, "value": kubernetes_value(v)} for k, _, v in pairs]
    container: dict[str, Any] = {
        "name": "ranks", "image": c.container_image, "workingDir": "/work", "env": environment,
        "command": ["bash", "-c", _torchrun(config, "$JOB_COMPLETION_INDEX", f"{name}-ranks-0-0.{name}",
                                            "/etc/megatron_port/config.toml")],
        "ports": [{"containerPort": PORT}],
        "resources": {"limits": {"nvidia.com/gpu": c.gpus_per_node}},
        "volumeMounts": [{"name": "configuration", "mountPath": "/etc/megatron_port"},
                         {"name": "work", "mountPath": "/work"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never", "containers": [container],
        "terminationGracePeriodSeconds": config.launch.signal_seconds,
        "volumes": [{"name": "configuration", "configMap": {"name": name}},
                    {"name": "work", "persistentVolumeClaim": {"claimName": CLAIM}},
                    {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    job = {"completionMode": "Indexed", "completions": c.nodes, "parallelism": c.nodes, "backoffLimit": 0,
           "activeDeadlineSeconds": wall_seconds(config.launch.time), "template": {"spec": pod}}
    items = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"config.toml": to_toml(config)}},
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}, "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": config.launch.max_attempts},
            "replicatedJobs": [{"name": "ranks", "replicas": 1, "template": {"spec": job}}]}},
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=1) + "\n"


def skypilot(config: RunConfig, order: Order, python: str, gpu: str) -> str:
    """Return a task for ``sky launch`` or ``sky jobs launch`` (JSON, which is YAML too)."""
    c = config.cluster
    resources: dict[str, Any] = {"accelerators": f"{gpu}:{c.gpus_per_node}"}
    if c.container_image:
        resources["image_id"] = f"docker:{c.container_image}"
    write = "mkdir -p ~/megatron_port && cat > ~/megatron_port/config.toml <<'END_OF_CONFIGURATION'\n"
    task = {
        "name": _dns(config.name), "num_nodes": c.nodes, "resources": resources,
        "envs": dict(e.split("=", 1) for e in config.launch.environment),
        "setup": f"{write}{to_toml(config)}END_OF_CONFIGURATION\npython3 -c 'import megatron_port'",
        "run": "MASTER_ADDR=$(echo \"$SKYPILOT_NODE_IPS\" | head -n 1)\n"
        + _torchrun(config, "$SKYPILOT_NODE_RANK", '"$MASTER_ADDR"', "~/megatron_port/config.toml"),
    }
    return json.dumps(task, indent=1) + "\n"


KINDS: dict[str, Callable[[RunConfig, Order, str, str], str]] = {
    "flux": flux, "pbs": pbs, "lsf": lsf, "jobset": jobset, "skypilot": skypilot,
}
"""Writers of ``launch show --for`` for schedulers other than SLURM."""
