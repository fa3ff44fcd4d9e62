"""The configuration files of a private cluster: slurm.conf, gres.conf, hosts, and Frontier's queue limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NSSWITCH = "passwd: files\ngroup: files\nshadow: files\nhosts: files\nnetworks: files\n"

#: Wall time on Frontier's ``batch`` by node count (OLCF user guide): (up to this many nodes, minutes).
BATCH_LIMITS = ((91, 2 * 60), (183, 6 * 60), (100_000, 12 * 60))
#: ``extended``: at most 64 nodes, 24 hours.
EXTENDED_LIMITS = ((64, 24 * 60),)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a node claims to have. SLURM believes it (``config_overrides``)."""

    cores: int = 64
    threads: int = 2
    gpus: int = 8
    memory_mb: int = 512_000
    reserved_cores: int = 8
    features: Sequence[str] = ("nvme",)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What of slurm.conf a test may want different."""

    shape: Shape = field(default_factory=Shape)
    #: Partition → further options of its line; the first one is the default.
    partitions: Mapping[str, str] = field(
        default_factory=lambda: {"batch": "MaxTime=720", "extended": "MaxTime=1440 MaxNodes=64"}
    )
    kill_wait: int = 5
    slurmd_timeout: int = 10
    #: How long slurmctld goes on asking a node that is silent. With SLURM's 10 s a crash is noticed after up to 32 s.
    message_timeout: int = 6
    #: Seconds that a credential is good for; a requeued job waits one second more. Below 5 SLURM takes 120 instead.
    cred_expire: int = 8
    #: Whole nodes to every job, as on Frontier.
    exclusive: bool = True
    #: Further lines, verbatim.
    extra: str = ""


def hosts(addresses: Mapping[str, str]) -> str:
    """/etc/hosts. c10d asks for IPv4 addresses in their IPv6 form too."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for name, address in addresses.items():
        lines += [f"{address} {name}", f"::ffff:{address} {name}"]
    return "\n".join(lines) + "\n"


def gres_conf(names: str, device_directory: str, gpus: int) -> str:
    """As many device files per node as it has GPUs; the flag makes SLURM set ROCR_VISIBLE_DEVICES."""
    if not gpus:
        return "AutoDetect=off\n"
    devices = f"{device_directory}/renderD[128-{127 + gpus}]" if gpus > 1 else f"{device_directory}/renderD128"
    return f"AutoDetect=off\nNodeName={names} Name=gpu File={devices} Flags=amd_gpu_env\n"


def slurm_conf(base: str, login: tuple[str, str], nodes: Mapping[str, str], options: Options) -> str:
    """``login`` is (name, address), ``nodes`` name → address."""
    shape = options.shape
    node = _node_options(shape)
    lines = [_head(base, login, options)]
    lines += [f"NodeName={name} NodeAddr={address} {node} State=UNKNOWN" for name, address in nodes.items()]
    return "\n".join([*lines, *_partitions(options, ",".join(nodes)), options.extra]) + "\n"


def directory_conf(base: str, login: tuple[str, str], names: str, options: Options) -> str:
    """Nodes that only exist on paper, ``names`` as in ``n[1-9]``: in the cloud, so that SLURM does not miss them."""
    cloud = (
        "SuspendProgram=/bin/true\nResumeProgram=/bin/true\nSuspendTime=INFINITE\nResumeTimeout=3600\n"
        "JobSubmitPlugins=lua\nEnforcePartLimits=ALL"
    )
    node = f"NodeName={names} {_node_options(options.shape)} State=CLOUD"
    return "\n".join([_head(base, login, options), cloud, node, *_partitions(options, names), options.extra]) + "\n"


def _node_options(shape: Shape) -> str:
    text = f"Sockets=1 CoresPerSocket={shape.cores} ThreadsPerCore={shape.threads} RealMemory={shape.memory_mb}"
    text += f" CoreSpecCount={shape.reserved_cores}" if shape.reserved_cores else ""
    text += f" Gres=gpu:{shape.gpus}" if shape.gpus else ""
    return text + (f" Feature={','.join(shape.features)}" if shape.features else "")


def _partitions(options: Options, names: str) -> list[str]:
    shared = "EXCLUSIVE" if options.exclusive else "NO"
    return [
        f"PartitionName={partition} Nodes={names} Default={'NO' if index else 'YES'} OverSubscribe={shared} {more}"
        for index, (partition, more) in enumerate(options.partitions.items())
    ]


def _head(base: str, login: tuple[str, str], options: Options) -> str:
    return f"""\
ClusterName=private
SlurmctldHost={login[0]}({login[1]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/run/munge.socket,cred_expire={options.cred_expire}
CredType=cred/munge
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/run/slurmctld.pid
SlurmdPidFile={base}/run/slurmd.%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
AllowSpecResourcesUsage=YES
GresTypes=gpu
PropagateResourceLimits=NONE
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
CompleteWait=0
KillWait={options.kill_wait}
InactiveLimit=0
OverTimeLimit=0
MinJobAge=3600
JobRequeue=0
ReturnToService=2
SlurmdTimeout={options.slurmd_timeout}
MessageTimeout={options.message_timeout}
TCPTimeout=1
SlurmctldTimeout=30"""


def _limits(limits: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{{{nodes}, {minutes}}}" for nodes, minutes in limits)


#: slurmctld without accounting has no QOS, so a plug-in refuses what OLCF's limits by node count would.
JOB_SUBMIT = f"""\
local limits = {{ batch = {{ {_limits(BATCH_LIMITS)} }}, extended = {{ {_limits(EXTENDED_LIMITS)} }} }}

local function asked(value)
    return value ~= nil and value ~= slurm.NO_VAL and value > 0
end

function slurm_job_submit(job, partitions, user)
    local nodes = asked(job.min_nodes) and job.min_nodes or 1
    for _, limit in ipairs(limits[job.partition or "batch"] or {{}}) do
        if nodes <= limit[1] then
            if asked(job.time_limit) and job.time_limit > limit[2] then
                slurm.log_user("%d nodes: at most %d minutes, %d asked for", nodes, limit[2], job.time_limit)
                return slurm.ERROR
            end
            return slurm.SUCCESS
        end
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, user)
    return slurm.SUCCESS
end
"""
