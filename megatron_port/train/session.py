"""From a checked configuration to a rank that is ready: processes, device, groups, providers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_port.backend.device import DeviceInfo, choose_device
from megatron_port.backend.jit_guard import install_guard
from megatron_port.backend.providers import Providers, choose_providers
from megatron_port.config.checks import check, resolve
from megatron_port.config.schema import RunConfig
from megatron_port.errors import EnvironmentFault, PortError
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.topology import Topology
from megatron_port.runtime import process_group
from megatron_port.runtime.agreement import agree
from megatron_port.runtime.discovery import ProcessInfo
from megatron_port.runtime.logging import Logger
from megatron_port.train.assemble import DTYPES


@dataclass(frozen=True)
class Session:
    """One rank of a run, ready to build its model."""

    config: RunConfig
    """Resolved: no derived size is 0."""
    info: ProcessInfo
    device: DeviceInfo
    ctx: ParallelContext
    providers: Providers
    logger: Logger

    @property
    def cpu_group(self) -> dist.ProcessGroup | None:
        """All ranks, for CPU tensors (gloo beside NCCL); None for a single process without a group."""
        return dist.group.WORLD if dist.is_initialized() else None

    @property
    def speaker(self) -> bool:
        """This rank reports."""
        return self.info.rank == 0


def _refuse(config: RunConfig, device: DeviceInfo) -> None:
    """Combinations of engine, precision and device that cannot work; raised before any process meets another."""
    if config.precision.dtype == "fp16" and device.kind == "cpu" and config.engine == "deepspeed":
        raise EnvironmentFault(
            'precision.dtype "fp16" with engine "deepspeed" needs a GPU (DeepSpeed refuses fp16 on a CPU); '
            'use "bf16" or "fp32", or engine = "native"'
        )


@contextmanager
def open_session(
    config: RunConfig, info: ProcessInfo, *, quiet: bool = False
) -> Iterator[Session]:
    """Check the configuration, meet the other ranks, yield the session, take the groups down.

    ``quiet``: do not print where ranks and master come from.

    Raises:
        ConfigError: the configuration does not fit the number of processes.
        EnvironmentFault: launcher, network or device; the same message on every rank.
    """
    check(config, world_size=info.world_size)
    config = resolve(config, info.world_size)
    logger = Logger(info.rank)
    fault: PortError | None = None
    device: DeviceInfo | None = None
    try:
        device = choose_device(
            config.backend.device, local_rank=info.local_rank, local_world_size=info.local_world_size
        )
        _refuse(config, device)
    except PortError as error:
        fault = error
    if device is None or fault is not None:
        if info.world_size > 1:
            process_group.start(info, backend="gloo", fault=fault)
        raise fault or EnvironmentFault("no device")
    if device.is_gpu:
        torch.cuda.set_device(device.torch_device)
    if config.backend.deterministic:
        torch.use_deterministic_algorithms(True)
    if not quiet:
        logger.log(info.describe())
    group = process_group.start(
        info, backend=device.comm_backend, device_identity=device.identity if device.is_gpu else ""
    )
    try:
        layout = config.layout
        topology = Topology(
            tp=layout.tensor_parallel_size, pp=layout.pipeline_parallel_size, dp=layout.data_parallel_size
        )
        ctx = ParallelContext.create(topology, device.torch_device, group.backend)
        failure: PortError | None = None
        providers: Providers | None = None
        try:
            # DeepSpeed is imported before the guard replaces its builder.
            providers = choose_providers(
                config.backend, device, DTYPES[config.precision.dtype], engine=config.engine,
                attention_dropout=config.model.attention_dropout,
            )
            install_guard(config.backend.allow_compile)
        except PortError as error:
            failure = error
        agree(failure, where=str(ctx.coords))
        assert providers is not None
        yield Session(config, info, device, ctx, providers, logger)
    finally:
        process_group.stop(group)
