"""``megatron-port train run.toml``: start a run, or resume it."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.cli.main import add_rendezvous_options, add_run_options, load_run
from megatron_port.core.errors import PortError

if TYPE_CHECKING:
    from megatron_port.core.config.schema import RunConfig
    from megatron_port.core.dist.rank import ProcessInfo
    from megatron_port.run.agent_link import KeptRank


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "train", help="train a model, or resume a run",
        description="Train as run.toml says. Under torchrun, srun, mpirun and the like every process is one rank; "
        "--nproc starts the ranks of one machine itself. A run resumes from the newest whole checkpoint of its folder; "
        "`train runs/NAME` takes the configuration that is in that folder.",
    )
    add_run_options(parser)
    add_rendezvous_options(parser)
    parser.add_argument("--resume", metavar="auto|never|PATH", help="same as --set checkpoint.resume=…")
    parser.add_argument("--dry-run", nargs="?", const="short", choices=("short", "all"),
                        help="check everything that needs no machine, for the whole layout, and stop; all: a line for "
                        "every pipeline stage")
    parser.add_argument("--profile", nargs="?", const="next", metavar="STEPS",
                        help="write profiler traces of these steps (10-12; without: the third to fifth of this start); "
                        "same as --set telemetry.profile=STEPS")
    parser.add_argument("--profile-ranks", metavar="RANKS", help="of these ranks: 0,8-15 or all (default: 0)")
    parser.add_argument("--profile-memory", action="store_true", help="with memory: allocations, and snapshots of GPUs")
    parser.add_argument("--ignore-memory", action="store_true",
                        help="start also where the planner says that the run cannot fit its devices; same as "
                        "--set launch.memory_check=warn")


def run(args: argparse.Namespace) -> int:
    """Train; return the run's exit code."""
    from megatron_port.core.config.dump import toml_value
    from megatron_port.run.local_ranks import run_local, share_cores

    if (args.profile_ranks or args.profile_memory) and not args.profile:
        args.profile = "next"
    settings = {"profile": args.profile, "profile_ranks": args.profile_ranks, "profile_memory": args.profile_memory}
    args.overrides += [f"telemetry.{key}={toml_value(value)}" for key, value in settings.items() if value]
    loaded = load_run(args)
    config = loaded.config
    if args.resume:
        config = replace(config, checkpoint=replace(config.checkpoint, resume=args.resume))
    if args.ignore_memory:
        config = replace(config, launch=replace(config.launch, memory_check="warn"))
    if args.dry_run:
        from megatron_port.tools.plan.dry_run import dry_run

        ranks = args.nproc
        if ranks and config.launch.when_lost == "replace":
            _, nodes = _nodes(config, args)
            ranks *= nodes
        print(dry_run(config, ranks, all_stages=args.dry_run == "all"))
        return 0
    if args.nproc and config.launch.when_lost == "replace":
        return _keep(config, args)
    if args.nproc:
        share_cores(args.nproc)
        _check_start(config, args.nproc)
        return run_local(args.nproc, lambda info: train(config, info), preload=_modules(config), port=args.master_port)
    return train(config, _discover(config, args))


def _check_start(config: RunConfig, world_size: int) -> None:
    """Check the run for its number of ranks before one is started. Raises ConfigError."""
    from megatron_port.api import check_memory
    from megatron_port.core.config.checks import check

    check(config, world_size=None if config.layout.elastic else world_size)
    check_memory(config, world_size)


def _keep(config: RunConfig, args: argparse.Namespace) -> int:
    """Start ``--nproc`` ranks on each node by an agent that replaces those that are lost; return the exit code."""
    from megatron_port.run.agent import Kept, run_kept
    from megatron_port.run.local_ranks import nodes_meeting, share_cores
    from megatron_port.run.relay import keep_nodes

    share_cores(args.nproc)
    info, nodes = _nodes(config, args)
    _check_start(config, nodes * args.nproc)
    main, preload = partial(train, config), _modules(config)
    if info.world_size == 1:
        return run_kept(args.nproc, main, partial(_let_go, config), preload=preload, port=args.master_port)
    kept = Kept(nodes_meeting(args.nproc, nodes, info), main, partial(_let_go, config), partial(_fits, config),
                partial(_note_end, config), partial(_free_old, config))
    return keep_nodes(info, kept, preload=preload, timeout_s=config.launch.rendezvous_timeout)


def _nodes(config: RunConfig, args: argparse.Namespace) -> tuple[ProcessInfo, int]:
    """Return the place of this process among those that were started, one a node, and the nodes that train."""
    from megatron_port.run.local_ranks import node_place

    info = node_place(_discover(config, args))
    return info, info.world_size - (config.launch.spare_nodes if info.world_size > 1 else 0)


def _fits(config: RunConfig, world_size: int) -> bool:
    """Return whether the run may be split over so many ranks instead."""
    from megatron_port.core.errors import ConfigError
    from megatron_port.run.elastic import elastic_layout

    with suppress(ConfigError):
        return config.layout.elastic and bool(elastic_layout(config, world_size))
    return False


def _let_go(config: RunConfig) -> None:
    """Free the memory of the copies on this node, unless another start of the run is at work."""
    from megatron_port.core.train.folders import run_folder
    from megatron_port.ext.storage.copies import remove_copies
    from megatron_port.run.lease import Life, life_of

    if life_of(run_folder(config)) is not Life.RUNS:
        remove_copies(config)


def _free_old(config: RunConfig) -> bool:
    """Free the memory of copies on this node that no start would resume from; return whether none is left."""
    from megatron_port.ext.storage.copies import remove_old_copies

    return remove_old_copies(config)


def _note_end(config: RunConfig, why: str) -> None:
    """Record for the job script why the agent ended the run."""
    from megatron_port.core.errors import EnvironmentFault
    from megatron_port.core.train.folders import run_folder
    from megatron_port.run.launchers import attempt_name
    from megatron_port.run.run_files import record_failure

    record_failure(run_folder(config), attempt_name(), 0, EnvironmentFault(why), lost_peer=True)


def _discover(config: RunConfig, args: argparse.Namespace) -> ProcessInfo:
    """Return this rank's process info. Launcher faults are recorded for the job script too: it must not try again."""
    from megatron_port.run.discovery import discover
    from megatron_port.run.launchers import attempt_name, step_rank
    from megatron_port.run.run_files import record_failure

    try:
        return discover(master_addr=args.master_addr, master_port=args.master_port)
    except PortError as error:
        record_failure(Path(config.output_dir) / config.name, attempt_name(), step_rank(), error)
        raise


def _modules(config: RunConfig) -> list[str]:
    """Return the modules that the ranks will need, to be imported once before they are forked."""
    from megatron_port.ext.kernels.kernels import kernels_status

    # The first backward pass would import the last, with sympy: 0.4 s of every rank.
    modules = ["torch", "megatron_port.run.trainer", "torch.fx.experimental.symbolic_shapes"]
    if config.engine == "deepspeed":
        modules.append("megatron_port.ext.deepspeed.deepspeed_preload")
        return [*modules, "torch._dynamo"] if config.backend.optimizer == "torch" else modules
    own = config.backend.own_kernels != "off" and config.backend.optimizer in ("auto", "own")
    if not own or not any(kernels_status(kind)[0] for kind in ("cpu", "cuda", "rocm")):
        modules.append("torch._dynamo")  # which torch.optim imports when it is first used: 2 s
    return modules


def train(config: RunConfig, info: ProcessInfo, kept: KeptRank | None = None) -> int:
    """Train on one rank; return its exit code. ``kept``: of a rank that an agent keeps."""
    from megatron_port.api import run_training
    from megatron_port.core.io.logging import unexpected
    from megatron_port.run.launchers import attempt_name
    from megatron_port.run.run_files import FAILURES

    try:
        if kept is None:
            outcome = run_training(config, info)
        else:
            from megatron_port.run.recovery import train_kept

            outcome = train_kept(config, info, kept)
    except (PortError, BrokenPipeError):
        raise
    except Exception as error:
        # A node's own folder for temporary files may be gone with the job.
        folder = Path(config.output_dir) / config.name / FAILURES
        raise unexpected(error, folder, f"traceback-{attempt_name()}-rank-{info.rank:05d}.txt") from error
    # Rank 0 leaves last. If the first to leave asked for a requeue, srun --kill-on-bad-exit would end the others.
    return outcome.exit_code if info.rank == 0 else 0
