"""What is tried next. A strategy proposes layouts of a space and is told what came of them."""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import xxhash

from megatron_port.core.config.checks import check
from megatron_port.core.config.dump import leaves, toml_value
from megatron_port.core.config.layout import model_ranks, with_values
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.io.files import write_output
from megatron_port.core.io.typed_json import Natural, Rows, Seconds, read_rows
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_of
from megatron_port.tools.plan.search import (
    FINALISTS,
    NEUTRAL,
    Candidate,
    allowed,
    finalists,
    is_legal,
    legal_chunks,
    options_of,
    search,
    settings_of,
)
from megatron_port.tools.plan.step import plan_step

# The results file of a tuning: one JSON object a line, the first says of what. It is rewritten whole, atomically.

FORMAT = 1
RESULTS_FILE = "results.jsonl"
OK, OUT_OF_MEMORY, FAILED, TIMEOUT = "ok", "oom", "failed", "timeout"
_FREE = (
    "layout.tensor_parallel_size", "layout.pipeline_parallel_size", "layout.virtual_pipeline_size",
    "layout.data_parallel_size", "layout.sequence_parallel", "activations.policy", "layout.zero_stage",
    "layout.pipeline_schedule", "layout.pipeline_split", "batch.micro_batch_size", "cluster.nodes",
)
_OF_NO_MATTER = ("name", "output_dir", "launch.", "telemetry.", "checkpoint.", "watch.", "preflight.", "hardware.",
                 "calibration.")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Trial of one layout."""

    key: str
    world: Natural
    """Devices."""
    parameters: dict[str, Any]
    """``tune.strategies.PARAMETERS``."""
    settings: dict[str, Any]
    """Leaves of the configuration."""
    planned_seconds: float
    planned_bytes: float
    status: str
    """ok | oom | failed | timeout"""
    seconds: float | None = None
    """Measured, of one step: the median; with several starts the median of theirs."""
    spread: float | None = None
    """(largest − smallest) ÷ median of the measured steps; with several starts of the starts' medians."""
    runs: tuple[float, ...] = ()
    """Measured, of one step: the median of each start (``tune.tuner``)."""
    memory_bytes: Natural | None = None
    """As metrics.jsonl has it (rank 0; on a CPU the resident size of its process)."""
    model_tflops: float | None = None
    """Model TFLOP/s of one device."""
    tokens_per_second: float | None = None
    error: str = ""
    command: str = ""
    wall_seconds: float = 0.0
    time: Seconds = 0.0

    @property
    def starts(self) -> tuple[float, ...]:
        """``runs``; of files from before starts were counted the one that there was."""
        return tuple(self.runs) or (() if self.seconds is None else (self.seconds,))


@dataclass(frozen=True, kw_only=True)
class ResultsHead:
    """The first line of the file."""

    format: int = 0
    run: str = ""
    name: str = ""


def key_of(settings: dict[str, Any], world: int) -> str:
    """Return 12 hex digits that name a layout on so many devices."""
    text = json.dumps([world, {k: settings[k] for k in sorted(settings)}], default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run_key(config: RunConfig, steps: int) -> str:
    """Return 16 hex digits of what comparable trials share: the run but for its layout, and the trial's steps."""
    kept = {
        name: toml_value(value) for name, value in leaves(config)
        if name not in _FREE and not name.startswith(_OF_NO_MATTER)
    }
    return hashlib.sha256(json.dumps([steps, kept], sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class Results:
    """Results of the trials so far."""

    path: Path
    run: str
    name: str
    trials: dict[str, Trial] = field(default_factory=dict)
    left_out: str = ""
    """Lines of the file that no tuning writes, in words; they are gone once a trial is added."""

    @classmethod
    def open(cls, folder: Path, config: RunConfig, steps: int, *, fresh: bool = False) -> Results:
        """Return the results of ``folder``, empty where there are none; the folder is made.

        Raises:
            ConfigError: they are of another run, or of trials of another length.
            EnvironmentFault: the folder cannot be made or read.
        """
        path, run = folder / RESULTS_FILE, run_key(config, steps)
        out = cls(path, run, config.name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            heads = Rows[ResultsHead](path.name) if fresh else read_rows(path, ResultsHead)
        except OSError as error:
            raise EnvironmentFault(f"{path}: {error.strerror or error}") from None
        head = next((row for row in heads.rows if row.format or row.run), None)
        if head is None and not heads.rows and not heads.bad:
            return out
        if head is None or head.format != FORMAT or head.run != run:
            whose = repr(head.name) if head is not None and head.name else "another run"
            raise ConfigError(
                f"{path} holds trials of {whose} that cannot be compared with this one's "
                "(another model, batch, precision, engine, or number of steps); give another --out, or --fresh to "
                "begin anew"
            )
        read = read_rows(path, Trial, skip=1)
        out.trials, out.left_out = {trial.key: trial for trial in read.rows}, read.note()
        return out

    def add(self, trial: Trial) -> None:
        """Keep a trial: the file is written under a temporary name, synced and renamed. Raises EnvironmentFault."""
        self.trials[trial.key] = trial
        rows: list[dict[str, Any]] = [{"format": FORMAT, "run": self.run, "name": self.name}]
        rows += [asdict(t) for t in self.trials.values()]
        write_output(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def ranked(self) -> list[Trial]:
        """Return the trials that worked, by tokens per second and device, best first."""
        good = [t for t in self.trials.values() if t.status == OK and t.model_tflops is not None]
        return sorted(good, key=lambda t: -(t.model_tflops or 0.0))


# Every legal layout of a run, planned: what a tuner may choose from.

@dataclass(frozen=True)
class Space:
    """Search space: a run and its layouts."""

    config: RunConfig
    machine: Machine
    world: int
    """Devices of the run as it is."""
    candidates: tuple[Candidate, ...]
    """All of them; those that fit first, by planned tokens per second and device."""
    _index: dict[tuple[Any, ...], Candidate] = field(default_factory=dict, repr=False)

    @property
    def fitting(self) -> list[Candidate]:
        """Return those that fit, best first."""
        return [c for c in self.candidates if c.fits(self.machine)]

    def settings(self, candidate: Candidate) -> dict[str, Any]:
        """Return dotted leaf → value of a candidate's layout."""
        return settings_of(self.config, candidate.case)

    def legal(self, candidate: Candidate) -> bool:
        """Return whether training would take it (the engine's own limits included)."""
        return is_legal(self.config, candidate.case)

    def exact(self, candidate: Candidate) -> Candidate:
        """Return the candidate with its pipeline simulated instead of in closed form."""
        return replace(candidate, step=plan_step(candidate.case, self.machine))

    def find(self, values: dict[str, Any]) -> Candidate | None:
        """Return the candidate with these ``parameters``; None: there is none."""
        if not self._index:
            self._index.update({tuple(parameters(c.case).values()): c for c in self.candidates})
        return self._index.get(tuple(values[name] for name in PARAMETERS))


PARAMETERS = (
    "world", "tp", "pp", "vp", "ep", "sequence_parallel", "micro_batch", "recompute", "zero_stage", "schedule",
    "cp", "cp_method", "cp_order",
)
"""Free parameters of a layout; dp and accumulation follow."""


def parameters(case: Case) -> dict[str, Any]:
    """Return the free parameters of a layout."""
    return {name: getattr(case, name) for name in PARAMETERS}


def make_space(config: RunConfig, *, world_size: int | None = None, nodes: Sequence[int] = ()) -> Space:
    """Plan every legal layout of a run.

    ``world_size``: devices; None: what the run says. ``nodes``: numbers of nodes to try instead.

    Raises:
        ConfigError: the run is not legal, its cluster says too little to plan, or the numbers make no sense.
    """
    if any(n < 1 for n in nodes):
        raise ConfigError(f"--nodes {' '.join(map(str, nodes))}: each number must be at least 1")
    if world_size is not None and nodes:
        raise ConfigError("--nproc is for one machine; leave --nodes out")
    worlds = tuple(sorted({n * config.cluster.gpus_per_node for n in nodes})) or (_world(config, world_size),)
    many = nodes[0] if nodes else config.cluster.nodes if world_size is None else 0
    config = with_values(config, {"cluster.nodes": many, "layout.data_parallel_size": 0})
    neutral = with_values(config, {**NEUTRAL, "layout.context_parallel_size": 1})
    if legal_chunks(config.layout.pipeline_schedule, 2) and not legal_chunks(config.layout.pipeline_schedule, 1):
        neutral = with_values(neutral, {"layout.pipeline_schedule": "1f1b"})  # zb-v has two chunks a stage, always
    check(neutral, world_size=1)
    machine = machine_of(config)
    base, _ = case_of(neutral, 1)
    options = replace(
        options_of(with_values(neutral, {"cluster.nodes": many}), replace(base, dp=max(worlds))), worlds=worlds,
        schedules=allowed(neutral, "layout.pipeline_schedule", config),
        zero=allowed(neutral, "layout.zero_stage", config),
    )
    found = search(base, machine, options, keep_unfit=True)
    found.sort(key=lambda c: (not c.fits(machine), -c.step.model_tflops))
    return Space(config=config, machine=machine, world=max(worlds), candidates=tuple(found))


def _world(config: RunConfig, world_size: int | None) -> int:
    """Return the devices to tune for. Raises ConfigError where their number is open."""
    if world_size is not None:
        if world_size < 1:
            raise ConfigError(f"--nproc {world_size}: at least 1")
        return world_size
    layout = config.layout
    if not config.cluster.nodes and not layout.data_parallel_size:
        raise ConfigError(
            "nothing says how many devices to tune for; give --nodes N (or cluster.nodes), or --nproc N for N "
            "processes on this machine"
        )
    told = model_ranks(layout) * layout.data_parallel_size
    return config.cluster.nodes * config.cluster.gpus_per_node or told


def best_legal(space: Space, count: int) -> list[Candidate]:
    """The ``count`` best that fit and that training takes, best first: of more that are best in closed form, those that
    are when simulated with the schedule that training runs."""
    return finalists(space.fitting, space.machine, count=max(count, FINALISTS), legal=space.legal)[:count]


STRATEGIES = ("model", "random", "deephyper")


class Strategy(Protocol):
    """Strategy that chooses layouts."""

    def ask(self) -> Candidate | None:
        """Return the next layout to measure, each at most once; None: there is none left."""

    def tell(self, candidate: Candidate, trial: Trial) -> None:
        """Take the result of a trial; also of trials that an earlier start has made."""


class ByModel:
    """Strategy: the best by the planner, best first."""

    def __init__(self, space: Space, count: int) -> None:
        self.left = best_legal(space, count)

    def ask(self) -> Candidate | None:
        return self.left.pop(0) if self.left else None

    def tell(self, candidate: Candidate, trial: Trial) -> None:
        self.left = [c for c in self.left if c.case != candidate.case]


class AtRandom:
    """Strategy: any that fits, drawn without regard to the planner's times, as the baseline for the others."""

    def __init__(self, space: Space, seed: int) -> None:
        self.space = space
        self.left = list(space.fitting)
        random.Random(seed).shuffle(self.left)

    def ask(self) -> Candidate | None:
        while self.left:
            candidate = self.left.pop()
            if self.space.legal(candidate):
                return self.space.exact(candidate)
        return None

    def tell(self, candidate: Candidate, trial: Trial) -> None:
        self.left = [c for c in self.left if c.case != candidate.case]


class ByDeepHyper:
    """Centralised Bayesian optimisation by DeepHyper, as in the Frontier paper: a surrogate over the parameters of the
    layouts, UCB, failures told as "F". A point that is no legal layout, or one that does not fit, is told as a failure
    and costs no trial, because the planner knows; the nearest layout that fits is measured in its place.
    """

    def __init__(self, space: Space, seed: int, folder: str) -> None:
        self.space = space
        values = {
            name: sorted({parameters(c.case)[name] for c in space.candidates}, key=str if name in _WORDS else None)
            for name in PARAMETERS
        }
        self.free = [name for name in PARAMETERS if len(values[name]) > 1]
        self.fixed = {name: v[0] for name, v in values.items() if len(v) == 1}
        self.asked: set[Case] = set()
        self.search = _deephyper(values, self.free, seed, folder, self._first()) if self.free else None

    def _first(self) -> list[dict[str, Any]]:
        best = best_legal(self.space, 1)
        return [self._point(c) for c in best]

    def _point(self, candidate: Candidate) -> dict[str, Any]:
        found = parameters(candidate.case)
        return {name: _told(found[name]) for name in self.free}

    def ask(self) -> Candidate | None:
        if self.search is None:
            left = [c for c in self.space.fitting if c.case not in self.asked and self.space.legal(c)]
            self.asked |= {c.case for c in left[:1]}
            return self.space.exact(left[0]) if left else None
        point = self.search.ask(1)[0]
        values = {**self.fixed, **{name: _taken(point[name]) for name in self.free}}
        candidate = self.space.find(values)
        if candidate is None or not self.space.legal(candidate):
            self.search.tell([(point, "F_illegal")])
        elif not candidate.fits(self.space.machine):
            self.search.tell([(point, "F_memory")])
        elif candidate.case not in self.asked:
            return self._take(candidate)
        # Most points of the product of all values are no layout: the one beside them is measured.
        near = sorted(self.space.fitting, key=lambda c: _apart(parameters(c.case), values))
        return next((self._take(c) for c in near if c.case not in self.asked and self.space.legal(c)), None)

    def _take(self, candidate: Candidate) -> Candidate:
        self.asked.add(candidate.case)
        return self.space.exact(candidate)

    def tell(self, candidate: Candidate, trial: Trial) -> None:
        self.asked.add(candidate.case)
        if self.search is not None:
            good = trial.status == OK and trial.model_tflops is not None
            self.search.tell([(self._point(candidate), trial.model_tflops if good else f"F_{trial.status}")])


_WORDS = ("recompute", "schedule", "cp_method", "cp_order")


def _apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return how far two layouts' parameters are apart: octaves of sizes, 1 for each switch or word."""
    out = 0.0
    for name, value in one.items():
        if name in _WORDS or name in ("sequence_parallel", "zero_stage"):
            out += value != other[name]
        else:
            out += abs(math.log2(value / other[name]))
    return out


def _told(value: Any) -> Any:
    """Return a value as DeepHyper takes it: its spaces have no booleans."""
    return int(value) if isinstance(value, bool) else value


def _taken(value: Any) -> Any:
    """Return the inverse of :func:`_told`; numpy's numbers become Python's."""
    return str(value) if isinstance(value, str) else int(value)


def _deephyper(
    values: dict[str, list[Any]], free: list[str], seed: int, folder: str, first: list[dict[str, Any]]
) -> Any:
    """Return a search object. Raises EnvironmentFault, with what to install, where DeepHyper is not there."""
    try:
        from deephyper.hpo import CBO, HpProblem
    except ImportError as error:
        raise EnvironmentFault(
            f"--strategy deephyper needs DeepHyper, which cannot be imported here ({error}); install it with "
            "`pip install 'megatron_port[tune]'` (or `pip install deephyper==0.13.2`), or use --strategy model"
        ) from None
    problem = HpProblem()
    for name in free:
        problem.add_hyperparameter([_told(v) for v in values[name]], name)
    # Its default acquisition optimizer (a genetic algorithm) takes 10 to 30 s a question. Points that are no layout are
    # failures to it, more of them than the hundred after which it would give up.
    if not 0 <= seed < 2**32:  # numpy takes no others
        seed = xxhash.xxh32_intdigest(str(seed).encode())
    return CBO(
        problem, random_state=seed, log_dir=folder, verbose=0, surrogate_model="ET", acq_func="UCB",
        acq_optimizer="sampling", initial_points=first, checkpoint_history_to_csv=False,
        acq_optimizer_kwargs={"max_total_failures": -1, "n_points": 2000},
    )


def make_strategy(name: str, space: Space, *, count: int, seed: int, folder: str) -> Strategy:
    """Return a strategy by its name."""
    if name == "deephyper":
        return ByDeepHyper(space, seed, folder)
    return AtRandom(space, seed) if name == "random" else ByModel(space, count)


# Importance of a tuning's free parameters: the share of the rates' variance that each explains by itself.
#
# Omega squared of a one-way analysis of variance (Hays 1963): between the values of a parameter, less what chance would
# give, over all. Trials that failed or ran out of memory count with a rate of 0, as the tuner was told (arXiv
# 2312.12705,
# section IV): a choice that makes half of the layouts fail is the one that matters most.

LEAST_TRIALS = 8
"""Fewer say nothing."""


def importance(rows: Sequence[tuple[Mapping[str, Hashable], float]]) -> dict[str, float]:
    """Return parameter → share of the variance of the rates, largest first.

    ``rows``: (parameters, rate, 0 where there is none) of each trial. Parameters of one value are left out, and those
    with a value for nearly every trial: their groups have no spread to compare with.
    """
    rates = [rate for _, rate in rows]
    if len(rows) < LEAST_TRIALS or len(set(rates)) == 1:
        return {}
    middle = statistics.fmean(rates)
    total = sum((rate - middle) ** 2 for rate in rates)
    out = {}
    for name in rows[0][0]:
        groups: dict[Hashable, list[float]] = defaultdict(list)
        for parameters, rate in rows:
            groups[parameters[name]].append(rate)
        inside = len(rows) - len(groups)  # degrees of freedom
        if len(groups) == 1 or 2 * len(groups) > len(rows):
            continue
        between = sum(len(group) * (statistics.fmean(group) - middle) ** 2 for group in groups.values())
        noise = (total - between) / inside
        out[name] = max(0.0, (between - (len(groups) - 1) * noise) / (total + noise))
    return dict(sorted(out.items(), key=lambda item: -item[1]))


def importance_line(rows: Sequence[tuple[Mapping[str, Hashable], float]]) -> str:
    """Return the shares in one line; empty where too few trials say anything."""
    found = importance(rows)
    shares = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in found.items())
    return f"rates' variance by each choice alone ({len(rows)} trials, failures as 0): {shares}" if found else ""
