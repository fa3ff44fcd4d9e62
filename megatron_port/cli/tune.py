"""``tune``: plan every legal layout of a run, measure the best few for real, and say which to take.

Trials run ``megatron-port train`` for a few steps: with ``--nproc`` on this machine, or by srun inside an allocation.
A trial that fails or runs out of memory is kept like any other; a tuning that is stopped resumes where it was.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megatron_port.cli.arguments import ProgressBar, add_json, print_json
from megatron_port.cli.main import add_run_options, load_run
from megatron_port.core.config.ranges import local_path
from megatron_port.core.errors import EXIT_OK, ConfigError

MOST = 10_000
STRATEGIES = ("model", "random", "deephyper")
"""``tune.strategies.STRATEGIES``, which need the planner, and so too long for ``--help``."""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("tune", help="find the fastest layout: planned, then measured",
                                   description=(__doc__ or "").partition("\n")[2])
    add_run_options(parser)
    parser.add_argument("--trials", type=int, default=8, metavar="K", help="layouts to measure (default 8)")
    parser.add_argument("--strategy", choices=STRATEGIES, default="model",
                        help="model: the planner's best K (default); random: any that fits; deephyper: Bayesian "
                        "optimisation over the layouts")
    parser.add_argument("--nodes", type=int, nargs="+", default=[], metavar="N",
                        help="numbers of nodes to try (default: the run's)")
    parser.add_argument("--nproc", type=int, metavar="N", help="measure with N ranks on this machine")
    add_trial_options(parser, "trial", "tune")
    parser.add_argument("--repeats", type=int, default=3, metavar="R",
                        help="starts of the best layouts, until their spread tells them apart (default 3; 1: one each)")
    parser.add_argument("--plan-only", action="store_true", help="print the model's ranking; measure nothing")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random and deephyper")
    add_json(parser)


def add_trial_options(parser: argparse.ArgumentParser, one: str, folder: str) -> None:
    """Add what every measurement by short runs has; ``one``: what such a run is called."""
    parser.add_argument("--steps", type=int, default=5, metavar="N", help=f"steps of a {one} (default 5)")
    parser.add_argument("--warm-up", type=int, default=2, metavar="N", help="of which so many do not count (default 2)")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="S", help=f"longest {one}, seconds")
    parser.add_argument("--out", type=local_path, metavar="DIR", help=f"folder (default: output_dir/NAME-{folder})")
    parser.add_argument("--fresh", action="store_true", help=f"forget the {one}s in that folder")


def trial_problems(args: argparse.Namespace) -> list[str]:
    """Return what is wrong with the options of ``add_trial_options``, a sentence each."""
    out = []
    if args.warm_up < 0 or args.steps <= args.warm_up:
        out.append(f"--steps {args.steps} leaves nothing to measure after --warm-up {args.warm_up}; e.g. --steps "
                   f"{max(args.warm_up, 0) + 3}")
    if args.timeout <= 0:
        out.append(f"--timeout {args.timeout:g}: above 0")
    return out


def run(args: argparse.Namespace) -> int:
    """Tune; return 0 when a layout was found (with --plan-only: planned). Raises ConfigError, EnvironmentFault."""
    out = trial_problems(args)
    if not 1 <= args.trials <= MOST:
        out.append(f"--trials {args.trials}: from 1 to {MOST}")
    if not 1 <= args.repeats <= MOST:
        out.append(f"--repeats {args.repeats}: from 1 to {MOST}")
    if out:
        raise ConfigError(out)
    from megatron_port.tools.tune.strategies import best_legal, make_space

    loaded = load_run(args)
    space = make_space(loaded.config, world_size=args.nproc, nodes=args.nodes)
    fitting = space.fitting
    worlds = sorted({c.case.world for c in space.candidates})
    print(f"{len(space.candidates):,} legal layouts on {' or '.join(map(str, worlds))} devices planned, "
          f"{len(fitting):,} fit", file=sys.stderr if args.json else sys.stdout)
    if not fitting:
        least = min(space.candidates, key=lambda c: c.memory.total, default=None)
        need = f"; the smallest needs {least.memory.total / 1e9:.1f} GB ({least.case.label()})" if least else ""
        raise ConfigError(
            f"no layout on {' or '.join(map(str, worlds))} devices fits {space.config.cluster.memory_gb:g} GB{need}; "
            "use more devices"
        )
    if args.plan_only and args.json:
        print_json([{"layout": c.case.label(), "devices": c.case.world, "seconds": c.step.seconds,
                     "model_tflops": c.step.model_tflops, "bytes": c.memory.total, "zero_stage": c.case.zero_stage,
                     "schedule": c.case.schedule} for c in best_legal(space, args.trials)])
        return EXIT_OK
    if args.plan_only:
        for i, c in enumerate(best_legal(space, args.trials), 1):
            print(f"{i:>4} {c.step.seconds:>10.4g} s  {c.step.model_tflops:>8.4g} model TFLOP/s  "
                  f"{c.memory.total / 1e9:>6.1f} GB  {c.case.world} devices: {c.case.label()}, "
                  f"ZeRO-{c.case.zero_stage}, {c.case.schedule}")
        return EXIT_OK
    return _measure(args, loaded, space)


def _measure(args: argparse.Namespace, loaded: Any, space: Any) -> int:
    from megatron_port.tools.tune.strategies import Results, make_strategy
    from megatron_port.tools.tune.tuner import choose_launcher, hold_folder, render, run_trial, tune

    config = space.config
    launcher = choose_launcher(args.nproc)
    folder = (args.out or Path(config.output_dir) / f"{config.name}-tune").absolute()
    results = Results.open(folder, config, args.steps, fresh=args.fresh)
    if results.left_out:
        print(f"note: {folder}: {results.left_out}", file=sys.stderr)
    strategy = make_strategy(args.strategy, space, count=args.trials, seed=args.seed, folder=str(folder / "deephyper"))
    run_file = loaded.files[-1]

    with ProgressBar("tune", "trial") as bar:
        say = partial(print, file=sys.stderr, flush=True) if args.json else bar.print
        with hold_folder(folder, say) as note:
            measure = partial(
                run_trial, run_file, args.overrides, config, launcher=launcher, steps=args.steps, warm_up=args.warm_up,
                timeout_s=args.timeout, folder=folder / "trials", note=note,
            )
            found = tune(
                space, strategy, results, measure, count=args.trials, say=say, advance=bar, repeats=args.repeats,
            )
    if not args.json:
        print(render(results))
        print(found.decision.words)
    if found.best is None:
        raise ConfigError(f"none of {len(results.trials)} trials worked; their output is in {folder / 'trials'}")
    winner = _say_winner(args, loaded, found.best, folder)
    if args.json:
        print_json({"winner": folder / "winner.toml", "best": asdict(found.best),
                    "decided": not found.decision.near,
                    "trials": [asdict(t) for t in results.trials.values()]})
    else:
        print(winner)
    return EXIT_OK


def _say_winner(args: argparse.Namespace, loaded: Any, best: Any, folder: Path) -> str:
    """Write the winner's run file; return a text with the job script that runs it."""
    from megatron_port.core.config.loader import load
    from megatron_port.tools.launch.submit import checked_script, order_of
    from megatron_port.tools.tune.tuner import label_of, write_winner

    path = folder / "winner.toml"
    config = write_winner(loaded, best, path)
    lines = [f"winner: {label_of(best)} on {best.world} devices: {path}"]
    if args.nproc or not config.cluster.nodes:
        return "\n".join([*lines, f"run it: megatron-port train {path} --nproc {best.world}"])
    lines.append(f"queue it: megatron-port launch submit {path}")
    try:
        script = checked_script(config, order_of(load(str(path)), ()))
    except ConfigError as error:  # the run trains, but says too little for a job
        return "\n".join([*lines, f"no job script: {error}"])
    return "\n".join([*lines, "", script])
