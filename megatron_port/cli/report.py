"""``report RUN…``: one HTML file about a run, or several side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_port.cli.arguments import add_json, print_json
from megatron_port.core.config.ranges import expanded, local_path
from megatron_port.core.errors import EXIT_OK, EnvironmentFault, PortError

if TYPE_CHECKING:
    from megatron_port.tools.report.run_data import RunData
    from megatron_port.tools.report.run_report import Comparison


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "report", help="one HTML file about a run, or several side by side",
        description="Curves, speed, goodput, ranks, events, configuration and environment of runs, as one file that "
        "needs no network. It can be made while a run trains.",
    )
    parser.add_argument("runs", type=expanded, nargs="+", metavar="RUN",
                        help="a run's folder, its run file, or the name of a shipped "
                        "one, e.g. runs/quickstart")
    parser.add_argument("--out", type=local_path, help="the file (default: report.html in the first run's folder)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the report; 0. ConfigError: a folder is not a run's."""
    from megatron_port.cli.run_names import run_folder_of
    from megatron_port.core.io.files import write_bytes
    from megatron_port.tools.report.run_data import read_run
    from megatron_port.tools.report.run_report import render

    folders = [run_folder_of(name) for name in args.runs]
    runs = [read_run(folder) for folder in folders]
    for one in runs:
        if one.left_out:
            print(f"note: {one.name}: {one.note()}", file=sys.stderr)
    compared = predictions(runs)
    if args.json:
        print_json([{
            "name": one.name, "folder": one.folder, "facts": one.facts, "outcome": one.outcome,
            "environment": one.environment, "events": one.events, "validation": one.validation,
            "predicted": [asdict(c) for c in compared.get(one.name, ())],
        } for one in runs])
        return EXIT_OK
    out = args.out or folders[0] / "report.html"
    html = render(runs, comparisons=compared)
    try:
        write_bytes(out, html.encode())
    except OSError as error:
        raise EnvironmentFault(f"{out}: cannot be written ({error.strerror}); name another file with --out") from error
    print(out)
    return EXIT_OK


def predictions(runs: Sequence[RunData]) -> Mapping[str, Sequence[Comparison]]:
    """Return the planner's predictions beside what was measured, by run name, for the runs that it can plan."""
    from megatron_port.tools.plan.compare import compare_run
    from megatron_port.tools.report.run_report import Comparison

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
