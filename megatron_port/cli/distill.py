"""``megatron-port distill logits RUN | verify FOLDER``: a teacher's predictions, computed ahead of training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.cli.arguments import ProgressBar
from megatron_port.cli.main import add_rendezvous_options, add_run_options, load_run, on_ranks
from megatron_port.core.config.ranges import local_path
from megatron_port.core.errors import EXIT_OK, ConfigError, DataError
from megatron_port.core.io.logging import silent

if TYPE_CHECKING:
    from megatron_port.core.dist.rank import ProcessInfo


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "distill", help="compute a teacher's predictions ahead of training",
        description="A model can learn from a teacher that runs beside it (distillation.teacher), or from a folder of "
        "the teacher's most likely tokens at every position (distillation.logits), which is written once.",
    )
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    logits = actions.add_parser(
        "logits", help="write the folder distillation.logits of a run",
        description="Run the teacher of a run file over the samples that the run will consume, on any layout, and keep "
        "its most likely tokens. After an interruption the same command continues where it was.")
    add_run_options(logits)
    logits.add_argument("--top", type=int, default=64, metavar="K", help="tokens kept at each position (default: 64)")
    logits.add_argument("--block", type=int, default=64, metavar="N", help="samples in a file (default: 64)")
    add_rendezvous_options(logits)
    verify = actions.add_parser("verify", help="compare every record of such a folder with its hash")
    verify.add_argument("folder", type=local_path)


def run(args: argparse.Namespace) -> int:
    """Run the action; return its exit code."""
    if args.action == "verify":
        return verify(args.folder)
    if args.block < 1:
        raise ConfigError(f"--block {args.block}: it must be at least 1")
    return on_ranks(args, lambda info: logits(args, info), "torch", "megatron_port.tools.inference.teacher_logits")


def verify(folder: Path) -> int:
    """Read all records. Raises DataError: some are damaged or missing."""
    from megatron_port.ext.objectives.distillation import StoredLogits

    stored = StoredLogits(folder)
    bad = [block for block in range(stored.header.blocks) if stored.damaged(block)]
    if bad:
        raise DataError(f"{folder}: {len(bad)} of {stored.header.blocks} blocks are missing or damaged, the first is "
                        f"{bad[0]}; `megatron-port distill logits` writes them again")
    print(f"{folder}: {stored.header.samples} samples of {stored.header.teacher}, top {stored.header.top}, temperature "
          f"{stored.header.temperature:g}: every record is as written")
    return EXIT_OK


def logits(args: argparse.Namespace, info: ProcessInfo) -> int:
    """Compute on one rank; return the exit code."""
    from megatron_port.ext.objectives.distilled import open_teacher
    from megatron_port.run.session import open_session
    from megatron_port.tools.inference.teacher_logits import compute_logits, logits_run

    config = load_run(args).config
    d = config.distillation
    if not d.teacher or not d.logits:
        missing, example = ("teacher, whose predictions to compute", "teacher=runs/large") if not d.teacher else (
            "logits, the folder to write", "logits=data/large.logits")
        raise ConfigError(f"{args.run_file} lacks distillation.{missing}; e.g. --set distillation.{example}")
    weights = open_teacher(config)
    with open_session(logits_run(config, weights, args.top), info, quiet=True) as session:
        with ProgressBar("logits", "sample") as bar:
            header = compute_logits(
                session, weights, Path(d.logits), top=args.top, block=args.block, temperature=d.temperature,
                advance=bar if session.is_rank_zero else silent,
            )
        size = header.samples * header.record_bytes
        session.logger.log(f"{d.logits}: the {header.top} most likely tokens by {header.teacher} at every position of "
                           f"{header.samples} samples, {size / 1e6:.1f} MB")
    return EXIT_OK
