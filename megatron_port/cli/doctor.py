"""``doctor``: the machine, the versions, the device, the provider of each op and why; what is wrong, with its remedy.

Exit 0 unless something that the run needs is broken (3). ``--strict`` also counts what would work
by a slower path, or by a build at run time. Nothing is changed, and no other process is contacted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict, replace
from typing import Any

from megatron_port.cli.doctor_machine import CheckResult, launcher, machine, packages, render, strictly, tools
from megatron_port.cli.main import add_run_options, load_run
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import EXIT_ENVIRONMENT, EXIT_OK


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("doctor", help="print the machine, versions and providers, and what is wrong")
    add_run_options(parser, optional=True)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--strict", action="store_true",
        help="also exit 3 for what works only by a slower path or a build at run time: an op that the run needs and "
        "that is not prebuilt, an installed extension that does not load, a GPU that is not used",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "rocm"),
        help="check what is installed for this device, of which none need be visible here (an image, a login node)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report for the run file given, or for the defaults; return 0, or 3 if something needed is broken."""
    config = load_run(args).config
    if args.device:
        config = replace(config, backend=replace(config.backend, device=args.device))
    # Libraries print while they are imported; the report alone goes to stdout.
    with contextlib.redirect_stdout(sys.stderr):
        findings = examine(config, installed_only=bool(args.device))
    if args.strict:
        findings = strictly(findings)
    wrong = [f for f in findings if f.status == "wrong"]
    if args.json:
        print(json.dumps({"ok": not wrong, "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        print(render(findings))
    return EXIT_ENVIRONMENT if wrong else EXIT_OK


def examine(config: RunConfig, *, installed_only: bool = False) -> list[CheckResult]:
    """Return the results of all checks, in the order in which they are printed.

    ``installed_only``: a GPU of the kind ``backend.device`` need not be visible.
    """
    findings = [*machine(), *packages(config), *tools()]
    if any(f.name == "torch" and f.status == "wrong" for f in findings):
        return findings
    from megatron_port.cli import doctor_backend as backend

    findings += launcher()
    device, found = backend.devices(config, installed_only=installed_only)
    if config.engine == "deepspeed":
        findings += backend.deepspeed(config, device)
    findings += found
    if device is not None:
        findings += backend.own_kernels(config, device)
        findings += backend.providers(config, device)
        findings += backend.extensions(device)
    return findings
