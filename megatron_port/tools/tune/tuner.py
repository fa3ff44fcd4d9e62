"""The search itself: ask a strategy, measure, keep, tell; and what is said at its end."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_port.core.config.dump import leaves, toml_value
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.loader import Loaded, load
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.work import Advance, silent
from megatron_port.core.io.atomic import write_output
from megatron_port.tools.plan.search import Candidate
from megatron_port.tools.tune.importance import importance_line
from megatron_port.tools.tune.results import Results, Trial, key_of
from megatron_port.tools.tune.settle import Decision, interval, repeat_near_best
from megatron_port.tools.tune.space import Space
from megatron_port.tools.tune.strategies import Strategy

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
