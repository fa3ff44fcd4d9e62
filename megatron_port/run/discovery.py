"""Who is this process, and who leads: from flags, torchrun, a SLURM step, another launcher, or nothing.

    explicit --master-addr/--master-port  >  torchrun  >  SLURM step  >  other launchers  >  single process

A pure function of an environment mapping. Every value says where it came from, and whatever disagreed and lost is
listed as a conflict, to be printed. A launcher that says one process loses to one that says more: a wrapper's single
task (``mpirun`` started by ``srun -n 1``) must not turn N ranks into N runs of one.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import EnvironmentFault, LauncherFault
from megatron_port.run import launchers
from megatron_port.run import launchers as slurm

SECRET = "MEGATRON_PORT_SECRET"
"""Set by the job scripts to the same random text for all ranks of an attempt."""
Resolver = Callable[[str], list[str]]
"""Host name → its addresses; an OSError if there are none."""


def resolve_host(name: str) -> list[str]:
    """Addresses of a host by the system's resolver."""
    return [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]


def is_loopback(address: str) -> bool:
    """True for ``localhost``, 127.0.0.0/8, ::1 and the unspecified address."""
    if address.lower().rstrip(".") in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        parsed = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return False
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    return parsed.is_loopback or parsed.is_unspecified


class _Reader:
    """Takes integers out of the environment and remembers which variable each came from."""

    def __init__(self, env: Mapping[str, str], launcher: str, sign: str) -> None:
        self.env, self.launcher, self.sign = env, launcher, sign
        self.sources: dict[str, str] = {}

    def integer(self, name: str, *variables: str, default: int | None = None) -> int:
        """The first variable that is set; EnvironmentFault if it is not a number or none is set and no default."""
        found = launchers.read_int(self.env, variables, self.sources, name)
        if found is not None:
            return found
        if default is None:
            raise LauncherFault(
                f"this looks like {self.launcher}, but {' and '.join(variables)} "
                f"{'is' if len(variables) == 1 else 'are'} not set; start the processes with srun or torchrun, "
                f"and keep their variables (srun --export=ALL); if it is not, unset {self.sign}"
            )
        self.sources[name] = "default"
        return default


def _torchrun(env: Mapping[str, str], hostname: str) -> ProcessInfo:
    read = _Reader(env, "torchrun", "TORCHELASTIC_RUN_ID")
    world = read.integer("world_size", "WORLD_SIZE")
    local_world = read.integer("local_world_size", "LOCAL_WORLD_SIZE", default=world)
    address = env.get("MASTER_ADDR", "") or "127.0.0.1"
    read.sources["master_addr"] = "MASTER_ADDR" if env.get("MASTER_ADDR") else "default"
    return ProcessInfo(
        rank=read.integer("rank", "RANK"),
        world_size=world,
        local_rank=read.integer("local_rank", "LOCAL_RANK"),
        local_world_size=local_world,
        node_rank=read.integer("node_rank", "GROUP_RANK", default=0),
        num_nodes=read.integer("num_nodes", "GROUP_WORLD_SIZE", default=max(1, world // max(local_world, 1))),
        master_addr=address,
        master_port=read.integer("master_port", "MASTER_PORT"),
        launcher="torchrun",
        hostname=hostname,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
        sources=read.sources,
    )


def _slurm(env: Mapping[str, str], hostname: str) -> ProcessInfo:
    read = _Reader(env, "a SLURM step", "SLURM_STEP_ID")
    world = read.integer("world_size", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes = read.integer("num_nodes", "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1)
    node = read.integer("node_rank", "SLURM_NODEID", default=0)
    variable = "SLURM_STEP_TASKS_PER_NODE" if env.get("SLURM_STEP_TASKS_PER_NODE") else "SLURM_TASKS_PER_NODE"
    tasks: list[int] = []
    if env.get(variable):
        tasks = slurm.expand_tasks(env[variable])
        if node >= len(tasks):
            raise EnvironmentFault(f"SLURM_NODEID={node}, but {variable}={env[variable]} has {len(tasks)} nodes")
        local_world, read.sources["local_world_size"] = tasks[node], variable
    else:
        local_world, read.sources["local_world_size"] = -(-world // nodes), "tasks / nodes, rounded up"
    conflicts = []
    if nodes == 1:
        address, read.sources["master_addr"] = "127.0.0.1", "one node"
    else:
        hosts = slurm_hosts(env)
        if not hosts:
            raise EnvironmentFault(
                f"a SLURM step of {nodes} nodes without SLURM_STEP_NODELIST and SLURM_NODELIST; pass --master-addr"
            )
        address, read.sources["master_addr"] = hosts[0], "first host of the step's node list"
        other = env.get("MASTER_ADDR", "")
        if other and not slurm.same_host(other, address):
            conflicts.append(f"MASTER_ADDR={other} is not used, the step's first node {address} is; "
                             f"--master-addr {other} would force it")
    rank = read.integer("rank", "SLURM_PROCID")
    port = slurm.step_port(env)
    read.sources["master_port"] = "job id, step and restart count"
    if env.get("MASTER_PORT", "") not in ("", str(port)):
        conflicts.append(f"MASTER_PORT={env['MASTER_PORT']} is not used, {port} from the job id is; "
                         f"--master-port {env['MASTER_PORT']} would force it")
    return ProcessInfo(
        rank=rank,
        world_size=world,
        local_rank=read.integer("local_rank", "SLURM_LOCALID"),
        local_world_size=local_world,
        node_rank=node,
        num_nodes=nodes,
        master_addr=address,
        master_port=port,
        launcher="slurm",
        hostname=hostname,
        attempt=env.get("SLURM_RESTART_COUNT", "0"),
        sources=read.sources,
        conflicts=conflicts,
        nodes=_slurm_nodes(env, tasks, rank=rank, node=node, world=world),
    )


def _slurm_nodes(
    env: Mapping[str, str], tasks: list[int], *, rank: int, node: int, world: int
) -> tuple[tuple[str, int], ...]:
    """Host and ranks of each node in rank order; empty where ranks are not dealt to the nodes in blocks."""
    hosts = slurm_hosts(env)
    blocks = env.get("SLURM_DISTRIBUTION", "block").startswith("block")
    if not blocks or not tasks or len(hosts) != len(tasks) or sum(tasks) != world:
        return ()
    first = sum(tasks[:node])
    if not first <= rank < first + tasks[node]:
        return ()  # the step was laid out in another way than its variables say
    return tuple(zip(hosts, tasks))


def _other(claim: launchers.Claim, env: Mapping[str, str], hostname: str, addr: str | None) -> ProcessInfo:
    """A rank that none of torchrun and SLURM started. Its master address is empty where nothing names one."""
    address = addr or env.get("MASTER_ADDR", "")
    place = launchers.place_of(claim, env, address=address, loopback=bool(address) and is_loopback(address))
    return ProcessInfo(
        rank=place.rank, world_size=place.size, local_rank=place.local_rank, local_world_size=place.local_size,
        node_rank=place.node_rank, num_nodes=place.nodes, master_addr=place.address, master_port=place.port,
        launcher=claim.launcher.name, hostname=hostname, sources=place.sources,
    )


def _single(env: Mapping[str, str], hostname: str) -> ProcessInfo:
    conflicts = []
    tasks = env.get("SLURM_NTASKS", "")
    if tasks.isdigit() and int(tasks) > 1:
        conflicts.append(f"SLURM_NTASKS={tasks}, but no srun started this process: it runs alone")
    sources = dict.fromkeys(("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes",
                             "master_addr", "master_port"), "single process")
    return ProcessInfo(0, 1, 0, 1, 0, 1, "127.0.0.1", 0, "single", hostname, sources=sources, conflicts=conflicts)


def _started_by(env: Mapping[str, str], hostname: str, addr: str | None) -> ProcessInfo:
    """Return what the environment says, before flags; every claim that is not used is among the conflicts."""
    if env.get("TORCHELASTIC_RUN_ID"):
        return _beside_torchrun(_torchrun(env, hostname), env)
    if slurm.in_step(env):
        return _beside_step(_slurm(env, hostname), env, addr)
    found = launchers.claims(env)
    more = launchers.several(found)
    if more is None:
        return _single(env, hostname)
    lost = launchers.conflicts(more.launcher.title, more.rank, more.size, found)
    return replace(_other(more, env, hostname, addr), conflicts=lost)


def _beside_step(info: ProcessInfo, env: Mapping[str, str], addr: str | None) -> ProcessInfo:
    """A SLURM step's word; that of an inner launcher (mpirun in a step of one task), where only it says several."""
    found, lost = launchers.claims_beside(env)
    more = launchers.several(found)
    if info.world_size == 1 and more is not None and more.size:
        line = f"the SLURM step (SLURM_STEP_NUM_TASKS) is of one task and not used, {more} is"
        return replace(_other(more, env, info.hostname, addr), conflicts=[line])
    lost += launchers.conflicts("the SLURM step", info.rank, info.world_size, found)
    return replace(info, conflicts=[*info.conflicts, *lost])


def _beside_torchrun(info: ProcessInfo, env: Mapping[str, str]) -> ProcessInfo:
    """torchrun's word against that of what started it: one torchrun a task, each of which believes to be alone."""
    outer = {k: v for k, v in env.items() if k not in ("RANK", "WORLD_SIZE")}  # those are torchrun's own
    more = launchers.several(launchers.claims_beside(outer)[0])
    tasks, who = (more.size, more.launcher.title) if more else (1, "")
    if slurm.in_step(env) and env.get("SLURM_STEP_NUM_TASKS", "").isdigit():
        tasks, who = int(env["SLURM_STEP_NUM_TASKS"]), "srun"
    if tasks < 2 or info.num_nodes > 1:
        return info
    if info.world_size == 1:
        raise LauncherFault(
            f"{who} started {tasks} torchruns, and each says that its one process is the whole run; start the ranks "
            f"with {who} alone, or give torchrun --nnodes={tasks} and --rdzv-endpoint=HOST:PORT"
        )
    said = f"{who} says {tasks} tasks, torchrun says one node: if every task starts a torchrun, these are {tasks} runs"
    return replace(info, conflicts=[*info.conflicts, said])


def slurm_hosts(env: Mapping[str, str]) -> list[str]:
    """Hosts of the step, or of the job; empty outside of SLURM."""
    text = next((env[n] for n in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST") if env.get(n)), "")
    return slurm.expand_hosts(text) if text else []


def _same_place(address: str, name: str, resolve: Resolver) -> bool:
    """``address`` is ``name``, or one of its addresses."""
    if slurm.same_host(address, name):
        return True
    try:
        return address in resolve(name)
    except OSError:
        return False


def _with_flags(info: ProcessInfo, addr: str | None, port: int | None, resolve: Resolver) -> ProcessInfo:
    """Flags override the launcher; what they override is a conflict when it differs."""
    if addr is None and port is None:
        return info
    values = dict(vars(info))
    sources, conflicts = dict(info.sources), list(info.conflicts)
    if port is not None and not 0 < port < 65536:
        raise EnvironmentFault(f"--master-port {port} is not a port; use 1 to 65535")
    for name, flag, value in (("master_addr", "--master-addr", addr), ("master_port", "--master-port", port)):
        if value is None:
            continue
        before, source = values[name], sources.get(name, "default")
        # Under SLURM the port is ours, derived from the job: nobody asked for it.
        if (info.launcher == "torchrun" and before != value) or (
            info.launcher not in ("torchrun", "slurm") and source.startswith("MASTER_") and before != value
        ) or (
            info.launcher == "slurm" and name == "master_addr" and not _same_place(str(value), before, resolve)
        ):
            conflicts.append(f"{flag} {value} is used, not {before} ({source})")
        elif before == value and info.agent_store:
            continue  # the flag repeats torchrun's address, which its agent serves
        values[name], sources[name] = value, f"{flag}"
        values["agent_store"] = False
    # A flag settles what an environment variable was said to be ignored for.
    conflicts = [c for c in conflicts if not (addr is not None and c.startswith("MASTER_ADDR="))
                 and not (port is not None and c.startswith("MASTER_PORT="))]
    return ProcessInfo(**{**values, "sources": sources, "conflicts": conflicts})


def _check(info: ProcessInfo, env: Mapping[str, str], resolve: Resolver) -> None:
    """Refuse what cannot work; EnvironmentFault."""
    if not (0 <= info.rank < info.world_size and 0 <= info.local_rank < info.local_world_size):
        raise EnvironmentFault(
            f"rank {info.rank} of {info.world_size} ({info.sources.get('rank')}, {info.sources.get('world_size')}), "
            f"local rank {info.local_rank} of {info.local_world_size}: a rank must be below its count"
        )
    if info.num_nodes < 2:
        return
    master, source = info.master_addr, info.sources.get("master_addr", "default")
    if not master:
        how = next((x.give_address for x in launchers.LAUNCHERS if x.name == info.launcher), "set MASTER_ADDR")
        raise LauncherFault(
            f"{info.launcher} started {info.world_size} ranks on {info.num_nodes} nodes and does not say where rank 0 "
            f"listens; {how}, or pass --master-addr HOST to every rank"
        )
    submit, hosts = env.get("SLURM_SUBMIT_HOST", ""), slurm_hosts(env)
    example = f"; use a compute node, e.g. --master-addr {hosts[0]}" if hosts else "; use the first compute node"
    if submit and slurm.same_host(master, submit) and hosts and not any(slurm.same_host(master, h) for h in hosts):
        raise EnvironmentFault(
            f"master {master} ({source}) is the host the job was submitted from and not one of its nodes{example}"
        )
    if is_loopback(master):
        raise EnvironmentFault(f"master {master} ({source}) is a loopback address, and the run has "
                               f"{info.num_nodes} nodes{example}")
    try:
        addresses = resolve(master)
    except OSError as error:
        raise EnvironmentFault(
            f"master {master} ({source}) cannot be resolved on {info.hostname}: {error}{example}"
        ) from None
    # A host may map its own name to 127.0.1.1 (Debian does); from elsewhere the name must lead somewhere.
    if all(is_loopback(a) for a in addresses) and not slurm.same_host(master, info.hostname):
        raise EnvironmentFault(f"master {master} ({source}) resolves to {', '.join(addresses)} on {info.hostname}: "
                               f"loopback, and the run has {info.num_nodes} nodes; fix /etc/hosts{example}")


def discover(
    env: Mapping[str, str] | None = None,
    *,
    master_addr: str | None = None,
    master_port: int | None = None,
    hostname: str | None = None,
    resolve: Resolver = resolve_host,
) -> ProcessInfo:
    """This process's place in the run.

    Args:
        env: environment (default: the process's).
        master_addr, master_port: the flags, if given.
        hostname: of this machine (default: asked of the system).
        resolve: host name → addresses, for tests.

    Raises:
        LauncherFault: a launcher's variables are missing or senseless, or say that there are several processes without
            saying who this is and where rank 0 listens.
        EnvironmentFault: the master cannot be reached by all nodes: submit host, loopback, unresolvable.
    """
    env = os.environ if env is None else env
    hostname = hostname or socket.gethostname()
    info = _started_by(env, hostname, master_addr)
    info = _with_flags(info, master_addr, master_port, resolve)
    _check(info, env, resolve)
    return replace(info, secret=env.get(SECRET, ""))


# Questions to the system about addresses and ports.

LISTENING = "0A"
"""State in /proc/net/tcp."""


def is_own_address(address: str) -> bool:
    """True if this host has the address (a socket can be bound to it)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def own_addresses() -> list[str]:
    """This host's IPv4 addresses, loopback left out."""
    import psutil

    found = [a.address for rows in psutil.net_if_addrs().values() for a in rows if a.family == socket.AF_INET]
    return sorted(a for a in set(found) if not a.startswith("127."))


def holder_of_port(port: int, proc: Path = Path("/proc")) -> str:
    """Return who listens on a TCP port: ``process 41 (python train.py)``, ``a process of user ann``; empty: unknown."""
    owners: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        try:
            rows = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            columns = row.split()
            if columns[3] == LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
                owners[columns[9]] = columns[7]
    if not owners:
        return ""
    for folder in proc.glob("[0-9]*"):
        try:
            links = {os.readlink(entry) for entry in (folder / "fd").iterdir()}
        except OSError:
            continue  # another user's, or it has ended
        if any(f"socket:[{inode}]" in links for inode in owners):
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                command = ""
            return f"process {folder.name} ({command[:80]})"
    return f"a process of user {_user_name(next(iter(owners.values())))}"


def _user_name(uid: str) -> str:
    import pwd

    try:
        return pwd.getpwuid(int(uid)).pw_name
    except (KeyError, ValueError):
        return uid
