"""The search itself: ask a strategy, measure, keep, tell; and what is said at its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_port.core.config.dump import leaves, toml_value
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.loader import Loaded, load
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.launchers import current_job
from megatron_port.core.dist.processes import born, process_space
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.io.files import write_output
from megatron_port.core.io.typed_json import Natural, WrongContent, read_typed
from megatron_port.core.io.work import Advance, silent
from megatron_port.tools.plan.search import Candidate
from megatron_port.tools.tune.importance import importance_line
from megatron_port.tools.tune.results import OK, Results, Trial, key_of
from megatron_port.tools.tune.strategies import Space, Strategy

# Which of the fastest layouts is the fastest: they are started again until their spreads are apart.
#
# One start's steps spread less than two starts differ (other nodes' traffic, clocks, memory that lies elsewhere), so a
# layout that is near the best is measured anew, in turn with it. A layout's interval is from its fastest to its slowest
# start, or with one start the spread of its steps. The best is decided where no other's interval reaches into its own.

MOST_NEAR = 3
"""Layouts that are measured again beside the best, at most."""


@dataclass(frozen=True)
class Decision:
    """The best of the trials, and those that its measurements do not tell from it."""

    best: Trial | None
    near: tuple[Trial, ...] = ()

    @property
    def words(self) -> str:
        """Return the decision in a line; empty where there was nothing to decide."""
        if self.best is None or self.best.seconds is None:
            return ""
        count = len(self.best.starts)
        starts = f"{count} start{'s' if count > 1 else ''}"
        if not self.near:
            return f"decided: no other layout reaches the best one's {starts}"
        low, high = interval(self.best)
        others = f"{len(self.near)} other layout{'s' if len(self.near) > 1 else ''}"
        return (
            f"not decided: {others} within the spread of the best ({low:.4g} to {high:.4g} s in {starts}); more "
            "--repeats or --steps may tell"
        )


def interval(trial: Trial) -> tuple[float, float]:
    """Seconds of a step of the fastest and of the slowest start; of one start, of its steps."""
    assert trial.seconds is not None
    if len(trial.starts) > 1:
        return min(trial.starts), max(trial.starts)
    half = trial.seconds * (trial.spread or 0.0) / 2
    return trial.seconds - half, trial.seconds + half


def merged(trial: Trial, again: Trial) -> Trial:
    """A layout's trial with one more start; what failed once is no layout to train with."""
    if again.status != OK or again.seconds is None or trial.seconds is None or trial.model_tflops is None:
        return replace(again, runs=trial.starts, error=f"worked {len(trial.starts)} times, then: {again.error}")
    runs = (*trial.starts, again.seconds)
    seconds = statistics.median(runs)
    share = trial.seconds / seconds
    return replace(
        trial, runs=runs, seconds=seconds, spread=(max(runs) - min(runs)) / seconds,
        model_tflops=trial.model_tflops * share,
        tokens_per_second=None if trial.tokens_per_second is None else trial.tokens_per_second * share,
        memory_bytes=max(trial.memory_bytes or 0, again.memory_bytes or 0) or None,
        wall_seconds=trial.wall_seconds + again.wall_seconds, time=again.time,
    )


def near_best(results: Results) -> list[Trial]:
    """The best and those whose interval reaches into its own, by model FLOP/s of a device, so that numbers of devices
    compare."""
    ranked = results.ranked()
    if not ranked:
        return []

    def rates(trial: Trial) -> tuple[float, float]:
        assert trial.seconds is not None and trial.model_tflops is not None
        low, high = interval(trial)
        return trial.model_tflops * trial.seconds / high, trial.model_tflops * trial.seconds / max(low, 1e-12)

    least = rates(ranked[0])[0]
    return [ranked[0], *(t for t in ranked[1:] if rates(t)[1] >= least)]


def repeat_near_best(
    results: Results, measure: Callable[[Trial], Trial | None], *, repeats: int, say: Callable[[str], None],
) -> Decision:
    """Start the best and those near it again, in turn, up to ``repeats`` times each, until they are apart.

    ``measure``: one more start of a trial's layout; None: it cannot be made any more.
    """
    while True:
        near = near_best(results)
        if len(near) < 2:
            break
        again = [t for t in near[: 1 + MOST_NEAR] if len(t.starts) < repeats]
        if not again:
            break
        for trial in again:
            found = measure(trial)
            if found is None:
                return _decision(results)
            now = merged(trial, found)
            results.add(now)
            took = "" if found.seconds is None else f"{found.seconds:.4g} s per step"
            what = took or f"{found.status}: {found.error[:200]}"
            say(f"start {len(trial.starts) + 1} of {now.key}: {what}")
    return _decision(results)


def _decision(results: Results) -> Decision:
    near = near_best(results)
    return Decision(near[0], tuple(near[1:])) if near else Decision(None)


Measure = Callable[[Candidate, dict[str, Any]], Trial]


@dataclass(frozen=True)
class Found:
    """Result of a tuning."""

    best: Trial | None
    measured: int
    """Trials of this start; others came from the results file."""
    decision: Decision = field(default_factory=lambda: Decision(None))
    """Measurement that tells the best from the others."""


def tune(
    space: Space, strategy: Strategy, results: Results, measure: Measure, *, count: int, say: Callable[[str], None],
    advance: Advance = silent, repeats: int = 1,
) -> Found:
    """Try up to ``count`` layouts, those in ``results`` counted, and keep each as soon as it is known; then start the
    best ones up to ``repeats`` times, until they are told apart.

    ``advance`` is called with the trials that are done.
    """
    known = {t.key: t for t in results.trials.values()}
    by_key = {key_of(space.settings(c), c.case.world): c for c in space.candidates} if known else {}
    for key, trial in known.items():
        if key in by_key:
            strategy.tell(by_key[key], trial)
    done, measured = sum(key in by_key for key in known), 0
    if done:
        say(f"{done} trial{'s' if done > 1 else ''} of an earlier start found in {results.path}")
    while done < count:
        advance(done, count)
        candidate = strategy.ask()
        if candidate is None:
            say("no layout is left to try")
            break
        settings = space.settings(candidate)
        trial = measure(candidate, settings)
        by_key[trial.key] = candidate
        results.add(trial)
        strategy.tell(candidate, trial)
        done, measured = done + 1, measured + 1
        say(f"{done}/{count} {line_of(trial, candidate.case.label())}")

    def again(trial: Trial) -> Trial | None:
        candidate = by_key.get(trial.key)
        return None if candidate is None else measure(candidate, space.settings(candidate))

    decision = repeat_near_best(results, again, repeats=repeats, say=say)
    return Found(best=decision.best, measured=measured, decision=decision)


def line_of(trial: Trial, label: str) -> str:
    """Return one trial as a line."""
    if trial.seconds is None:
        return f"{label}: {trial.status}: {trial.error[:200]}"
    return (
        f"{label}: {trial.seconds:.4g} s per step (planned {trial.planned_seconds:.4g}), "
        f"{trial.model_tflops:.4g} model TFLOP/s per device"
    )


def label_of(trial: Trial) -> str:
    """Return a trial's layout in one short line."""
    p = trial.parameters
    dp = trial.world // (p["tp"] * p["pp"])
    words = [f"tp {p['tp']}" + ("+sp" if p["sequence_parallel"] else ""), f"pp {p['pp']}"]
    words += [f"vp {p['vp']}"] if p["vp"] > 1 else []
    words += [f"dp {dp}", f"micro-batch {p['micro_batch']}", f"recompute {p['recompute']}", f"ZeRO-{p['zero_stage']}"]
    return ", ".join([*words, *([p["schedule"]] if p["pp"] > 1 else [])])


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's ρ of (planned, measured); None below three pairs or without spread. Ties get the mean rank."""
    if len(pairs) < 3:
        return None

    def ranks(values: list[float]) -> list[float]:
        return [sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]

    try:
        return statistics.correlation(ranks([p for p, _ in pairs]), ranks([m for _, m in pairs]))
    except statistics.StatisticsError:  # one of them is constant
        return None


def render(results: Results) -> str:
    """Return the table of all trials, best first, then what failed and why."""
    good, lines = results.ranked(), []
    if good:
        lines.append("measured, best first:")
        lines.append(f"{'':>4} {'s/step':>10} {'planned':>10} {'error':>8} {'TFLOP/s':>9} {'GB':>7}  layout")
    for i, t in enumerate(good, 1):
        assert t.seconds is not None
        memory = f"{t.memory_bytes / 1e9:7.2f}" if t.memory_bytes else f"{'':>7}"
        lines.append(
            f"{i:>4} {t.seconds:>10.4g} {t.planned_seconds:>10.4g} {t.planned_seconds / t.seconds - 1:>+8.1%} "
            f"{t.model_tflops:>9.4g} {memory}  {t.world} devices: {label_of(t)}" + _starts(t)
        )
    rho = rank_correlation([(t.planned_seconds * t.world, (t.seconds or 0) * t.world) for t in good])
    if rho is not None:
        lines.append(f"order by the model against the measured one: Spearman's rho {rho:.2f} over {len(good)} layouts")
    rows = [(t.parameters, t.model_tflops or 0.0) for t in results.trials.values()]
    lines += filter(None, [importance_line(rows)])
    failed = [t for t in results.trials.values() if t.seconds is None]
    lines += [f"{t.status}: {t.world} devices: {label_of(t)}: {t.error[:200]}" for t in failed]
    return "\n".join(lines)


def _starts(trial: Trial) -> str:
    """Number of starts of a layout, and the range of its step times."""
    if len(trial.starts) < 2:
        return ""
    low, high = interval(trial)
    return f"; {len(trial.starts)} starts, {low:.4g} to {high:.4g} s"


def write_winner(loaded: Loaded, trial: Trial, path: Path) -> RunConfig:
    """Write a run file that extends the tuned one by what the winner (and --set) changed; return its configuration.

    Raises EnvironmentFault.
    """
    base = os.path.abspath(loaded.files[-1])
    plain = dict(leaves(load(base).config))
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in trial.settings.items()}
    config = with_values(loaded.config, settings)
    tables: dict[str, list[str]] = {}
    for name, value in leaves(config):
        if plain[name] != value:
            table, _, key = name.rpartition(".")
            tables.setdefault(table, []).append(f"{key} = {toml_value(value)}")
    text = f"# Written by megatron-port tune: {label_of(trial)}.\nextends = {toml_value(base)}\n"
    text += "".join(f"{line}\n" for line in tables.pop("", []))
    text += "".join(f"\n[{table}]\n" + "".join(f"{line}\n" for line in rows) for table, rows in tables.items())
    write_output(path, text)
    return load(str(path)).config


# One tuning in a folder at a time, and no trial of a killed one beside its own: the folder's ``running.json``.
#
# It names the tuning's process and the trial's, each by number and birth. A tuning that was killed leaves it, and the
# trial that it had started still runs; the next one ends that before it measures.

LEASE_FILE = "running.json"
GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RunningTuning:
    """Contents of ``running.json``: processes as (number, birth)."""

    tune: tuple[Natural, Natural]
    trial: tuple[Natural, Natural]
    space: str = ""
    job: str = ""


@contextlib.contextmanager
def hold_folder(folder: Path, say: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Hold the folder while trials are measured; gives what is told a trial's session. Raises as :func:`claim`."""
    folder.mkdir(parents=True, exist_ok=True)
    if left := claim(folder):
        say(left)
    note(folder, 0)
    try:
        yield partial(note, folder)
    finally:
        forget(folder)


def note(folder: Path, trial: int) -> None:
    """Write down that this process measures in ``folder``, by a trial whose session has that number (0: none yet)."""
    me = os.getpid()
    write_output(folder / LEASE_FILE, json.dumps({
        "space": process_space(), "job": _job(), "tune": [me, born(me)],
        "trial": [trial, born(trial) if trial else 0],
    }))


def _job() -> str:
    job = current_job()
    return "" if job is None else job.id


def forget(folder: Path) -> None:
    """Remove the note."""
    (folder / LEASE_FILE).unlink(missing_ok=True)


def claim(folder: Path) -> str:
    """End what a killed tuning left running in ``folder``; return a line about it, empty where there was nothing.

    Raises:
        EnvironmentFault: another tuning is at work there, or may be, on a machine that this process cannot see.
    """
    path = folder / LEASE_FILE
    try:
        known = read_typed(path, RunningTuning)
    except (OSError, WrongContent):
        return ""
    tune, trial = known.tune, known.trial
    if known.space != process_space():
        if known.job != _job():
            return ""  # the end of its job ended it
        raise EnvironmentFault(
            f"{path}: a tuning on another machine, or in another container, may still measure in this folder; give "
            "another --out, or remove that file when it has ended"
        )
    if tune[0] != os.getpid() and tune[1] and born(tune[0]) == tune[1]:
        raise EnvironmentFault(f"process {tune[0]} tunes in {folder} now; wait for it, or give another --out")
    ended = _end_session(trial[0], trial[1])
    forget(folder)
    processes = f"{ended} process{'es' if ended > 1 else ''}"
    return f"ended the trial that a killed tuning had left running ({processes})" if ended else ""


def _end_session(leader: int, start: int) -> int:
    """End the processes of a session, first by asking; return how many there were. None of them is another's: a number
    is not used again for a process while a session or group has it."""
    if not start or born(leader) not in (start, 0):
        return 0
    found = _members(leader, start)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _members(leader, start):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        until = time.monotonic() + GRACE_S
        while _members(leader, start) and time.monotonic() < until:
            time.sleep(0.05)
    return len(found)


def _members(session: int, start: int) -> list[int]:
    """Processes of a session that are not older than its leader was, and have not ended."""
    out = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX" and int(fields[3]) == session and int(fields[19]) >= start:
            out.append(int(entry.parent.name))
    return out
