"""``plan``: does a run fit its cluster, how fast is it, how long does it take, what near it is better. No GPU.

Exit 0 when it fits, 2 when it does not or cannot be planned.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_port.cli.main import add_run_options, load_run
from megatron_port.core.config.ranges import local_path
from megatron_port.core.errors import EXIT_CONFIG, EXIT_OK, ConfigError
from megatron_port.core.io.files import write_output

if TYPE_CHECKING:
    from megatron_port.core.config.loader import Loaded
    from megatron_port.core.config.schema import RunConfig
    from megatron_port.tools.plan.text import Plan


# ``plan --campaign`` and ``plan --buy``: what a whole run takes, and what a budget trains.

CAMPAIGN_TERMS = (
    ("failure-hours", "failure_hours", "H", "device hours between failures (default: Llama 3's)"),
    ("restart-minutes", "restart_s", "M", "from a failure to the next step (default: 10)"),
    ("checkpoint-minutes", "interval_s", "M", "between checkpoints, in whole steps (default: those that lose least)"),
    ("checkpoint-seconds", "checkpoint_s", "S",
     "for which a checkpoint holds up training (default: its copy to the host)"),
    ("queue-wait-hours", "wait_hours", "H", "in the queue before each job (default: 0)"),
    ("carbon", "carbon", "G", "grams of CO2 a kWh"),
    ("site-overhead", "overhead", "F", "energy of the site over that of its computers (default: 1.2)"),
)
"""(option, field of ``plan.campaign.Terms``, metavar, help)."""
RECOVERY_TERMS = (
    ("copy-steps", "copy_steps", "K", "steps between copies of the state (default: checkpoint.memory_interval, else "
     "those that lose least)"),
    ("recover-seconds", "recover_s", "S", "from a failure to the next step inside the job (default: 150)"),
    ("spare-nodes", "spares", "N", "nodes that wait beside the run's (default: launch.spare_nodes)"),
    ("node-share", "node_share", "F", "share of the failures that take a node (default: Llama 3's, 0.77)"),
    ("pair-share", "pair_share", "F", "share of the lost nodes that take the neighbour as well (default: 0)"),
)
"""Options, fields, units and help of ``plan.campaign.recovery_of``."""


def add_campaign_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that price a whole run: failures, checkpoints, queues, energy."""
    group = parser.add_argument_group("campaign", "failures, checkpoints, queues, energy, cost and loss of a whole run")
    group.add_argument("--campaign", action="store_true", help="also print what becomes of the budget")
    group.add_argument("--loss", type=float, default=0.0, metavar="L",
                       help="also the tokens and days to this loss, nats per token, by published scaling curves")
    group.add_argument("--buy", type=float, default=0.0, metavar="MONEY",
                       help="compare what this buys on the clusters that --price names, with their best layouts")
    group.add_argument("--most-days", type=float, default=0.0, metavar="D", help="leave out offers that take longer")
    group.add_argument("--price", action="append", default=[], metavar="[CLUSTER=]P",
                       help="price of a device hour, of this run's cluster or of the one named")
    for option, field, metavar, words in (*CAMPAIGN_TERMS, *RECOVERY_TERMS):
        kind = int if field in ("copy_steps", "spares") else float
        group.add_argument(f"--{option}", type=kind, dest=f"term_{field}", metavar=metavar, help=words)


def _prices(given: list[str]) -> dict[str, float]:
    """Prices by cluster; "" is the run's own.

    Raises:
        ConfigError: what is no number above 0.
    """
    out = {}
    for text in given:
        name, _, number = text.rpartition("=")
        try:
            out[name.removeprefix("clusters/")] = float(number)
        except ValueError:
            out[name] = -1.0
        if not 0 < out[name.removeprefix("clusters/")] < math.inf:
            raise ConfigError(f"--price {text}: give a number above 0, or CLUSTER=NUMBER, e.g. dgx-h100=2.5")
    return out


def _terms(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what was given of CAMPAIGN_TERMS and of RECOVERY_TERMS, by field.

    Raises ConfigError for what no campaign has.
    """
    from megatron_port.tools.plan.failures import MOST_SPARES

    given = {field: (option, value) for option, field, _, _ in (*CAMPAIGN_TERMS, *RECOVERY_TERMS)
             if (value := getattr(args, f"term_{field}")) is not None}
    limits: dict[str, tuple[float, float, str]] = {
        "overhead": (1.0, math.inf, "a site takes at least what its computers take, 1"),
        "failure_hours": (sys.float_info.min, math.inf, "it is above 0"),
        "node_share": (0.0, 1.0, "a share is at most 1"), "pair_share": (0.0, 1.0, "a share is at most 1"),
        "spares": (0, MOST_SPARES, f"at most {MOST_SPARES} are planned"),
    }
    bad = []
    for field, (option, value) in given.items():
        low, high, why = limits.get(field, (0.0, math.inf, ""))
        if not low <= value <= high or value == math.inf:
            bad.append(f"--{option} {value:g}: {why if value >= 0 and why else 'it is a number of 0 or above'}")
    if bad:
        raise ConfigError(bad)
    of_campaign, of_recovery = (
        {field: given[field][1] for _, field, _, _ in terms if field in given}
        for terms in (CAMPAIGN_TERMS, RECOVERY_TERMS)
    )
    return of_campaign, of_recovery


def campaign_text(args: argparse.Namespace, config: RunConfig, plan: Plan) -> list[str]:
    """The lines of a campaign and of what a budget buys, as far as they are asked for."""
    from megatron_port.tools.plan.campaign import campaign_lines, offer_lines, offers

    prices, out = _prices(args.price), []
    given, asked = _terms(args)
    for field in {"restart_s", "interval_s"} & given.keys():
        given[field] *= 60
    asked = {"spares": config.launch.spare_nodes, "elastic": float(config.layout.elastic), **asked}
    if "" in prices:
        given["price"] = prices[""]
    if args.campaign or args.loss:
        out += campaign_lines(plan, given, asked, args.loss, config.launch)
    if args.buy:
        named = {name: price for name, price in prices.items() if name}
        out += offer_lines(offers(config, plan.budget.tokens, args.buy, named, args.most_days), args.buy)
    return out


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
    from megatron_port.tools.plan.guard import with_assumed_hardware
    from megatron_port.tools.plan.page import report_page
    from megatron_port.tools.plan.text import as_json, explain, make_plan, render

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
