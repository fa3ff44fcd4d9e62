"""From a checked configuration to a rank that is ready: processes, device, groups, providers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch.distributed.distributed_c10d import Store

from megatron_port.core.config.checks import problems, resolve
from megatron_port.core.config.ranges import local_path
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.objective import objective_of
from megatron_port.core.dist.agree import agreed, attempt
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.process import COMMUNICATOR, START, ProgressTracker
from megatron_port.core.dist.rank import DeviceInfo, ProcessInfo
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.io.logging import Logger
from megatron_port.core.layers.providers import Providers
from megatron_port.core.registry import OWN_UPDATES, PARTS
from megatron_port.core.train.hooks import Session
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.ext.kernels.jit_guard import install_guard
from megatron_port.ext.kernels.kernels import kernels_status
from megatron_port.ext.kernels.settings import MaskNeeds
from megatron_port.ext.telemetry.flops import trained_count
from megatron_port.run import rendezvous as process_group
from megatron_port.run.build import DTYPES, topology_of
from megatron_port.run.device import (
    choose_device,
    describe_device,
    describe_priority,
    group_options,
    installed_accelerators,
    keep_freed_memory,
)
from megatron_port.run.elastic import elastic_layout
from megatron_port.run.peer_failure import explain_peer_failure
from megatron_port.run.rendezvous import Fingerprint
from megatron_port.run.run_files import check_output


def _refuse(config: RunConfig, device: DeviceInfo) -> None:
    """Refuse combinations of engine, precision and device that cannot work, before any process meets another."""
    if config.engine == "deepspeed":
        from megatron_port.ext.deepspeed.deepspeed_installed import require_deepspeed

        require_deepspeed()
    if config.precision.dtype == "fp16" and device.kind == "cpu" and config.engine == "deepspeed":
        raise EnvironmentFault(
            'precision.dtype "fp16" with engine "deepspeed" needs a GPU (DeepSpeed refuses fp16 on a CPU); '
            'use "bf16" or "fp32", or engine = "native"'
        )
    _check_offload(config, device)


def _check_offload(config: RunConfig, device: DeviceInfo) -> None:
    """Raise EnvironmentFault where offloaded state would be updated by own kernels that cannot be used here."""
    name, backend = config.optimizer.name, config.backend
    if config.offload.optimizer == "none" or name not in OWN_UPDATES:
        return
    here = kernels_status(device.kind)[1]
    # All but AdamW are updated in torch's ops where the device has no kernels.
    in_torch = name != "adamw" and (backend.optimizer == "torch" or backend.own_kernels == "off" or bool(here))
    problem = here or kernels_status("cpu")[1]
    if problem and not in_torch:
        raise EnvironmentFault(
            f'offload.optimizer "{config.offload.optimizer}" with optimizer.name "{name}": the host updates by the own '
            f"kernels, which cannot be used: {problem}; build them (make kernels), or use no offload"
        )


def _fit_world(config: RunConfig, info: ProcessInfo) -> tuple[RunConfig, str]:
    """Return the run with a layout for the ranks that came, where ``layout.elastic`` allows that, and a message on it.

    Raises:
        EnvironmentFault: no legal layout has this many ranks. Raised by every rank alike before they meet.
    """
    if not config.layout.elastic or problems(config):
        return config, ""
    try:
        choice = elastic_layout(config, info.world_size)
    except ConfigError as error:
        raise EnvironmentFault(str(error)) from None
    return choice.config, choice.line


def _check_world(config: RunConfig, info: ProcessInfo) -> None:
    """Check the configuration, alone and with the number of processes that were started.

    Raises:
        ConfigError: it is wrong whatever is started (exit 2).
        EnvironmentFault: it is right, but not for this number of processes (exit 3). Raised by every rank alike
            before they meet, printed by rank 0.
    """
    found = problems(config, world_size=info.world_size)
    if not found:
        return
    if problems(config):
        raise ConfigError(found)
    started = {"single": "no launcher: 1 process runs"}.get(info.launcher, f"{info.launcher} started {info.world_size}")
    source = info.sources.get("world_size", "default")
    raise EnvironmentFault(
        f"{started} ({source}), and the run does not fit this number of processes: " + "; ".join(found)
    )


SessionHook = Callable[[RunConfig, ProcessInfo, ProgressTracker, Store], AbstractContextManager[None]]
"""Context that is entered after rendezvous (``run.watch.client``), given what is known by then."""


@contextmanager
def open_session(
    config: RunConfig, info: ProcessInfo, *, quiet: bool = False, around: SessionHook | None = None,
    writes: bool = False, replaced: bool = False,
) -> Iterator[Session]:
    """Check the configuration, meet the other ranks, yield the session, take the groups down.

    Args:
        quiet: do not print where ranks and master come from.
        around: entered once the ranks have met and left before the groups are taken down: the watch, which must
            see ranks that hang while communicators are made.
        writes: the run's folder will be written, so rank 0 tries that first.
        replaced: an agent replaces ranks that are lost (``run.agent``).

    Raises:
        ConfigError: the configuration is wrong.
        EnvironmentFault: launcher, network, device or output folder, ranks that are missing or differ, or a number of
            processes that the layout cannot use; the same message on every rank.
        PeerLost: another rank ended or stopped answering while the session was open. Any other error of the body
            passes unchanged.
    """
    config, fitted = _fit_world(config, info)
    _check_world(config, info)
    config = resolve(config, info.world_size)
    parts = ""
    open_parts = not config.layout.tp_overlap_chunks and config.layout.tensor_parallel_size > 1
    if open_parts and config.hardware.matmul_tflops:  # else nothing is known of the device, and they stay whole
        config, parts = PARTS.function("tensor-parallel parts")(config, info.world_size)
    activations = config.activations
    plans = activations.policy == "plan" and not activations.layers
    if plans or activations.head_chunk < 0:
        config = PARTS.function("activation plan")(config, info.world_size)
    logger = Logger(info.rank)
    for said in filter(None, (fitted, parts)):
        logger.log(said)
    started = time.perf_counter()
    device, fault = attempt(lambda: _choose_device(config, info))
    if writes and info.rank == 0 and fault is None:
        _, fault = attempt(lambda: check_output(config, trained_count(config.model, config.fine_tuning)))
    meeting_s, collective_s = config.launch.rendezvous_timeout, config.launch.collective_timeout
    fingerprint = Fingerprint.of(info.world_size, config)
    if device is None or fault is not None:
        if info.world_size > 1:
            process_group.start(info, backend="gloo", timeout_s=meeting_s, fault=fault, fingerprint=fingerprint)
        raise fault or EnvironmentFault("no device")
    if device.is_gpu:
        torch.cuda.set_device(device.torch_device)
    if config.backend.deterministic:
        torch.use_deterministic_algorithms(True)
    if not quiet:
        logger.log(info.describe())
    group = process_group.start(
        info, backend=device.comm_backend, device_identity=device.identity if device.is_gpu else "",
        share_devices=config.backend.share_devices,
        timeout_s=meeting_s, group_timeout_s=collective_s, fingerprint=fingerprint,
    )
    if not quiet:
        logger.log(describe_device(device, group.backend, info.world_size))
        if group.backend == "nccl" and info.world_size > 1:
            said = describe_priority(config.backend.collective_priority, topology_of(config),
                                     two_way=config.engine == "native")
            logger.log(f"streams of the collectives: {said}")
    failed = True
    try:
        met = time.perf_counter()
        progress = ProgressTracker()
        with nullcontext() if around is None else around(config, info, progress, group.store):
            session = _assemble(config, info, device, group.backend, logger, progress)
            session = replace(session, store=group.store, plans_activations=plans)
            if info.world_size > 1 and not quiet:
                now = time.perf_counter()
                logger.log(f"{info.world_size} ranks met in {met - started:.1f} s, groups ready in {now - met:.1f} s")
            yield session
        failed = False
    except Exception as error:
        lost = explain_peer_failure(error, info)
        if lost is None or lost is error:
            raise
        raise lost from error
    finally:
        process_group.stop(group, failed=failed, replaced=replaced)


def _providers(config: RunConfig, device: DeviceInfo) -> Providers:
    """Return the implementations that serve a run's model. Raises PortError."""
    return choose_providers(
        config.backend, device, DTYPES[config.precision.dtype], engine=config.engine,
        attention_dropout=config.model.attention_dropout, fp8=config.precision.fp8, rule=config.optimizer.name,
        shape=(config.model.head_size, config.model.seq_length), mask=MaskNeeds.of(config), moe=config.model.moe,
    )


def _choose_device(config: RunConfig, info: ProcessInfo) -> DeviceInfo:
    """Return this rank's device. Raises PortError."""
    device = choose_device(
        config.backend.device, local_rank=info.local_rank, local_world_size=info.local_world_size,
        share=config.backend.share_devices,
    )
    _refuse(config, device)
    if device.is_gpu:
        from megatron_port.run.affinity import bind_near_device

        said = bind_near_device(info, installed_accelerators())
        if said:
            Logger(info.rank).log(said)
    else:
        keep_freed_memory()
    return device


def _assemble(
    config: RunConfig, info: ProcessInfo, device: DeviceInfo, backend: str, logger: Logger, progress: ProgressTracker
) -> Session:
    """Make groups and choose providers, on ranks that have met."""
    topology = topology_of(config)
    progress.at(START, COMMUNICATOR)
    ctx = ParallelContext.create(
        topology, device.torch_device, backend, timeout_s=config.launch.collective_timeout,
        two_way=config.engine == "native", progress=progress,
        options=group_options(config.backend.collective_priority, backend, config.launch.collective_timeout),
    )
    progress.at(START)
    if config.backend.tuned_products:
        from megatron_port.ext.kernels.tuned_products import freeze  # few runs have a table

        logger.log(agreed(lambda: freeze(local_path(config.backend.tuned_products)), where=str(ctx.coords)))
    providers = agreed(lambda: _providers(config, device), where=str(ctx.coords))
    if config.backend.products == "lt" or (config.backend.products == "auto" and device.is_gpu):
        products, row = PARTS.function("measured products")(config, device, info.rank)
        providers = replace(providers, products=products, table=(*providers.table, row))
    objective = objective_of(config)
    if objective.frozen_prefix:
        frozen = agreed(objective.frozen_run, where=str(ctx.coords))
        of_frozen = agreed(lambda: _providers(frozen, device), where=str(ctx.coords))
        providers = replace(providers, teacher=of_frozen)
    agreed(lambda: install_guard(config.backend.allow_jit), where=str(ctx.coords))
    if config.backend.allow_jit:
        logger.log("backend.allow_jit = true: ops may be compiled while this run trains")
    return Session(config, info, device, ctx, providers, logger, progress)
