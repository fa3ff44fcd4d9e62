"""Launchers other than torchrun and SLURM, by the variables that each sets for the processes it starts.

mpirun, Flux, PALS, jsrun, Hydra and the Kubernetes operators all say who a process is; none of them says where rank 0
listens, unless all ranks share a host or ``MASTER_ADDR`` is set. A claim of more than one process is never dropped:
a process that took itself for the only one would write the same run's folder as its peers.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_port.core.errors import LauncherFault

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
