"""A whole training run beside its steps: failures, checkpoints, queue limits, energy, cost, carbon, and a loss.

Goodput follows Daly (Future Generation Computer Systems 22, 2006): with M seconds between failures, a blocking part of
c seconds a checkpoint, an interval of τ seconds and R seconds to start again, the share of time that is progress is

    1 / ((1 + c/τ) · (1 + (τ/2 + R) / M))      the interval that is best  τ = √(2 c M) − c

A loss is that of published scaling curves, L = E + A/N^α + B/D^β of N parameters and D tokens, with the ranges of the
runs that they were fitted to: outside them a number is an extrapolation, and is printed as one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_port.core.errors import ConfigError

FAILURE_HOURS = 16384 * 54 * 24 / 419
"""Device hours between unexpected interruptions: 419 in 54 days on 16,384 H100 (Llama 3, arXiv 2407.21783, table 5)."""
START_SECONDS = 600.0
"""From a failure to the next step: found, started, a checkpoint read; an assumption, `--restart-minutes` changes it."""
OVERHEAD = 1.2
"""Energy of a site over that of its computers (PUE); an assumption."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A scaling curve: L = E + A/N^α + B/D^β."""

    name: str
    floor: float
    a: float
    alpha: float
    b: float
    beta: float
    parameters: tuple[float, float]
    tokens: tuple[float, float]

    def loss(self, parameters: float, tokens: float) -> float:
        """Loss in nats per token."""
        return float(self.floor + self.a / parameters**self.alpha + self.b / tokens**self.beta)

    def tokens_to(self, loss: float, parameters: float) -> float:
        """Tokens after which a model of this size has the loss; infinity: it never has."""
        left = loss - self.floor - self.a / parameters**self.alpha
        return float((self.b / left) ** (1 / self.beta)) if left > 0 else math.inf

    def in_range(self, parameters: float, tokens: float) -> bool:
        """Whether runs like this were among those that the curve was fitted to."""
        return self.parameters[0] <= parameters <= self.parameters[1] and self.tokens[0] <= tokens <= self.tokens[1]


CURVES = (
    Curve(name="Hoffmann et al., arXiv 2203.15556, approach 3", floor=1.69, a=406.4, alpha=0.34, b=410.7, beta=0.28,
        parameters=(44e6, 16e9), tokens=(5e9, 500e9)),
    Curve(name="Besiroglu et al., arXiv 2404.10102, the same runs", floor=1.8172, a=482.01, alpha=0.3478, b=2085.43,
        beta=0.3658, parameters=(44e6, 16e9), tokens=(5e9, 500e9)),
)
"""Both of text in English with tokenizers of their own: losses of another corpus differ."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Assumptions of a campaign: failures, checkpoints, queues, prices."""

    failure_hours: float = FAILURE_HOURS
    """Device hours between failures that end a job."""
    restart_s: float = START_SECONDS
    checkpoint_s: float = 60.0
    """For which a checkpoint holds up training."""
    interval_s: float = 0.0
    """Between checkpoints; 0: the best."""
    wall_hours: float = 0.0
    """Longest job of the queue; 0: no limit."""
    wait_hours: float = 0.0
    """In the queue before each job."""
    power_w: float = 0.0
    """Watts of a device with its share of the node; 0: not known."""
    overhead: float = OVERHEAD
    price: float = 0.0
    """Price of a device hour."""
    carbon: float = 0.0
    """Grams of CO2 a kWh."""

    def check(self) -> None:
        """Raise ConfigError for what no campaign has."""
        bad = [f"{name} is {value}" for name, value in vars(self).items() if not (value >= 0 and math.isfinite(value))]
        if self.failure_hours <= 0:
            bad.append(f"failure_hours is {self.failure_hours}; it is above 0")
        if self.overhead < 1:
            bad.append(f"overhead is {self.overhead}; a site takes at least what its computers take, 1")
        if bad:
            raise ConfigError([f"campaign: {text}" for text in bad])


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """Hours, jobs, energy and cost of a number of steps."""

    train_hours: float
    """Steps alone."""
    interval_s: float
    goodput: float
    """Share of the devices' time that is progress, queues left out."""
    failures: float
    """Expected over the campaign."""
    jobs: int
    days: float
    """From the first submission to the last step, queues included."""
    device_hours: float
    energy_mwh: float
    cost: float
    carbon_t: float


def best_interval(checkpoint_s: float, between_failures_s: float) -> float:
    """Seconds between checkpoints that lose least (Daly's first order), not less than a checkpoint takes."""
    return max(math.sqrt(2 * checkpoint_s * between_failures_s) - checkpoint_s, checkpoint_s, 1e-9)


def goodput(interval_s: float, checkpoint_s: float, restart_s: float, between_failures_s: float) -> float:
    """Share of the time that is progress."""
    lost = (interval_s / 2 + restart_s) / between_failures_s
    return 1 / ((1 + checkpoint_s / interval_s) * (1 + lost))


def campaign(seconds: float, devices: int, terms: Terms) -> Campaign:
    """Return hours, jobs, energy and cost of ``seconds`` of steps on ``devices``.

    Raises:
        ConfigError: terms that make no sense, or jobs too short to make progress.
    """
    terms.check()
    between = terms.failure_hours * 3600 / devices
    interval = terms.interval_s or best_interval(terms.checkpoint_s, between)
    share = goodput(interval, terms.checkpoint_s, terms.restart_s, between)
    jobs = 1
    if terms.wall_hours:
        useful = (terms.wall_hours * 3600 - terms.restart_s - terms.checkpoint_s) * share  # started, saved at its end
        if useful <= 0:
            raise ConfigError(
                f"campaign: jobs of {terms.wall_hours:g} h make no progress with {terms.restart_s / 60:g} minutes to "
                "start; ask for a longer class of the queue"
            )
        jobs = math.ceil(seconds / useful)
    held = seconds / share + jobs * (terms.restart_s + terms.checkpoint_s)
    device_hours = held / 3600 * devices
    energy = device_hours * terms.power_w * terms.overhead / 1e6
    return Campaign(
        train_hours=seconds / 3600, interval_s=interval, goodput=seconds / held,
        failures=held / between, jobs=jobs, days=(held + jobs * terms.wait_hours * 3600) / 86400,
        device_hours=device_hours, energy_mwh=energy, cost=device_hours * terms.price,
        carbon_t=energy * 1000 * terms.carbon / 1e6,
    )


def longest_job(nodes: float, queue_nodes: tuple[int, ...], queue_hours: tuple[float, ...]) -> float:
    """Hours of the queue's class that takes so many nodes; 0: no class is known, or none takes them."""
    return next((hours for most, hours in zip(queue_nodes, queue_hours) if nodes <= most), 0.0)


def straggler(step_s: float, compute_s: float, slow: float) -> float:
    """Seconds of a step with one device that computes ``slow`` times as long: all wait for it in every pass."""
    return step_s + (slow - 1) * compute_s
