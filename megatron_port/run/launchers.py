"""Launchers other than torchrun and SLURM, by the variables that each sets for the processes it starts.

mpirun, Flux, PALS, jsrun, Hydra and the Kubernetes operators all say who a process is; none of them says where rank 0
listens, unless all ranks share a host or ``MASTER_ADDR`` is set. A claim of more than one process is never dropped:
a process that took itself for the only one would write the same run's folder as its peers.
"""

from __future__ import annotations

import os
import re
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_port.core.errors import EnvironmentFault, LauncherFault

DEFAULT_PORT = 29500
"""torch's own, where nothing tells two jobs on one host apart."""
FIRST_PORT, PORTS = 15000, 17000
"""Derived ports lie below the ephemeral range, as ``slurm.step_port``."""


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher; of several names the first that is set counts."""

    name: str
    """``ProcessInfo.launcher``."""
    title: str
    """In messages."""
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    """Variables of a string that is unique to the job and equal on all its ranks; the port is derived from it."""
    give_address: str = "set MASTER_ADDR for every rank"
    """How its user gives all ranks the address of rank 0's host."""


GENERIC = Launcher(
    "environment", "RANK and WORLD_SIZE", ("RANK",), ("WORLD_SIZE",), node_rank=("GROUP_RANK", "NODE_RANK"),
    give_address="set MASTER_ADDR (and MASTER_PORT) for every rank; 127.0.0.1 if all ranks are on one host",
)
LAUNCHERS = (
    Launcher(
        "flux", "Flux", ("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",), nodes=("FLUX_JOB_NNODES",),
        job=("FLUX_JOB_ID",),
        give_address="flux run … sh -c 'MASTER_ADDR=$(flux hostlist --nth=0 local) exec megatron-port train …'",
    ),
    Launcher(
        "pals", "PALS", ("PALS_RANKID",), ("PALS_SIZE", "PMI_SIZE"), ("PALS_LOCAL_RANKID",), ("PALS_LOCAL_SIZE",),
        ("PALS_NODEID",), job=("PALS_APID", "PBS_JOBID"),
        give_address='mpiexec --env MASTER_ADDR="$(head -n 1 "$PBS_NODEFILE")" …',
    ),
    Launcher(
        "jsrun", "jsrun", ("JSM_NAMESPACE_RANK",), ("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), job=("LSB_JOBID",),
        give_address="jsrun -E MASTER_ADDR=HOST …, with the host of rank 0 (the first of $LSB_DJOB_RANKFILE's)",
    ),
    Launcher(
        "openmpi", "Open MPI", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",), job=("PMIX_NAMESPACE",),
        give_address="mpirun -x MASTER_ADDR=HOST …, with the host of rank 0",
    ),
    Launcher(
        "mvapich", "MVAPICH", ("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),
        ("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"),
        ("MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"),
        ("MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"),
        give_address="mpirun_rsh … MASTER_ADDR=HOST …, with the host of rank 0",
    ),
    Launcher(
        "pmi", "a PMI launcher (MPICH, Intel MPI)", ("PMI_RANK",), ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), job=("PMI_JOBID",),
        give_address="mpiexec -genv MASTER_ADDR HOST …, with the host of rank 0",
    ),
    Launcher("pmix", "a PMIx launcher", ("PMIX_RANK",), (), job=("PMIX_NAMESPACE",)),
    GENERIC,
)
"""In order of precedence: what starts on top of another comes first (Flux, PALS and jsrun set PMI's variables too)."""


@dataclass(frozen=True)
class Claim:
    """Claim of one launcher's variables about this process."""

    launcher: Launcher
    rank: int
    size: int
    """0: they do not say."""
    sources: Mapping[str, str]
    """``rank`` and ``size`` → variable."""

    def __str__(self) -> str:
        names = [self.sources[key] for key in ("rank", "size") if key in self.sources]
        return f"{self.launcher.title} ({', '.join(names)}): rank {self.rank} of {self.size or '?'}"


@dataclass(frozen=True)
class RankAssignment:
    """A claim with everything that a rank needs; ``address`` is empty where nothing names rank 0's host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    nodes: int
    address: str
    port: int
    sources: dict[str, str] = field(default_factory=dict)


def read_int(env: Mapping[str, str], names: Sequence[str], sources: dict[str, str], key: str) -> int | None:
    """The first of the variables that is set; None: none is. Raises LauncherFault if it is not a number."""
    for name in names:
        text = env.get(name, "")
        if text:
            if not text.isdigit():
                raise LauncherFault(f"{name}=\"{text}\" is not a whole number; unset it, or let the launcher set it")
            sources[key] = name
            return int(text)
    return None


def claims(env: Mapping[str, str]) -> list[Claim]:
    """Return what every launcher but torchrun and SLURM says, in order of precedence.

    Raises:
        LauncherFault: a variable is not a number, or ``WORLD_SIZE`` is above one and nobody says which rank this is.
    """
    found = []
    for launcher in LAUNCHERS:
        if launcher is GENERIC and not env.get("WORLD_SIZE") and not env.get("RANK", "").strip("0").isdigit():
            continue  # RANK alone is a name that anything may use; above zero it says that there are others
        sources: dict[str, str] = {}
        rank = read_int(env, launcher.rank, sources, "rank")
        if rank is None:
            continue
        size = read_int(env, (*launcher.size, *GENERIC.size), sources, "size")
        found.append(Claim(launcher, rank, size or 0, sources))
    world = read_int(env, GENERIC.size, {}, "size")
    if not found and world is not None and world > 1:
        raise LauncherFault(
            f"WORLD_SIZE={world} says that {world} processes run, and no RANK says which of them this is; set RANK, or "
            f"unset WORLD_SIZE to run one process"
        )
    return found


def claims_beside(env: Mapping[str, str]) -> tuple[list[Claim], list[str]]:
    """:func:`claims` where torchrun or SLURM says enough: what cannot be read is a line for the log, not an error."""
    try:
        return claims(env), []
    except LauncherFault as error:
        return [], [str(error)]


def several(found: Sequence[Claim]) -> Claim | None:
    """The first claim of more than one process; where no claim tells a size, the first of them."""
    if not any(c.size for c in found):
        return next(iter(found), None)
    return next((c for c in found if c.size > 1), None)


def conflicts(chosen: str, rank: int, size: int, found: Sequence[Claim]) -> list[str]:
    """Lines for the claims that disagree with what is used. ``chosen``: whose values are used."""
    return [
        f"{c} is not used, {chosen} is: rank {rank} of {size}"
        for c in found if c.size and (c.rank, c.size) != (rank, size)
    ]


def place_of(claim: Claim, env: Mapping[str, str], *, address: str, loopback: bool) -> RankAssignment:
    """The rest of what a claim's rank needs.

    Args:
        address: of rank 0's host, by flag or ``MASTER_ADDR``; empty: not given.
        loopback: it is an address that only this host has.

    Raises:
        LauncherFault: nothing says how many ranks there are, or how many of them share this host.
    """
    launcher, sources = claim.launcher, {"rank": claim.sources["rank"]}
    if not claim.size:
        raise LauncherFault(
            f"{claim.sources['rank']}={claim.rank} is set by {launcher.title}, and nothing says how many ranks there "
            f"are; set WORLD_SIZE for every rank, or unset {claim.sources['rank']} to run one process"
        )
    sources["world_size"] = claim.sources["size"]
    local_rank = read_int(env, (*launcher.local_rank, "LOCAL_RANK"), sources, "local_rank")
    nodes = read_int(env, launcher.nodes, sources, "num_nodes")
    local_size = read_int(env, (*launcher.local_size, "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), sources, "local_world_size")
    sources["master_addr"] = "MASTER_ADDR"
    if local_size is None and nodes:
        local_size, sources["local_world_size"] = -(-claim.size // nodes), "ranks / nodes, rounded up"
    elif local_size is None and loopback:
        local_size, sources["local_world_size"] = claim.size, "the master is on loopback: one host"
    elif local_size is None and local_rank is None and launcher is GENERIC and address:
        local_size, sources["local_world_size"] = 1, "no LOCAL_WORLD_SIZE: one rank a host"
    if local_size is None:
        names = " and ".join(claim.sources.values())
        want = "set LOCAL_RANK and LOCAL_WORLD_SIZE for every rank"
        if not address:
            want = launcher.give_address if launcher is GENERIC else f"{want}, and {launcher.give_address}"
        raise LauncherFault(
            f"{claim}; nothing says how many ranks share this host{'' if address else ' and where rank 0 listens'}: "
            f"{want}; or unset {names} to run one process"
        )
    local_size = max(1, local_size)
    if local_rank is None:
        local_rank, sources["local_rank"] = claim.rank % local_size, "rank modulo ranks a host"
    if nodes is None:
        nodes, sources["num_nodes"] = -(-claim.size // local_size), "ranks / ranks a host, rounded up"
    node_rank = read_int(env, launcher.node_rank, sources, "node_rank")
    if node_rank is None:
        node_rank, sources["node_rank"] = min(claim.rank // local_size, nodes - 1), "rank / ranks a host"
    if not address and nodes == 1:
        address, sources["master_addr"] = "127.0.0.1", "one node"
    port = _port(claim, env, sources)
    return RankAssignment(claim.rank, claim.size, local_rank, local_size, node_rank, nodes, address, port, sources)


def _port(claim: Claim, env: Mapping[str, str], sources: dict[str, str]) -> int:
    """Return ``MASTER_PORT``; otherwise a number that the job's name gives; otherwise torch's default."""
    given = read_int(env, ("MASTER_PORT",), sources, "master_port")
    if given is not None:
        return given
    names = [name for name in claim.launcher.job if env.get(name)]
    if not names:
        sources["master_port"] = "default"
        return DEFAULT_PORT
    sources["master_port"] = names[0]
    return FIRST_PORT + zlib.crc32(env[names[0]].encode()) % PORTS


# Reading what SLURM puts into the environment. Pure text; see srun(1), OUTPUT ENVIRONMENT VARIABLES.

FIRST_RESERVED_STEP = 0xFFFFFFF0
"""Batch, extern and interactive "steps" are numbered from here to 2^32: no srun started them."""


def _split_outside_brackets(text: str) -> list[str]:
    """Pieces between the commas that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c == "[") - (c == "]")
        if depth not in (0, 1):
            raise EnvironmentFault(f"SLURM node list \"{text}\": brackets do not match at character {i + 1}")
        if c == "," and not depth:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise EnvironmentFault(f"SLURM node list \"{text}\": a bracket is not closed")
    return [p for p in [*parts, text[start:]] if p]


def expand_hosts(text: str) -> list[str]:
    """Expand ``frontier[00001-00003,00010],login1`` into every host, in order. Several brackets in a name multiply.

    Raises:
        EnvironmentFault: the text is not a SLURM node list.
    """
    hosts: list[str] = []
    for part in _split_outside_brackets(text.strip()):
        found = re.search(r"\[([^\]]*)\]", part)
        if not found:
            hosts.append(part)
            continue
        tails = expand_hosts(part[found.end() :]) or [""]
        for piece in found.group(1).split(","):
            first, dash, last = piece.partition("-")
            if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
                raise EnvironmentFault(f"SLURM node list \"{text}\": \"{piece}\" is not a range of numbers")
            for number in range(int(first), int(last or first) + 1):
                hosts += [f"{part[: found.start()]}{number:0{len(first)}d}{tail}" for tail in tails]
    return hosts


def compress_hosts(hosts: Sequence[str]) -> str:
    """The inverse of :func:`expand_hosts`: ``frontier[00001-00003,00010],login1``, in the order given.

    Only neighbours in ``hosts`` that differ in their last number share a bracket, so expanding
    gives exactly ``hosts`` again. Names must not contain commas or brackets.
    """
    runs: list[tuple[str, str, str]] = []
    for host in hosts:
        stem, digits = re.fullmatch(r"(.*?)([0-9]*)", host, re.DOTALL).groups()  # type: ignore[union-attr]
        if runs and digits and runs[-1][0] == stem and runs[-1][1]:
            _, first, last = runs[-1]
            # expand_hosts and SLURM pad every number of a range to the first one's width.
            if digits == f"{int(last) + 1:0{len(first)}d}":
                runs[-1] = (stem, first, digits)
                continue
        runs.append((stem, digits, digits))
    pieces: list[str] = []
    i = 0
    while i < len(runs):
        stem, j = runs[i][0], i + 1
        while j < len(runs) and runs[i][1] and runs[j][0] == stem and runs[j][1]:
            j += 1
        numbers = [first if first == last else f"{first}-{last}" for _, first, last in runs[i:j]]
        pieces.append(stem + (numbers[0] if len(numbers) == 1 and "-" not in numbers[0] else f"[{','.join(numbers)}]"))
        i = j
    return ",".join(pieces)


def expand_tasks(text: str) -> list[int]:
    """Expand ``8(x3),4`` into [8, 8, 8, 4], the tasks on each node.

    Raises:
        EnvironmentFault: the text is of another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            raise EnvironmentFault(f"SLURM_STEP_TASKS_PER_NODE=\"{text}\": \"{part}\" is not of the form 8(x3)")
        counts += [int(found.group(1))] * int(found.group(2) or 1)
    return counts


def in_step(env: Mapping[str, str]) -> bool:
    """True for a task of srun; false in a batch script, an interactive shell and outside of SLURM."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < FIRST_RESERVED_STEP


def step_rank() -> int:
    """This task's number in its step; 0 outside of one."""
    text = os.environ.get("SLURM_PROCID", "")
    return int(text) if in_step(os.environ) and text.isdigit() else 0


def step_port(env: Mapping[str, str]) -> int:
    """A port below the ephemeral range (15000 to 31999) that neighbouring jobs, steps and restarts do not share."""
    job, step, restart = (
        int(env.get(name, "") or 0) if env.get(name, "0").isdigit() else 0
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    )
    return 15000 + (31 * job + 7 * step + restart) % 17000


def same_host(a: str, b: str) -> bool:
    """Two names of one host: equal, or one is the other's short form."""
    a, b = a.lower().rstrip("."), b.lower().rstrip(".")
    return a == b or (("." not in a or "." not in b) and a.split(".")[0] == b.split(".")[0])


# The SLURM job that this process belongs to, and what can be asked of SLURM about it.

LOCAL = "local"
"""Attempt of a run that no job scheduler started."""
SERIES = "MEGATRON_PORT_SERIES"
"""Set by a chained job: the id of the job that began the series."""


Fate = Literal["running", "limit", "cancelled", "requeued"]
"""State of the job by SLURM while its script runs: untouched; ended at its time limit; ended for
good, for a person (``scancel``) or an administrator; has queued it again by itself, after the loss of a node."""
ENDING = ("COMPLETING", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "DEADLINE", "FAILED")


@dataclass(frozen=True)
class Job:
    """One job, in one of its starts."""

    id: str
    restart: int
    """How often SLURM has started it again."""
    series: str
    """Id of the first job of a chain; failures are counted over a series."""
    node_list: str
    """SLURM's compressed list."""
    step: str = ""
    """``JOB.STEP`` that srun started this process in; empty: none."""
    cluster: str = ""
    """SLURM's name of it; job ids repeat over clusters."""
    array_job: str = ""
    """Id of the job array; empty: none."""
    array_task: str = ""
    """Index in it."""

    @property
    def attempt(self) -> str:
        """``JOB.RESTART``: tells the starts of a run apart."""
        return f"{self.id}.{self.restart}"

    @property
    def names(self) -> tuple[str, ...]:
        """Its id, and JOB_TASK of a task of an array."""
        return (self.id, f"{self.array_job}_{self.array_task}") if self.array_job else (self.id,)


def current_job(env: Mapping[str, str] | None = None) -> Job | None:
    """The job around this process, or None."""
    env = os.environ if env is None else env
    number = env.get("SLURM_JOB_ID", "")
    if not number:
        return None
    restart = env.get("SLURM_RESTART_COUNT", "")
    return Job(
        number, int(restart) if restart.isdigit() else 0, env.get(SERIES, "") or number,
        env.get("SLURM_JOB_NODELIST", ""), step=f"{number}.{env['SLURM_STEP_ID']}" if in_step(env) else "",
        cluster=env.get("SLURM_CLUSTER_NAME", ""), array_job=env.get("SLURM_ARRAY_JOB_ID", ""),
        array_task=env.get("SLURM_ARRAY_TASK_ID", ""),
    )


def attempt_name(env: Mapping[str, str] | None = None) -> str:
    """:attr:`Job.attempt`, or ``local``."""
    job = current_job(env)
    return job.attempt if job else LOCAL


def run_tool(command: Sequence[str], *, timeout_s: float = 60.0) -> tuple[int, str]:
    """Exit code and output (both streams) of one of SLURM's commands; 127 where it is not there, 124 when it hangs."""
    try:
        done = subprocess.run(
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=timeout_s, check=False,
        )
    except FileNotFoundError:
        return 127, f"{command[0]} is not installed here"
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]} did not answer within {timeout_s:g} s"
    return done.returncode, done.stdout.strip()


ACTIVE = ("RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
"""States of a job whose processes may still run."""


def job_state(job: str, step: str = "") -> str | None:
    """State of a job that may still have processes; empty: SLURM has none; None: SLURM does not answer.

    ``step``: a step of it (``JOB.STEP``); once that has ended the job counts as ended, whatever else runs in it.
    A job that waits in the queue (it was queued again) has no processes.
    """
    code, text = run_tool(["squeue", "--noheader", "--jobs", job, "--format", "%T"], timeout_s=30.0)
    if code:
        return "" if "invalid job id" in text.lower() else None
    states = [word for word in text.split() if word in ACTIVE]
    if not states or not step or states[0] == "COMPLETING":
        return states[0] if states else ""
    code, text = run_tool(["squeue", "--noheader", "--steps", "--jobs", job, "--format", "%i"], timeout_s=30.0)
    return "" if code == 0 and step not in text.split() else states[0]


@dataclass(frozen=True)
class QueueEntry:
    """One of this user's jobs, as squeue lists it."""

    job: str
    """Id; JOB_TASK of a task of an array."""
    state: str
    reason: str = ""
    nodes: str = ""
    start: str = ""
    """When it started, or is expected to; N/A: not known."""
    command: str = ""


def ask_queue() -> dict[str, QueueEntry]:
    """Return all of this user's jobs that wait or run, by their ids, in one question.

    Raises:
        EnvironmentFault: SLURM does not answer, so nobody knows. (Without squeue here there are none.)
    """
    code, text = run_tool(["squeue", "--me", "--noheader", "--array", "--format", "%i|%A|%T|%r|%D|%S|%o"])
    if code == 127:
        return {}
    if code:
        said = text.splitlines()[-1] if text else f"exit {code}"
        raise EnvironmentFault(f"squeue does not say which jobs are queued ({said}); try again")
    found: dict[str, QueueEntry] = {}
    for line in text.splitlines():
        words = line.split("|", 6)
        if len(words) == 7:
            job, _, state, reason, nodes, start, command = words
            found[job] = QueueEntry(job, state, reason, nodes, start, command)
    return found


def one_task_at_a_time(array_job: str, task: str) -> bool:
    """The tasks of an array run one after another (``--array=…%1``), as far as SLURM tells."""
    code, text = run_tool(["scontrol", "show", "job", f"{array_job}_{task}"], timeout_s=30.0)
    return code == 0 and "ArrayTaskThrottle=1" in text.split()


def nodes_down(node_list: str) -> list[str]:
    """Return ``n3 (down*: Not responding)`` of those nodes that cannot run jobs now; empty when SLURM does not say."""
    if not node_list:
        return []
    code, text = run_tool(["sinfo", "--noheader", "--Node", "--nodes", node_list, "--format", "%N|%T|%E"])
    found: dict[str, str] = {}
    for line in text.splitlines() if code == 0 else ():
        name, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if state.startswith(("down", "drain", "fail", "unknown", "no_respond")) or state.endswith("*"):
            found.setdefault(name, f"{name} ({state}{'' if reason == 'none' else ': ' + reason})")
    return list(found.values())


_WHOLE_LINES = (
    "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment", "SystemComment", "MailUser",
)


def job_record(text: str) -> dict[str, str]:
    """Fields of ``scontrol show job``. The job's name, which ends the first line, and what has a line of its own
    (Command, WorkDir, comments, the paths of the streams) may hold blanks and equals signs; the rest are words.
    """
    found: dict[str, str] = {}
    named = re.match(r"(JobId=\S+ (?:\w+=\S+ )*?)JobName=(.*?)(\n {3}UserId=\S+\(\d+\) |\Z)", text, re.DOTALL)
    if named:
        found["JobName"] = named[2]
        text = named[1] + text[named.start(3):]
    for line in text.split("\n"):
        line = line.removeprefix("   ")
        name, _, value = line.partition("=")
        if name in _WHOLE_LINES:
            found[name] = value
            continue
        for word in line.split():
            name, equals, value = word.partition("=")
            if equals:
                found.setdefault(name, value)
    return found


def ask_record(job_id: str) -> dict[str, str]:
    """:func:`job_record` of a job as SLURM has it now; empty where SLURM does not answer."""
    code, text = run_tool(["scontrol", "show", "job", job_id])
    return job_record(text) if code == 0 else {}


def fate_of(job: Job, asked: Sequence[str], record: Mapping[str, str]) -> Fate:
    """Return what becomes of the job around a script that has come to its end.

    SLURM shows a cancelled job, one at its limit and one that lost a node alike: COMPLETING, after a SIGTERM. The count
    of restarts and the time tell them apart; what is left was cancelled. (EndTime says nothing: a cancelled job's is
    now.)

    Args:
        asked: signals that the script received, in order.
        record: :func:`ask_record`; empty: only ``asked`` is known.
    """
    restarts = record.get("Restarts", "")
    if restarts.isdigit() and int(restarts) > job.restart:
        return "requeued"
    ran, limit = clock_seconds(record.get("RunTime", "")), clock_seconds(record.get("TimeLimit", ""))
    ending = record.get("JobState", "") in ENDING or "TERM" in asked
    if ending and ran is not None and limit is not None and ran >= limit - 1:
        return "limit"
    return "cancelled" if ending else "running"


def clock_seconds(text: str) -> int | None:
    """Return ``1-02:03:04`` or ``02:03:04`` as scontrol prints it; None for anything else (UNLIMITED)."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if len(parts) != 3 or not all(p.isdigit() for p in parts) or (dash and not days.isdigit()):
        return None
    hours, minutes, seconds = map(int, parts)
    return ((int(days) if dash else 0) * 24 + hours) * 3600 + minutes * 60 + seconds


# Which process prints before anything is known of the run.

LOCAL_RANK_VARIABLE = "MEGATRON_PORT_LOCAL_RANK"
"""Set by ``--nproc`` for each of its ranks."""
AGENT_VARIABLE = "MEGATRON_PORT_AGENT"
"""Set for them too: a name of what keeps them, which starts a rank anew only once it has ended."""


def is_rank_zero(environ: Mapping[str, str] | None = None) -> bool:
    """True on the one rank that prints the errors which every rank meets alike.

    That is rank 0 of ``--nproc``, of a torchrun job (RANK), of a SLURM step (SLURM_PROCID counts only with a numeric
    SLURM_STEP_ID) or of another launcher, in the order in which ``discovery`` looks; and any process that no launcher
    started. A value that is not a number never silences a process.
    """
    env = os.environ if environ is None else environ
    rank = env.get(LOCAL_RANK_VARIABLE)
    if rank is None and env.get("TORCHELASTIC_RUN_ID"):
        rank = env.get("RANK")
    if rank is None and in_step(env) and env.get("SLURM_STEP_NUM_TASKS") != "1":
        rank = env.get("SLURM_PROCID")
    try:
        if rank is None:
            more = several(claims(env))
            rank = None if more is None else str(more.rank)
        return rank is None or int(rank) == 0
    except (ValueError, LauncherFault):
        return True
