"""``report RUN…``: one HTML file about a run, or several side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_port.errors import EXIT_OK, EnvironmentFault, PortError
from megatron_port.plan.compare import compare_run
from megatron_port.runtime.atomic import write_bytes
from megatron_port.telemetry.run_data import RunData, read_run
from megatron_port.telemetry.run_report import Comparison, render


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "report", help="one HTML file about a run, or several side by side",
        description="Curves, speed, goodput, ranks, events, configuration and environment of runs, as one file that "
        "needs no network. It can be made while a run trains.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, e.g. runs/quickstart")
    parser.add_argument("--out", type=Path, help="the file (default: report.html in the first run's folder)")


def run(args: argparse.Namespace) -> int:
    """Write the report; 0. ConfigError: a folder is not a run's."""
    runs = [read_run(folder) for folder in args.runs]
    for one in runs:
        if one.left_out:
            print(f"note: {one.name}: {one.note()}", file=sys.stderr)
    out = args.out or args.runs[0] / "report.html"
    html = render(runs, comparisons=predictions(runs))
    try:
        write_bytes(out, html.encode())
    except OSError as error:
        raise EnvironmentFault(f"{out}: cannot be written ({error.strerror}); name another file with --out") from error
    print(out)
    return EXIT_OK


def predictions(runs: Sequence[RunData]) -> Mapping[str, Sequence[Comparison]]:
    """Return the planner's predictions beside what was measured, by run name, for the runs that it can plan."""
    out: dict[str, Sequence[Comparison]] = {}
    for one in runs:
        try:
            found = compare_run(one.folder)
        except PortError as error:
            print(f"note: {one.name} is not compared with a plan: {error}", file=sys.stderr)
            continue
        except Exception as error:  # a plan is no reason to go without a report
            print(f"note: {one.name} could not be planned: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        measured = found.bytes / 1e9 if found.bytes else None
        out[one.name] = [
            Comparison("time of a step, median", found.plan.seconds, found.seconds, "s"),
            Comparison("model rate of a device", found.plan.model_tflops, found.model_tflops, "TFLOP/s"),
            Comparison("memory of rank 0", found.predicted_bytes / 1e9, measured, "GB"),
            *(Comparison(f"of the step: {name}", seconds, None, "s") for name, seconds in
              found.plan.split.parts().items()),
        ]
    return out
