"""Which of the fastest layouts is the fastest: they are started again until their spreads are apart.

One start's steps spread less than two starts differ (other nodes' traffic, clocks, memory that lies elsewhere), so a
layout that is near the best is measured anew, in turn with it. A layout's interval is from its fastest to its slowest
start, or with one start the spread of its steps. The best is decided where no other's interval reaches into its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_port.tools.tune.results import OK, Results, Trial

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
