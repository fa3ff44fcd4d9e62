"""``runs list | show | rm``: the runs of a folder, what became of each, and how to be rid of one."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.cli.arguments import add_action, add_json, add_yes, confirm, print_json, print_table
from megatron_port.core.config.ranges import expanded, local_path
from megatron_port.core.errors import EXIT_OK, ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from megatron_port.run.run_state import RunState

_MARKS = ("metrics.jsonl", "run.json", "config.toml")
"""Files of which a run's folder has one at least."""


def add_parser(subparsers: Any) -> None:
    """Declare the command and its actions."""
    parser = subparsers.add_parser("runs", help="list, show and remove runs")
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|rm")
    listed = add_action(actions, "list", _list, help="the runs of a folder, and what became of each")
    listed.add_argument("directory", nargs="?", type=local_path, default=Path("runs"), help="default: runs")
    add_json(listed)
    shown = add_action(actions, "show", _show, help="one run: its state, its numbers and its files")
    shown.add_argument("run", type=expanded, metavar="RUN",
                       help="its folder, its run file, or the name of a shipped one")
    add_json(shown)
    removed = add_action(actions, "rm", _remove, help="remove runs with their checkpoints")
    removed.add_argument("run", type=expanded, nargs="+", metavar="RUN",
                         help="their folders, run files, or names of shipped ones")
    add_yes(removed)


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MARKS)


def _list(args: argparse.Namespace) -> int:
    if not args.directory.is_dir():
        raise ConfigError(f"{args.directory}: no such folder; give the one with your runs")
    from megatron_port.run.run_state import run_state

    states = [run_state(f) for f in sorted(args.directory.iterdir()) if f.is_dir() and _is_run(f)]
    for state in states:
        if state.left_out:
            print(f"note: {state.folder}: {state.left_out}", file=sys.stderr)
    if args.json:
        print_json([state.body() for state in states])
        return EXIT_OK
    rows: list[tuple[str, ...]] = [("run", "state", "step", "of", "loss", "validation", "last line")]
    rows += [(s.folder.name, s.status, *_numbers(s)) for s in states]
    print_table(rows, right=(2, 3, 4, 5))
    return EXIT_OK


def _numbers(state: RunState) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.4f}"

    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.time)) if state.time else ""
    return (f"{state.step:,}", f"{state.steps:,}" if state.steps else "", number(state.loss),
            number(state.validation_loss), when)


def _show(args: argparse.Namespace) -> int:
    from megatron_port.cli.run_names import run_folder_of
    from megatron_port.run.run_state import run_state

    folder = run_folder_of(args.run)
    state = run_state(folder)
    if args.json:
        print_json(state.body())
        return EXIT_OK
    for name, value in state.body().items():
        if value not in ("", None):
            print(f"{name.replace('_', ' '):<16} {value}")
    print(f"{'next':<16} {state.next_step()}")
    return EXIT_OK


def _remove(args: argparse.Namespace) -> int:
    """Remove runs: each folder is renamed first, so that nothing reads a part of it."""
    from megatron_port.cli.run_names import run_folder_of
    from megatron_port.run.lease import refuse_if_held

    folders = [run_folder_of(name) for name in args.run]
    for folder in folders:
        if folder.is_symlink() or not _is_run(folder):
            raise ConfigError(f"{folder}: not the folder of a run ({', '.join(_MARKS)}: none is there); nothing was "
                              "removed")
        refuse_if_held(folder)
    sizes = ", ".join(f"{folder} ({_bytes(folder) / 1e6:,.1f} MB)" for folder in folders)
    if not confirm(f"remove {sizes}, checkpoints too", yes=args.yes):
        return EXIT_OK
    for folder in folders:
        gone = folder.with_name(f".{folder.name}.removed-{os.getpid()}.tmp")
        try:
            folder.rename(gone)
            shutil.rmtree(gone)
        except OSError as error:
            raise EnvironmentFault(f"{folder}: cannot be removed ({error.strerror or error})") from error
        print(f"removed {folder}")
    return EXIT_OK


def _bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
