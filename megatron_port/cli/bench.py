"""``bench``: measure one node for the planner (``calibrate``), and run the paper's scaling studies (``sweep``)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.cli.arguments import ProgressBar, add_action
from megatron_port.cli.main import add_overrides, add_rendezvous_options, add_run_options, load_run, on_ranks
from megatron_port.cli.tune import add_trial_options, trial_problems
from megatron_port.core.config.ranges import expanded, local_path
from megatron_port.core.errors import EXIT_OK, ConfigError

if TYPE_CHECKING:
    from megatron_port.core.dist.rank import ProcessInfo


def add_parser(subparsers: Any) -> None:
    """Register the command and its actions."""
    parser = subparsers.add_parser("bench", help="measure one node for the planner; run the paper's scaling studies")
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)

    calibrate = add_action(
        actions, "calibrate", run_calibrate, help="measure one node and write what the planner needs of it",
        description="Matmuls by shape, memory bandwidth and collectives, on all ranks of one node at once. For a "
        "cluster with a [hardware] section: a [calibration], three factors. For one without (CPUs): a [hardware]. "
        "Start it like `train`: --nproc N, torchrun, or srun on one node.",
    )
    calibrate.add_argument("cluster", type=expanded,
                           help="cluster file, or the name of a shipped one, e.g. clusters/frontier")
    calibrate.add_argument("-o", "--output", type=local_path, required=True, metavar="FILE.toml",
                           help="where to write it")
    calibrate.add_argument("--model", type=expanded, metavar="NAME",
                           help="also the products of this model's layers, e.g. "
                           "models/gpt-22b")
    calibrate.add_argument("--fresh", action="store_true", help="write a whole [hardware] also where there is one")
    add_overrides(calibrate, "backend.device=cpu")
    calibrate.add_argument("--seconds", type=float, default=0.15, metavar="S", help="for each measurement (0.15)")
    add_rendezvous_options(calibrate)

    studies = add_action(
        actions, "sweep", run_sweep, help="run the paper's studies and draw measured beside planned",
        description="Tensor parallel size, micro-batches, stages at a fixed batch and at a fixed ratio, weak and "
        "strong scaling (arXiv 2312.12705), fused attention by length: a few real steps of each layout, on this "
        "machine (--nproc) or by srun inside an allocation. Resumable.",
    )
    add_run_options(studies)
    studies.add_argument("--nproc", type=int, metavar="N", help="up to N ranks on this machine")
    studies.add_argument("--devices", type=int, metavar="N", help="largest number of devices (default: the run's)")
    studies.add_argument("--study", action="append", default=[], metavar="NAME",
                         help="only this one (repeatable): tensor, micro-batches, stages, ratio, weak, strong")
    add_trial_options(studies, "point", "sweep")


def run_calibrate(args: argparse.Namespace) -> int:
    """Measure on this rank; return the exit code. Raises ConfigError, EnvironmentFault."""
    from megatron_port.core.config.loader import load

    if args.seconds <= 0:
        raise ConfigError(f"--seconds {args.seconds:g}: above 0")
    config = load([args.cluster, *([args.model] if args.model else [])], args.overrides).config
    given = Path(args.cluster)
    extends = str(given.absolute()) if given.is_file() else args.cluster

    def measure(info: ProcessInfo) -> int:
        from megatron_port.tools.bench.session import calibrate

        text = calibrate(config, info, args.output, extends=extends, with_model=bool(args.model), fresh=args.fresh,
                         budget_s=args.seconds)
        if text:
            print(text, flush=True)
        return EXIT_OK

    return on_ranks(args, measure, "torch", "megatron_port.tools.bench.session")


def run_sweep(args: argparse.Namespace) -> int:
    """Run the studies; return the exit code. Raises ConfigError, EnvironmentFault."""
    from megatron_port.tools.bench.sweep import NAMES, sweep
    from megatron_port.tools.tune.tuner import choose_launcher

    out = [f"--study {name} is unknown; use {', '.join(NAMES)}" for name in args.study if name not in NAMES]
    out += trial_problems(args)
    if args.devices is not None and args.devices < 1:
        out.append(f"--devices {args.devices}: at least 1")
    if out:
        raise ConfigError(out)
    loaded = load_run(args)
    launcher = choose_launcher(args.nproc)
    folder = (args.out or Path(loaded.config.output_dir) / f"{loaded.config.name}-sweep").absolute()
    with ProgressBar("sweep", "point") as bar:
        sweep(
            loaded, args.overrides, launcher=launcher, devices=args.devices or args.nproc,
            names=args.study or list(NAMES), steps=args.steps, warm_up=args.warm_up, timeout_s=args.timeout,
            folder=folder, fresh=args.fresh, say=bar.print, advance=bar,
        )
    return EXIT_OK
