"""What a plan is about: one model on one layout, by one engine. Every formula of the planner reads this alone.

A :class:`Case` is wider than a run file: published runs used programs and options
that this one has not (context parallelism, fp8, half-precision gradients). A run
file becomes a case by :func:`case_of`.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from megatron_port.core.config.features import NO_ADAPTERS, FineTuningConfig
from megatron_port.core.config.layout import topology_sizes
from megatron_port.core.config.schema import (
    CalibrationConfig,
    ClusterConfig,
    DataConfig,
    HardwareConfig,
    ModelConfig,
    RunConfig,
)
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.errors import ConfigError
from megatron_port.core.package import shipped_folder
from megatron_port.core.pipeline.partition import balanced_layers
from megatron_port.ext.kernels.settings import MaskNeeds, fused_parts_problem, own_gpu_problem
from megatron_port.ext.memory.sites import layer_choices
from megatron_port.ext.objectives.settings import as_teacher
from megatron_port.ext.telemetry.flops import document_of, unit_costs
from megatron_port.tools.plan.engines import ADAMW, ENGINES, Engine, RuleCost, rule_cost

# Measured rates of kernels, host calls and links by (op, shape, dtype, provider), and what is taken between them.
#
# A table is a CSV file that ``bench calibrate`` writes, or that was copied from a publication, with the columns ``op``,
# ``provider``, ``dtype``, ``shape`` (sizes joined by "x"), ``rate`` and ``source``:
#
# | op | shape | rate |
# |---|---|---|
# | attention-forward, attention-backward | length x head size | 10^12 operations of the causal half a second |
# | product, product-input, product-weight | rows x columns x inner | 10^12 operations a second |
# | stream; norm-, add-, activation-, loss-forward and -backward; update | bytes | 10^9 bytes a second |
# | dropout | elements | 10^9 elements a second, random numbers drawn |
# | host | calls | 10^6 calls a second |
# | host-recompute (a layer's forward pass again), host-micro-batch, host-step | 1 | 10^6 a second |
# | all-reduce, all-gather, reduce-scatter | ranks x bytes of the whole buffer | 10^9 bytes of the buffer a second |
# | transfer (between two) | 2 x bytes | 10^9 bytes a second |
# | all-reduce-, all-gather-, reduce-scatter-hidden | as theirs | share of 1 that products beside them hide |
# | tensor- and sequence-forward and -backward | ranks x bytes of an activation | the same: what they add to a pass |
#
# ``product`` is a linear layer's forward product. The other two are its backward ones, of which ``product-weight``
# includes the addition to the sum of gradients; where a table lacks them, ``product`` stands for them. The provider
# ``here`` is what the program itself takes on a machine. Bytes of passes are those that the planner counts for them,
# and their rate is that of what a larger pass takes longer: a start costs the host a call.
#
# Between measured shapes the *ratio* of the measured rate to the planner's own formula is taken, not the rate: the
# formula knows how a product of other sizes differs, the table how far off it is here. The ratio is the mean over the
# nearest shapes, weighted by the inverse square of their distance in the logarithm of the sizes. How good that is says
# :func:`held_out_errors`: each shape is predicted from the others.

COLUMNS = ("op", "provider", "dtype", "shape", "rate", "source")
NEAREST = 4
"""Measured shapes that a ratio is taken from."""
REACH = math.log(8.0)
"""How far a shape may lie from the nearest measured one, by the logarithms; beyond it the formula is alone."""

Shape = tuple[float, ...]
Formula = Callable[[Shape], float]
"""Shape → the rate that the planner's own formula gives."""


@dataclass(frozen=True)
class Entry:
    """A line of a table."""

    op: str
    provider: str
    dtype: str
    shape: Shape
    rate: float
    source: str = ""


class KernelTable:
    """Entries by (op, provider, dtype). Equal only to itself, so that it may be part of a cached key."""

    def __init__(self, entries: Sequence[Entry], name: str = "") -> None:
        self.name = name
        self.entries = tuple(entries)
        self._groups: dict[tuple[str, str, str], list[Entry]] = {}
        for entry in entries:
            self._groups.setdefault((entry.op, entry.provider, entry.dtype), []).append(entry)
        self._ratios: dict[tuple[str, str, str, Shape], float | None] = {}

    def group(self, op: str, provider: str = "", dtype: str = "") -> list[Entry]:
        """Entries of an op; an empty provider or dtype in the table stands for any."""
        for key in ((op, provider, dtype), (op, provider, ""), (op, "", dtype), (op, "", "")):
            if key in self._groups:
                return self._groups[key]
        return []

    def has(self, op: str, provider: str, dtype: str) -> bool:
        """Whether there are entries of just this provider and dtype."""
        return (op, provider, dtype) in self._groups

    def curve(self, op: str, provider: str, dtype: str, length: float, head: float) -> float | None:
        """Rate of attention at a length: between two measured ones straight in the logarithm, beyond them the last.

        The head size is the nearest that was measured. None: the table has nothing of this provider.
        """
        found = self.group(op, provider, dtype)
        if not found:
            return None
        nearest = min({e.shape[1] for e in found}, key=lambda size: abs(math.log(size / head)))
        return _on_curve(sorted((e.shape[0], e.rate) for e in found if e.shape[1] == nearest), length)

    def rate(self, op: str, dtype: str, size: float) -> float | None:
        """Rate of an op by the last size of its shape, between two measured ones as in :meth:`curve`. None: it was not
        measured."""
        found = self.group(op, "", dtype)
        return _on_curve(sorted((e.shape[-1], e.rate) for e in found), size) if found else None

    def ratio(self, op: str, provider: str, dtype: str, shape: Shape, formula: Formula) -> float | None:
        """Measured over planned rate at a shape. None: nothing was measured near it."""
        key = (op, provider, dtype, shape)
        if key not in self._ratios:
            self._ratios[key] = between(self.group(op, provider, dtype), shape, formula)
        return self._ratios[key]


def _on_curve(points: Sequence[tuple[float, float]], x: float) -> float:
    """The rate at ``x`` of (size, rate), in order: straight in the logarithm of the size, beyond the ends theirs."""
    if x <= points[0][0]:
        return points[0][1]
    for (a, low), (b, high) in zip(points, points[1:]):
        if x <= b:
            return low + (high - low) * math.log(x / a) / math.log(b / a)
    return points[-1][1]


def between(entries: Sequence[Entry], shape: Shape, formula: Formula) -> float | None:
    """Measured over planned rate at ``shape`` from the nearest entries. None: none is within ``REACH``."""
    near = sorted(
        ((math.dist(*([math.log(max(x, 1.0)) for x in s] for s in (e.shape, shape))), e) for e in entries),
        key=lambda pair: pair[0],
    )[:NEAREST]
    if not near or near[0][0] > REACH:
        return None
    weighted = total = 0.0
    for distance, entry in near:
        weight = 1 / (distance * distance + 1e-4)
        weighted += weight * math.log(entry.rate / formula(entry.shape))
        total += weight
    return math.exp(weighted / total)


def held_out_errors(entries: Sequence[Entry], formula: Formula) -> list[float]:
    """Relative error of the rate of each entry as the others and the formula give it."""
    out = []
    for i, entry in enumerate(entries):
        ratio = between([*entries[:i], *entries[i + 1 :]], entry.shape, formula)
        out.append(formula(entry.shape) * (ratio or 1.0) / entry.rate - 1)
    return out


def band(errors: Sequence[float]) -> float:
    """Half width of the band that two thirds of the held-out shapes are in; 0 where nothing was held out."""
    if not errors:
        return 0.0
    return statistics.quantiles([abs(e) for e in errors], n=3)[1] if len(errors) > 1 else abs(errors[0])


def to_csv(entries: Sequence[Entry]) -> str:
    """The text of a table."""
    lines = [",".join(COLUMNS)]
    for e in entries:
        shape = "x".join(f"{size:g}" if size < 1e6 else f"{size:.0f}" for size in e.shape)
        lines.append(",".join([e.op, e.provider, e.dtype, shape, f"{e.rate:.5g}", e.source.replace(",", ";")]))
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=64)
def read_table(path: Path) -> KernelTable:
    """A table from its file.

    Raises:
        ConfigError: no such file, a column that is missing, or a line without a positive rate; the line is named.
    """
    try:
        with path.open(newline="") as f:
            rows = list(csv.DictReader(f))
    except OSError as error:
        raise ConfigError(f"calibration.table {path}: {error.strerror}; name a CSV file of bench calibrate") from error
    entries = []
    for number, row in enumerate(rows, 2):
        missing = [c for c in COLUMNS[:5] if row.get(c) is None]
        if missing:
            raise ConfigError(f"calibration.table {path}, line {number}: no column {', '.join(missing)}")
        try:
            shape, rate = tuple(float(x) for x in row["shape"].split("x")), float(row["rate"])
        except ValueError:
            shape, rate = (), 0.0
        if not shape or not (rate > 0 and math.isfinite(rate)) or min(shape) <= 0:
            raise ConfigError(
                f"calibration.table {path}, line {number}: shape {row['shape']!r} and rate {row['rate']!r} must be "
                "positive numbers"
            )
        entries.append(Entry(row["op"], row["provider"], row["dtype"], shape, rate, row.get("source") or ""))
    return KernelTable(entries, path.name)


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A cluster as the planner sees it."""

    cluster: ClusterConfig
    hardware: HardwareConfig
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    @property
    def table(self) -> KernelTable | None:
        """The rates that were measured; None: there are none."""
        return table_of(self.calibration.table) if self.calibration.table else None


def table_of(name: str) -> KernelTable:
    """Return the table of this name: a shipped file, or a path."""
    shipped = shipped_folder("configs") / name
    return read_table(shipped if shipped.is_file() else Path(name))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step to be planned. Sizes are counts; ``micro_batches`` are those of one replica in one step."""

    model: ModelConfig
    engine: Engine
    tp: int = 1
    pp: int = 1
    vp: int = 1
    dp: int = 1
    cp: int = 1
    cp_method: str = "gather"
    """How attention sees the whole sequence: gather | heads | ring (``plan.exchanges``)."""
    cp_order: str = "zigzag"
    """Which positions a rank holds: contiguous | zigzag | balanced."""
    ep: int = 1
    """Ranks of a stage among which the experts of a layer are divided: its first tp, then cp, then dp ones."""
    etp: int = 1
    """Ranks that divide each expert as tensor parallelism does (Megatron-core without folding: tp); here always 1."""
    imbalance: float = 1.0
    """Rows of the expert-parallel rank that has most, by the mean; 1: balance is forced."""
    sequence_parallel: bool = False
    tensor_chunks: int = 1
    zero_stage: int = 1
    shard: int = 0
    """Replicas over which ZeRO splits optimizer state (hybrid sharding); 0: all."""
    rule: RuleCost = ADAMW
    """The optimizer's rule."""
    reshard: str = "forward"
    offload: str = "none"
    """Where masters and moments live: none (the device) | cpu | nvme."""
    offload_fraction: float = 1.0
    offload_weights: bool = False
    """ZeRO-3's shards of the weights live on the host."""
    offload_buffers: int = 4
    copy_interval: int = 0
    """Steps between copies of the state in the nodes' memory; 0: there are none."""
    copies_on_disk: bool = False
    """They are on the nodes' own disks, where these are known (``hardware.nvme_gb``)."""
    disk_interval: int = 0
    """Steps between copies that are also written to the nodes' disks; 0: none are."""
    schedule: str = "1f1b"
    group: int = 0
    """Micro-batches that interleaving takes through a chunk in one go; 0: as many as stages (other programs alone)."""
    recompute: str = "none"
    """none | selective (the scores of attention) | full (whole layers) | experts (of a layer what its experts do, as
    Megatron-core's selective recompute of "moe"; in no run file)"""
    head_chunk: int = 0
    """Tokens whose logits exist at once; 0: all."""
    dropped: tuple[tuple[str, ...], ...] = ()
    """Sites that each layer recomputes, where ``recompute`` is none; empty: no layer any."""
    micro_batch: int = 1
    micro_batches: int = 1
    global_batch: int = 1
    dtype: str = "bf16"
    """fp32 | bf16 | fp16 | fp64 | fp8 (products in fp8, all else as in bf16)"""
    fp8: str = "none"
    """This program's recipe (precision.fp8) where ``dtype`` is fp8; none: another's, with casts counted as fused."""
    quantise: str = "own"
    """Whose casts under ``fp8``: own | torch."""
    flash: bool = True
    """Attention is one fused kernel that stores no scores."""
    kernels: str = "fused"
    """Whose norms, activations, dropout and softmax, for what they keep: own | torch | fused (apex, Megatron)."""
    on_cpu: bool = False
    """Products in half precision copy their operands to fp32."""
    split: tuple[int, ...] = ()
    """Layers of each stage (pp × vp chunks, in order of the layers); empty: as even as can be."""
    vocab_multiple: int = 128
    bucket: int = 33_554_432
    """Elements that one collective of gradients moves."""
    fine_tuning: FineTuningConfig = NO_ADAPTERS
    """Which adapters are trained; without any, all weights are."""
    document: float = 0.0
    """Mean length of the document that a token is in, which attention does not leave; 0: it sees the whole sample."""
    masked: bool = False
    """Elements of matrices stay zero: a mask takes a byte for each trained element (tables, which have none, counted).
    """
    teacher: ModelConfig | None = None
    """Which predicts the same tokens beside the model; None: nobody."""

    @property
    def in_pairs(self) -> bool:
        """Whether this program's tensor-parallel products exchange rows pair by pair (``layout.tp_exchange``)."""
        return self.tp > 1 and self.engine.name == "native" and self.engine.tensor_overlap == "tiled"

    @property
    def of_teacher(self) -> Case | None:
        """The teacher by itself, split over the same ranks; None: there is none."""
        if self.teacher is None:
            return None
        return replace(
            self, model=self.teacher, teacher=None, fine_tuning=NO_ADAPTERS, recompute="none", dropped=(),
            split=balanced_split(self.teacher, self.pp * self.vp),
        )

    @property
    def drops_inside(self) -> bool:
        """Whether attention is the own kernel for GPUs, which makes the mask of dropout and keeps no scores."""
        return self.flash and self.kernels == "own" and self.model.attention_dropout > 0

    @property
    def world(self) -> int:
        """Devices."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def shard_size(self) -> int:
        """Replicas in one shard group; the largest that divides both where ``dp`` is no multiple of ``shard``."""
        return math.gcd(self.shard, self.dp)

    @property
    def shards(self) -> int:
        """Ranks over which optimizer state is split."""
        return self.shard_size * self.cp if self.zero_stage else 1

    @property
    def shard_copies(self) -> int:
        """Ranks that hold the same piece of optimizer state and sum its gradients; 1 where the state is not split."""
        return self.dp // self.shard_size if self.shards > 1 else 1

    @property
    def expert_shards(self) -> int:
        """Ranks over which optimizer state of a rank's experts is split: those of ``shards`` that hold the same."""
        apart = max(self.ep * self.etp // self.tp, 1)
        return max(self.shards // apart, 1)

    @property
    def expert_copies(self) -> int:
        """Ranks that hold the same piece of that state and sum its gradients, ranks of tensor parallelism left out."""
        apart = max(self.ep * self.etp // self.tp, 1)
        return max(self.dp * self.cp // apart // self.expert_shards, 1) if self.shards > 1 else 1

    @property
    def expert_sums(self) -> int:
        """Tensor-parallel ranks that hold the same experts: each has the part of the gradient of its own tokens."""
        return max(self.tp // (self.ep * self.etp), 1)

    @property
    def expert_replicas(self) -> int:
        """Ranks of dp and cp that hold the same experts."""
        return max(self.dp * self.cp // max(self.ep * self.etp // self.tp, 1), 1)

    @property
    def weight_gathers(self) -> int:
        """How often a step gathers each weight from the other replicas. Under ZeRO-3 with ``reshard`` "forward" the
        most: layers that are still in their windows where a pass turns round are not gathered again."""
        return 2 * self.micro_batches if self.zero_stage == 3 and self.reshard == "forward" else 1

    @property
    def shards_sums(self) -> bool:
        """Whether a rank keeps its shard of the gradient sums only, and so reduces each micro-batch's."""
        return self.zero_stage == 2 or (self.zero_stage == 3 and not self.schedule.startswith("zb-"))

    @property
    def padded_vocab(self) -> int:
        """Vocabulary after padding to a multiple of ``vocab_multiple`` × tp."""
        unit = self.vocab_multiple * self.tp
        return -(-self.model.vocab_size // unit) * unit

    @property
    def partitions(self) -> bool:
        """Whether tensor-parallel ranks hold anything alike that can be partitioned (``model.build``)."""
        return self.tp > 1 and not self.sequence_parallel

    @property
    def width(self) -> int:
        """Bytes of a weight or an activation."""
        return {"fp32": 4, "fp64": 8}.get(self.dtype, 2)

    @property
    def pass_dtype(self) -> str:
        """Dtype of passes over memory, attention and exchanged activations, as a table of measured kernels names it:
        beside 8-bit products all else is in bf16."""
        return "bf16" if self.dtype == "fp8" else self.dtype

    @property
    def wide(self) -> int:
        """Bytes of a master, a moment or an accumulated gradient in full precision."""
        return 8 if self.dtype == "fp64" else 4

    @property
    def chunks(self) -> tuple[int, ...]:
        """Layers of each of pp × vp chunks in order of the layers; chunk i lies on stage i mod pp."""
        count = self.pp * self.vp
        if self.split:
            return self.split
        each, extra = divmod(self.model.num_layers, count)
        return tuple(each + (i < extra) for i in range(count))

    @property
    def layer_ranges(self) -> list[tuple[int, int]]:
        """(first layer, one after the last) of each chunk."""
        ends = list(accumulate(self.chunks))
        return [(end - count, end) for end, count in zip(ends, self.chunks)]

    def stage_layers(self, stage: int) -> int:
        """Layers on a stage, over all its chunks."""
        return sum(self.of_stage(self.chunks, stage))

    @cached_property
    def grid(self) -> Topology:
        """Which chunk of the model lies on which stage."""
        return grid_of(self.pp, self.vp, self.schedule == "zb-v")

    def of_stage(self, values: Sequence[T], stage: int) -> list[T]:
        """Return the values of a stage's chunks out of those of all chunks."""
        if self.vp == 1:
            return [values[stage]]
        return [values[self.grid.virtual_stage(stage, chunk)] for chunk in range(self.vp)]

    def label(self) -> str:
        """The layout in one short line."""
        parts = [f"tp {self.tp}" + ("+sp" if self.sequence_parallel else ""), f"pp {self.pp}"]
        parts += [f"vp {self.vp}"] if self.vp > 1 else []
        parts += [f"cp {self.cp} by {self.cp_method}, {self.cp_order}"] if self.cp > 1 else []
        parts += [f"dp {self.dp}" + (f" in shards of {self.shard_size}" if self.shard_copies > 1 else "")]
        parts += [f"ep {self.ep}" + (f" x etp {self.etp}" if self.etp > 1 else "")] if self.model.moe.enabled else []
        parts += [f"micro-batch {self.micro_batch}", f"recompute {'by plan' if self.dropped else self.recompute}"]
        parts += [f"head in chunks of {self.head_chunk} tokens"] if self.head_chunk else []
        parts += ["ZeRO-3"] if self.zero_stage == 3 else []
        share = f" {self.offload_fraction:.0%}" if self.offload_fraction < 1 else ""
        parts += [f"optimizer{share} on {self.offload}"] if self.offload != "none" else []
        parts += [f"products in {self.tensor_chunks} parts"] if self.tensor_chunks > 1 else []
        return ", ".join(parts)


@lru_cache(maxsize=1024)
def grid_of(stages: int, chunks: int, folded: bool) -> Topology:
    """The pipeline of so many stages and chunks; ``folded``: as zb-v lays them out."""
    return Topology(pp=stages, vp=chunks, folded=folded)


def machine_of(config: RunConfig) -> Machine:
    """The cluster of a run. Raises ConfigError, one sentence a fault, where a step cannot be planned on it."""
    machine = Machine(cluster=config.cluster, hardware=config.hardware, calibration=config.calibration)
    found = machine_problems(machine)
    if not found and config.precision.fp8 != "none" and machine.hardware.fp8_matmul_tflops <= 0:
        found = [
            f'precision.fp8 "{config.precision.fp8}": {config.hardware.device or config.cluster.name} has no 8-bit '
            'products (hardware.fp8_matmul_tflops 0); use fp8 = "none"'
        ]
    if found:
        raise ConfigError(found)
    return machine


def machine_problems(machine: Machine) -> list[str]:
    """Return the faults of a machine's description, a sentence each."""
    c, h, k = machine.cluster, machine.hardware, machine.calibration
    out = []
    if not h.device and not h.matmul_tflops:
        return [
            f"cluster {c.name!r} has no [hardware] section; extend the cluster that you have (`megatron-port config "
            "list`), or measure it with `megatron-port bench calibrate`. `megatron-port plan` goes by defaults "
            "instead, which nothing measured is held against"
        ]
    positive = {
        "cluster.memory_gb": c.memory_gb, "cluster.peak_tflops": c.peak_tflops,
        "hardware.matmul_tflops": h.matmul_tflops, "hardware.memory_bandwidth_gb": h.memory_bandwidth_gb,
        "hardware.compute_units": h.compute_units, "hardware.tile_rows": h.tile_rows,
        "hardware.tile_columns": h.tile_columns, "calibration.matmul_scale": k.matmul_scale,
        "calibration.memory_scale": k.memory_scale, "calibration.network_scale": k.network_scale,
    }
    if c.gpus_per_node > 1:
        positive["hardware.node_gb"] = h.node_gb
    out += [f"{name} is {v}; a plan for {c.name} needs it above 0" for name, v in positive.items() if v <= 0]
    out += nonsense(machine)
    shares = {
        "hardware.memory_efficiency": h.memory_efficiency, "hardware.node_efficiency": h.node_efficiency,
        "hardware.network_efficiency": h.network_efficiency, "hardware.group_taper": h.group_taper,
    }
    out += [f"{name} is {v}; it is a share, above 0 and at most 1" for name, v in shares.items() if not 0 < v <= 1]
    if c.peak_tflops > 0 and h.matmul_tflops > c.peak_tflops:
        out.append(
            f"hardware.matmul_tflops {h.matmul_tflops} is above cluster.peak_tflops {c.peak_tflops}: nothing reaches "
            "more than the peak"
        )
    return out


def nonsense(machine: Machine) -> list[str]:
    """Numbers that no machine has: negative, infinite, beyond any device by orders of magnitude, or half a network."""
    h, c = machine.hardware, machine.cluster
    values = {f"hardware.{k}": v for k, v in vars(h).items()} | {
        "cluster.memory_gb": c.memory_gb, "cluster.peak_tflops": c.peak_tflops,
    }
    out = [
        f"{name} is {value}; it is a number of at least 0" for name, value in values.items()
        if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= 0)
    ]
    most = {
        "cluster.peak_tflops": 1e5, "cluster.memory_gb": 1e5, "hardware.memory_bandwidth_gb": 1e6,
        "hardware.node_gb": 1e5, "hardware.nic_gb": 1e4, "hardware.launch_us": 1e5, "hardware.host_us": 1e5,
        "hardware.node_latency_us": 1e6, "hardware.network_latency_us": 1e6, "hardware.jitter": 1.0,
    }
    out += [
        f"{name} is {values[name]:g}; no device has more than {bound:g} (bandwidths are in 10^9 bytes/s, times in "
        "microseconds)" for name, bound in most.items() if values[name] > bound
    ]
    if h.nics and not h.nic_gb:
        out.append(f"hardware.nics is {h.nics} and hardware.nic_gb 0; give the bandwidth of an adapter, or nics = 0")
    if h.group_uplinks and (h.dragonfly or not h.nodes_per_group):
        out.append(
            f"hardware.group_uplinks is {h.group_uplinks}: links out of a group of a fat tree; give nodes_per_group, "
            "and not dragonfly = true"
        )
    if h.rails and not (h.group_uplinks and h.nics):
        out.append("hardware.rails is true; give nics and group_uplinks, the links out of a switch of one rail")
    fp8 = h.fp8_matmul_tflops
    if fp8 and h.fp8_peak_tflops and fp8 > h.fp8_peak_tflops:
        out.append(f"hardware.fp8_matmul_tflops {fp8} is above hardware.fp8_peak_tflops {h.fp8_peak_tflops}")
    return out


MEMORY_FOLDERS = "/dev/shm", "/run/"
"""Folders in memory; a ``checkpoint.memory_folder`` that is not below one of them is taken for a disk."""


def checked_data(config: RunConfig) -> DataConfig:
    """Return the data settings that a plan is checked with: the run's own, or drawn tokens where it names none yet."""
    named = config.data.train or config.data.source != "corpus"
    return config.data if named else DataConfig(synthetic=True)


def case_of(config: RunConfig, world_size: int | None = None, *, allow_fractions: bool = False) -> tuple[Case, bool]:
    """The case of a run file, and whether its accumulation is fractional (then rounded up).

    A global batch that micro_batch × dp does not divide is refused unless
    ``allow_fractions``: then every replica runs ceil(batch / (micro_batch × dp))
    micro-batches, which only a plan may do.
    """
    tp, pp, dp = topology_sizes(config, world_size)
    layout, batch = config.layout, config.batch
    unit = batch.micro_batch_size * dp
    fraction = batch.global_batch_size % unit != 0
    if fraction and not allow_fractions:
        raise ConfigError(
            f"global_batch_size {batch.global_batch_size} does not divide by micro_batch_size "
            f"{batch.micro_batch_size} × data_parallel_size {dp} = {unit}; --fractional plans it with "
            f"{math.ceil(batch.global_batch_size / unit)} micro-batches per replica"
        )
    chunks = 1 if config.fine_tuning.enabled else max(layout.tp_overlap_chunks, 1)  # adapted products have none
    kernels = "torch" if config.backend.own_kernels == "off" or config.backend.device == "cpu" else "own"
    engine = ENGINES[config.engine]
    if config.precision.grad_reduce_dtype != "fp32":
        engine = replace(engine, reduce_bytes=2)
    if layout.tp_exchange != "collective" and layout.sequence_parallel:
        engine = replace(engine, tensor_overlap="tiled")
    engine = replace(
        engine, attention=_attention_provider(config),
        graphed=config.backend.graphs == "step",
    )
    case = Case(
        model=config.model, engine=engine, tp=tp, pp=pp, vp=layout.virtual_pipeline_size, dp=dp,
        cp=layout.context_parallel_size, cp_method=layout.cp_method, cp_order=layout.cp_order,
        ep=layout.expert_parallel_size, imbalance=config.moe.imbalance,
        sequence_parallel=layout.sequence_parallel and tp > 1, tensor_chunks=chunks if tp > 1 else 1,
        zero_stage=layout.zero_stage, shard=layout.shard_size,
        reshard=layout.reshard, offload=config.offload.optimizer, offload_fraction=config.offload.fraction,
        offload_weights=config.offload.weights == "cpu", offload_buffers=config.offload.buffers,
        copy_interval=config.checkpoint.memory_interval,
        copies_on_disk=not config.checkpoint.memory_folder.startswith(MEMORY_FOLDERS),
        disk_interval=config.checkpoint.disk_interval,
        rule=rule_cost(config.optimizer, config.model), schedule=layout.pipeline_schedule,
        recompute=config.activations.recompute, dropped=layer_choices(config.activations, config.model.num_layers),
        head_chunk=max(config.activations.head_chunk, 0), micro_batch=batch.micro_batch_size,
        micro_batches=math.ceil(batch.global_batch_size / unit), global_batch=batch.global_batch_size,
        dtype=config.precision.dtype if config.precision.fp8 == "none" else "fp8", fp8=config.precision.fp8,
        flash=_is_fused(config),
        kernels=kernels, on_cpu=config.backend.device == "cpu",
        quantise="torch" if config.backend.quantise == "torch" else kernels,
        split=layout.pipeline_split, vocab_multiple=layout.vocab_padding_multiple, bucket=layout.reduce_bucket_size,
        fine_tuning=config.fine_tuning, document=document_of(config.data),
        masked=config.sparsity.enabled,
        teacher=_teacher(config),
    )
    if not case.split:
        case = replace(case, split=balanced_split(config.model, pp * layout.virtual_pipeline_size))
    return case, fraction


def _teacher(config: RunConfig) -> ModelConfig | None:
    if not config.distillation.online:
        return None
    from megatron_port.tools.interop.sidecar import (
        model_at,  # reads a checkpoint, which needs torch; a plan does without
    )

    return as_teacher(model_at(config.distillation.teacher))


def _attention_provider(config: RunConfig) -> str:
    """Whose fused attention a run takes. torch's is cuDNN's where that is the first that serves, on devices with rates
    of it in their table (Hopper); its backward pass is not deterministic, and it is not used under a mask."""
    asked = config.backend.attention
    if asked in ("fa3", "fa4"):
        return "flash3"
    torchs = asked in ("auto", "sdpa") and not config.backend.deterministic and not MaskNeeds.of(config).any
    table = table_of(config.calibration.table) if torchs and config.calibration.table else None
    return "cudnn" if table is not None and table.has("attention-forward", "cudnn", "") else "flash2"


def _is_fused(config: RunConfig) -> bool:
    """Whether attention keeps no scores. With dropout that is the own kernel for GPUs; without, on a GPU sinks are
    written out, a soft-cap unless flash-attn is asked for."""
    model, asked, dtype = config.model, config.backend.attention, config.precision.dtype
    if asked == "math" or dtype not in ("fp16", "bf16"):
        return False
    if model.attention_dropout > 0:
        own = config.backend.own_kernels != "off" and config.backend.device != "cpu"
        return own and not own_gpu_problem(dtype, model.head_size, MaskNeeds.of(config))
    needs = MaskNeeds.of(config)
    if needs.partials and config.backend.device != "cpu":
        return asked in ("auto", "sdpa") and not fused_parts_problem(model.head_size, needs)
    written_out = model.attention_sinks or (model.attention_softcap > 0 and asked != "flash_attn")
    return config.backend.device == "cpu" or not written_out


def balanced_split(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as the trainer splits them."""
    return balanced_layers(unit_costs(model), stages)
