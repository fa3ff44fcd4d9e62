"""``bench calibrate`` on one rank: meet the others, measure, and on rank 0 write the file."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.dist import process_group
from megatron_port.core.dist.device import DeviceInfo
from megatron_port.core.dist.discovery import ProcessInfo
from megatron_port.core.errors import ConfigError
from megatron_port.core.io.atomic import write_output
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.tools.bench.calibration import calibrated, described, kernel_entries, table, to_toml
from megatron_port.tools.bench.host import host_entries
from megatron_port.tools.bench.passes import DTYPES, pass_entries
from megatron_port.tools.bench.probe import measure, shapes_of
from megatron_port.tools.bench.regions import region_entries
from megatron_port.tools.plan.case import Machine, machine_problems
from megatron_port.tools.plan.kernel_table import Entry, to_csv
from megatron_port.tools.preflight.session import device_or_fault

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
        failed = False
    finally:
        if group is not None:
            process_group.stop(group, failed=failed)
    return text


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
