"""Share of a run's time that is progress where devices fail: the job queued again, or ranks replaced inside it.

Failures come at random, one in M seconds of the job's devices. Four formulas:

* Work in intervals of τ seconds, of which a failure loses the one that it strikes: x / (eˣ − 1) of the time is kept,
  x = τ/M. With e^(−R/M), for R seconds to begin again that may fail as well, it is Daly's complete model (Future
  Generation Computer Systems 22, 2006, equation 20): goodput = τ / (M · e^(R/M) · (e^((τ+c)/M) − 1)).
* A job of at most U seconds that its m-th loss ends, one loss in L seconds: it runs U·P(N < m) + m·L·P(N > m) seconds
  on average, and P(N ≥ m) of them are ended, N a Poisson number of mean U/L. Queued again: m = 1, L = M. Recovered
  inside the job: m = spares + 1, L between losses of nodes; the other failures it survives.
* Recovered from the copies, a failure costs an interval of copies, the seconds v until a copy is with the neighbour
  (e^(−v/M) of the time is kept), and q seconds to recover. Back to a checkpoint goes a run whose node and neighbour are
  lost together (a stated share of the losses of nodes, and by chance while a lost node's copy is not yet in the shared
  file system: 2·q/L of them over the number of nodes), and one that is queued again, as no spare is left. As a copy in
  that file system is a checkpoint too, it loses a = S − S²·(1 − e^(−τ/S)) / τ seconds: its interval of checkpoints may
  have begun at a loss of a node that was survived, one in S seconds.
* Elastic, a run without a spare gives up a replica, whose other nodes are then spares: its rate falls by the replica's
  share of the nodes for U less the mean time of the m-th, then the (m + nodes of a replica)-th loss, and so forth.

Assumed: a spare does not fail while it waits, a new job has all its spares again, and fewer replicas fail as often.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_port.core.errors import ConfigError

FAILURE_HOURS = 16384 * 54 * 24 / 419
"""Device hours between unexpected interruptions: 419 in 54 days on 16,384 H100 (Llama 3, arXiv 2407.21783, table 5)."""
NODE_SHARE = 1 - (54 + 35 + 7 + 2) / 419
"""Share of them that take a node: of the same table all but software (54), the network's switches and cables (35),
NCCL's timeouts (7) and dependencies (2), after which the same nodes serve."""
RECOVER_SECONDS = 150.0
"""From a failure to the next step inside the job, 4,800 devices (FlashRecovery, arXiv 2509.03047)."""
MOST_SPARES = 64


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Recovery inside a job (docs/recovery.md) of a run on so many nodes."""

    nodes: int
    copy_s: float
    """Seconds between copies of the state."""
    late_s: float = 0.0
    """Seconds until a copy is with the neighbour."""
    slower: float = 0.0
    """Share of a step that copies add to it."""
    recover_s: float = RECOVER_SECONDS
    spares: int = 0
    node_share: float = NODE_SHARE
    """Share of the failures that take a node; after the others the same nodes serve."""
    pair_share: float = 0.0
    """Share of the losses of nodes that take a neighbour as well; none is published."""
    replica_nodes: int = 0
    """Nodes of the replica that is given up where no spare is left; 0: the job is queued again."""

    def check(self) -> None:
        """Raise ConfigError for numbers that no run has."""
        bad = [f"{name} is {value}; it is 0 or above" for name, value in vars(self).items() if not value >= 0]
        bad += [f"{name} is {getattr(self, name)}; a share is at most 1" for name in ("node_share", "pair_share")
                if getattr(self, name) > 1]
        if self.spares > MOST_SPARES:
            bad.append(f"spares is {self.spares}; at most {MOST_SPARES} are planned")
        if bad:
            raise ConfigError([f"campaign: {text}" for text in bad])


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of a run that both ways share."""

    interval_s: float
    """Between checkpoints."""
    checkpoint_s: float
    """For which one holds up training."""
    restart_s: float
    """To start a job."""
    between_s: float
    """Between failures."""
    most_s: float = math.inf
    """For which a job trains at most."""

    @property
    def whole_s(self) -> float:
        """Seconds of an interval with its checkpoint."""
        return self.interval_s + self.checkpoint_s


@dataclass(frozen=True)
class Job:
    """Mean job of a run."""

    seconds: float
    """For which it trains, start and last save left out."""
    ended: float
    """Share of the jobs that a loss ends."""


@dataclass(frozen=True)
class Outcome:
    """Result of one way to deal with failures."""

    pace: Pace
    job: Job
    progress: float
    """Share of a job's seconds that are progress, in seconds of steps without copies."""

    @property
    def start_s(self) -> float:
        """Seconds to start a job, failed starts included."""
        return self.pace.between_s * math.expm1(self.pace.restart_s / self.pace.between_s)

    @property
    def goodput(self) -> float:
        """Share of the time for which nodes are held that is progress."""
        if math.isinf(self.job.seconds):
            return self.progress
        held = self.job.seconds + self.start_s + (1 - self.job.ended) * self.pace.checkpoint_s
        return self.job.seconds * self.progress / held


def kept(failures: float) -> float:
    """Share of the time that is kept where a failure loses its interval, ``failures`` per interval."""
    return failures / math.expm1(failures) if failures > 1e-9 else 1.0


def checkpoint_age(interval_s: float, rate: float) -> float:
    """Mean seconds since a checkpoint, of which one comes every ``interval_s`` and ``rate`` a second at random."""
    x = interval_s * rate
    return interval_s * (1 + math.expm1(-x) / x) / x if x > 1e-4 else interval_s / 2


def best_interval(checkpoint_s: float, between_failures_s: float) -> float:
    """Seconds between checkpoints that lose least (Daly's first order), not less than a checkpoint takes."""
    return max(math.sqrt(2 * checkpoint_s * between_failures_s) - checkpoint_s, checkpoint_s, 1e-9)


def job_of(most_s: float, between_s: float, losses: int) -> Job:
    """The mean job of at most ``most_s`` seconds that its ``losses``-th loss ends, one in ``between_s``."""
    if math.isinf(between_s) or math.isinf(most_s):
        return Job(min(most_s, losses * between_s), float(between_s < most_s))
    mean = most_s / between_s

    def at_most(n: int) -> float:
        return math.fsum(math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(n + 1))

    survived = at_most(losses - 1)
    return Job(most_s * survived + losses * between_s * max(1 - at_most(losses), 0.0), max(1 - survived, 0.0))


def queued_again(pace: Pace) -> Outcome:
    """Outcome where each failure ends the job, and the next one begins at the last checkpoint."""
    progress = pace.interval_s / pace.whole_s * kept(pace.whole_s / pace.between_s)
    return Outcome(pace, job_of(pace.most_s, pace.between_s, 1), progress)


def recovered(pace: Pace, recovery: Recovery) -> Outcome:
    """Outcome where ranks are replaced inside the job. An elastic run has a finite ``pace.most_s``."""
    alone = recovery.nodes == 1  # no neighbour has its copies
    if alone:
        recovery = replace(recovery, spares=0, pair_share=0.0, replica_nodes=0)
    node_s = pace.between_s / recovery.node_share if recovery.node_share else math.inf
    each_s = node_s / (1 + recovery.pair_share)  # a pair is two losses
    if 0 < recovery.replica_nodes < recovery.nodes:
        job, rate = Job(pace.most_s, 0.0), _rate_left(recovery, pace.most_s, each_s)
    else:
        job, rate = job_of(pace.most_s, each_s, recovery.spares + 1), 1.0
    pairs = (recovery.pair_share + 2 * recovery.recover_s / node_s / recovery.nodes) / node_s * (not alone)
    ends = job.ended / job.seconds
    survived = max(1 / pace.between_s - pairs - ends, 0.0)
    age = checkpoint_age(pace.whole_s, max(1 / node_s - pairs - ends, 0.0))
    return Outcome(
        pace, job, rate / (1 + recovery.slower) * pace.interval_s / pace.whole_s
        * kept(survived * recovery.copy_s) * math.exp(-survived * recovery.late_s)
        * math.exp(-(survived + pairs) * recovery.recover_s - (pairs + ends) * age),
    )


def _rate_left(recovery: Recovery, most_s: float, between_s: float) -> float:
    """Mean rate of an elastic run over a job, of that with all its replicas. The last one stays."""
    given_up = (
        1 - job_of(most_s, between_s, recovery.spares + 1 + i * recovery.replica_nodes).seconds / most_s
        for i in range(recovery.nodes // recovery.replica_nodes - 1)
    )
    return 1 - recovery.replica_nodes / recovery.nodes * math.fsum(given_up)


def with_spares(pace: Pace, recovery: Recovery) -> list[float]:
    """Progress per second of all held nodes with 0, 1, … spares that wait beside them, two beyond the best."""
    out: list[float] = []
    for spares in range(MOST_SPARES + 1):
        found = recovered(pace, replace(recovery, spares=spares))
        out.append(found.goodput * recovery.nodes / (recovery.nodes + spares))
        if len(out) > 2 and max(out[-2:]) < max(out[:-2]):
            break
    return out
