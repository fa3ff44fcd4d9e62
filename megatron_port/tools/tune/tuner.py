"""The search itself: ask a strategy, measure, keep, tell; and what is said at its end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
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
from megatron_port.core.errors import EXIT_INTERRUPTED, ConfigError, EnvironmentFault
from megatron_port.core.io.files import write_output
from megatron_port.core.io.logging import Advance, redact, silent
from megatron_port.core.io.typed_json import Natural, WrongContent, read_typed
from megatron_port.ext.telemetry.flops import document_of, model_flops
from megatron_port.ext.telemetry.metrics import FILE_NAME, read_metrics
from megatron_port.run.launchers import current_job
from megatron_port.run.processes import born, process_space
from megatron_port.tools.plan.search import Candidate
from megatron_port.tools.tune.strategies import (
    FAILED,
    OK,
    OUT_OF_MEMORY,
    TIMEOUT,
    Results,
    Space,
    Strategy,
    Trial,
    importance_line,
    key_of,
    parameters,
)

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


# One trial: a few real steps of a layout in processes of its own. What goes wrong there is data, not an error.

_MEMORY = re.compile(
    r"out of memory|OutOfMemory|can't allocate memory|Cannot allocate memory|oom[-_ ]kill|killed by SIGKILL"
    r"|std::bad_alloc|cannot fit", re.IGNORECASE,
)
_KILLED = {-signal.SIGKILL, 128 + signal.SIGKILL}
ERROR_CHARACTERS = 600


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Launcher of ranks: ``--nproc`` on this machine, or srun inside an allocation."""

    nproc: int = 0
    """Processes on this machine; 0: srun."""
    python: str = sys.executable

    def command(self, config: RunConfig, arguments: Sequence[str], world: int) -> list[str]:
        """Return the command that starts ``train`` with ``arguments`` on ``world`` ranks."""
        train = [self.python, "-m", "megatron_port", "train", *arguments]
        if self.nproc:
            return [*train, "--nproc", str(world)]
        cluster = config.cluster
        tasks = min(world, cluster.gpus_per_node)
        words = ["srun", "--export=ALL", "--kill-on-bad-exit=1", f"--nodes={-(-world // cluster.gpus_per_node)}",
                 f"--ntasks={world}", f"--ntasks-per-node={tasks}"]
        words += [f"--cpus-per-task={cluster.cores_per_task}"] if cluster.cores_per_task else []
        return [*words, *cluster.srun_options, *train]


def choose_launcher(nproc: int | None) -> Launcher:
    """Choose the launcher: ``--nproc`` wins; inside an allocation srun. Raises ConfigError where neither is there."""
    if nproc is not None:
        if nproc < 1:
            raise ConfigError(f"--nproc {nproc}: at least 1")
        return Launcher(nproc=nproc)
    if current_job() is not None:
        return Launcher()
    raise ConfigError(
        "nothing to measure on: this is no SLURM allocation (SLURM_JOB_ID is not set) and --nproc is not given; start "
        "it inside an allocation (salloc, sbatch), or give --nproc N, or --plan-only for the model's ranking alone"
    )


def trial_overrides(config: RunConfig, settings: dict[str, Any], *, steps: int, folder: Path, name: str) -> list[str]:
    """Return ``a.b=value`` that make a trial of a run: its layout, a few steps, nothing saved, a folder of its own."""
    warm = config.optimizer.decay_steps or config.training.steps
    fixed: dict[str, Any] = {
        "name": name, "output_dir": str(folder), "training.steps": steps, "training.eval_interval": 0,
        "training.eval_batches": 0, "training.log_interval": 1, "optimizer.decay_steps": max(warm, steps),
        "checkpoint.save_interval": 0, "checkpoint.save_final": False, "checkpoint.resume": "never",
        "batch.rampup_start": 0, "batch.rampup_increment": 0, "batch.rampup_samples": 0, "layout.elastic": False,
        "telemetry.tensorboard": False, "telemetry.replica_check_interval": 0,
    }
    return [f"{k}={toml_value(v)}" for k, v in {**fixed, **settings}.items()]


def run_trial(
    run_file: str, overrides: Sequence[str], config: RunConfig, candidate: Candidate, settings: dict[str, Any], *,
    launcher: Launcher, steps: int, warm_up: int, timeout_s: float, folder: Path,
    note: Callable[[int], None] = lambda session: None,
) -> Trial:
    """Measure one layout.

    ``run_file``, ``overrides``: the run as it was named; ``config``: what they give. ``warm_up``: first steps that do
    not count. ``note``: told the number of the session in which the trial's processes run.

    Raises:
        KeyboardInterrupt: it was interrupted; nothing is known then.
        EnvironmentFault: the launcher is not there.
    """
    world = candidate.case.world
    key = key_of(settings, world)
    trial_overrides_ = trial_overrides(config, settings, steps=steps, folder=folder, name=key)
    arguments = [run_file]
    for text in [*overrides, *trial_overrides_]:
        arguments += ["--set", text]
    command = launcher.command(config, arguments, world)
    log = folder / f"{key}.log"
    metrics = folder / key / FILE_NAME
    folder.mkdir(parents=True, exist_ok=True)
    metrics.unlink(missing_ok=True)
    started = time.monotonic()
    code, timed_out = _run(command, log, timeout_s, note)
    common: dict[str, Any] = {
        "key": key, "world": world, "parameters": parameters(candidate.case), "settings": settings,
        "planned_seconds": candidate.step.seconds, "planned_bytes": candidate.memory.total,
        "command": redact(shlex.join(command)), "wall_seconds": time.monotonic() - started, "time": time.time(),
    }
    text = log.read_text(encoding="utf-8", errors="replace")
    if timed_out:
        return Trial(**common, status=TIMEOUT, error=f"no end within {timeout_s:g} s; {_last_words(text)}")
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        status = OUT_OF_MEMORY if code in _KILLED or _MEMORY.search(text) else FAILED
        return Trial(**common, status=status, error=f"exit {code}: {_last_words(text)}")
    seconds, memory = read_steps(metrics, warm_up)
    if not seconds:
        return Trial(**common, status=FAILED, error=f"exit 0, but {metrics} has no step after the first {warm_up}")
    median = statistics.median(seconds)
    batch = candidate.case.global_batch
    flops = model_flops(config.model, config.fine_tuning, document_of(config.data))
    return Trial(
        **common, status=OK, seconds=median, runs=(median,), spread=(max(seconds) - min(seconds)) / median,
        memory_bytes=memory,
        model_tflops=flops * batch / median / world / 1e12,
        tokens_per_second=batch * config.model.seq_length / median,
    )


def _run(command: Sequence[str], log: Path, timeout_s: float, note: Callable[[int], None]) -> tuple[int, bool]:
    """Return the exit code, and whether the time was over; whatever the command started is gone afterwards. ``note`` is
    told the number of its session."""
    with open(log, "wb") as stream:
        try:
            process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentFault(f"{command[0]} cannot be started: {error.strerror or error}") from None
        try:
            note(process.pid)
            return process.wait(timeout_s), False
        except subprocess.TimeoutExpired:
            return 0, True
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes], grace_s: float = 10.0) -> None:
    """End the process and all of its session: first by asking (srun then ends its tasks), then by force."""
    for number, wait in ((signal.SIGTERM, grace_s), (signal.SIGKILL, grace_s)):
        if process.poll() is None or number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait)


def _last_words(text: str) -> str:
    """Return the first line that contains ``error``, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if re.match(r"(error|\w*(Error|Fault|Exception))\b", line)]
    words = " ".join(lines[errors[0] : errors[0] + 3]) if errors else (lines[-1] if lines else "no output")
    return redact(words)[:ERROR_CHARACTERS]


def read_steps(metrics: Path, warm_up: int) -> tuple[list[float], int | None]:
    """Return a metrics.jsonl's seconds of every step after the first ``warm_up``, and its largest memory (bytes)."""
    seconds: dict[int, float] = {}
    memory: int | None = None
    if not metrics.is_file():
        return [], None
    for record in read_metrics(metrics):
        if "loss" in record and "seconds" in record:
            seconds[int(record["step"])] = float(record["seconds"])
        if "memory_bytes" in record:
            memory = max(memory or 0, int(record["memory_bytes"]))
    return [s for step, s in sorted(seconds.items()) if step > warm_up], memory
