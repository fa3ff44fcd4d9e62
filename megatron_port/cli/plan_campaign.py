"""``plan --campaign`` and ``plan --buy``: what a whole run takes, and what a budget trains."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from megatron_port.core.errors import ConfigError

if TYPE_CHECKING:
    from megatron_port.core.config.schema import RunConfig
    from megatron_port.tools.plan.verdict import Plan

CAMPAIGN_TERMS = (
    ("failure-hours", "failure_hours", "H", "device hours between failures that end a job (default: Llama 3's)"),
    ("restart-minutes", "restart_s", "M", "from a failure to the next step (default: 10)"),
    ("checkpoint-seconds", "checkpoint_s", "S",
     "for which a checkpoint holds up training (default: its copy to the host)"),
    ("queue-wait-hours", "wait_hours", "H", "in the queue before each job (default: 0)"),
    ("carbon", "carbon", "G", "grams of CO2 a kWh"),
    ("site-overhead", "overhead", "F", "energy of the site over that of its computers (default: 1.2)"),
)
"""(option, field of ``plan.campaign.Terms``, metavar, help)."""


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
    for option, field, metavar, words in CAMPAIGN_TERMS:
        group.add_argument(f"--{option}", type=float, dest=f"term_{field}", metavar=metavar, help=words)


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


def campaign_text(args: argparse.Namespace, config: RunConfig, plan: Plan) -> list[str]:
    """The lines of a campaign and of what a budget buys, as far as they are asked for."""
    from megatron_port.tools.plan.campaign_text import campaign_lines, offer_lines, offers

    prices, out = _prices(args.price), []
    given = {
        field: getattr(args, f"term_{field}") for _, field, _, _ in CAMPAIGN_TERMS
        if getattr(args, f"term_{field}") is not None
    }
    if "restart_s" in given:
        given["restart_s"] *= 60
    if "" in prices:
        given["price"] = prices[""]
    if args.campaign or args.loss:
        out += campaign_lines(plan, given, args.loss)
    if args.buy:
        named = {name: price for name, price in prices.items() if name}
        out += offer_lines(offers(config, plan.budget.tokens, args.buy, named, args.most_days), args.buy)
    return out
