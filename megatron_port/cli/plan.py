"""``plan``: does a run fit its cluster, how fast is it, how long does it take, what near it is better. No GPU.

Exit 0 when it fits, 2 when it does not or cannot be planned.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_port.cli.main import add_run_options, load_run
from megatron_port.cli.plan_campaign import add_campaign_options, campaign_text
from megatron_port.core.config.urls import local_path
from megatron_port.core.errors import EXIT_CONFIG, EXIT_OK, ConfigError
from megatron_port.core.io.atomic import write_output

if TYPE_CHECKING:
    from megatron_port.core.config.loader import Loaded
    from megatron_port.core.config.schema import RunConfig


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("plan", help="does a run fit, how fast is it, what would be better")
    add_run_options(parser)
    parser.add_argument("--nodes", type=int, metavar="N", help="same as --set cluster.nodes=N; dp follows")
    parser.add_argument("--tokens", type=float, metavar="T", help="training budget, e.g. 300e9 (default: by the steps)")
    parser.add_argument("--explain", action="store_true", help="also print the arithmetic behind the numbers")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--report", type=local_path, metavar="FILE.html",
                        help="also write the plan as one page with pictures: layouts, memory, time, pipeline, scaling, "
                        "sensitivity")
    parser.add_argument("--no-search", action="store_true", help="plan this layout alone, look for no better one")
    add_campaign_options(parser)
    parser.add_argument(
        "--fractional", action="store_true",
        help="plan also where global_batch_size does not divide by micro-batch x dp, with accumulation rounded up",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan; return 0 if the run fits, 2 if not. Raises ConfigError for what cannot be planned."""
    from megatron_port.ext.corpora.document_length import with_document_length
    from megatron_port.tools.plan.assumed import with_assumed_hardware
    from megatron_port.tools.plan.page import report_page
    from megatron_port.tools.plan.text import as_json, explain, render
    from megatron_port.tools.plan.verdict import make_plan

    if args.nodes is not None:
        if args.nodes < 1:
            raise ConfigError(f"--nodes {args.nodes}: a plan needs at least 1 node")
        args.overrides = [*args.overrides, f"cluster.nodes={args.nodes}", "layout.data_parallel_size=0"]
    config, assumed = with_nodes(load_run(args))
    config, described = with_assumed_hardware(with_document_length(config))
    plan = make_plan(config, tokens=args.tokens, fractional=args.fractional, neighbours=not args.no_search)
    for line in filter(None, (assumed, described)):
        print(line, file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(as_json(plan), indent=2))
    else:
        print(render(plan))
        if args.explain:
            print(explain(plan))
        for line in campaign_text(args, config, plan):
            print(line)
    if args.report is not None:
        write_output(args.report, report_page(config, plan))
        if not args.json:
            print(f"report    {args.report}")
    return EXIT_OK if plan.fits else EXIT_CONFIG


def with_nodes(loaded: Loaded) -> tuple[RunConfig, str]:
    """Return the run, on the fewest nodes that hold one replica where their number is open, and a line about it.

    A number of nodes or replicas that was given, 0 as well, is left as it is.
    """
    from megatron_port.core.config.layout import model_ranks
    from megatron_port.core.config.loader import DEFAULT

    config = loaded.config
    layout, per_node = config.layout, config.cluster.gpus_per_node
    if config.cluster.nodes or layout.data_parallel_size or loaded.origins["cluster.nodes"] != DEFAULT or per_node < 1:
        return config, ""
    nodes = max(1, -(-model_ranks(layout) // per_node))
    what = f"{nodes} node{'s' if nodes > 1 else ''} of {per_node} devices"
    return (replace(config, cluster=replace(config.cluster, nodes=nodes)),
            f"planned for {what}: the run says neither cluster.nodes nor data_parallel_size; --nodes N plans for N")
