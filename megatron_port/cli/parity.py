"""``megatron-port parity run.toml --layouts …``: does one layout's training equal another's, on this machine?"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.cli.arguments import ProgressBar, add_json, print_json
from megatron_port.cli.main import add_run_options, exit_code_of, load_run
from megatron_port.core.config.layout import model_ranks
from megatron_port.core.config.ranges import local_path
from megatron_port.core.errors import EXIT_NUMERICS, EXIT_OK, ConfigError, EnvironmentFault
from megatron_port.run.launchers import is_rank_zero
from megatron_port.tools.parity.layout_name import parse_layout

if TYPE_CHECKING:
    from megatron_port.core.config.schema import LayoutConfig, RunConfig
    from megatron_port.core.dist.rank import ProcessInfo
    from megatron_port.tools.parity.comparison import Deviation, Run
    from megatron_port.tools.parity.emulation import RoundingEmulation


PLAIN, WIDE, ORDERED, PLACES = "one-process", "one-process-fp32", "one-process-reordered", "one-process-as-"
NOISY = "one-process-fp32-noise"
"""Folders of the runs of a single process that half precision is judged by: as it is; in fp32; with its sums in eight
other orders; before a layout's name, rounding where that layout does; and in fp32 with random errors."""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "parity", help="compare layouts with one process, gradient by gradient",
        description="Train a few steps with each layout and compare losses, gradient norms and every gradient by name "
        "with the first one given; in bf16 and fp16 with one process that rounds where the layout does. On one machine "
        "the ranks are started here; under srun or torchrun every layout must have as many ranks as were started. Exit "
        "6 when a layout differs.",
        epilog="A layout is written tp2pp2dp2, with sp for sequence parallelism: tp2pp1dp1sp. "
        "Tolerances: docs/parity.md.",
    )
    add_run_options(parser)
    parser.add_argument("--layouts", nargs="+", default=["tp1pp1dp1", "tp2pp2dp2"], metavar="tpXppYdpZ[sp]")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default 3)")
    parser.add_argument("--out", type=local_path, help="keep the recorded runs here (several nodes: a shared folder)")
    add_json(parser)
    parser.add_argument("--master-addr", help="under srun: host of rank 0")
    parser.add_argument("--master-port", type=int, help="under srun: port of rank 0")


def world_of(layout: LayoutConfig) -> int:
    """Ranks that a layout needs."""
    return model_ranks(layout) * layout.data_parallel_size


def config_for(config: RunConfig, layout: str) -> RunConfig:
    """Return the run with another layout and, where its replicas need it, a smaller micro-batch; the batch stays."""
    changed = parse_layout(layout, config.layout)
    replicas, batch = changed.data_parallel_size, config.batch
    micro = batch.micro_batch_size
    if batch.global_batch_size % replicas == 0:
        share = batch.global_batch_size // replicas
        micro = max(b for b in range(1, min(micro, share) + 1) if share % b == 0)
    return replace(
        config, layout=changed, cluster=replace(config.cluster, nodes=0), batch=replace(batch, micro_batch_size=micro)
    )


def run(args: argparse.Namespace) -> int:
    """Record every layout, compare, print; return 0 or 6."""
    if len(args.layouts) < 2:
        raise ConfigError("--layouts needs two or more layouts; the first is the reference")
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: at least 1")
    args.verdicts = []
    if not args.json:
        return compare_layouts(args)
    with contextlib.redirect_stdout(sys.stderr):  # of the ranks too, which are forked from here
        code = compare_layouts(args)
    if is_rank_zero():
        print_json(args.verdicts)
    return code


def compare_layouts(args: argparse.Namespace) -> int:
    """Record and compare every layout; return 0 or 6."""
    config = load_run(args).config
    from megatron_port.run.discovery import discover

    info = discover(master_addr=args.master_addr, master_port=args.master_port)
    if info.world_size > 1:
        return _under_launcher(args, config, info)
    from megatron_port.core.config.checks import check

    for layout in args.layouts:
        changed = config_for(config, layout)
        check(changed, world_size=world_of(changed.layout))
    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        out = args.out or Path(scratch)
        with ProgressBar("parity", "layout") as bar:
            for done, layout in enumerate(args.layouts):
                bar(done, len(args.layouts), note=layout)
                record = partial(_record_local, config_for(config, layout), out / layout, steps=args.steps)
                _apart(f"running {layout}", config, record, say=bar.print)
        if config.precision.dtype in ("bf16", "fp16"):
            return _report_half(args, config, out)
        return _report(args, config, out)


def _apart(
    message: str, config: RunConfig, record: Callable[[], int], say: Callable[[str], None] | None = None
) -> None:
    """Record in a process of its own: DeepSpeed keeps module globals, so each layout has one."""
    from megatron_port.run.local_ranks import run_apart

    modules = ["torch", "torch._dynamo", "megatron_port.tools.parity.recording"]
    if config.engine == "deepspeed":
        modules.append("megatron_port.ext.deepspeed.deepspeed_preload")
    (say or partial(print, flush=True))(message)
    code = run_apart(lambda: exit_code_of(record), preload=modules)
    if code:
        raise EnvironmentFault(f"{message} ended with exit code {code}; its output is above")


def _places(config: RunConfig) -> RoundingEmulation | None:
    from megatron_port.core.dist.mesh import Topology
    from megatron_port.tools.parity.emulation import RoundingEmulation

    layout = config.layout
    return RoundingEmulation.of(
        config, Topology(layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size)
    )


def _stand_in(config: RunConfig, layout: str) -> str:
    """Return the folder of the single process that a layout is compared with in half precision: the plain one where
    the layout rounds nowhere else and has the same micro-batches."""
    changed = config_for(config, layout)
    plain = _places(changed) is None and changed.batch == config_for(config, "tp1pp1dp1").batch
    return PLAIN if plain else f"{PLACES}{layout}"


def _record_single(config: RunConfig, names: Sequence[str], out: Path, *, steps: int) -> int:
    """Record the named runs of one process, engine native, in folders of their names under ``out``."""
    from megatron_port.core.config.features import OffloadConfig
    from megatron_port.core.config.schema import ActivationsConfig
    from megatron_port.run.discovery import discover
    from megatron_port.tools.parity.emulation import ORDERS, RoundingNoise
    from megatron_port.tools.parity.recording import Order, record_orders

    alone = replace(
        parse_layout("tp1pp1dp1", config.layout), zero_stage=0, shard_size=0, reshard="forward",
        pipeline_schedule="1f1b", virtual_pipeline_size=1,
    )
    provider = "auto" if config.backend.optimizer == "deepspeed" else config.backend.optimizer
    for name in names:
        changed = config_for(config, name.removeprefix(PLACES) if name.startswith(PLACES) else "tp1pp1dp1")
        orders: list[tuple[Order, Path]] = [
            (_places(changed) if name.startswith(PLACES) else None, out / name)
        ]
        changed = replace(
            changed, engine="native", layout=alone, activations=ActivationsConfig(), offload=OffloadConfig(),
            backend=replace(changed.backend, optimizer=provider),
        )
        if name in (WIDE, NOISY):  # torch's ops: an error of a kernel is not to be in both
            changed = replace(
                changed, precision=replace(changed.precision, dtype="fp32"),
                backend=replace(changed.backend, own_kernels="off", attention="math"),
            )
        if name == ORDERED:
            orders = [(order, out / name / str(i)) for i, order in enumerate(ORDERS) if order is not None]
        if name == NOISY:
            orders = [(noise, out / name / str(noise.seed)) for noise in RoundingNoise.of(config.precision)]
        record_orders(changed, discover({}), orders, steps=1 if name in (WIDE, NOISY) else steps)
    return EXIT_OK


def _record_local(config: RunConfig, out: Path, *, steps: int) -> int:
    """Record a layout on ranks that are started here."""
    import torch

    from megatron_port.run.discovery import discover
    from megatron_port.run.local_ranks import run_local

    world = world_of(config.layout)
    if world == 1:
        return _record(config, discover({}), out, steps)
    torch.set_num_threads(max(1, torch.get_num_threads() // world))  # of each rank: they inherit it
    return run_local(world, lambda info: _record(config, info, out, steps))


def _record(config: RunConfig, info: ProcessInfo, out: Path, steps: int) -> int:
    from megatron_port.tools.parity.recording import record_orders

    record_orders(config, info, [(None, out)], steps=steps)
    return EXIT_OK


def _under_launcher(args: argparse.Namespace, config: RunConfig, info: ProcessInfo) -> int:
    """Record every layout on the ranks that srun or torchrun started, one after the other."""
    if config.precision.dtype in ("bf16", "fp16"):
        raise ConfigError(
            f'precision.dtype "{config.precision.dtype}" is compared with one process that rounds where layouts do, '
            'which needs a single process; run parity without a launcher, or use --set precision.dtype=fp32'
        )
    if args.out is None:
        raise ConfigError("under srun or torchrun give --out FOLDER, a folder that every node sees")
    for index, layout in enumerate(args.layouts):
        changed = config_for(config, layout)
        if world_of(changed.layout) != info.world_size:
            raise ConfigError(
                f"layout {layout} has {world_of(changed.layout)} ranks and {info.world_size} were started; give "
                f"layouts of {info.world_size} ranks, or run parity without a launcher"
            )
        # A new port for each layout: the last one's may still be closing.
        _record(changed, replace(info, master_port=info.master_port + index, agent_store=False), args.out / layout,
                args.steps)
    return _report(args, config, args.out) if info.rank == 0 else EXIT_OK


def _report(args: argparse.Namespace, config: RunConfig, out: Path) -> int:
    """Report on fp64 and fp32: every layout against the first."""
    from megatron_port.tools.parity.comparison import FP32, FP64, compare
    from megatron_port.tools.parity.recording import read_recorded

    tolerance = {"fp64": FP64, "fp32": FP32}[config.precision.dtype]
    first, *others = args.layouts
    reference = read_recorded(out / first)
    print(f"\nreference {first}, losses " + ", ".join(f"{x:.6f}" for x in reference.losses))
    return max(
        _verdict(args, layout, compare(reference, read_recorded(out / layout), tolerance, config.model))
        for layout in others
    )


def _report_half(args: argparse.Namespace, config: RunConfig, out: Path) -> int:
    """bf16 and fp16: every layout against one process that rounds where it does, and that process against the plain
    one and fp32."""
    import torch

    from megatron_port.core.errors import NumericsError
    from megatron_port.tools.parity.emulation import ORDERS, SEEDS, SingleRuns, within_rounding
    from megatron_port.tools.parity.recording import read_recorded

    singles = list(dict.fromkeys([PLAIN, *(_stand_in(config, layout) for layout in args.layouts)]))
    narrow = config.precision.fp8 != "none"  # of products in 8 bits ranks scale their pieces by themselves
    _apart(
        "running one process" + ("" if narrow else " that rounds where the layouts do, and in fp32"), config,
        partial(_record_single, config, [*singles, *([] if narrow else [WIDE])], out, steps=args.steps),
    )
    torch.set_num_threads(1)  # one more process may be forked after the first comparison

    def ordered(count: int) -> list[Run]:
        if not count:
            return []
        if not (out / ORDERED).exists():
            _apart(f"running one process with its sums in {len(ORDERS) - 1} other orders", config,
                   partial(_record_single, config, [ORDERED], out, steps=args.steps))
        folders = [out / PLAIN if order is None else out / ORDERED / str(i) for i, order in enumerate(ORDERS[:count])]
        return [read_recorded(folder) for folder in folders]

    def noisy() -> list[Run]:
        if not (out / NOISY).exists():
            _apart(f"running one process in fp32 with random errors, {len(SEEDS)} times", config,
                   partial(_record_single, config, [NOISY], out, steps=args.steps))
        return [read_recorded(out / NOISY / str(seed)) for seed in SEEDS]

    worst = EXIT_OK
    print("\nreference: one process" + ("" if narrow else " that rounds where the layout does"))
    for layout in args.layouts:
        there = read_recorded(out / _stand_in(config, layout))
        if all(norm is None for norm in there.grad_norms):
            raise NumericsError(f"no step of {args.steps} had finite gradients: give more --steps, or a smaller "
                                f"precision.initial_loss_scale than {config.precision.initial_loss_scale:g}")
        single = SingleRuns(
            there, ordered, lambda: read_recorded(out / PLAIN), lambda: read_recorded(out / WIDE), noisy
        )
        found = within_rounding(config_for(config, layout), read_recorded(out / layout), single)
        worst = max(worst, _verdict(args, layout, found))
    return worst


def _verdict(args: argparse.Namespace, layout: str, deviations: list[Deviation]) -> int:
    """Print a layout's deviations, by rule, and keep them for ``--json``; return 0 or 6."""
    bad = [d for d in deviations if not d.ok]
    args.verdicts.append({"layout": layout, "equal": not bad,
                          "deviations": [{**asdict(d), "ok": d.ok} for d in deviations]})
    print(f"\n{layout}: {'EQUAL within tolerance' if not bad else 'DIFFERS'}")
    for rule, members in itertools.groupby(deviations, lambda d: d.rule):
        print(f" {rule}")
        for d in members:
            print(f"  {d}")
    if bad:
        named = dict.fromkeys(d.where for d in bad if d.quantity in ("gradient", "grad moved", "grad scale"))
        print(f"  the first to differ: {bad[0].quantity} at {bad[0].where}"
              + (f"; of the gradients, most: {', '.join(named)}" if named else ""))
    return EXIT_NUMERICS if bad else EXIT_OK
