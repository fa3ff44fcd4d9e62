"""Bytes of a rank by stage: what is held, the peak and when it comes.

Weights, gradients and optimizer come from the engine's own arithmetic
(``Engine``), what passes keep and need from a replay of the schedule
(``plan.ledger``).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

from megatron_port.core.pipeline.schedules import make_schedule, most_held
from megatron_port.tools.plan.case import Case, Machine
from megatron_port.tools.plan.chunk import away
from megatron_port.tools.plan.elements import (
    bucket_units,
    expert_elements,
    stage_elements,
    trained_elements,
    unit_elements,
    window_elements,
)
from megatron_port.tools.plan.layer import copy_bytes
from megatron_port.tools.plan.ledger import Peak, peak_of, steady_count
from megatron_port.tools.plan.rates import Links, domain

# Activations in host memory: the bytes of a rank's buffers, and the seconds by which the copies outlast the passes.

@dataclass(frozen=True)
class HostLink:
    """Host link of a device, over which activations are copied while one micro-batch is computed."""

    rate: float
    """Bytes per second, each way."""
    forward: float
    """Seconds of the forward pass, behind which the copies out hide."""
    backward: float

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of a micro-batch for which its passes wait for so many bytes to leave and come back."""
        taken = nbytes / self.rate
        return max(taken - self.forward, 0.0) + max(taken - self.backward, 0.0)


def link_of(machine: Machine, forward: float, backward: float) -> HostLink | None:
    """Return the link beside passes of so many seconds; None: its rate is not known."""
    rate = machine.hardware.host_link_gb * 1e9
    return HostLink(rate, forward, backward) if rate > 0 else None


def swapped_bytes(case: Case, start: int, stop: int) -> float:
    """Return the bytes that a chunk moves to the host in a forward pass."""
    return sum(one.swapped for one in away(case, start, stop)) if case.dropped else 0.0


def swap_host_bytes(case: Case, stage: int) -> float:
    """Return the bytes of host memory in which a rank of a stage has swapped activations."""
    sizes = [swapped_bytes(case, start, stop) for start, stop in case.of_stage(case.layer_ranges, stage)]
    if not any(sizes):
        return 0.0
    count = steady_count(case.schedule, case.pp, case.micro_batches)
    held = most_held(make_schedule(case.schedule, case.pp, count, case.vp).plans[stage])
    return sum(held[chunk] * size for chunk, size in enumerate(sizes))


def most_swapped(case: Case) -> float:
    """Return the bytes of host memory of the rank that swaps most."""
    return max(swap_host_bytes(case, stage) for stage in range(case.pp)) if case.dropped else 0.0


# Optimizer state outside of the device (``[offload]``): bytes on device, host and disk, and the seconds that it costs.
#
# Per element of a rank's share of what is offloaded (docs/offload.md): the host or the disk holds master and the
# rule's state, of AdamW 12 bytes; a step moves the fp32 gradient to the host and the rounded weight back, updates in
# host memory at some 28 + w bytes, and with a disk reads and writes the 12. The step waits for all of it: the norm
# comes first.

GRADIENT = MASTER = 4.0
"""Bytes per element."""
PAGE = 4096


@dataclass(frozen=True)
class Offloaded:
    """Bytes outside the device on a rank of the stage that holds most, and their seconds in a step."""

    host: float
    disk: float
    seconds: float


def shard_elements(case: Case, stage: int) -> float:
    """Return the elements of a rank's shard of what is trained."""
    experts = expert_elements(case, stage)
    return (trained_elements(case, stage) - experts) / case.shards + experts / case.expert_shards


def updated_elements(case: Case, stage: int) -> float:
    """Return those of a rank's shard whose state is on the device."""
    return shard_elements(case, stage) * (1 if case.offload == "none" else 1 - case.offload_fraction)


def offloaded(case: Case, machine: Machine) -> Offloaded:
    """Return the bytes and seconds of a case's offload; zeros where it has none."""
    hardware = machine.hardware
    stages = {0, case.pp // 2, case.pp - 1}
    most, trained = (max(count(case, stage) for stage in stages) for count in (stage_elements, trained_elements))
    held = max(shard_elements(case, stage) for stage in stages)
    mine = held * case.offload_fraction if case.offload != "none" else 0.0
    ranks = min(machine.cluster.gpus_per_node, case.world)
    if not mine:
        return Offloaded(0.0, 0.0, 0.0)
    on_disk = case.offload == "nvme"
    state = MASTER + MASTER * case.rule.state
    weights = most * held / trained * case.width if case.offload_weights else 0.0
    staged = min(case.bucket, trained) / case.shards * (GRADIENT + (state if on_disk else 0.0) + case.width)
    host = (0.0 if on_disk else state * mine) + weights + case.offload_buffers * (staged + PAGE)
    back = weights * case.weight_gathers if case.offload_weights else mine * case.width
    parts = [
        (mine * GRADIENT, hardware.host_link_gb), (back, hardware.host_link_gb),
        (mine * (GRADIENT + 2.0 * state + case.width) * ranks, hardware.host_bandwidth_gb),
    ]
    if on_disk:
        parts += [(state * mine * ranks, hardware.nvme_read_gb), (state * mine * ranks, hardware.nvme_write_gb)]
    # Buckets follow one another through the ring, so the slowest of these sets the pace.
    seconds = max(size / (rate * 1e9) if rate > 0 else 0.0 for size, rate in parts)
    return Offloaded(host, state * mine if on_disk else 0.0, seconds)


# Copies of the state in the nodes' memory (``checkpoint.memory_interval``, ext/storage/copies.py).

COPIES = 2
"""Copies that are kept, of masters and the rule's state; of several nodes, each keeps as many of its neighbour's."""
TMPFS_SHARE = 0.5
"""Share of the memory that Linux gives /dev/shm unless told otherwise."""
COPY_RATE = 4e9
"""Bytes per second that a core copies and hashes: 4.2e9 on a Xeon with AVX-512, beside other work."""


@dataclass(frozen=True)
class Copied:
    """Copies of a case: bytes that a node holds, and what they add to a step on average."""

    node: float
    """With those of the neighbour, where there is one."""
    seconds: float
    sent: float = 0.0
    """Bytes of one copy that a node sends to the next one."""
    sending: float = 0.0
    """Seconds until they are there, beside the steps."""
    disk: float = 0.0
    """Bytes of a node's own copies on its disk, beside those in memory (``checkpoint.disk_interval``)."""
    writing: float = 0.0
    """Seconds until one of these is written, beside the steps."""

    def late(self, interval: int, step_s: float, disk_interval: int = 0) -> float:
        """Return the seconds by which a copy's way outlasts the steps to the next copy, per step; the longer of the
        two ways, to the next node and to the disk."""
        ways = ((self.sending, interval), (self.writing, disk_interval))
        return max((max(seconds - steps * step_s, 0.0) / steps for seconds, steps in ways if steps), default=0.0)


def copied(case: Case, machine: Machine) -> Copied:
    """Return the bytes and seconds of a case's copies; zeros where it makes none.

    What several ranks hold alike is copied by the first of them. A node's bytes are those of the node with the most, of
    stages of the mean size; they go through all of its adapters, and on disks at the rate of their writes.
    """
    if not case.copy_interval:
        return Copied(0.0, 0.0)
    each = MASTER * (1 + case.rule.state)
    size = each * max(shard_elements(case, stage) for stage in {0, case.pp // 2, case.pp - 1})
    hardware, ranks = machine.hardware, min(machine.cluster.gpus_per_node, case.world)
    experts = sum(expert_elements(case, stage) for stage in range(case.pp))
    dense = sum(trained_elements(case, stage) for stage in range(case.pp)) - experts
    holders = case.tp * case.dp * case.cp / (case.expert_replicas * case.expert_sums)  # of different experts, by stage
    owned = dense * case.tp + experts * holders
    rates = [COPY_RATE * max(machine.cluster.cores_per_task, 1)]
    rates += [hardware.host_bandwidth_gb * 1e9 / 2 / ranks] if hardware.host_bandwidth_gb else []  # read and written
    link = size / (hardware.host_link_gb * 1e9) if hardware.host_link_gb else 0.0
    mean, apart = each * owned * ranks / case.world, case.world > ranks
    own, both = (mean * share for share in _busiest(case.world, ranks, case.pp, case.tp * case.shards))
    adapters = Links.of(machine).adapters * ranks / domain(machine)
    ways = [own / adapters if apart and adapters else 0.0]
    ways += [both / (hardware.nvme_write_gb * 1e9)] if _on_disk(case, machine) and hardware.nvme_write_gb else []
    written = own if case.disk_interval else 0.0
    return Copied(
        COPIES * both, (size / min(rates) + link) / case.copy_interval, own if apart else 0.0, max(ways),
        COPIES * written, written / (hardware.nvme_write_gb * 1e9) if hardware.nvme_write_gb else 0.0,
    )


@functools.lru_cache(maxsize=4096)
def _busiest(world: int, ranks: int, pp: int, owners: int) -> tuple[float, float]:
    """Return the most that a node copies, and with what it keeps of the node before it, as multiples of the mean.

    ``owners``: ranks of a stage that copy, its first ones: all, but without ZeRO those of the first replica.
    """
    nodes, stage = -(-world // ranks), world // pp
    counts = [0] * nodes
    for first in range(0, world, stage):
        for node in range(first // ranks, min(nodes, (first + owners - 1) // ranks + 1)):
            counts[node] += min(first + owners, (node + 1) * ranks) - max(first, node * ranks)
    mean = pp * owners * ranks / world
    before = counts[-1:] + counts[:-1] if nodes > 1 else [0]
    return max(counts) / mean, max(a + b for a, b in zip(counts, before, strict=True)) / mean


def _on_disk(case: Case, machine: Machine) -> bool:
    """Whether the copies take a disk's space instead of memory's."""
    return case.copies_on_disk and machine.hardware.nvme_gb > 0


def _copies_problem(case: Case, machine: Machine) -> str:
    """Return why the copies alone do not fit the memory that tmpfs has, empty where they do or it is unknown."""
    memory, found = machine.hardware.host_memory_gb * 1e9, copied(case, machine)
    if not memory or _on_disk(case, machine) or found.node <= TMPFS_SHARE * memory:
        return ""
    disk = f", {machine.hardware.nvme_gb:g} GB" if machine.hardware.nvme_gb else "; hardware.nvme_gb is their size"
    return (
        f"copies of the state take {found.node / 1e9:.1f} GB of a node's {memory / 1e9:g} GB of host memory"
        f"{' with those of its neighbour' if found.sent else ''}, of which tmpfs has {TMPFS_SHARE:.0%}; use more "
        f"nodes, set checkpoint.memory_folder to a folder on the nodes' own disks (NVMe{disk}), or "
        "checkpoint.memory_interval = 0"
    )


def host_problem(case: Case, machine: Machine) -> str:
    """Return why what is offloaded, swapped and copied does not fit a node's host memory or disks, empty where it does
    or is unknown."""
    hardware, found = machine.hardware, offloaded(case, machine)
    ranks = min(machine.cluster.gpus_per_node, case.world)
    swapped, held = most_swapped(case), copied(case, machine)
    if problem := _copies_problem(case, machine):
        return problem
    on_disk = _on_disk(case, machine)
    in_memory, disks = (0.0 if on_disk else held.node) / 1e9, (held.node * on_disk + held.disk) / 1e9
    if hardware.nvme_gb and disks > hardware.nvme_gb:
        return (
            f"copies of the state take {disks:.1f} GB of a node's local disks, which have {hardware.nvme_gb:g} GB; "
            f"use more nodes, or checkpoint.{'disk' if held.disk else 'memory'}_interval = 0"
        )
    for what, size, whole, kept in (
        ("host memory", found.host + swapped, hardware.host_memory_gb, in_memory),
        ("local disks", found.disk, hardware.nvme_gb, disks),
    ):
        limit = max(whole - kept, 0.0)
        if limit and size * ranks > limit * 1e9:
            what_takes = "swapped activations take" if size == swapped else "offloaded state takes"
            what_takes = "offloaded state and swapped activations take" if size > swapped > 0 else what_takes
            return (
                f"{what_takes} {size * ranks / 1e9:.1f} GB of a node's {what}, which has {limit:g} GB"
                f"{' beside copies of the state' if kept else ''}; use "
                "more nodes, a smaller offload.fraction"
                + (' or offload.optimizer = "nvme"' if what == "host memory" else "")
                + (", or activations.layers with fewer :swap" if swapped else "")
            )
    return ""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on one rank of a stage at its peak."""

    stage: int
    elements: int
    """Parameters that the rank holds."""
    experts: int
    """The part of them that belongs to experts."""
    weights: float
    """With their 8-bit copies under precision.fp8."""
    gradients: float
    optimizer: float
    """Masters and moments, this rank's share."""
    activations: float
    """Activations of all micro-batches in flight."""
    working: float
    """Memory of the layer being recomputed or differentiated: activations and the gradients passing through it."""
    logits: float
    buffers: float
    """Gradient buckets, gathered weights, tensors between stages."""
    fragmentation: float
    """Allocated by the framework, lost to holes."""
    reserved: float
    """Driver, libraries, communicators; outside the allocator."""
    in_flight: float
    """Micro-batches whose activations are held at the peak, in units of the whole stage."""
    peak_at: str
    host: float = 0.0
    """Swapped activations in host memory; no part of the total."""

    @property
    def static(self) -> float:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        """Bytes of the framework's allocator at the peak (``max_memory_allocated``)."""
        return self.static + self.activations + self.working + self.logits + self.buffers

    @property
    def total(self) -> float:
        """All that has to fit."""
        return self.allocated + self.fragmentation + self.reserved

    def parts(self) -> dict[str, float]:
        """Name → bytes of everything that adds up to ``total``."""
        skip = {"stage", "elements", "experts", "in_flight", "peak_at", "host"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skip}


def sum_elements(case: Case, stage: int) -> int:
    """Gradients of one micro-batch that a rank holds at once under ZeRO-2 (``optim.buckets``): two buckets,
    one filling up while the other is reduced, and those of a tied table."""
    units, table = bucket_units(case, stage), unit_elements(case, stage, trained=True)[1]
    largest = largest_bucket(case, stage)
    return (2 if sum(map(sum, units)) > largest else 1) * largest + table


def largest_bucket(case: Case, stage: int) -> int:
    """Elements of the largest bucket of a unit's gradients; a tied table's left out."""
    return max(min(sum(unit), max(case.bucket, *unit)) for unit in bucket_units(case, stage))


def narrow_copies(case: Case, stage: int, elements: int) -> tuple[float, float]:
    """Return the bytes of gradients that are copied to a narrower dtype to be reduced: held while passes run, and at
    the end of the last backward pass. Reductions are settled one bucket behind where sums are sharded, else last."""
    each = case.engine.reduce_bytes
    if each >= case.wide or case.dp * case.cp == 1:
        return 0.0, 0.0
    if case.shards_sums and case.shards > 1:
        return float(largest_bucket(case, stage) * each), 0.0
    return 0.0, float(elements * each)


MOST_WAITING = 2.0**25
"""Bytes of the partial sums that may wait on a GPU (``ext/kernels/gradient_sums.py``)."""
SLOTS = 264, 32
"""Partial sums of a vector's gradient, at most, and rows of each where there are fewer (``norm_backward.cu``)."""


def waiting_slots(case: Case, stage: int) -> float:
    """Return the most bytes of partial sums of norms' and biases' gradients that wait for others during a pass."""
    if case.kernels != "own" or case.engine.name != "native":
        return 0.0
    rows = case.micro_batch * case.model.seq_length / case.cp
    columns = (13 if case.model.add_bias else 4) * case.model.hidden_size * case.stage_layers(stage)
    return min(MOST_WAITING, 4.0 * columns * min(SLOTS[0], rows / SLOTS[1]))


def held_bytes(case: Case, elements: int, trained: int, experts: int = 0) -> tuple[float, float, float]:
    """Return the bytes of weights, gradient sums and optimizer (masters and the rule's state) that a rank with so many
    parameters, so many of them ``trained``, holds all through a run; 8-bit copies of weights and, under ZeRO-3,
    gathered weights are left out. ``experts``: of the parameters, those of experts, trained without adapters."""
    separate = case.width != case.wide  # else the weights are their own masters
    gradient = max(case.engine.gradient_bytes, case.width) if separate else case.wide
    weights = sums = state = 0.0
    of_experts = 0 if case.fine_tuning.enabled else experts
    for count, learning, shards in (
        (elements - experts, trained - of_experts, case.shards), (experts, of_experts, case.expert_shards),
    ):
        weights += count * case.width / (shards if case.zero_stage == 3 else 1)
        sums += learning * gradient / (shards if case.shards_sums else 1)
        kept = learning * (1 - case.offload_fraction) if case.offload != "none" else learning
        moments = case.rule.state * case.engine.moment_bytes(case.wide)
        state += (kept * (moments + separate * case.wide) + learning * case.masked) / shards
    if case.offload_weights:  # on the host; the windows stay
        weights = 0.0
    return weights, sums, state


def teacher_bytes(case: Case, stage: int) -> tuple[float, float]:
    """Return the bytes that a rank of ``stage`` holds of the teacher: weights, and the logits of one micro-batch or
    what they are made of."""
    teacher = case.of_teacher
    if teacher is None:
        return 0.0, 0.0
    weights = held_bytes(teacher, stage_elements(teacher, stage), 0)[0]
    if teacher.zero_stage == 3 and teacher.shards > 1:
        whole = stage_elements(teacher, stage)
        weights += case.width * (whole if case.reshard == "step" else min(whole, window_elements(teacher, stage)))
    if stage != case.grid.last_stage:
        return weights, 0.0
    tokens = case.micro_batch * case.model.seq_length / case.cp
    if case.head_chunk:  # what its head reads and what that is normed to, and the logits of a chunk
        chunk = min(case.head_chunk, tokens) * case.padded_vocab / case.tp
        return weights, (2 * tokens * teacher.model.hidden_size + chunk) * case.width
    return weights, tokens * case.padded_vocab / case.tp * case.width


def exchange_bytes(case: Case) -> float:
    """Return what products that exchange rows pair by pair hold beside those of a collective (``weights.exchanged``):
    the products that are sent, or two shards of torch's symmetric workspace."""
    if not case.in_pairs:
        return 0.0
    product = case.micro_batch * case.model.seq_length / case.cp * case.model.hidden_size * case.width
    return product * max(case.tp - 1, 2) / case.tp


def stage_memory(case: Case, machine: Machine, stage: int, *, quick: bool = False) -> StageMemory:
    """Bytes of a rank of ``stage`` at its peak. ``quick``: messages between stages are estimated, for a search."""
    n, trained, w, e = stage_elements(case, stage), trained_elements(case, stage), case.width, case.engine
    experts = expert_elements(case, stage, trained=False)
    weights, gradients, optimizer = held_bytes(case, n, trained, experts)
    if case.zero_stage == 3 and case.shards > 1:
        gathered = n - (experts if case.expert_shards == 1 else 0)
        weights += w * (gathered if case.reshard == "step" else min(gathered, window_elements(case, stage)))
    if case.weight_gathers == 1 or case.shards == 1:
        weights += copy_bytes(case, stage)
    sums = sum_elements(case, stage) * case.wide if case.shards_sums and case.shards > 1 else 0.0
    bucket = e.buffers(case.dp * case.cp, n, sums) + exchange_bytes(case)
    # Only while the optimizer steps: a copy of this rank's share of the gradient, torch's square roots of a moment.
    roots = case.wide if case.kernels == "torch" else 0
    update = updated_elements(case, stage) * max(e.update_copy_bytes, roots)
    peak = peak_of(case, stage, quick=quick)
    beside, last = narrow_copies(case, stage, trained) if e.name == "native" else (0.0, 0.0)
    bucket += beside
    if last > max(peak.total, update):
        peak = Peak(activations=0.0, logits=0.0, working=last, messages=0.0, in_flight=peak.in_flight,
                    at="the end of the last backward pass")
    if update > peak.total:
        peak = Peak(activations=0.0, logits=0.0, working=update, messages=0.0, in_flight=peak.in_flight,
                    at="the optimizer step")
    else:
        bucket += waiting_slots(case, stage)
    of_teacher, judged = teacher_bytes(case, stage)
    weights, judged = weights + of_teacher, judged * max(1.0, peak.in_flight)
    allocated = weights + gradients + optimizer + peak.total + judged + bucket
    return StageMemory(
        stage=stage, elements=n, experts=experts, weights=weights, gradients=gradients, optimizer=optimizer,
        activations=peak.activations, working=peak.working, logits=peak.logits + judged, buffers=peak.messages + bucket,
        fragmentation=allocated * machine.hardware.fragmentation, reserved=machine.hardware.reserved_gb * 1e9,
        in_flight=peak.in_flight, peak_at=peak.at, host=swap_host_bytes(case, stage) if case.dropped else 0.0,
    )


def plan_memory(case: Case, machine: Machine) -> list[StageMemory]:
    """Every stage, first to last."""
    return [stage_memory(case, machine, stage) for stage in range(case.pp)]
