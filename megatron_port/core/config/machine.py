"""The machine's part of a run file: cluster, hardware, how a job is submitted, what a healthy node shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron_port.core.config.ranges import (
    AbsolutePath,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    PathSetting,
    Positive,
    Share,
    Size,
    SizeOrZero,
    at_least,
    between,
)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The machine: what checks, FLOP shares and job scripts need to know of it."""

    name: str = "local"
    """A label."""
    gpus_per_node: Size = 8
    """Ranks per node (GCDs on MI250X)."""
    nodes: SizeOrZero = 0
    """Nodes of the run; 0: as many as the launcher gives."""
    peak_tflops: NonNegative = 0.0
    """Peak dense matmul rate of one device in the run's dtype, TFLOP/s; 0: MFU is not reported."""
    memory_gb: NonNegative = 0.0
    """Memory of one device, 10^9 bytes; 0: unknown."""
    device_label: str = "device"
    """Name of a rank's device, e.g. "GCD"."""
    cores_per_task: CountOrZero = 0
    """CPU cores of one rank (srun -c); 0: SLURM's default."""
    interface: str = ""
    """Network interface whose address on the first node is the master's; empty: what its name resolves to."""
    modules: tuple[str, ...] = ()
    """Modules that a job loads, in this order."""
    environment: tuple[str, ...] = ()
    """NAME=value, exported by a job; {job_id}, {user} and {local_disk} are filled in on the node."""
    sbatch_options: tuple[str, ...] = ()
    """Further sbatch options of every job on this machine, one per entry, e.g. "--constraint=gpu"."""
    srun_options: tuple[str, ...] = ()
    """Further options of the srun that starts the ranks, one per entry, e.g. "--gpus-per-task=1"."""
    local_disk: AbsolutePath = "/tmp"
    """Folder on each node's own disk, for a staged environment; {job_id} and {user} are filled in."""
    container: Literal["", "apptainer", "singularity", "podman", "podman-hpc", "shifter", "pyxis"] = ""
    """Runtime that the ranks run in; what speaks to SLURM stays on the host. Empty: none."""
    container_image: PathSetting = ""
    """File (.sif, .sqsh) or name of the image; empty: IMAGE in the environment of the submission."""
    container_mounts: tuple[PathSetting, ...] = ()
    """SOURCE or SOURCE:TARGET[:ro], beside the working directory, the run's folder and the local disk; {user}, {job_id}
    and {local_disk} are filled in."""
    container_options: tuple[str, ...] = ()
    """Further options of the runtime, one each, e.g. "--rocm"."""
    container_python: str = "python3"
    """Interpreter in the image."""
    partition: str = ""
    """Partition of a job; empty: the site's default."""
    qos: str = ""
    """Quality of service of a job; empty: the site's default."""
    queue_nodes: tuple[int, ...] = ()
    """Largest node count of each class of the queue, rising; empty: unknown."""
    queue_hours: tuple[float, ...] = ()
    """Longest wall time of each class, hours."""
    charge_per_node_hour: NonNegative = 1.0
    """What the site charges for an hour of a node, in charge_unit."""
    charge_unit: str = "node-hours"
    """What a project's budget is counted in, e.g. "GPU-hours" or "USD"."""


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Device and links, for the planner. One direction, decimal units; 0 in a rate: not known, and then not planned."""

    device: str = ""
    """Name of the device, e.g. "A100-SXM4-80GB"."""
    matmul_tflops: NonNegative = 0.0
    """Highest rate that large bf16/fp16 products with fp32 sums reach (cluster.peak_tflops is the datasheet's)."""
    fp32_matmul_tflops: NonNegative = 0.0
    """The same for fp32 products; 0: a quarter of matmul_tflops. fp64 is taken as half of it."""
    fp8_peak_tflops: NonNegative = 0.0
    """Peak dense fp8 rate; 0: no fp8."""
    fp8_matmul_tflops: NonNegative = 0.0
    """Highest rate that large fp8 products reach."""
    fp8_exact_share: Share = 1.0
    """Share of it that is left where sums are kept in fp32, as those of the backward pass are (Hopper and Ada)."""
    compute_units: CountOrZero = 0
    """SMs or CUs of a device: tiles of a product that run at once."""
    tile_rows: Count = 256
    """Rows of the largest output tile of the vendor's matmul kernels."""
    tile_columns: Count = 128
    """Columns of that tile."""
    inner_fill: CountOrZero = 128
    """Steps along the inner dimension that filling and emptying a tile's pipeline costs: efficiency k / (k + fill)."""
    epilogue_overlap: bool = False
    """Matmul kernels write a tile while they multiply the next one (persistent kernels, from Hopper on)."""
    attention_forward_tflops: NonNegative = 0.0
    """Rate of the fused attention's forward, over the operations of the causal half; 0: no fused attention."""
    attention_backward_tflops: NonNegative = 0.0
    """The same for its backward (5 products where the forward has 2)."""
    launch_us: NonNegative = 4.0
    """Least time between the starts of two kernels, microseconds."""
    host_us: NonNegative = 0.0
    """Time of the host to start one operation of an eager program, microseconds; 0: not known, and not planned."""
    is_host: bool = False
    """The device is cores of the host (a CPU): it computes nothing while it starts an operation, so host_us adds to
    what operations take. Elsewhere the host runs ahead of the device, and the longer of the two counts."""
    memory_bandwidth_gb: NonNegative = 0.0
    """Datasheet bandwidth of device memory, 10^9 bytes/s."""
    memory_efficiency: Share = 0.85
    """Share of it that a large streaming kernel reaches."""
    reserved_gb: NonNegative = 2.0
    """Device memory held by driver, libraries and communicators, outside the framework's allocator, 10^9 bytes."""
    fragmentation: Fraction = 0.03
    """Share of what is allocated that the caching allocator loses to holes."""
    host_link_gb: NonNegative = 0.0
    """Bandwidth from a device to its host's memory, in each direction, 10^9 bytes/s; 0: offload has no planned time."""
    host_memory_gb: NonNegative = 0.0
    """Memory of a node's host, 10^9 bytes; 0: not known."""
    host_bandwidth_gb: NonNegative = 0.0
    """Datasheet bandwidth of that memory, all sockets, 10^9 bytes/s."""
    nvme_gb: NonNegative = 0.0
    """Local disks of a node, 10^9 bytes; 0: none."""
    nvme_read_gb: NonNegative = 0.0
    """All local disks of a node, sequential reads, 10^9 bytes/s."""
    nvme_write_gb: NonNegative = 0.0
    """Rate of writes, in the same unit."""
    domain_devices: CountOrZero = 0
    """Devices that reach one another at node_gb, where these are more than a node's (NVL72: 72); 0: a node's."""
    package_devices: Count = 1
    """Devices that share a package (2 GCDs per MI250X)."""
    package_gb: NonNegative = 0.0
    """Bandwidth from a device to the other in its package, per direction, 10^9 bytes/s; 0 with package_devices 1."""
    node_gb: NonNegative = 0.0
    """Bandwidth from a device to the others of its node, all links together, in each direction, 10^9 bytes/s."""
    node_efficiency: Share = 0.8
    """Share of package_gb and node_gb that a ring collective on large buffers reaches."""
    node_latency_us: NonNegative = 5.0
    """One hop of a collective within a node, microseconds."""
    nics: CountOrZero = 0
    """Network adapters per node; 0: one node only."""
    nic_gb: NonNegative = 0.0
    """Bandwidth of one adapter, in each direction, 10^9 bytes/s."""
    network_efficiency: Share = 0.8
    """Share of the adapters' bandwidth that a large collective or transfer between nodes reaches."""
    network_latency_us: NonNegative = 15.0
    """One hop of a collective between nodes, microseconds."""
    nodes_per_group: CountOrZero = 0
    """Nodes below one level of the network (dragonfly group, pod); 0: one level."""
    group_taper: Share = 1.0
    """Bandwidth of all links out of a group, relative to that of its adapters (1: not tapered)."""
    dragonfly: bool = False
    """Groups are linked in pairs: what one sends to another goes over a third one as well, and takes two links."""
    group_uplinks: CountOrZero = 0
    """Links out of a group of a fat tree onto which flows are hashed (ECMP) or routed by their destination, one each,
    wherever others are; 0: spread evenly (adaptive routing)."""
    rails: bool = False
    """Each adapter of a node is on a switch of its own (group_uplinks of each), and NCCL is older than 2.12: a ring
    whose ranks on a node share no adapter leaves by another than it came in by, over the links out of the switch."""
    power_w: NonNegative = 0.0
    """Power of a device at work with its share of the node, watts; 0: not known."""
    jitter: NonNegative = 0.015
    """Spread (one sigma, share of the time) between equal devices at equal work; a job runs at the slowest's pace."""


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """Corrections of the hardware's rates for a whole cluster: measured, or from at most three named rows."""

    matmul_scale: Positive = 1.0
    """Multiplies matmul_tflops, fp32_matmul_tflops and fp8_matmul_tflops; fused attention has its own rates."""
    attention_scale: Positive = 1.0
    """Multiplies the rates of fused attention, the table's too."""
    memory_scale: Positive = 1.0
    """Multiplies the achieved memory bandwidth."""
    network_scale: Positive = 1.0
    """Multiplies the achieved bandwidth of all links."""
    overlap_share: Annotated[float, between(0, 1)] = 1.0
    """Share of a collective that products beside it hide, of what could be: below 1 where both use the same cores."""
    table: PathSetting = ""
    """CSV file with rates by op, provider and shape (``plan.case``), a path or one of configs/, e.g.
    "tables/h100.csv"; empty: the formulas alone."""
    source: str = ""
    """What was measured, or the published rows it was taken from."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How a job is submitted and what it does when it ends early. Changes no number of the run."""

    account: str = ""
    """SLURM account; empty: SBATCH_ACCOUNT or the site's default."""
    time: str = "02:00:00"
    """Wall time: minutes, hours:minutes:seconds, or days-hours[:minutes[:seconds]]."""
    sbatch_options: tuple[str, ...] = ()
    """Further sbatch options, one per entry; they override the cluster's."""
    environment: tuple[str, ...] = ()
    """NAME=value, exported after the cluster's."""
    python: PathSetting = ""
    """Interpreter on the nodes; empty: .venv of the checkout if there is one, otherwise the modules' python3."""
    stage: PathSetting = ""
    """Archive (.tar) of a Python environment that is copied to each node's own disk first; empty: none."""
    when_stopped: Literal["requeue", "chain", "stop"] = "requeue"
    """What happens after a job that saved before its end: requeue (scontrol) | chain (a new job) | stop"""
    when_failed: Literal["requeue", "chain", "stop"] = "requeue"
    """What happens after a node failure, a lost rank or a hang: requeue | chain | stop. Other faults always stop."""
    when_lost: Literal["stop", "replace"] = "stop"
    """Action within a job where a rank is lost or hangs: stop | replace (start it again beside the others)"""
    max_attempts: Count = 3
    """Failed attempts in a row at the same step after which the run stops."""
    changed_environment: Literal["stop", "warn"] = "stop"
    """stop (exit 3, not queued again) | warn: what follows where packages are others than at submission."""
    mail: str = ""
    """Address that SLURM writes to; empty: none. MEGATRON_PORT_WEBHOOK in the environment: a URL for the same."""
    mail_types: tuple[str, ...] = ("BEGIN", "END", "FAIL", "REQUEUE", "TIME_LIMIT_80")
    """Events of sbatch's --mail-type that it writes about."""
    memory_check: Literal["stop", "warn", "off"] = "stop"
    """stop (exit 2 before any process meets) | warn | off: what happens if, according to the planner, a run cannot fit
    its devices (cluster.memory_gb; only for clusters with a [hardware] section)."""
    signal_seconds: Annotated[int, between(1, 65535)] = 300
    """SIGUSR1 comes this long before the time limit: enough for the longest step and a save."""
    preflight: bool = False
    """Check every node, and the network between them, before the ranks start."""
    spare_nodes: CountOrZero = 0
    """Nodes allocated beyond the layout's: preflight excludes bad ones, and when_lost "replace" a lost one."""
    rendezvous_timeout: Positive = 300.0
    """Seconds for all ranks to report."""
    collective_timeout: Positive = 1800.0
    """Seconds after which a collective that does not complete fails."""


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """What a healthy node and network show at least. 0: not checked against a number (only against the other nodes)."""

    matmul_tflops: NonNegative = 0.0
    """Dense matmul rate of one device in bf16 (fp32 on a CPU), TFLOP/s."""
    share_of_median: Annotated[float, between(0, 1)] = 0.8
    """Each device and link must reach this share of the median over all nodes."""
    free_memory_gb: NonNegative = 0.0
    """Free device memory, 10^9 bytes."""
    free_disk_gb: NonNegative = 1.0
    """Free space of the node-local disk, 10^9 bytes."""
    node_busbw_gb: NonNegative = 0.0
    """All-reduce bus bandwidth within a node, 10^9 bytes/s (as rccl-tests and nccl-tests define it)."""
    network_busbw_gb: NonNegative = 0.0
    """All-reduce bus bandwidth over all nodes, 10^9 bytes/s."""
    link_gb: NonNegative = 0.0
    """Point-to-point bandwidth between two nodes, one direction, 10^9 bytes/s."""
    network_plugin: str = ""
    """Network that NCCL or RCCL must have loaded, e.g. "AWS Libfabric" (OFI plug-in); empty: any."""


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Heartbeats between the ranks, outside of the collectives: hung, lost and slow ranks are named (docs/hangs.md)."""

    enabled: bool = True
    """Watch runs of more than one process."""
    single_process: bool = False
    """Watch a run of one process too."""
    hang_seconds: Annotated[float, at_least(3)] = 10.0
    """A rank that makes no progress for this long, and for hang_steps steps, is hung: the run ends with exit 7."""
    hang_steps: Annotated[float, at_least(1)] = 3.0
    """The same limit in median steps."""
    data_seconds: NonNegative = 0.0
    """Limit while a rank reads samples; 0: the same as elsewhere in a step. Raise it where the file system stalls."""
    start_seconds: Positive = 1800.0
    """Limit without progress of any rank until the end of the first step (model, checkpoint, connections, kernels)."""
    connect_seconds: Positive = 120.0
    """Limit without progress of any rank while the groups' communicators are made, at the start."""
    evaluate_seconds: Positive = 600.0
    """Limit without progress of any rank in an evaluation."""
    save_seconds: Positive = 1800.0
    """Limit without progress of any rank while a checkpoint is saved."""
    straggler_percent: NonNegative = 25.0
    """A rank whose own work takes this much longer than that of its stage's other ranks is named; 0: never."""
    replace_percent: NonNegative = 0.0
    """One that takes this much longer gives its node's place to a spare (launch.when_lost "replace"); 0: never."""
    straggler_windows: Count = 3
    """Windows in a row before it is named."""
    straggler_steps: Count = 20
    """Steps in a window, which lasts at least 5 s."""
