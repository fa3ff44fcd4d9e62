"""Arguments and output that commands share: verbs with their other names, ``--json``, tables, and what asks first."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from megatron_port.core.config.ranges import local_path
from megatron_port.core.errors import ConfigError
from megatron_port.core.io.logging import trusted

if TYPE_CHECKING:
    from tqdm import tqdm


OTHER_NAMES = {"list": ("ls",), "show": ("inspect",), "rm": ("remove",)}
"""Verb → what it may be called too. They mean the same in every group: what there is; one of them; remove some."""
SOURCE_HELP = "a run (folder, run file or shipped name), a checkpoint's folder, or a Hugging Face folder"


def add_action(actions: Any, name: str, act: Callable[..., int], **more: Any) -> argparse.ArgumentParser:
    """Add an action to a group, under its other names as well; ``act(args)`` is what the command then runs."""
    parser: argparse.ArgumentParser = actions.add_parser(name, aliases=OTHER_NAMES.get(name, ()), **more)
    parser.set_defaults(act=act)
    return parser


def weights_folder(name: str) -> Path:
    """Return the folder that ``SOURCE_HELP`` describes. Raises ConfigError."""
    from megatron_port.cli.run_names import run_folder_of

    path = local_path(name)
    return path if path.is_dir() else run_folder_of(name)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead, for scripts")


def print_json(value: Any) -> None:
    """Print a value as JSON; what JSON does not know as its text, so a loss that is not finite as ``NaN``."""
    print(json.dumps(_plain(value), indent=2, default=str, ensure_ascii=False, allow_nan=False), flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def print_table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print rows, the first of them the head, in columns; ``right``: columns of numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [f"{cell:>{w}}" if i in right else f"{cell:<{w}}" for i, (cell, w) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add ``--yes`` of what removes something."""
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def confirm(question: str, *, yes: bool) -> bool:
    """Ask on the terminal; True if it was answered with y. Raises ConfigError: nobody can answer."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(f"{question}: nothing was removed; there is no terminal to confirm on, so give --yes")
    print(f"{question}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    print("nothing was removed", file=sys.stderr)
    return False


# Progress bars of commands: one line on a terminal with the time left, nothing where stderr is a file or a pipe.

class ProgressBar:
    """A bar that is drawn when it is called, and removed when it is closed. It has no colours, so NO_COLOR holds.

    Args:
        what: what is under way, e.g. ``verify``.
        unit: of what is counted; ``B``: bytes, shown with decimal prefixes.
        stream: stderr, unless another is given; nothing is drawn where it is no terminal.
    """

    def __init__(self, what: str, unit: str = "B", *, stream: TextIO | None = None) -> None:
        self._stream = trusted(stream or sys.stderr)
        self._what, self._unit = what, unit
        self._bar: tqdm[Any] | None = None
        self.live = bool(self._stream.isatty())

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` is done; ``note``: words behind the bar."""
        if not self.live:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, desc=self._what, unit=self._unit, unit_scale=self._unit == "B", file=self._stream,
                dynamic_ncols=True, leave=False, mininterval=0.2,
            )
        if self._bar.total != total:
            self._bar.total = total
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def print(self, text: str) -> None:
        """Print a line on stdout, above the bar."""
        if self._bar is not None:
            self._bar.clear()
        print(text, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
