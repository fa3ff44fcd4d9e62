"""``bench calibrate`` on one rank: meet the others, measure, and on rank 0 write the file."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.dist.collectives import Group, reduce_from_tp, reduce_scatter_sequence
from megatron_port.core.dist.rank import DeviceInfo, ProcessInfo
from megatron_port.core.errors import ConfigError
from megatron_port.core.io.files import write_output
from megatron_port.core.layers.linear import WgradAccumulator, linear
from megatron_port.core.layers.providers import Providers
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.ext.kernels.choose_products import measure_card
from megatron_port.run import rendezvous as process_group
from megatron_port.tools.bench.calibration import (
    calibrated,
    described,
    host_entries,
    kernel_entries,
    measure,
    shapes_of,
    table,
    to_toml,
)
from megatron_port.tools.bench.measure import DTYPES, pass_entries
from megatron_port.tools.plan.case import Entry, Machine, machine_problems, to_csv
from megatron_port.tools.preflight.exchange import meet, synchronize
from megatron_port.tools.preflight.session import device_or_fault

# Waits of tensor-parallel ranks for one another, in the pattern of a layer: blocks of two linear layers as the
# program runs them, forward and backward, with their collectives and without, in turn.
#
# The difference is what a collective adds to a pass after the arithmetic of every rank, its library's threads on the
# same cores and all; backward beside the product of the weight's gradient.

BLOCKS = 4
"""In a row, as layers are."""
LEAST_ROUNDS = 6
GROUPS = 3


class Blocks:
    """Blocks of a rank, [rows, 1, hidden] → the same (a share of the rows under sequence parallelism)."""

    def __init__(
        self, model: ModelConfig, providers: Providers, ranks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        h, f = model.hidden_size, model.ffn_size // ranks
        self._wide, self._gated, self.activation = f * (2 if model.gated else 1), model.gated, providers
        sums: dict[int, Tensor] = {}
        accumulator = WgradAccumulator(lambda weight: None, lambda weight: sums[id(weight)])
        self.weights: list[tuple[Tensor, Tensor]] = []
        for _ in range(BLOCKS):
            pair = [
                (torch.randn(*size, device=device) * 0.02).to(dtype).requires_grad_()
                for size in ((self._wide, h), (h, f))
            ]
            for weight in pair:
                sums[id(weight)] = torch.zeros(weight.shape, device=device)
                weight.wgrad_accumulator = accumulator  # type: ignore[attr-defined]
            self.weights.append((pair[0], pair[1]))

    def __call__(self, x: Tensor, group: Group, sequence: bool) -> Tensor:
        leave = reduce_scatter_sequence if sequence else reduce_from_tp
        for first, second in self.weights:
            y = linear(x, first, group=group, sequence_parallel=sequence and group is not None)
            y = self.activation.swiglu(y) if self._gated else self.activation.bias_gelu(y, None, approximate=False)
            x = leave(linear(y, second), group)
        return x


def _pass_times(blocks: Blocks, x: Tensor, group: Group, sequence: bool) -> tuple[float, float]:
    """Seconds of a forward and a backward pass on the slowest rank, which all begin together."""
    device = x.device
    synchronize(device)
    meet()
    started = time.perf_counter()
    out = blocks(x, group, sequence)
    synchronize(device)
    middle = time.perf_counter()
    out.backward(torch.ones_like(out))
    synchronize(device)
    times = torch.tensor([middle - started, time.perf_counter() - middle], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    forward, backward = times.tolist()
    return forward, backward


def _shown(
    blocks: Blocks, rows: int, model: ModelConfig, ranks: int, sequence: bool, dtype: torch.dtype, device: torch.device,
    budget_s: float,
) -> tuple[float, float]:
    """Seconds that a block's collectives add to its forward and to its backward pass, typical of many passes."""
    group = dist.group.WORLD
    whole = torch.randn(rows, 1, model.hidden_size, device=device).to(dtype).requires_grad_()
    share = whole.detach()[: rows // ranks].clone().requires_grad_() if sequence else whole
    for x, ours in ((whole, None), (share, group)):
        _pass_times(blocks, x, ours, sequence)
    once = sum(_pass_times(blocks, share, group, sequence)) + sum(_pass_times(blocks, whole, None, sequence))
    added = []
    for _ in range(max(LEAST_ROUNDS, int(budget_s / max(once, 1e-6)))):
        without = _pass_times(blocks, whole, None, sequence)
        added.append([a - b for a, b in zip(_pass_times(blocks, share, group, sequence), without)])
    forward, backward = (_typical(column) / BLOCKS for column in zip(*added))
    return forward, backward


def _typical(values: Sequence[float]) -> float:
    """Median of the means of a few groups: a run is judged by the median of its steps, and a step is a sum of many."""
    each = len(values) // GROUPS
    groups = [values[i * each : (i + 1) * each] for i in range(GROUPS)]
    return statistics.median(map(statistics.mean, groups))


def _times(
    model: ModelConfig, providers: Providers, dtype: str, device: torch.device, ranks: int, budget_s: float
) -> Iterator[Entry]:
    kind = DTYPES[dtype]
    blocks = Blocks(model, providers, ranks, kind, device)
    for rows in (model.seq_length, 2 * model.seq_length, 4 * model.seq_length):
        size = float(rows * model.hidden_size * kind.itemsize)
        for name, sequence in (("tensor", False), ("sequence", True)):
            shown = _shown(blocks, rows, model, ranks, sequence, kind, device, budget_s)
            for way, seconds in zip(("forward", "backward"), shown):
                yield Entry(f"{name}-{way}", "", dtype, (ranks, size), size / max(seconds, 1e-7) / 1e9)


def region_entries(
    model: ModelConfig, providers: Providers, dtype: str, device: torch.device, ranks: int, budget_s: float
) -> list[Entry]:
    """Measure waits in tensor-parallel regions of ``model`` by the bytes of an activation; the ranks are one group."""
    if ranks == 1 or model.ffn_size % ranks or model.seq_length % ranks:
        return []
    return list(_times(model, providers, dtype, device, ranks, budget_s))


TENSOR = (1, 2, 4, 8)
SIZES = {"cpu": (256, 4, 128), "cuda": (4096, 32, 2048)}
"""Hidden size, heads and length of what is measured where no model is named."""


def calibrate(
    config: RunConfig, info: ProcessInfo, out: Path, *, extends: str, with_model: bool, fresh: bool = False,
    budget_s: float = 0.15,
) -> str:
    """Measure this node; rank 0 writes ``out`` and returns what to print, the others return nothing.

    ``extends``: the cluster as it was named. ``with_model``: also the products of ``config.model``. ``fresh``: describe
    the machine anew even where it has a [hardware] section.

    Raises:
        ConfigError: more than one node, or a [hardware] section that cannot be planned with.
        EnvironmentFault: launcher, rendezvous or device.
    """
    if info.num_nodes > 1:
        raise ConfigError(f"bench calibrate measures one node, and {info.num_nodes} were started; start it on one")
    has_hardware = bool(config.hardware.device or config.hardware.matmul_tflops) and not fresh
    if has_hardware:
        lacking = machine_problems(Machine(cluster=config.cluster, hardware=config.hardware))
        if lacking:
            raise ConfigError(lacking)
    device, fault = device_or_fault(config, info)
    if device is not None and device.is_gpu:
        torch.cuda.set_device(device.torch_device)
    if info.world_size == 1 and fault is not None:
        raise fault
    group = None
    if info.world_size > 1:
        group = process_group.start(
            info, backend=device.comm_backend if device else "gloo", timeout_s=config.launch.rendezvous_timeout,
            group_timeout_s=config.launch.collective_timeout,
            device_identity=device.identity if device and device.is_gpu else "",
            share_devices=config.backend.share_devices, fault=fault,
        )
    assert device is not None  # start raised the fault
    failed = True
    try:
        tensor = [t for t in TENSOR if device.is_gpu or t <= info.world_size]
        shapes = shapes_of(device.kind, config.model if with_model else None, tensor)
        dtypes = ("bf16",) if device.is_gpu else ("fp32", "bf16")
        # gloo moves no GPU tensors; then the ranks share a GPU and only their kernels are measured
        ranks = info.world_size if group is None or group.backend == "nccl" or not device.is_gpu else 1
        found = measure(
            device=device.torch_device, kind=device.kind, name=device.name, ranks=ranks,
            memory_bytes=device.memory_bytes, shapes=shapes, dtypes=dtypes,
            budget_s=budget_s,
        )
        fit = (calibrated if has_hardware else described)(config.cluster, *(
            (config.hardware, found) if has_hardware else (found,)), source="")
        model = config.model if with_model else _some_model(device)
        found.entries += _entries(config, model, device, fit.machine, ranks, dtypes, budget_s)
        text = ""
        if info.rank == 0:
            source = f"bench calibrate on {platform.node()}, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}"
            fit = (calibrated if has_hardware else described)(config.cluster, *(
                (config.hardware, found) if has_hardware else (found,)), source=source)
            entries = out.with_suffix(".csv")
            write_output(entries, to_csv(kernel_entries(found, source=source)))
            write_output(out, to_toml(fit, found, extends=extends, table_name=str(entries.absolute())))
            text = "\n".join([*table(fit, found), f"written: {out}, {entries}"])
            if device.is_gpu:
                text += f"\n{measure_card(_runs(config, model, tensor), device)}"
        failed = False
    finally:
        if group is not None:
            process_group.stop(group, failed=failed)
    return text


def _runs(config: RunConfig, model: ModelConfig, tensor: Sequence[int]) -> list[RunConfig]:
    """Return the runs whose products are measured: of a model in bf16 on tensor-parallel ranks that divide it."""
    named = replace(config, model=model, precision=replace(config.precision, dtype="bf16"))
    divides = [t for t in tensor if not (model.num_attention_heads % t or model.kv_heads % t or model.ffn_size % t)]
    return [replace(named, layout=replace(config.layout, tensor_parallel_size=t)) for t in divides]


def _some_model(device: DeviceInfo) -> ModelConfig:
    hidden, heads, length = SIZES["cuda" if device.is_gpu else "cpu"]
    return ModelConfig(
        name="calibrate", num_layers=1, hidden_size=hidden, num_attention_heads=heads, vocab_size=8 * hidden,
        seq_length=length,
    )


def _entries(
    config: RunConfig, model: ModelConfig, device: DeviceInfo, machine: Machine, ranks: int, dtypes: Sequence[str],
    budget_s: float,
) -> list[Entry]:
    """Passes over memory and attention in the dtypes, and the host's part, on all ranks at once."""
    out: list[Entry] = []
    for dtype in dtypes:
        providers = choose_providers(config.backend, device, DTYPES[dtype], engine="native")
        out += pass_entries(model, providers, dtype, device.torch_device, ranks, budget_s / 2)
        out += region_entries(model, providers, dtype, device.torch_device, ranks, 10 * budget_s)
    return out + host_entries(config, device, machine, dtypes[0], ranks, budget_s)
